//! Whether a waking thread preempts others: the usual scheduling policy, or `SCHED_BATCH`.
//!
//! A waking thread of `SCHED_BATCH` does not preempt the running thread. It waits for the end of that thread's time
//! slice, or for another processor. Its share of processor time stays the usual one. So if such a thread is preempted
//! while it has moved pages out, it waits no longer than any other thread. With a lower share (niceness, `SCHED_IDLE`),
//! threads that touch these pages would wait for all other threads. And only root may raise a share again.

use rustix::process::Pid;
use std::io;

/// Sets whether a thread preempts other threads when it wakes. A thread with another policy than `SCHED_OTHER` or
/// `SCHED_BATCH` is left as it is. `None` is the calling thread.
///
/// # Errors
/// The thread has ended, or is another user's.
pub fn set_preempting(thread: Option<Pid>, preempts: bool) -> io::Result<()> {
    let wanted = if preempts { libc::SCHED_OTHER } else { libc::SCHED_BATCH };
    let there = policy_of(thread)?;
    let (policy, flag) = (there & !libc::SCHED_RESET_ON_FORK, there & libc::SCHED_RESET_ON_FORK);
    if policy == wanted || ![libc::SCHED_OTHER, libc::SCHED_BATCH].contains(&policy) {
        return Ok(());
    }
    set_policy(thread, wanted | flag)
}

fn policy_of(thread: Option<Pid>) -> io::Result<i32> {
    // SAFETY: the call takes a number, and reads no memory.
    let policy = unsafe { libc::syscall(libc::SYS_sched_getscheduler, Pid::as_raw(thread)) };
    i32::try_from(policy).ok().filter(|policy| *policy >= 0).ok_or_else(io::Error::last_os_error)
}

fn set_policy(thread: Option<Pid>, policy: i32) -> io::Result<()> {
    // The kernel's `struct sched_param`. C libraries have larger ones.
    let priority: i32 = 0;
    let number = Pid::as_raw(thread);
    // SAFETY: the kernel reads the priority, which outlives the call.
    match unsafe { libc::syscall(libc::SYS_sched_setscheduler, number, policy, &raw const priority) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_policy_and_batch_are_exchanged_and_others_stay() {
        for (preempts, expected) in [(false, libc::SCHED_BATCH), (true, libc::SCHED_OTHER)] {
            set_preempting(None, preempts).unwrap();
            assert_eq!(policy_of(None).unwrap(), expected);
        }
        set_policy(None, libc::SCHED_IDLE).unwrap();
        for preempts in [false, true] {
            set_preempting(None, preempts).unwrap();
            assert_eq!(policy_of(None).unwrap(), libc::SCHED_IDLE);
        }
    }
}
