//! The heap, and what the C library allocates.

use super::*;
use crate::testing::alone;

#[test]
fn malloc_goes_through_the_hooks() {
    if !alone("hooks::tests::heap::malloc_goes_through_the_hooks") {
        return;
    }
    member();
    // The harness has another thread, which waits for this one.
    patch::patch_all().unwrap();
    enrol_all();
    let pool = pool();
    const BYTES: usize = 8 << 20;
    // SAFETY: memory of the C library's allocator.
    let place = unsafe { libc::malloc(BYTES) } as usize;
    let first = place.next_multiple_of(PAGE_BYTES);
    assert!(table::lock().is_foldable(pages(first, 2000)), "malloc's own mmap was not seen");
    (0..2000).for_each(|page| write(first, page, page as u8));
    fold(&pool, first + 10 * PAGE_BYTES, 10, 100);
    fold(&pool, first + 1900 * PAGE_BYTES, 1900 % 256, 50);
    // SAFETY: as above. glibc grows it by `mremap`.
    let grown = unsafe { libc::realloc(place as *mut c_void, 4 * BYTES) } as usize;
    let first = first - place + grown;
    assert!((0..2000).all(|page| byte(first, page) == page as u8), "contents have changed");
    assert!(table::lock().is_foldable(pages(first + 3000 * PAGE_BYTES, 4000)), "malloc's own mremap was not seen");
    let pooled = table::lock().pooled_pages(pages(first, 2000)).len();
    assert_eq!(pooled, 2);
    // SAFETY: as above.
    unsafe { libc::free(grown as *mut c_void) };
    assert!(!table::lock().touches(pages(first, 7000)), "malloc's own munmap was not seen");
    threads_of_malloc();
    the_heap_follows_brk();
}

/// The arena of a thread is reserved without rights, and opened step by step.
fn threads_of_malloc() {
    std::thread::spawn(|| {
        // SAFETY: memory of the C library's allocator.
        let place = unsafe { libc::malloc(100_000) } as usize;
        let range = pages(place.next_multiple_of(PAGE_BYTES), 20);
        assert!(table::lock().is_foldable(range), "{:?}", table::lock().known(range));
        // SAFETY: as above.
        unsafe { libc::free(place as *mut c_void) };
    })
    .join()
    .unwrap();
}

/// The C library's `sbrk` goes by its own note of the heap's end, and allocates by it.
fn the_heap_follows_brk() {
    // SAFETY: asks where the heap ends.
    let end = || unsafe { libc::sbrk(0) } as usize;
    let before = end();
    let grown = pages(before.next_multiple_of(PAGE_BYTES), 256);
    assert!(table::lock().is_foldable(pages(grown.start.0 as usize - PAGE_BYTES, 1)), "the heap was not enrolled");
    // SAFETY: grows the heap.
    assert_eq!(unsafe { libc::sbrk(1 << 20) } as usize, before);
    assert_eq!(end(), before + (1 << 20));
    assert!(table::lock().is_foldable(grown), "what has grown was not seen");
    fold(&pool(), grown.start.0 as usize, 3, 8);
    assert_eq!(byte(grown.start.0 as usize, 1), 4);
    // SAFETY: shrinks it again, by what the allocator does not know of.
    assert_eq!(unsafe { libc::sbrk(-(1 << 20)) } as usize, before + (1 << 20));
    assert!(!table::lock().touches(grown), "what was given back was not seen");
    assert_eq!(released(grown).len(), 8);
    // SAFETY: grows the heap again, by its system call.
    let now = unsafe { libc::syscall(libc::SYS_brk, before + (1 << 20)) };
    assert_eq!((now as usize, byte(grown.start.0 as usize, 1)), (before + (1 << 20), 0));
    assert!(table::lock().is_foldable(grown), "what has grown by number was not seen");
    // SAFETY: what cannot be: the stack and libraries are in the way.
    assert_eq!(unsafe { libc::sbrk(1 << 46) } as isize, -1);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENOMEM));
    // SAFETY: as at first.
    assert_eq!(unsafe { libc::syscall(libc::SYS_brk, before) } as usize, before);
    let change = || {
        // SAFETY: grows the heap, and shrinks it by that.
        unsafe { libc::sbrk(1 << 20) };
        // SAFETY: as above.
        unsafe { libc::sbrk(-(1 << 20)) };
    };
    assert!(super::waits_for_the_table(change), "the heap has changed during a section");
}

#[test]
fn heap_that_nobody_follows_is_not_enrolled() {
    member();
    // SAFETY: asks where the heap ends.
    let end = unsafe { libc::sbrk(0) } as usize;
    let last = pages(end.next_multiple_of(PAGE_BYTES) - PAGE_BYTES, 1);
    assert_eq!(advise(last.start.0 as usize, 1, libc::MADV_MERGEABLE), Ok(()));
    assert!(!table::lock().touches(last));
}
