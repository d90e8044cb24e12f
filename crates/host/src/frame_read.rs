//! Reading page frames themselves, rather than the memory of a process.
//!
//! Reading through a process leaves traces, whichever call does it. The call takes the process's memory lock and marks
//! pages as recently used. It may fault in a page that has just gone, or end the sharing of a page (see
//! [`crate::ProcessMemory`]).
//!
//! The kernel has all memory mapped a second time, in its *direct map*, and a BPF program may copy from there. The
//! program only loads, so the page, the process and the guest do not change. It neither looks up nor pins pages, but
//! it copies eight bytes at a time. That is about as fast for small pages, and slower for huge ones.
//!
//! ```text
//!   user space                                kernel
//!   addresses of up to 64 frames --(shared map)--> for each: bpf_probe_read_kernel
//!   pages, and an error for each <-(shared map)---
//! ```
//!
//! A load that faults (a frame that the kernel keeps out of the direct map, such as `memfd_secret`) is an
//! error for that page. If the kernel has given the frame to another owner since its number was looked up, the new
//! owner's bytes are read. Reading frames takes root, and does not work under kernel lockdown.
//!
//! The kernel randomises the beginning of the direct map, in multiples of 1 GiB. The reader finds it by trying. The
//! address of the current task lies in the direct map, so there are no more candidates than the machine has
//! gigabytes. At the right candidate, the frame of one of our own pages shows the random bytes that we wrote to that
//! page.

use crate::bpf::{self, Instruction, op};
use crate::{Error, Pagemap, Result};
use page::{HostVirt, PAGE_BYTES, PAGE_SHIFT, Pfn};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::cell::Cell;
use std::io;
use std::ptr::{NonNull, null_mut};

/// Frames read by one run of the program: 64, which fit into a core's second-level cache.
const BATCH_FRAMES: usize = 64;
/// Candidates tried for the beginning of the direct map: enough for 64 TiB of memory.
const MOST_CANDIDATES: u64 = 1 << 16;
/// Alignment of the direct map's beginning, in bytes: 1 GiB.
const ALIGNMENT: u64 = 1 << 30;

/// Memory that the BPF program and this process share: one page of slots, then one page for each frame.
#[repr(C, align(4096))]
struct Shared {
    /// In: the kernel address to copy from; 0 ends the list. Out: 0, or a negative error.
    slots: [Cell<u64>; BATCH_FRAMES],
    /// Out: the address of the current task.
    task: Cell<u64>,
    unused: [u64; PAGE_BYTES / 8 - BATCH_FRAMES - 1],
    pages: [[u8; PAGE_BYTES]; BATCH_FRAMES],
}

const _: () = assert!(size_of::<Shared>() == (1 + BATCH_FRAMES) * PAGE_BYTES);

/// Reads frames. Each thread needs a reader of its own.
#[derive(Debug)]
pub struct FrameReader {
    program: OwnedFd,
    /// The value of the program's map. It exists as long as this mapping.
    shared: NonNull<Shared>,
    direct_map: u64,
}

// SAFETY: the mapping belongs to the process, not to a thread; `&mut self` keeps its use to one thread at a time.
unsafe impl Send for FrameReader {}

/// The program's instructions. `map` is the descriptor of its map. `r7` holds the address of the map's value, `r9`
/// counts slots.
fn program(map: i32) -> [Instruction; 22] {
    const TASK: i16 = (BATCH_FRAMES * 8) as i16;
    const PAGE: i32 = PAGE_BYTES as i32;
    const LOOP: i16 = 5;
    const EXIT: i16 = 20;
    [
        op(0x18, 7, 2, 0, map),                         //  0: r7 = the map's value (two slots)
        op(0x00, 0, 0, 0, 0),                           //  1:
        op(0x85, 0, 0, 0, 35),                          //  2: r0 = bpf_get_current_task()
        op(0x7b, 7, 0, TASK, 0),                        //  3: shared.task = r0
        op(0xb7, 9, 0, 0, 0),                           //  4: r9 = 0
        op(0xbf, 8, 9, 0, 0),                           //  5: r8 = r9            <- loop
        op(0x67, 8, 0, 0, 3),                           //  6: r8 <<= 3
        op(0x0f, 8, 7, 0, 0),                           //  7: r8 += r7
        op(0x79, 3, 8, 0, 0),                           //  8: r3 = shared.slots[r9]
        op(0x15, 3, 0, EXIT - 10, 0),                   //  9: if r3 == 0 goto exit
        op(0xbf, 1, 9, 0, 0),                           // 10: r1 = r9
        op(0x67, 1, 0, 0, PAGE_SHIFT as i32),           // 11: r1 <<= 12
        op(0x0f, 1, 7, 0, 0),                           // 12: r1 += r7
        op(0x07, 1, 0, 0, PAGE),                        // 13: r1 += 4096: shared.pages[r9]
        op(0xb7, 2, 0, 0, PAGE),                        // 14: r2 = 4096
        op(0x85, 0, 0, 0, 113),                         // 15: r0 = bpf_probe_read_kernel(r1, r2, r3)
        op(0x7b, 8, 0, 0, 0),                           // 16: shared.slots[r9] = r0
        op(0x07, 9, 0, 0, 1),                           // 17: r9 += 1
        op(0xa5, 9, 0, LOOP - 19, BATCH_FRAMES as i32), // 18: if r9 < 64 goto loop
        op(0x05, 0, 0, 0, 0),                           // 19: goto exit
        op(0xb7, 0, 0, 0, 0),                           // 20: r0 = 0             <- exit
        op(0x95, 0, 0, 0, 0),                           // 21: return
    ]
}

impl FrameReader {
    /// Most frames in one call of [`FrameReader::read`].
    pub const BATCH: usize = BATCH_FRAMES;

    /// Loads the program and finds the direct map.
    ///
    /// # Errors
    /// Rights are missing, the kernel is locked down or built without BPF, or its direct map could not be found.
    pub fn open() -> Result<Self> {
        Self::try_open().map_err(|e| Error::file("read page frames through", "bpf(2)", e))
    }

    fn try_open() -> io::Result<Self> {
        let map = bpf::create_shared_value(size_of::<Shared>())?;
        let program = bpf::load_syscall_program(&program(map.as_raw_fd()))?;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let shared = unsafe { mmap(null_mut(), size_of::<Shared>(), rights, MapFlags::SHARED, &map, 0) }?;
        let shared = NonNull::new(shared.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut reader = Self { program, shared, direct_map: 0 };
        reader.direct_map = reader.find_direct_map()?;
        Ok(reader)
    }

    fn shared(&self) -> &Shared {
        // SAFETY: the mapping is as large as `Shared`, lives as long as `self`, and holds plain integers, for which any
        // bytes are valid. The kernel writes to it only while the program runs, that is inside `copy`. `copy` takes
        // `&mut self`, so no reference returned by this method is held then.
        unsafe { self.shared.as_ref() }
    }

    /// Runs the program over kernel addresses. Slots without an address get 0, which ends the program's list.
    fn copy(&mut self, addresses: impl Iterator<Item = u64>) -> io::Result<()> {
        let mut addresses = addresses;
        for slot in &self.shared().slots {
            slot.set(addresses.next().unwrap_or(0));
        }
        bpf::run(&self.program)
    }

    /// Reads up to [`FrameReader::BATCH`] frames. Calls `each` with the index in `frames` and the bytes of every frame
    /// that could be read.
    ///
    /// # Errors
    /// The program could not be run.
    pub fn read(&mut self, frames: &[Pfn], mut each: impl FnMut(usize, &[u8; PAGE_BYTES])) -> Result<()> {
        assert!(frames.len() <= BATCH_FRAMES, "{} frames at a time", frames.len());
        let base = self.direct_map;
        self.copy(frames.iter().map(|pfn| base.wrapping_add(pfn.0 << PAGE_SHIFT)))
            .map_err(|e| Error::file("read page frames through", "bpf(2)", e))?;
        let shared = self.shared();
        for n in (0..frames.len()).filter(|&n| shared.slots[n].get() == 0) {
            each(n, &shared.pages[n]);
        }
        Ok(())
    }

    fn find_direct_map(&mut self) -> io::Result<u64> {
        let marked = MarkedPage::new()?;
        self.copy(std::iter::empty())?;
        let highest = self.shared().task.get() & !(ALIGNMENT - 1);
        for first in (0..MOST_CANDIDATES).step_by(BATCH_FRAMES) {
            let candidate = |k: u64| highest.wrapping_sub(k * ALIGNMENT);
            let offset = marked.pfn.0 << PAGE_SHIFT;
            self.copy((first..first + BATCH_FRAMES as u64).map(|k| candidate(k).wrapping_add(offset)))?;
            let shared = self.shared();
            let hit = (0..BATCH_FRAMES).find(|&n| shared.slots[n].get() == 0 && shared.pages[n] == marked.page.0);
            if let Some(n) = hit {
                return Ok(candidate(first + n as u64));
            }
        }
        Err(io::Error::new(io::ErrorKind::NotFound, "the kernel's direct map was not found"))
    }
}

impl Drop for FrameReader {
    fn drop(&mut self) {
        // SAFETY: exactly the range mapped in `try_open`; references to it end with borrows of `self`.
        let unmapped = unsafe { munmap(self.shared.as_ptr().cast(), size_of::<Shared>()) };
        debug_assert!(unmapped.is_ok(), "unmapping a mapping of our own: {unmapped:?}");
    }
}

/// A page of random bytes, and the frame that holds it.
struct MarkedPage {
    page: Box<Bytes>,
    pfn: Pfn,
}

#[repr(align(4096))]
struct Bytes([u8; PAGE_BYTES]);

impl MarkedPage {
    fn new() -> io::Result<Self> {
        let mut page = Box::new(Bytes([0; PAGE_BYTES]));
        rustix::rand::getrandom(&mut page.0, rustix::rand::GetRandomFlags::empty())?;
        let mut entries = Vec::new();
        let at = HostVirt(page.0.as_ptr() as u64);
        Pagemap::open(std::process::id()).and_then(|p| p.read(at, 1, &mut entries)).map_err(io::Error::other)?;
        let pfn = entries.first().and_then(|e| e.pfn()).ok_or(io::ErrorKind::PermissionDenied)?;
        Ok(Self { page, pfn })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_frames_read_as_their_pages_and_frame_beyond_memory_is_left_out() {
        let Ok(mut reader) = FrameReader::open() else {
            eprintln!("skipped: no right to load BPF programs, or no BPF");
            return;
        };
        let marked: Vec<_> = (0..10).map(|_| MarkedPage::new().unwrap()).collect();
        let mut frames: Vec<_> = marked.iter().map(|m| m.pfn).collect();
        // The frame at byte 2^45: no machine that runs tests has so much memory.
        frames.insert(3, Pfn(1 << 33));
        let mut read = Vec::new();
        reader.read(&frames, |n, bytes| read.push((n, bytes.to_vec()))).unwrap();
        let places = [0, 1, 2, 4, 5, 6, 7, 8, 9, 10];
        let expected: Vec<_> = marked.iter().zip(places).map(|(m, n)| (n, m.page.0.to_vec())).collect();
        assert!(read == expected, "{:?}", read.iter().map(|r| r.0).collect::<Vec<_>>());
    }
}
