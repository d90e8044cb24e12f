//! The pool: the pages that a group shares.
//!
//! It is a list of *segments* (`segment.rs`), memory files that members map privately and can only read. When nothing
//! holds a slot of the worker's own segments any more (`segment.rs`), the slot is filled with another content. Before,
//! the prover has to answer that nobody reads the slot's page frame (`proof.rs`).
//!
//! Memory is freed by whole segments only, when none of a segment's slots was held for a while. The files are sealed
//! against writing, and the kernel then refuses to punch single pages out of them. Two rules help that segments become
//! empty:
//!
//! - Used slots are taken before new ones. The exception is a small number of scattered slots, whose pages could only
//!   be folded in short runs.
//! - Segments start small and grow with the pool.
//!
//! Where there is no prover, slots that members mapped are not used again, and take memory for nothing until their
//! segment is empty. Two bounds hold then: the pool's bound is for used and wasted slots together, and [`WASTE_SLOTS`]
//! for wasted ones alone.
//!
//! Slots that are taken one after the other lie side by side, because consecutive pages that map consecutive slots need
//! only one mapping (VMA).

use crate::segment::{Memory, Segment, SlotState};
use act::{DonationWindow, InheritedSegment, PoolSegment};
use page::{Fingerprint, PAGE_BYTES, PageRange, PoolSlot};
use rustix::fd::OwnedFd;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};
use wire::prove::{PROVE_PAGES, PROVE_RANGES};

/// Most segments of a pool. As many file descriptors fit into one message to the supervisor.
pub const MOST_SEGMENTS: usize = 60;
/// Least number of slots of a segment: 4096, or 16 MiB. Larger segments have a multiple of it.
const LEAST_SEGMENT_SLOTS: u32 = 1 << 12;
/// Without a prover, the pool does not grow while it has more free slots that cannot be used again than this, and more
/// of them than slots in use: 64 MiB.
const WASTE_SLOTS: u64 = 1 << 14;
/// Size of a new segment as a part of the memory that the pool takes: 1/4. [`LEAST_SEGMENT_SLOTS`] is the least.
const GROWTH_PART: u64 = 4;
/// Least length of an extent of slots, used before and free now, that is taken before slots that were never used: 16
/// slots.
const LONG_ENOUGH: u32 = 16;
/// Free slots as a part of the slots in use, beyond which shorter extents are taken before new slots, too: 1/32. A run
/// that ends sooner costs each of its members a mapping, 256 bytes. An idle slot costs a page.
const SCATTERED_PART: u64 = 32;

/// The pool of a group.
#[derive(Debug)]
pub struct Pool {
    group: String,
    segments: Vec<Option<Box<Segment>>>,
    /// Numbers of the existing segments.
    numbers: Vec<u8>,
    /// Numbers of new segments whose files were not handed to members and the supervisor yet.
    pub made: Vec<u8>,
    /// The extent from which the next slots are taken.
    next: Option<(u8, Range<u32>)>,
    most_slots: u32,
    /// Slots in use: those with a hold, and all filled slots of inherited segments.
    slots: u64,
    last_number: u8,
    /// Whether the prover answers, so that free slots can be used again.
    pub has_prover: bool,
}

/// A number of slots. It is printed as the memory that they take, in MiB or KiB.
#[derive(Clone, Copy, Debug)]
pub struct Size(u32);

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kib = u64::from(self.0) * PAGE_BYTES as u64 / 1024;
        if kib.is_multiple_of(1024) { write!(f, "{} MiB", kib / 1024) } else { write!(f, "{kib} KiB") }
    }
}

/// Why no slot could be taken.
#[derive(Debug, thiserror::Error)]
pub enum Full {
    /// As many slots are in use as the setting allows.
    #[error("all that the pool may hold is in use: {0}")]
    Slots(Size),
    /// Too many slots are free and cannot be used again.
    #[error(
        "{waste} slots are free and may still be read by a device: without a prover (a service run by root has one), they \
         are not used again before their segments are empty; {used} are in use"
    )]
    Waste {
        /// Slots that are free and cannot be used again.
        waste: u64,
        /// Slots in use.
        used: u64,
    },
    /// The pool has [`MOST_SEGMENTS`] segments, and none of them has a slot that can be taken.
    #[error("the pool has {MOST_SEGMENTS} segments, most of them of earlier workers")]
    Segments,
    /// The kernel gave no memory.
    #[error("cannot make the pool larger: {0}")]
    Kernel(#[from] io::Error),
}

impl Pool {
    /// An empty pool that may grow to `most_slots`.
    pub fn new(group: &str, most_slots: u32) -> Self {
        let segments = (0..255).map(|_| None).collect();
        let (numbers, made) = (Vec::new(), Vec::new());
        Self {
            group: group.to_owned(),
            segments,
            numbers,
            made,
            next: None,
            most_slots,
            slots: 0,
            last_number: PoolSlot::FIRST_TEMPLATE - 1,
            has_prover: false,
        }
    }

    /// Changes the most slots that the pool may have in use.
    pub const fn set_most_slots(&mut self, slots: u32) {
        self.most_slots = slots;
    }

    /// Whether a slot may be taken again: the reason `full` holds no longer.
    pub fn has_room(&self, full: &Full) -> bool {
        match full {
            Full::Slots(_) => self.slots < u64::from(self.most_slots),
            Full::Waste { .. } => self.freed() > 0 || self.growth() > 0,
            Full::Segments => self.count() < MOST_SEGMENTS,
            Full::Kernel(_) => true,
        }
    }

    /// Its segments by number.
    pub fn segments(&self) -> impl Iterator<Item = (u8, &Segment)> {
        self.numbers.iter().filter_map(|number| Some((*number, self.segments[usize::from(*number)].as_deref()?)))
    }

    fn segment(&self, slot: PoolSlot) -> Option<&Segment> {
        self.segments.get(usize::from(slot.segment()))?.as_deref()
    }

    fn known(&mut self, slot: PoolSlot) -> &mut Segment {
        self.segments[usize::from(slot.segment())].as_mut().expect("a slot that is held lies in a segment")
    }

    /// Takes a slot for the content with this fingerprint; the slot is pending then, and has no hold. `owner` is the
    /// member whose content it is.
    ///
    /// # Errors
    /// No slot can be taken; the pool is as it was.
    pub fn take(&mut self, fingerprint: u64, owner: u32) -> Result<PoolSlot, Full> {
        if self.slots() >= u64::from(self.most_slots) {
            return Err(Full::Slots(Size(self.most_slots)));
        }
        loop {
            if let Some((number, range)) = &mut self.next
                && let Some(index) = range.next()
                && let Some(slot) = PoolSlot::new(*number, index)
            {
                self.known(slot).begin(index, fingerprint, owner);
                return Ok(slot);
            }
            self.next = Some(self.next_extent()?);
        }
    }

    fn next_extent(&mut self) -> Result<(u8, Range<u32>), Full> {
        let longest = self.segments().map(|(n, s)| (s.longest_freed(), n)).max().unwrap_or((0, 0));
        let unused = self.freed() + self.unproven();
        let fresh = self.segments().find(|(_, s)| s.untouched() > 0).map(|(n, _)| n);
        let reuse = longest.0 >= LONG_ENOUGH || unused * SCATTERED_PART > self.slots();
        let room = self.growth();
        if longest.0 > 0 && (reuse || room == 0 || (fresh.is_none() && self.count() >= MOST_SEGMENTS)) {
            let segment = self.segments[usize::from(longest.1)].as_mut();
            return Ok((longest.1, segment.and_then(|segment| segment.take_freed()).unwrap_or_default()));
        }
        if room == 0 {
            return Err(Full::Waste { waste: self.unproven(), used: self.slots() });
        }
        let number = match fresh {
            Some(number) => number,
            None => self.new_segment()?,
        };
        let segment = self.segments[usize::from(number)].as_mut();
        let most = room.min(wire::DONATION_PAGES as u64) as u32;
        Ok((number, segment.map(|segment| segment.take_untouched(most)).unwrap_or_default()))
    }

    fn new_segment(&mut self) -> Result<u8, Full> {
        if self.count() >= MOST_SEGMENTS {
            return Err(Full::Segments);
        }
        let wanted = u32::try_from(self.resident() / GROWTH_PART).unwrap_or(PoolSlot::PER_SEGMENT);
        let wanted = wanted.next_multiple_of(LEAST_SEGMENT_SLOTS);
        let slots = wanted.clamp(LEAST_SEGMENT_SLOTS, PoolSlot::PER_SEGMENT);
        let own = PoolSegment::create(&self.group, slots)?;
        let file = own.read_only()?;
        let number = self.unused_number();
        self.put(number, Segment::new(Memory::Own(own), file));
        self.made.push(number);
        Ok(number)
    }

    fn put(&mut self, number: u8, segment: Segment) {
        self.segments[usize::from(number)] = Some(Box::new(segment));
        self.numbers.push(number);
    }

    /// A number for a new segment. The number of a segment that was dropped lately is not used. A member that has not
    /// heard of the drop would take the new segment for the old one.
    fn unused_number(&mut self) -> u8 {
        loop {
            self.last_number = (self.last_number + 1) % PoolSlot::FIRST_TEMPLATE;
            if self.segments[usize::from(self.last_number)].is_none() {
                return self.last_number;
            }
        }
    }

    /// Takes over the file of a segment that an earlier worker filled, or of a template. [`Self::inherit_slots`] finds
    /// the slots in it.
    ///
    /// # Errors
    /// The file is no segment, or its number is taken.
    pub fn inherit(&mut self, number: u8, slots: u32, file: OwnedFd) -> io::Result<()> {
        let free = self.segments.get(usize::from(number)).is_some_and(Option::is_none);
        if !free || self.count() >= MOST_SEGMENTS || slots > PoolSlot::PER_SEGMENT {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a segment that cannot be"));
        }
        let inherited = InheritedSegment::take(file, slots)?;
        let file = inherited.read_only()?;
        let is_loaded = number >= PoolSlot::FIRST_TEMPLATE;
        let mut segment = Segment::new(Memory::Inherited(inherited), file);
        segment.is_loaded = is_loaded;
        self.put(number, segment);
        if !is_loaded {
            let is_first = self.last_number == PoolSlot::FIRST_TEMPLATE - 1;
            self.last_number = number.max(if is_first { 0 } else { self.last_number });
        }
        Ok(())
    }

    /// Whether the pool has a segment of this number.
    pub fn has(&self, number: u8) -> bool {
        self.segments.get(usize::from(number)).is_some_and(Option::is_some)
    }

    /// Sets whether a template is loaded. A template that is not loaded is dropped like any other segment.
    pub fn set_loaded(&mut self, number: u8, is_loaded: bool) {
        let segment = self.segments.get_mut(usize::from(number)).into_iter().flatten();
        segment.for_each(|segment| segment.is_loaded = is_loaded && number >= PoolSlot::FIRST_TEMPLATE);
    }

    /// Number of slots of a segment, empty ones too; 0 if there is none.
    pub fn slots_of(&self, number: u8) -> u32 {
        self.segments.get(usize::from(number)).and_then(Option::as_deref).map_or(0, Segment::slots)
    }

    /// Reads from the kernel how much memory each loaded template takes now.
    pub fn look_at_templates(&mut self) {
        for segment in self.segments.iter_mut().flatten().filter(|segment| segment.is_loaded) {
            let before = segment.resident;
            segment.look_at_memory();
            self.slots = self.slots + u64::from(segment.resident) - u64::from(before);
        }
    }

    /// Finds the first filled slots of an inherited segment from `from` on, and makes them live. `None` if there are no
    /// more.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn inherit_slots(&mut self, number: u8, from: u32) -> io::Result<Option<Range<u32>>> {
        let Some(segment) = self.segments[usize::from(number)].as_mut() else { return Ok(None) };
        let Memory::Inherited(inherited) = &segment.memory else { return Ok(None) };
        let filled = inherited.filled(from)?;
        if let Some(slots) = &filled {
            segment.inherit(slots.clone());
            self.slots += u64::from(slots.end - slots.start);
        }
        Ok(filled)
    }

    /// Reads these inherited slots of one segment, and notes the fingerprint of each.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn fingerprint_inherited(&mut self, number: u8, slots: Range<u32>) -> io::Result<()> {
        let Some(segment) = self.segments[usize::from(number)].as_mut() else { return Ok(()) };
        let Memory::Inherited(inherited) = &segment.memory else { return Ok(()) };
        let mut bytes = vec![0; (slots.end - slots.start) as usize * PAGE_BYTES];
        inherited.read(slots.start, &mut bytes)?;
        for (slot, page) in slots.zip(bytes.chunks_exact(PAGE_BYTES)) {
            segment.set_content(slot, Fingerprint::of(page).0, 0);
        }
        Ok(())
    }

    /// Sets the member that owns an inherited slot, for groups whose members share nothing with each other.
    pub fn set_owner(&mut self, slot: PoolSlot, owner: u32) {
        let segment = self.known(slot);
        let (fingerprint, _) = segment.content(slot.index());
        segment.set_content(slot.index(), fingerprint, owner);
    }

    /// Fills `pages` consecutive slots with the window's pages from number `page` on.
    ///
    /// # Errors
    /// Memory is short, or the slots are inherited.
    pub fn fill(&mut self, first: PoolSlot, pages: u32, window: &DonationWindow, page: usize) -> io::Result<()> {
        match &mut self.known(first).memory {
            Memory::Own(own) => own.fill(first.index()..first.index() + pages, window, page),
            Memory::Inherited(_) => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }

    /// Fingerprint of the bytes in a slot of this worker's own; `None` for an inherited one.
    pub fn fingerprint(&self, slot: PoolSlot) -> Option<u64> {
        match &self.segment(slot)?.memory {
            Memory::Own(own) => Some(Fingerprint::of(own.slot(slot.index())).0),
            Memory::Inherited(_) => None,
        }
    }

    /// Ends a slot's pending state; `state` says whether it is live or has failed.
    pub fn settle(&mut self, slot: PoolSlot, state: SlotState) {
        self.known(slot).settle(slot.index(), state);
    }

    /// The ticket of a pending slot, by which `waiters.rs` finds the pages that wait for it.
    pub fn ticket(&self, slot: PoolSlot) -> u32 {
        self.segment(slot).map_or(0, |segment| segment.ticket(slot.index()))
    }

    /// Sets the ticket of a pending slot ([`Self::ticket`]).
    pub fn set_ticket(&mut self, slot: PoolSlot, ticket: u32) {
        self.known(slot).set_ticket(slot.index(), ticket);
    }

    /// The state of a slot; [`SlotState::Free`] also if there is no such slot.
    pub fn state(&self, slot: PoolSlot) -> SlotState {
        self.segment(slot).map(|segment| segment.state(slot.index())).unwrap_or_default()
    }

    /// Whether a slot lies in a segment that a predecessor made.
    pub fn is_inherited(&self, slot: PoolSlot) -> bool {
        self.segment(slot).is_some_and(Segment::is_inherited)
    }

    /// Fingerprint and owner of what a slot holds or is to hold.
    pub fn content(&self, slot: PoolSlot) -> (u64, u32) {
        self.segment(slot).map_or((0, 0), |segment| segment.content(slot.index()))
    }

    /// Adds a hold, a reason to keep the slot's bytes (`segment.rs`).
    pub fn hold(&mut self, slot: PoolSlot) {
        let segment = self.known(slot);
        let new = segment.hold(slot.index()) && !segment.is_inherited();
        self.slots += u64::from(new);
    }

    /// Removes a hold of a slot; returns whether the slot is free now.
    pub fn unhold(&mut self, slot: PoolSlot) -> bool {
        let freed = self.known(slot).unhold(slot.index());
        self.slots -= u64::from(freed);
        freed
    }

    /// Adds a reference: a page of a connected member, which has a hold, maps the slot.
    pub fn refer(&mut self, slot: PoolSlot) {
        self.known(slot).refer(slot.index());
    }

    /// Takes a reference away.
    pub fn unrefer(&mut self, slot: PoolSlot) {
        self.known(slot).unrefer(slot.index());
    }

    /// Whether a page of a connected member maps a slot, or pages wait for it to be filled.
    pub fn is_shared(&self, slot: PoolSlot) -> bool {
        self.segment(slot).is_some_and(|segment| segment.is_referenced(slot.index()))
    }

    /// Notes when a slot was filled: `now` is in seconds since the worker began.
    pub fn set_born(&mut self, slot: PoolSlot, now: u32) {
        self.known(slot).set_born(slot.index(), now);
    }

    /// Seconds since a slot was filled; `None` for an inherited one.
    pub fn age(&self, slot: PoolSlot, now: u32) -> Option<u32> {
        let segment = self.segment(slot).filter(|segment| !segment.is_inherited())?;
        Some(now.saturating_sub(segment.born(slot.index())))
    }

    /// Notes that a member is asked to map a slot, so that the slot cannot be filled again without a proof
    /// (`proof.rs`).
    pub fn show(&mut self, slot: PoolSlot) {
        self.known(slot).show(slot.index());
    }

    /// Slots that were used and may be filled.
    pub fn freed(&self) -> u64 {
        self.segments().map(|(_, s)| u64::from(s.freed())).sum()
    }

    /// Slots that are free, and that a device or a pipe may still read.
    fn unproven(&self) -> u64 {
        self.segments().map(|(_, s)| u64::from(s.unproven())).sum()
    }

    /// Whether there is no prover and the pool must not grow, because too many slots are free and cannot be used again.
    pub fn is_wasteful(&self) -> bool {
        !self.has_prover && self.unproven() > self.slots().max(WASTE_SLOTS)
    }

    /// Number of slots by which the pool's memory may still grow.
    fn growth(&self) -> u64 {
        if self.is_wasteful() { 0 } else { u64::from(self.most_slots).saturating_sub(self.resident()) }
    }

    /// Takes unproven slots to ask the prover about: extents of one segment, at most as many as one question may have.
    /// `None` if there are none.
    pub fn take_unproven(&mut self) -> Option<(u8, Vec<Range<u32>>)> {
        let (_, number) = self.segments().map(|(n, s)| (s.longest_unproven(), n)).max().filter(|(n, _)| *n > 0)?;
        let segment = self.segments[usize::from(number)].as_mut()?;
        let (mut ranges, mut room) = (Vec::new(), PROVE_PAGES as u32);
        while ranges.len() < PROVE_RANGES
            && room > 0
            && let Some(range) = segment.take_unproven(room)
        {
            room -= range.end - range.start;
            ranges.push(range);
        }
        Some((number, ranges))
    }

    /// Where these slots of an own segment lie in the worker's memory. Each is read, so that the worker's page table
    /// maps it and the prover finds its frame there. `None` for an inherited segment.
    pub fn place(&self, number: u8, slots: &Range<u32>) -> Option<PageRange> {
        match &self.segments[usize::from(number)].as_ref()?.memory {
            Memory::Own(own) => Some(own.place(slots)),
            Memory::Inherited(_) => None,
        }
    }

    /// Takes the answer about a slot of [`Self::take_unproven`]: whether it may be filled.
    pub fn proven(&mut self, number: u8, slot: u32, is_free: bool) {
        if let Some(segment) = &mut self.segments[usize::from(number)] {
            segment.proven(slot, is_free);
        }
    }

    /// Has the prover asked again about slots whose frames still had other references.
    pub fn ask_again(&mut self) {
        self.segments.iter_mut().flatten().for_each(|segment| segment.ask_again());
    }

    /// Number of holds of a slot.
    pub fn holds(&self, slot: PoolSlot) -> u32 {
        self.segment(slot).map_or(0, |segment| segment.holds(slot.index()))
    }

    /// The number of a segment of which no slot was held for `time`; loaded templates do not count.
    pub fn idle_segment(&self, now: Instant, time: Duration) -> Option<u8> {
        let used = |s: &Segment| (s.resident > 0 || s.is_inherited()) && !s.is_loaded;
        let idle = |s: &Segment| s.idle_since.is_some_and(|since| now.saturating_duration_since(since) >= time);
        self.segments().find(|(_, segment)| used(segment) && idle(segment)).map(|(number, _)| number)
    }

    /// Drops a segment of which no slot is held. The index must know none of its slots.
    pub fn drop_segment(&mut self, number: u8) {
        let segment = self.segments[usize::from(number)].take();
        self.numbers.retain(|n| *n != number);
        debug_assert!(segment.as_ref().is_none_or(|segment| segment.held == 0));
        self.slots -= segment.filter(|segment| segment.is_inherited()).map_or(0, |segment| u64::from(segment.resident));
        if self.next.as_ref().is_some_and(|(next, _)| *next == number) {
            self.next = None;
        }
    }

    /// A segment's number, how many slots it has, and its read-only file.
    pub fn handout(&self, number: u8) -> Option<(u32, Rc<OwnedFd>)> {
        let segment = self.segments[usize::from(number)].as_ref()?;
        Some((segment.slots(), Rc::clone(&segment.file)))
    }

    /// Number of segments.
    pub const fn count(&self) -> usize {
        self.numbers.len()
    }

    /// Slots in use: held, or inherited.
    pub const fn slots(&self) -> u64 {
        self.slots
    }

    /// Slots that take memory, in use or not.
    pub fn resident(&self) -> u64 {
        self.segments().map(|(_, s)| u64::from(s.resident)).sum()
    }

    /// Number of filled slots that have a hold although no page of a connected member maps them: they wait for leases
    /// or departed members.
    pub fn deferred(&self) -> u64 {
        self.segments().map(|(_, s)| u64::from(s.held - s.referenced()).saturating_sub(u64::from(s.unfilled))).sum()
    }

    /// Slots in use, by the number of pages of connected members that map them: 0, 1, 2, 3 to 7, 8 and more.
    pub fn by_sharers(&self) -> [u64; 5] {
        let mut all = [0; 5];
        for (_, segment) in self.segments() {
            all[1..].iter_mut().zip(segment.by_sharers()).for_each(|(sum, slots)| *sum += u64::from(slots));
        }
        all[0] = self.slots().saturating_sub(all[1..].iter().sum());
        all
    }

    /// Bytes of memory that the worker's records of the slots take, without the slots themselves.
    pub fn bytes(&self) -> u64 {
        self.segments().map(|(_, s)| s.bytes()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes slots, has them mapped, and frees them.
    fn use_once(pool: &mut Pool, slots: u64) {
        let used: Vec<PoolSlot> = (0..slots).map(|n| pool.take(n, 0).unwrap()).collect();
        for slot in &used {
            pool.hold(*slot);
            pool.settle(*slot, SlotState::Live);
            pool.show(*slot);
        }
        used.into_iter().for_each(|slot| _ = pool.unhold(slot));
    }

    #[test]
    fn waste_is_bounded_until_prover_answers() {
        let mut pool = Pool::new("test", 1 << 20);
        let most = WASTE_SLOTS + wire::DONATION_PAGES as u64;
        use_once(&mut pool, most);
        assert!(matches!(pool.take(1, 0), Err(Full::Waste { .. })) && pool.resident() == most);
        pool.has_prover = true;
        let asked = pool.take_unproven().unwrap();
        assert_eq!(asked.1.iter().map(|slots| slots.len()).sum::<usize>(), PROVE_PAGES);
        for slot in asked.1.into_iter().flatten() {
            pool.proven(asked.0, slot, true);
        }
        use_once(&mut pool, PROVE_PAGES as u64);
        assert_eq!(pool.resident(), most, "slots that may be filled are used first");
    }

    #[test]
    fn slot_that_no_member_was_shown_is_used_again_at_once() {
        let mut pool = Pool::new("test", 1 << 20);
        for n in 0..2 * u64::from(LEAST_SEGMENT_SLOTS) {
            let slot = pool.take(n, 0).unwrap();
            pool.hold(slot);
            pool.settle(slot, SlotState::Live);
            pool.unhold(slot);
        }
        assert!(pool.resident() < u64::from(LEAST_SEGMENT_SLOTS), "{} slots", pool.resident());
    }
}
