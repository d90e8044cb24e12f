//! The table of pages: everything the worker knows of each page of each member.
//!
//! Pages are kept in chunks of 64 neighbours. Each page has a fingerprint, a slot, and one bit for each [`Mark`], which
//! makes 13 bytes. A page has a number of 31 bits in the whole group ([`PageRef`]), by which the index names it. Only
//! the table knows a page's fingerprint.
//!
//! ```text
//!            reported                 a duplicate, or a slot            sent              Folded
//!   unknown ----------> indexed -----------------------> wanted ---------> sent ---------------> mapped
//!      ^                  | reported anew, left   |        |   ^             |                      |
//!      |<-----------------+                       +--------+   | (donor: its |  Changed, Gone       | Released
//!      |<------------------------------------------- dropped   |  bytes are  |                      |
//!      |                                                       |  asked for) |                      |
//!      |<------------------------------------------------------+-------------+----------------------+
//! ```
//!
//! The fingerprint of a page may be known although the page is not indexed: the index has another page with that
//! content, and one of the two cannot be folded for the moment. `transition.rs` changes states, and counts the holds of
//! slots (the reasons to keep a slot's bytes: `segment.rs`).

use page::{HostVirt, PoolSlot};
use wire::Target;

/// log2 of [`CHUNK_PAGES`].
const CHUNK_SHIFT: u32 = 6;
/// Pages of a chunk.
pub const CHUNK_PAGES: u64 = 1 << CHUNK_SHIFT;
/// Most chunks of a table, so that page numbers fit into 31 bits.
const MOST_CHUNKS: u32 = 1 << (31 - CHUNK_SHIFT);
/// log2 of the number of chunks in a slab, the piece by which the table grows.
const SLAB_SHIFT: u32 = 6;

/// The number of a member's connection. A process that connects again gets another number, and no number is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u32);

/// The number of a page in the table: the number of its chunk, and its place among the chunk's 64 pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageRef(u32);

impl PageRef {
    /// The page at this place of this chunk.
    pub const fn new(chunk: u32, place: usize) -> Self {
        Self(chunk << CHUNK_SHIFT | place as u32)
    }

    /// Its number: less than 2^31.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The page with this number.
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    const fn chunk(self) -> u32 {
        self.0 >> CHUNK_SHIFT
    }

    /// Its place in its chunk.
    pub const fn place(self) -> usize {
        (self.0 & (CHUNK_PAGES as u32 - 1)) as usize
    }

    const fn bit(self) -> u64 {
        1 << self.place()
    }
}

/// A property that a page may have, kept as one bit for each page. Together they say the page's [`State`], except for
/// [`Self::Indexed`] and [`Self::Huge`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Mark {
    /// The index entry of its content is this page.
    Indexed,
    /// It is part of a huge page that is to stay whole.
    Huge,
    /// It is to be folded, and the member has not been asked yet.
    Wanted,
    /// A wanted or sent page of zeros: it is discarded instead of being replaced by a slot.
    Zero,
    /// Its member is to be asked for its bytes, which fill the slot to which the page is to be folded.
    Donor,
    /// The member was asked to fold it and has not answered yet.
    Sent,
    /// The member's release of the slot came before its answer that the page was folded.
    Early,
    /// The page maps its slot.
    Mapped,
    /// It lies in a mapping of a template, and no longer shows the template's page (`home.rs`).
    Away,
}

/// What is planned for a page, or what it maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing is planned.
    Idle,
    /// It is to be folded to this target, and the member has not been asked yet.
    Wanted(Target),
    /// It is to be folded to this slot, and its member is to be asked for its bytes, which fill the slot.
    Donor(PoolSlot),
    /// The member was asked to fold it to this target, and has not answered yet.
    Sent(Target),
    /// It was sent, and the member released the slot before it answered.
    Early(PoolSlot),
    /// It maps this slot.
    Mapped(PoolSlot),
    /// It lies in a mapping of a template, and shows the template's page at its place, this slot (`home.rs`).
    Home(PoolSlot),
}

impl State {
    /// The slot that the page has or is to have.
    pub const fn slot(self) -> Option<PoolSlot> {
        match self {
            Self::Idle | Self::Wanted(Target::Zero) | Self::Sent(Target::Zero) => None,
            Self::Wanted(Target::Slot(slot)) | Self::Sent(Target::Slot(slot)) => Some(slot),
            Self::Donor(slot) | Self::Early(slot) | Self::Mapped(slot) | Self::Home(slot) => Some(slot),
        }
    }

    /// Whether the page waits for this slot to be filled.
    pub fn wants(self, slot: PoolSlot) -> bool {
        matches!(self, Self::Wanted(Target::Slot(of)) | Self::Donor(of) if of == slot)
    }
}

/// A kind of request that the pages of a chunk may need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Queue {
    /// Requests to fold pages.
    Folds,
    /// Requests to show the contents of pages.
    Donations,
}

const MARKS: usize = Mark::Away as usize + 1;

/// 64 neighbouring pages of a member.
#[derive(Debug)]
pub struct Chunk {
    /// The member whose pages they are.
    pub member: MemberId,
    /// Number of the chunk in the address space: address of its first page, divided by the size of 64 pages.
    pub number: u64,
    /// Fingerprints; 0: unknown.
    pub fingerprints: [u64; CHUNK_PAGES as usize],
    /// The slot of each page that is wanted, sent or mapped; 0 for other pages.
    slots: [u32; CHUNK_PAGES as usize],
    marks: [u64; MARKS],
    queued: [bool; 2],
}

impl Chunk {
    const fn new(member: MemberId, number: u64) -> Self {
        Self { member, number, fingerprints: [0; 64], slots: [0; 64], marks: [0; MARKS], queued: [false; 2] }
    }

    /// The pages of the chunk that have this mark, one bit for each.
    pub const fn all(&self, mark: Mark) -> u64 {
        self.marks[mark as usize]
    }

    /// Address of the page at this place in the chunk.
    pub const fn address(&self, place: usize) -> HostVirt {
        HostVirt(((self.number << CHUNK_SHIFT) + place as u64) << page::PAGE_SHIFT)
    }
}

/// All chunks of all members.
#[derive(Debug, Default)]
pub struct Table {
    /// The chunks in slabs, so that no chunk moves when the table grows.
    slabs: Vec<Vec<Chunk>>,
    chunks: u32,
    free: Vec<u32>,
}

impl Table {
    /// Adds a chunk in which nothing is known; `None` when there are [`MOST_CHUNKS`].
    pub fn add(&mut self, member: MemberId, number: u64) -> Option<u32> {
        let chunk = Chunk::new(member, number);
        if let Some(free) = self.free.pop() {
            *self.chunk_mut(free) = chunk;
            return Some(free);
        }
        if self.chunks >= MOST_CHUNKS {
            return None;
        }
        if self.chunks.is_multiple_of(1 << SLAB_SHIFT) {
            self.slabs.push(Vec::with_capacity(1 << SLAB_SHIFT));
        }
        self.slabs.last_mut()?.push(chunk);
        self.chunks += 1;
        Some(self.chunks - 1)
    }

    /// Empties a chunk, and frees its number for another chunk. No page of it may be in the index.
    pub fn remove(&mut self, chunk: u32) {
        debug_assert_eq!(self.chunk(chunk).all(Mark::Indexed), 0);
        // Some list may still have the number of a page of this chunk, and must not find old fingerprints by it.
        *self.chunk_mut(chunk) = Chunk::new(MemberId(u32::MAX), 0);
        self.free.push(chunk);
    }

    /// A chunk.
    pub fn chunk(&self, chunk: u32) -> &Chunk {
        &self.slabs[(chunk >> SLAB_SHIFT) as usize][(chunk & ((1 << SLAB_SHIFT) - 1)) as usize]
    }

    fn chunk_mut(&mut self, chunk: u32) -> &mut Chunk {
        &mut self.slabs[(chunk >> SLAB_SHIFT) as usize][(chunk & ((1 << SLAB_SHIFT) - 1)) as usize]
    }

    /// The member whose page it is.
    pub fn member(&self, page: PageRef) -> MemberId {
        self.chunk(page.chunk()).member
    }

    /// The [`Chunk::number`] of its chunk.
    pub fn chunk_number(&self, page: PageRef) -> u64 {
        self.chunk(page.chunk()).number
    }

    /// Its fingerprint; 0: unknown.
    pub fn fingerprint(&self, page: PageRef) -> u64 {
        self.chunk(page.chunk()).fingerprints[page.place()]
    }

    /// Sets its fingerprint.
    pub fn set_fingerprint(&mut self, page: PageRef, fingerprint: u64) {
        self.chunk_mut(page.chunk()).fingerprints[page.place()] = fingerprint;
    }

    /// Its address.
    pub fn address(&self, page: PageRef) -> HostVirt {
        self.chunk(page.chunk()).address(page.place())
    }

    /// A page's state. A page that shows its template's page (`home.rs`) is [`State::Idle`] here.
    pub fn state(&self, page: PageRef) -> State {
        let chunk = self.chunk(page.chunk());
        let is = |mark: Mark| chunk.marks[mark as usize] & page.bit() != 0;
        let slot = PoolSlot::from_bits(chunk.slots[page.place()]);
        let target = || if is(Mark::Zero) { Target::Zero } else { Target::Slot(slot) };
        if is(Mark::Mapped) {
            State::Mapped(slot)
        } else if is(Mark::Sent) {
            if is(Mark::Early) { State::Early(slot) } else { State::Sent(target()) }
        } else if is(Mark::Wanted) {
            if is(Mark::Donor) { State::Donor(slot) } else { State::Wanted(target()) }
        } else {
            State::Idle
        }
    }

    /// Sets its state. Only [`Planner::transition`](crate::plan::Planner::transition) may call this.
    pub fn set_state(&mut self, page: PageRef, state: State) {
        let marks: &[Mark] = match state {
            State::Idle | State::Home(_) => &[],
            State::Wanted(Target::Slot(_)) => &[Mark::Wanted],
            State::Wanted(Target::Zero) => &[Mark::Wanted, Mark::Zero],
            State::Donor(_) => &[Mark::Wanted, Mark::Donor],
            State::Sent(Target::Slot(_)) => &[Mark::Sent],
            State::Sent(Target::Zero) => &[Mark::Sent, Mark::Zero],
            State::Early(_) => &[Mark::Sent, Mark::Early],
            State::Mapped(_) => &[Mark::Mapped],
        };
        for mark in [Mark::Wanted, Mark::Zero, Mark::Donor, Mark::Sent, Mark::Early, Mark::Mapped] {
            if marks.contains(&mark) {
                self.mark(page, mark);
            } else {
                self.clear(page, mark);
            }
        }
        self.chunk_mut(page.chunk()).slots[page.place()] = state.slot().map_or(0, PoolSlot::bits);
    }

    /// Whether it has this mark.
    pub fn is(&self, page: PageRef, mark: Mark) -> bool {
        self.chunk(page.chunk()).marks[mark as usize] & page.bit() != 0
    }

    /// Whether it has any of these marks.
    pub fn is_any(&self, page: PageRef, marks: &[Mark]) -> bool {
        let chunk = self.chunk(page.chunk());
        marks.iter().any(|mark| chunk.marks[*mark as usize] & page.bit() != 0)
    }

    /// Sets a mark of it.
    pub fn mark(&mut self, page: PageRef, mark: Mark) {
        self.chunk_mut(page.chunk()).marks[mark as usize] |= page.bit();
    }

    /// Clears a mark of it; returns whether it was set.
    pub fn clear(&mut self, page: PageRef, mark: Mark) -> bool {
        let marks = &mut self.chunk_mut(page.chunk()).marks[mark as usize];
        let was = *marks & page.bit() != 0;
        *marks &= !page.bit();
        was
    }

    /// Notes that a page's chunk needs requests of this kind; returns whether that was not noted before.
    pub fn queue(&mut self, page: PageRef, queue: Queue) -> bool {
        !std::mem::replace(&mut self.chunk_mut(page.chunk()).queued[queue as usize], true)
    }

    /// Notes that a chunk needs no requests of this kind.
    pub fn unqueue(&mut self, chunk: u32, queue: Queue) {
        self.chunk_mut(chunk).queued[queue as usize] = false;
    }

    /// Chunks in use.
    pub const fn len(&self) -> usize {
        self.chunks as usize - self.free.len()
    }

    /// Bytes of memory that it takes.
    pub const fn bytes(&self) -> u64 {
        ((self.slabs.len() * size_of::<Chunk>()) << SLAB_SHIFT) as u64 + self.free.capacity() as u64 * 4
    }
}

/// The places of all bits that are set.
pub fn places(mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let place = bits.trailing_zeros();
        bits &= bits.wrapping_sub(1);
        (place < u64::BITS).then_some(place as usize)
    })
}
