//! Reference counts of page frames, read from the kernel's `struct page`: they show whether anybody else has a
//! reference to a page.
//!
//! Each of these holds a reference of a page's frame, and counts:
//!
//! - a device that reads or writes the page (DMA),
//! - a pipe that the page was given to (`vmsplice`),
//! - a system call that is copying to or from the page,
//! - the page cache,
//! - each page table that maps it.
//!
//! So a private page that is mapped once and has a count of one is held by that one mapping and by nobody else. A page
//! of a memory file whose count is one more than its mappings is held by these mappings and by the file alone. KSM
//! decides by this number, too (`write_protect_page` in `mm/ksm.c`). Nothing else that user space can read shows
//! whether there is a plain reference.
//!
//! The count is in the frame's `struct page`, and a BPF program may copy from there:
//!
//! ```text
//!   user space                                   kernel
//!   numbers of up to 512 frames --(shared map)--> for each: bpf_probe_read_kernel(vmemmap + number x size of struct page)
//!   the head of each struct page <-(shared map)--
//! ```
//!
//! The kernel's type information ([`Btf`]) tells where the fields of `struct page` lie. The address of the array of all
//! pages (`vmemmap`) is randomised, and is found in three steps:
//!
//! 1. Pages of this process are given to a pipe (`vmsplice`). The kernel's `struct pipe_buffer` then points to the
//!    `struct page` of each.
//! 2. A first program follows the pointers from the current task to these pipe buffers, which gives the array's
//!    address.
//! 3. The address is tested: a page that is in n slots of the pipe must have a count n higher than after the pipe is
//!    closed.
//!
//! Only kernels with one array of all `struct page` are supported (`SPARSEMEM_VMEMMAP`).
//!
//! The second program stays loaded. For any question, it reads only within this array. Loading takes root
//! (`CAP_BPF` and `CAP_PERFMON`); running a loaded program takes nothing but the descriptor.
//!
//! # The meaning of an answer
//!
//! An answer is about the moment of the reading, because references come and go. [`Held::Free`] says that in that
//! moment one mapping held the frame, and nobody else did. The caller has to ensure that it was still the frame of a
//! certain page, and that no reference has been added since. The [crate's documentation](crate) says how.
//!
//! [`Held::Referenced`] is not certain. The kernel itself takes references for a moment, and a new page has one more
//! reference while it is on a processor's list (`drain.rs`).

use host::bpf::{self, Instruction, op};
use host::{Error, Pagemap, Result};
use insight::Btf;
use page::{HostVirt, PAGE_BYTES, Pfn};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use rustix::pipe::{PipeFlags, pipe_with};
use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read};
use std::ptr::{NonNull, null_mut};
use wire::prove::Kind;

/// The running kernel's type information.
const KERNEL_TYPES: &str = "/sys/kernel/btf/vmlinux";
/// Most frames that one run of the BPF program looks at.
const BATCH: usize = 512;
/// Bits of a frame's number on machines of up to 64 TiB. Larger numbers are not looked up, as the array may end there.
const FRAME_BITS: i32 = 34;
/// Number of 64-bit words that are copied from each `struct page`: all of it, unless it has debugging fields.
const HEAD_WORDS: usize = 8;
const HEAD_BYTES: usize = HEAD_WORDS * size_of::<u64>();
/// Number of slots of a new pipe.
const PIPE_SLOTS: usize = 16;
/// Most attempts to find and test the array of all pages. One may fail because the kernel takes references to our pages
/// by itself.
const ATTEMPTS: usize = 20;

/// The memory that the programs and this process share.
#[repr(C, align(4096))]
struct Shared {
    /// In: numbers of frames, 0 for none. Out: 0, or a negative error. (For the first program, out: addresses.)
    frames: [Cell<u64>; BATCH],
    /// Out: the head of each `struct page`.
    heads: [[Cell<u64>; HEAD_WORDS]; BATCH],
    /// In: the number of frames in `frames`.
    count: Cell<u64>,
    unused: [u64; PAGE_BYTES / 8 - 1],
}

const HEADS: i32 = std::mem::offset_of!(Shared, heads) as i32;
const COUNT: i32 = std::mem::offset_of!(Shared, count) as i32;
const _: () = assert!(size_of::<Shared>() == 10 * PAGE_BYTES && HEADS == 4096 && HEAD_BYTES == 64);

/// What the reference count of a frame says about its holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// A small private page that its one mapping holds, and nobody else. Or a small page of a memory file that the file
    /// and mappings hold, and nobody else.
    Free,
    /// A small page with this many references beyond those of its mappings and its file.
    Referenced(u32),
    /// Not known: part of a huge page, in the swap cache, not a page of the kind asked about, or no such frame.
    Unknown,
}

/// Sizes of kernel structures, offsets of their members in bytes, and flags, by BTF.
#[derive(Clone, Copy, Debug)]
struct Layout {
    page_bytes: i32,
    flags: usize,
    compound_head: usize,
    mapping: usize,
    mapcount: usize,
    refcount: usize,
    /// Flags in `struct page` of pages for which the answer is [`Held::Unknown`]: pages of a huge page, and pages in
    /// the swap cache.
    untold: u64,
    /// Flag of pages that are written to swap and not to a file system (`PG_swapbacked`): private pages, and pages of
    /// memory files.
    swap_backed: u64,
    /// Offsets of the pointers from the current task to its open files.
    to_files: [i32; 3],
    /// Offsets of the pointers from a file to the slots of its pipe.
    to_slots: [i32; 2],
    slot_bytes: i32,
    slot_page: i32,
}

impl Layout {
    fn of(btf: &Btf) -> Option<Self> {
        let small = |number: u64| i32::try_from(number).ok().filter(|n| *n < 1 << 20);
        let at = |structure, member| small(btf.offset(&format!("{structure}.{member}"))?);
        let in_page = |member, bytes| {
            btf.offset(&format!("page.{member}")).map(|at| at as usize).filter(|at| at + bytes <= HEAD_BYTES)
        };
        let word_in_page = |member| in_page(member, 8).filter(|at| at % 8 == 0);
        let flag = |name| btf.value("pageflags", name).filter(|bit| *bit < 32).map(|bit| 1 << bit);
        Some(Self {
            page_bytes: small(btf.size("page")?).filter(|bytes| *bytes as usize >= HEAD_BYTES)?,
            flags: word_in_page("flags")?,
            compound_head: word_in_page("compound_head")?,
            mapping: word_in_page("mapping")?,
            mapcount: in_page("_mapcount", 4)?,
            refcount: in_page("_refcount", 4)?,
            untold: flag("PG_head")? | flag("PG_swapcache")?,
            swap_backed: flag("PG_swapbacked")?,
            to_files: [at("task_struct", "files")?, at("files_struct", "fdt")?, at("fdtable", "fd")?],
            to_slots: [at("file", "private_data")?, at("pipe_inode_info", "bufs")?],
            slot_bytes: small(btf.size("pipe_buffer")?)?,
            slot_page: at("pipe_buffer", "page")?,
        })
    }

    /// The holders of a frame, by the head of its `struct page`.
    fn judge(&self, kind: Kind, head: &[u64; HEAD_WORDS]) -> Held {
        let word = |at: usize| head[at / 8];
        // The kernel counts mappings from -1 on, so that 0 is one.
        let number = |at: usize| (word(at) >> (at % 8 * 8)) as u32 as i32;
        // In a huge page, each small page but the first points to the first. The two lowest bits of `mapping` are 01
        // for a private page and 00 for a file's page. The whole word is 0 for a page without an owner.
        let tail = word(self.compound_head) & 1 == 1;
        let (flags, mapping) = (word(self.flags), word(self.mapping));
        if tail || flags & self.untold != 0 || mapping == 0 {
            return Held::Unknown;
        }
        let (references, more_mappings) = (number(self.refcount), number(self.mapcount));
        let expected = match (kind, mapping & 3) {
            (Kind::Private, 1) if more_mappings >= 0 => 1,
            // Each mapping is one reference, and the page cache another one.
            (Kind::Slot, 0) if more_mappings >= 0 && flags & self.swap_backed != 0 => more_mappings.saturating_add(2),
            _ => return Held::Unknown,
        };
        match references - expected {
            0 if kind == Kind::Private && more_mappings > 0 => Held::Unknown,
            0 => Held::Free,
            more @ 1.. => Held::Referenced(more.cast_unsigned()),
            _ => Held::Unknown,
        }
    }
}

fn kernel_types() -> Result<Btf> {
    let failed = |e| Error::file("read the types of the kernel from", KERNEL_TYPES, e);
    let mut bytes = Vec::new();
    let file = File::open(KERNEL_TYPES).map_err(failed)?;
    file.take(Btf::MOST_BYTES as u64).read_to_end(&mut bytes).map_err(failed)?;
    Btf::parse(&bytes).ok_or_else(|| failed(io::Error::other("not the form that is documented")))
}

/// The first program. It writes to `frames[n]` of the map's value the address of the `struct page` that slot `n` of a
/// pipe points to; `pipe` is the pipe's descriptor.
fn follow_program(map: i32, pipe: i32, layout: &Layout) -> Vec<Instruction> {
    let mut code = vec![
        op(0x18, 7, 2, 0, map), // r7 = the map's value (two slots)
        op(0x00, 0, 0, 0, 0),
        op(0x85, 0, 0, 0, 35), // r0 = bpf_get_current_task()
        op(0xbf, 6, 0, 0, 0),  // r6 = r0
    ];
    let entry = pipe * size_of::<u64>() as i32;
    for offset in [&layout.to_files[..], &[entry], &layout.to_slots].concat() {
        code.extend([
            op(0xbf, 1, 10, 0, 0),     // r1 = the stack
            op(0x07, 1, 0, 0, -8),     // r1 -= 8
            op(0xb7, 2, 0, 0, 8),      // r2 = 8
            op(0xbf, 3, 6, 0, 0),      // r3 = r6
            op(0x07, 3, 0, 0, offset), // r3 += offset
            op(0x85, 0, 0, 0, 113),    // bpf_probe_read_kernel(r1, r2, r3): zeros where it fails
            op(0x79, 6, 10, -8, 0),    // r6 = what is there
        ]);
    }
    for slot in 0..PIPE_SLOTS as i32 {
        code.extend([
            op(0xbf, 1, 7, 0, 0),        // r1 = r7
            op(0x07, 1, 0, 0, slot * 8), // r1 += 8 slot: frames[slot]
            op(0xb7, 2, 0, 0, 8),        // r2 = 8
            op(0xbf, 3, 6, 0, 0),        // r3 = r6
            op(0x07, 3, 0, 0, slot * layout.slot_bytes + layout.slot_page),
            op(0x85, 0, 0, 0, 113), // bpf_probe_read_kernel(r1, r2, r3)
        ]);
    }
    code.extend([op(0xb7, 0, 0, 0, 0), op(0x95, 0, 0, 0, 0)]); // return 0
    code
}

/// The second program. It copies the heads of the pages in `frames`, of an array that begins at `vmemmap`. `r9` counts
/// frames.
fn read_program(map: i32, vmemmap: u64, page_bytes: i32) -> [Instruction; 30] {
    const LOOP: i16 = 5;
    const NEXT: i16 = 25;
    const EXIT: i16 = 28;
    let halves = [vmemmap as u32, (vmemmap >> 32) as u32].map(u32::cast_signed);
    [
        op(0x18, 7, 2, 0, map),                  //  0: r7 = the map's value (two slots)
        op(0x00, 0, 0, 0, 0),                    //  1:
        op(0x18, 6, 0, 0, halves[0]),            //  2: r6 = vmemmap (two slots)
        op(0x00, 0, 0, 0, halves[1]),            //  3:
        op(0xb7, 9, 0, 0, 0),                    //  4: r9 = 0
        op(0xbf, 1, 7, 0, 0),                    //  5: r1 = r7             <- loop
        op(0x07, 1, 0, 0, COUNT),                //  6: r1 += count
        op(0x79, 1, 1, 0, 0),                    //  7: r1 = shared.count
        op(0x3d, 9, 1, EXIT - 9, 0),             //  8: if r9 >= r1 goto exit
        op(0xbf, 8, 9, 0, 0),                    //  9: r8 = r9
        op(0x67, 8, 0, 0, 3),                    // 10: r8 <<= 3
        op(0x0f, 8, 7, 0, 0),                    // 11: r8 += r7
        op(0x79, 3, 8, 0, 0),                    // 12: r3 = shared.frames[r9]
        op(0xb7, 0, 0, 0, -1),                   // 13: r0 = -1
        op(0xbf, 1, 3, 0, 0),                    // 14: r1 = r3
        op(0x77, 1, 0, 0, FRAME_BITS),           // 15: r1 >>= 34
        op(0x55, 1, 0, NEXT - 17, 0),            // 16: if r1 != 0 goto next
        op(0x27, 3, 0, 0, page_bytes),           // 17: r3 *= size of struct page
        op(0x0f, 3, 6, 0, 0),                    // 18: r3 += r6
        op(0xbf, 1, 9, 0, 0),                    // 19: r1 = r9
        op(0x67, 1, 0, 0, 6),                    // 20: r1 <<= 6
        op(0x0f, 1, 7, 0, 0),                    // 21: r1 += r7
        op(0x07, 1, 0, 0, HEADS),                // 22: r1 += heads: shared.heads[r9]
        op(0xb7, 2, 0, 0, HEAD_BYTES as i32),    // 23: r2 = 64
        op(0x85, 0, 0, 0, 113),                  // 24: r0 = bpf_probe_read_kernel(r1, r2, r3)
        op(0x7b, 8, 0, 0, 0),                    // 25: shared.frames[r9] = r0    <- next
        op(0x07, 9, 0, 0, 1),                    // 26: r9 += 1
        op(0xa5, 9, 0, LOOP - 28, BATCH as i32), // 27: if r9 < 512 goto loop
        op(0xb7, 0, 0, 0, 0),                    // 28: r0 = 0             <- exit
        op(0x95, 0, 0, 0, 0),                    // 29: return
    ]
}

/// A BPF map with one value, and the mapping of that value.
#[derive(Debug)]
struct SharedMap {
    map: OwnedFd,
    value: NonNull<Shared>,
}

// SAFETY: the mapping belongs to the process, not to a thread, so it may be used from any thread. It is used only
// through this value, which one thread owns at a time.
unsafe impl Send for SharedMap {}

impl SharedMap {
    fn new() -> io::Result<Self> {
        let map = bpf::create_shared_value(size_of::<Shared>())?;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let value = unsafe { mmap(null_mut(), size_of::<Shared>(), rights, MapFlags::SHARED, &map, 0) }?;
        let value = NonNull::new(value.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { map, value })
    }

    fn value(&self) -> &Shared {
        // SAFETY: the mapping is as large as `Shared` and lives as long as `self`. It holds plain integers, for which
        // any bytes are valid, and only its cells are used. The kernel writes to it only while a program runs, inside
        // `run`, which takes `&mut self`. So no reference to it is held then.
        unsafe { self.value.as_ref() }
    }

    fn run(&mut self, program: &OwnedFd) -> io::Result<()> {
        bpf::run(program)
    }
}

impl Drop for SharedMap {
    fn drop(&mut self) {
        // SAFETY: exactly the range mapped in `new`; references to it end with borrows of `self`.
        let unmapped = unsafe { munmap(self.value.as_ptr().cast(), size_of::<Shared>()) };
        debug_assert!(unmapped.is_ok(), "unmapping a mapping of our own: {unmapped:?}");
    }
}

/// Reads reference counts of frames.
#[derive(Debug)]
pub struct ReferenceCounts {
    shared: SharedMap,
    program: OwnedFd,
    layout: Layout,
}

impl ReferenceCounts {
    /// Most frames that one run looks at.
    pub const BATCH: usize = BATCH;

    /// Loads the BPF programs, finds the array of all pages, and tests both on pages of this process.
    ///
    /// # Errors
    /// One of these holds:
    ///
    /// - Rights are missing, or the kernel is locked down.
    /// - The kernel was built without BPF, without its types, or without one array of all pages.
    /// - The counts in the array that was found are not as expected.
    pub fn open() -> Result<Self> {
        let btf = kernel_types()?;
        Self::try_open(&btf).map_err(|e| Error::file("read reference counts of page frames through", "bpf(2)", e))
    }

    fn try_open(btf: &Btf) -> io::Result<Self> {
        // Kernels have this member only if all `struct page` are in one array (`SPARSEMEM_VMEMMAP`).
        if btf.offset("mem_section_usage.subsection_map").is_none() {
            return Err(io::Error::other("the kernel's pages are not one array (CONFIG_SPARSEMEM_VMEMMAP)"));
        }
        let layout = Layout::of(btf).ok_or_else(|| {
            io::Error::other("the kernel's types lack what tells who holds a page, or have it elsewhere")
        })?;
        let mut attempts = (0..ATTEMPTS).map(|_| Self::find(layout));
        // After a failed test (`None`) there is another attempt, because it may have failed by chance. An error would
        // come again.
        let done = |found: &io::Result<Option<Self>>| !matches!(found, Ok(None));
        match attempts.find(done) {
            Some(found) => found?.ok_or_else(|| io::Error::other("nothing was found")),
            None => Err(io::Error::new(io::ErrorKind::NotFound, "the array of the kernel's pages was not found")),
        }
    }

    /// Finds the array of all pages, and tests it on pages of this process; `None` if their counts are not as expected.
    fn find(layout: Layout) -> io::Result<Option<Self>> {
        let mut own = LentPages::new()?;
        let mut shared = SharedMap::new()?;
        let pipe = own.pipe.as_ref().map_or(-1, |pipe| pipe.reader.as_raw_fd());
        let follow = follow_program(shared.map.as_raw_fd(), pipe, &layout);
        shared.run(&bpf::load_syscall_program(&follow)?)?;
        let frames = own.pages.frames()?;
        let bytes = u64::from(layout.page_bytes.cast_unsigned());
        let begin_of = |slot: usize| {
            let frame = frames[LentPages::in_slot(slot)];
            shared.value().frames[slot].get().wrapping_sub(frame.0.wrapping_mul(bytes))
        };
        let vmemmap = begin_of(0);
        if (0..LentPages::LENT).any(|slot| begin_of(slot) != vmemmap) {
            return Ok(None);
        }
        let program = bpf::load_syscall_program(&read_program(shared.map.as_raw_fd(), vmemmap, layout.page_bytes))?;
        let mut counts = Self { shared, program, layout };
        let (mut lent, mut back) = ([Held::Unknown; LentPages::PAGES], [Held::Unknown; LentPages::PAGES]);
        counts.try_check(Kind::Private, &frames, &mut lent)?;
        own.pipe = None;
        counts.try_check(Kind::Private, &frames, &mut back)?;
        let holds = (0..frames.len()).all(|n| match (lent[n], back[n]) {
            (Held::Referenced(lent), Held::Free) => lent == LentPages::times(n),
            (Held::Referenced(lent), Held::Referenced(back)) => lent.checked_sub(back) == Some(LentPages::times(n)),
            _ => false,
        });
        Ok((holds && own.pages.frames()? == frames).then_some(counts))
    }

    /// The present holders of each of up to [`ReferenceCounts::BATCH`] frames of pages of this kind.
    ///
    /// # Errors
    /// The program could not be run.
    ///
    /// # Panics
    /// There are more frames than that, or not as many answers.
    pub fn check(&mut self, kind: Kind, frames: &[Pfn], held: &mut [Held]) -> Result<()> {
        self.try_check(kind, frames, held)
            .map_err(|e| Error::file("read reference counts of page frames through", "bpf(2)", e))
    }

    fn try_check(&mut self, kind: Kind, frames: &[Pfn], held: &mut [Held]) -> io::Result<()> {
        assert!(frames.len() <= BATCH && frames.len() == held.len(), "{} frames at a time", frames.len());
        let value = self.shared.value();
        value.count.set(frames.len() as u64);
        for (cell, frame) in value.frames.iter().zip(frames) {
            cell.set(frame.0);
        }
        self.shared.run(&self.program)?;
        let value = self.shared.value();
        for (n, held) in held.iter_mut().enumerate() {
            let head = std::array::from_fn(|word| value.heads[n][word].get());
            *held = if value.frames[n].get() == 0 { self.layout.judge(kind, &head) } else { Held::Unknown };
        }
        Ok(())
    }
}

/// Pages of this process that are in slots of a pipe (`vmsplice`), each in a known number of slots.
struct LentPages {
    pages: OwnPages,
    /// Closing the pipe drops its references to the pages.
    pipe: Option<Pipe>,
}

impl LentPages {
    const PAGES: usize = 8;
    /// Slots of the pipe that are filled.
    const LENT: usize = {
        let (mut sum, mut page) = (0, 0);
        while page < Self::PAGES {
            sum += Self::times(page) as usize;
            page += 1;
        }
        assert!(sum <= PIPE_SLOTS);
        sum
    };

    const fn times(page: usize) -> u32 {
        page as u32 % 3 + 1
    }

    /// The number of the page in this slot of the pipe. Page 0 comes first, in as many slots as [`Self::times`] says.
    fn in_slot(slot: usize) -> usize {
        let mut slots = (0..Self::PAGES).flat_map(|page| (0..Self::times(page)).map(move |_| page));
        slots.nth(slot).unwrap_or(Self::PAGES - 1)
    }

    fn new() -> io::Result<Self> {
        let pages = OwnPages::new(Self::PAGES)?;
        let pipe = Pipe::new()?;
        for slot in 0..Self::LENT {
            pages.lend(Self::in_slot(slot), &pipe)?;
        }
        Ok(Self { pages, pipe: Some(pipe) })
    }
}

struct Pipe {
    reader: OwnedFd,
    writer: OwnedFd,
}

impl Pipe {
    fn new() -> io::Result<Self> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        Ok(Self { reader, writer })
    }
}

/// Small private pages of our own, each written once.
struct OwnPages {
    start: NonNull<u8>,
    count: usize,
}

impl OwnPages {
    fn new(count: usize) -> io::Result<Self> {
        let bytes = count * PAGE_BYTES;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start =
            unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let this = Self { start, count };
        // Kernels without huge pages refuse the advice, and do not need it.
        // SAFETY: the range is the mapping just made; the advice changes no content.
        let _ = unsafe { madvise(this.start.as_ptr().cast(), bytes, Advice::LinuxNoHugepage) };
        for page in 0..count {
            this.write(page);
        }
        Ok(this)
    }

    fn page(&self, page: usize) -> *mut u8 {
        assert!(page < self.count);
        self.start.as_ptr().wrapping_add(page * PAGE_BYTES)
    }

    fn write(&self, page: usize) {
        // SAFETY: within the mapping, which lives as long as `self`; no reference to what it holds is ever made.
        unsafe { self.page(page).write_volatile(7) }
    }

    /// Puts a page into the next slot of a pipe, from which nobody reads.
    fn lend(&self, page: usize, pipe: &Pipe) -> io::Result<()> {
        let lent = libc::iovec { iov_base: self.page(page).cast(), iov_len: PAGE_BYTES };
        // SAFETY: the kernel reads one iovec, which outlives the call. The pipe keeps the frame as it is, also beyond
        // the end of the mapping, and nobody reads from it.
        match unsafe { libc::vmsplice(pipe.writer.as_raw_fd(), &raw const lent, 1, libc::SPLICE_F_NONBLOCK) } {
            n if usize::try_from(n) == Ok(PAGE_BYTES) => Ok(()),
            0.. => Err(io::ErrorKind::WriteZero.into()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn frames(&self) -> io::Result<Vec<Pfn>> {
        let mut entries = Vec::new();
        let pagemap = Pagemap::open(std::process::id()).map_err(io::Error::other)?;
        let start = HostVirt(self.start.as_ptr() as u64);
        pagemap.read(start, self.count as u64, &mut entries).map_err(io::Error::other)?;
        let frames: Option<Vec<Pfn>> = entries.iter().map(|e| e.pfn()).collect();
        frames.filter(|frames| frames.len() == self.count).ok_or_else(|| io::ErrorKind::PermissionDenied.into())
    }
}

impl Drop for OwnPages {
    fn drop(&mut self) {
        // SAFETY: exactly the range mapped in `new`; nothing refers to it.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.count * PAGE_BYTES) };
        debug_assert!(unmapped.is_ok(), "unmapping a mapping of our own: {unmapped:?}");
    }
}

#[cfg(test)]
#[path = "reference_counts_tests.rs"]
mod tests;
