//! What each frame of a guest is used for, from the kernel's descriptions of the frames (`struct page`).
//!
//! The descriptions are read section by section, 64 bytes a frame, and each is judged by the first of these that applies:
//!
//! ```text
//!   tail of a compound page     what its head is
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
//! The guest runs on meanwhile, and may be hostile: nothing here follows what it wrote further than bounded reads. The
//! sources for each rule are in `docs/insight.md`.

use crate::files::FileTable;
use crate::kernel::{FrameIndex, Kernel, kind_by_rights};
use crate::layout::{FrameType, PageLayout};
use crate::memory::PhysRange;
use page::{FrameUse, GuestPageKind, Lru, PAGE_SHIFT};
use std::collections::HashMap;

/// Descriptions read at a time: those of a section of 128 MiB.
const MOST_AT_ONCE: u64 = 1 << 15;
/// Heads of huge pages that are remembered for tails in a later section.
const MOST_LATE_HEADS: usize = 1024;
/// Control groups whose generations are looked up.
const MOST_GROUPS: usize = 1 << 16;

/// Number of a file in [`Frames::files`]; 0 is none.
pub type FileNumber = u32;

/// What was found of each frame, in the order of [`Frames::index`].
pub struct Frames {
    /// Which frame is where.
    pub index: FrameIndex,
    /// Kind and place in the order of reclaim.
    pub uses: Vec<FrameUse>,
    /// The file, of page cache and shmem.
    pub file_of: Vec<FileNumber>,
    /// The files: `address_space` of each, number 1 first.
    pub files: Vec<u64>,
}

impl Frames {
    /// All of it unknown.
    pub fn unknown(ranges: &[PhysRange]) -> Self {
        let index = FrameIndex::new(ranges);
        Self { uses: vec![FrameUse::UNKNOWN; index.count()], file_of: Vec::new(), files: Vec::new(), index }
    }

    /// Number of the file that a frame holds a page of.
    pub fn file(&self, place: usize) -> FileNumber {
        self.file_of.get(place).copied().unwrap_or(0)
    }
}

/// What a frame's mapping for the kernel says, beside the direct map: kind plus one, or 0.
type Hints = Vec<u8>;

impl Kernel<'_> {
    /// Judges every frame.
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

    /// What cannot be read is left as zeros, page by page.
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

    /// What the kernel maps a second time: its image, and what lies in vmalloc's range, of which stacks are told apart.
    fn hints(&self, index: &FrameIndex) -> Hints {
        let mut hints = vec![0; index.count()];
        let mut mark = |first: u64, bytes: u64, kind: GuestPageKind| {
            // No mapping is larger than the memory there is.
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

/// Descriptions that follow each other.
struct Section<'a> {
    /// The first frame that is described.
    first: u64,
    /// Where the kernel sees its description.
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

/// What a frame is, with its file.
type Verdict = (FrameUse, FileNumber);

struct Judge<'k, 'm> {
    kernel: &'k Kernel<'m>,
    layout: &'k PageLayout,
    hints: &'k Hints,
    files: FileTable<'k, 'm>,
    /// Of each control group: the generation that is youngest.
    youngest: HashMap<u64, Option<u64>>,
    /// Heads of compound pages that may go on behind their section.
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

    /// What frame `n` of a section is, and for how many frames that holds.
    fn frame(&mut self, section: &Section<'_>, frames: &Frames, place: usize, n: usize) -> (Verdict, usize) {
        let layout = self.layout;
        let kind = |kind| ((FrameUse::new(kind, Lru::None), 0), 1);
        let flags = section.word(layout, n, layout.flags_at);
        if flags == u64::MAX {
            // Poisoned, or not read: nobody has described this frame.
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

    /// The tail of a compound page says where its head is: by the address of its description, or (since Linux 7.0) by a mask
    /// for the address of its own.
    fn tail(&self, section: &Section<'_>, frames: &Frames, place: usize, n: usize, head: u64) -> Verdict {
        let bytes = self.layout.bytes as u64;
        let own = section.address.wrapping_add(n as u64 * bytes);
        let pointed = own.wrapping_sub(head - 1);
        // A mask has all its upper bits set and leaves some of the lower ones.
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

    /// Whether a frame without references hangs in a list, as those do that a processor keeps to itself for its next
    /// allocations. The tails of what the kernel allocated in one piece hang in none.
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

    /// A frame that belongs to processes; `None` if it does not.
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
        // Where it cannot be told, nothing is called inactive.
        youngest.is_none_or(|youngest| {
            let young = |back: u64| youngest.wrapping_sub(back) % Generations::COUNT == generation;
            young(0) || young(1)
        })
    }
}

/// How many frames of each kind there are.
pub fn count(uses: &[FrameUse]) -> [u64; GuestPageKind::ALL.len()] {
    let mut counts = [0; GuestPageKind::ALL.len()];
    for frame in uses {
        counts[frame.kind() as usize] += 1;
    }
    counts
}
