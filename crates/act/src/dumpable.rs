//! Whether a process of root's has forbidden others of its user to inspect it (`prctl(PR_SET_DUMPABLE)`), as
//! `ssh-agent` does.
//!
//! Root's access to `/proc` does not depend on the flag, so no file in `/proc` shows it. To a caller without
//! `CAP_SYS_PTRACE` in effect, the kernel applies users, groups, capabilities and this flag (`ptrace(2)`, "Ptrace
//! access mode checking"). If users, groups and capabilities would allow the access, a refusal shows that the process
//! is not dumpable.

use rustix::process::{Pid, getegid, geteuid};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use std::{fs, io};

/// Whether a process with this process's user and group lets other processes of its user inspect it. `None` if its
/// users or groups differ from this process's, or if it may have capabilities that this process lacks.
///
/// # Errors
/// The process has ended, or the kernel refuses.
pub fn is_dumpable(pid: u32) -> io::Result<Option<bool>> {
    let process = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    let (own, theirs) = (capabilities(None)?, capabilities(Some(process))?);
    if !own.permitted.contains(theirs.permitted) || !has_ids(pid)? {
        return Ok(None);
    }
    let without = own.effective.difference(CapabilitySet::SYS_PTRACE);
    set_capabilities(None, CapabilitySets { effective: without, ..own })?;
    let looked = look(process);
    set_capabilities(None, own)?;
    match looked {
        Ok(()) => Ok(Some(true)),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Ok(Some(false)),
        Err(e) => Err(e),
    }
}

/// Whether all users and groups of a process are this process's effective ones.
fn has_ids(pid: u32) -> io::Result<bool> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let are_all = |key: &str, own: u32| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
        let mut ids = line.split_ascii_whitespace().take(3).peekable();
        ids.peek().is_some() && ids.all(|id| id.parse() == Ok(own))
    };
    Ok(are_all("Uid:", geteuid().as_raw()) && are_all("Gid:", getegid().as_raw()))
}

/// Asks for the address of the process's robust futex list (`get_robust_list`), which the kernel tells only to
/// processes that may inspect this one.
fn look(process: Pid) -> io::Result<()> {
    let (mut head, mut bytes) = (0_usize, 0_usize);
    let pid = process.as_raw_nonzero().get();
    // SAFETY: the kernel writes an address and a length into these two variables, and nothing else.
    let answer = unsafe { libc::syscall(libc::SYS_get_robust_list, pid, &raw mut head, &raw mut bytes) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    #[test]
    fn process_of_root_that_hides_itself_is_told_from_others() {
        if !geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        for (flag, shown) in [(0, false), (1, true)] {
            let hides = format!(
                "import ctypes, sys; ctypes.CDLL(None).prctl(4, {flag}, 0, 0, 0); print(flush=True); sys.stdin.read()"
            );
            let mut command = Command::new("python3");
            let mut child = command.args(["-c", &hides]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
            let before = capabilities(None).unwrap();
            let found = is_dumpable(child.id()).unwrap();
            assert_eq!((found, capabilities(None).unwrap()), (Some(shown), before));
            drop(child.stdin.take());
            child.wait().unwrap();
            assert!(is_dumpable(child.id()).is_err(), "it has ended");
        }
        let mut other =
            Command::new("setpriv").args(["--reuid=65534", "--clear-groups", "sleep", "600"]).spawn().unwrap();
        while std::fs::read_to_string(format!("/proc/{}/comm", other.id())).unwrap().trim() != "sleep" {
            std::thread::yield_now();
        }
        assert_eq!(is_dumpable(other.id()).unwrap(), None, "it is another user's");
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
