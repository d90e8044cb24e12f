//! Giving up rights for good, at the start of a process that needs none.

use rustix::process::{Gid, Resource, Rlimit, Uid, getrlimit, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, set_capabilities, set_no_new_privs,
    set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};
use std::io;

/// Gives up every right beyond those of a plain user: who has the rights to (root) becomes user `uid` and the group of
/// the same number, without other groups; nobody keeps or gets capabilities, also not by executing something. To be
/// called while the process has one thread: the kernel keeps these rights by thread.
///
/// # Errors
/// The kernel refused; the process must not go on then.
pub fn give_up_rights(uid: Option<u32>) -> io::Result<()> {
    set_no_new_privs(true)?;
    clear_ambient_capability_set()?;
    if let Some(uid) = uid {
        let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
        set_thread_groups(&[])?;
        set_thread_res_gid(group, group, group)?;
        set_thread_res_uid(user, user, user)?;
    }
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    let left = capabilities(None)?;
    if left.permitted.is_empty() && left.effective.is_empty() {
        return Ok(());
    }
    Err(io::Error::other("the kernel left us capabilities"))
}

/// Lets this process open as many files as it may.
pub fn raise_open_files_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // With the limit as it is there is just room for less.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// Keeps children from inheriting what open files this process has inherited itself; standard input and output excepted.
pub fn keep_files_from_children() {
    // SAFETY: marks descriptors to be closed at the next exec and touches nothing else.
    let _ = unsafe { libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_gone_for_good() {
        let root = rustix::process::geteuid().is_root();
        // These rights are a thread's own, and go with it.
        let answer = std::thread::spawn(move || {
            give_up_rights(root.then_some(61_999)).unwrap();
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let field = |key: &str| {
                let line = status.lines().find_map(|l| l.strip_prefix(key)).unwrap();
                line.split_ascii_whitespace().map(str::to_owned).collect::<Vec<_>>()
            };
            assert_eq!(field("NoNewPrivs:"), ["1"]);
            for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
                assert_eq!(field(set), ["0000000000000000"], "{set}");
            }
            if root {
                assert_eq!(field("Uid:"), ["61999"; 4]);
                assert_eq!(field("Gid:"), ["61999"; 4]);
                assert!(field("Groups:").is_empty());
                assert!(set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).is_err());
            }
        });
        answer.join().unwrap();
    }
}
