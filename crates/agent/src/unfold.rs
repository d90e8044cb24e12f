//! Makes folded pages private anonymous memory again, while the member uses them, and without losing a write.
//!
//! A folded page that was never written maps a slot, read-only. Nobody can be about to write it behind the
//! processor's back: whoever wants to (DMA, `get_user_pages` for writing) has to break it first, through the same
//! fault as a writing thread. So it is enough to keep that fault from happening:
//!
//! ```text
//!   copy the slots into a new private mapping of our own
//!   keep writers out: their fault sleeps (a second userfaultfd, write-protect)
//!      |
//!      v look at the page table: is the page still the slot's?
//!   yes: move our mapping over it, atomically -> private, and can be folded again
//!   no: somebody wrote it before; it is private already, in the pool's mapping -> broken, stays where it is
//!      |
//!      v let writers in, wake them: they find the private page
//! ```

use crate::section::RUN_PAGES;
use crate::table::Table;
use host::{Inherit, MemberMemory, Pagemap, PagemapEntry, PoolView, Userfault, Watch, move_mapping_over, pages_equal};
use page::{HostVirt, PAGE_BYTES, PageRange, PoolSlot};
use rustix::io::Errno;

/// What unfolding needs, made once.
pub struct Unfold {
    keep_out: Userfault,
    entries: Vec<PagemapEntry>,
}

impl Unfold {
    /// With a userfaultfd that was opened to keep writers out.
    pub fn new(keep_out: Userfault) -> Self {
        Self { keep_out, entries: Vec::with_capacity(RUN_PAGES as usize) }
    }

    /// Unfolds a run of at most [`RUN_PAGES`] pages that map consecutive slots. `table` is the table's lock, held.
    ///
    /// # Errors
    /// Memory or mappings are short: what is not done is folded as before.
    pub fn run(
        &mut self,
        table: &mut Table,
        pagemap: &Pagemap,
        run: PageRange,
        (pool, slot): (&PoolView, PoolSlot),
        advice: Inherit,
    ) -> Result<(), Errno> {
        let slots = pool.slots(slot, run.pages).ok_or(Errno::INVAL)?;
        // Present pages are told from broken ones by the page table without doubt.
        host::make_present(run)?;
        host::make_present(slots)?;
        self.keep_out.register(run, Watch::Writes)?;
        let result = self.keep_out.protect(run, true).and_then(|()| self.swap(table, pagemap, run, slots, advice));
        // Lifts the protection from what is still there, and wakes who slept on it ...
        let _ = self.keep_out.unregister(run);
        // ... and who slept on what has been replaced.
        let _ = self.keep_out.wake(run);
        result
    }

    fn swap(
        &mut self,
        table: &mut Table,
        pagemap: &Pagemap,
        run: PageRange,
        slots: PageRange,
        advice: Inherit,
    ) -> Result<(), Errno> {
        pagemap.read(run.start, run.pages, &mut self.entries).map_err(|_| Errno::IO)?;
        let mut at = 0;
        while at < self.entries.len() {
            let entry = self.entries[at];
            let pages = self.entries[at..].iter().take_while(|e| shows_slot(**e) == shows_slot(entry)).count();
            let piece = PageRange { start: run.start.add_pages(at as u64), pages: pages as u64 };
            if shows_slot(entry) {
                replace(piece, slots.start.add_pages(at as u64), advice)?;
                table.set_private(piece);
            } else if entry.present() && !entry.file_or_shared() {
                table.set_broken(piece);
            }
            at += pages;
        }
        Ok(())
    }
}

/// Whether the page is still the slot's.
fn shows_slot(entry: PagemapEntry) -> bool {
    entry.present() && entry.file_or_shared()
}

fn replace(piece: PageRange, slots: HostVirt, advice: Inherit) -> Result<(), Errno> {
    let copy = MemberMemory::new(piece.pages)?;
    for n in 0..piece.pages {
        let to = copy.range().start.add_pages(n).0 as usize as *mut [u8; PAGE_BYTES];
        // SAFETY: the page is of a mapping just made, which nobody else knows of; no other reference to it exists.
        let to = unsafe { &mut *to };
        // SAFETY: the slot lies in the view, which is readable as long as the pool is open.
        unsafe { host::copy_page(slots.add_pages(n), to) };
    }
    for n in 0..piece.pages {
        // A worker that changes slots which are in use must not make it worse.
        // SAFETY: both pages are mapped readable: our copy, and the member's page, whose writers are kept out.
        if !unsafe { pages_equal(copy.range().start.add_pages(n), piece.start.add_pages(n)) } {
            return Err(Errno::IO);
        }
    }
    advice.apply(copy.range())?;
    // SAFETY: writers are kept out of the piece, it still showed its slots when they already were, and our mapping
    // holds the same bytes.
    unsafe { move_mapping_over(copy.range(), piece.start) }?;
    copy.forget();
    Ok(())
}
