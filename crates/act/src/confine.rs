//! Giving up rights for good, at the start of a process that needs few or none.

use rustix::fd::OwnedFd;
use rustix::process::{
    DumpableBehavior, Gid, PidfdFlags, Resource, Rlimit, Uid, getppid, getrlimit, pidfd_open, set_dumpable_behavior,
    setrlimit,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, set_capabilities, set_keep_capabilities,
    set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};
use std::io;

/// Gives up every right beyond those of a plain user. Must be called while the process has one thread, because the
/// kernel keeps these rights for each thread.
///
/// - With a `uid`, which takes root, the process becomes this user and the group of the same number, without other
///   groups.
/// - The process keeps no capabilities, and cannot get any by executing a program.
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

/// Marks this process as dumpable again, so that processes of its own user may inspect it by `ptrace` and `/proc`. The
/// kernel clears the mark when a process changes its user. The prover answers only processes that their own user may
/// inspect. No core file is written all the same, because it would contain members' memory.
///
/// # Errors
/// The kernel refused.
pub fn let_own_user_look() -> io::Result<()> {
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    Ok(set_dumpable_behavior(DumpableBehavior::Dumpable)?)
}

/// Gives up all rights as [`give_up_rights`] does, except for those needed to look up the page frames of any process.
///
/// | capability kept | for |
/// |---|---|
/// | `CAP_DAC_READ_SEARCH` | opening any file under `/proc` |
/// | `CAP_SYS_PTRACE` | opening the files of any process there |
/// | `CAP_SYS_ADMIN` | seeing frame numbers in `pagemap` |
///
/// # Errors
/// The kernel refused; the process must not go on then.
pub fn give_up_rights_but_looking(uid: Option<u32>) -> io::Result<()> {
    give_up_rights_but(uid, LOOKING)
}

/// Does `work` without the right to see frame numbers. A `pagemap` that `work` opens shows no frame numbers to any
/// process, not even to one that may see them.
///
/// # Errors
/// The kernel refused.
pub fn without_frame_numbers<T>(work: impl FnOnce() -> T) -> io::Result<T> {
    let all = capabilities(None)?;
    set_capabilities(None, CapabilitySets { effective: all.effective.difference(CapabilitySet::SYS_ADMIN), ..all })?;
    let done = work();
    set_capabilities(None, all)?;
    Ok(done)
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

/// A pidfd of this process's parent, which must have this pid. It is readable once the parent has ended.
///
/// # Errors
/// The parent is no longer process `parent`, or the kernel refused; the process must not go on then.
pub fn parent(parent: u32) -> io::Result<OwnedFd> {
    let pid = getppid().filter(|now| now.as_raw_nonzero().get().cast_unsigned() == parent);
    let pid = pid.ok_or_else(|| io::Error::other("the process that started this one has ended"))?;
    let parent = pidfd_open(pid, PidfdFlags::empty())?;
    // The parent may have ended before the pidfd was opened, and another process may have got its pid.
    if getppid() == Some(pid) {
        Ok(parent)
    } else {
        Err(io::Error::other("the process that started this one has ended"))
    }
}

/// Raises this process's limit of open files to the highest that it may set.
pub fn raise_open_files_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // If this fails, the process can open fewer files, which is no error.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// Keeps children from inheriting files that this process has inherited itself, except for standard input, output and
/// error.
pub fn keep_files_from_children() {
    // SAFETY: the call marks descriptors to be closed at the next exec and touches nothing else.
    let _ = unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_given_up_are_gone_for_good() {
        let root = rustix::process::geteuid().is_root();
        // Rights belong to a thread, so only the thread that gives them up loses them.
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
    fn process_that_only_looks_sees_all_frames_and_changes_nothing() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root has rights to give up");
            return;
        }
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = other.id();
        let answer = std::thread::spawn(move || {
            give_up_rights_but_looking(Some(61_998)).unwrap();
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let field = |key: &str| status.lines().find_map(|l| l.strip_prefix(key)).unwrap().trim().to_owned();
            assert_eq!((field("CapEff:"), field("CapPrm:")), ("0000000000280004".into(), "0000000000280004".into()));
            assert_eq!((field("CapInh:"), field("CapAmb:")), ("0000000000000000".into(), "0000000000000000".into()));
            assert_eq!(field("NoNewPrivs:"), "1");
            let pagemap = host::Pagemap::open(pid).unwrap();
            let range = pagemap.present_ranges(page::HostVirt(0), page::HostVirt((1 << 47) - 4096)).unwrap()[0];
            let mut entries = Vec::new();
            pagemap.read(range.start, 1, &mut entries).unwrap();
            assert!(entries[0].pfn().is_some(), "frames are hidden");
            assert!(std::fs::File::options().write(true).open("/proc/sys/vm/swappiness").is_err());
        });
        let answer = answer.join();
        // These two capabilities cannot be spared. The third can on newer kernels, which accept CAP_SYS_ADMIN in its
        // place where /proc hides no processes.
        for spared in [CapabilitySet::DAC_READ_SEARCH, CapabilitySet::SYS_ADMIN] {
            let look = move || {
                give_up_rights_but(Some(61_998), LOOKING - spared).unwrap();
                let pagemap = host::Pagemap::open(pid).ok()?;
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

    #[test]
    fn page_table_opened_without_the_right_shows_no_frame_numbers() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: frame numbers are shown to root only");
        }
        let something = 0_u8;
        let sees_frame = |pagemap: &host::Pagemap| {
            let mut entries = Vec::new();
            pagemap.read(page::HostVirt(&raw const something as u64), 1, &mut entries).unwrap();
            entries[0].present() && entries[0].pfn().is_some()
        };
        let open = || host::Pagemap::open(std::process::id()).unwrap();
        assert!(!sees_frame(&without_frame_numbers(open).unwrap()));
        assert!(sees_frame(&open()), "the right is given back");
    }
}
