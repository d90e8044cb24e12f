//! The tables of open files that the program's threads have. Usually all threads share one. A thread may have its own
//! (`unshare(CLONE_FILES)`), and the first thread may have ended, while the names in `/proc/self/fd` are those of the
//! first thread.

use super::facts;
use rustix::io::Errno;
use std::fs;
use std::io;
use wire::attach::Socket;

/// `PF_EXITING`, among the flags in a thread's `stat`.
const EXITING: u64 = 4;

/// A table of open files, named by a thread that has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table(usize);

/// All tables but the agent's, at least one; `None` if they cannot be found out. A thread that has ended may be among
/// them, because another thread, which is not listed, may have its table.
pub fn all() -> Option<Vec<Table>> {
    // The program may have mounted another `/proc`, in which these numbers are those of other threads.
    if !host::proc_is_ours() {
        return None;
    }
    facts::tables().filter(|tables| !tables.is_empty()).map(|tables| tables.into_iter().map(Table).collect())
}

/// Whether a thread has begun to end: its files may be closed, and its list of files empty. So this must be asked after
/// the list was read; an earlier answer proves nothing.
pub fn has_ended(thread: usize) -> bool {
    let stat = match fs::read_to_string(format!("/proc/self/task/{thread}/stat")) {
        Ok(stat) => stat,
        Err(e) => return matches!(Errno::from_io_error(&e), Some(Errno::NOENT | Errno::SRCH)),
    };
    // State, parent, group, session, terminal, its group, flags.
    let flags = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().nth(6)?.parse::<u64>().ok());
    flags.is_none_or(|flags| flags & EXITING != 0)
}

impl Table {
    /// See [`has_ended`].
    pub fn has_ended(self) -> bool {
        has_ended(self.0)
    }

    /// The numbers of the open files; `None` if they cannot be listed.
    pub fn numbers(self) -> Option<Vec<usize>> {
        let names = fs::read_dir(format!("/proc/self/task/{}/fd", self.0)).ok()?;
        names.map(|name| name.ok()?.file_name().to_str()?.parse().ok()).collect()
    }

    /// The kinds of sockets, by their descriptors. The error is the reason why they cannot be found out.
    pub fn sockets(self, numbers: &[usize]) -> Result<Vec<Socket>, &'static str> {
        facts::sockets(self.0, numbers)
    }

    /// A path that leads to an open file.
    pub fn path(self, number: usize) -> String {
        format!("/proc/self/task/{}/fd/{number}", self.0)
    }

    /// The flags of an open file, as `fcntl(F_GETFL)` returns them.
    pub fn flags(self, number: usize) -> io::Result<i32> {
        let text = self.text(number)?;
        let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|octal| i32::from_str_radix(octal.trim(), 8).ok());
        flags.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// The kernel's text about an open file.
    pub fn text(self, number: usize) -> io::Result<String> {
        fs::read_to_string(format!("/proc/self/task/{}/fdinfo/{number}", self.0))
    }
}
