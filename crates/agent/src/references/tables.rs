//! The tables of open files that the program's threads have. Usually all threads share one. A thread may have its own
//! (`unshare(CLONE_FILES)`), and the first thread may have ended, while the names in `/proc/self/fd` are those of the
//! first thread.

use crate::{arena, raw};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// `KCMP_FILES`: compares the tables of open files of two threads.
const FILES: usize = 2;
/// `PF_EXITING`, among the flags in a thread's `stat`.
const EXITING: u64 = 4;
/// `PIDFD_THREAD`, from Linux 6.9 on.
const THREAD: usize = libc::O_EXCL as usize;

/// A table, by a thread that has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table(usize);

/// All tables but the agent's; `None` if the threads cannot be listed.
pub fn all() -> Option<Vec<Table>> {
    let mut found: Vec<Table> = Vec::new();
    let own = arena::is_own_thread().then(|| Table(rustix::thread::gettid().as_raw_nonzero().get() as usize));
    for thread in fs::read_dir("/proc/self/task").ok()? {
        let thread = Table(thread.ok()?.file_name().to_str()?.parse().ok()?);
        let is_known = own.iter().chain(&found).any(|known| known.is_table_of(thread));
        if !is_known && !thread.has_ended() {
            found.push(thread);
        }
    }
    Some(found)
}

impl Table {
    /// Whether two threads have the same table. A kernel that does not tell is taken to say no: the table is then
    /// looked at twice.
    fn is_table_of(self, other: Self) -> bool {
        // SAFETY: compares two numbers of the kernel's.
        self == other || 0 == unsafe { raw::call(libc::SYS_kcmp, [self.0, other.0, FILES, 0, 0, 0]) }
    }

    /// Whether the thread has begun to end: its files may be closed, and the list of them empty. An answer before a
    /// look at the list says nothing, but one after it does.
    pub fn has_ended(self) -> bool {
        let stat = fs::read_to_string(format!("/proc/self/task/{}/stat", self.0)).unwrap_or_default();
        // State, parent, group, session, terminal, its group, flags.
        let flags =
            stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().nth(6)?.parse::<u64>().ok());
        flags.is_none_or(|flags| flags & EXITING != 0)
    }

    /// The numbers of the open files; `None` if they cannot be listed.
    pub fn numbers(self) -> Option<Vec<usize>> {
        let names = fs::read_dir(format!("/proc/self/task/{}/fd", self.0)).ok()?;
        names.map(|name| name.ok()?.file_name().to_str()?.parse().ok()).collect()
    }

    /// Borrows a file of the table. The error is the kernel's error number.
    ///
    /// Only for files whose closing asks nobody, as that of sockets: the borrowed descriptor has to be closed.
    pub fn borrow(self, number: usize) -> Result<OwnedFd, Option<i32>> {
        let table = self.open()?;
        // SAFETY: asks for a copy of a descriptor.
        let borrowed = unsafe { raw::call(libc::SYS_pidfd_getfd, [table.as_raw_fd() as usize, number, 0, 0, 0, 0]) };
        owned(borrowed).ok_or_else(|| raw::error(borrowed))
    }

    /// A descriptor from which files of the table can be borrowed.
    fn open(self) -> Result<OwnedFd, Option<i32>> {
        let flags = if self.0 == std::process::id() as usize { 0 } else { THREAD };
        // SAFETY: names a thread of this process.
        let opened = unsafe { raw::call(libc::SYS_pidfd_open, [self.0, flags, 0, 0, 0, 0]) };
        owned(opened).ok_or_else(|| raw::error(opened))
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

fn owned(answer: raw::Answer) -> Option<OwnedFd> {
    // SAFETY: the kernel has just made this descriptor for the caller, and nobody else owns it.
    raw::error(answer).is_none().then(|| unsafe { OwnedFd::from_raw_fd(answer as i32) })
}
