//! Giving up rights for good, at the start of a process that needs none.

use rustix::fd::OwnedFd;
use rustix::process::{Gid, PidfdFlags, Resource, Rlimit, Uid, getppid, getrlimit, pidfd_open, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, set_capabilities, set_keep_capabilities,
    set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
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
        become_user(uid)?;
    }
    keep(CapabilitySet::empty())
}

/// The same, but for the right to look up in which frames the pages of any process lie: to open any file under `/proc`
/// (`CAP_DAC_READ_SEARCH`), of any process (`CAP_SYS_PTRACE`), and to be shown frames in it (`CAP_SYS_ADMIN`).
///
/// # Errors
/// The kernel refused; the process must not go on then.
pub fn give_up_rights_but_looking(uid: Option<u32>) -> io::Result<()> {
    give_up_rights_but(uid, LOOKING)
}

const LOOKING: CapabilitySet =
    CapabilitySet::DAC_READ_SEARCH.union(CapabilitySet::SYS_PTRACE).union(CapabilitySet::SYS_ADMIN);

fn give_up_rights_but(uid: Option<u32>, kept: CapabilitySet) -> io::Result<()> {
    set_no_new_privs(true)?;
    clear_ambient_capability_set()?;
    if let Some(uid) = uid {
        set_keep_capabilities(true)?;
        become_user(uid)?;
        set_keep_capabilities(false)?;
    }
    keep(kept)
}

fn become_user(uid: u32) -> io::Result<()> {
    let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
    set_thread_groups(&[])?;
    set_thread_res_gid(group, group, group)?;
    set_thread_res_uid(user, user, user)?;
    Ok(())
}

fn keep(kept: CapabilitySet) -> io::Result<()> {
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: none })?;
    let left = capabilities(None)?;
    if left.permitted == kept && left.effective == kept && left.inheritable.is_empty() {
        return Ok(());
    }
    Err(io::Error::other("the kernel left us other capabilities"))
}

/// The process that started this one, as a descriptor that is readable from its end on.
///
/// # Errors
/// The parent is no longer process `parent`, or the kernel refused; the process must not go on then.
pub fn parent(parent: u32) -> io::Result<OwnedFd> {
    let pid = getppid().filter(|now| now.as_raw_nonzero().get().cast_unsigned() == parent);
    let pid = pid.ok_or_else(|| io::Error::other("the process that started this one has ended"))?;
    let parent = pidfd_open(pid, PidfdFlags::empty())?;
    // It may have ended since, and the number may be another's.
    if getppid() == Some(pid) {
        Ok(parent)
    } else {
        Err(io::Error::other("the process that started this one has ended"))
    }
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

    #[test]
    fn who_only_looks_sees_frames_of_any_process_and_changes_nothing() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root has rights to give up");
            return;
        }
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = other.id();
        let counts = crate::ReferenceCounts::open();
        let answer = std::thread::spawn(move || {
            give_up_rights_but_looking(Some(61_998)).unwrap();
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let field = |key: &str| status.lines().find_map(|l| l.strip_prefix(key)).unwrap().trim().to_owned();
            assert_eq!((field("CapEff:"), field("CapPrm:")), ("0000000000280004".into(), "0000000000280004".into()));
            assert_eq!((field("CapInh:"), field("CapAmb:")), ("0000000000000000".into(), "0000000000000000".into()));
            assert_eq!(field("NoNewPrivs:"), "1");
            let pagemap = crate::Pagemap::open(pid).unwrap();
            let range = pagemap.present_ranges(page::HostVirt(0), page::HostVirt((1 << 47) - 4096)).unwrap()[0];
            let mut entries = Vec::new();
            pagemap.read(range.start, 1, &mut entries).unwrap();
            assert!(entries[0].pfn().is_some(), "frames are hidden");
            // CAP_SYS_ADMIN stands in for CAP_BPF and CAP_PERFMON; what matters is that what is loaded goes on.
            if let Ok(mut counts) = counts {
                counts.check(&[entries[0].pfn().unwrap()], &mut [crate::Held::Unknown]).unwrap();
            }
            assert!(std::fs::File::options().write(true).open("/proc/sys/vm/swappiness").is_err());
        });
        let answer = answer.join();
        // These cannot be spared; for the third one, newer kernels take CAP_SYS_ADMIN, where /proc hides nobody.
        for spared in [CapabilitySet::DAC_READ_SEARCH, CapabilitySet::SYS_ADMIN] {
            let look = move || {
                give_up_rights_but(Some(61_998), LOOKING - spared).unwrap();
                let pagemap = crate::Pagemap::open(pid).ok()?;
                let range =
                    *pagemap.present_ranges(page::HostVirt(0), page::HostVirt((1 << 47) - 4096)).ok()?.first()?;
                let mut entries = Vec::new();
                pagemap.read(range.start, 1, &mut entries).ok()?;
                entries.first()?.pfn()
            };
            assert_eq!(std::thread::spawn(look).join().unwrap(), None, "without {spared:?}");
        }
        other.kill().unwrap();
        other.wait().unwrap();
        answer.unwrap();
    }
}
