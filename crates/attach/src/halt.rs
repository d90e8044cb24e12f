//! Stops all threads of a process for a moment.
//!
//! ```text
//!   list the threads; ask those to stop that are new; again, until none is new
//!      |  all have stopped, or are held in the kernel and will stop before they run the program's code again
//!      v                       \  not in time, or another process traces one: let all go --> not now
//!   Halted --- go ---> each goes on; interrupted system calls are begun again (`mend`, `watched`)
//! ```
//!
//! A thread may be held in the kernel, by a disk for example. It counts as stopped only in a system call that changes
//! no mapping ([`HARMLESS`]).

use crate::ending::Ending;
use crate::mend::Limit;
use crate::program::Program;
use crate::rescue::Rescue;
use crate::stop::{self, Asked, Stopped};
use crate::threads::{self, Doing};
use crate::waited::Clocks;
use crate::watched::Watched;
use act::trace::Tracee;
use host::Signals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::Pid;
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

/// Longest wait for all threads to stop: 6 ms at first. It doubles up to 48 ms while threads stop late, for lack of
/// processors.
const STOP_TIME: (Duration, Duration) = (Duration::from_millis(6), Duration::from_millis(48));
/// When threads are to go on and the process's first thread has not stopped yet: the longest wait for that stop, 50 ms.
/// The first thread has to go on before the others.
const LEADER_TIME: Duration = Duration::from_millis(50);
/// Time after which a thread that has not stopped may count as held in the kernel by a device: 1 ms.
const HELD_TIME: Duration = Duration::from_millis(1);
/// Time between two looks at threads that have yet to stop: 200 us.
pub const SOON: Duration = Duration::from_micros(200);
/// Time between two looks at threads whose restarted calls may end by themselves: 1 s.
const LOOK: Duration = Duration::from_secs(1);
/// System calls that change no mapping, and in which a device may hold a thread. A thread held in one of them counts as
/// stopped.
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

/// The threads of a process that this process has stopped, or has asked to stop.
#[derive(Debug)]
pub struct Halts {
    program: Program,
    clocks: Clocks,
    stopped: BTreeMap<i32, Stopped>,
    /// Threads that were let go before they had stopped.
    late: Vec<Stopped>,
    /// Threads that go on, traced until the system calls that they have restarted have ended.
    watched: BTreeMap<i32, Watched>,
    /// Threads that this program has made in the process, and that are to end.
    ending: Vec<Ending>,
    /// The process that gives lent threads back, and ends threads of ours, should this process be killed.
    rescue: Weak<Rescue>,
    /// When the first thread was asked to stop, if threads are stopped.
    began: Option<Instant>,
    /// Time for all threads to stop. It doubles when it was too short, and halves otherwise.
    stop_time: Duration,
    /// Lengths of all stops so far; `None` if they are not to be noted.
    stops: Option<Vec<Duration>>,
}

impl Halts {
    /// For a program of which no thread is stopped.
    pub const fn new(program: Program, clocks: Clocks) -> Self {
        Self {
            program,
            clocks,
            stopped: BTreeMap::new(),
            late: Vec::new(),
            watched: BTreeMap::new(),
            ending: Vec::new(),
            rescue: Weak::new(),
            began: None,
            stop_time: STOP_TIME.0,
            stops: None,
        }
    }

    /// Notes from here on how long threads are stopped.
    pub fn note_stops(&mut self) {
        self.stops = Some(Vec::new());
    }

    /// How long threads were stopped, each time.
    pub fn stops(&self) -> &[Duration] {
        self.stops.as_deref().unwrap_or_default()
    }

    /// The process.
    pub const fn pid(&self) -> u32 {
        self.program.pid
    }

    /// The process beside this one that gives a lent thread back, or ends a thread of ours, should this process be
    /// killed.
    ///
    /// # Errors
    /// The process cannot be made.
    pub fn rescue(&mut self) -> std::io::Result<Rc<Rescue>> {
        if let Some(rescue) = self.rescue.upgrade() {
            return Ok(rescue);
        }
        let rescue = Rc::new(Rescue::start(self.program.pid)?);
        self.rescue = Rc::downgrade(&rescue);
        Ok(rescue)
    }

    /// Asks one thread to stop; threads that it makes are traced, too. The thread is to be given to [`Halts::let_go`]
    /// afterwards.
    ///
    /// # Errors
    /// `EPERM`: it must not be traced, or another process traces it.
    pub fn ask_one(&self, thread: Pid) -> Result<Asked, Errno> {
        stop::ask(self.program.pid, thread, &self.clocks, true)
    }

    /// Lets a thread that was asked to stop ([`Halts::ask_one`]) go on as soon as it has stopped.
    pub fn let_go(&mut self, stopped: Stopped) {
        self.late.push(stopped);
        self.tend();
    }

    /// Takes over a thread that this program has made in the process, and that is to end.
    pub fn end(&mut self, ending: Ending) {
        self.ending.push(ending);
        self.tend();
    }

    /// Lets all threads go on, and looks after them until none needs that: if this process ended before, the program
    /// would see interrupted calls.
    pub fn finish(&mut self, signals: &Signals) {
        self.go();
        while self.is_pending() || !self.watched.is_empty() {
            let time = self.due().map_or(LOOK, |due| due.saturating_duration_since(Instant::now()).min(LOOK));
            let time = if self.is_pending() { time.min(SOON) } else { time };
            // A stop of a thread's comes with a signal to this process.
            let _ = poll(&mut [PollFd::new(signals, PollFlags::IN)], Timespec::try_from(time).ok().as_ref());
            while signals.next().is_some() {}
            self.tend();
        }
    }

    /// Whether threads are stopped, will stop, or are about to end.
    pub fn is_pending(&self) -> bool {
        !self.stopped.is_empty() || !self.late.is_empty() || !self.ending.is_empty()
    }

    /// When [`Halts::tend`] is to be called, though nothing happens.
    pub fn due(&self) -> Option<Instant> {
        self.watched.values().filter_map(Watched::due).min()
    }

    /// Stops all threads but `own`. Returns whether all have stopped; if not, all go on.
    pub fn halt(&mut self, own: &[u64]) -> bool {
        if !self.take_late() {
            self.tend();
            return false;
        }
        if !self.may_stop(own) {
            self.go();
            return false;
        }
        let began = Instant::now();
        self.began = Some(began);
        let done = self.stop_all(own, began);
        let was_late = !done && began.elapsed() > self.stop_time;
        let next = if was_late { self.stop_time * 2 } else { self.stop_time / 2 };
        self.stop_time = next.clamp(STOP_TIME.0, STOP_TIME.1);
        if !done {
            self.go();
        }
        done
    }

    /// Waits for threads that an earlier halt asked to stop and let go before they had stopped, while other threads go
    /// on. Returns whether these stand still now. They are kept, because a thread that lacks a processor would stop no
    /// sooner if it was let go and asked again.
    fn take_late(&mut self) -> bool {
        let until = Instant::now() + self.stop_time;
        loop {
            let pid = self.program.pid;
            self.late.retain_mut(|late| late.look().is_some_and(|stopped| stopped || may_yet_stop(pid, late)));
            if self.late.iter_mut().all(|late| late.look() == Some(true)) {
                let late = std::mem::take(&mut self.late).into_iter();
                self.stopped.extend(late.map(|late| (number(late.tracee().thread()), late)));
                self.tend();
                return true;
            }
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_micros(10));
        }
    }

    /// Threads of the program with their ids, except for the agent's threads (`own`) and those that are stopped,
    /// watched or ending already.
    ///
    /// # Errors
    /// The process is gone.
    pub fn others(&self, own: &[u64]) -> std::io::Result<Vec<(i32, Pid)>> {
        let pid = self.program.pid;
        let is_other = |(number, thread): &(i32, Pid)| {
            !own.contains(&number.cast_unsigned().into())
                && !self.stopped.contains_key(number)
                && !self.watched.contains_key(number)
                && !self.late.iter().any(|late| late.tracee().thread() == *thread)
                && !self.ending.iter().any(|ending| ending.thread() == *thread)
                && threads::runs_program(pid, *thread)
        };
        Ok(threads::list(pid)?.into_iter().map(|thread| (number(thread), thread)).filter(is_other).collect())
    }

    /// Whether no thread is in a call that must not be interrupted. If one waits in a call with a time limit, the
    /// scheduler clocks are compared ([`Clocks::refresh`]): no thread is stopped meanwhile.
    fn may_stop(&mut self, own: &[u64]) -> bool {
        let pid = self.program.pid;
        let Ok(others) = self.others(own) else { return false };
        let mut is_timed = false;
        for (_, thread) in others {
            if let Doing::Call(call) = threads::doing(pid, thread) {
                if !call.may_be_stopped() && threads::is_interruptible(pid, thread) {
                    return false;
                }
                is_timed |= call.limit() != Limit::None;
            }
        }
        if is_timed {
            self.clocks.refresh();
        }
        true
    }

    /// Stops all threads but `own`. The first thread is the last to be stopped, and the first to go on. While it is
    /// traced, signals that the program ignores interrupt threads that are not traced.
    fn stop_all(&mut self, own: &[u64], began: Instant) -> bool {
        let leader = self.program.pid.cast_signed();
        self.watched.retain(|number, watched| *number == leader || watched.ask().is_ok());
        loop {
            let Ok(mut new) = self.others(own) else { return false };
            new.retain(|(number, _)| *number != leader);
            if !self.ask(&new) || !self.wait_for(|number| number != leader, began) {
                return false;
            }
            if new.is_empty() {
                break;
            }
        }
        if let Some(watched) = self.watched.get(&leader) {
            let _ = watched.ask();
        } else if !self.stopped.contains_key(&leader)
            && let Some(thread) =
                Pid::from_raw(leader).filter(|thread| threads::runs_program(self.program.pid, *thread))
            && !self.ask(&[(leader, thread)])
        {
            return false;
        }
        self.wait_for(|_| true, began) && self.others(own).is_ok_and(|new| new.is_empty())
    }

    /// Asks threads to stop. Returns false if one of them must not be stopped or traced: then the threads behind it are
    /// not asked.
    fn ask(&mut self, threads: &[(i32, Pid)]) -> bool {
        for (number, thread) in threads {
            match stop::ask(self.program.pid, *thread, &self.clocks, false) {
                Ok(Asked::Stops(stopped)) => drop(self.stopped.insert(*number, stopped)),
                Ok(Asked::Ended) => {}
                Ok(Asked::MustNot) | Err(_) => return false,
            }
        }
        true
    }

    /// Waits until the threads that were asked to stop have stopped, for `stop_time` after `began` at most. Returns
    /// whether they have. Watched threads count only if `which` holds for their id.
    fn wait_for(&mut self, which: impl Fn(i32) -> bool, began: Instant) -> bool {
        while !self.all_stopped(&which, began) {
            if began.elapsed() > self.stop_time {
                return false;
            }
            std::thread::sleep(Duration::from_micros(10));
        }
        true
    }

    fn all_stopped(&mut self, which: impl Fn(i32) -> bool, began: Instant) -> bool {
        let is_late = began.elapsed() > HELD_TIME;
        let pid = self.program.pid;
        let mut all = true;
        self.stopped.retain(|number, stopped| {
            match stopped.look() {
                None => return false,
                Some(true) => {}
                Some(false) => all &= is_late && Pid::from_raw(*number).is_some_and(|thread| is_held(pid, thread)),
            }
            true
        });
        self.watched.retain(|number, watched| {
            if !which(*number) {
                return true;
            }
            let stands = watched.stands();
            all &= stands != Some(false);
            stands.is_some()
        });
        all
    }

    /// Lets all threads go on.
    pub fn go(&mut self) {
        let mut leader = self.stopped.remove(&self.program.pid.cast_signed());
        // While the first thread is traced, signals that the program ignores interrupt threads that are not traced. So
        // the others go on only after the first one has stopped and can be let go.
        leader.as_mut().map(|leader| leader.wait(Instant::now() + LEADER_TIME));
        self.late.extend(leader.into_iter().chain(std::mem::take(&mut self.stopped).into_values()));
        self.tend();
        if let (Some(began), Some(stops)) = (self.began.take(), &mut self.stops) {
            stops.push(began.elapsed());
        }
    }

    /// Looks after threads that were let go: those that stop only now go on, and watched ones get what they need. Not
    /// to be called while all threads are to stand still.
    pub fn tend(&mut self) {
        let leader = self.watched.remove_entry(&self.program.pid.cast_signed());
        let others = std::mem::take(&mut self.watched);
        let program = &self.program;
        let tend = |(number, watched): (i32, Watched)| Some((number, watched.tend(program)?));
        self.watched.extend(leader.and_then(tend));
        self.ending.retain_mut(|ending| !ending.tend());
        for mut stopped in std::mem::take(&mut self.late) {
            let looked = stopped.look();
            let made = stopped.made().map(|thread| Ending::new(Tracee::of_clone(thread), None, Vec::new(), None));
            self.ending.extend(made);
            match looked {
                Some(true) => {
                    let watched = stopped.go(&self.program);
                    self.watched.extend(watched.map(|watched| (number(watched.thread()), watched)));
                }
                Some(false) if may_yet_stop(self.program.pid, &stopped) => self.late.push(stopped),
                Some(false) => {}
                None => {}
            }
        }
        self.watched.extend(others.into_iter().filter_map(tend));
    }
}

fn number(thread: Pid) -> i32 {
    thread.as_raw_nonzero().get()
}

/// Whether a thread that has not stopped may still stop. A first thread that has ended does not stop, and its tracer
/// hears of its end only when the whole process has ended.
fn may_yet_stop(pid: u32, late: &Stopped) -> bool {
    let thread = late.tracee().thread();
    number(thread) != pid.cast_signed() || threads::runs_program(pid, thread)
}

/// Whether a thread waits for a device, which no signal ends, in a call that changes no mapping.
fn is_held(pid: u32, thread: Pid) -> bool {
    let is_harmless = matches!(threads::doing(pid, thread), Doing::Call(call) if HARMLESS.contains(&call.number));
    is_harmless && !threads::is_interruptible(pid, thread)
}

#[cfg(test)]
#[path = "halt_tests.rs"]
mod tests;
