//! The plan: decides what each resting page is folded to.
//!
//! ```text
//!   a page is reported at rest, with its fingerprint, and is
//!     all zeros                          -> fold it to nothing
//!     a duplicate of a live slot         -> fold it to the slot
//!     a duplicate of a pending slot      -> fold it to the slot as soon as that is filled
//!     a duplicate of an indexed page     -> take a slot; ask one of the two for its bytes (the donor); fold both
//!     none of these                      -> remember it in the index
//!
//!   a duplicate whose content was short-lived (`fleeting.rs`), and is not shared at the moment, is tried again later
//! ```
//!
//! Planned folds are not queued page by page. They are marks in the table of pages, and for each member a set of chunks
//! (64 neighbouring pages) with marked pages ([`Place`]). So
//!
//! - no queue grows while a member is slow to answer requests,
//! - a page that changes meanwhile only loses its mark,
//! - requests are made in the order of addresses, which makes the longest runs (`dispatch.rs`).
//!
//! `settle.rs` books the answers, `transition.rs` counts who holds slots, and `huge.rs` decides about huge pages.
//!
//! Pages that cannot be folded for a reason that may pass are not remembered one by one. The worker asks their member
//! for a full report later ([`Place::missed`]).

use crate::fleeting::Fleeting;
use crate::home::Homes;
use crate::index::{Entry, Index, Key, Keys};
use crate::pool::{Full, Pool};
use crate::segment::SlotState;
use crate::table::{CHUNK_PAGES, Mark, MemberId, PageRef, Queue, State, Table};
use crate::transition::Event;
use crate::waiters::Waiters;
use page::{Fingerprint, PoolSlot};
use std::collections::{BTreeSet, HashMap};
use wire::{RestedRun, Target};

/// Most chunks of one member: 2^20, which are 256 GiB of pages. Pages in further chunks are not noted.
const CHUNKS_OF_A_MEMBER: usize = 1 << 20;
/// Most chunks of all members together, as a multiple of the number of chunks that hold as many pages as the index may
/// remember: 2. A chunk often has few pages that are indexed.
const SPARSENESS: u64 = 2;
/// Most chunks of all members when a chunk is added for pages that a member claims to have folded already, as a
/// multiple of the most chunks for reported pages: 2. Claimed pages were in the table of an earlier worker, or in this
/// table before. So there is room for the claims, however much other members have reported meanwhile.
const CLAIMS_PART: u64 = 2;
/// Chunks that a member may have beyond one for each of its page frames and folded pages, as a part of the most chunks
/// of all members: 1/64.
const SPARE_PART: u64 = 64;
/// Most pages of one member that are noted to be tried again: pages that the kernel would not move, and pages of
/// short-lived contents. Instead of more, a full report is requested.
const MOST_RETRIES: usize = 1 << 16;

/// The settings that the plan follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Whether anything is to be folded.
    pub folds: bool,
    /// Whether members share nothing.
    pub intra_member_only: bool,
    /// Whether pages of zeros are to be folded.
    pub zeros: bool,
    /// Least number of a huge page's 512 pages that must fold for it to be split; `None`: none is split.
    pub split_huge_at: Option<u32>,
    /// Most pages that the index may remember.
    pub index_pages: u32,
}

/// A member's part of the plan: its chunks, its open work, and facts that hold for all of its pages.
#[derive(Debug, Default)]
pub struct Place {
    /// Its chunks by number.
    pub chunks: HashMap<u64, u32>,
    /// Chunks with wanted pages whose slots are filled.
    pub folds: BTreeSet<u64>,
    /// Chunks with donors: pages whose bytes the member is to be asked for.
    pub donations: BTreeSet<u64>,
    /// Whether the member says that it folds (its state in [`wire::MemberStats`]).
    pub may_fold: bool,
    /// Whether it answers requests to show pages.
    pub may_donate: bool,
    /// Whether it folds all pages at rest, even if they were written soon after earlier folds ([`wire::Hello::eager`]).
    pub eager: bool,
    /// Largest number of page frames that the kernel has counted for its process; `u64::MAX` before the first count.
    /// The member cannot report more pages than these.
    pub frames: u64,
    /// Pages of the member that map a slot.
    pub mapped: u64,
    /// Pages that the member was asked to fold and has not answered for.
    pub sent: u64,
    /// Slots that the member released. Their holds are to be handed to its leases (`lease.rs`).
    pub deferred: Vec<PoolSlot>,
    /// Pages that are to be considered again later ([`Planner::retry_all`]).
    pub retries: Vec<PageRef>,
    /// Whether a page was left out that only a full report makes known again.
    pub missed: bool,
    /// Pages that the member maps from a template's file (`home.rs`).
    pub homes: Homes,
}

impl Place {
    /// The chunks that need requests of this kind.
    pub const fn queue(&mut self, queue: Queue) -> &mut BTreeSet<u64> {
        match queue {
            Queue::Folds => &mut self.folds,
            Queue::Donations => &mut self.donations,
        }
    }
}

/// Looks up the contents of index entries in the table of pages and in the pool.
pub(crate) struct Contents<'a> {
    pub(crate) table: &'a Table,
    pub(crate) pool: &'a Pool,
    pub(crate) intra: bool,
}

impl Keys for Contents<'_> {
    fn key(&self, entry: Entry) -> Key {
        match entry {
            Entry::Page(page) => Key {
                fingerprint: self.table.fingerprint(page),
                owner: if self.intra { self.table.member(page).0 } else { 0 },
            },
            Entry::Slot(slot) => {
                let (fingerprint, owner) = self.pool.content(slot);
                Key { fingerprint, owner: if self.intra { owner } else { 0 } }
            }
        }
    }
}

/// Everything that is known of a group's pages, and the plan for them.
#[derive(Debug)]
pub struct Planner {
    pub(crate) table: Table,
    pub(crate) index: Index,
    /// The group's slots.
    pub pool: Pool,
    pub(crate) places: Vec<Option<Box<Place>>>,
    pub(crate) waiters: Waiters,
    pub(crate) fleeting: Fleeting,
    /// The current second since the worker began.
    pub(crate) now: u32,
    /// Pages for which another plan is to be made before the current call ends, because the earlier one failed.
    pub(crate) again: Vec<PageRef>,
    /// The settings that the plan follows.
    pub policy: Policy,
    /// Why a slot could not be taken from the pool, until the timed work has noted it (`tick.rs`).
    pub full: Option<Full>,
    /// Number of times that a page with a duplicate could not be folded because no slot could be taken.
    pub no_room: u64,
    /// Whether the index has been restricted to a smaller part of the hash space, and the supervisor has not been told
    /// so yet.
    pub narrowed: bool,
}

impl Planner {
    /// The plan of a group without members.
    pub fn new(pool: Pool, policy: Policy) -> Self {
        Self {
            table: Table::default(),
            index: Index::default(),
            pool,
            places: Vec::new(),
            waiters: Waiters::default(),
            fleeting: Fleeting::default(),
            now: 0,
            again: Vec::new(),
            policy,
            full: None,
            no_room: 0,
            narrowed: false,
        }
    }

    /// Adds a member.
    pub fn join(&mut self) -> MemberId {
        let place = Place { may_fold: true, may_donate: true, frames: u64::MAX, ..Place::default() };
        self.places.push(Some(Box::new(place)));
        MemberId(u32::try_from(self.places.len() - 1).expect("fewer than 2^32 connections in the life of a worker"))
    }

    /// A member's part of the plan.
    pub fn place(&mut self, member: MemberId) -> &mut Place {
        self.places[member.0 as usize].as_mut().expect("a member that joined and has not left")
    }

    pub(crate) const fn keys(&self) -> Contents<'_> {
        Contents { table: &self.table, pool: &self.pool, intra: self.policy.intra_member_only }
    }

    pub(crate) const fn key(&self, fingerprint: u64, member: MemberId) -> Key {
        Key { fingerprint, owner: if self.policy.intra_member_only { member.0 } else { 0 } }
    }

    /// Most chunks of 64 pages that all members together may have.
    const fn most_chunks(&self) -> u64 {
        self.policy.index_pages as u64 * SPARSENESS / CHUNK_PAGES + 1024
    }

    /// The member's chunk of this number, which is added if it is not there; `None` if there are too many.
    fn chunk(&mut self, member: MemberId, number: u64) -> Option<u32> {
        let is_known = self.place(member).chunks.contains_key(&number);
        let may = is_known || !self.would_have_too_many_chunks(member, 1);
        let chunk = may.then(|| self.chunk_of(self.most_chunks(), member, number)).flatten();
        self.place(member).missed |= chunk.is_none();
        chunk
    }

    /// Whether a member with `more` further chunks would have more chunks than it has page frames and folded pages,
    /// plus 1/[`SPARE_PART`] of the most chunks of all members.
    pub(crate) fn would_have_too_many_chunks(&mut self, member: MemberId, more: u64) -> bool {
        let spare = self.most_chunks() / SPARE_PART;
        let place = self.place(member);
        place.chunks.len() as u64 + more > place.frames.saturating_add(place.mapped).saturating_add(spare)
    }

    /// Like [`Self::chunk`], for pages of which the member claims that they map slots.
    pub(crate) fn claimed_chunk(&mut self, member: MemberId, number: u64) -> Option<u32> {
        self.chunk_of(self.most_chunks() * CLAIMS_PART, member, number)
    }

    fn chunk_of(&mut self, most: u64, member: MemberId, number: u64) -> Option<u32> {
        if let Some(chunk) = self.place(member).chunks.get(&number) {
            return Some(*chunk);
        }
        let few = (self.table.len() as u64) < most && self.place(member).chunks.len() < CHUNKS_OF_A_MEMBER;
        let chunk = few.then(|| self.table.add(member, number)).flatten()?;
        self.place(member).chunks.insert(number, chunk);
        Some(chunk)
    }

    /// Takes a member's report of resting pages and their fingerprints.
    pub fn rested(&mut self, member: MemberId, runs: &[RestedRun], mut fingerprints: &[Fingerprint]) {
        for run in runs {
            let (of_run, rest) = fingerprints.split_at(usize::from(run.pages).min(fingerprints.len()));
            fingerprints = rest;
            let stays_huge = run.huge && !self.is_worth_splitting(member, run.start, of_run);
            self.run_rested(member, run.start.page(), of_run, stays_huge);
        }
        self.look_again();
    }

    fn run_rested(&mut self, member: MemberId, first: u64, fingerprints: &[Fingerprint], huge: bool) {
        let (mut page, end) = (first, first + fingerprints.len() as u64);
        while page < end {
            let number = page / CHUNK_PAGES;
            let next = ((number + 1) * CHUNK_PAGES).min(end);
            if let Some(chunk) = self.chunk(member, number) {
                for at in page..next {
                    let page = PageRef::new(chunk, (at % CHUNK_PAGES) as usize);
                    self.page_rested(page, fingerprints[(at - first) as usize].0, huge);
                }
            }
            page = next;
        }
    }

    fn page_rested(&mut self, page: PageRef, fingerprint: u64, huge: bool) {
        match self.state(page) {
            State::Home(_) | State::Mapped(_) => return,
            State::Sent(_) | State::Early(_) => return self.table.set_fingerprint(page, fingerprint),
            state => {
                let is_planned = state != State::Idle || self.table.is(page, Mark::Indexed);
                let is_same = self.table.fingerprint(page) == fingerprint && self.table.is(page, Mark::Huge) == huge;
                if is_planned && is_same {
                    return;
                }
                self.forget(page);
            }
        }
        self.table.set_fingerprint(page, fingerprint);
        if huge {
            self.table.mark(page, Mark::Huge);
        } else {
            self.table.clear(page, Mark::Huge);
        }
        self.consider(page);
    }

    /// Decides what a page is folded to. It must be neither indexed, wanted, sent nor mapped.
    pub(crate) fn consider(&mut self, page: PageRef) {
        let fingerprint = self.table.fingerprint(page);
        let huge = self.table.is(page, Mark::Huge);
        if !self.policy.folds || fingerprint == 0 {
            return;
        }
        if let Some(home) = self.home(page) {
            let is_live = self.pool.state(home) == SlotState::Live;
            if is_live && self.pool.content(home).0 == fingerprint {
                return self.want(page, home);
            }
            // A page of zeros in a mapping of a template is not folded: anonymous memory in its place would not show
            // the template's bytes again when the program discards the page.
            if is_live && fingerprint == Fingerprint::ZERO_PAGE.0 {
                return;
            }
        }
        if fingerprint == Fingerprint::ZERO_PAGE.0 {
            if self.policy.zeros && !huge {
                self.want_now(page, Target::Zero);
            }
            return;
        }
        let key = self.key(fingerprint, self.table.member(page));
        let found = if self.index.covers(fingerprint) {
            let keys = Contents { table: &self.table, pool: &self.pool, intra: self.policy.intra_member_only };
            self.index.insert(key, Entry::Page(page), &keys)
        } else {
            self.index.find(key, &self.keys()).or(Some(Entry::Page(page)))
        };
        match found {
            None => {
                self.table.mark(page, Mark::Indexed);
                if self.index.pages() > self.policy.index_pages as usize {
                    self.narrow();
                }
                // Even the smallest part of the hash space is full. Only invented fingerprints do this: fingerprints of
                // real pages are spread evenly.
                if self.index.pages() > self.policy.index_pages as usize {
                    self.forget(page);
                }
            }
            Some(Entry::Page(other)) if other == page => {}
            Some(_) if huge => {}
            Some(entry) if self.did_not_last(entry, fingerprint) => self.retry(page),
            Some(Entry::Slot(slot)) => self.want(page, slot),
            Some(Entry::Page(other)) => self.pair(page, other, key),
        }
    }

    /// Whether a content was short-lived lately (`fleeting.rs`), and no page maps a slot with it at the moment. `entry`
    /// is its index entry.
    fn did_not_last(&self, entry: Entry, fingerprint: u64) -> bool {
        let is_shared = matches!(entry, Entry::Slot(slot) if self.pool.is_shared(slot));
        !is_shared && self.fleeting.waits(fingerprint, self.now)
    }

    /// Takes a slot for two pages with the same content, of which `other` is the one in the index. If no slot can be
    /// taken, the page is left out until a full report.
    fn pair(&mut self, page: PageRef, other: PageRef, key: Key) {
        if !self.is_shareable(page) {
            return;
        }
        if !self.is_shareable(other) {
            self.table.clear(other, Mark::Indexed);
            self.table.mark(page, Mark::Indexed);
            return self.index.replace(key, Entry::Page(other), Entry::Page(page));
        }
        let donates = |planner: &mut Self, page| {
            let member = planner.table.member(page);
            planner.place(member).may_donate
        };
        let (donor, other_page) = if donates(self, page) { (page, other) } else { (other, page) };
        if !donates(self, donor) {
            return;
        }
        let slot = match self.pool.take(key.fingerprint, self.table.member(page).0) {
            Ok(slot) => slot,
            Err(why) => {
                let member = self.table.member(page);
                self.place(member).missed = true;
                self.full = Some(why);
                self.no_room += 1;
                return;
            }
        };
        self.table.clear(other, Mark::Indexed);
        self.index.replace(key, Entry::Page(other), Entry::Slot(slot));
        self.advance(donor, Event::Donate(slot));
        self.advance(other_page, Event::Want(Target::Slot(slot)));
        self.pool.set_ticket(slot, self.waiters.insert([donor, other_page]));
        self.queue(donor, Queue::Donations);
    }

    /// Whether a page may be folded: its member folds, and it is no part of a huge page that stays whole.
    pub(crate) fn is_shareable(&self, page: PageRef) -> bool {
        let member = self.table.member(page);
        let folds = self.places.get(member.0 as usize).and_then(Option::as_ref).is_some_and(|place| place.may_fold);
        folds && !self.table.is(page, Mark::Huge)
    }

    /// Plans to fold a page to a slot that is live, or as soon as it is filled.
    fn want(&mut self, page: PageRef, slot: PoolSlot) {
        if self.pool.state(slot) != SlotState::Pending {
            self.want_now(page, Target::Slot(slot));
        } else if self.waiters.add(self.pool.ticket(slot), page) {
            self.advance(page, Event::Want(Target::Slot(slot)));
        } else {
            let member = self.table.member(page);
            self.place(member).missed = true;
        }
    }

    fn want_now(&mut self, page: PageRef, target: Target) {
        self.advance(page, Event::Want(target));
        self.queue(page, Queue::Folds);
    }

    /// Queues a page's chunk for requests of this kind.
    pub(crate) fn queue(&mut self, page: PageRef, queue: Queue) {
        if self.table.queue(page, queue) {
            let (member, number) = (self.table.member(page), self.table.chunk_number(page));
            self.place(member).queue(queue).insert(number);
        }
    }

    /// Drops the plan to fold a page, its index entry and its fingerprint. It must be neither sent nor mapped.
    pub(crate) fn forget(&mut self, page: PageRef) {
        let fingerprint = self.table.fingerprint(page);
        if self.table.clear(page, Mark::Indexed) {
            let key = self.key(fingerprint, self.table.member(page));
            let was = self.index.remove(key, Entry::Page(page));
            debug_assert!(was, "a page that is marked as indexed is in the index");
        }
        let state = self.table.state(page);
        if let State::Wanted(_) | State::Donor(_) = state {
            self.advance(page, Event::Drop);
        }
        if let State::Donor(slot) = state {
            self.fail(slot, false);
        }
        self.table.set_fingerprint(page, 0);
    }

    /// Gives up a pending slot whose bytes will not come. The pages that wait for it are considered again. A donor
    /// whose bytes have changed is forgotten until it is reported again: otherwise it would be asked over and over.
    pub(crate) fn fail(&mut self, slot: PoolSlot, donor_changed: bool) {
        if self.pool.state(slot) != SlotState::Pending {
            return;
        }
        let waiters = self.take_waiters(slot);
        self.pool.settle(slot, SlotState::Failed);
        self.unindex(slot);
        for (n, page) in waiters.enumerate() {
            if self.table.state(page).wants(slot) {
                self.advance(page, Event::Drop);
                if n == 0 && donor_changed {
                    self.table.set_fingerprint(page, 0);
                } else {
                    self.again.push(page);
                }
            }
        }
    }

    /// The pages that wait for a pending slot, the donor first. The caller ends the pending state.
    pub(crate) fn take_waiters(&mut self, slot: PoolSlot) -> impl Iterator<Item = PageRef> + use<> {
        self.waiters.remove(self.pool.ticket(slot))
    }

    pub(crate) fn unindex(&mut self, slot: PoolSlot) {
        let key = self.keys().key(Entry::Slot(slot));
        self.index.remove(key, Entry::Slot(slot));
    }

    /// Makes another plan for pages whose earlier plan failed ([`Self::again`]).
    pub(crate) fn look_again(&mut self) {
        while let Some(page) = self.again.pop() {
            let is_busy = self.table.is(page, Mark::Indexed) || self.table.state(page) != State::Idle;
            if self.table.fingerprint(page) != 0 && !is_busy {
                self.consider(page);
            }
        }
    }

    /// Halves the part of the hash space that the index covers until its pages are no more than the setting allows.
    fn narrow(&mut self) {
        while self.index.pages() > self.policy.index_pages as usize {
            let keys = Contents { table: &self.table, pool: &self.pool, intra: self.policy.intra_member_only };
            let mut forgotten = Vec::new();
            if !self.index.narrow(&keys, |page| forgotten.push(page)) {
                break;
            }
            for page in forgotten {
                self.table.clear(page, Mark::Indexed);
            }
            self.narrowed = true;
        }
    }

    /// Notes a page that [`Self::retry_all`] is to consider again.
    pub(crate) fn retry(&mut self, page: PageRef) {
        let member = self.table.member(page);
        let place = self.place(member);
        if place.retries.len() < MOST_RETRIES {
            place.retries.push(page);
        } else {
            place.missed = true;
        }
    }

    /// Plans anew for the pages of a member that [`Self::retry`] noted.
    pub fn retry_all(&mut self, member: MemberId) {
        self.again = std::mem::take(&mut self.place(member).retries);
        // A page that was reported anew may have been noted twice.
        self.again.sort_unstable();
        self.again.dedup();
        self.look_again();
    }
}
