//! The hooks on real memory, with mappings of a pool made as the agent makes them.

mod discards;
mod duplicates;
mod enrolment;
mod forks;
mod heap;
mod moves;

use super::*;
use agent::maps;
use agent::table::READ_WRITE;
use page::HostVirt;

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Once;
use wire::SlotRun;

/// Slots of the test's pool; slot `n` is full of byte `n`.
const SLOTS: usize = 200;

fn member() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        init(false);
        table::lock().follow_forks(true);
    });
}

fn pool() -> OwnedFd {
    // SAFETY: makes a file.
    let file = unsafe { libc::memfd_create(c"pool".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(file >= 0);
    // SAFETY: just made, and nobody else's.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    maps::know_pool(&rustix::fs::fstat(&file).unwrap());
    for slot in 0..SLOTS {
        let page = [slot as u8; PAGE_BYTES];
        // SAFETY: reads the page.
        let n = unsafe { libc::pwrite(file.as_raw_fd(), page.as_ptr().cast(), PAGE_BYTES, (slot * PAGE_BYTES) as i64) };
        assert_eq!(n, PAGE_BYTES as isize);
    }
    file
}

fn pages(start: usize, count: usize) -> PageRange {
    PageRange { start: HostVirt(start as u64), pages: count as u64 }
}

/// Makes `count` pages map slots from `slot` on.
fn fold(pool: &OwnedFd, at: usize, slot: usize, count: usize) {
    let flags = (libc::MAP_PRIVATE | libc::MAP_FIXED) as usize;
    let arguments = [at, count * PAGE_BYTES, READ_WRITE.into(), flags, pool.as_raw_fd() as usize, slot * PAGE_BYTES];
    let mut table = table::lock();
    // SAFETY: the test's own pages.
    let mapped = unsafe { raw::call(libc::SYS_mmap, arguments) };
    assert_eq!(mapped, at as isize);
    for (part, traits) in table.known(pages(at, count)) {
        traits.inherited_by_pool().apply(part).unwrap();
    }
    let slot = page::PoolSlot::from_bits(slot as u32);
    table.set_folded(SlotRun { start: HostVirt(at as u64), slot, pages: count as u16 });
}

/// Maps memory through the hook.
///
/// # Safety
/// As `mmap`.
pub unsafe fn map(bytes: usize, flags: i32) -> *mut c_void {
    // SAFETY: by the caller.
    unsafe { memory::mmap(std::ptr::null_mut(), bytes, 3, flags, -1, 0) }
}

/// New private memory through the hook.
fn fresh(count: usize) -> usize {
    // SAFETY: a new mapping where the kernel chooses.
    let at = unsafe {
        memory::mmap(std::ptr::null_mut(), count * PAGE_BYTES, 3, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    assert_ne!(at, libc::MAP_FAILED);
    at as usize
}

fn advise(at: usize, count: usize, advice: i32) -> Result<(), i32> {
    // SAFETY: the test's own pages.
    answer(unsafe { super::advice::madvise(at as *mut c_void, count * PAGE_BYTES, advice) } as isize).map(drop)
}

fn answer(answer: isize) -> Result<usize, i32> {
    if answer == -1 { Err(std::io::Error::last_os_error().raw_os_error().unwrap()) } else { Ok(answer as usize) }
}

/// New memory, enrolled by advice.
fn enrolled(count: usize) -> usize {
    member();
    let at = fresh(count);
    assert_eq!(advise(at, count, libc::MADV_MERGEABLE), Ok(()));
    assert!(table::lock().is_foldable(pages(at, count)));
    // Drops slots of an earlier user of these addresses.
    released(pages(at, count));
    at
}

fn byte(at: usize, page: usize) -> u8 {
    // SAFETY: the test's own pages, mapped and readable.
    unsafe { std::ptr::read_volatile((at + page * PAGE_BYTES + 77) as *const u8) }
}

fn write(at: usize, page: usize, value: u8) {
    // SAFETY: the test's own pages, mapped and writable.
    unsafe { std::ptr::write_bytes((at + page * PAGE_BYTES) as *mut u8, value, PAGE_BYTES) };
}

fn unmap_all(at: usize, count: usize) {
    // SAFETY: the test's own pages.
    assert_eq!(unsafe { memory::munmap(at as *mut c_void, count * PAGE_BYTES) }, 0);
    assert!(!table::lock().touches(pages(at, count)));
}

fn protect(at: usize, count: usize, access: i32) -> Result<(), i32> {
    // SAFETY: the test's own pages.
    answer(unsafe { memory::mprotect(at as *mut c_void, count * PAGE_BYTES, access) } as isize).map(drop)
}

/// Slots of this range that were released since the last call.
fn released(range: PageRange) -> Vec<u32> {
    let mut mine = Vec::new();
    let mut others = OTHERS.lock().unwrap();
    others.extend(table::lock().take_released(usize::MAX));
    others.retain(|run| {
        let is_mine = (range.start.0..range.end().0).contains(&run.start.0);
        if is_mine {
            mine.extend((0..u32::from(run.pages)).map(|page| run.slot.bits() + page));
        }
        !is_mine
    });
    mine.sort_unstable();
    mine
}

/// Released slots of other tests' memory.
static OTHERS: std::sync::Mutex<Vec<SlotRun>> = std::sync::Mutex::new(Vec::new());

#[test]
fn discarded_pages_read_as_zeros() {
    let pool = pool();
    for discard in [libc::MADV_DONTNEED, libc::MADV_FREE] {
        let at = enrolled(16);
        advise(at, 16, libc::MADV_DONTFORK).unwrap();
        advise(at, 16, libc::MADV_DONTDUMP).unwrap();
        (0..16).for_each(|page| write(at, page, 0xAA));
        fold(&pool, at + 2 * PAGE_BYTES, 20, 8);
        assert_eq!(byte(at, 5), 23);
        // Page 3 is broken, and the table knows that; page 4 is broken, and the table does not.
        write(at, 3, 0xBB);
        write(at, 4, 0xCC);
        table::lock().set_broken(pages(at + 3 * PAGE_BYTES, 1));
        assert_eq!(advise(at, 14, discard), Ok(()));
        (2..10).for_each(|page| assert_eq!(byte(at, page), 0, "page {page} after {discard}"));
        assert_eq!(byte(at, 14), 0xAA);
        let table = table::lock();
        assert!(table.is_foldable(pages(at, 14)));
        let mapped = maps::mappings(pages(at, 16), true).unwrap();
        drop(table);
        assert!(mapped.iter().all(|m| m.anonymous && m.advice.dont_fork && m.advice.dont_dump), "{mapped:?}");
        assert_eq!(released(pages(at, 16)), (20..28).collect::<Vec<_>>());
        unmap_all(at, 16);
    }
}

#[test]
fn unmergeable_pages_become_private() {
    let pool = pool();
    let at = enrolled(4);
    fold(&pool, at, 30, 4);
    assert_eq!(advise(at, 4, libc::MADV_UNMERGEABLE), Ok(()));
    assert_eq!(released(pages(at, 4)), [30, 31, 32, 33]);
    assert_eq!(byte(at, 3), 33);
    assert!(!table::lock().is_foldable(pages(at, 1)));
    // The page is still in the pool's mapping, and must not show the pool's bytes when it is discarded.
    assert_eq!(advise(at, 4, libc::MADV_DONTNEED), Ok(()));
    assert_eq!(byte(at, 3), 0);
    unmap_all(at, 4);
}

#[test]
fn the_kernel_is_not_told_to_merge() {
    if !crate::testing::alone("hooks::tests::the_kernel_is_not_told_to_merge") {
        return;
    }
    let at = enrolled(4);
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mine = smaps.split_once(&format!("{at:x}-")).unwrap().1;
    let flags = mine.lines().find(|line| line.starts_with("VmFlags")).unwrap();
    assert!(!flags.contains(" mg"), "{flags}");
    unmap_all(at, 4);
}

#[test]
fn new_mapping_releases_slots_in_its_place() {
    let pool = pool();
    let at = enrolled(4);
    fold(&pool, at, 60, 4);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: the test's own pages.
    unsafe { memory::mmap((at + PAGE_BYTES) as *mut c_void, 2 * PAGE_BYTES, 3, flags, -1, 0) };
    assert_eq!(released(pages(at, 4)), [61, 62]);
    assert!(!table::lock().is_foldable(pages(at + PAGE_BYTES, 2)), "not by advice yet");
    unmap_all(at, 4);
}

#[test]
fn memory_that_stays_behind_a_move_reads_as_zeros() {
    let pool = pool();
    let at = enrolled(4);
    fold(&pool, at, 80, 4);
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
    let bytes = 4 * PAGE_BYTES;
    // SAFETY: the test's own pages.
    let moved = unsafe { remap::mremap(at as *mut c_void, bytes, bytes, flags, std::ptr::null_mut()) } as usize;
    assert!((0..4).all(|page| byte(moved, page) == 80 + page as u8));
    assert!((0..4).all(|page| byte(at, page) == 0));
    let (foldable, mapped, broken) = {
        let table = table::lock();
        (table.is_foldable(pages(at, 4)), table.slot_runs(pages(moved, 4)), table.broken_pages(pages(moved, 4)))
    };
    // The moved pages left the pool before the move: the worker knows pages by their addresses.
    assert!(foldable && mapped.is_empty() && broken == [pages(moved, 4)]);
    unmap_all(at, 4);
    unmap_all(moved, 4);
}

/// Another thread maps memory in a way that bypasses the hooks, while folded memory is moved mapping by mapping. Once,
/// it was given addresses that the moved mappings had left, and lost them when the whole place was unmapped or filled.
#[test]
fn memory_that_is_mapped_during_a_move_stays() {
    // Other tests would be given these addresses, too.
    if !crate::testing::alone("hooks::tests::memory_that_is_mapped_during_a_move_stays") {
        return;
    }
    const TIME: std::time::Duration = std::time::Duration::from_secs(2);
    let (pool, end) = (pool(), std::time::Instant::now() + TIME);
    let is_over = || std::time::Instant::now() >= end;
    let map_check_and_unmap = || {
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE) as usize;
        // SAFETY: new memory of the test's own.
        let at = unsafe { raw::call(libc::SYS_mmap, [0, PAGE_BYTES, READ_WRITE.into(), flags, usize::MAX, 0]) };
        assert!(raw::error(at).is_none());
        // SAFETY: aligned, and mapped until the last line.
        let word = unsafe { std::sync::atomic::AtomicU64::from_ptr(at as usize as *mut u64) };
        word.store(7, std::sync::atomic::Ordering::Relaxed);
        crate::testing::spin(std::time::Duration::from_micros(50));
        assert_eq!(word.load(std::sync::atomic::Ordering::Relaxed), 7, "something else lies there");
        // SAFETY: as above, and not used any more.
        unsafe { raw::call(libc::SYS_munmap, [at as usize, PAGE_BYTES, 0, 0, 0, 0]) };
    };
    std::thread::scope(|scope| {
        scope.spawn(|| (0..).take_while(|_| !is_over()).for_each(|_| map_check_and_unmap()));
        for stays in [0, libc::MREMAP_DONTUNMAP].into_iter().cycle().take_while(|_| !is_over()) {
            let at = enrolled(32);
            (0..32).step_by(2).for_each(|page| fold(&pool, at + page * PAGE_BYTES, page, 1));
            let (bytes, flags) = (32 * PAGE_BYTES, libc::MREMAP_MAYMOVE | stays);
            // SAFETY: the test's own pages.
            let to = unsafe {
                remap::mremap(at as *mut c_void, bytes, bytes, flags | libc::MREMAP_FIXED, fresh(32) as *mut c_void)
            };
            assert!((0..32).step_by(2).all(|page| byte(to as usize, page) == page as u8));
            unmap_all(to as usize, 32);
            if stays != 0 {
                unmap_all(at, 32);
            }
        }
    });
}

/// Only the middle was ever enrolled, and it is watched, so the kernel sees three mappings where the program sees one.
#[test]
fn mapping_of_which_a_part_is_known_is_moved_and_grows() {
    member();
    let notes = act::Userfault::open(act::Purpose::Note).unwrap();
    let dont_unmap = libc::MREMAP_DONTUNMAP;
    for (count, fixed, stays) in [(16, true, 0), (40, true, 0), (40, false, 0), (16, true, dont_unmap)] {
        let (at, to) = (fresh(16), fresh(40));
        (0..16).for_each(|page| write(at, page, page as u8 + 1));
        assert_eq!(advise(at + 4 * PAGE_BYTES, 5, libc::MADV_MERGEABLE), Ok(()));
        notes.register(pages(at + 4 * PAGE_BYTES, 5), act::Watch::Writes).unwrap();
        assert_eq!(advise(at, 16, libc::MADV_UNMERGEABLE), Ok(()));
        let (flags, place) = if fixed { (libc::MREMAP_FIXED, to) } else { (0, 0) };
        let flags = flags | libc::MREMAP_MAYMOVE | stays;
        let (old, new) = (16 * PAGE_BYTES, count * PAGE_BYTES);
        // SAFETY: the test's own pages.
        let moved = unsafe { remap::mremap(at as *mut c_void, old, new, flags, place as *mut c_void) } as usize;
        assert!(moved != libc::MAP_FAILED as usize && (!fixed || moved == to), "{count} {fixed}");
        assert!((0..16).all(|page| byte(moved, page) == page as u8 + 1));
        assert!((16..count).all(|page| byte(moved, page) == 0));
        assert!(!table::lock().touches(pages(at, 16)) || moved == at);
        let left = maps::mappings(pages(at, 16), false).unwrap();
        let left: u64 = left.iter().filter(|left| left.access == READ_WRITE).map(|left| left.range.pages).sum();
        assert!(stays == 0 || left == 16 && (0..16).all(|page| byte(at, page) == 0), "{left} pages stay");
        unmap_all(moved, count);
        unmap_all(to, 40);
    }
}

/// Memory that takes the place of other memory carries the advice that the table knows, and that is older.
#[test]
fn advice_past_the_hooks_does_not_keep_folded_memory_from_growing() {
    let pool = pool();
    for advice in [libc::MADV_DONTDUMP, libc::MADV_NOHUGEPAGE] {
        let at = enrolled(4);
        advise(at, 1, advice).unwrap();
        let arguments = [at, 4 * PAGE_BYTES, advice as usize, 0, 0, 0];
        // SAFETY: this advice changes no contents.
        assert_eq!(unsafe { raw::call(libc::SYS_madvise, arguments) }, 0);
        fold(&pool, at, 130, 1);
        fold(&pool, at + 2 * PAGE_BYTES, 132, 1);
        assert_eq!(advise(at + 2 * PAGE_BYTES, 1, libc::MADV_DONTNEED), Ok(()));
        let (old, new) = (4 * PAGE_BYTES, 9 * PAGE_BYTES);
        // SAFETY: the test's own pages.
        let moved =
            unsafe { remap::mremap(at as *mut c_void, old, new, libc::MREMAP_MAYMOVE, std::ptr::null_mut()) } as usize;
        assert!(moved != libc::MAP_FAILED as usize, "after advice {advice}: {}", std::io::Error::last_os_error());
        assert_eq!([byte(moved, 0), byte(moved, 2), byte(moved, 8)], [130, 0, 0]);
        unmap_all(moved, 9);
    }
}

#[test]
fn memory_by_which_locked_memory_grows_is_locked() {
    if !crate::testing::alone("hooks::tests::memory_by_which_locked_memory_grows_is_locked") {
        return;
    }
    let (pool, at) = (pool(), enrolled(16));
    fold(&pool, at, 140, 1);
    // SAFETY: leaves room behind the first four pages.
    assert_eq!(unsafe { super::memory::munmap((at + 4 * PAGE_BYTES) as *mut c_void, 12 * PAGE_BYTES) }, 0);
    // SAFETY: locking changes no contents.
    if unsafe { super::memory::mlock(at as *const c_void, 4 * PAGE_BYTES) } != 0 {
        return eprintln!("skipped: cannot lock four pages");
    }
    for (count, may_move) in [(6, 0), (24, libc::MREMAP_MAYMOVE)] {
        let (old, new) = (if count == 6 { 4 } else { 6 } * PAGE_BYTES, count * PAGE_BYTES);
        // SAFETY: the test's own pages.
        let moved = unsafe { remap::mremap(at as *mut c_void, old, new, may_move, std::ptr::null_mut()) } as usize;
        assert!(moved == at || may_move != 0);
        let mapped = maps::mappings(pages(moved, count), true).unwrap();
        assert!(mapped.iter().all(|mapping| mapping.locked), "{count}: {mapped:?}");
        assert_eq!(byte(moved, 0), 140);
        if may_move != 0 {
            unmap_all(moved, count);
        }
    }
}

/// From Linux 6.17 on, the kernel moves several mappings at once to a given place.
#[test]
fn folded_pages_of_different_protection_are_moved() {
    member();
    let (pool, at, to) = (pool(), enrolled(8), fresh(8));
    fold(&pool, at, 20, 8);
    assert_eq!(protect(at + 3 * PAGE_BYTES, 2, 1), Ok(()));
    let (bytes, flags) = (8 * PAGE_BYTES, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
    // SAFETY: the test's own pages.
    let moved = unsafe { remap::mremap(at as *mut c_void, bytes, bytes, flags, to as *mut c_void) };
    assert_eq!(moved as usize, to);
    assert!((0..8).all(|page| byte(to, page) == 20 + page as u8));
    let access: Vec<_> = maps::mappings(pages(to, 8), false).unwrap();
    let access_of = |page| access.iter().find(|m| m.range.end() > pages(to, 8).start.add_pages(page)).unwrap().access;
    assert_eq!([2, 3, 4, 5].map(access_of), [3, 1, 1, 3]);
    assert!(table::lock().slot_runs(pages(to, 8)).is_empty());
    unmap_all(to, 8);
}

#[test]
fn programs_own_userfaultfd_takes_precedence() {
    const WRITE_PROTECT: u64 = 2;
    let pool = pool();
    let at = enrolled(4);
    fold(&pool, at, 90, 2);
    // SAFETY: makes a descriptor.
    let file = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | 1) } as i32;
    if file < 0 {
        return eprintln!("programs_own_userfaultfd_takes_precedence: skipped: no userfaultfd here");
    }
    let mut api = [0xAA, 1, 0_u64];
    // SAFETY: `struct uffdio_api`, with write-protection asked for.
    assert_eq!(unsafe { libc::ioctl(file, 0xC018_AA3F, api.as_mut_ptr()) }, 0);
    let mut register = [at as u64, 4 * PAGE_BYTES as u64, WRITE_PROTECT, 0];
    // While the agent's userfaultfd is off, nothing may be folded there: a fold would put it back.
    static SHUT: AtomicBool = AtomicBool::new(false);
    let yield_range = |range: PageRange| {
        let unfolded = PageRange { start: range.start.add_pages(2), pages: 2 };
        SHUT.store(!table::lock().is_foldable(unfolded), Ordering::SeqCst);
    };
    super::set_ways(yield_range, |_| false);
    assert!(table::lock().is_foldable(pages(at + 2 * PAGE_BYTES, 2)));
    // SAFETY: `struct uffdio_register`. The kernel takes pages that map the pool like others.
    assert_eq!(unsafe { libc::ioctl(file, 0xC020_AA00, register.as_mut_ptr()) }, 0);
    assert!(SHUT.load(Ordering::SeqCst));
    assert!(!table::lock().is_foldable(pages(at + 2 * PAGE_BYTES, 1)));
    // SAFETY: `struct uffdio_range`.
    assert_eq!(unsafe { libc::ioctl(file, 0x8010_AA01, register.as_mut_ptr()) }, 0);
    assert!(table::lock().is_foldable(pages(at + 2 * PAGE_BYTES, 2)));
    // A registration that the kernel refuses changes nothing.
    register[2] = 1 << 40;
    // SAFETY: as above.
    assert_eq!(unsafe { libc::ioctl(file, 0xC020_AA00, register.as_mut_ptr()) }, -1);
    assert!(table::lock().is_foldable(pages(at + 2 * PAGE_BYTES, 2)));
    // SAFETY: opened here.
    unsafe { libc::close(file) };
    unmap_all(at, 4);
}

/// Whether a call by another thread waits as long as the table is locked, as it is in a section. It returns afterwards.
pub fn waits_for_the_table(call: impl FnOnce() + Send) -> bool {
    let [ready, begin, done] = [const { AtomicBool::new(false) }; 3];
    let is = |flag: &AtomicBool| flag.load(Ordering::SeqCst);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ready.store(true, Ordering::SeqCst);
            while !is(&begin) {
                std::hint::spin_loop();
            }
            call();
            done.store(true, Ordering::SeqCst);
        });
        // To start a thread takes memory, which would wait, too.
        while !is(&ready) {
            std::thread::yield_now();
        }
        // While it is held, nothing is allocated here.
        let held = table::lock();
        begin.store(true, Ordering::SeqCst);
        crate::testing::spin(std::time::Duration::from_millis(200));
        let waits = !is(&done);
        drop(held);
        waits
    })
}
