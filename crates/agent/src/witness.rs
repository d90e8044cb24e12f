//! Whether a page from which writers are kept out (by userfaultfd write protection) may still be written through a
//! reference to it, such as a pin.
//!
//! A page that shows a file needs no proof: it is read-only, and nobody can hold it for writing. For other pages, one
//! of two witnesses is asked:
//!
//! - The service's *prover*, if there is one. It reads the page's reference count, as ksmd does. Nobody can have taken
//!   a reference for writing since writers are kept out, because that takes the same fault as a write.
//! - If there is no prover that answers, a *fork probe* ([`act::ForkProbe`]), provided that no child gets memory that
//!   may be folded. It is a child that is forked before writers are kept out. A page that is still shared with it was
//!   not pinned at the fork, and has neither been written nor pinned for writing since. The fork probe does not show
//!   references that are no pins. Members in which anything is known to take such references are not folded
//!   (`references`).

use crate::table::{Table, everything};
use crate::world;
use act::{ForkProbe, Prover};
use host::{Pagemap, PagemapEntry};
use page::{HostVirt, PageRange};
use rustix::io::Errno;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use wire::attach::Server;
use wire::prove::Proof;

/// Largest share of the time that forking probes may take, however often the worker asks for folds: 1/50.
const PROBE_SHARE: u32 = 50;
/// Shortest and longest life of a fork probe: 50 ms, 5 s. It ends when another one may be forked. During its life, the
/// first write of the process to each of its broken pages costs a copy.
const PROBE_TIME: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// Longest wait for the prover's answer while writers are kept out: 2 ms.
const ANSWER_TIME: Duration = Duration::from_millis(2);
/// Longest wait for the prover's answer while no writer is kept out: 100 ms.
const LATE_TIME: Duration = Duration::from_millis(100);
/// First and longest pause before the prover is asked again after it did not answer: 1 s, 64 s. The pause doubles while
/// the prover stays silent.
const SILENCE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(64));

/// The time for which a prover or keeper is not asked, because it accepted a connection and then did not answer.
#[derive(Default)]
pub struct Silence {
    until: Option<Instant>,
    time: Option<Duration>,
}

impl Silence {
    /// Notes that the prover or keeper did not answer.
    pub fn begin(&mut self) {
        let time = page::doubled(self.time, SILENCE);
        (self.until, self.time) = (Some(Instant::now() + time), Some(time));
    }

    /// Notes that the prover or keeper answered.
    pub fn end(&mut self) {
        *self = Self::default();
    }

    /// Whether the prover or keeper must not be asked at this moment.
    pub fn lasts(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() < until)
    }
}

/// The witness of this process: a connection to the service's prover, or fork probes.
pub struct Witness {
    /// The path of the prover's socket. There may be no prover.
    prover: PathBuf,
    at_hand: Option<AtHand>,
    /// The time before which no fork probe may be forked.
    next_probe: Instant,
    entries: Vec<PagemapEntry>,
    proofs: Vec<Proof>,
    /// Whether the prover did not answer the last question in time.
    is_late: bool,
    silence: Silence,
}

enum AtHand {
    Prover(Box<Prover>),
    /// While it lives, page tables show which pages are shared with it.
    ForkProbe {
        _cast: ForkProbe,
        until: Instant,
    },
}

impl Witness {
    /// `prover` is the path of the prover's socket. There may be no prover.
    pub fn new(prover: PathBuf) -> Self {
        Self {
            prover,
            at_hand: None,
            next_probe: Instant::now(),
            entries: Vec::new(),
            proofs: Vec::new(),
            is_late: false,
            silence: Silence::default(),
        }
    }

    /// Calls a witness that knows these broken pages, if there can be one. The witness may know other pages, too.
    /// `table` is the table's lock, held.
    ///
    /// # Errors
    /// There is no prover that answers, and no fork probe may be forked, or memory or processes are short.
    pub fn call(&mut self, table: &Table, pagemap: &Pagemap, asked: &[PageRange]) -> Result<(), Errno> {
        self.rest();
        if self.at_hand.is_some() && asked.iter().all(|range| self.knows(pagemap, *range)) {
            return Ok(());
        }
        self.call_for(table, &table.refoldable()).map(drop)
    }

    /// Whether the present witness knows all of these pages. A fork probe does not know pages that were broken or
    /// written after it was forked. The prover knows all pages.
    fn knows(&mut self, pagemap: &Pagemap, range: PageRange) -> bool {
        if matches!(self.at_hand, Some(AtHand::Prover(_))) {
            return true;
        }
        let is_own = |entry: &PagemapEntry| entry.present() && !entry.file_or_shared() && entry.exclusive();
        pagemap.read(range.start, range.pages, &mut self.entries).is_ok() && !self.entries.iter().any(is_own)
    }

    /// Whether a witness can be called: the prover is connected, or another fork probe may be forked.
    pub fn may_be_called(&self, now: Instant) -> bool {
        matches!(self.at_hand, Some(AtHand::Prover(_))) || now >= self.next_probe
    }

    /// Calls a witness that knows these pages. Returns whether there is one.
    ///
    /// # Errors
    /// As [`Witness::call`].
    pub fn call_for(&mut self, table: &Table, pages: &[PageRange]) -> Result<bool, Errno> {
        if matches!(self.at_hand, Some(AtHand::Prover(_))) {
            return Ok(true);
        }
        let began = Instant::now();
        // The kernel also accepts connections on behalf of a prover that is stopped, so a prover that did not answer is
        // not tried for a while.
        if !self.silence.lasts()
            && let Ok(prover) = world::connect(Server::Prover, &self.prover).map(Prover::over)
        {
            self.at_hand = Some(AtHand::Prover(Box::new(prover)));
            return Ok(true);
        }
        if began < self.next_probe {
            return Ok(false);
        }
        self.at_hand = None;
        let cast = fork_probe(table, pages);
        let (now, pause) = (Instant::now(), began.elapsed() * PROBE_SHARE);
        self.next_probe = now + pause;
        self.at_hand = Some(AtHand::ForkProbe { _cast: cast?, until: now + pause.clamp(PROBE_TIME.0, PROBE_TIME.1) });
        Ok(true)
    }

    /// Ends the fork probe if its time is over; otherwise returns how long it may stay. The prover's connection is
    /// kept.
    pub fn rest(&mut self) -> Option<Duration> {
        let now = Instant::now();
        self.at_hand.take_if(|at_hand| matches!(at_hand, AtHand::ForkProbe { until, .. } if *until <= now));
        match &self.at_hand {
            Some(AtHand::ForkProbe { until, .. }) => Some(*until - now),
            _ => None,
        }
    }

    /// Ends the present witness, so that the next call finds a new one.
    #[cfg(test)]
    pub fn end(&mut self) {
        self.at_hand = None;
        self.may_cast_now();
    }

    /// Lets the next fork probe be forked at once.
    #[cfg(test)]
    pub fn may_cast_now(&mut self) {
        self.next_probe = Instant::now();
    }

    /// Whether a witness has been called, and can be asked.
    pub const fn is_at_hand(&self) -> bool {
        self.at_hand.is_some()
    }

    /// Whether the last question was not answered in time, because the prover or the processors are busy.
    pub const fn is_late(&self) -> bool {
        self.is_late
    }

    /// Waits until a late prover answers again. Returns whether it makes sense to ask again. The caller keeps no writer
    /// out.
    pub fn catch_up(&mut self) -> bool {
        let Some(AtHand::Prover(prover)) = &mut self.at_hand else { return false };
        // The question does not matter: the prover answers in order.
        let nothing = [PageRange { start: HostVirt(0), pages: 1 }];
        let is_there = prover.ask(&nothing, &mut [Proof::Unknown], LATE_TIME).is_ok();
        if is_there {
            self.silence.end();
        } else {
            self.at_hand = None;
            self.silence.begin();
        }
        is_there
    }

    /// Asks about pages from which writers are kept out. Returns an answer for each page, in order.
    pub fn ask(&mut self, pagemap: &Pagemap, ranges: impl Iterator<Item = PageRange>) -> &[Proof] {
        self.ask_within(pagemap, ranges, ANSWER_TIME)
    }

    /// Like [`Witness::ask`], with `time` for the prover's answer.
    pub fn ask_within(
        &mut self,
        pagemap: &Pagemap,
        ranges: impl Iterator<Item = PageRange>,
        time: Duration,
    ) -> &[Proof] {
        let ranges: Vec<PageRange> = ranges.collect();
        let pages: u64 = ranges.iter().map(|range| range.pages).sum();
        self.proofs.clear();
        self.is_late = false;
        if pages == 0 {
            return &self.proofs;
        }
        self.proofs.resize(pages as usize, Proof::Unknown);
        match &mut self.at_hand {
            Some(AtHand::Prover(prover)) => {
                let answer = prover.ask(&ranges, &mut self.proofs, time);
                if let Err(e) = answer {
                    self.proofs.fill(Proof::Unknown);
                    self.is_late = e.kind() == ErrorKind::TimedOut;
                    if !self.is_late {
                        // The prover is gone. The next call finds another one.
                        self.at_hand = None;
                    }
                }
            }
            Some(AtHand::ForkProbe { .. }) => {
                let mut proofs = &mut self.proofs[..];
                for range in &ranges {
                    let looked = pagemap.read(range.start, range.pages, &mut self.entries);
                    let (of_range, others) = proofs.split_at_mut(range.pages as usize);
                    proofs = others;
                    for (proof, entry) in of_range.iter_mut().zip(&self.entries).filter(|_| looked.is_ok()) {
                        let shared = entry.present() && !entry.file_or_shared() && !entry.exclusive();
                        *proof = if shared { Proof::Free } else { Proof::Referenced };
                    }
                }
            }
            _ => {}
        }
        if !self.is_late {
            self.prove_files(pagemap, &ranges);
        }
        &self.proofs
    }

    /// Proves pages that show a file, if no witness has proved them. They map a pool without a worker. A writer has to
    /// break such a page first, which is kept from happening.
    fn prove_files(&mut self, pagemap: &Pagemap, ranges: &[PageRange]) {
        let mut proofs = &mut self.proofs[..];
        for range in ranges {
            let (of_range, others) = proofs.split_at_mut(range.pages as usize);
            proofs = others;
            if of_range.iter().all(|proof| *proof == Proof::Free) {
                continue;
            }
            let looked = pagemap.read(range.start, range.pages, &mut self.entries);
            let entries = of_range.iter_mut().zip(&self.entries).filter(|_| looked.is_ok());
            entries
                .filter(|(_, entry)| entry.present() && entry.file_or_shared())
                .for_each(|(proof, _)| *proof = Proof::Free);
        }
    }
}

/// Forks a probe that gets these pages, unless children get memory that may be folded. A private page that is shared
/// with a child cannot be moved until it is written again, so such memory would have to be kept from the probe. But a
/// child that another thread forks meanwhile, in a way that bypasses the hooks, would then lack that memory.
fn fork_probe(table: &Table, broken: &[PageRange]) -> Result<ForkProbe, Errno> {
    let asked = table.known(everything()).into_iter().filter(|(_, traits)| traits.asked);
    let (kept, given): (Vec<_>, Vec<_>) = asked.partition(|(_, traits)| traits.advice.dont_fork);
    if is_confined() || !world::is_hooked() || (table.follows_forks() && !given.is_empty()) {
        return Err(Errno::PERM);
    }
    let fork_probe =
        broken.iter().try_for_each(|range| act::give_to_children(*range, true)).and_then(|()| ForkProbe::cast());
    // Setting `MADV_DONTFORK` again cuts no mapping (VMA) that was not cut before, so it does not fail for lack of
    // mappings. It is done even if the fork failed.
    let kept = kept.iter().map(|(range, _)| act::give_to_children(*range, false)).fold(Ok(()), Result::and);
    kept.and(fork_probe)
}

/// Whether a seccomp filter applies to this thread: it might kill the process for an attempt to fork.
fn is_confined() -> bool {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    !status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "0"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table;
    use host::{Files, Received, Seqpacket, SeqpacketListener};
    use std::sync::mpsc;
    use wire::prove::{ANSWER_BYTES, QUESTION_BYTES, Question, encode_answer};

    /// Answers the next question once it is told to.
    fn answer(socket: &Seqpacket, told: &mpsc::Receiver<()>) {
        let (mut question, mut frame) = ([0; QUESTION_BYTES], [0; ANSWER_BYTES]);
        let bytes = loop {
            match socket.receive(&mut question, &mut Vec::new()).unwrap() {
                Received::Frame(bytes) => break bytes,
                Received::Nothing => std::thread::yield_now(),
                Received::Closed => return,
            }
        };
        let _ = told.recv();
        let question = Question::decode(&question[..bytes]).unwrap();
        let bytes = encode_answer(question.id, (0..question.pages).map(|_| Proof::Free), &mut frame);
        // The witness may have given up.
        let _ = socket.send(&frame[..bytes], &[]);
    }

    /// Asks a prover that answers when it is told to. Says whether it was heard once it answered: on a busy machine, it
    /// may not run in time.
    fn late_prover_is_heard() -> bool {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("prove.sock");
        let listener = SeqpacketListener::bind(&path, Files::Refused).unwrap();
        let mut witness = Witness::new(path);
        assert!(witness.call_for(&table::lock(), &[]).unwrap());
        let socket = listener.accept().unwrap().unwrap();
        let (tell, told) = mpsc::channel();
        let prover = std::thread::spawn(move || (0..4).for_each(|_| answer(&socket, &told)));
        let pagemap = Pagemap::open(std::process::id()).unwrap();
        let pages = [PageRange { start: HostVirt(4096), pages: 3 }];
        let ask = |witness: &mut Witness| witness.ask(&pagemap, pages.into_iter()).to_vec();
        assert_eq!(ask(&mut witness), [Proof::Unknown; 3]);
        assert!(witness.is_late());
        // The prover answers the late question, and the next two at once.
        (0..3).for_each(|_| tell.send(()).unwrap());
        let is_heard = witness.catch_up();
        if is_heard {
            // On a busy machine, this answer may be late, too.
            if ask(&mut witness) != [Proof::Free; 3] {
                assert!(witness.is_late());
            }
            assert!(witness.is_at_hand());
            while ask(&mut witness) == [Proof::Free; 3] {}
            assert!(witness.is_late());
        }
        assert!(!is_heard || !witness.catch_up());
        assert!(!witness.is_at_hand());
        assert_eq!(ask(&mut witness), [Proof::Unknown; 3]);
        assert!(!witness.is_late());
        drop(tell);
        prover.join().unwrap();
        is_heard
    }

    #[test]
    fn late_prover_is_asked_again_and_dead_one_is_not() {
        assert!((0..20).any(|_| late_prover_is_heard()));
    }

    /// Memory that children get was kept from the probe, and so from a child that another thread forked at the same
    /// moment. Some of 1,100 children died on a busy machine, since they lacked memory.
    #[test]
    fn child_that_is_forked_past_the_hooks_beside_a_probe_has_all_memory() {
        let member = crate::testing::Member::new(4);
        table::lock().follow_forks(true);
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    drop(fork_probe(&table::lock(), &[]));
                }
            });
            for _ in 0..300 {
                // SAFETY: the child reads one word, and ends.
                let child = unsafe { crate::raw::call(libc::SYS_fork, [0; 6]) };
                if child == 0 {
                    let word = member.word(0, 0).load(std::sync::atomic::Ordering::Relaxed);
                    // SAFETY: ends the child.
                    unsafe { libc::_exit(i32::from(word != 1)) };
                }
                let mut status = -1;
                // SAFETY: writes one number.
                assert_eq!(unsafe { libc::waitpid(child as i32, &raw mut status, 0) }, child as i32);
                if status != 0 {
                    is_over.store(true, std::sync::atomic::Ordering::Relaxed);
                }
                assert_eq!(status, 0, "a child ended so");
            }
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }

    #[test]
    fn fork_probe_takes_place_of_prover_that_accepts_and_never_answers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("prove.sock");
        // No process accepts the connection, but the kernel does, as for a process that is stopped.
        let _listener = SeqpacketListener::bind(&path, Files::Refused).unwrap();
        let mut witness = Witness::new(path);
        let pagemap = Pagemap::open(std::process::id()).unwrap();
        let pages = [PageRange { start: HostVirt(4096), pages: 1 }];
        let asks_silent_one = |witness: &mut Witness| {
            assert!(witness.call_for(&table::lock(), &[]).unwrap());
            assert!(matches!(witness.at_hand, Some(AtHand::Prover(_))));
            assert_eq!(witness.ask(&pagemap, pages.into_iter()), [Proof::Unknown]);
            assert!(witness.is_late() && !witness.catch_up());
        };
        asks_silent_one(&mut witness);
        assert!(witness.call_for(&table::lock(), &[]).unwrap());
        assert!(matches!(witness.at_hand, Some(AtHand::ForkProbe { .. })));
        // The prover is asked again after a while, and then not asked for longer.
        std::thread::sleep(SILENCE.0);
        witness.end();
        asks_silent_one(&mut witness);
        assert_eq!(witness.silence.time, Some(SILENCE.0 * 2));
    }
}
