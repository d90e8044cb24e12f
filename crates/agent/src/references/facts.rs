//! Facts about the process's open files that the kernel tells only by system calls.
//!
//! In a running process to which the agent was attached, `pagefold-attach` makes these calls in the agent's place:
//! default filters of containers forbid them (`kcmp`, `pidfd_getfd`, `statmount`). If there is no answer, nothing is
//! folded.

use crate::world;
use wire::attach::{ASKED_MOST, Question, Socket};

/// The calls, as the agent makes them in a process with hooks.
mod own {
    use crate::references::tables;
    use crate::{arena, raw};
    use host::SocketKind;
    use rustix::io::Errno;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::{fs, io};
    use wire::attach::Socket;

    /// `KCMP_FILES`: compares the tables of open files of two threads.
    const FILES: usize = 2;
    /// `PIDFD_THREAD`, from Linux 6.9 on.
    const THREAD: usize = libc::O_EXCL as usize;
    /// The reason, on older kernels, when sockets are in the own table of a thread.
    const OWN_TABLE: &str = "a thread has open files of its own, or the first thread has ended, and Linux 6.9 or newer is needed to look at its sockets";

    pub fn tables() -> Option<Vec<usize>> {
        let own = arena::is_own_thread().then(|| rustix::thread::gettid().as_raw_nonzero().get() as usize);
        let number = |thread: io::Result<fs::DirEntry>| thread.ok()?.file_name().to_str()?.parse().ok();
        let threads: Option<Vec<usize>> = fs::read_dir("/proc/self/task").ok()?.map(number).collect();
        // The first thread stays in the list when it has ended. Others leave it.
        let first = std::process::id() as usize;
        let threads = threads?.into_iter().filter(|thread| *thread != first || !tables::has_ended(first));
        Some(host::one_of_each_table(threads, own, have_one_table))
    }

    fn have_one_table(one: usize, other: usize) -> bool {
        // SAFETY: compares two numbers of the kernel's.
        0 == unsafe { raw::call(libc::SYS_kcmp, [one, other, FILES, 0, 0, 0]) }
    }

    pub fn sockets(thread: usize, numbers: &[usize]) -> Result<Vec<Socket>, &'static str> {
        let look = |number: &usize| match borrow(thread, *number) {
            Ok(file) => Ok(match SocketKind::of(file) {
                Ok(SocketKind { family, transformed }) => Socket::Open { family: family.into(), transformed },
                // The descriptor has been given to another file by now.
                Err(Errno::NOTSOCK) => Socket::Closed,
                Err(_) => Socket::Unknown,
            }),
            Err(Some(libc::EBADF | libc::ESRCH)) => Ok(Socket::Closed),
            Err(Some(libc::EINVAL)) => Err(OWN_TABLE),
            Err(_) => Err("a socket cannot be borrowed (pidfd_getfd)"),
        };
        numbers.iter().map(look).collect()
    }

    /// Duplicates a socket's descriptor. The error is the kernel's error number.
    ///
    /// Only for sockets: the duplicate has to be closed, and closing a file may ask its file system, which sockets do
    /// not have.
    fn borrow(thread: usize, number: usize) -> Result<OwnedFd, Option<i32>> {
        let flags = if thread == std::process::id() as usize { 0 } else { THREAD };
        // SAFETY: names a thread of this process.
        let opened = unsafe { raw::call(libc::SYS_pidfd_open, [thread, flags, 0, 0, 0, 0]) };
        let table = owned(opened)?;
        // SAFETY: asks for a copy of a descriptor.
        owned(unsafe { raw::call(libc::SYS_pidfd_getfd, [table.as_raw_fd() as usize, number, 0, 0, 0, 0]) })
    }

    fn owned(answer: raw::Answer) -> Result<OwnedFd, Option<i32>> {
        match raw::error(answer) {
            // SAFETY: the kernel has just made this descriptor for the caller, and nobody else owns it.
            None => Ok(unsafe { OwnedFd::from_raw_fd(answer as i32) }),
            error => Err(error),
        }
    }
}

/// One thread for each table of open files, without the agent's table and without threads that have just ended; `None`
/// if the tables cannot be found out.
pub fn tables() -> Option<Vec<usize>> {
    if world::is_hooked() {
        return own::tables();
    }
    let told = world::ask(Question::Tables)?;
    told.into_iter().map(|thread| usize::try_from(thread).ok()).collect()
}

/// The kinds of sockets, by their descriptors in a thread's table. The error is the reason why they cannot be found
/// out.
pub fn sockets(thread: usize, numbers: &[usize]) -> Result<Vec<Socket>, &'static str> {
    if world::is_hooked() {
        return own::sockets(thread, numbers);
    }
    let mut all = Vec::with_capacity(numbers.len());
    for some in numbers.chunks(ASKED_MOST) {
        let files = some.iter().map(|number| *number as u64).collect();
        let told = world::ask(Question::Sockets { thread: thread as u64, files });
        let told = told.filter(|told| told.len() == some.len()).ok_or("pagefold-attach does not answer")?;
        all.extend(told.into_iter().map(Socket::decode));
    }
    Ok(all)
}

/// The type of the file system (`f_type`) of a mount that this process sees, by the mount's unique number; `None` if it
/// cannot be found out.
pub fn file_system(mount: u64) -> Option<u32> {
    if world::is_hooked() {
        return host::filesystem_of_mount(mount);
    }
    u32::try_from(*world::ask(Question::FileSystem(mount))?.first()?).ok()
}
