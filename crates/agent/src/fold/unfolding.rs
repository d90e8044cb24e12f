//! Unfolding: all folded pages of the process get private memory of their own again ([`Unfold`]).

use super::{Folder, parts};
use crate::home;
use crate::pool::Pool;
use crate::section::pieces;
use crate::table::{self, Table};
use act::{HUGE_PAGES, make_private};
use host::Pagemap;
use page::PageRange;
use rustix::io::Errno;
use wire::{SlotRun, Target};

/// Most pieces that are unfolded before the agent's thread does other work: 256.
const UNFOLD_AT_ONCE: usize = 256;

impl Folder {
    /// Unfolds some of the folded pages, at most `room` of them, and subtracts their number from `room`. Returns
    /// whether no folded page is left.
    ///
    /// # Errors
    /// Some pages could not be unfolded, though all were tried: memory or mappings are short, the pages are locked, or
    /// the program has registered them with a userfaultfd of its own.
    pub fn unfold(&mut self, pagemap: &Pagemap, pool: &Pool, room: &mut u64) -> Result<bool, Errno> {
        if *room == 0 {
            let left = table::lock().counts();
            return Ok(left.folded + left.zeroed + left.broken == 0 && !self.shows_homes());
        }
        let (mut done, mut failed) = (0, Ok(()));
        let runs = table::lock().all_slot_runs();
        for run in &runs {
            for (piece, target) in pieces(run.start, run.pages.into(), Target::Slot(run.slot)) {
                let piece = PageRange { pages: piece.pages.min(*room), ..piece };
                if piece.pages == 0 {
                    return failed.map(|()| false);
                }
                if !self.hold() {
                    return Ok(false);
                }
                let unfolded = self.unfold_piece(pagemap, pool, piece, target);
                let left: u64 = table::lock().slot_runs(piece).iter().map(|run| u64::from(run.pages)).sum();
                *room -= piece.pages - left;
                match unfolded {
                    Ok(()) => done += 1,
                    Err(Errno::NOMEM) => return Err(Errno::NOMEM),
                    Err(e) => failed = Err(e),
                }
            }
            if done >= UNFOLD_AT_ONCE {
                self.turns.rest();
                return Ok(false);
            }
        }
        self.turns.rest();
        failed?;
        Ok(self.leave_homes(room)? && self.unfold_others(room)?)
    }

    /// Pages that show the content of their homes (see the module `home`), where that is not empty.
    fn at_home(&self) -> Vec<PageRange> {
        let following = self.section.following();
        let all = table::lock().at_home(table::everything());
        all.into_iter().flat_map(|range| home::shown(following, range)).collect()
    }

    fn shows_homes(&self) -> bool {
        !self.at_home().is_empty()
    }

    /// Gives private memory to pages that show their homes, at most `room` of them, within the program's own mapping.
    /// Returns whether none is left.
    fn leave_homes(&self, room: &mut u64) -> Result<bool, Errno> {
        let all = self.at_home().into_iter().flat_map(|range| crate::section::cut(range, HUGE_PAGES));
        for (n, range) in all.enumerate() {
            let mut table = table::lock();
            for part in table.at_home(range) {
                let part = PageRange { pages: part.pages.min(*room), ..part };
                if part.pages == 0 || n >= UNFOLD_AT_ONCE {
                    return Ok(false);
                }
                make_private(part)?;
                *room -= part.pages;
                table.set_broken(part);
            }
        }
        Ok(true)
    }

    /// Gives private memory to pages that were folded as zeros, and to all other pages that lie in mappings of pools,
    /// also of pools that the worker no longer knows. Returns whether no folded page is left.
    fn unfold_others(&self, room: &mut u64) -> Result<bool, Errno> {
        let to_do = |table: &Table, range| [table.mapped_by_us(range), table.zeroed_pages(range)].concat();
        let all = to_do(&table::lock(), table::everything());
        for range in all {
            let mut table = table::lock();
            // The table is asked again: other memory may lie there by now, whose absent pages must stay absent.
            for (range, traits) in
                to_do(&table, range).into_iter().flat_map(|range| table.known(range)).collect::<Vec<_>>()
            {
                let may_touch = !table.mapped_by_us(range).is_empty() || self.section.may_touch(range);
                if !traits.may_be_written() || !may_touch {
                    continue;
                }
                let range = PageRange { pages: range.pages.min(*room), ..range };
                if range.pages == 0 {
                    return Ok(false);
                }
                make_private(range)?;
                *room -= range.pages;
                table.set_pending(range);
            }
        }
        Ok(table::lock().counts().folded == 0)
    }

    fn unfold_piece(&mut self, pagemap: &Pagemap, pool: &Pool, piece: PageRange, target: Target) -> Result<(), Errno> {
        let Target::Slot(slot) = target else { return Ok(()) };
        let mut table = table::lock();
        // The caller looked the slots up without the table's lock, so they may have changed.
        let run = SlotRun { start: piece.start, slot, pages: piece.pages as u16 };
        if table.slot_runs(piece) != [run] {
            return Ok(());
        }
        for (part, traits) in table.known(piece) {
            let Some(slot) = slot.add((part.start.page() - piece.start.page()) as u32) else { continue };
            if traits.shut != 0 {
                return Err(Errno::BUSY);
            }
            if traits.home.is_some() {
                // When the program discards the page, it must show its home again, so it stays in a mapping of the
                // template's file.
                make_private(part)?;
                table.set_broken(part);
                continue;
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
