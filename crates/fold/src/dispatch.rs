//! Requests to a member, made from the marks of its pages in the order of addresses. Consecutive pages that are to map
//! consecutive slots are one run, and a run takes one mapping (VMA).

use crate::plan::Planner;
use crate::segment::SlotState;
use crate::table::{CHUNK_PAGES, Mark, MemberId, PageRef, Queue, State, places};
use crate::transition::Event;
use page::{HostVirt, PageRange, PoolSlot};
use wire::{DONATION_PAGES, FOLD_PAGES, FoldRun, Target};

/// Pages that a member is asked to show, and the slots that their bytes are to fill. The donation has a hold of each
/// slot until the member answers.
#[derive(Debug, Default)]
pub struct Donation {
    pub(crate) slots: Vec<PoolSlot>,
    /// The pages, in the order of `slots`.
    pub ranges: Vec<PageRange>,
}

impl Donation {
    /// Number of pages.
    pub const fn pages(&self) -> usize {
        self.slots.len()
    }

    fn push(&mut self, address: HostVirt, slot: PoolSlot) {
        self.slots.push(slot);
        match self.ranges.last_mut() {
            Some(last) if last.end() == address => last.pages += 1,
            _ => self.ranges.push(PageRange { start: address, pages: 1 }),
        }
    }
}

/// Adds a page to the last run if it continues this run; otherwise it begins another run.
fn push(runs: &mut Vec<FoldRun>, address: HostVirt, target: Target) {
    if let Some(last) = runs.last_mut() {
        let goes_on = last.start.add_pages(last.pages.into()) == address
            && match (last.target, target) {
                (Target::Zero, Target::Zero) => true,
                (Target::Slot(first), Target::Slot(slot)) => first.add(last.pages.into()) == Some(slot),
                _ => false,
            };
        if goes_on {
            last.pages += 1;
            return;
        }
    }
    runs.push(FoldRun { start: address, pages: 1, target });
}

impl Planner {
    /// The next donation to ask a member for; empty if there is none.
    pub fn next_donation(&mut self, member: MemberId) -> Donation {
        let mut donation = Donation::default();
        while let Some(number) = self.place(member).donations.first().copied() {
            let Some(chunk) = self.place(member).chunks.get(&number).copied() else {
                self.place(member).donations.remove(&number);
                continue;
            };
            for place in places(self.table.chunk(chunk).all(Mark::Donor)) {
                if donation.pages() == DONATION_PAGES {
                    return donation;
                }
                let page = PageRef::new(chunk, place);
                if let Some(slot) = self.advance(page, Event::AskBytes) {
                    donation.push(self.table.address(page), slot);
                }
            }
            self.table.unqueue(chunk, Queue::Donations);
            self.place(member).donations.remove(&number);
        }
        donation
    }

    /// The next runs to ask a member to fold; empty if there are none.
    pub fn next_folds(&mut self, member: MemberId) -> Vec<FoldRun> {
        let (mut runs, mut room) = (Vec::new(), FOLD_PAGES);
        while let Some(number) = self.place(member).folds.first().copied() {
            if let Some(chunk) = self.place(member).chunks.get(&number).copied() {
                if !self.chunk_folds(chunk, &mut runs, &mut room) {
                    break;
                }
                self.table.unqueue(chunk, Queue::Folds);
            }
            self.place(member).folds.remove(&number);
        }
        runs
    }

    /// Adds the wanted pages of a chunk whose slots are live to `runs`; `false` if there was no room for all of them.
    fn chunk_folds(&mut self, chunk: u32, runs: &mut Vec<FoldRun>, room: &mut usize) -> bool {
        for place in places(self.table.chunk(chunk).all(Mark::Wanted)) {
            let page = PageRef::new(chunk, place);
            let State::Wanted(target) = self.table.state(page) else { continue };
            // `became_live` queues the page when the slot is filled.
            if matches!(target, Target::Slot(slot) if self.pool.state(slot) != SlotState::Live) {
                continue;
            }
            if *room == 0 {
                return false;
            }
            *room -= 1;
            self.advance(page, Event::AskFold);
            push(runs, self.table.address(page), target);
        }
        true
    }

    /// The page at this address of the member; `None` if nothing is known of its chunk.
    pub(crate) fn page_at(&mut self, member: MemberId, address: HostVirt) -> Option<PageRef> {
        let chunk = *self.place(member).chunks.get(&(address.page() / CHUNK_PAGES))?;
        Some(PageRef::new(chunk, (address.page() % CHUNK_PAGES) as usize))
    }
}
