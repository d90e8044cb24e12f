//! Booking of members' answers, claims and releases: each page of a message is an [`Event`]. One that contradicts what
//! the worker knows of the member is a [`Lie`], and is not booked.

use crate::dispatch::Donation;
use crate::fleeting::LIFE;
use crate::index::{Entry, Keys};
use crate::plan::{Contents, Planner};
use crate::segment::SlotState;
use crate::table::{CHUNK_PAGES, Mark, MemberId, PageRef, Queue, State, places};
use crate::transition::{Event, Lie};
use act::DonationWindow;
use page::{Fingerprint, PoolSlot};
use wire::{FoldRun, Outcome, SlotRun};

/// Why a claim cannot be booked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotBooked {
    /// The claim cannot be true.
    #[error("{0}")]
    Lie(#[from] Lie),
    /// The table of pages is full.
    #[error("the table of pages is full; raise the group's index memory")]
    Full,
}

/// Summary of a member's answer to a request to fold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    /// Pages that were replaced by slots, or by nothing where they hold zeros.
    pub folded: u64,
    /// Whether the member could not fold for a reason that holds for all of its pages.
    pub is_stuck: bool,
}

impl Planner {
    /// Fills slots with the pages that a member has copied into its donation window; `given` says which of the pages
    /// asked for it has copied.
    ///
    /// # Errors
    /// The kernel had no memory for a slot. This slot and all later ones of the donation stay unfilled.
    pub fn donated(&mut self, donation: Donation, given: &[bool], window: &DonationWindow) -> std::io::Result<()> {
        let mut filled = Ok(());
        let is_given = |at: usize| given.get(at).copied().unwrap_or(false);
        let mut at = 0;
        while at < donation.slots.len() {
            let first = donation.slots[at];
            let goes_on = |n: &usize| is_given(at + n) && first.add(*n as u32) == donation.slots.get(at + n).copied();
            let pages = (1..donation.slots.len() - at).take_while(goes_on).count() + 1;
            if is_given(at) && filled.is_ok() {
                filled = self.pool.fill(first, pages as u32, window, at);
            }
            for slot in &donation.slots[at..at + pages] {
                match &filled {
                    Ok(()) => self.settle_slot(*slot, is_given(at)),
                    Err(_) => self.fail(*slot, false),
                }
            }
            at += pages;
        }
        self.give_back(donation.slots);
        self.look_again();
        filled
    }

    /// Ends a slot's pending state after its donation. The slot becomes live only if its bytes have the fingerprint
    /// that was asked for.
    fn settle_slot(&mut self, slot: PoolSlot, filled: bool) {
        if self.pool.state(slot) == SlotState::Pending {
            if filled && self.pool.fingerprint(slot) == Some(self.pool.content(slot).0) {
                self.became_live(slot);
            } else {
                self.fail(slot, true);
            }
        }
    }

    /// Makes a slot live whose bytes are there, and queues requests to fold the pages that waited for it.
    pub(crate) fn became_live(&mut self, slot: PoolSlot) {
        let waiters = self.take_waiters(slot);
        self.pool.settle(slot, SlotState::Live);
        self.pool.set_born(slot, self.now);
        for page in waiters {
            if self.table.state(page).wants(slot) {
                self.queue(page, Queue::Folds);
            }
        }
    }

    /// Gives up all pending slots whose bytes this member was or is to be asked for, because it will not show them.
    /// Other members with pages of the same contents are asked instead.
    pub fn gives_nothing(&mut self, member: MemberId, donation: &Donation) {
        self.place(member).may_donate = false;
        for slot in &donation.slots {
            self.fail(*slot, false);
        }
        for number in std::mem::take(&mut self.place(member).donations) {
            let Some(chunk) = self.place(member).chunks.get(&number).copied() else { continue };
            self.table.unqueue(chunk, Queue::Donations);
            for place in places(self.table.chunk(chunk).all(Mark::Donor)) {
                if let State::Donor(slot) = self.table.state(PageRef::new(chunk, place)) {
                    self.fail(slot, false);
                }
            }
        }
        self.look_again();
    }

    /// Books a member's answer to a request to fold.
    pub fn folded(&mut self, member: MemberId, runs: &[FoldRun], outcomes: &[Outcome]) -> Outcomes {
        let mut outcomes = outcomes.iter();
        let mut sum = Outcomes::default();
        for run in runs {
            for n in 0..run.pages {
                let outcome = *outcomes.next().unwrap_or(&Outcome::Gone);
                let Some(page) = self.page_at(member, run.start.add_pages(n.into())) else { continue };
                sum.folded += u64::from(outcome == Outcome::Folded);
                sum.is_stuck |=
                    matches!(outcome, Outcome::NoVma | Outcome::Unpinned | Outcome::NoMemory | Outcome::Off);
                self.page_folded(page, outcome);
            }
        }
        self.look_again();
        sum
    }

    fn page_folded(&mut self, page: PageRef, outcome: Outcome) {
        let asked = self.table.state(page).slot().map_or(Fingerprint::ZERO_PAGE.0, |slot| self.pool.content(slot).0);
        // The page may have been reported anew while the answer was under way.
        let is_same = self.table.fingerprint(page) == asked;
        if outcome == Outcome::Folded {
            self.table.set_fingerprint(page, 0);
            let released = self.advance(page, Event::Folded);
            let member = self.table.member(page);
            self.place(member).deferred.extend(released);
            return;
        }
        self.advance(page, Event::NotFolded);
        if is_same {
            self.not_folded(page, outcome);
        } else {
            self.again.push(page);
        }
    }

    fn not_folded(&mut self, page: PageRef, outcome: Outcome) {
        match outcome {
            // A changed page is reported when it rests again. A page that is gone does not matter.
            Outcome::Folded | Outcome::Changed | Outcome::Gone => self.table.set_fingerprint(page, 0),
            Outcome::Busy => self.retry(page),
            Outcome::NoVma | Outcome::Unpinned | Outcome::NoMemory | Outcome::Off => {
                let member = self.table.member(page);
                self.place(member).missed = true;
            }
        }
    }

    /// Books releases: pages of a member map their slots no longer.
    ///
    /// # Errors
    /// A page did not map its slot. Everything before that page is booked.
    pub fn released(&mut self, member: MemberId, runs: &[SlotRun]) -> Result<(), Lie> {
        for run in runs {
            for n in 0..run.pages {
                let address = run.start.add_pages(n.into());
                let slot = run.slot.add(n.into()).ok_or(Lie::Released(address, run.slot))?;
                let is_home = self.place(member).homes.of(address.page()) == Some(slot);
                let page = if is_home {
                    let chunk = self.claimed_chunk(member, address.page() / CHUNK_PAGES);
                    chunk.map(|chunk| PageRef::new(chunk, (address.page() % CHUNK_PAGES) as usize))
                } else {
                    self.page_at(member, address)
                };
                let page = page.ok_or(Lie::Released(address, slot))?;
                if let Some(slot) = self.transition(page, Event::Released(slot))?.hold {
                    self.note_end(member, slot);
                    self.place(member).deferred.push(slot);
                }
            }
        }
        Ok(())
    }

    /// Notes a short-lived content (`fleeting.rs`) when nobody maps its slot any more. Releases of eager members, and
    /// those while nothing is to be folded, do not count.
    fn note_end(&mut self, member: MemberId, slot: PoolSlot) {
        let counts = self.policy.folds && !self.place(member).eager;
        if counts && !self.pool.is_shared(slot) && self.pool.age(slot, self.now).is_some_and(|age| age < LIFE) {
            self.fleeting.ended(self.pool.content(slot).0, self.now);
        }
    }

    /// Books claims: slots that a member maps since an earlier connection. `may_have` says whether the member can have
    /// a slot that is not inherited. If members are to share nothing, returns whether one of the slots belongs to
    /// another member.
    ///
    /// # Errors
    /// The member cannot have one of the slots, or the table of pages is full. Everything before that slot is booked.
    pub fn held(
        &mut self,
        member: MemberId,
        runs: &[SlotRun],
        may_have: impl Fn(PoolSlot) -> bool,
    ) -> Result<bool, NotBooked> {
        let mut crosses = false;
        for run in runs {
            for n in 0..run.pages {
                let address = run.start.add_pages(n.into());
                let slot = run.slot.add(n.into()).ok_or(Lie::Held(address, run.slot))?;
                let lie = Lie::Held(address, slot);
                if self.pool.state(slot) != SlotState::Live || !(self.pool.is_inherited(slot) || may_have(slot)) {
                    return Err(lie.into());
                }
                let chunk = self.claimed_chunk(member, address.page() / CHUNK_PAGES).ok_or(NotBooked::Full)?;
                let page = PageRef::new(chunk, (address.page() % CHUNK_PAGES) as usize);
                self.forget(page);
                let was_held = self.pool.holds(slot) > 0;
                let _ = self.transition(page, Event::Held(slot))?;
                crosses |= self.claim(member, slot, was_held && !may_have(slot));
            }
        }
        self.look_again();
        Ok(crosses)
    }

    /// Sets a claimed slot's owner if members are to share nothing. The owner is the first member to claim the slot, or
    /// the member that had it in an earlier connection. Returns whether the slot belongs to another member; `is_taken`
    /// says that somebody else holds it.
    fn claim(&mut self, member: MemberId, slot: PoolSlot, is_taken: bool) -> bool {
        let (fingerprint, owner) = self.pool.content(slot);
        if !self.policy.intra_member_only || owner == member.0 {
            return false;
        }
        if is_taken {
            return true;
        }
        self.index.remove(self.key(fingerprint, MemberId(owner)), Entry::Slot(slot));
        self.pool.set_owner(slot, member.0);
        self.index_slot(slot);
        false
    }

    /// Indexes a live slot for its content, unless another slot is indexed for it.
    pub(crate) fn index_slot(&mut self, slot: PoolSlot) {
        let keys = Contents { table: &self.table, pool: &self.pool, intra: self.policy.intra_member_only };
        let key = keys.key(Entry::Slot(slot));
        if let Some(Entry::Page(page)) = self.index.insert(key, Entry::Slot(slot), &keys) {
            // The page that stood in the index for that content can be folded to the slot.
            self.index.replace(key, Entry::Page(page), Entry::Slot(slot));
            self.table.clear(page, Mark::Indexed);
            self.again.push(page);
        }
    }

    /// Forgets a member whose connection has ended. `donation` is its unanswered donation. Returns the slots that its
    /// process may still map, a hold each.
    pub fn leave(&mut self, member: MemberId, donation: Donation) -> Vec<PoolSlot> {
        self.place(member).may_fold = false;
        self.gives_nothing(member, &donation);
        self.give_back(donation.slots);
        let mut left = self.leave_homes(member);
        for chunk in std::mem::take(&mut self.place(member).chunks).into_values() {
            for page in (0..CHUNK_PAGES as usize).map(|at| PageRef::new(chunk, at)) {
                self.forget(page);
                left.extend(self.advance(page, Event::Left));
            }
            self.table.remove(chunk);
        }
        left.append(&mut self.place(member).deferred);
        self.places[member.0 as usize] = None;
        self.look_again();
        left
    }
}
