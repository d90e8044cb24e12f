//! Moves of folded memory that change its size, or that fail halfway.

use super::*;
use crate::scarce::with_short_memory;
use crate::testing::alone;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const MAY_MOVE: i32 = libc::MREMAP_MAYMOVE;
const FIXED: i32 = MAY_MOVE | libc::MREMAP_FIXED;

fn remap(at: usize, old: usize, new: usize, flags: i32, to: usize) -> Result<usize, i32> {
    let [old, new] = [old, new].map(|count| count * PAGE_BYTES);
    // SAFETY: the test's own pages.
    answer(unsafe { remap::mremap(at as *mut c_void, old, new, flags, to as *mut c_void) } as isize)
}

/// 64 pages, which the kernel sees as four mappings: page `n` is full of byte `n`. Behind them lies another one.
fn in_parts(pool: &OwnedFd) -> usize {
    let at = enrolled(65);
    (0..64).for_each(|page| write(at, page, page as u8));
    [0, 32].into_iter().for_each(|page| fold(pool, at + page * PAGE_BYTES, page, 16));
    at
}

fn is_whole(at: usize) -> bool {
    (0..64).all(|page| byte(at, page) == page as u8)
}

/// Pages that are mapped in this range.
fn mapped(range: PageRange) -> u64 {
    maps::mappings(range, false).unwrap().iter().map(|mapping| mapping.range.pages).sum()
}

/// Moves 64 pages in a process that may have only so many pages more. Memory at a given place does not count. Returns
/// the answer.
fn remap_within(more: u64, at: usize, new: usize, flags: i32, to: usize) -> Result<usize, i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let data = status.lines().find_map(|line| line.strip_prefix("VmData:")?.trim().strip_suffix(" kB")).unwrap();
    let gone = if flags == FIXED { new as u64 } else { 0 };
    let most = data.parse::<u64>().unwrap() * 1024 + more * PAGE_BYTES as u64 - gone * PAGE_BYTES as u64;
    let before = getrlimit(Resource::Data);
    setrlimit(Resource::Data, Rlimit { current: Some(most), ..before }).unwrap();
    let answer = remap(at, 64, new, flags, to);
    setrlimit(Resource::Data, before).unwrap();
    answer
}

#[test]
fn memory_that_cannot_be_moved_is_where_it_was() {
    if !alone("hooks::tests::moves::memory_that_cannot_be_moved_is_where_it_was") {
        return;
    }
    let pool = pool();
    // Moved halfway, without and with a given place. Moved wholly: then so much memory is refused as no machine has.
    let cases = [(40, 100, MAY_MOVE), (40, 64, FIXED), (1 << 20, 1 << 28, MAY_MOVE)];
    let is_all_granted = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap().trim() == "1";
    if is_all_granted {
        eprintln!("skipped: the kernel grants any amount of memory here");
    }
    for (more, new, flags) in cases.into_iter().take(if is_all_granted { 2 } else { 3 }) {
        let (at, to) = (in_parts(&pool), enrolled(64));
        let (there, before) = (pages(to, 64), mapped(table::everything()));
        assert_eq!(remap_within(more, at, new, flags, to), Err(libc::ENOMEM), "{more} {new}");
        assert!(is_whole(at), "{more} {new}");
        // Memory at a given place is gone, as with the kernel.
        let (known, stays) = (table::lock().touches(there), mapped(there));
        assert_eq!((known, stays), if flags == FIXED { (false, 0) } else { (true, 64) }, "{more} {new}");
        let after = mapped(table::everything()) + 64 - stays;
        assert!(after < before + 32, "{} pages more are mapped: {more} {new}", after - before);
        unmap_all(at, 65);
        unmap_all(to, 64);
    }
}

/// Memory is short for the third of the moves, and for the first two of the way back.
#[test]
fn memory_is_moved_back_although_memory_is_short() {
    if !alone("hooks::tests::moves::memory_is_moved_back_although_memory_is_short") {
        return;
    }
    let (pool, to) = (pool(), fresh(64));
    let at = in_parts(&pool);
    assert_eq!(with_short_memory(0b11100, || remap(at, 64, 64, FIXED, to)), Err(libc::ENOMEM));
    assert_eq!(mapped(pages(at, 64)), 64, "memory that was moved is lost");
    assert!(is_whole(at));
    unmap_all(at, 65);
}

#[test]
fn nothing_is_left_behind_memory_that_was_moved() {
    if !alone("hooks::tests::moves::nothing_is_left_behind_memory_that_was_moved") {
        return;
    }
    let pool = pool();
    for new in [32, 64, 100] {
        let (at, to) = (in_parts(&pool), fresh(128));
        (0..128).for_each(|page| write(to, page, 200));
        assert_eq!(remap(at, 64, new, FIXED, to), Ok(to));
        assert!((0..new.min(64)).all(|page| byte(to, page) == page as u8));
        assert!((64..new).all(|page| byte(to, page) == 0));
        assert!((new..128).all(|page| byte(to, page) == 200), "memory behind {new} pages was replaced");
        assert_eq!(mapped(pages(at, 64)), 0, "something lies where {new} pages were");
        unmap_all(at, 65);
        unmap_all(to, 128);
    }
}

#[test]
fn slots_behind_memory_that_shrinks_are_released() {
    let (pool, at) = (pool(), enrolled(4));
    fold(&pool, at, 150, 4);
    assert_eq!(remap(at, 4, 2, 0, 0), Ok(at));
    assert_eq!(released(pages(at, 4)), [152, 153]);
    assert!(!table::lock().touches(pages(at + 2 * PAGE_BYTES, 2)));
    assert_eq!([byte(at, 0), byte(at, 1)], [150, 151]);
    unmap_all(at, 2);
}

/// The memory that lay there was unmapped in a way that bypasses the hooks.
#[test]
fn memory_that_grows_in_place_maps_no_slots_of_what_lay_there() {
    if !alone("hooks::tests::moves::memory_that_grows_in_place_maps_no_slots_of_what_lay_there") {
        return;
    }
    let (pool, at) = (pool(), enrolled(4));
    fold(&pool, at + 2 * PAGE_BYTES, 160, 2);
    // SAFETY: the test's own pages.
    let unmapped = unsafe { raw::call(libc::SYS_munmap, [at + 2 * PAGE_BYTES, 2 * PAGE_BYTES, 0, 0, 0, 0]) };
    assert_eq!(unmapped, 0);
    assert_eq!(remap(at, 2, 4, 0, 0), Ok(at));
    assert!(table::lock().slot_runs(pages(at, 4)).is_empty());
    assert_eq!(released(pages(at, 4)), [160, 161]);
    assert_eq!([byte(at, 2), byte(at, 3)], [0, 0]);
    unmap_all(at, 4);
}

/// From Linux 6.17 on, the kernel moves several mappings at once. Of a file, it leaves the mapping there.
#[test]
fn file_behind_folded_memory_stays_mapped_where_memory_was_moved_away() {
    if !alone("hooks::tests::moves::file_behind_folded_memory_stays_mapped_where_memory_was_moved_away") {
        return;
    }
    let (pool, at, to) = (pool(), enrolled(8), fresh(8));
    let file = rustix::fs::memfd_create(c"file", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 4 * PAGE_BYTES as u64).unwrap();
    let (behind, flags) = (at + 4 * PAGE_BYTES, libc::MAP_SHARED | libc::MAP_FIXED);
    // SAFETY: the test's own pages.
    unsafe { memory::mmap(behind as *mut c_void, 4 * PAGE_BYTES, 3, flags, file.as_raw_fd(), 0) };
    (4..8).for_each(|page| write(at, page, 9));
    fold(&pool, at, 170, 2);
    let moved = remap(at, 8, 8, FIXED | libc::MREMAP_DONTUNMAP, to);
    if moved == Err(libc::EFAULT) {
        return eprintln!("skipped: the kernel moves no several mappings here");
    }
    assert_eq!(moved, Ok(to));
    assert_eq!([byte(to, 0), byte(to, 4), byte(at, 0), byte(at, 4)], [170, 9, 0, 9]);
    unmap_all(at, 8);
    unmap_all(to, 8);
}
