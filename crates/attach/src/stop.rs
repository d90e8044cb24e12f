//! Stops single threads, and lets them go on as if nothing had happened.
//!
//! ```text
//!   stopped ---- lend ----> makes system calls for us, with all signals blocked
//!                             |  take_back, also where a call failed or was not made
//!                             v
//!                           stops where the kernel would begin its own call again; has its registers and its mask back
//! ```
//!
//! A frozen process (`host::frozen_group`) may stop only after it is thawed. Somebody has to look until then
//! ([`Stopped::look`]).

use crate::mend::{self, Call, Limit, Mended};
use crate::program::Program;
use crate::rescue::{Lent, Rescue};
use crate::threads::{self, Doing};
use crate::waited::{self, Clocks, Rest};
use crate::watched::Watched;
use act::trace::{Registers, Resume, Stop, Tracee};
use rustix::io::Errno;
use rustix::process::Pid;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Longest time between a look at a sleeping thread and the request that it stops, so that the look still holds: 200
/// us.
const LOOK_HOLDS: Duration = Duration::from_micros(200);

/// A traced thread that has stopped, or will stop before it runs any code of the program again.
#[derive(Debug)]
pub struct Stopped {
    tracee: Tracee,
    stop: Option<Stop>,
    /// Time at which the thread was asked to stop.
    asked: Instant,
    /// The call in which the thread slept, the kernel's count of its sleeps, and how long it had slept when asked to
    /// stop.
    slept: Option<(Call, Rest, Duration)>,
    /// The thread's own registers and signal mask, while it is lent.
    own: Option<Box<Lent>>,
    /// A thread that this thread has created (`clone`) since it was taken back.
    made: Option<Pid>,
}

/// The outcome of asking a thread to stop.
#[derive(Debug)]
pub enum Asked {
    /// The thread was asked, and will stop.
    Stops(Stopped),
    /// The thread sleeps in a system call whose effect an interruption would change.
    MustNot,
    /// It has ended.
    Ended,
}

/// Traces a thread and asks it to stop, without waiting for the stop. `follow`: threads that it creates are traced,
/// too.
///
/// # Errors
/// `EPERM`: it must not be traced, or another process traces it.
pub fn ask(pid: u32, thread: Pid, clocks: &Clocks, follow: bool) -> Result<Asked, Errno> {
    // The look must come first, because the request wakes the thread.
    let doing = threads::doing(pid, thread);
    if let Doing::Call(call) = doing
        && !call.may_be_stopped()
        && threads::is_interruptible(pid, thread)
    {
        return Ok(Asked::MustNot);
    }
    let tracee = match Tracee::seize(thread, follow) {
        Ok(tracee) => tracee,
        Err(Errno::SRCH) => return Ok(Asked::Ended),
        Err(e) => return Err(e),
    };
    let looked = Instant::now();
    let rest = match doing {
        Doing::Call(call) if call.limit() != Limit::None => waited::rest(pid, thread).map(|rest| (call, rest)),
        _ => None,
    };
    let asked = tracee.interrupt();
    let now = Instant::now();
    let rest = rest.filter(|_| now - looked < LOOK_HOLDS);
    let slept = rest.map(|(call, rest)| (call, rest, clocks.rested(rest)));
    Ok(asked.map_or(Asked::Ended, |()| {
        Asked::Stops(Stopped { tracee, stop: None, asked: now, slept, own: None, made: None })
    }))
}

impl Stopped {
    /// The thread's tracer.
    pub const fn tracee(&self) -> &Tracee {
        &self.tracee
    }

    /// Whether the thread has stopped, and has its own registers; `None` if it has ended. A thread that was lent is
    /// taken a step nearer to that.
    pub fn look(&mut self) -> Option<bool> {
        loop {
            if self.stop.is_none() {
                match self.tracee.look() {
                    Ok(None) => return Some(false),
                    Ok(Some(Stop::Ended)) | Err(_) => return None,
                    Ok(stop) => self.stop = stop,
                }
            }
            let own = self.own.as_ref().map(|lent| lent.own);
            let Some((own, stop)) = own.zip(self.stop) else { return Some(true) };
            self.give_back(own, stop).ok()?;
        }
    }

    /// A thread that another process has asked to stop, and that has come to this stop.
    pub fn inherited(tracee: Tracee, stop: Stop, own: Option<Lent>) -> Self {
        Self { tracee, stop: Some(stop), asked: Instant::now(), slept: None, own: own.map(Box::new), made: None }
    }

    /// Lends the stopped thread. It gets `registers` back afterwards, even if this process is killed. All of its
    /// signals are blocked meanwhile. Threads that it makes inherit the blocked signals.
    ///
    /// # Errors
    /// The thread has ended, or its registers cannot be noted.
    pub fn lend(&mut self, registers: Registers, rescue: Rc<Rescue>) -> std::io::Result<&Tracee> {
        let own = (registers, self.tracee.blocked_signals()?);
        self.own = Some(Box::new(Lent::new(self.tracee.thread(), own, rescue)?));
        self.tracee.block_signals(u64::MAX)?;
        Ok(&self.tracee)
    }

    /// Takes the thread back after it was lent. [`Stopped::look`] says whether it has its own registers again.
    pub fn take_back(&mut self) {
        // It is stopped at the end of a call, mostly.
        let is_stopped = self.tracee.registers().is_ok();
        self.stop = is_stopped.then_some(Stop::SystemCall);
        if !is_stopped {
            let _ = self.tracee.interrupt();
        }
    }

    /// Takes the next step to give a lent thread, which has come to a stop, its own registers and signal mask back.
    fn give_back(&mut self, own: (Registers, u64), stop: Stop) -> Result<(), Errno> {
        let begins_call = stop == Stop::SystemCall && self.tracee.begins_call();
        // A call that begins here is not the program's, and is cancelled.
        let none = |now| Registers { orig_rax: u64::MAX, ..now };
        let registers = if begins_call { self.tracee.registers().map(none)? } else { own.0 };
        self.tracee.set_registers(&registers)?;
        if let Stop::Cloned(thread) = stop {
            self.made = Some(thread);
        }
        if matches!(stop, Stop::Asked | Stop::Suspended) {
            self.tracee.block_signals(own.1)?;
            self.own = None;
            return Ok(());
        }
        // The thread has to stop once more: when it leaves that stop, the kernel begins its interrupted call again.
        self.tracee.interrupt()?;
        self.tracee.resume(Resume::Freely, if let Stop::Signal(signal) = stop { signal } else { 0 })?;
        self.stop = None;
        Ok(())
    }

    /// The thread that this thread has created since it was taken back; told once, and recorded nowhere else.
    pub const fn made(&mut self) -> Option<Pid> {
        self.made.take()
    }

    /// Waits for the stop. Says whether it came in time.
    pub fn wait(&mut self, until: Instant) -> bool {
        loop {
            match self.look() {
                Some(true) => return true,
                None => return false,
                Some(false) if Instant::now() > until => return false,
                Some(false) => std::thread::sleep(Duration::from_micros(10)),
            }
        }
    }

    /// Whether it has stopped because it was asked to, and for no other reason.
    pub fn is_plain(&self) -> bool {
        self.stop == Some(Stop::Asked)
    }

    /// How long the thread had slept in its call when it was asked to stop. Zero if it may have begun that call later.
    fn slept(&self, program: &Program, call: &Call) -> Duration {
        let count = || waited::rest(program.pid, self.tracee.thread()).map(|rest| rest.count);
        // The thread slept in the same call until it was asked if it went to sleep only once since the look, for the
        // stop itself.
        let slept = self.slept.filter(|(before, rest, _)| before == call && count() == Some(rest.count + 1));
        slept.map(|(.., slept)| slept).unwrap_or_default()
    }

    /// Lets the thread go on. If it restarts a system call that must be ended or completed from outside, it stays
    /// traced, and is returned.
    pub fn go(mut self, program: &Program) -> Option<Watched> {
        let signal = if let Some(Stop::Signal(signal)) = self.stop { signal } else { 0 };
        let watched = self.tracee.registers().ok().and_then(|registers| self.begin_again(program, registers));
        match watched {
            // If the thread cannot be resumed, it has been killed.
            Some((before, done, end)) => {
                let how = if self.stop == Some(Stop::Suspended) { Resume::Listening } else { Resume::ToSystemCall };
                let _ = self.tracee.resume(how, signal);
                Some(Watched::new(self.tracee, before, done, end))
            }
            None => {
                self.stop = None;
                self.tracee.detach(signal);
                None
            }
        }
    }

    /// Has the system call in which the thread was stopped restarted, where the kernel would not do that by itself
    /// ([`mend`]). If the thread must be watched, returns the registers of the call as the program made it, the bytes
    /// written so far, and the end of the call's time limit.
    fn begin_again(&self, program: &Program, before: Registers) -> Option<(Registers, u64, Option<Instant>)> {
        let call = Call::of(&before)?;
        let again = Registers { rax: mend::AGAIN.cast_unsigned(), ..before };
        match call.mend(before.rax.cast_signed()) {
            Mended::Untouched => None,
            Mended::Again => {
                // The thread began to wait before it was asked to stop.
                let end =
                    program.limit(&call).map(|limit| self.asked + limit.saturating_sub(self.slept(program, &call)));
                self.tracee.set_registers(&again).ok()?;
                end.map(|end| (before, 0, Some(end)))
            }
            Mended::Rest(done) => {
                let is_caught = matches!(self.stop, Some(Stop::Signal(signal)) if program.catches(signal));
                if is_caught || !program.is_stream(call.arguments[0]) {
                    return None;
                }
                let rest = Registers { rsi: before.rsi + done, rdx: before.rdx - done, ..again };
                self.tracee.set_registers(&rest).ok()?;
                // The socket's time limit counts from the last bytes that were sent.
                Some((before, done, program.limit(&call).map(|limit| self.asked + limit)))
            }
        }
    }
}

#[cfg(test)]
#[path = "stop_tests.rs"]
mod tests;
