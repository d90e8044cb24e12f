//! Collapsing pieces of 2 MiB into one mapping, or one huge page ([`collapse`]).

use super::again::NO_PROBE_TIME;
use super::{Folder, micros};
use crate::pool::Pool;
use crate::round::Rounds;
use crate::{collapse, references, table};
use act::MemberMemory;
use host::Pagemap;
use page::PageRange;
use rustix::io::Errno;
use std::time::{Duration, Instant};
use wire::MemberStats;

impl Folder {
    /// Collapses one piece, if there is one and it is time for that. At most `most` of its pages are not small private
    /// pages of the member, and none was written for `stayed` seconds.
    ///
    /// # Errors
    /// The kernel refused to look.
    pub fn collapse(
        &mut self,
        (pagemap, pool, rounds): (&Pagemap, &Pool, &mut Rounds),
        (most, stayed): (u64, u32),
        stats: &mut MemberStats,
    ) -> host::Result<()> {
        let now = Instant::now();
        if !self.may_refold(now) {
            return Ok(());
        }
        let Some((piece, traits)) = self.collapse.next(pagemap, most, now)? else { return Ok(()) };
        let began = Instant::now();
        let collapsed = self.collapse_piece((pagemap, pool, rounds), (piece, traits), stayed, stats);
        self.turns.rest();
        self.collapse.done(piece, collapsed.unwrap_or(false), began.elapsed());
        Ok(())
    }

    /// Returns whether the piece has been collapsed.
    pub(super) fn collapse_piece(
        &mut self,
        (pagemap, pool, rounds): (&Pagemap, &Pool, &mut Rounds),
        (piece, traits): (PageRange, table::Traits),
        stayed: u32,
        stats: &mut MemberStats,
    ) -> Result<bool, Errno> {
        self.survey();
        let Ok(generation) = self.surveyed else { return Ok(false) };
        let copy = MemberMemory::huge_page(traits.advice.huge)?;
        let huge = pagemap.huge_ranges(copy.range().start, copy.range().end());
        let is_huge = huge.is_ok_and(|ranges| ranges == [copy.range()]);
        if !self.hold() {
            return Ok(false);
        }
        let table = table::lock();
        // Without a huge page, a collapse only gives back mappings. No folded page is given up just for that.
        let is_of_use = is_huge || table.is_only_broken(piece);
        let is_current = references::generation() == generation;
        if table.traits(piece) != Some(traits) || !table.is_at_rest(piece, stayed) || !is_of_use || !is_current {
            return Ok(false);
        }
        let is_collapsed = self.make_one_mapping(table, (pagemap, pool), (piece, traits), (copy, generation), stats)?;
        if is_collapsed && is_huge {
            rounds.know_huge(piece.start);
        }
        Ok(is_collapsed)
    }

    /// Collapses a piece into `copy`. The table's lock is held, with which the caller has seen that the piece may be
    /// collapsed. Returns whether it was.
    pub(super) fn make_one_mapping(
        &mut self,
        mut table: table::Guard,
        (pagemap, pool): (&Pagemap, &Pool),
        (piece, traits): (PageRange, table::Traits),
        (copy, generation): (MemberMemory, u64),
        stats: &mut MemberStats,
    ) -> Result<bool, Errno> {
        if !self.witness.may_be_called(Instant::now()) {
            return Ok(false);
        }
        collapse::make_own(&mut table, piece)?;
        let called = self.witness.call_for(&table, &[piece]);
        self.no_refold_until = called.err().map(|_| Instant::now() + NO_PROBE_TIME);
        if called != Ok(true) {
            return Ok(false);
        }
        pool.wait_for_locks();
        let began = Instant::now();
        let with = (pagemap, self.section.notes(), &**self.section.following(), &mut self.witness);
        let is_collapsed = collapse::collapse_piece(&mut table, with, (piece, traits), copy, generation)?;
        stats.stalls.add(micros(began.elapsed()));
        drop(table);
        if self.witness.is_late() {
            // A prover that stays silent is not asked for some time: the next piece gets another witness.
            self.witness.catch_up();
        }
        Ok(is_collapsed)
    }

    /// The time until the next search or piece is due.
    pub fn collapse_in(&self, now: Instant) -> Duration {
        self.collapse.due_in(now)
    }

    /// Makes the next search for pieces due at once, because everything was unfolded.
    pub fn hurry_to_collapse(&mut self) {
        self.collapse.hurry(Instant::now());
    }
}
