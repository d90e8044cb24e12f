//! Folds pages again that were broken.
//!
//! A page that the member broke by writing is private, but lies in a mapping of the pool, and the kernel moves nothing out
//! of such a mapping. So it cannot be taken out of everybody's reach, as the section does; it stays where it is, and what
//! the move proves there - that nobody can be writing it - is proved in two steps here:
//!
//! ```text
//!   BROKEN, and at rest
//!      | writers are kept out: their fault sleeps (synchronous userfaultfd write-protect)
//!      v
//!   a witness is asked: does anybody else hold the page, who might write it without a fault?
//!      |                                            \
//!      v nobody                                      v somebody, or nobody knows: let writers in --> Busy
//!   compared with the slot, in place
//!      |                     \
//!      v equal                 v different: let writers in --> Changed
//!   map the slots over it
//!      \--> Folded. Wake who slept: they find the slot, and break it
//! ```
//!
//! There are two witnesses.
//!
//! - The service's *prover*, where there is one: it reads the page's reference count, as the kernel's own merger does. Nobody can
//!   take a reference for writing since writers are kept out, because that takes the same fault as to write.
//! - Else a *shadow* ([`host::Shadow`]), cast before writers are kept out. A page that is still shared with it was not pinned when
//!   it was cast, and was neither written nor pinned for writing since. What holds a page without pinning it is not seen by this,
//!   and is nobody's that is known (`references`).
//!
//! Who only reads the page meanwhile reads the same bytes before and after.
//!
//! The table's lock is held while writers are kept out, from at most [`GROUP_PAGES`] pages in [`GROUP_PARTS`] parts at a
//! time, and the prover has [`ANSWER_TIME`] to answer, so it ends by itself.

use crate::references;
use crate::section::{RUN_PAGES, Source};
use crate::table::{Guard, Table, Traits, everything};
use host::{Pagemap, PagemapEntry, Prover, Shadow, Userfault, Watch, map_anonymous_over, pages_equal};
use page::PageRange;
use rustix::io::Errno;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use wire::prove::Proof;
use wire::{Outcome, SlotRun};

/// Pages that writers are kept out of at a time.
pub const GROUP_PAGES: u64 = RUN_PAGES;
/// And parts of memory that these pages may lie in.
const GROUP_PARTS: usize = 12;
/// A shadow serves for so long: what the process writes meanwhile costs it a copy.
const SHADOW_TIME: Duration = Duration::from_millis(50);
/// To cast shadows may take this part of the time, whatever a worker asks for.
const SHADOW_SHARE: u32 = 50;
/// The prover has so long to answer.
const ANSWER_TIME: Duration = Duration::from_millis(2);

/// Broken pages side by side that are to be folded to slots side by side.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// The pages: at most [`GROUP_PAGES`].
    pub range: PageRange,
    /// Where their contents are in the pool; `None` for zeros.
    pub source: Option<Source<'a>>,
    /// Where the outcome for the first of them belongs.
    pub at: usize,
}

/// Who is asked whether anybody else may write a page.
enum Witness {
    Prover(Box<Prover>),
    /// As long as it is there, it can be told what is shared with it.
    Shadow {
        _cast: Shadow,
        until: Instant,
    },
}

/// What it takes.
pub struct Refold {
    /// Where the prover listens, if there is one.
    prover: PathBuf,
    witness: Option<Witness>,
    /// No shadow is cast before.
    next_shadow: Instant,
    entries: Vec<PagemapEntry>,
    proofs: Vec<Proof>,
}

impl Refold {
    /// With a prover that is to be found there, or none.
    pub fn new(prover: PathBuf) -> Self {
        Self { prover, witness: None, next_shadow: Instant::now(), entries: Vec::new(), proofs: Vec::new() }
    }

    /// Finds a witness, if one can be had now. `table` is the table's lock, held.
    ///
    /// # Errors
    /// There is no prover, and the process may not fork, or memory or processes are short.
    pub fn begin(&mut self, table: &Table) -> Result<(), Errno> {
        self.rest();
        if self.witness.is_some() {
            return Ok(());
        }
        let began = Instant::now();
        if let Ok(prover) = Prover::connect(&self.prover) {
            self.witness = Some(Witness::Prover(Box::new(prover)));
        } else if began >= self.next_shadow {
            let cast = cast_shadow(table, &table.refoldable());
            self.next_shadow = Instant::now() + began.elapsed() * SHADOW_SHARE;
            self.witness = Some(Witness::Shadow { _cast: cast?, until: Instant::now() + SHADOW_TIME });
        }
        Ok(())
    }

    /// Ends a shadow whose time is over. Says how long another one may stay; the prover is kept.
    pub fn rest(&mut self) -> Option<Duration> {
        let now = Instant::now();
        self.witness.take_if(|witness| matches!(witness, Witness::Shadow { until, .. } if *until <= now));
        match &self.witness {
            Some(Witness::Shadow { until, .. }) => Some(*until - now),
            _ => None,
        }
    }

    /// Has the next witness be a new one.
    #[cfg(test)]
    pub fn end(&mut self) {
        (self.witness, self.next_shadow) = (None, Instant::now());
    }

    /// Folds some of these parts, the first ones, and says what became of each page; gives back how many parts they were and
    /// how long writers were kept out.
    ///
    /// `table` is the table's lock, held; the caller has seen in it that all of the pages are broken ones that may be folded, and asked
    /// `references` at `generation` or later.
    pub fn some(
        &mut self,
        table: &mut Guard,
        (pagemap, keep_out): (&Pagemap, &Userfault),
        parts: &[Part<'_>],
        generation: u64,
        outcomes: &mut [Outcome],
    ) -> (usize, Duration) {
        let mut pages = 0;
        let fits = |part: &&Part<'_>| {
            pages += part.range.pages;
            pages <= GROUP_PAGES
        };
        let group = &parts[..parts.iter().take(GROUP_PARTS).take_while(fits).count().clamp(1, parts.len())];
        for part in group {
            outcomes[part.at..part.at + part.range.pages as usize].fill(Outcome::Busy);
            // Compared with bytes that this process has not looked at for a while: have them ready.
            let slots = part.source.and_then(|s| s.pool.slots(s.first, part.range.pages));
            let _ = slots.map(host::make_present);
        }
        let began = Instant::now();
        // Where the program looks after its faults by itself, this fails, and nothing is touched.
        let registered: Vec<&Part<'_>> =
            group.iter().filter(|part| keep_out.register(part.range, Watch::Writes).is_ok()).collect();
        let kept_out: Vec<&Part<'_>> =
            registered.iter().copied().filter(|part| keep_out.protect(part.range, true).is_ok()).collect();
        self.ask(pagemap, &kept_out);
        let pinned = references::generation() != generation;
        let mut proofs = &self.proofs[..];
        for part in &kept_out {
            let of_part = &mut outcomes[part.at..part.at + part.range.pages as usize];
            let (its_proofs, others) = proofs.split_at(of_part.len());
            proofs = others;
            judge(part, its_proofs, of_part);
            if pinned {
                of_part.fill(Outcome::Unpinned);
            }
            replace(table, part.range, part.source, of_part);
        }
        for part in registered {
            // Lifts the protection from what is still there, and wakes who slept on it ...
            let _ = keep_out.unregister(part.range);
            // ... and who slept on what has been replaced.
            let _ = keep_out.wake(part.range);
        }
        (group.len(), began.elapsed())
    }

    /// Fills the proofs, one for each page of these parts.
    fn ask(&mut self, pagemap: &Pagemap, parts: &[&Part<'_>]) {
        let pages: u64 = parts.iter().map(|part| part.range.pages).sum();
        self.proofs.clear();
        self.proofs.resize(pages as usize, Proof::Unknown);
        match &mut self.witness {
            Some(Witness::Prover(prover)) if pages > 0 => {
                let ranges: Vec<PageRange> = parts.iter().map(|part| part.range).collect();
                if prover.ask(&ranges, &mut self.proofs, ANSWER_TIME).is_err() {
                    self.proofs.fill(Proof::Unknown);
                    // Another one, next time.
                    self.witness = None;
                }
            }
            Some(Witness::Shadow { .. }) => {
                let mut proofs = &mut self.proofs[..];
                for part in parts {
                    let looked = pagemap.read(part.range.start, part.range.pages, &mut self.entries);
                    let (of_part, others) = proofs.split_at_mut(part.range.pages as usize);
                    proofs = others;
                    for (proof, entry) in of_part.iter_mut().zip(&self.entries).filter(|_| looked.is_ok()) {
                        let shared = entry.present() && !entry.file_or_shared() && !entry.exclusive();
                        *proof = if shared { Proof::Free } else { Proof::Referenced };
                    }
                }
            }
            _ => {}
        }
    }
}

/// Forks such that the shadow gets these pages, and nothing else that was asked in: a private page that is shared with a child
/// cannot be moved until it is written again.
fn cast_shadow(table: &Table, broken: &[PageRange]) -> Result<Shadow, Errno> {
    if is_confined() {
        return Err(Errno::PERM);
    }
    let asked: Vec<_> = table.known(everything()).into_iter().filter(|(_, traits)| traits.asked).collect();
    let (kept, given): (Vec<_>, Vec<_>) = asked.into_iter().partition(|(_, traits)| traits.advice.dont_fork);
    let give = |ranges: &[(PageRange, Traits)], give| {
        ranges.iter().try_for_each(|(range, _)| host::give_to_children(*range, give))
    };
    let shadow = give(&given, false)
        .and_then(|()| broken.iter().try_for_each(|range| host::give_to_children(*range, true)))
        .and_then(|()| Shadow::cast());
    // No mapping is cut by this that was not cut before, so it does not fail for want of them. Both are done in any case: a
    // child that lacks memory dies.
    let (kept, given) = (give(&kept, false), give(&given, true));
    kept.and(given).and(shadow)
}

/// `Folded` stands for a page that can be replaced, for now.
fn judge(part: &Part<'_>, proofs: &[Proof], outcomes: &mut [Outcome]) {
    let slots = part.source.map(|s| s.pool.slots(s.first, part.range.pages));
    let Some(slots) = slots.map_or(Some(None), |slots| slots.map(Some)) else { return };
    for ((n, outcome), proof) in outcomes.iter_mut().enumerate().zip(proofs) {
        if *proof != Proof::Free {
            continue;
        }
        let wanted = slots.map_or(crate::section::zeros(), |slots| slots.start.add_pages(n as u64));
        // SAFETY: the page is readable, as its traits say; `wanted` is a page of the view, which reaches to the end of a file
        // that cannot shrink, or a constant. Nobody can write either.
        let equal = unsafe { pages_equal(part.range.start.add_pages(n as u64), wanted) };
        *outcome = if equal { Outcome::Folded } else { Outcome::Changed };
    }
}

/// Replaces what can be.
fn replace(table: &mut Table, run: PageRange, source: Option<Source<'_>>, outcomes: &mut [Outcome]) {
    let mut at = 0;
    while at < outcomes.len() {
        let verdict = outcomes[at];
        let pages = outcomes[at..].iter().take_while(|o| **o == verdict).count();
        let piece = PageRange { start: run.start.add_pages(at as u64), pages: pages as u64 };
        if verdict == Outcome::Folded && map_over(table, piece, source, at as u32).is_err() {
            outcomes[at..at + pages].fill(Outcome::NoVma);
        }
        at += pages;
    }
}

fn map_over(table: &mut Table, piece: PageRange, source: Option<Source<'_>>, offset: u32) -> Result<(), Errno> {
    let slot = source.map(|source| source.first.add(offset).ok_or(Errno::INVAL)).transpose()?;
    loop {
        let mapped = match (source, slot) {
            // SAFETY: every page of the piece is read-only for everybody, and holds what the slots hold. The table's lock keeps
            // other threads from mapping anything else there.
            (Some(source), Some(slot)) => unsafe { source.pool.map_over(piece, slot) },
            // SAFETY: as above, with zeros.
            _ => unsafe { map_anonymous_over(piece) },
        };
        match mapped {
            Ok(()) => break,
            // An old kernel that is short of memory has unmapped the piece already. Its content is in the pool, so it is
            // mapped for certain, and the sooner the better.
            Err(_) if host::make_present(piece) == Err(Errno::NOMEM) => std::thread::yield_now(),
            Err(e) => return Err(e),
        }
    }
    match slot {
        Some(slot) => table.set_folded(SlotRun { start: piece.start, slot, pages: piece.pages as u16 }),
        None => table.set_zeroed(piece),
    }
    Ok(())
}

/// Whether a filter of system calls watches this thread: it might end the process for an attempt to fork.
fn is_confined() -> bool {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    !status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "0"))
}
