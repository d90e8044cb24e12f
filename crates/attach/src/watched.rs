//! Threads that have restarted a system call which a stop had interrupted, and stay traced until the call has ended.
//!
//! ```text
//!   begun again, as it was --- the time that it may take is over ---> asked to stop; answers as if by itself
//!      |  ends, or a signal handler runs                                 v
//!      v                                                              goes on, untraced
//!   goes on, untraced
//!
//!   a write, begun again for its rest --- ends, fails, is late, or a handler runs ---> answers with the sum, as above
//! ```
//!
//! A restarted call keeps its arguments, and so its whole time limit. If this process is killed, nobody ends the call
//! in time: the program waits for the whole limit again, and nothing else happens. But a write that was half done has
//! other arguments: it then answers with the number of remaining bytes alone.

use crate::mend::{self, Call, Mended};
use crate::program::Program;
use act::trace::{Registers, Resume, Stop, Tracee};
use rustix::io::Errno;
use rustix::process::Pid;
use std::time::Instant;

/// A thread that has restarted a system call, and stays traced until the call has ended.
#[derive(Debug)]
pub struct Watched {
    tracee: Tracee,
    /// The thread's registers at the system call as the program made it.
    before: Registers,
    /// Bytes that were written before the call was restarted for the remaining ones; 0 if it was restarted as it was.
    done: u64,
    /// End of the call's time limit, if it has one.
    end: Option<Instant>,
    /// Whether the thread was asked to stop because the call's time is over.
    is_ended: bool,
    /// A stop that was not acted on yet, because the thread is to stand still ([`Watched::ask`]).
    held: Option<Stop>,
}

/// How a thread goes on after a stop.
enum Next {
    /// It goes on, traced, with this signal.
    Traced(Resume, i32),
    /// It goes on, untraced, with this signal.
    Free(i32),
}

impl Watched {
    /// For a thread that has just been told to go on, and now restarts its call. `end` is the end of the call's time
    /// limit.
    pub const fn new(tracee: Tracee, before: Registers, done: u64, end: Option<Instant>) -> Self {
        Self { tracee, before, done, end, is_ended: false, held: None }
    }

    /// The thread.
    pub const fn thread(&self) -> Pid {
        self.tracee.thread()
    }

    /// Time at which the thread needs attention even without an event.
    pub fn due(&self) -> Option<Instant> {
        self.end.filter(|_| !self.is_ended)
    }

    /// Asks the thread to stop and to stand still. [`Watched::stands`] tells whether it does.
    ///
    /// # Errors
    /// It has ended.
    pub fn ask(&self) -> Result<(), Errno> {
        self.tracee.interrupt()
    }

    /// Whether the thread stands still; `None` if it has ended.
    pub fn stands(&mut self) -> Option<bool> {
        if self.held.is_none() {
            match self.tracee.look() {
                Ok(None) => return Some(false),
                Ok(Some(Stop::Ended)) | Err(_) => return None,
                Ok(stop) => self.held = stop,
            }
        }
        Some(true)
    }

    /// Acts on the thread's stop, if there is one. Returns the thread if it must be watched further.
    pub fn tend(mut self, program: &Program) -> Option<Self> {
        loop {
            let Some(stop) = self.held.take().or(self.tracee.look().ok()?) else {
                if self.due().is_some_and(|due| due <= Instant::now()) {
                    self.is_ended = true;
                    self.tracee.interrupt().ok()?;
                }
                return Some(self);
            };
            match self.next(program, stop) {
                Some(Next::Traced(how, signal)) => self.tracee.resume(how, signal).ok()?,
                Some(Next::Free(signal)) => {
                    self.tracee.detach(signal);
                    return None;
                }
                None => return None,
            }
        }
    }

    /// How the thread goes on after this stop; `None` if it has ended.
    fn next(&mut self, program: &Program, stop: Stop) -> Option<Next> {
        let goes = Some(Next::Traced(Resume::ToSystemCall, 0));
        match stop {
            Stop::Ended => None,
            Stop::Suspended => Some(Next::Traced(Resume::Listening, 0)),
            Stop::Asked | Stop::Other | Stop::Cloned(_) => goes,
            Stop::Signal(signal) if self.done > 0 && program.catches(signal) => {
                // The signal handler interrupts the call, which then answers with the bytes sent so far.
                let now = self.tracee.registers().ok()?;
                if mend::is_pending(now.rax.cast_signed()) && self.is_in_call(&now) {
                    self.answer(self.done.cast_signed())?;
                }
                Some(Next::Free(signal))
            }
            Stop::Signal(signal) => Some(Next::Traced(Resume::ToSystemCall, signal)),
            Stop::SystemCall => {
                let now = self.tracee.registers().ok()?;
                if !self.is_in_call(&now) {
                    // The thread is in a signal handler, not in its call.
                    return Some(Next::Free(0));
                }
                if self.tracee.begins_call() { goes } else { self.ended(program, now.rax.cast_signed()) }
            }
        }
    }

    fn is_in_call(&self, now: &Registers) -> bool {
        (now.rip, now.rsp, now.orig_rax) == (self.before.rip, self.before.rsp, self.before.orig_rax)
    }

    /// Decides how the thread goes on after its call has ended with this answer.
    fn ended(&mut self, program: &Program, answer: i64) -> Option<Next> {
        let goes = Some(Next::Traced(Resume::ToSystemCall, 0));
        let call = Call::of(&self.before)?;
        if mend::is_pending(answer) && !call.is_interrupted(answer) {
            return goes;
        }
        let [first, second, third, ..] = call.arguments;
        let rest = Call { arguments: [first, second + self.done, third - self.done, 0, 0, 0], ..call };
        match if self.done > 0 { rest.mend(answer) } else { call.mend(answer) } {
            Mended::Again if self.is_ended => {
                let sent = self.done.cast_signed();
                self.answer(if sent > 0 { sent } else { program.late_answer(&call) })?;
                return Some(Next::Free(0));
            }
            Mended::Again => {}
            // The call has sent a part. Its time limit counts from here.
            Mended::Rest(more) if !self.is_ended => {
                let end = program.limit(&call).map(|limit| Instant::now() + limit);
                (self.done, self.end) = (self.done + more, end);
            }
            // The thread was looked after too late: the call has used its whole time limit once more.
            Mended::Untouched if call.is_late(answer) => {
                self.answer(program.late_answer(&call))?;
                return Some(Next::Free(0));
            }
            // The call was restarted as it was, so the registers are the program's own.
            _ if self.done == 0 => return Some(Next::Free(0)),
            _ => {
                let more = if mend::is_error(answer) { 0 } else { answer };
                self.answer(self.done.cast_signed() + more)?;
                return Some(Next::Free(0));
            }
        }
        let registers = match self.done {
            0 => self.before,
            done => Registers { rsi: second + done, rdx: third - done, ..self.before },
        };
        self.tracee.set_registers(&Registers { rax: mend::AGAIN.cast_unsigned(), ..registers }).ok()?;
        goes
    }

    /// Makes the call return `answer`, and gives the thread its own registers back.
    fn answer(&self, answer: i64) -> Option<()> {
        self.tracee.set_registers(&Registers { rax: answer.cast_unsigned(), ..self.before }).ok()
    }
}
