//! The channel to `pagefold-attach`, which has put this agent into the process. `pagefold-attach` stops all other
//! threads for a moment, and does what this agent may not do.
//!
//! ```text
//!   agent's thread                              pagefold-attach                 threads of the program
//!      | Halt ------------------------------------> | ---- stop ------------------> |
//!      | <---------------------------------- Halted | <--- all have stopped ------- |
//!      | replaces mappings, for some milliseconds   |
//!      | Go --------------------------------------> | ---- go on -----------------> |
//! ```

use agent::cpu_time::cpu_time;
use agent::lock::Lock;
use agent::world::Host;
use host::{Pagemap, Received, Seqpacket};
use page::{HostVirt, PageRange};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use rustix::thread::gettid;
use rustix::time::ClockId;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use wire::attach::{ATTACH_BYTES, FILES, FromAttached, Question, Server, ToAttached};

/// Shortest and longest time between two checks whether another `pagefold-attach` serves this program after the first
/// was killed: 100 ms, 5 s.
const NEXT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Time for which the program's threads stay stopped (a turn), if the agent's thread runs meanwhile: 4 ms.
const TURN: Duration = Duration::from_millis(4);
/// Time after which a turn ends even if the agent's thread ran for less than half of [`TURN`] in it: 100 ms.
const LONG_TURN: Duration = Duration::from_millis(100);
/// Time from the beginning of a turn after which nothing is replaced any more: 400 ms. `pagefold-attach` keeps the
/// threads stopped for longer. A turn lasts this long only if the agent's thread waits for a processor.
const LAST: Duration = Duration::from_millis(400);
/// Time between two turns, as a multiple of one turn: 20. It is 2 while the agent leaves, which happens once, and while
/// the program sleeps, which loses nothing by being stopped.
const APART: [u32; 2] = [20, 2];
/// Share of one processor's time between two turns below which the program is taken to sleep: 1/32. Going on after a
/// stop takes some of it.
const SLEEPS: u32 = 32;
/// Longest wait until `pagefold-attach` has stopped the threads: 400 ms.
const ANSWER: Duration = Duration::from_millis(400);
/// Longest wait for the answer to a question about the process: 1 s.
const TOLD: Duration = Duration::from_secs(1);
/// Attempts to have the threads stopped, and the pause after the first attempt, which doubles: 6, 1 ms.
const TRIES: (u32, Duration) = (6, Duration::from_millis(1));

static CHANNEL: OnceLock<Seqpacket> = OnceLock::new();
static THREADS: Lock<Vec<u64>> = Lock::new(Vec::new());
static LEAVING: AtomicBool = AtomicBool::new(false);
static HERE: OnceLock<FromAttached> = OnceLock::new();
static LEFT: OnceLock<FromAttached> = OnceLock::new();
static GATE: OnceLock<HostVirt> = OnceLock::new();
static HELD: Lock<Option<Instant>> = Lock::new(None);
/// Used by the agent's first thread alone, which sleeps with this lock held.
static TURNS: Lock<Turns> = Lock::new(Turns::new());

/// `pagefold-attach`, at the other end of the channel.
#[derive(Debug)]
pub struct Attach;

/// Times for which the program's threads are stopped, so that mappings may be replaced.
#[derive(Debug)]
struct Turns {
    /// Of the present turn: when the threads were asked to stop, when the turn's time began to count, and this thread's
    /// processor time at that moment.
    began: Option<(Instant, Instant, Duration)>,
    /// The end of the last turn, its length, and the program's processor time at its end.
    last: Option<(Instant, Duration, Duration)>,
    number: u64,
}

/// Takes over the channel to `pagefold-attach`, and receives the files that it sends first. Returns this process's page
/// table.
///
/// # Errors
/// `pagefold-attach` is gone.
pub fn open(channel: Seqpacket) -> io::Result<Pagemap> {
    let (mut frame, mut files) = ([0; ATTACH_BYTES], Vec::new());
    loop {
        match channel.receive(&mut frame, &mut files)? {
            Received::Nothing => drop(poll(&mut [PollFd::new(&channel, PollFlags::IN)], None)),
            Received::Frame(bytes) if frame[..bytes] == FILES => break,
            Received::Frame(_) | Received::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
    let mut files = files.into_iter();
    let pagemap = files.next().map(Pagemap::handed).ok_or(io::ErrorKind::UnexpectedEof)?;
    files.for_each(host::lend_userfaultfd_device);
    let _ = CHANNEL.set(channel);
    Ok(pagemap)
}

/// Records the addresses of the agent's object, and whether the agent folds all private anonymous memory. If
/// `pagefold-attach` is killed, the one that takes its place is told both.
pub fn know(object: PageRange, all_anonymous: bool) {
    let _ = HERE.set(FromAttached::Here { object, all_anonymous });
}

/// Whether the agent has been told to leave this process, and has not decided to stay ([`stay`]) since.
pub fn is_leaving() -> bool {
    loop {
        let leaves = LEAVING.load(Ordering::Relaxed);
        if leaves || receive(Duration::ZERO).is_none() {
            return leaves;
        }
    }
}

/// Notes that the agent stays, although it was told to leave.
pub fn stay() {
    LEAVING.store(false, Ordering::Relaxed);
}

/// Tells `pagefold-attach` the address of the gate, so that it leads the program's calls there.
pub fn tell_gate(place: HostVirt) {
    let _ = GATE.set(place);
    // The program's threads need not be stopped for that.
    let threads = THREADS.lock().clone();
    send(&FromAttached::Threads(threads));
    send(&FromAttached::Gate(place));
}

/// Tells `pagefold-attach` that nothing is left of the agent but the memory in these ranges.
pub fn left(ranges: Vec<PageRange>) {
    // Threads of the agent that are about to end still have their stacks in these ranges.
    let threads = THREADS.lock().clone();
    send(&FromAttached::Threads(threads));
    send(LEFT.get_or_init(|| FromAttached::Left(ranges)));
}

/// Waits until `pagefold-attach` ends this thread. If `pagefold-attach` is killed before, another one takes its place,
/// and is told the same.
pub fn wait_for_end() -> ! {
    let mut pause = NEXT.0;
    loop {
        // `receive` returns at once with nothing if `pagefold-attach` is gone.
        if receive(Duration::from_secs(3600)).is_some() {
            pause = NEXT.0;
        }
        std::thread::sleep(pause);
        pause = page::doubled(Some(pause), NEXT);
    }
}

impl Host for Attach {
    fn hold(&self) -> Option<bool> {
        TURNS.lock().hold()
    }

    fn begin(&self) {
        TURNS.lock().begin();
    }

    fn rest(&self) {
        TURNS.lock().rest();
    }

    fn is_held(&self) -> bool {
        HELD.lock().is_some_and(|since| since.elapsed() < LAST)
    }

    /// `pagefold-attach` passes the connection on. If no process takes it, it is closed.
    fn connect(&self, server: Server) -> io::Result<Seqpacket> {
        let (ours, theirs) = Seqpacket::pair()?;
        let frame = FromAttached::Connect(server).encode();
        match CHANNEL.get().map(|channel| channel.send(&frame, &[theirs.as_fd()])) {
            Some(Ok(true)) => Ok(ours),
            Some(Err(e)) => Err(e),
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn ask(&self, question: Question) -> Option<Vec<u64>> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let until = Instant::now() + TOLD;
        if !send(&FromAttached::Ask { number, question }) {
            return None;
        }
        loop {
            // Late answers to former questions may come first.
            match receive(until.saturating_duration_since(Instant::now()))? {
                ToAttached::Told { number: its, answers } if its == number => return Some(answers),
                _ => {}
            }
        }
    }

    fn join(&self) {
        THREADS.lock().push(gettid().as_raw_nonzero().get().cast_unsigned().into());
    }

    fn tell_birth(&self) {
        send(&FromAttached::Born);
    }
}

impl Turns {
    /// The state before the first turn.
    const fn new() -> Self {
        Self { began: None, last: None, number: 0 }
    }

    /// See [`Host::hold`].
    fn hold(&mut self) -> Option<bool> {
        if self.began.is_some_and(|(_, begin, used)| !is_over(begin.elapsed(), used)) {
            return Some(false);
        }
        self.rest();
        self.wait();
        let mut pause = TRIES.1;
        for _ in 0..TRIES.0 {
            let asked = Instant::now();
            if self.halt() {
                // The turn counts from the request: this thread itself may have waited for a processor before it read
                // the answer.
                *HELD.lock() = Some(asked);
                if Attach.is_held() {
                    self.began = Some((asked, Instant::now(), cpu_time(ClockId::ThreadCPUTime)));
                    return Some(true);
                }
                *HELD.lock() = None;
                send(&FromAttached::Go);
            }
            std::thread::sleep(pause);
            pause *= 2;
        }
        None
    }

    /// See [`Host::begin`].
    fn begin(&mut self) {
        if let Some((_, begin, used)) = &mut self.began {
            (*begin, *used) = (Instant::now(), cpu_time(ClockId::ThreadCPUTime));
        }
    }

    /// See [`Host::rest`].
    fn rest(&mut self) {
        if let Some((asked, ..)) = self.began.take() {
            *HELD.lock() = None;
            send(&FromAttached::Go);
            self.last = Some((Instant::now(), asked.elapsed(), program_time()));
        }
    }

    /// Waits until the next turn may begin ([`APART`]).
    fn wait(&mut self) {
        let Some((end, turn, used)) = self.last.take() else { return };
        let sleep = |apart: u32| std::thread::sleep((end + turn * apart).saturating_duration_since(Instant::now()));
        let [apart, least] = APART;
        sleep(least);
        let sleeps = program_time().saturating_sub(used) * SLEEPS < end.elapsed();
        if !sleeps && !LEAVING.load(Ordering::Relaxed) {
            sleep(apart);
        }
    }

    fn halt(&mut self) -> bool {
        self.number += 1;
        let threads = THREADS.lock().clone();
        if !send(&FromAttached::Halt { number: self.number, threads }) {
            return false;
        }
        let until = Instant::now() + ANSWER;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match receive(left) {
                Some(ToAttached::Halted(number)) if number == self.number => return true,
                Some(ToAttached::NotNow(number)) if number == self.number => return false,
                Some(_) => {}
                None => {
                    send(&FromAttached::Go);
                    return false;
                }
            }
        }
    }
}

/// Whether a turn that has lasted for `lasted` is over. `used` is this thread's processor time at its beginning.
fn is_over(lasted: Duration, used: Duration) -> bool {
    lasted >= TURN && (lasted >= LONG_TURN || cpu_time(ClockId::ThreadCPUTime) - used >= TURN / 2)
}

/// Processor time of the process without the calling thread.
fn program_time() -> Duration {
    cpu_time(ClockId::ProcessCPUTime).saturating_sub(cpu_time(ClockId::ThreadCPUTime))
}

fn send(message: &FromAttached) -> bool {
    CHANNEL.get().is_some_and(|channel| channel.send(&message.encode(), &[]).is_ok_and(|sent| sent))
}

/// The next message; `None` if none comes within this time, or the channel is closed.
fn receive(time: Duration) -> Option<ToAttached> {
    let (channel, mut buffer) = (CHANNEL.get()?, [0; ATTACH_BYTES]);
    let time = Timespec::try_from(time).ok();
    let _ = poll(&mut [PollFd::new(channel, PollFlags::IN)], time.as_ref());
    let Ok(Received::Frame(bytes)) = channel.receive_bare(&mut buffer) else { return None };
    let message = ToAttached::decode(&buffer[..bytes]);
    match message {
        Some(ToAttached::Leave) => LEAVING.store(true, Ordering::Relaxed),
        Some(ToAttached::Tell) => {
            let threads = FromAttached::Threads(THREADS.lock().clone());
            send(&threads);
            // The former `pagefold-attach` may not have led all calls to the gate.
            GATE.get().filter(|_| LEFT.get().is_none()).map(|place| send(&FromAttached::Gate(*place)));
            HERE.get().map(send);
            // The new `pagefold-attach` begins to serve now.
            LEFT.get().filter(|_| send(&threads)).map(send);
        }
        _ => {}
    }
    message
}
