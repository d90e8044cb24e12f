//! System calls that a stop has interrupted, and that the program must not see interrupted.
//!
//! Most calls are begun again by the kernel when the stopped thread goes on. Some are not (`man 7 signal`): they answer
//! `EINTR`. For these, the answer is replaced by the kernel's own word for "again, unless a signal handler runs"
//! (`ERESTARTNOHAND`). The kernel then begins them again, or answers `EINTR` where a signal has really come.
//!
//! A call with a time limit is begun again with the time that is left.
//!
//! ```text
//!   stopped in a call
//!      |  not EINTR                         the kernel begins it again, or it had ended
//!      |  EINTR, no time limit         -->  again
//!      |  EINTR, the limit is a number -->  again, with the rest of it
//!      v  EINTR, the limit is in memory --> again, with the rest of it, from a place of ours
//! ```

use act::Registers;
use std::time::Duration;

/// `EINTR` and `ERESTARTNOHAND`, as answers of a system call.
const INTERRUPTED: u64 = -4_i64 as u64;
const AGAIN: u64 = -514_i64 as u64;

/// Number of `io_pgetevents`, which libc has no name for.
const IO_PGETEVENTS: i64 = 333;

/// Calls that answer `EINTR` after a stop, and where their time limit is.
const CALLS: [(i64, Limit); 14] = [
    (libc::SYS_semop, Limit::None),
    (libc::SYS_epoll_wait, Limit::Milliseconds),
    (libc::SYS_epoll_pwait, Limit::Milliseconds),
    (libc::SYS_epoll_pwait2, Limit::Time(Argument::Fourth)),
    (libc::SYS_semtimedop, Limit::Time(Argument::Fourth)),
    (libc::SYS_rt_sigtimedwait, Limit::Time(Argument::Third)),
    (libc::SYS_io_getevents, Limit::Time(Argument::Fifth)),
    (IO_PGETEVENTS, Limit::Time(Argument::Fifth)),
    (libc::SYS_io_uring_enter, Limit::Ring),
    (libc::SYS_recvfrom, Limit::Socket),
    (libc::SYS_recvmsg, Limit::Socket),
    (libc::SYS_read, Limit::Socket),
    (libc::SYS_accept, Limit::Socket),
    (libc::SYS_accept4, Limit::Socket),
];

/// `IORING_ENTER_EXT_ARG`: the time limit of the call is in a structure.
const RING_EXTENDED: u64 = 1 << 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    None,
    /// The fourth argument, negative for none.
    Milliseconds,
    /// A `timespec`, if the argument is not null.
    Time(Argument),
    /// As for `io_uring_enter`.
    Ring,
    /// One of the socket's: the call would not be interrupted for good without one.
    Socket,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Argument {
    Third,
    Fourth,
    Fifth,
}

impl Argument {
    const fn of(self, registers: &mut Registers) -> &mut u64 {
        match self {
            Self::Third => &mut registers.rdx,
            Self::Fourth => &mut registers.r10,
            Self::Fifth => &mut registers.r8,
        }
    }
}

/// The time limit of an interrupted call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mended {
    /// Nothing is to be done.
    Untouched,
    /// These registers are to be set.
    Again,
    /// The same, after this time was taken off the limit that lies in the program's memory. The answer is to be given
    /// to [`point_to`].
    AgainWithTime(u64),
    /// The call waits for as long as before: its limit cannot be changed.
    AgainInFull,
}

fn limit(call: i64) -> Option<Limit> {
    CALLS.iter().find(|(number, _)| *number == call).map(|(_, limit)| *limit)
}

/// Whether a thread that sleeps in this call is not interrupted for good by a stop, by the kernel's word.
pub fn is_restarted(call: u64) -> bool {
    limit(call.cast_signed()).is_none()
}

/// Whether a call may have a time limit of which the rest is to be known.
pub fn may_be_timed(call: u64) -> bool {
    matches!(limit(call.cast_signed()), Some(Limit::Milliseconds | Limit::Time(_)))
}

/// Changes the registers of a thread that was stopped within a system call, `waited` after it had begun it.
pub fn mend(registers: &mut Registers, waited: Duration) -> Mended {
    let call = registers.orig_rax.cast_signed();
    if call < 0 || registers.rax != INTERRUPTED {
        return Mended::Untouched;
    }
    let Some(limit) = limit(call) else { return Mended::Untouched };
    let mended = match limit {
        Limit::None => Mended::Again,
        Limit::Milliseconds => {
            let limit = i64::from(registers.r10 as i32);
            if limit > 0 {
                let left = limit.saturating_sub(i64::try_from(waited.as_millis()).unwrap_or(i64::MAX)).max(0);
                registers.r10 = left.cast_unsigned();
            }
            Mended::Again
        }
        Limit::Time(argument) => match *argument.of(registers) {
            0 => Mended::Again,
            place => Mended::AgainWithTime(place),
        },
        Limit::Ring if registers.r10 & RING_EXTENDED == 0 => Mended::Again,
        Limit::Ring | Limit::Socket => Mended::AgainInFull,
    };
    registers.rax = AGAIN;
    mended
}

/// Points the time limit of a call that [`mend`] has changed to another place.
pub fn point_to(registers: &mut Registers, place: u64) {
    if let Some(Limit::Time(argument)) = limit(registers.orig_rax.cast_signed()) {
        *argument.of(registers) = place;
    }
}

/// The rest of a time limit, as the program keeps it: seconds and nanoseconds.
pub fn rest([seconds, nanoseconds]: [i64; 2], waited: Duration) -> [i64; 2] {
    let limit = u64::try_from(seconds).ok().zip(u32::try_from(nanoseconds).ok());
    let Some(limit) = limit.map(|(s, n)| Duration::from_secs(s) + Duration::from_nanos(n.into())) else {
        return [seconds, nanoseconds];
    };
    let left = limit.saturating_sub(waited);
    [i64::try_from(left.as_secs()).unwrap_or(i64::MAX), left.subsec_nanos().into()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stopped(call: i64, answer: i64) -> Registers {
        let numbers = [0_u64; size_of::<Registers>() / 8];
        let [r15, r14, r13, r12, rbp, rbx, r11, r10, r9, r8, ..] = numbers;
        Registers {
            r15,
            r14,
            r13,
            r12,
            rbp,
            rbx,
            r11,
            r10,
            r9,
            r8,
            rax: answer.cast_unsigned(),
            rcx: 0,
            rdx: 0,
            rsi: 0,
            rdi: 0,
            orig_rax: call.cast_unsigned(),
            rip: 0,
            cs: 0,
            eflags: 0,
            rsp: 0,
            ss: 0,
            fs_base: 0,
            gs_base: 0,
            ds: 0,
            es: 0,
            fs: 0,
            gs: 0,
        }
    }

    #[test]
    fn call_that_kernel_would_not_begin_again_is_begun_again_with_time_left() {
        let mut registers = Registers { r10: 1000, ..stopped(libc::SYS_epoll_wait, -4) };
        assert_eq!(mend(&mut registers, Duration::from_millis(300)), Mended::Again);
        assert_eq!((registers.rax.cast_signed(), registers.r10), (-514, 700));
        let mut for_ever = Registers { r10: (-1_i32) as u64, ..stopped(libc::SYS_epoll_wait, -4) };
        assert_eq!(mend(&mut for_ever, Duration::from_secs(300)), Mended::Again);
        assert_eq!(for_ever.r10 as i32, -1);
        let mut in_memory = Registers { rdx: 4096, ..stopped(libc::SYS_rt_sigtimedwait, -4) };
        assert_eq!(mend(&mut in_memory, Duration::ZERO), Mended::AgainWithTime(4096));
        point_to(&mut in_memory, 8192);
        assert_eq!(in_memory.rdx, 8192);
        assert_eq!(rest([2, 5], Duration::from_millis(500)), [1, 500_000_005]);
        assert_eq!(rest([1, 0], Duration::from_secs(5)), [0, 0]);
    }

    #[test]
    fn other_answers_and_calls_are_left_alone() {
        for (call, answer) in [(libc::SYS_epoll_wait, 1), (libc::SYS_ioctl, -4), (-1, -4), (libc::SYS_futex, -512)] {
            let mut registers = stopped(call, answer);
            assert_eq!(mend(&mut registers, Duration::ZERO), Mended::Untouched);
            assert_eq!(registers.rax.cast_signed(), answer);
        }
    }
}
