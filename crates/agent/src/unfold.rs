//! Makes folded pages private anonymous memory again, while the member uses them, and without losing a write.
//!
//! A folded page that was never written maps a slot, read-only. Nobody can be about to write it behind the
//! processor's back: whoever wants to (DMA, `get_user_pages` for writing) has to break it first, through the same
//! fault as a writing thread. So it is enough to keep that fault from happening:
//!
//! ```text
//!   copy the slots into a new private mapping of our own
//!   keep writers out: their fault sleeps (userfaultfd, write-protect); hold back who discards (`follow`)
//!      |
//!      v look at the page table: is the page still the slot's?
//!   yes: move our mapping over it, atomically -> private, and can be folded again
//!   no: somebody wrote it before; it is private already, in the pool's mapping -> broken, stays where it is
//!      |
//!      v let writers in, wake them: they find the private page
//! ```
//!
//! Where the page table says neither, because the kernel has just taken the page out of it, the page is left for the next time.
//! Memory that may not be written needs nobody kept out: the table's lock keeps it from becoming writable. What takes its
//! place gets the same protection.

use crate::follow::Following;
use crate::maps::Kind;
use crate::section::RUN_PAGES;
use crate::table::{Table, Traits};
use host::{MemberMemory, Pagemap, PagemapEntry, PoolView, move_mapping_over};
use page::{HostVirt, PageRange, PoolSlot};
use rustix::io::Errno;
use std::sync::Arc;

/// What unfolding needs, made once.
pub struct Unfold {
    following: Arc<Following>,
    entries: Vec<PagemapEntry>,
}

impl Unfold {
    /// Of memory that is followed.
    pub fn new(following: Arc<Following>) -> Self {
        Self { following, entries: Vec::with_capacity(RUN_PAGES as usize) }
    }

    /// Unfolds a run of at most [`RUN_PAGES`] pages that map consecutive slots and have the same traits. `table` is the
    /// table's lock, held.
    ///
    /// # Errors
    /// Memory or mappings are short, or the run is not followed: the program has a userfaultfd of its own on it, or has unmapped
    /// it by a system call of its own. What is not done is folded as before.
    pub fn run(
        &mut self,
        table: &mut Table,
        pagemap: &Pagemap,
        run: PageRange,
        (pool, slot): (&PoolView, PoolSlot),
        traits: Traits,
    ) -> Result<(), Errno> {
        let slots = pool.slots(slot, run.pages).ok_or(Errno::INVAL)?;
        host::make_present(slots)?;
        if !self.following.may_replace(run, traits, Kind::Pool) {
            return Err(Errno::STALE);
        }
        if !traits.may_be_written() {
            let following = Arc::clone(&self.following);
            let held = following.hold();
            let kept = held.kept(run);
            return self.swap(table, pagemap, (run, &kept), slots, traits);
        }
        // Present pages are told from broken ones by the page table without doubt.
        host::make_present(run)?;
        let following = Arc::clone(&self.following);
        following.hold().begin_section();
        // Held as long as it is looked at and replaced: who discards meanwhile does so afterwards, in what has taken its place.
        let (held, result) = following.until_read(|_| following.watch().protect(run, true));
        let result = result.and_then(|()| self.swap(table, pagemap, (run, &[run]), slots, traits));
        drop(held);
        // What is still there; what has been replaced has its own protection.
        for pooled in table.pooled_pages(run) {
            following.let_writers_in(pooled);
        }
        following.end_section(&[]);
        // Who slept on what has been replaced.
        let _ = following.watch().wake(run);
        result
    }

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
        // What was discarded and has no entry is no slot's.
        let is_kept = |at: usize| {
            let page = run.start.add_pages(at as u64);
            kept.iter().any(|range| range.start <= page && page < range.end())
        };
        let shown = |(at, entry): (usize, &PagemapEntry)| match Shown::by(*entry, kept_out) {
            Shown::Slot if !entry.present() && !is_kept(at) => Shown::Nothing,
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

/// What a page table says of a page in a mapping of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    /// It is the slot's.
    Slot,
    /// It is the member's own.
    Own,
    /// It cannot be told.
    Nothing,
}

impl Shown {
    /// Keeping writers out leaves marks in place of pages that are absent, which look like pages in swap.
    fn by(entry: PagemapEntry, kept_out: bool) -> Self {
        match (entry.present(), entry.file_or_shared()) {
            (true, true) => Self::Slot,
            (true, false) => Self::Own,
            // A page of one's own is present or in swap; what was never looked at, or was taken out, is the slot's.
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
    // SAFETY: writers are kept out of the piece, it still showed its slots when they already were, and our mapping
    // holds the same bytes.
    unsafe { move_mapping_over(copy.range(), piece.start) }?;
    copy.forget();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Shown;
    use host::PagemapEntry;

    /// A page that cannot be told was once released as if it had been broken, while it still mapped its slot.
    #[test]
    fn what_a_page_shows_is_only_said_when_it_is_certain() {
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
