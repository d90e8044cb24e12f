//! A segment of the pool: its memory, and an account of its slots.
//!
//! ```text
//!            taken for a content         its bytes are there         a member was asked to map it
//!   free ------------------------> pending ----------------> live ----------------------------> shown
//!    ^                               | its donor changed       |                                  |
//!    |                               v                         |                                  |
//!    |<------------ no hold -------- failed                    |                                  |
//!    |<------------ no hold -----------------------------------+                                  |
//!    |                                                                                            |
//!    |<-- nobody reads its frame (proof.rs) --- unproven <-------------- no hold -----------------+
//! ```
//!
//! When nobody maps a slot any more that members once mapped, a device or a pipe may still read it. This reader has a
//! reference to the slot's page frame, and must find the slot's old bytes. So the slot stays *unproven* until the
//! prover has answered that nobody has such a reference. Without a prover, the slot stays unproven until its segment is
//! dropped. The reader is safe then: the kernel keeps the frame until the last reference is dropped, even when the file
//! is gone.
//!
//! A *hold* is a reason not to put other bytes into a slot:
//!
//! - a page that maps it or is to map it,
//! - a donation under way,
//! - a process that may still map it without the worker knowing (`lease.rs`).
//!
//! A *reference* is a page of a connected member that maps it. Slots of an inherited segment are live from the
//! beginning and never free, because this worker cannot write them. Filled slots of a *template* are live and never
//! free, too. Its empty slots are free, and are never taken. A template is not dropped while it is loaded.

use crate::extents::Extents;
use act::{InheritedSegment, PoolSegment};
use rustix::fd::OwnedFd;
use std::ops::Range;
use std::rc::Rc;
use std::time::Instant;

/// Index in [`Segment::by_sharers`] at which a slot with this number of references counts; `None` for 0.
const fn sharers(references: u32) -> Option<usize> {
    match references {
        0 => None,
        1 => Some(0),
        2 => Some(1),
        3..8 => Some(2),
        _ => Some(3),
    }
}

/// The state of a slot. Whether a live slot was shown, and whether a free slot is unproven, is noted elsewhere in
/// [`Segment`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum SlotState {
    /// The slot is free: nothing needs its bytes.
    #[default]
    Free,
    /// The slot was taken for a content, and the worker waits for the bytes.
    Pending,
    /// The slot holds its content.
    Live,
    /// The slot's bytes did not come, and the slot still has a hold.
    Failed,
}

/// The memory behind a segment.
#[derive(Debug)]
pub enum Memory {
    /// Made and filled by this worker.
    Own(PoolSegment),
    /// Made by an earlier worker, or a template: this worker cannot write it.
    Inherited(InheritedSegment),
}

/// A segment of the pool: its memory, and the account of its slots.
#[derive(Debug)]
pub struct Segment {
    /// The memory behind the segment.
    pub memory: Memory,
    /// The read-only file that members and supervisor are given.
    pub file: Rc<OwnedFd>,
    contents: Vec<u64>,
    owners: Vec<u32>,
    holds: Vec<u32>,
    /// References; for a pending slot, which has none, the ticket of the pages that wait for it (`waiters.rs`).
    references: Vec<u32>,
    /// When each slot was filled, in seconds since the worker began.
    born: Vec<u32>,
    states: Vec<SlotState>,
    /// Whether a member was asked to map each slot since it was filled.
    shown: Vec<bool>,
    /// Slots that were used, are free, and may be filled.
    freed: Extents,
    /// Slots that are free, and that a device or a pipe may still read.
    unproven: Extents,
    /// Unproven slots whose frame was still referenced when the prover was asked.
    refused: Vec<u32>,
    /// The first slot that was never taken. All slots behind it were never taken either.
    untaken: u32,
    /// Number of slots that take memory, whether in use or free.
    pub resident: u32,
    /// Slots with at least one hold.
    pub held: u32,
    /// Number of slots by their number of references: 1, 2, 3 to 7, 8 and more (see [`sharers`]).
    by_sharers: [u32; 4],
    /// Slots that are pending or failed.
    pub unfilled: u32,
    /// Since when no slot has a hold; `None` while one has.
    pub idle_since: Option<Instant>,
    /// Whether the segment is a template that is loaded.
    pub is_loaded: bool,
}

impl Segment {
    /// A segment of which no slot is used.
    pub fn new(memory: Memory, file: OwnedFd) -> Self {
        Self {
            memory,
            file: Rc::new(file),
            contents: Vec::new(),
            owners: Vec::new(),
            holds: Vec::new(),
            references: Vec::new(),
            born: Vec::new(),
            states: Vec::new(),
            shown: Vec::new(),
            freed: Extents::default(),
            unproven: Extents::default(),
            refused: Vec::new(),
            untaken: 0,
            resident: 0,
            held: 0,
            by_sharers: [0; 4],
            unfilled: 0,
            idle_since: Some(Instant::now()),
            is_loaded: false,
        }
    }

    /// How many slots it has.
    pub const fn slots(&self) -> u32 {
        match &self.memory {
            Memory::Own(own) => own.slots(),
            Memory::Inherited(inherited) => inherited.slots(),
        }
    }

    /// Whether an earlier worker made it, or it is a template.
    pub const fn is_inherited(&self) -> bool {
        matches!(self.memory, Memory::Inherited(_))
    }

    fn grow_to(&mut self, slots: u32) {
        let slots = slots as usize;
        if slots > self.states.len() {
            self.contents.resize(slots, 0);
            self.owners.resize(slots, 0);
            self.holds.resize(slots, 0);
            self.references.resize(slots, 0);
            self.born.resize(slots, 0);
            self.states.resize(slots, SlotState::Free);
            self.shown.resize(slots, false);
        }
    }

    /// Slots that were used and may be filled.
    pub const fn freed(&self) -> u32 {
        self.freed.free()
    }

    /// Number of slots that are free and that a device or a pipe may still read, without those about which the prover
    /// has not answered yet.
    pub const fn unproven(&self) -> u32 {
        self.unproven.free() + self.refused.len() as u32
    }

    /// Length of the longest extent of unproven slots that the prover may be asked about; 0 if there is none.
    pub fn longest_unproven(&self) -> u32 {
        self.unproven.longest()
    }

    /// Takes the longest extent of slots to ask the prover about, or its first `most` slots; `None` if there is none.
    pub fn take_unproven(&mut self, most: u32) -> Option<Range<u32>> {
        self.unproven.take(most)
    }

    /// Takes the answer about a slot that the prover was asked about: whether it may be filled.
    pub fn proven(&mut self, slot: u32, is_free: bool) {
        debug_assert!(self.state(slot) == SlotState::Free && self.holds(slot) == 0);
        if is_free {
            self.freed.insert(slot);
        } else {
            self.refused.push(slot);
        }
    }

    /// Has the prover asked again about slots whose frames still had other references.
    pub fn ask_again(&mut self) {
        for slot in std::mem::take(&mut self.refused) {
            self.unproven.insert(slot);
        }
    }

    /// Slots that were never used.
    pub const fn untouched(&self) -> u32 {
        match &self.memory {
            Memory::Own(own) => own.slots() - self.untaken,
            Memory::Inherited(_) => 0,
        }
    }

    /// Length of the longest extent of slots that were used and may be filled.
    pub fn longest_freed(&self) -> u32 {
        self.freed.longest()
    }

    /// Takes the longest extent of slots that were used and may be filled again; `None` if there is none.
    pub fn take_freed(&mut self) -> Option<Range<u32>> {
        self.freed.take(u32::MAX)
    }

    /// Takes up to `most` slots that were never used.
    pub fn take_untouched(&mut self, most: u32) -> Range<u32> {
        let start = self.untaken;
        self.untaken += most.min(self.untouched());
        self.grow_to(self.untaken);
        start..self.untaken
    }

    /// Makes a slot that was taken pending for this content.
    pub fn begin(&mut self, slot: u32, fingerprint: u64, owner: u32) {
        let at = slot as usize;
        debug_assert!(self.states[at] == SlotState::Free && self.holds[at] == 0);
        (self.states[at], self.contents[at], self.owners[at]) = (SlotState::Pending, fingerprint, owner);
        self.shown[at] = false;
        self.unfilled += 1;
        // New slots are used in the order of their numbers, so all slots up to this one have memory.
        self.resident = self.resident.max(slot + 1);
    }

    /// Ends a slot's pending state; `state` says whether it is live or has failed.
    pub fn settle(&mut self, slot: u32, state: SlotState) {
        let at = slot as usize;
        debug_assert_eq!(self.states[at], SlotState::Pending);
        (self.states[at], self.references[at]) = (state, 0);
        self.unfilled -= u32::from(state == SlotState::Live);
    }

    /// The ticket of a pending slot, by which `waiters.rs` finds the pages that wait for it.
    pub fn ticket(&self, slot: u32) -> u32 {
        debug_assert_eq!(self.state(slot), SlotState::Pending);
        self.references[slot as usize]
    }

    /// Sets the ticket of a pending slot ([`Self::ticket`]).
    pub fn set_ticket(&mut self, slot: u32, ticket: u32) {
        debug_assert_eq!(self.state(slot), SlotState::Pending);
        self.references[slot as usize] = ticket;
    }

    /// Makes slots live that an earlier worker, or the maker of a template, has filled.
    pub fn inherit(&mut self, slots: Range<u32>) {
        self.grow_to(slots.end);
        self.resident += slots.end - slots.start;
        self.states[slots.start as usize..slots.end as usize].fill(SlotState::Live);
    }

    /// Reads from the kernel how much memory a template's file takes now. It grows: the kernel allocates a page for an
    /// empty slot as soon as somebody reads it.
    pub fn look_at_memory(&mut self) {
        if let Memory::Inherited(inherited) = &self.memory {
            self.resident = inherited.pages().unwrap_or(self.resident);
        }
    }

    /// Sets the content of an inherited slot, and its owner where members share nothing.
    pub fn set_content(&mut self, slot: u32, fingerprint: u64, owner: u32) {
        (self.contents[slot as usize], self.owners[slot as usize]) = (fingerprint, owner);
    }

    /// The state of a slot; [`SlotState::Free`] also if there is no such slot.
    pub fn state(&self, slot: u32) -> SlotState {
        self.states.get(slot as usize).copied().unwrap_or_default()
    }

    /// Fingerprint and owner of what a slot holds or is to hold.
    pub fn content(&self, slot: u32) -> (u64, u32) {
        (self.contents[slot as usize], self.owners[slot as usize])
    }

    /// Adds a hold to a slot; returns whether it is the first.
    pub fn hold(&mut self, slot: u32) -> bool {
        let holds = &mut self.holds[slot as usize];
        *holds += 1;
        if *holds > 1 {
            return false;
        }
        self.held += 1;
        self.idle_since = None;
        true
    }

    /// Removes a hold of a slot; returns whether the slot is free now.
    pub fn unhold(&mut self, slot: u32) -> bool {
        let at = slot as usize;
        self.holds[at] -= 1;
        if self.holds[at] > 0 {
            return false;
        }
        self.held -= 1;
        if self.held == 0 {
            self.idle_since = Some(Instant::now());
        }
        if self.is_inherited() {
            return false;
        }
        debug_assert!(self.references[at] == 0 || self.states[at] == SlotState::Pending);
        self.references[at] = 0;
        self.unfilled -= u32::from(self.states[at] != SlotState::Live);
        self.states[at] = SlotState::Free;
        if self.shown[at] {
            self.unproven.insert(slot);
        } else {
            self.freed.insert(slot);
        }
        true
    }

    /// Notes that a member is asked to map a slot.
    pub fn show(&mut self, slot: u32) {
        self.shown[slot as usize] = true;
    }

    /// Adds a reference: a page of a connected member, which has a hold, maps the slot.
    pub fn refer(&mut self, slot: u32) {
        let references = &mut self.references[slot as usize];
        *references += 1;
        let references = *references;
        self.shared_by(references - 1, references);
    }

    /// Takes a reference away: the page maps the slot no longer, or its member's connection ended.
    pub fn unrefer(&mut self, slot: u32) {
        let references = &mut self.references[slot as usize];
        *references -= 1;
        let references = *references;
        self.shared_by(references + 1, references);
    }

    /// Moves a slot in the counts by number of references, which was `before` and is `after` now.
    fn shared_by(&mut self, before: u32, after: u32) {
        let (before, after) = (sharers(before), sharers(after));
        if before != after {
            before.into_iter().for_each(|at| self.by_sharers[at] -= 1);
            after.into_iter().for_each(|at| self.by_sharers[at] += 1);
        }
    }

    /// Slots by the number of pages of connected members that map them: 1, 2, 3 to 7, 8 and more.
    pub const fn by_sharers(&self) -> [u32; 4] {
        self.by_sharers
    }

    /// Slots with at least one reference.
    pub fn referenced(&self) -> u32 {
        self.by_sharers.iter().sum()
    }

    /// Whether a page of a connected member maps the slot, or it is pending and pages wait for it.
    pub fn is_referenced(&self, slot: u32) -> bool {
        self.references.get(slot as usize).is_some_and(|references| *references > 0)
            || self.state(slot) == SlotState::Pending
    }

    /// Notes when a slot was filled: `now` is in seconds since the worker began.
    pub fn set_born(&mut self, slot: u32, now: u32) {
        self.born[slot as usize] = now;
    }

    /// The second when a slot was filled.
    pub fn born(&self, slot: u32) -> u32 {
        self.born[slot as usize]
    }

    /// The live slots, with fingerprint and owner.
    pub fn live(&self) -> impl Iterator<Item = (u32, u64, u32)> {
        let live = self.states.iter().enumerate().filter(|(_, state)| **state == SlotState::Live);
        live.map(|(at, _)| (at as u32, self.contents[at], self.owners[at]))
    }

    /// Holds of a slot, for tests and reports.
    pub fn holds(&self, slot: u32) -> u32 {
        self.holds.get(slot as usize).copied().unwrap_or(0)
    }

    /// Bytes of memory that the records of the slots take.
    pub fn bytes(&self) -> u64 {
        self.states.capacity() as u64 * 26
            + self.freed.bytes()
            + self.unproven.bytes()
            + self.refused.capacity() as u64 * 4
    }
}
