//! Discards of memory that maps the pool from the first page to the last.

use super::*;
use std::sync::atomic::AtomicU32;

unsafe extern "C" {
    fn pthread_cancel(thread: libc::pthread_t) -> i32;
    fn pthread_setcancelstate(state: i32, old: *mut i32) -> i32;
}

/// `PTHREAD_CANCEL_DISABLE`
const DISABLE: i32 = 1;

/// Memory of four pages that map slots from `slot` on.
fn folded(pool: &OwnedFd, slot: usize) -> usize {
    let at = enrolled(4);
    fold(pool, at, slot, 4);
    at
}

#[test]
fn discard_of_slots_alone_is_complete_without_the_kernel() {
    let pool = pool();
    for discard in [libc::MADV_DONTNEED, libc::MADV_FREE] {
        let at = folded(&pool, 100);
        advise(at, 2, libc::MADV_NOHUGEPAGE).unwrap();
        advise(at + 2 * PAGE_BYTES, 2, libc::MADV_HUGEPAGE).unwrap();
        assert_eq!(advise(at, 4, discard), Ok(()));
        (0..4).for_each(|page| assert_eq!(byte(at, page), 0, "page {page} after {discard}"));
        let mapped = maps::mappings(pages(at, 4), true).unwrap();
        let huge: Vec<_> = mapped.iter().map(|m| (m.anonymous, m.range.pages, m.advice.huge)).collect();
        assert_eq!(huge, [(true, 2, Some(false)), (true, 2, Some(true))]);
        assert_eq!(released(pages(at, 4)), [100, 101, 102, 103]);
        assert!(table::lock().is_foldable(pages(at, 4)));
        unmap_all(at, 4);
    }
}

#[test]
fn memory_that_was_locked_past_the_hooks_is_not_discarded() {
    let pool = pool();
    let at = folded(&pool, 110);
    let locked = [at + 2 * PAGE_BYTES, 2 * PAGE_BYTES, 0, 0, 0, 0];
    // SAFETY: locking changes no contents.
    let answer = unsafe { raw::call(libc::SYS_mlock, locked) };
    if answer != 0 {
        eprintln!("skipped: cannot lock two pages: error {answer}");
        return;
    }
    (2..4).for_each(|page| write(at, page, 0xDD));
    assert_eq!(advise(at, 4, libc::MADV_DONTNEED), Err(libc::EINVAL));
    assert_eq!([byte(at, 2), byte(at, 3)], [0xDD; 2]);
    unmap_all(at, 4);
}

/// The kernel gives up at the first locked page, also where the table knows nothing of it.
#[test]
fn nothing_behind_a_locked_page_is_discarded() {
    let pool = pool();
    for discard in [libc::MADV_DONTNEED, libc::MADV_FREE] {
        let at = folded(&pool, 120);
        let unknown = table::lock().known(pages(at, 1))[0].0;
        table::lock().forget(unknown);
        let fresh = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let mapping = [at, PAGE_BYTES, READ_WRITE.into(), fresh as usize, usize::MAX, 0];
        // SAFETY: the test's own page.
        assert_eq!(unsafe { raw::call(libc::SYS_mmap, mapping) }, at as isize);
        write(at, 0, 0xDD);
        // SAFETY: locking changes no contents.
        if unsafe { raw::call(libc::SYS_mlock, [at, PAGE_BYTES, 0, 0, 0, 0]) } != 0 {
            return eprintln!("skipped: cannot lock a page");
        }
        assert_eq!(advise(at, 4, discard), Err(libc::EINVAL));
        assert_eq!([0, 1, 2, 3].map(|page| byte(at, page)), [0xDD, 121, 122, 123], "after {discard}");
        assert_eq!(released(pages(at + PAGE_BYTES, 3)), []);
        unmap_all(at, 4);
    }
}

/// The C library ends such a thread in the first of its functions that may wait, `open` and `close` among them. In a
/// hook, the table would stay locked.
#[test]
fn thread_that_is_to_be_cancelled_leaves_the_hook_first() {
    static LEFT: AtomicU32 = AtomicU32::new(0);
    let pool = pool();
    let at = folded(&pool, 120);
    let discarding = std::thread::spawn(move || {
        // SAFETY: takes and changes nothing.
        let own = unsafe { libc::pthread_self() };
        // SAFETY: asks for this thread's own end, which comes when it next calls such a function.
        assert_eq!(unsafe { pthread_cancel(own) }, 0);
        let answer = advise(at, 4, libc::MADV_DONTNEED);
        // SAFETY: from here on, the thread does not end before its time.
        unsafe { pthread_setcancelstate(DISABLE, std::ptr::null_mut()) };
        assert_eq!(answer, Ok(()));
        LEFT.store(1, Ordering::Relaxed);
    });
    let _ = discarding.join();
    assert_eq!(LEFT.load(Ordering::Relaxed), 1);
    assert_eq!(byte(at, 3), 0);
    unmap_all(at, 4);
}
