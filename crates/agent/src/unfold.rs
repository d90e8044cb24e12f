//! Makes folded pages private anonymous memory again, while the member uses them, without losing a write.
//!
//! A folded page that was never written maps a slot, read-only. Nobody can be about to write it other than through the
//! page table: DMA and `get_user_pages` for writing have to break it first, by the same fault as a thread that writes.
//! So it is enough to hold that fault up:
//!
//! ```text
//!   copy the slots into a new private mapping of our own
//!   keep writers out: their fault sleeps (userfaultfd, write-protect); hold back threads that discard (`follow`)
//!      |
//!      v look at the page table: is the page still the slot's?
//!   yes: move our mapping over it, atomically -> private, and can be folded again
//!   no: somebody wrote it before; it is private already, in the pool's mapping -> broken, stays where it is
//!      |
//!      v let writers in, wake them: they find the private page
//! ```
//!
//! If the page table says neither, because the kernel has just removed the entry, the page is left for the next call.
//! In memory that the program may not write, no writers have to be kept out: the table's lock keeps it from becoming
//! writable. The mapping that takes its place gets the same protection.

use crate::follow::Following;
use crate::maps::Kind;
use crate::section::RUN_PAGES;
use crate::table::{Table, Traits};
use act::{MemberMemory, PoolView, move_mapping_over};
use host::{Pagemap, PagemapEntry};
use page::{HostVirt, PageRange, PoolSlot};
use rustix::io::Errno;
use std::sync::Arc;

/// What is needed to unfold pages; made once for a process.
pub struct Unfold {
    following: Arc<Following>,
    entries: Vec<PagemapEntry>,
}

impl Unfold {
    /// For memory that `following` follows.
    pub fn new(following: Arc<Following>) -> Self {
        Self { following, entries: Vec::with_capacity(RUN_PAGES as usize) }
    }

    /// Unfolds a run of at most [`RUN_PAGES`] pages that map consecutive slots and have the same traits. `table` is the
    /// table's lock, held.
    ///
    /// # Errors
    /// Memory or mappings are short, or the run is not followed: the program has registered it with its own
    /// userfaultfd, or has unmapped it in a way that bypasses the hooks. Pages that were not unfolded are folded as
    /// before.
    pub fn run(
        &mut self,
        table: &mut Table,
        pagemap: &Pagemap,
        run: PageRange,
        (pool, slot): (&PoolView, PoolSlot),
        traits: Traits,
    ) -> Result<(), Errno> {
        let slots = pool.slots(slot, run.pages).ok_or(Errno::INVAL)?;
        act::make_present(slots)?;
        if !self.following.may_replace(run, traits, Kind::Pool) {
            return Err(Errno::STALE);
        }
        if !traits.may_be_written() {
            let following = Arc::clone(&self.following);
            let held = following.hold();
            return self.swap(table, pagemap, (run, &held.never_discarded(run)), slots, traits);
        }
        // Of present pages, the page table says for certain whether they are broken.
        act::make_present(run)?;
        let following = Arc::clone(&self.following);
        following.hold().begin_section();
        // This lock is held until the run is replaced. A thread whose discard is reported meanwhile goes on to discard
        // only after that, in the mapping that takes the run's place. Discards that were reported before may take
        // effect at any moment.
        let (held, result) = following.until_read(|_| following.watch().protect(run, true));
        let result = result.and_then(|()| self.swap(table, pagemap, (run, &held.never_discarded(run)), slots, traits));
        drop(held);
        // Pages that were not replaced are still write-protected. The mappings that took the place of the others are
        // not.
        for pooled in table.pooled_pages(run) {
            following.let_writers_in(pooled);
        }
        following.end_section(&[]);
        // Wakes threads that sleep on pages that were replaced.
        let _ = following.watch().wake(run);
        result
    }

    /// Replaces the pages of a run that show their slots, as far as they are in `kept`: pages that were never
    /// discarded.
    fn swap(
        &mut self,
        table: &mut Table,
        pagemap: &Pagemap,
        (run, kept): (PageRange, &[PageRange]),
        slots: PageRange,
        traits: Traits,
    ) -> Result<(), Errno> {
        pagemap.read(run.start, run.pages, &mut self.entries).map_err(|_| Errno::IO)?;
        let kept_out = traits.may_be_written();
        // A page may still show its slot after its discard was reported. The discarding thread would then remove the
        // entry between this check and the replacement, and the replacement would bring the slot's bytes back.
        let is_kept = |at: usize| {
            let page = run.start.add_pages(at as u64);
            kept.iter().any(|range| range.start <= page && page < range.end())
        };
        let shown = |(at, entry): (usize, &PagemapEntry)| match Shown::by(*entry, kept_out) {
            Shown::Slot if !is_kept(at) => Shown::Nothing,
            shown => shown,
        };
        let all: Vec<Shown> = self.entries.iter().enumerate().map(shown).collect();
        let mut at = 0;
        while at < all.len() {
            let shown = all[at];
            let pages = all[at..].iter().take_while(|other| **other == shown).count();
            let piece = PageRange { start: run.start.add_pages(at as u64), pages: pages as u64 };
            match shown {
                Shown::Slot => {
                    replace(&self.following, piece, slots.start.add_pages(at as u64), traits)?;
                    table.set_private(piece);
                }
                Shown::Own => table.set_broken(piece),
                Shown::Nothing => {}
            }
            at += pages;
        }
        Ok(())
    }
}

/// What a page in a mapping of the pool shows, by its page-table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    /// The slot.
    Slot,
    /// A private copy of the member's.
    Own,
    /// The page-table entry does not tell.
    Nothing,
}

impl Shown {
    /// `kept_out`: whether writers are kept out. Write protection leaves markers in place of absent pages, which look
    /// like pages in swap.
    fn by(entry: PagemapEntry, kept_out: bool) -> Self {
        match (entry.present(), entry.file_or_shared()) {
            (true, true) => Self::Slot,
            (true, false) => Self::Own,
            // A private page is present or in swap. An absent page was never touched, or the kernel has removed its
            // entry: it shows the slot.
            (false, _) if !kept_out && !entry.swapped() => Self::Slot,
            (false, _) => Self::Nothing,
        }
    }
}

fn replace(following: &Following, piece: PageRange, slots: HostVirt, traits: Traits) -> Result<(), Errno> {
    let copy = MemberMemory::new(piece.pages)?;
    // SAFETY: the slots lie in the view, which is readable as long as the pool is open; our mapping was just made.
    unsafe { copy.fill(slots) };
    traits.inherited().apply(copy.range())?;
    copy.protect(traits.access)?;
    if !following.may_replace(piece, traits, Kind::Pool) {
        return Err(Errno::STALE);
    }
    // SAFETY: writers are kept out of the piece. It still showed its slots when they already were, and our mapping
    // holds the same bytes.
    unsafe { move_mapping_over(copy.range(), piece.start) }?;
    copy.forget();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Shown;
    use host::PagemapEntry;

    /// Once, the slot of such a page was released as if the page had been broken, while the page still mapped the slot.
    #[test]
    fn uncertain_page_table_entry_shows_nothing() {
        let (present, swapped, file) = (1 << 63, 1 << 62, 1 << 61);
        for (bits, writable, read_only) in [
            (present | file, Shown::Slot, Shown::Slot),
            (present, Shown::Own, Shown::Own),
            (0, Shown::Nothing, Shown::Slot),
            (file, Shown::Nothing, Shown::Slot),
            (swapped, Shown::Nothing, Shown::Nothing),
        ] {
            let entry = PagemapEntry::from_bits(bits);
            assert_eq!((Shown::by(entry, true), Shown::by(entry, false)), (writable, read_only), "{bits:x}");
        }
    }
}
