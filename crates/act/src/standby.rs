//! A standby: a process that does nothing until the process that made it has ended, and takes its place then.
//!
//! ```text
//!   a process            its standby
//!     | clone ----------> waits for its end          one table of files: each descriptor that either has, both have
//!     | killed
//!                         executes the same program   with the descriptors that the journal names, and no others
//! ```
//!
//! Both share one table of files (`CLONE_FILES`). A descriptor that the kernel has just given to the first process,
//! such as a child's userfaultfd, is the standby's at the same instant.

use crate::follow::Follower;
use crate::journal::{About, Journal};
use crate::userfault::Userfault;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::process::{Pid, PidfdFlags, WaitOptions, getpid, pidfd_open, waitpid};
use std::ffi::{CStr, CString, c_char};
use std::io;
use std::sync::Arc;

/// A standby of this process.
#[derive(Debug)]
pub struct Standby {
    pid: Pid,
    end: OwnedFd,
    /// A pidfd of this process, on which the standby waits under the same descriptor number.
    _own_end: OwnedFd,
}

impl Standby {
    /// Starts a standby. When this process has ended while the journal names children, the standby executes this
    /// program with `arguments`, of which the first is the program's name. It passes on the journal's file and the
    /// descriptors that the journal names.
    ///
    /// # Errors
    /// No process can be made.
    pub fn start(journal: &Arc<Journal>, arguments: &[CString]) -> io::Result<Self> {
        let mut list: Vec<*const c_char> = arguments.iter().map(|argument| argument.as_ptr()).collect();
        list.push(std::ptr::null());
        let own_end = pidfd_open(getpid(), PidfdFlags::empty())?;
        let flags = libc::CLONE_FILES | libc::SIGCHLD;
        // SAFETY: the child is a copy of this thread alone, on a copy of its stack. Until it executes another program
        // it makes system calls, allocates nothing and takes no lock. So it does not matter what other threads were
        // doing.
        let pid = match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
            0 => stand_by(own_end.as_raw_fd(), journal, &list),
            pid => i32::try_from(pid).ok().filter(|pid| *pid > 0).and_then(Pid::from_raw),
        };
        let pid = pid.ok_or_else(io::Error::last_os_error)?;
        Ok(Self { pid, end: pidfd_open(pid, PidfdFlags::empty())?, _own_end: own_end })
    }

    /// Whether the standby has ended.
    pub fn has_ended(&self) -> bool {
        !matches!(waitpid(Some(self.pid), WaitOptions::NOHANG), Ok(None))
    }
}

impl AsFd for Standby {
    /// A file that is readable once the standby has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }
}

/// What the standby does: it waits for the end of the process that made it, and executes this program if the journal
/// names children.
fn stand_by(end: i32, journal: &Journal, arguments: &[*const c_char]) -> ! {
    let mut waited = libc::pollfd { fd: end, events: libc::POLLIN, revents: 0 };
    while waited.revents == 0 {
        // SAFETY: the kernel writes to `waited` alone. The time is none: it waits.
        unsafe { libc::syscall(libc::SYS_poll, &raw mut waited, 1, -1) };
    }
    // Now only the standby has this table of files. If it ended, all sockets and userfaultfds would be closed.
    if !journal.is_empty() {
        let keep = |number: i32| {
            // SAFETY: the call takes numbers, and changes a mark.
            unsafe { libc::syscall(libc::SYS_fcntl, number, libc::F_SETFD, 0) };
        };
        keep(journal.number());
        journal.each_descriptor(keep);
        for standard in 0..2 {
            // SAFETY: these are the ended process's sockets, which no code here uses.
            unsafe { libc::syscall(libc::SYS_close, standard) };
        }
        let (program, no_variables): (&CStr, [*const c_char; 1]) = (c"/proc/self/exe", [std::ptr::null()]);
        // SAFETY: the program's name, the arguments and the variables are strings and lists that end with null.
        unsafe { libc::syscall(libc::SYS_execve, program.as_ptr(), arguments.as_ptr(), no_variables.as_ptr()) };
    }
    loop {
        // SAFETY: the call ends this process, in which no other code runs.
        unsafe { libc::syscall(libc::SYS_exit_group, 0) };
    }
}

/// A forked child that the new process has to follow.
#[derive(Debug)]
pub struct Inherited {
    /// Its follower, which knows all that the killed process knew.
    pub follower: Follower,
    /// Facts about the child: the descriptor number of the member's socket, and the layout of the address space.
    pub about: About,
}

/// All that the new process takes over from the killed one.
#[derive(Debug)]
pub struct Inheritance {
    /// The forked children.
    pub children: Vec<Inherited>,
    /// Sockets of members whose agents may take children over, with their descriptor numbers.
    pub sockets: Vec<(i32, OwnedFd)>,
}

impl Inheritance {
    /// Takes over what the journal names, and closes all other files but standard input, output and error. `journal` is
    /// the descriptor number of the journal's file. To be called at the start of the program that a [standby](Standby)
    /// has executed.
    ///
    /// # Errors
    /// There is no journal, or the process has several threads already.
    pub fn take(journal: i32) -> io::Result<Self> {
        if std::fs::read_dir("/proc/self/task")?.count() != 1 || journal < 3 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: this program has just begun and has one thread. Nobody owns the descriptors that it was given.
        let own = |number: i32| unsafe { OwnedFd::from_raw_fd(number) };
        let old = Journal::of(own(journal))?;
        let mut numbers = vec![journal];
        old.each_descriptor(|number| numbers.push(number));
        numbers.sort_unstable();
        numbers.dedup();
        close_all_but(&numbers);
        let found = old.found();
        let mut sockets: Vec<i32> = found.iter().filter_map(|found| found.about.socket).collect();
        sockets.sort_unstable();
        sockets.dedup();
        let entered: Vec<i32> = found.iter().map(|found| found.watch).collect();
        let mut children = Vec::new();
        for found in found {
            let about = found.about;
            let (follower, births) = Follower::resumed(Userfault::from_fd(own(found.watch))?, &found);
            children.push(Inherited { follower, about });
            for (born, inherited) in births.into_iter().filter(|(born, _)| !entered.contains(born)) {
                let follower = Follower::of_child(Userfault::from_fd(own(born))?, inherited);
                children.push(Inherited { follower, about: About { is_born: true, ..about } });
            }
        }
        Ok(Self { children, sockets: sockets.into_iter().map(|number| (number, own(number))).collect() })
    }
}

/// Closes all files but standard input, output and error and the descriptors `numbers`, which are in order.
fn close_all_but(numbers: &[i32]) {
    let mut from: u32 = 3;
    let kept = numbers.iter().filter_map(|number| u32::try_from(*number).ok());
    for number in kept.filter(|number| *number >= 3).chain([u32::MAX]) {
        if from < number {
            // SAFETY: the caller's program has just begun, and uses none of them.
            unsafe { libc::syscall(libc::SYS_close_range, from, number - 1, 0) };
        }
        from = number.saturating_add(1);
    }
}
