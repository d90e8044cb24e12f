//! A trial of this process's filters of system calls (seccomp): does one of them kill a process for a system call that
//! the agent makes? For each call a child is forked, which makes it with arguments that the kernel refuses.

use std::time::{Duration, Instant};

/// Longest wait for a child to make its call: 2 s. A filter may pass the call to another process, which may never
/// answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Names and numbers of the system calls that a preloaded agent makes, without those that every program makes when it
/// starts.
const CALLS: [(&str, i64); 35] = [
    ("clone", libc::SYS_clone),
    ("clone3", libc::SYS_clone3),
    ("close_range", libc::SYS_close_range),
    ("connect", libc::SYS_connect),
    ("eventfd2", libc::SYS_eventfd2),
    ("fallocate", libc::SYS_fallocate),
    ("fcntl", libc::SYS_fcntl),
    ("fstatfs", libc::SYS_fstatfs),
    ("ftruncate", libc::SYS_ftruncate),
    ("futex", libc::SYS_futex),
    ("getdents64", libc::SYS_getdents64),
    ("getsockopt", libc::SYS_getsockopt),
    ("ioctl", libc::SYS_ioctl),
    ("lseek", libc::SYS_lseek),
    ("madvise", libc::SYS_madvise),
    ("memfd_create", libc::SYS_memfd_create),
    ("mremap", libc::SYS_mremap),
    ("msync", libc::SYS_msync),
    ("munlock", libc::SYS_munlock),
    ("nanosleep", libc::SYS_nanosleep),
    ("openat", libc::SYS_openat),
    ("poll", libc::SYS_poll),
    ("ppoll", libc::SYS_ppoll),
    ("process_vm_readv", libc::SYS_process_vm_readv),
    ("pwrite64", libc::SYS_pwrite64),
    ("readlink", libc::SYS_readlink),
    ("recvmsg", libc::SYS_recvmsg),
    ("rt_sigprocmask", libc::SYS_rt_sigprocmask),
    ("sched_yield", libc::SYS_sched_yield),
    ("sendmsg", libc::SYS_sendmsg),
    ("sigaltstack", libc::SYS_sigaltstack),
    ("socket", libc::SYS_socket),
    ("statx", libc::SYS_statx),
    ("userfaultfd", libc::SYS_userfaultfd),
    ("write", libc::SYS_write),
];

/// The name of the first of these calls for which a filter kills the caller, or that is not answered within 2 s; `None`
/// if there is none. The caller must have one thread.
pub fn fatal_call() -> Option<&'static str> {
    CALLS.into_iter().find(|(_, number)| !survives(*number)).map(|(name, _)| name)
}

/// Whether a forked child makes this call and then exits by itself, within [`PATIENCE`].
fn survives(number: i64) -> bool {
    // SAFETY: the process has one thread, and the child makes system calls only.
    let child = unsafe { libc::fork() };
    if child < 0 {
        // If no process can be made, no thread of the agent can be made either.
        return false;
    }
    if child == 0 {
        // SAFETY: plain numbers. Nothing is kept of a child that is ended by its filter.
        unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
        // SAFETY: no memory lies at the highest address, and no descriptor or flags have that number.
        unsafe { libc::syscall(number, -1_i64, -1_i64, -1_i64, -1_i64, -1_i64, -1_i64) };
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let (until, mut status) = (Instant::now() + PATIENCE, 0);
    loop {
        // SAFETY: the child is ours, and the pointer is to a number of this frame.
        if unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == child {
            return libc::WIFEXITED(status);
        }
        if Instant::now() > until {
            // SAFETY: the child is ours, and was not waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
            // SAFETY: as above.
            unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
            return false;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}
