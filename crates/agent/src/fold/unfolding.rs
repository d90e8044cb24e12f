//! Making everything private again ([`Unfold`]).

use super::{Folder, parts};
use crate::pool::Pool;
use crate::section::pieces;
use crate::table;
use act::make_private;
use host::Pagemap;
use page::PageRange;
use rustix::io::Errno;
use wire::{SlotRun, Target};

/// Runs that are unfolded before the agent looks at other work.
const UNFOLD_AT_ONCE: usize = 256;

impl Folder {
    /// Unfolds some of the folded pages. Returns whether none is left.
    ///
    /// # Errors
    /// Some pages could not be unfolded, though all were tried. Memory or mappings are short, the pages are locked,
    /// or the program looks after their faults by itself.
    pub fn unfold(&mut self, pagemap: &Pagemap, pool: &Pool) -> Result<bool, Errno> {
        let (mut done, mut failed) = (0, Ok(()));
        let runs = table::lock().all_slot_runs();
        for run in &runs {
            for (piece, target) in pieces(run.start, run.pages.into(), Target::Slot(run.slot)) {
                match self.unfold_piece(pagemap, pool, piece, target) {
                    Ok(()) => done += 1,
                    Err(Errno::NOMEM) => return Err(Errno::NOMEM),
                    Err(e) => failed = Err(e),
                }
            }
            if done >= UNFOLD_AT_ONCE {
                return Ok(false);
            }
        }
        failed?;
        let (pooled, zeroed) = {
            let table = table::lock();
            (table.pooled_pages(table::everything()), table.zeroed_pages(table::everything()))
        };
        // Pages that were folded as zeros, and pages of pools that the worker no longer knows.
        for range in pooled.into_iter().chain(zeroed) {
            let mut table = table::lock();
            let writable = table.known(range).into_iter().filter(|(_, traits)| traits.may_be_written());
            for (range, _) in writable.collect::<Vec<_>>() {
                if table.pooled_pages(range).is_empty() && !self.section.may_touch(range) {
                    continue;
                }
                make_private(range)?;
                table.set_pending(range);
            }
        }
        Ok(table::lock().counts().folded == 0)
    }

    fn unfold_piece(&mut self, pagemap: &Pagemap, pool: &Pool, piece: PageRange, target: Target) -> Result<(), Errno> {
        let Target::Slot(slot) = target else { return Ok(()) };
        let mut table = table::lock();
        // The caller looked it up without the lock: it may have changed since.
        let run = SlotRun { start: piece.start, slot, pages: piece.pages as u16 };
        if table.slot_runs(piece) != [run] {
            return Ok(());
        }
        for (part, traits) in table.known(piece) {
            let Some(slot) = slot.add((part.start.page() - piece.start.page()) as u32) else { continue };
            if traits.shut != 0 {
                return Err(Errno::BUSY);
            }
            let view = pool.of(slot).ok_or(Errno::NODEV)?;
            self.unfold.run(&mut table, pagemap, part, (view, slot), traits)?;
            let private = parts(part, |page| table.is_foldable(page));
            let range = |(from, pages)| PageRange { start: part.start.add_pages(from), pages };
            self.section.watch_again(&private.into_iter().map(range).collect::<Vec<_>>());
        }
        Ok(())
    }
}
