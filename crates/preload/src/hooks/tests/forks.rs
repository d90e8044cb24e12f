//! Forked children, and what they inherit.

use super::*;
use crate::testing::alone;

#[test]
fn a_forked_child_is_inert_however_it_was_made() {
    if !alone("hooks::tests::forks::a_forked_child_is_inert_however_it_was_made") {
        return;
    }
    member();
    // SAFETY: as `fork`, by the bare system call.
    let bare = || unsafe { raw::call(libc::SYS_fork, [0; 6]) } as i32;
    // SAFETY: the child calls nothing but hooks and `_exit`.
    let libc_fork = || unsafe { libc::fork() };
    for fork in [&libc_fork as &dyn Fn() -> i32, &bare] {
        let child = fork();
        if child == 0 {
            let at = fresh(4);
            let advised = advise(at, 4, libc::MADV_MERGEABLE) == Ok(());
            let inert = state() == State::Inert && !is_member();
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!(advised && inert))) };
        }
        let mut status = 0;
        // SAFETY: waits for the child just made.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    }
    assert_eq!(state(), State::Member);
}

#[test]
fn forks_and_hooks_do_not_wait_for_each_other() {
    if !alone("hooks::tests::forks::forks_and_hooks_do_not_wait_for_each_other") {
        return;
    }
    let pool = pool();
    let kept = enrolled(8);
    fold(&pool, kept, 100, 8);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (pool, over) = (&pool, &over);
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let at = enrolled(32);
                    fold(pool, at + PAGE_BYTES, thread * 40, 30);
                    assert_eq!(advise(at, 20, libc::MADV_DONTNEED), Ok(()));
                    assert!(byte(at, 19) == 0 && usize::from(byte(at, 20)) == thread * 40 + 19);
                    let _garbage = vec![thread; 1000];
                    // SAFETY: the test's own pages. Another thread may be given the place at once.
                    unsafe { memory::munmap(at as *mut c_void, 32 * PAGE_BYTES) };
                }
            });
        }
        // Allocates as the agent's thread does, which needs no table for it.
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                std::hint::black_box(vec![7_u8; 200]);
            }
        });
        for _ in 0..100 {
            // SAFETY: the child calls nothing but hooks and `_exit`.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let at = fresh(4);
                let good = byte(kept, 0) == 100 && byte(kept, 1) == 101;
                let asked = advise(at, 4, libc::MADV_MERGEABLE) == Ok(()) && state() == State::Member;
                // SAFETY: ends the child.
                unsafe { libc::_exit(i32::from(!good || asked)) };
            }
            let mut status = 0;
            // SAFETY: waits for the child just made.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert_eq!(status, 0);
        }
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn child_without_folded_memory_is_inert() {
    if !alone("hooks::tests::forks::child_without_folded_memory_is_inert") {
        return;
    }
    let at = enrolled(8);
    // SAFETY: the child calls nothing but hooks and `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let inert = state() == State::Inert && advise(at, 8, libc::MADV_DONTNEED) == Ok(());
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!inert)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
}
