//! Finding the kernel in a guest's memory, by the VMCOREINFO note that Linux keeps there (`note.rs`). Each value in a
//! note is checked before it is used.
//!
//! ```text
//!   beginnings of frames --> note --> page table (swapper_pg_dir, phys_base) --> uts release equals the note's?
//!                                          |                                         | no: next note
//!                                          v                                         v
//!                     image: text, rodata, data by rights     sections: where each frame's struct page is
//!                                          |                                         |
//!                          rodata: BTF --> layout of struct page, inode, task        v
//!                                                   +-------------------------> frames.rs
//! ```
//!
//! A guest's memory may hold other notes than its kernel's. A VM inside the guest has one, a kernel that ran before
//! may have left one, and a process may have made one up. The addresses in such a note lead nowhere in this guest's
//! memory, or to something else.

use crate::btf::{self, Btf};
use crate::layout::PageLayout;
use crate::memory::{GuestMemory, PhysRange};
use crate::note::Note;
use crate::paging::{Leaf, PageTables};
use page::{GuestPageKind, GuestPhys, PAGE_BYTES};

/// Address of the kernel's image before randomisation.
const IMAGE: u64 = 0xffff_ffff_8000_0000;
/// Largest size of the image in bytes, used if the note does not give its size: 1 GiB.
const IMAGE_BYTES: u64 = 1 << 30;
/// Most frames that look like a note and are tried.
const MOST_NOTES: u32 = 64;
/// Most page tables read for the image; a gigabyte in small pages has 514.
const IMAGE_TABLES: u64 = 1024;
/// Bytes of the image that are searched at a time, without the overlap.
const PIECE_BYTES: u64 = 1 << 20;
/// The kernel puts its direct map at a random multiple of this address: 1 GiB.
const DIRECT_ALIGNMENT: u64 = 1 << 30;

/// Why no kernel was found in a guest's memory, so that nothing is known of its frames.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoKernel {
    /// There is no note.
    #[error("no VMCOREINFO note in its memory: not Linux, not booted yet, or built without crash dumps")]
    NoNote,
    /// There are notes, but none leads to a kernel.
    #[error("the VMCOREINFO note of {release} does not lead to a kernel: {problem}")]
    Misleading {
        /// The kernel release in the VMCOREINFO note that was tried last.
        release: String,
        /// The check that this note failed.
        problem: &'static str,
    },
}

/// A piece of the kernel's image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImagePart {
    /// Its first address in the kernel.
    pub address: u64,
    /// Its first guest-physical address.
    pub phys: GuestPhys,
    /// Its size.
    pub bytes: u64,
    /// Text, read-only data, or data.
    pub kind: GuestPageKind,
}

/// A kernel that was found.
pub struct Kernel<'m> {
    pub(crate) memory: &'m dyn GuestMemory,
    pub(crate) note: Note,
    pub(crate) tables: PageTables<'m>,
    pub(crate) image: Vec<ImagePart>,
    pub(crate) btf: Option<Btf>,
    pub(crate) layout: PageLayout,
    sections: Sections,
}

/// What a mapping of the kernel holds, by its access rights: text is executable, read-only data is not writable.
pub(crate) const fn kind_by_rights(leaf: &Leaf) -> GuestPageKind {
    match leaf {
        Leaf { executable: true, .. } => GuestPageKind::KernelText,
        Leaf { writable: false, .. } => GuestPageKind::KernelRodata,
        _ => GuestPageKind::KernelData,
    }
}

impl<'m> Kernel<'m> {
    /// Looks for the kernel of a guest.
    ///
    /// # Errors
    /// No kernel was found that can be read.
    pub fn find(memory: &'m dyn GuestMemory) -> Result<Self, NoKernel> {
        let (mut found, mut failed, mut tried) = (None, NoKernel::NoNote, 0);
        memory.heads(&mut |at, head| {
            if !Note::may_begin(head) {
                return true;
            }
            tried += 1;
            let mut frame = vec![0; PAGE_BYTES];
            if !memory.read(at, &mut frame) {
                return true;
            }
            let Some(note) = Note::parse(&frame) else { return true };
            let release = note.release.clone();
            match Self::follow(memory, note) {
                Ok(kernel) => found = Some(kernel),
                Err(problem) => failed = NoKernel::Misleading { release, problem },
            }
            found.is_none() && tried < MOST_NOTES
        });
        found.ok_or(failed)
    }

    fn follow(memory: &'m dyn GuestMemory, note: Note) -> Result<Self, &'static str> {
        let root = note.symbol("swapper_pg_dir").ok_or("it does not name the page table")?;
        let phys_base = note.number("phys_base").ok_or("it does not say where the kernel lies")?;
        let root_at = GuestPhys(root.wrapping_sub(IMAGE).wrapping_add(phys_base as u64));
        if !root_at.0.is_multiple_of(PAGE_BYTES as u64) {
            return Err("its page table begins in the middle of a frame");
        }
        let tables = PageTables::new(memory, root_at, note.number("pgtable_l5_enabled") == Some(1));
        if tables.translate(root) != Some(root_at) {
            return Err("the page table that it names does not map itself");
        }
        check_release(&tables, &note)?;
        let image = image(&tables, &note);
        let btf = find_btf(memory, &image, &note);
        let layout = PageLayout::new(&note, btf.as_ref()).ok_or("it does not describe struct page")?;
        let sections = Sections::new(&note).ok_or("it does not say where struct page is")?;
        let kernel = Self { memory, note, tables, image, btf, layout, sections };
        kernel.find_direct_map();
        if kernel.pages_of(root_at.frame()).is_none() {
            return Err("it does not lead to the frames' descriptions");
        }
        Ok(kernel)
    }

    /// The kernel's release, as `uname -r` prints it inside the guest.
    pub fn release(&self) -> &str {
        &self.note.release
    }

    /// Distance by which address randomisation moved the kernel; `None` if its note does not give it.
    pub fn kaslr_offset(&self) -> Option<u64> {
        self.note.kaslr_offset()
    }

    /// Levels of its page table: 4 or 5.
    pub const fn paging_levels(&self) -> u32 {
        self.tables.levels()
    }

    /// Whether the kernel has BTF, without which neither paths nor stacks are found.
    pub const fn has_types(&self) -> bool {
        self.btf.is_some()
    }

    /// The first address behind the guest's memory.
    pub(crate) fn end(&self) -> GuestPhys {
        self.memory.ranges().last().map_or(GuestPhys(0), |range| range.end())
    }

    /// The address of the `struct page` of a frame, and the number of descriptions from there on without a break.
    /// `None` if the frame has no description.
    pub(crate) fn pages_of(&self, frame: u64) -> Option<(u64, u64)> {
        self.sections.pages_of(&self.tables, frame, self.layout.bytes as u64)
    }

    /// Looks for the direct map, which is the first mapping in the kernel's half. If it is found, addresses in it are
    /// translated without a walk.
    fn find_direct_map(&self) {
        let mut first = None;
        self.tables.walk(0, u64::MAX, IMAGE_TABLES, &mut |leaf| {
            first = Some(leaf);
            false
        });
        let Some(base) = first.and_then(|leaf| leaf.address.checked_sub(leaf.phys.0)) else { return };
        let (root, bytes) = (GuestPhys(self.root()), self.end().0);
        let fits = base.is_multiple_of(DIRECT_ALIGNMENT) && base.checked_add(bytes).is_some_and(|end| end < IMAGE);
        if fits && self.tables.translate(base + root.0) == Some(root) {
            self.tables.set_direct_map(base, bytes);
        }
    }

    fn root(&self) -> u64 {
        self.note.symbol("swapper_pg_dir").and_then(|root| self.tables.translate(root)).map_or(0, |at| at.0)
    }
}

/// Checks that the kernel at the note's addresses has the release that the note gives.
fn check_release(tables: &PageTables<'_>, note: &Note) -> Result<(), &'static str> {
    const FIELD: usize = 65;
    let namespace = note.symbol("init_uts_ns").ok_or("it does not name init_uts_ns")?;
    // Before Linux 5.11 the note does not give this offset. The name was then behind a reference count of 4 bytes.
    let at = namespace.wrapping_add(note.offset("uts_namespace.name").unwrap_or(4));
    let mut names = [0; 3 * FIELD];
    if !tables.read(at, &mut names) {
        return Err("its page table does not map the kernel's name");
    }
    let field = |n: usize| names[n * FIELD..][..FIELD].split(|byte| *byte == 0).next().unwrap_or_default();
    if field(0) != b"Linux" || field(2) != note.release.as_bytes() {
        return Err("the kernel that it leads to has another name");
    }
    Ok(())
}

/// The pieces of the kernel's image. Neighbouring mappings with the same rights are one piece.
fn image(tables: &PageTables<'_>, note: &Note) -> Vec<ImagePart> {
    let bytes = note.number("KERNEL_IMAGE_SIZE").and_then(|n| u64::try_from(n).ok()).filter(|n| *n <= IMAGE_BYTES);
    let mut parts: Vec<ImagePart> = Vec::new();
    let last = IMAGE + bytes.unwrap_or(IMAGE_BYTES) - 1;
    tables.walk(IMAGE, last, IMAGE_TABLES, &mut |leaf| {
        let kind = kind_by_rights(&leaf);
        match parts.last_mut() {
            Some(part)
                if part.kind == kind
                    && part.address + part.bytes == leaf.address
                    && part.phys.0 + part.bytes == leaf.phys.0 =>
            {
                part.bytes += leaf.bytes;
            }
            _ => parts.push(ImagePart { address: leaf.address, phys: leaf.phys, bytes: leaf.bytes, kind }),
        }
        true
    });
    parts
}

/// Searches the parts of the image of one kind, in pieces that overlap by `overlap` bytes. Calls `each` with the
/// address and the bytes of a piece, until it returns a result.
pub(crate) fn search<T>(
    memory: &dyn GuestMemory,
    image: &[ImagePart],
    kind: GuestPageKind,
    overlap: u64,
    mut each: impl FnMut(u64, &[u8]) -> Option<T>,
) -> Option<T> {
    let mut piece = Vec::new();
    // A hostile guest may map one frame many times, so the total is bounded.
    let mut left = IMAGE_BYTES;
    for part in image.iter().filter(|part| part.kind == kind) {
        let mut offset = 0;
        while offset < part.bytes {
            let bytes = (part.bytes - offset).min(PIECE_BYTES + overlap);
            left = left.checked_sub(bytes)?;
            piece.resize(bytes as usize, 0);
            if memory.read(GuestPhys(part.phys.0.wrapping_add(offset)), &mut piece)
                && let Some(found) = each(part.address + offset, &piece)
            {
                return Some(found);
            }
            offset += PIECE_BYTES;
        }
    }
    None
}

/// Most sections of BTF that are read whole before the search is given up.
const MOST_SECTIONS: u32 = 8;

fn find_btf(memory: &dyn GuestMemory, image: &[ImagePart], note: &Note) -> Option<Btf> {
    let mut tried = 0;
    search(memory, image, GuestPageKind::KernelRodata, btf::Header::BYTES as u64, |address, piece| {
        let words = piece.as_chunks::<4>().0.iter().enumerate();
        let begins = words.filter(|(_, word)| **word == btf::BEGINNING).map(|(n, _)| n * 4);
        for at in begins {
            let Some(bytes) = btf::Header::parse(&piece[at..]).and_then(|header| header.whole()) else { continue };
            tried += 1;
            if tried > MOST_SECTIONS {
                return None;
            }
            let address = address + at as u64;
            let part = image.iter().find(|p| p.address <= address && address < p.address + p.bytes)?;
            let mut section = vec![0; bytes];
            let from = GuestPhys(part.phys.0.wrapping_add(address - part.address));
            let btf = memory.read(from, &mut section).then(|| Btf::parse(&section)).flatten();
            if let Some(btf) = btf.filter(|btf| btf.size("page").is_some() && btf.size("page") == note.size("page")) {
                return Some(btf);
            }
        }
        None
    })
}

/// Where the `struct page` of each frame is, section by section (`CONFIG_SPARSEMEM`, which every distribution uses).
struct Sections {
    /// The kernel's address of `mem_section`, an array of pointers to arrays of sections.
    roots: u64,
    root_count: u64,
    section_bytes: u64,
    map_at: u64,
    frames_bits: u32,
}

impl Sections {
    fn new(note: &Note) -> Option<Self> {
        let bits = note.number("SECTION_SIZE_BITS").and_then(|n| u32::try_from(n).ok())?;
        let section_bytes = note.size("mem_section").filter(|n| (8..=256).contains(n))?;
        Some(Self {
            roots: note.symbol("mem_section")?,
            root_count: note.length("mem_section").filter(|n| *n <= 1 << 20)?,
            section_bytes,
            map_at: note.offset("mem_section.section_mem_map").filter(|at| at + 8 <= section_bytes)?,
            frames_bits: bits.checked_sub(12).filter(|bits| (9..=24).contains(bits))?,
        })
    }

    fn pages_of(&self, tables: &PageTables<'_>, frame: u64, page_bytes: u64) -> Option<(u64, u64)> {
        const HAS_MAP: u64 = 2;
        let number = frame >> self.frames_bits;
        let in_root = PAGE_BYTES as u64 / self.section_bytes;
        let root = number / in_root;
        if root >= self.root_count {
            return None;
        }
        let sections = tables.u64(self.roots.wrapping_add(root * 8)).filter(|at| *at != 0)?;
        let map = tables.u64(sections.wrapping_add(number % in_root * self.section_bytes).wrapping_add(self.map_at))?;
        if map & HAS_MAP == 0 {
            return None;
        }
        // The kernel stores the address minus the descriptions of all frames before the section, so the frame's
        // number is the index. The low bits hold flags.
        let pages = (map & !(PAGE_BYTES as u64 - 1)).wrapping_add(frame.wrapping_mul(page_bytes));
        Some((pages, ((number + 1) << self.frames_bits) - frame))
    }
}

/// The frames of a guest's memory in ascending order, as one sequence without gaps. A frame's place in this sequence is
/// its index in all lists that have an entry for each frame.
#[derive(Clone, Debug, Default)]
pub struct FrameIndex {
    /// For each run of frames: the first frame's number, how many frames it has, and the place of the first.
    runs: Vec<(u64, u64, usize)>,
    count: usize,
}

impl FrameIndex {
    /// The index of this memory.
    pub fn new(ranges: &[PhysRange]) -> Self {
        let mut index = Self::default();
        for range in ranges {
            index.runs.push((range.start.frame(), range.frames, index.count));
            index.count += range.frames as usize;
        }
        index
    }

    /// Number of frames.
    pub const fn count(&self) -> usize {
        self.count
    }

    /// The place of a frame; `None` if the guest's memory does not have it.
    pub fn of(&self, frame: u64) -> Option<usize> {
        let run = self.runs.partition_point(|run| run.0 <= frame).checked_sub(1)?;
        let (first, frames, place) = self.runs[run];
        (frame - first < frames).then(|| place + (frame - first) as usize)
    }

    /// The runs of frames: the first frame and the number of frames of each.
    pub fn runs(&self) -> impl Iterator<Item = (u64, u64)> {
        self.runs.iter().map(|run| (run.0, run.1))
    }
}
