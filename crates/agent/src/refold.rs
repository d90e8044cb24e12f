//! Folds pages again that were broken.
//!
//! A page that the member broke by writing is private, but lies in a mapping of the pool, and the kernel moves nothing out
//! of such a mapping. So it cannot be taken out of everybody's reach, as the section does; it stays where it is, and what
//! the move proves there - that nobody can be writing it - is proved in two steps here:
//!
//! ```text
//!   BROKEN, and at rest
//!      | a shadow is cast (host::Shadow): pages that are pinned are not shared with it
//!      v
//!   writers are kept out: their fault sleeps (synchronous userfaultfd write-protect)
//!      | shared with the shadow still? Then nobody has pinned it for writing when the shadow was cast, nobody wrote it
//!      | since, and nobody can begin to: to pin it for writing takes the same fault as to write it
//!      v
//!   compared with the slot, in place
//!      |                     \
//!      v equal                 v different, or not shared
//!   map the slots over it     let writers in --> Changed, Busy
//!      \--> Folded. Wake who slept: they find the slot, and break it
//! ```
//!
//! Who only reads the page meanwhile reads the same bytes before and after. What holds a page without pinning it is nobody's
//! that is known (`references`); a member that has such things open is not folded, nor refolded.
//!
//! The table's lock is held while writers are kept out, a run has at most `RUN_PAGES` pages, and nothing is asked of
//! anybody, so it ends by itself.

use crate::references;
use crate::section::{RUN_PAGES, Source};
use crate::table::{Table, Traits, everything};
use host::{Pagemap, PagemapEntry, Shadow, Userfault, Watch, map_anonymous_over, pages_equal};
use page::PageRange;
use rustix::io::Errno;
use std::time::{Duration, Instant};
use wire::{Outcome, SlotRun};

/// What it takes.
#[derive(Default)]
pub struct Refold {
    shadow: Option<Shadow>,
    entries: Vec<PagemapEntry>,
}

impl Refold {
    /// Casts a shadow to see by which of these pages are pinned. `table` is the table's lock, held.
    ///
    /// # Errors
    /// The process may not fork, or memory or processes are short.
    pub fn begin(&mut self, table: &Table, broken: &[PageRange]) -> Result<(), Errno> {
        if is_confined() {
            return Err(Errno::PERM);
        }
        // Only the broken pages: a private page that is shared with a child cannot be moved until it is written again.
        let asked: Vec<_> = table.known(everything()).into_iter().filter(|(_, traits)| traits.asked).collect();
        let (kept, given): (Vec<_>, Vec<_>) = asked.into_iter().partition(|(_, traits)| traits.advice.dont_fork);
        let give = |ranges: &[(PageRange, Traits)], give| {
            ranges.iter().try_for_each(|(range, _)| host::give_to_children(*range, give))
        };
        let shadow = give(&given, false)
            .and_then(|()| broken.iter().try_for_each(|range| host::give_to_children(*range, true)))
            .and_then(|()| Shadow::cast());
        // No mapping is cut by this that was not cut before, so it does not fail for want of them.
        let restored = give(&kept, false).and_then(|()| give(&given, true));
        self.shadow = Some(shadow?);
        restored
    }

    /// Ends the shadow.
    pub fn end(&mut self) {
        self.shadow = None;
    }

    /// Folds a run of at most [`RUN_PAGES`] broken pages with the same traits, and says what became of each. `source` is
    /// `None` for zeros. Returns how long writers were kept out.
    pub fn run(
        &mut self,
        table: &mut Table,
        (pagemap, keep_out): (&Pagemap, &Userfault),
        run: PageRange,
        (source, generation): (Option<Source<'_>>, u64),
        outcomes: &mut [Outcome],
    ) -> Duration {
        debug_assert!(run.pages <= RUN_PAGES && run.pages as usize == outcomes.len());
        outcomes.fill(Outcome::Busy);
        let slots = source.map(|s| s.pool.slots(s.first, run.pages));
        let Some(slots) = slots.map_or(Some(None), |slots| slots.map(Some)) else { return Duration::ZERO };
        if slots.is_some_and(|slots| host::make_present(slots).is_err()) || self.shadow.is_none() {
            return Duration::ZERO;
        }
        let began = Instant::now();
        if keep_out.register(run, Watch::Writes).is_err() {
            return Duration::ZERO;
        }
        if keep_out.protect(run, true).is_ok() && self.judge(pagemap, run, slots, outcomes).is_ok() {
            if references::generation() != generation {
                outcomes.fill(Outcome::Unpinned);
            }
            replace(table, run, source, outcomes);
        }
        // Lifts the protection from what is still there, and wakes who slept on it ...
        let _ = keep_out.unregister(run);
        // ... and who slept on what has been replaced.
        let _ = keep_out.wake(run);
        began.elapsed()
    }

    /// `Folded` stands for a page that can be replaced, for now.
    fn judge(
        &mut self,
        pagemap: &Pagemap,
        run: PageRange,
        slots: Option<PageRange>,
        outcomes: &mut [Outcome],
    ) -> host::Result<()> {
        pagemap.read(run.start, run.pages, &mut self.entries)?;
        for (n, (entry, outcome)) in self.entries.iter().zip(outcomes).enumerate() {
            if !entry.present() || entry.file_or_shared() || entry.exclusive() {
                continue;
            }
            let wanted = slots.map_or(crate::section::zeros(), |slots| slots.start.add_pages(n as u64));
            // SAFETY: the page is present, and readable as its traits say; `wanted` is a page of the view, which reaches to the
            // end of a file that cannot shrink, or a constant. Nobody can write either.
            let equal = unsafe { pages_equal(run.start.add_pages(n as u64), wanted) };
            *outcome = if equal { Outcome::Folded } else { Outcome::Changed };
        }
        Ok(())
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
