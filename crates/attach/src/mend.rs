//! System calls that a stop has interrupted, and that the program must not see interrupted.
//!
//! Most calls are begun again by the kernel when the stopped thread goes on. Some are not (`man 7 signal`): they answer
//! `EINTR`. For these, the answer is replaced by the kernel's own word for "again, unless a signal handler runs"
//! (`ERESTARTNOHAND`). The kernel then begins them again, or answers `EINTR` where a handler has really run.
//!
//! ```text
//!   stopped in a call
//!      |  not EINTR                          the kernel begins it again, or it had ended
//!      |  EINTR, no time limit           --> again
//!      |  EINTR, a time limit            --> again, as it was; ended from outside when its time is over (`watched`)
//!      v  fewer bytes written than asked --> again for the rest (`watched`)
//! ```
//!
//! Some calls would return less than was asked, or end in another way. A thread that sleeps in one of those is not
//! stopped at all: [`Call::may_be_stopped`].

use act::trace::Registers;
use std::time::Duration;

/// `EINTR` and `ERESTARTNOHAND`, as answers of a system call.
const INTERRUPTED: i64 = -4;
pub(crate) const AGAIN: i64 = -514;
/// `ERESTART_RESTARTBLOCK`: the kernel goes on with the call by `restart_syscall`.
pub(crate) const BY_ANOTHER: i64 = -516;
/// Lowest return value of a system call that is an error number (`-MAX_ERRNO`).
const LEAST_ERROR: i64 = -4095;

/// Number of `io_pgetevents`, which libc has no name for.
const IO_PGETEVENTS: i64 = 333;

/// Calls that return `EINTR` after a stop; where their time limit is; and what each returns when its limit is over.
const CALLS: [(i64, Limit, i32); 20] = [
    (libc::SYS_semop, Limit::None, 0),
    (libc::SYS_epoll_wait, Limit::Milliseconds, 0),
    (libc::SYS_epoll_pwait, Limit::Milliseconds, 0),
    (libc::SYS_epoll_pwait2, Limit::Time(3), 0),
    (libc::SYS_semtimedop, Limit::Time(3), -libc::EAGAIN),
    (libc::SYS_rt_sigtimedwait, Limit::Time(2), -libc::EAGAIN),
    (libc::SYS_io_getevents, Limit::Time(4), 0),
    (IO_PGETEVENTS, Limit::Time(4), 0),
    (libc::SYS_io_uring_enter, Limit::Ring, 0),
    (libc::SYS_recvfrom, Limit::Socket, -libc::EAGAIN),
    (libc::SYS_recvmsg, Limit::Socket, -libc::EAGAIN),
    (libc::SYS_read, Limit::Socket, -libc::EAGAIN),
    (libc::SYS_readv, Limit::Socket, -libc::EAGAIN),
    (libc::SYS_accept, Limit::Socket, -libc::EAGAIN),
    (libc::SYS_accept4, Limit::Socket, -libc::EAGAIN),
    (libc::SYS_connect, Limit::Socket, -libc::EINPROGRESS),
    (libc::SYS_write, Limit::Socket, -libc::EAGAIN),
    (libc::SYS_writev, Limit::Socket, -libc::EAGAIN),
    (libc::SYS_sendto, Limit::Socket, -libc::EAGAIN),
    (libc::SYS_sendmsg, Limit::Socket, -libc::EAGAIN),
];

/// Calls that write or send. They may return that only a part was sent.
const SENDING: [i64; 4] = [libc::SYS_write, libc::SYS_writev, libc::SYS_sendto, libc::SYS_sendmsg];

/// Calls that the kernel restarts by itself after a stop, with the time that is left.
const RESTARTED: [i64; 24] = [
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_select,
    libc::SYS_pselect6,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_pause,
    libc::SYS_rt_sigsuspend,
    libc::SYS_flock,
    libc::SYS_fcntl,
    libc::SYS_msgrcv,
    libc::SYS_msgsnd,
    libc::SYS_mq_timedreceive,
    libc::SYS_mq_timedsend,
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_sched_yield,
    FUTEX_WAIT,
];
/// Number of `futex_wait`.
const FUTEX_WAIT: i64 = 455;

/// `IORING_ENTER_EXT_ARG`: the time limit of the call is in a structure.
const RING_EXTENDED: u64 = 1 << 3;
/// `KVM_RUN`: an `ioctl` that may return `EINTR` at any time, so that programs call it again.
const KVM_RUN: u64 = 0xae80;

/// A system call as a thread has made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its number.
    pub number: i64,
    /// Its arguments.
    pub arguments: [u64; 6],
    /// The stack pointer, and the address of the instruction behind the `syscall`.
    pub place: [u64; 2],
}

/// Where the time limit of a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The call has no time limit.
    None,
    /// The fourth argument, negative for none.
    Milliseconds,
    /// A `timespec` whose address is in the argument with this index, if that is not null.
    Time(usize),
    /// The time limit is in a structure, as for `io_uring_enter`. Calls with one are not interrupted.
    Ring,
    /// The timeout of the socket (`SO_RCVTIMEO`, `SO_SNDTIMEO`). Without one, the kernel begins the call again by
    /// itself, and no `EINTR` is seen.
    Socket,
}

/// What is to be done about the return value of a call in which a thread was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mended {
    /// The answer stays as it is.
    Untouched,
    /// The call is to be begun again.
    Again,
    /// The call has sent this many bytes, and is to be begun again for the rest, if the file is a pipe or socket.
    Rest(u64),
}

impl Call {
    /// The call that a thread is in, or has just left, by its registers; `None` if it has stopped for another reason.
    pub fn of(registers: &Registers) -> Option<Self> {
        let Registers { rdi, rsi, rdx, r10, r8, r9, rsp, rip, orig_rax, .. } = *registers;
        let number = orig_rax.cast_signed();
        (number >= 0).then_some(Self { number, arguments: [rdi, rsi, rdx, r10, r8, r9], place: [rsp, rip] })
    }

    fn known(&self) -> Option<(Limit, i32)> {
        CALLS.iter().find(|(number, ..)| *number == self.number).map(|(_, limit, answer)| (*limit, *answer))
    }

    /// Where the call's time limit is, for a call that returns `EINTR` after a stop; `None` for others, and if the
    /// program set no limit.
    pub fn limit(&self) -> Limit {
        match self.known() {
            Some((Limit::Milliseconds, _)) if (self.arguments[3] as i32) < 0 => Limit::None,
            Some((Limit::Time(at), _)) if self.arguments[at] == 0 => Limit::None,
            known => known.map_or(Limit::None, |(limit, _)| limit),
        }
    }

    /// The answer of the call when its time is over. For `connect` to a local socket, the answer is `EAGAIN`:
    /// [`Program::late_answer`].
    ///
    /// [`Program::late_answer`]: crate::program::Program::late_answer
    pub fn late_answer(&self) -> i64 {
        self.known().map_or(0, |(_, answer)| answer.into())
    }

    /// Whether a restarted call says by this return value that its time limit is over. A socket that is connecting
    /// returns `EALREADY` from each further `connect`.
    pub fn is_late(&self, answer: i64) -> bool {
        self.number == libc::SYS_connect && answer == -i64::from(libc::EALREADY)
    }

    /// Whether the socket's timeout for sending bounds the call (`SO_SNDTIMEO`), and not the one for receiving.
    pub fn is_limited_as_sending(&self) -> bool {
        self.number == libc::SYS_connect || SENDING.contains(&self.number)
    }

    /// Whether the kernel begins the call again by itself after a stop.
    pub fn is_restarted(&self) -> bool {
        RESTARTED.contains(&self.number)
    }

    /// Whether the kernel would resume the call by `restart_syscall` after a stop. A seccomp filter may end the program
    /// for that call.
    pub fn goes_on_by_another(&self) -> bool {
        let [_, second, third, fourth, ..] = self.arguments;
        match self.number {
            libc::SYS_nanosleep | libc::SYS_restart_syscall => true,
            libc::SYS_clock_nanosleep => second & libc::TIMER_ABSTIME as u64 == 0,
            libc::SYS_poll => third as i32 >= 0,
            libc::SYS_futex => fourth != 0,
            _ => false,
        }
    }

    /// Whether a thread that sleeps in this call can be stopped, and the call be restarted, so that the program sees no
    /// difference.
    pub fn may_be_stopped(&self) -> bool {
        let [_, second, third, fourth, ..] = self.arguments;
        match self.number {
            // With this flag, an interrupted call would return what was received by then.
            libc::SYS_recvfrom => fourth & libc::MSG_WAITALL as u64 == 0,
            libc::SYS_recvmsg => third & libc::MSG_WAITALL as u64 == 0,
            // An interrupted call with submissions would return their number. With `RING_EXTENDED`, the time limit is
            // not known here.
            libc::SYS_io_uring_enter => second == 0 && fourth & RING_EXTENDED == 0,
            libc::SYS_ioctl => second == KVM_RUN,
            number if SENDING.contains(&number) => false,
            _ => self.is_restarted() || self.known().is_some(),
        }
    }

    /// Whether this answer says that the call was interrupted and the kernel will not begin it again for the time that
    /// is left. The kernel begins `io_pgetevents` again for its whole time, so that counts as interrupted.
    pub fn is_interrupted(&self, answer: i64) -> bool {
        answer == INTERRUPTED || self.number == IO_PGETEVENTS && answer == AGAIN
    }

    /// What is to be done about this return value, which the call has for a stopped thread.
    pub fn mend(&self, answer: i64) -> Mended {
        let [_, _, third, ..] = self.arguments;
        match self.number {
            libc::SYS_ioctl if answer == INTERRUPTED && self.may_be_stopped() => Mended::Again,
            _ if self.is_interrupted(answer) && self.known().is_some() => Mended::Again,
            libc::SYS_write | libc::SYS_sendto if answer > 0 && answer.cast_unsigned() < third => {
                Mended::Rest(answer.cast_unsigned())
            }
            _ => Mended::Untouched,
        }
    }
}

/// Whether a return value is one of the kernel's internal codes (`ERESTARTSYS` and others) for a call that is to be
/// restarted.
pub fn is_pending(answer: i64) -> bool {
    // `ERESTARTSYS`, `ERESTARTNOINTR`, `ERESTARTNOHAND`, `ERESTART_RESTARTBLOCK`.
    [-512, -513, AGAIN, BY_ANOTHER].contains(&answer)
}

/// Whether an answer is an error.
pub fn is_error(answer: i64) -> bool {
    (LEAST_ERROR..0).contains(&answer)
}

/// The time in a `timespec` of these bytes; `None` if a number is negative, which the kernel refuses.
pub fn time_of(bytes: [u8; 16]) -> Option<Duration> {
    let [seconds, nanoseconds] = [0, 8].map(|at| i64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap_or_default()));
    let (seconds, nanoseconds) = (u64::try_from(seconds).ok()?, u32::try_from(nanoseconds).ok()?);
    Some(Duration::new(seconds.min(u64::from(u32::MAX)), nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(number: i64, arguments: [u64; 6]) -> Call {
        Call { number, arguments, place: [0; 2] }
    }

    #[test]
    fn call_that_kernel_would_not_begin_again_is_begun_again() {
        let waits = call(libc::SYS_epoll_wait, [3, 0, 1, 1000, 0, 0]);
        assert_eq!((waits.mend(-4), waits.limit(), waits.late_answer()), (Mended::Again, Limit::Milliseconds, 0));
        let for_ever = call(libc::SYS_epoll_wait, [3, 0, 1, (-1_i32) as u64, 0, 0]);
        assert_eq!((for_ever.mend(-4), for_ever.limit()), (Mended::Again, Limit::None));
        let in_memory = call(libc::SYS_rt_sigtimedwait, [0, 0, 4096, 8, 0, 0]);
        assert_eq!(
            (in_memory.mend(-4), in_memory.limit(), in_memory.late_answer()),
            (Mended::Again, Limit::Time(2), -11)
        );
        let receives = call(libc::SYS_recvfrom, [3, 0, 100, 0, 0, 0]);
        assert_eq!((receives.mend(-4), receives.limit(), receives.late_answer()), (Mended::Again, Limit::Socket, -11));
        let mut bytes = [0; 16];
        (bytes[0], bytes[8]) = (2, 5);
        assert_eq!(time_of(bytes), Some(Duration::new(2, 5)));
        assert_eq!(time_of([0xff; 16]), None);
    }

    #[test]
    fn other_answers_and_calls_are_left_alone() {
        for (number, answer) in [(libc::SYS_epoll_wait, 1), (libc::SYS_ioctl, -4), (libc::SYS_futex, -512)] {
            assert_eq!(call(number, [0; 6]).mend(answer), Mended::Untouched);
        }
        for number in SENDING {
            assert_eq!(call(number, [1, 0, 100, 0, 0, 0]).mend(100), Mended::Untouched);
        }
    }

    #[test]
    fn call_that_could_answer_with_part_is_not_interrupted_in_sleep_and_finished_otherwise() {
        let write = call(libc::SYS_write, [1, 0, 100, 0, 0, 0]);
        assert_eq!((write.may_be_stopped(), write.mend(60)), (false, Mended::Rest(60)));
        // A socket with a time limit, that was full from the beginning on.
        for number in SENDING {
            let sends = call(number, [1, 0, 100, 0, 0, 0]);
            assert_eq!((sends.may_be_stopped(), sends.mend(-4), sends.late_answer()), (false, Mended::Again, -11));
        }
        assert!(!call(libc::SYS_recvfrom, [3, 0, 100, libc::MSG_WAITALL as u64, 0, 0]).may_be_stopped());
        assert!(call(libc::SYS_recvfrom, [3, 0, 100, 0, 0, 0]).may_be_stopped());
        assert!(!call(libc::SYS_io_uring_enter, [3, 1, 1, 1, 0, 0]).may_be_stopped());
        assert!(call(libc::SYS_io_uring_enter, [3, 0, 1, 1, 0, 0]).may_be_stopped());
        assert!(!call(libc::SYS_sendfile, [0; 6]).may_be_stopped());
    }
}
