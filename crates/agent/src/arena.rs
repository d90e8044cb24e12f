//! The agent's own memory: one reserved address range, in which the agent allocates everything.
//!
//! The program's heap is not used, for two reasons. Its lock may be held by a thread that waits for the agent. And its
//! pages may be enrolled: a thread of the agent that touches one in the critical section of a fold would wait for
//! itself.
//!
//! The range is reserved without access rights, and made accessible step by step. So a kernel that accounts for memory
//! (overcommit) counts only the accessible part. The range is never enrolled, because no hook sees it being mapped, and
//! it never shrinks.
//!
//! `dlmalloc` allocates under a lock that does not block signals. Every caller has them blocked already, as one of the
//! agent's threads or as a holder of the table's lock. While the library is being loaded, no signal handler of the
//! program runs.
//!
//! A forked child that enrols begins with an arena of its own ([`begin_anew`]). The parent's arena stays mapped in the
//! child, and is only read.

use crate::lock::Lock;
use crate::{raw, world};
use dlmalloc::Dlmalloc;
use page::{HostVirt, PAGE_BYTES, PAGE_SHIFT, PageRange};
use rustix::io::Errno;
use rustix::mm::MapFlags;
use rustix::process::{Resource, getrlimit};
use std::alloc::{GlobalAlloc, Layout};
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Sizes to try to reserve, in bytes, the largest first. 4 GiB hold the table of some 800 GiB of touched memory. The
/// smaller ones are for programs whose address space is limited.
const SIZES: [usize; 4] = [4 << 30, 1 << 30, 128 << 20, 16 << 20];
/// Step by which the range is made accessible, in bytes.
const STEP_BYTES: usize = 1 << 20;
/// Memory that is made accessible in advance, in bytes, so that hooks always have memory for their notes.
const HEADROOM_BYTES: usize = 1 << 20;

/// Beginning of the reserved range; 0 before it is reserved.
static START: AtomicUsize = AtomicUsize::new(0);
/// End of the reserved range; 0 before it is reserved.
static END: AtomicUsize = AtomicUsize::new(0);
/// End of the part that was handed out: to dlmalloc, or by [`map`].
static USED: AtomicUsize = AtomicUsize::new(0);
/// End of the readable and writable part.
static OPENED: AtomicUsize = AtomicUsize::new(0);

/// The source of dlmalloc's memory. All of its methods are called under the lock of [`HEAP`].
struct Reserved;

static HEAP: Lock<Dlmalloc<Reserved>> = Lock::new(Dlmalloc::new_with_allocator(Reserved));

/// The allocator for all Rust code of the agent.
#[derive(Debug)]
pub struct Arena;

#[global_allocator]
static ARENA: Arena = Arena;

/// All memory that the agent's data may lie in. Empty before the first allocation.
pub fn range() -> PageRange {
    let (start, end) = (START.load(Ordering::Acquire), END.load(Ordering::Acquire));
    PageRange { start: HostVirt(start as u64), pages: (end.saturating_sub(start) >> PAGE_SHIFT) as u64 }
}

/// Whether an address lies in the arena. The agent's threads are known by their stacks, which lie there.
pub fn holds(address: usize) -> bool {
    (START.load(Ordering::Acquire)..END.load(Ordering::Acquire)).contains(&address)
}

/// Whether the calling thread is one of the agent's. Without hooks, no other thread runs code of the agent.
pub fn is_own_thread() -> bool {
    !world::is_hooked() || holds(raw::stack())
}

/// The part of the range that was ever handed out. Pages in it that nobody has touched take no memory, such as most
/// pages of each stack.
pub fn handed_out() -> PageRange {
    let (start, used) = (START.load(Ordering::Acquire), USED.load(Ordering::Acquire));
    PageRange { start: HostVirt(start as u64), pages: (used.saturating_sub(start) >> PAGE_SHIFT) as u64 }
}

/// Makes sure that `bytes` bytes can be allocated without asking the kernel. Returns `false` if the kernel makes no
/// more of the range accessible.
pub fn ensure(bytes: usize) -> bool {
    let _held = HEAP.lock_only();
    reserve() && open_to(USED.load(Ordering::Relaxed).saturating_add(bytes).saturating_add(HEADROOM_BYTES))
}

/// Maps zeroed memory that is never given back, for a stack or a buffer. The page below it is inaccessible. `None` if
/// there is no memory.
pub fn map(bytes: usize) -> Option<PageRange> {
    let _held = HEAP.lock_only();
    let bytes = bytes.checked_next_multiple_of(PAGE_BYTES)?;
    let start = take(bytes.checked_add(PAGE_BYTES)?)?;
    // SAFETY: the page was just taken from the arena's own range, and nobody else knows of it.
    unsafe { raw::call(libc::SYS_mprotect, [start, PAGE_BYTES, libc::PROT_NONE as usize, 0, 0, 0]) };
    Some(PageRange { start: HostVirt((start + PAGE_BYTES) as u64), pages: (bytes >> PAGE_SHIFT) as u64 })
}

/// Begins with an empty heap; all former allocations stay as they are for ever. For a forked child: its copy of the
/// parent's heap may be inconsistent, because other threads of the parent may have been allocating at the fork.
///
/// # Safety
/// The calling thread is the only one, and holds no memory of the arena that it is going to change.
pub(crate) unsafe fn begin_anew() {
    [&START, &END, &USED, &OPENED].into_iter().for_each(|of| of.store(0, Ordering::Release));
    // SAFETY: by the caller.
    unsafe { HEAP.begin_anew(Dlmalloc::new_with_allocator(Reserved)) };
}

/// The sizes to try. In a program whose address space is limited (`RLIMIT_AS`), the arena takes a sixteenth of the
/// limit at most, or else the smallest size.
fn sizes(limit: Option<u64>) -> impl Iterator<Item = usize> {
    let most = limit.map_or(usize::MAX, |limit| (limit / 16) as usize);
    SIZES.into_iter().filter(move |bytes| *bytes <= most || *bytes == SIZES[SIZES.len() - 1])
}

/// Reserves the range, if that was not done before. `false`: there is no address space.
fn reserve() -> bool {
    if START.load(Ordering::Relaxed) != 0 {
        return true;
    }
    for bytes in sizes(getrlimit(Resource::As).current) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let map = |at: *mut c_void, more: MapFlags| {
            let flags = flags as usize | more.bits() as usize;
            let arguments = [at as usize, bytes, libc::PROT_NONE as usize, flags, usize::MAX, 0];
            // SAFETY: a new mapping where nothing is mapped.
            let at = unsafe { raw::call(libc::SYS_mmap, arguments) };
            raw::error(at).map_or(Ok(at as *mut c_void), |error| Err(Errno::from_raw_os_error(error)))
        };
        if let Ok(start) = act::map_apart(bytes, map) {
            let start = start as usize;
            if !world::is_hooked() {
                // Children run no code of the agent's.
                // SAFETY: advice on the mapping just made.
                unsafe { raw::call(libc::SYS_madvise, [start, bytes, libc::MADV_DONTFORK as usize, 0, 0, 0]) };
            }
            // Debuggers write reserved addresses to core files, too: gigabytes of nothing.
            // SAFETY: advice on the mapping just made.
            unsafe { raw::call(libc::SYS_madvise, [start, bytes, libc::MADV_DONTDUMP as usize, 0, 0, 0]) };
            // SAFETY: advice on the mapping just made. Small pages: the agent's data is sparse.
            unsafe { raw::call(libc::SYS_madvise, [start, bytes, libc::MADV_NOHUGEPAGE as usize, 0, 0, 0]) };
            USED.store(start, Ordering::Relaxed);
            OPENED.store(start, Ordering::Relaxed);
            END.store(start + bytes, Ordering::Release);
            START.store(start, Ordering::Release);
            return true;
        }
    }
    false
}

/// Makes the range readable and writable up to `wanted`. `false`: the range is shorter, or the kernel refuses.
fn open_to(wanted: usize) -> bool {
    let opened = OPENED.load(Ordering::Relaxed);
    if wanted <= opened {
        return true;
    }
    let (start, end) = (START.load(Ordering::Relaxed), END.load(Ordering::Relaxed));
    let next = start + (wanted - start).next_multiple_of(STEP_BYTES);
    if next > end {
        return false;
    }
    let access = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    // SAFETY: the part of the arena's own range behind `opened`, where nothing lies yet.
    let answer = unsafe { raw::call(libc::SYS_mprotect, [opened, next - opened, access, 0, 0, 0]) };
    if raw::error(answer).is_none() {
        OPENED.store(next, Ordering::Relaxed);
    }
    raw::error(answer).is_none()
}

/// Takes whole pages of zeros from the range. `None` if the range is used up, or the kernel makes no more of it
/// accessible.
fn take(bytes: usize) -> Option<usize> {
    if !reserve() {
        return None;
    }
    let start = USED.load(Ordering::Relaxed);
    let end = start.checked_add(bytes)?;
    // The headroom is meant for hooks. It is used up only if the kernel makes no more of the range accessible.
    if end > END.load(Ordering::Relaxed) || !(open_to(end.saturating_add(HEADROOM_BYTES)) || open_to(end)) {
        return None;
    }
    USED.store(end, Ordering::Release);
    Some(start)
}

// SAFETY: `alloc` gives out disjoint, page-aligned, zeroed parts of a mapping that is never unmapped. The operations
// that are refused here (remapping, freeing) change nothing.
unsafe impl dlmalloc::Allocator for Reserved {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let Some(bytes) = size.checked_next_multiple_of(PAGE_BYTES) else { return (std::ptr::null_mut(), 0, 0) };
        match take(bytes) {
            Some(start) => (start as *mut u8, bytes, 0),
            None => (std::ptr::null_mut(), 0, 0),
        }
    }

    fn remap(&self, _: *mut u8, _: usize, _: usize, _: bool) -> *mut u8 {
        std::ptr::null_mut()
    }

    fn free_part(&self, _: *mut u8, _: usize, _: usize) -> bool {
        false
    }

    fn free(&self, _: *mut u8, _: usize) -> bool {
        false
    }

    fn can_release_part(&self, _: u32) -> bool {
        false
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        PAGE_BYTES
    }
}

// SAFETY: dlmalloc keeps the contract of an allocator for layouts that are valid, as the caller guarantees. The lock
// keeps its data to one thread at a time.
unsafe impl GlobalAlloc for Arena {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: any size and any power of two as alignment will do.
        unsafe { HEAP.lock_only().malloc(layout.size(), layout.align()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        unsafe { HEAP.lock_only().calloc(layout.size(), layout.align()) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // Memory of a parent's arena is never freed in a child.
        if holds(place as usize) {
            // SAFETY: the caller gives back what `alloc` gave for this layout.
            unsafe { HEAP.lock_only().free(place, layout.size(), layout.align()) }
        }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, new_bytes: usize) -> *mut u8 {
        if holds(place as usize) {
            // SAFETY: the caller gives what `alloc` gave for this layout.
            return unsafe { HEAP.lock_only().realloc(place, layout.size(), layout.align(), new_bytes) };
        }
        // SAFETY: as in `alloc`.
        let moved = unsafe { HEAP.lock_only().malloc(new_bytes, layout.align()) };
        if !moved.is_null() {
            // SAFETY: both have at least so many bytes, and the new one was just given out.
            unsafe { std::ptr::copy_nonoverlapping(place, moved, layout.size().min(new_bytes)) };
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inside(place: *const u8) -> bool {
        let range = range();
        (range.start.0..range.end().0).contains(&(place as u64))
    }

    #[test]
    fn program_keeps_most_of_a_limited_address_space() {
        let of = |limit: Option<u64>| sizes(limit).map(|bytes| bytes >> 20).collect::<Vec<_>>();
        assert_eq!(of(None), [4096, 1024, 128, 16]);
        assert_eq!(of(Some(5 << 30)), [128, 16]);
        assert_eq!(of(Some(1500 << 20)), [16]);
        assert_eq!(of(Some(0)), [16]);
    }

    #[test]
    fn all_allocations_lie_in_the_range() {
        let small = Box::new(1_u8);
        let large = vec![7_u8; 3 << 20];
        let text = format!("{small}{}", large.len());
        assert!(inside(&raw const *small) && inside(large.as_ptr()) && inside(text.as_ptr()));
        assert!(handed_out().pages >= (3 << 20) >> PAGE_SHIFT);
    }

    #[test]
    fn threads_allocate_at_the_same_time() {
        std::thread::scope(|scope| {
            for seed in 0..4_usize {
                scope.spawn(move || {
                    let mut kept: Vec<Vec<usize>> = Vec::new();
                    for turn in 0..5000 {
                        kept.push(vec![turn ^ seed; 1 + (turn * 7 + seed) % 300]);
                        if kept.len() > 50 {
                            let old = kept.swap_remove(turn % 50);
                            assert!(old.iter().all(|word| *word == old[0]));
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn mapped_memory_is_zeroed_and_guarded() {
        let mapped = map(10_000).unwrap();
        assert_eq!(mapped.pages, 3);
        let smaps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let guard = format!("{:x}-{:x} ---p", mapped.start.0 - 4096, mapped.start.0);
        assert!(smaps.contains(&guard), "no {guard} in\n{smaps}");
        // SAFETY: three pages that belong to this test alone.
        let bytes = unsafe { std::slice::from_raw_parts(mapped.start.0 as *const u8, 3 * PAGE_BYTES) };
        assert!(bytes.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn core_files_leave_the_range_out() {
        assert!(ensure(1));
        let found = crate::maps::mappings(range(), true).unwrap();
        assert!(!found.is_empty() && found.iter().all(|mapping| mapping.advice.dont_dump), "{found:?}");
    }

    #[test]
    fn more_than_the_range_cannot_be_ensured() {
        assert!(ensure(1 << 20));
        assert!(!ensure(1 << 40));
    }
}
