//! The use of each frame of a guest, from the kernel's descriptions of the frames (`struct page`).
//!
//! The descriptions are read section by section, usually 64 bytes for each frame. The first rule that applies decides:
//!
//! ```text
//!   tail of a compound page     the use of its head
//!   type: buddy                 free, and so are the next 2^order - 1
//!   type: offline               balloon
//!   type: table, slab           page tables, slab (a flag before Linux 6.10)
//!   flag: reserved              kernel's text, rodata, data by the rights of its image's mapping; else reserved
//!   mapping: anonymous bit      anonymous
//!   mapping: an address_space   shmem if backed by swap; else page cache
//!   no references               free if it hangs in a list of free frames, else the tail of a kernel's allocation
//!   anything else               kernel's: stack, text, rodata by where it is mapped a second time; else data
//! ```
//!
//! The guest runs on meanwhile, and may be hostile, so the guest's pointers are followed by bounded reads only. The
//! sources of each rule are in `docs/insight.md`.

use crate::files::FileTable;
use crate::kernel::{FrameIndex, Kernel, kind_by_rights};
use crate::layout::{FrameType, PageLayout};
use crate::memory::PhysRange;
use page::{FrameUse, GuestPageKind, Lru, PAGE_SHIFT};
use std::collections::HashMap;

/// Most descriptions (`struct page`) that are read at a time: 2^15, those of a section of 128 MiB.
const MOST_AT_ONCE: u64 = 1 << 15;
/// Most heads of compound pages that are remembered for tails in a later section.
const MOST_LATE_HEADS: usize = 1024;
/// Most control groups whose youngest generation is looked up. For further ones, frames count as active.
const MOST_GROUPS: usize = 1 << 16;

/// Number of a file in [`Frames::files`], counted from 1; 0 stands for no file.
pub type FileNumber = u32;

/// The use of each frame, in the order of [`Frames::index`].
pub struct Frames {
    /// The index of each frame in the lists below.
    pub index: FrameIndex,
    /// Kind and place in the order of reclaim.
    pub uses: Vec<FrameUse>,
    /// The file of frames of page cache and shmem.
    pub file_of: Vec<FileNumber>,
    /// The `address_space` of each file; file number 1 comes first.
    pub files: Vec<u64>,
}

impl Frames {
    /// All frames of this memory, with unknown use.
    pub fn unknown(ranges: &[PhysRange]) -> Self {
        let index = FrameIndex::new(ranges);
        Self { uses: vec![FrameUse::UNKNOWN; index.count()], file_of: Vec::new(), files: Vec::new(), index }
    }

    /// Number of the file whose page is in the frame at this place; 0 for none.
    pub fn file(&self, place: usize) -> FileNumber {
        self.file_of.get(place).copied().unwrap_or(0)
    }
}

/// For each frame, the kind that is suggested by a mapping of the frame outside of the direct map: the kind's number
/// plus one, or 0 if there is no such mapping.
type Hints = Vec<u8>;

impl Kernel<'_> {
    /// Finds the use of every frame.
    pub fn classify(&self) -> Frames {
        let mut frames = Frames::unknown(self.memory.ranges());
        frames.file_of = vec![0; frames.uses.len()];
        let hints = self.hints(&frames.index);
        let mut judge = Judge {
            kernel: self,
            layout: &self.layout,
            hints: &hints,
            files: FileTable::new(self),
            youngest: HashMap::new(),
            late_heads: HashMap::new(),
        };
        let runs: Vec<_> = frames.index.runs().collect();
        let mut bytes = Vec::new();
        for (first, count) in runs {
            let mut frame = first;
            while frame < first + count {
                let (pages, known) = match self.pages_of(frame) {
                    Some((pages, until)) => (Some(pages), until.min(MOST_AT_ONCE)),
                    None => (None, 1),
                };
                let some = known.min(first + count - frame);
                if let Some(pages) = pages {
                    bytes.resize(some as usize * self.layout.bytes, 0);
                    self.read_pages(pages, &mut bytes);
                    judge.section(&Section { first: frame, address: pages, bytes: &bytes }, &mut frames);
                }
                frame += some;
            }
        }
        frames.files = judge.files.finish();
        frames
    }

    /// Reads descriptions. Those on a page that cannot be read are filled with ones, which reads as a poisoned
    /// description.
    fn read_pages(&self, address: u64, bytes: &mut [u8]) {
        if self.tables.read(address, bytes) {
            return;
        }
        let mut at = address;
        let mut rest = bytes;
        while !rest.is_empty() {
            let some = rest.len().min(4096 - at as usize % 4096);
            let (piece, behind) = rest.split_at_mut(some);
            if !self.tables.read(at, piece) {
                piece.fill(0xff);
            }
            at = at.wrapping_add(some as u64);
            rest = behind;
        }
    }

    /// Hints from the kernel's mappings outside the direct map: its image, vmalloc and modules, and stacks of threads.
    fn hints(&self, index: &FrameIndex) -> Hints {
        let mut hints = vec![0; index.count()];
        let mut mark = |first: u64, bytes: u64, kind: GuestPageKind| {
            // A hostile guest may claim more, but no mapping is larger than the guest's memory.
            for frame in (first >> PAGE_SHIFT..).take((bytes >> PAGE_SHIFT).min(index.count() as u64) as usize) {
                if let Some(place) = index.of(frame) {
                    hints[place] = kind as u8 + 1;
                }
            }
        };
        for leaf in self.vmalloc() {
            mark(leaf.phys.0, leaf.bytes, kind_by_rights(&leaf));
        }
        for part in &self.image {
            mark(part.phys.0, part.bytes, part.kind);
        }
        for stack in self.stacks() {
            mark(stack.0, 1 << PAGE_SHIFT, GuestPageKind::KernelStack);
        }
        hints
    }
}

/// Consecutive descriptions.
struct Section<'a> {
    /// The first frame that is described.
    first: u64,
    /// The kernel's address of the first description.
    address: u64,
    bytes: &'a [u8],
}

impl Section<'_> {
    fn word(&self, layout: &PageLayout, n: usize, at: usize) -> u64 {
        let at = n * layout.bytes + at;
        self.bytes.get(at..at + 8).map_or(u64::MAX, |word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
    }

    fn half(&self, layout: &PageLayout, n: usize, at: usize) -> u32 {
        let at = n * layout.bytes + at;
        self.bytes.get(at..at + 4).map_or(u32::MAX, |word| u32::from_le_bytes(word.try_into().unwrap_or_default()))
    }
}

/// The use of a frame, and its file.
type Verdict = (FrameUse, FileNumber);

struct Judge<'k, 'm> {
    kernel: &'k Kernel<'m>,
    layout: &'k PageLayout,
    hints: &'k Hints,
    files: FileTable<'k, 'm>,
    /// The youngest generation of each control group.
    youngest: HashMap<u64, Option<u64>>,
    /// Heads of compound pages whose tails may be in a later section.
    late_heads: HashMap<u64, Verdict>,
}

impl Judge<'_, '_> {
    fn section(&mut self, section: &Section<'_>, frames: &mut Frames) {
        let count = section.bytes.len() / self.layout.bytes;
        let Some(place) = frames.index.of(section.first) else { return };
        let mut n = 0;
        while n < count {
            let (verdict, span) = self.frame(section, frames, place, n);
            let span = span.min(count - n).max(1);
            frames.uses[place + n..place + n + span].fill(verdict.0);
            frames.file_of[place + n..place + n + span].fill(verdict.1);
            n += span;
        }
    }

    /// The use of frame `n` of a section, and the number of frames from there on that share it.
    fn frame(&mut self, section: &Section<'_>, frames: &Frames, place: usize, n: usize) -> (Verdict, usize) {
        let layout = self.layout;
        let kind = |kind| ((FrameUse::new(kind, Lru::None), 0), 1);
        let flags = section.word(layout, n, layout.flags_at);
        if flags == u64::MAX {
            // Poisoned or not read: the kernel has not described this frame.
            return kind(GuestPageKind::Unknown);
        }
        let head = section.word(layout, n, layout.head_at);
        if head & 1 == 1 {
            return (self.tail(section, frames, place, n, head), 1);
        }
        let reserved = flags & layout.flags.reserved != 0;
        match layout.types.of(section.half(layout, n, layout.mapcount_at)) {
            FrameType::Buddy if !reserved => {
                let order = section.word(layout, n, layout.private_at);
                let span = if order < layout.orders { 1 << order } else { 1 };
                return ((kind(GuestPageKind::Free).0), span);
            }
            FrameType::Offline => return kind(GuestPageKind::Balloon),
            FrameType::Table => return kind(GuestPageKind::PageTables),
            FrameType::Slab => return kind(GuestPageKind::Slab),
            _ if flags & layout.flags.slab != 0 => return kind(GuestPageKind::Slab),
            _ => {}
        }
        let hint = self.hint(place + n);
        if reserved {
            return kind(hint.unwrap_or(GuestPageKind::Reserved));
        }
        let verdict = match section.half(layout, n, layout.refcount_at) {
            0 if self.is_listed(section, n) => kind(GuestPageKind::Free).0,
            0 => kind(hint.unwrap_or(GuestPageKind::KernelData)).0,
            _ => self.in_use(section, n, flags).unwrap_or(kind(hint.unwrap_or(GuestPageKind::KernelData)).0),
        };
        if flags & layout.flags.head != 0 && self.late_heads.len() < MOST_LATE_HEADS {
            self.late_heads.insert(section.first + n as u64, verdict);
        }
        (verdict, 1)
    }

    fn hint(&self, place: usize) -> Option<GuestPageKind> {
        let number = self.hints.get(place)?.checked_sub(1)?;
        GuestPageKind::ALL.get(usize::from(number)).copied()
    }

    /// The use of a compound page's tail, which is the same as its head's. The tail has the address of the head's
    /// description. Since Linux 7.0 it may have a mask instead, which gives that address when applied to the address of
    /// its own description.
    fn tail(&self, section: &Section<'_>, frames: &Frames, place: usize, n: usize, head: u64) -> Verdict {
        let bytes = self.layout.bytes as u64;
        let own = section.address.wrapping_add(n as u64 * bytes);
        let pointed = own.wrapping_sub(head - 1);
        // In a mask, all upper bits are set and some lower bits are not.
        let masked = own.wrapping_sub(own & (head - 1));
        let is_mask = (head - 1).leading_ones() + (head - 1).trailing_zeros() == u64::BITS;
        let back = if is_mask { masked } else { pointed };
        let unknown = (FrameUse::new(GuestPageKind::KernelData, Lru::None), 0);
        if back == 0 || !back.is_multiple_of(bytes) {
            return unknown;
        }
        let back = back / bytes;
        if let Some(head) = (n as u64).checked_sub(back) {
            let place = place + head as usize;
            return (frames.uses[place], frames.file_of[place]);
        }
        let head = (section.first + n as u64).checked_sub(back);
        head.and_then(|head| self.late_heads.get(&head)).copied().unwrap_or(unknown)
    }

    /// Whether a frame without references is in a linked list. Free frames that a processor keeps for its next
    /// allocations are in one. Tails of the kernel's allocations of several frames are not.
    fn is_listed(&self, section: &Section<'_>, n: usize) -> bool {
        let layout = self.layout;
        let own = section.address.wrapping_add((n * layout.bytes + layout.lru_at) as u64);
        let (next, before) = (section.word(layout, n, layout.lru_at), section.word(layout, n, layout.lru_at + 8));
        if next == own || next < self.kernel.tables.kernel_half() || before < self.kernel.tables.kernel_half() {
            return false;
        }
        let inside = next.wrapping_sub(section.address) as usize;
        if next >= section.address && inside + 16 <= section.bytes.len() {
            let at = inside + 8;
            return section.bytes[at..at + 8] == own.to_le_bytes();
        }
        self.kernel.tables.u64(next.wrapping_add(8)) == Some(own)
    }

    /// The use of a frame that belongs to processes or the page cache; `None` if it belongs to the kernel.
    fn in_use(&mut self, section: &Section<'_>, n: usize, flags: u64) -> Option<Verdict> {
        const ANONYMOUS: u64 = 1;
        const MOVABLE: u64 = 2;
        let layout = self.layout;
        let mapping = section.word(layout, n, layout.mapping_at);
        let (kind, file) = match mapping & (ANONYMOUS | MOVABLE) {
            _ if mapping < self.kernel.tables.kernel_half() => return None,
            MOVABLE => return None,
            0 => {
                let file = self.files.number(mapping)?;
                let shmem = flags & layout.flags.swapbacked != 0;
                (if shmem { GuestPageKind::Shmem } else { GuestPageKind::PageCache }, file)
            }
            _ => (GuestPageKind::Anonymous, 0),
        };
        let memcg = layout.memcg_at.map_or(0, |at| section.word(layout, n, at));
        Some((FrameUse::new(kind, self.lru(flags, memcg)), file))
    }

    fn lru(&mut self, flags: u64, memcg: u64) -> Lru {
        let bits = &self.layout.flags;
        if flags & bits.lru == 0 {
            return Lru::None;
        }
        if flags & bits.unevictable != 0 {
            return Lru::Unevictable;
        }
        let generation = self.layout.generations.and_then(|generations| generations.of(flags));
        let active = match generation {
            Some(generation) => self.is_young(generation, memcg),
            None => flags & bits.active != 0,
        };
        match () {
            () if active => Lru::Active,
            () if flags & bits.referenced != 0 => Lru::InactiveReferenced,
            () => Lru::Inactive,
        }
    }

    /// Whether a generation is one of the two youngest of a control group: `lru_gen_is_active` of the kernel.
    fn is_young(&mut self, generation: u64, memcg: u64) -> bool {
        use crate::layout::Generations;
        if self.youngest.len() >= MOST_GROUPS {
            return true;
        }
        let kernel = self.kernel;
        let youngest = *self.youngest.entry(memcg).or_insert_with(|| kernel.youngest_generation(memcg));
        // If the youngest generation is not known, the frame counts as active.
        youngest.is_none_or(|youngest| {
            let young = |back: u64| youngest.wrapping_sub(back) % Generations::COUNT == generation;
            young(0) || young(1)
        })
    }
}

/// Number of frames of each kind.
pub fn count(uses: &[FrameUse]) -> [u64; GuestPageKind::ALL.len()] {
    let mut counts = [0; GuestPageKind::ALL.len()];
    for frame in uses {
        counts[frame.kind() as usize] += 1;
    }
    counts
}
