//! Stops all threads of a process for a moment.
//!
//! ```text
//!   list the threads; ask those to stop that are new; again, until none is new
//!      |  all have stopped, or are held in the kernel and will stop before they run the program's code again
//!      v                       \  not in time, or another process traces one: let all go --> not now
//!   Halted --- go ---> each goes on; interrupted system calls are begun again (`mend`)
//! ```
//!
//! A thread that is held in the kernel, by a disk for example, counts as stopped only in a system call that changes no
//! mapping ([`HARMLESS`]).

use crate::stop::{self, Stopped};
use crate::threads::{self, Doing};
use crate::waited;
use page::PAGE_BYTES;
use rustix::process::Pid;
use std::collections::BTreeMap;
use std::fs::File;
use std::time::{Duration, Instant};

/// Time for all threads to stop: 6 ms.
const STOP_TIME: Duration = Duration::from_millis(6);
/// Time after which a thread that sleeps in the kernel is taken to be held there: 1 ms.
const HELD_TIME: Duration = Duration::from_millis(1);
/// System calls that a thread may be held in by a device, and that change no mapping.
const HARMLESS: [i64; 16] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_openat,
    libc::SYS_newfstatat,
    libc::SYS_unlink,
    libc::SYS_rename,
];

/// The threads of a process that this one has stopped, and those that it has asked to.
#[derive(Debug)]
pub struct Halts {
    pid: u32,
    memory: File,
    /// First address of the places for time limits.
    places: u64,
    stopped: BTreeMap<i32, Stopped>,
    /// Threads that were let go before they had stopped.
    late: Vec<Stopped>,
    /// Threads that were ever stopped: each has a place for a time limit, as long as there are places.
    known: Vec<i32>,
}

impl Halts {
    /// Of a process in whose memory time limits can be kept at `places`.
    pub const fn new(pid: u32, memory: File, places: u64) -> Self {
        Self { pid, memory, places, stopped: BTreeMap::new(), late: Vec::new(), known: Vec::new() }
    }

    /// Whether threads are stopped, or will be.
    pub fn is_pending(&self) -> bool {
        !self.stopped.is_empty() || !self.late.is_empty()
    }

    /// Stops all threads but these. Says whether that was done; if not, all go on.
    pub fn halt(&mut self, own: &[u64]) -> bool {
        self.let_late_go();
        let began = Instant::now();
        let done = self.late.is_empty() && self.stop_all(own, began);
        if !done {
            self.go();
        }
        done
    }

    fn stop_all(&mut self, own: &[u64], began: Instant) -> bool {
        let now = waited::now();
        loop {
            let Ok(all) = threads::list(self.pid) else { return false };
            let mut is_new = false;
            for thread in all {
                let number = thread.as_raw_nonzero().get();
                let is_own = own.contains(&number.cast_unsigned().into());
                if is_own || self.stopped.contains_key(&number) || !threads::runs_program(self.pid, thread) {
                    continue;
                }
                is_new = true;
                match stop::ask(self.pid, thread, now, false) {
                    Ok(Some(stopped)) => drop(self.stopped.insert(number, stopped)),
                    Ok(None) => {}
                    Err(_) => return false,
                }
            }
            if !is_new {
                return true;
            }
            while !self.all_stopped(began) {
                if began.elapsed() > STOP_TIME {
                    return false;
                }
                std::thread::sleep(Duration::from_micros(10));
            }
        }
    }

    fn all_stopped(&mut self, began: Instant) -> bool {
        let is_late = began.elapsed() > HELD_TIME;
        let pid = self.pid;
        let mut all = true;
        self.stopped.retain(|number, stopped| {
            match stopped.look() {
                None => return false,
                Some(true) => {}
                Some(false) => all &= is_late && Pid::from_raw(*number).is_some_and(|thread| is_held(pid, thread)),
            }
            true
        });
        all
    }

    /// Lets all threads go on.
    pub fn go(&mut self) {
        for (number, mut stopped) in std::mem::take(&mut self.stopped) {
            match stopped.look() {
                Some(true) => {
                    let place = self.place(number);
                    stopped.go(&self.memory, place);
                }
                Some(false) => self.late.push(stopped),
                None => {}
            }
        }
        self.let_late_go();
    }

    /// Lets those threads go on that have stopped since they were let go.
    pub fn let_late_go(&mut self) {
        for mut stopped in std::mem::take(&mut self.late) {
            match stopped.look() {
                Some(true) => {
                    let place = self.place(stopped.tracee().thread().as_raw_nonzero().get());
                    stopped.go(&self.memory, place);
                }
                Some(false) => self.late.push(stopped),
                None => {}
            }
        }
    }

    fn place(&mut self, thread: i32) -> Option<u64> {
        let at = self.known.iter().position(|known| *known == thread).unwrap_or_else(|| {
            self.known.push(thread);
            self.known.len() - 1
        });
        let bytes = 16;
        ((at + 1) * bytes <= PAGE_BYTES).then(|| self.places + (at * bytes) as u64)
    }
}

fn is_held(pid: u32, thread: Pid) -> bool {
    matches!(threads::doing(pid, thread), Doing::Call(call) if HARMLESS.contains(&call.cast_signed()))
}
