//! Restores threads that make system calls for us, should this process be killed at any of its own calls. A second
//! process does that.
//!
//! ```text
//!   this process                                      the second process (act::trace::ExitHold)
//!      | notes a thread's registers and signal mask         waits
//!      | has the thread make calls, and restores both
//!      | notes that there is nothing to restore
//!      | ends the second process
//!
//!      | killed in between: held at its end -----------> sends the threads that it traces SIGSTOP, which they
//!      | <----- is let go -----------------------------  take before they run any code
//!     ends                                               traces them in its place; gives back what was noted, and
//!                                                        has threads of ours end; SIGCONT
//! ```
//!
//! So the program sees a short suspension. If the second process is killed, this one goes on.

use crate::ending::{Ending, Order};
use crate::halt::Halts;
use crate::program::Program;
use crate::stop::Stopped;
use crate::threads;
use crate::waited::Clocks;
use act::trace::{Dying, ExitHold, REGISTERS, Registers, Stop, Tracee, registers_of, words_of};
use host::Signals;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal, kill_process};
use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Longest wait for threads to stop, and for a killed tracer to let them go: 5 s.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two looks at these threads: 100 us.
const PAUSE: Duration = Duration::from_micros(100);
/// Length of a noted system call, in words: its number and six arguments.
const ORDER_WORDS: usize = 7;

/// A thread's own registers and its mask of blocked signals, which it is to get back.
pub type Own = (Registers, u64);

/// The second process, and the note that tells it what to restore should this process be killed.
#[derive(Debug)]
pub struct Rescue {
    _hold: ExitHold,
    file: File,
    noted: RefCell<Noted>,
}

/// The note for the second process.
#[derive(Debug, Default)]
struct Noted {
    /// A thread of the program that makes calls for us, with the registers and signal mask that it is to get back.
    lent: Option<(Pid, Own)>,
    /// A thread that we made in the program, and that is to end. `instruction` is the address of the `syscall`
    /// instruction by which it makes calls, `orders` are calls that it is to make before it ends.
    ours: Option<Pid>,
    instruction: u64,
    orders: Vec<Order>,
}

impl Noted {
    fn words(&self) -> Vec<u64> {
        let number =
            |thread: Option<Pid>| thread.map_or(0, |thread| thread.as_raw_nonzero().get().cast_unsigned().into());
        let (registers, blocked) = self.lent.map_or(([0; REGISTERS], 0), |(_, own)| (words_of(own.0), own.1));
        let mut words = vec![
            number(self.lent.map(|lent| lent.0)),
            blocked,
            number(self.ours),
            self.instruction,
            self.orders.len() as u64,
        ];
        words.extend(registers);
        words.extend(
            self.orders.iter().flat_map(|(number, arguments)| [&[number.cast_unsigned()], &arguments[..]].concat()),
        );
        words
    }

    fn of(words: &[u64]) -> Option<Self> {
        let [lent, blocked, ours, instruction, _, rest @ ..] = words else { return None };
        let thread = |number: u64| Pid::from_raw(i32::try_from(number).ok()?);
        let registers = registers_of(*rest.first_chunk()?);
        let order = |words: &[u64]| Some((words.first()?.cast_signed(), *words.get(1..)?.first_chunk()?));
        Some(Self {
            lent: thread(*lent).map(|thread| (thread, (registers, *blocked))),
            ours: thread(*ours),
            instruction: *instruction,
            orders: rest[REGISTERS..].chunks(ORDER_WORDS).filter_map(order).collect(),
        })
    }

    fn read(file: &File) -> Option<Self> {
        let mut bytes = vec![0; usize::try_from(file.metadata().ok()?.len()).ok()?];
        file.read_exact_at(&mut bytes, 0).ok()?;
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        // The rest of an earlier, longer note may follow.
        let used = 5 + REGISTERS + ORDER_WORDS * usize::try_from(*words.get(4)?).ok()?;
        Self::of(words.get(..used)?)
    }
}

impl Rescue {
    /// Starts the second process. The calling thread is about to control threads of process `pid`.
    ///
    /// # Errors
    /// No process can be made, or this process is traced itself.
    pub fn start(pid: u32) -> io::Result<Self> {
        let file = File::from(memfd_create("pagefold-rescue", MemfdFlags::CLOEXEC)?);
        let other = file.try_clone()?;
        let hold = ExitHold::start(move |dying| inherit(pid, &other, dying))?;
        Ok(Self { _hold: hold, file, noted: RefCell::default() })
    }

    fn note(&self, change: impl FnOnce(&mut Noted)) -> io::Result<()> {
        let mut noted = self.noted.borrow_mut();
        change(&mut noted);
        // The note is written by one system call, so that it is complete at any moment at which this process may be
        // killed.
        self.file.write_all_at(&noted.words().iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>(), 0)
    }
}

/// While this value lives, a thread of the program makes calls for us.
#[derive(Debug)]
pub struct Lent {
    /// The thread's own registers and signal mask, which it is to get back.
    pub own: Own,
    rescue: Option<Rc<Rescue>>,
}

impl Lent {
    /// Notes the registers and the signal mask that a thread is to get back.
    ///
    /// # Errors
    /// It cannot be noted.
    pub fn new(thread: Pid, own: Own, rescue: Rc<Rescue>) -> io::Result<Self> {
        rescue.note(|noted| noted.lent = Some((thread, own)))?;
        Ok(Self { own, rescue: Some(rescue) })
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // If the note fails, the thread may be given its registers back once more.
        let _ = self.rescue.take().map(|rescue| rescue.note(|noted| noted.lent = None));
    }
}

/// While this value lives, this process controls a thread that it has made in the program.
#[derive(Debug)]
pub struct Ours(Rc<Rescue>);

impl Ours {
    /// Notes that a thread which we made in the program is to end. It makes the calls in `orders` first, by the
    /// `syscall` instruction at address `instruction`.
    ///
    /// # Errors
    /// It cannot be noted.
    pub fn new(thread: Pid, instruction: u64, orders: &[Order], rescue: Rc<Rescue>) -> io::Result<Self> {
        rescue.note(|noted| {
            (noted.ours, noted.instruction, noted.orders) = (Some(thread), instruction, orders.to_vec());
        })?;
        Ok(Self(rescue))
    }

    /// Notes the calls that the thread has yet to make before it ends.
    ///
    /// # Errors
    /// They cannot be noted.
    pub fn is_to_make(&self, orders: &[Order]) -> io::Result<()> {
        self.0.note(|noted| noted.orders = orders.to_vec())
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        let _ = self.0.note(|noted| (noted.ours, noted.orders) = (None, Vec::new()));
    }
}

/// Does what is noted, in the second process: restores the lent thread, and ends the thread that was made. `dying` is
/// the killed process, held at its exit.
fn inherit(pid: u32, file: &File, dying: Dying) {
    let Some(noted) = Noted::read(file).filter(|noted| noted.lent.is_some() || noted.ours.is_some()) else { return };
    let Ok(program) = Program::open(pid) else { return };
    let traced = traced_by(pid, dying.thread(), &noted);
    let was_suspended =
        threads::list(pid).unwrap_or_default().into_iter().any(|thread| state(pid, thread) == Some('T'));
    for thread in &traced {
        let _ = Tracee::send(pid, *thread, libc::SIGSTOP);
    }
    drop(dying);
    let until = Instant::now() + PATIENCE;
    let seized: Vec<_> = traced.into_iter().filter_map(|thread| stopped(thread, until)).collect();
    let mut halts = Halts::new(program, Clocks::default());
    give_back(&mut halts, seized, noted);
    while halts.is_pending() {
        std::thread::sleep(PAUSE);
        halts.tend();
    }
    if !was_suspended && let Some(process) = Pid::from_raw(pid.cast_signed()) {
        let _ = kill_process(process, Signal::CONT);
    }
    let _ = Signals::catch().map(|signals| halts.finish(&signals));
}

/// The threads of a process that are traced by `tracer`, which is about to end. Waits first until the noted threads
/// have stopped, so that none of them is just making another thread.
fn traced_by(pid: u32, tracer: Pid, noted: &Noted) -> Vec<Pid> {
    let until = Instant::now() + PATIENCE;
    let tracer = tracer.as_raw_nonzero().to_string();
    let is_traced = |thread: &Pid| threads::status(pid, *thread, "TracerPid").as_ref() == Some(&tracer);
    let stands = |thread: &Pid| !is_traced(thread) || state(pid, *thread) == Some('t');
    let are_noted = || noted.ours.iter().chain(noted.lent.iter().map(|(thread, _)| thread));
    while !are_noted().all(stands) && Instant::now() < until {
        std::thread::sleep(PAUSE);
    }
    threads::list(pid).unwrap_or_default().into_iter().filter(is_traced).collect()
}

fn state(pid: u32, thread: Pid) -> Option<char> {
    threads::status(pid, thread, "State")?.chars().next()
}

/// Traces a thread once its former tracer has let it go, and waits for its stop, for as long as its process is frozen.
/// `None` if the thread has ended, or is not free by time `until`.
fn stopped(thread: Pid, until: Instant) -> Option<(Tracee, Stop)> {
    let tracee = Tracee::seize_after(thread, until).ok()?;
    tracee.interrupt().ok()?;
    loop {
        match tracee.wait(Instant::now() + PATIENCE).ok()? {
            Some(Stop::Ended) => return None,
            Some(stop) => return Some((tracee, stop)),
            None => {}
        }
    }
}

fn give_back(halts: &mut Halts, seized: Vec<(Tracee, Stop)>, mut noted: Noted) {
    let lent = noted.lent.take();
    let is_lent = |tracee: &Tracee| lent.filter(|(thread, _)| *thread == tracee.thread());
    let at =
        seized.iter().find(|(tracee, _)| is_lent(tracee).is_some()).and_then(|(tracee, _)| tracee.registers().ok());
    // A thread that the lent thread had just made by `clone`, and that was not noted yet: both are at the same place in
    // the program.
    let is_made = |now: &Registers| {
        let place = |registers: &Registers| (registers.rip, registers.rsp, registers.orig_rax);
        at.is_some_and(|at| place(&at) == place(now) && now.orig_rax == libc::SYS_clone as u64 && now.rax == 0)
    };
    for (tracee, stop) in seized {
        if let Some((_, own)) = is_lent(&tracee) {
            halts.let_go(Stopped::inherited(tracee, stop, Some(Lent { own, rescue: None })));
        } else if noted.ours == Some(tracee.thread()) {
            halts.end(Ending::new(tracee, Some(noted.instruction), std::mem::take(&mut noted.orders), None));
        } else if tracee.registers().is_ok_and(|now| is_made(&now)) {
            halts.end(Ending::new(tracee, None, Vec::new(), None));
        } else {
            halts.let_go(Stopped::inherited(tracee, stop, None));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_note_is_read() {
        let file = File::from(memfd_create("noted", MemfdFlags::CLOEXEC).unwrap());
        let write = |noted: &Noted| {
            let bytes: Vec<u8> = noted.words().iter().flat_map(|word| word.to_ne_bytes()).collect();
            file.write_all_at(&bytes, 0).unwrap();
        };
        assert!(Noted::read(&file).is_none());
        let words = std::array::from_fn(|n| n as u64 + 100);
        let thread = Pid::from_raw(7);
        // More than a page of them.
        let orders = [vec![(11, [1, 2, 3, 4, 5, 6]); 80], vec![(60, [9; 6])]].concat();
        let lent = thread.map(|thread| (thread, (registers_of(words), u64::MAX)));
        write(&Noted { lent, ours: Pid::from_raw(8), instruction: 9, orders: orders.clone() });
        let found = Noted::read(&file).unwrap();
        let (lent, (registers, blocked)) = found.lent.unwrap();
        assert_eq!((Some(lent), words_of(registers), blocked, found.ours), (thread, words, u64::MAX, Pid::from_raw(8)));
        assert_eq!(found.instruction, 9);
        assert_eq!(found.orders, orders);
        write(&Noted::default());
        let found = Noted::read(&file).unwrap();
        assert!(found.lent.is_none() && found.ours.is_none() && found.orders.is_empty());
    }
}
