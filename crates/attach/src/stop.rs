//! Stops single threads, and lets them go on as if nothing had happened.

use crate::mend::{self, Mended};
use crate::{threads, waited};
use act::{Registers, Stop, Tracee};
use rustix::io::Errno;
use rustix::process::Pid;
use std::time::{Duration, Instant};

/// A stopped thread, or one that will stop before it runs any code of the program's again.
#[derive(Debug)]
pub struct Stopped {
    tracee: Tracee,
    /// A signal that it is about to take.
    signal: i32,
    /// How long it had slept when it was asked to stop.
    slept: Duration,
    is_stopped: bool,
}

/// Asks a thread to stop, and does not wait. `None` if it has ended. `follow` says whether threads that it makes are
/// traced, too.
///
/// # Errors
/// `EPERM`: it must not be traced, or another process traces it.
pub fn ask(pid: u32, thread: Pid, now: Option<Duration>, follow: bool) -> Result<Option<Stopped>, Errno> {
    // Asking wakes the thread.
    let slept = match threads::doing(pid, thread) {
        threads::Doing::Call(call) if mend::may_be_timed(call) => waited::since(now, pid, thread),
        _ => Duration::ZERO,
    };
    let tracee = match Tracee::seize(thread, follow) {
        Ok(tracee) => tracee,
        Err(Errno::SRCH) => return Ok(None),
        Err(e) => return Err(e),
    };
    match tracee.interrupt() {
        Ok(()) => Ok(Some(Stopped { tracee, signal: 0, slept, is_stopped: false })),
        Err(_) => Ok(None),
    }
}

impl Stopped {
    /// The thread's tracer.
    pub const fn tracee(&self) -> &Tracee {
        &self.tracee
    }

    /// Whether it has stopped; `None` if it has ended.
    pub fn look(&mut self) -> Option<bool> {
        while !self.is_stopped {
            match self.tracee.look() {
                Ok(None) => return Some(false),
                Ok(Some(Stop::Ended)) | Err(_) => return None,
                Ok(Some(Stop::Signal(signal))) => (self.signal, self.is_stopped) = (signal, true),
                Ok(Some(_)) => self.is_stopped = true,
            }
        }
        Some(true)
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

    /// Whether it is about to take a signal. It has then not ended its system call because of us.
    pub const fn takes_signal(&self) -> bool {
        self.signal != 0
    }

    /// Mends the registers that it will go on with. `place` keeps a time limit for it: the address of a `timespec` in
    /// its process, and what reads and writes memory there.
    pub fn mend(&self, registers: &mut Registers, memory: &std::fs::File, place: Option<u64>) -> Mended {
        use std::os::unix::fs::FileExt;
        let before = *registers;
        let mended = mend::mend(registers, self.slept);
        let Mended::AgainWithTime(limit) = mended else { return mended };
        let mut bytes = [0_u8; 16];
        let moved = place.filter(|_| memory.read_exact_at(&mut bytes, limit).is_ok()).and_then(|place| {
            let [seconds, nanoseconds] =
                [0, 8].map(|at| i64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap_or_default()));
            let left = mend::rest([seconds, nanoseconds], self.slept);
            let left: Vec<u8> = left.into_iter().flat_map(i64::to_ne_bytes).collect();
            memory.write_all_at(&left, place).ok().map(|()| place)
        });
        match moved {
            Some(place) => mend::point_to(registers, place),
            // It waits for as long as it meant to at first.
            None => *registers = Registers { rax: registers.rax, ..before },
        }
        mended
    }

    /// Lets it go on.
    pub fn go(self, memory: &std::fs::File, place: Option<u64>) {
        if !self.takes_signal()
            && let Ok(mut registers) = self.tracee.registers()
            && self.mend(&mut registers, memory, place) != Mended::Untouched
        {
            // If this fails, the thread has been killed.
            let _ = self.tracee.set_registers(&registers);
        }
        self.tracee.detach(self.signal);
    }
}
