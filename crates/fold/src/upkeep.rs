//! Changes of the whole plan: new settings, the next pass over the hash space, slots of an earlier worker or of a
//! template, and dropped segments.

use crate::plan::{Place, Planner, Policy};
use crate::segment::SlotState;
use crate::table::{CHUNK_PAGES, Mark, MemberId, PageRef, Queue, places};
use page::PoolSlot;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Number of inherited slots that are read and fingerprinted in one turn of the worker's loop.
const PIECE_SLOTS: u32 = 256;

/// Slots of segments from an earlier worker, or of templates, that are still to be fingerprinted.
#[derive(Debug, Default)]
pub struct Inheritance(Vec<(u8, Range<u32>)>);

impl Inheritance {
    /// Adds the slots of a segment that was just inherited.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn add(&mut self, planner: &mut Planner, number: u8) -> std::io::Result<()> {
        let mut from = 0;
        while let Some(slots) = planner.pool.inherit_slots(number, from)? {
            from = slots.end;
            self.0.push((number, slots));
        }
        Ok(())
    }

    /// Whether all slots are fingerprinted.
    pub const fn is_done(&self) -> bool {
        self.0.is_empty()
    }

    /// Fingerprints the next [`PIECE_SLOTS`] slots, and adds them to the index unless members share nothing.
    ///
    /// # Errors
    /// The slots could not be read. They are left out of the index.
    pub fn go_on(&mut self, planner: &mut Planner) -> std::io::Result<()> {
        let Some((number, slots)) = self.0.last_mut() else { return Ok(()) };
        let (number, piece) = (*number, slots.start..slots.end.min(slots.start + PIECE_SLOTS));
        slots.start = piece.end;
        if slots.start >= slots.end {
            self.0.pop();
        }
        planner.pool.fingerprint_inherited(number, piece.clone())?;
        if !planner.policy.intra_member_only {
            for slot in piece.filter_map(|index| PoolSlot::new(number, index)) {
                planner.index_slot(slot);
            }
        }
        Ok(())
    }
}

impl Planner {
    /// Puts new settings into effect. When members are no longer to share with each other, no page may map a slot at
    /// the time of the call. Returns whether members must send full reports.
    pub fn set_policy(&mut self, policy: Policy) -> bool {
        let before = std::mem::replace(&mut self.policy, policy);
        if before.intra_member_only != policy.intra_member_only {
            // Entries are found by keys of the old settings, so the old settings stand while they are removed.
            self.policy.intra_member_only = before.intra_member_only;
            self.drop_wanted();
            self.drop_seen(false);
            self.policy.intra_member_only = policy.intra_member_only;
            if !policy.intra_member_only {
                self.index_all_slots();
            }
            return true;
        }
        if before.folds && !policy.folds {
            self.drop_wanted();
        }
        self.index.pages() > policy.index_pages as usize || (policy.folds && !before.folds)
    }

    /// Forgets every indexed page, and covers the whole hash space again.
    pub fn start_over(&mut self) {
        self.drop_seen(true);
        self.index.widen();
    }

    fn drop_seen(&mut self, keep_slots: bool) {
        let table = &mut self.table;
        self.index.clear(keep_slots, |page| {
            table.clear(page, Mark::Indexed);
        });
    }

    /// Drops all plans to fold pages for which no request was sent yet.
    fn drop_wanted(&mut self) {
        let members = (0..self.places.len()).filter(|at| self.places[*at].is_some());
        for member in members.collect::<Vec<_>>() {
            let place = self.place(MemberId(member as u32));
            place.folds.clear();
            place.donations.clear();
            for chunk in place.chunks.values().copied().collect::<Vec<_>>() {
                self.table.unqueue(chunk, Queue::Folds);
                self.table.unqueue(chunk, Queue::Donations);
                for at in places(self.table.chunk(chunk).all(Mark::Wanted)) {
                    self.forget(PageRef::new(chunk, at));
                }
            }
        }
        // Pages that waited for failed slots are not wanted either.
        self.again.clear();
    }

    fn index_all_slots(&mut self) {
        let live = |(number, segment): (u8, &crate::segment::Segment)| {
            segment.live().filter_map(|(index, ..)| PoolSlot::new(number, index)).collect::<Vec<_>>()
        };
        let slots: Vec<PoolSlot> = self.pool.segments().flat_map(live).collect();
        slots.into_iter().for_each(|slot| self.index_slot(slot));
        self.look_again();
    }

    /// Begins the next pass over the hash space.
    pub fn next_pass(&mut self) {
        let pages = self.index.pages();
        self.drop_seen(true);
        self.index.advance(pages < self.policy.index_pages as usize / 2);
    }

    /// Forgets the fingerprints of a member's pages that are neither folded nor to be folded, because the member is
    /// about to send a full report.
    pub fn forget_reports(&mut self, member: MemberId) {
        let place = self.place(member);
        place.missed = false;
        place.retries.clear();
        for (number, chunk) in place.chunks.iter().map(|(n, c)| (*n, *c)).collect::<Vec<_>>() {
            let busy = self.table.chunk(chunk).all(Mark::Sent) | self.table.chunk(chunk).all(Mark::Mapped);
            for at in 0..CHUNK_PAGES as usize {
                let page = PageRef::new(chunk, at);
                if busy & 1 << at == 0 && !self.table.is(page, Mark::Wanted) {
                    self.forget(page);
                }
            }
            if busy | self.table.chunk(chunk).all(Mark::Wanted) | self.table.chunk(chunk).all(Mark::Away) == 0 {
                self.place(member).chunks.remove(&number);
                self.table.remove(chunk);
            }
        }
        self.look_again();
    }

    /// Drops a segment of which no slot was held for `time`; returns its number, `None` if there is none.
    pub fn drop_idle_segment(&mut self, now: Instant, time: Duration) -> Option<u8> {
        let number = self.pool.idle_segment(now, time)?;
        let segment = self.pool.segments().find(|(n, _)| *n == number)?.1;
        let contents: Vec<_> = segment.live().filter_map(|(index, ..)| PoolSlot::new(number, index)).collect();
        for slot in contents {
            debug_assert_eq!(self.pool.state(slot), SlotState::Live);
            self.unindex(slot);
        }
        self.pool.drop_segment(number);
        Some(number)
    }

    /// The part of the hash space that the index covers.
    pub const fn interval(&self) -> (u64, u64) {
        self.index.interval()
    }

    /// Bytes of memory that the whole plan takes: table, index, and records of slots and members.
    pub fn bytes(&self) -> u64 {
        let of_place = |place: &Place| place.chunks.capacity() * 13 + place.homes.bytes();
        let places: usize = self.places.iter().flatten().map(|place| of_place(place)).sum();
        self.table.bytes()
            + self.index.bytes()
            + self.pool.bytes()
            + self.waiters.bytes()
            + self.fleeting.bytes()
            + places as u64
    }
}
