//! The critical section where something fails on the way.

use super::tests::kernel_may;
use super::*;
use crate::testing::{Member, alone, discard_past_hooks, fold, pool, section};
use crate::{maps, table};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::mpsc;

/// Mappings that take up all that the process may have.
struct Crowd(PageRange);

impl Crowd {
    fn new() -> Self {
        let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse::<u64>().unwrap();
        let memory = MemberMemory::new(2 * most).unwrap();
        let this = Self(memory.range());
        memory.forget();
        // A page without access rights in the middle of others makes two mappings more. The last attempt may make one.
        assert!((0..most).any(|n| !this.shut(2 * n + 1)), "no limit was reached");
        this
    }

    /// Takes the access rights of a page away. Returns whether the kernel had a mapping for it.
    fn shut(&self, page: u64) -> bool {
        let at = self.0.start.add_pages(page).0 as usize as *mut _;
        // SAFETY: a page of this test's own, which nobody uses.
        0 == unsafe { libc::mprotect(at, PAGE_BYTES, libc::PROT_NONE) }
    }

    /// Makes room for one mapping.
    fn give_one(&self) {
        // SAFETY: as above.
        assert_eq!(unsafe { libc::munmap(self.0.start.add_pages(1).0 as usize as *mut _, PAGE_BYTES) }, 0);
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { libc::munmap(self.0.start.0 as usize as *mut _, pages_to_bytes(self.0.pages) as usize) };
    }
}

/// Says what a thread reads there, if it does so within ten seconds.
fn read_in_time(member: &Member, page: u64) -> Option<u64> {
    let at = std::ptr::from_ref(member.word(page, 0)) as usize;
    let (done, is_done) = mpsc::channel();
    // SAFETY: the word lies in the member's memory, which this test does not unmap while a thread may read it.
    let read = move || unsafe { (at as *const u64).read_volatile() };
    std::thread::spawn(move || done.send(read()));
    is_done.recv_timeout(Duration::from_secs(10)).ok()
}

/// A run of one part, which holds zeros if anything.
const fn one_part(pages: u64) -> [Part<'static>; 1] {
    [Part { pages, source: None }]
}

#[test]
fn registration_that_fails_half_way_leaves_nothing_armed() {
    if !alone("section::failure_tests::registration_that_fails_half_way_leaves_nothing_armed") {
        return;
    }
    let Some(mut section) = section() else { return };
    let member = std::mem::ManuallyDrop::new(Member::new(8));
    let (second, at) = (member.run(4, 4), member.run(4, 4).start.0 as usize);
    // SAFETY: the advice changes no content.
    assert_eq!(unsafe { libc::madvise(at as *mut _, 4 * PAGE_BYTES, libc::MADV_DONTDUMP) }, 0);
    table::lock().advise(second, |advice| advice.dont_dump = true);
    // Opens the stage.
    assert_eq!(fold(&mut section, member.run(0, 1), None), [Outcome::Changed]);
    let crowd = Crowd::new();
    crowd.give_one();
    // One mapping is split and registered; the other cannot be split.
    assert_eq!(fold(&mut section, member.run(2, 4), None), [Outcome::NoVma; 4]);
    drop(crowd);
    for page in 2..6 {
        discard_past_hooks(&member, page);
        assert_eq!(read_in_time(&member, page), Some(0), "page {page} is never given to anybody");
    }
    assert_eq!(fold(&mut section, member.run(0, 2), None), [Outcome::Changed; 2]);
    assert_eq!(read_in_time(&member, 1), Some(2));
}

/// A mark takes the place of the broken frame: to break one takes memory from the host.
#[test]
fn page_whose_frame_fails_while_it_is_out_does_not_hold_up_the_others() {
    if !alone("section::failure_tests::page_whose_frame_fails_while_it_is_out_does_not_hold_up_the_others") {
        return;
    }
    let Some(mut section) = section() else { return };
    let (member, all) = (Member::new(4), 4);
    let run = member.run(0, all);
    let mut outcomes = [Outcome::Gone; 4];
    section.following.hold().begin_section();
    section.open().and_then(|()| section.guard(run)).unwrap();
    section.move_out(run, &one_part(all), &mut outcomes);
    assert_eq!(outcomes, [Outcome::Folded; 4]);
    let failed = PageRange { start: section.staged(1), pages: 1 };
    // SAFETY: the page is the test's, and is given up.
    let discarded = unsafe { libc::madvise(failed.start.0 as usize as *mut _, PAGE_BYTES, libc::MADV_DONTNEED) };
    assert_eq!((discarded, section.watch().poison(failed)), (0, Ok(1)));
    let (done, is_done) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        if is_done.recv_timeout(Duration::from_secs(10)) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("the section never ends");
            std::process::exit(1);
        }
    });
    section.put_back(run, 0, false);
    done.send(()).unwrap();
    section.end(run, &one_part(all), &[Outcome::Changed; 4]);
    for page in [0, 2, 3] {
        assert_eq!(member.word(page, 0).load(Ordering::Relaxed), page + 1);
    }
    assert!(!kernel_may(false, member.run(1, 1)), "the program is not told that the page is lost");
}

/// The kernel's way into a debugged process's memory takes pages as VFIO's pins do: it does not wait.
#[test]
fn those_who_cannot_wait_are_refused_while_a_page_is_out() {
    let Some(mut section) = section() else { return };
    let member = Member::new(1);
    let (run, mut outcomes, mut word) = (member.run(0, 1), [Outcome::Gone], [0; 8]);
    let memory = std::fs::File::open("/proc/self/mem").unwrap();
    let mut take = || memory.read_exact_at(&mut word, run.start.0).map_err(|e| e.raw_os_error());
    section.following.hold().begin_section();
    section.open().and_then(|()| section.guard(run)).unwrap();
    section.move_out(run, &one_part(1), &mut outcomes);
    let while_out = take();
    section.put_back(run, 0, false);
    section.end(run, &one_part(1), &[Outcome::Changed]);
    assert_eq!((outcomes, while_out), ([Outcome::Folded], Err(Some(libc::EIO))));
    assert_eq!(take(), Ok(()));
}

/// Nobody looked between the moment at which pages were moved out and that at which slots took their place. So a
/// protection that the program had given them meanwhile was gone, and so was a lock.
#[test]
fn protection_and_lock_that_pages_get_while_they_are_out_stay() {
    if !alone("section::failure_tests::protection_and_lock_that_pages_get_while_they_are_out_stay") {
        return;
    }
    let changes: [(i64, usize); 2] =
        [(libc::SYS_mprotect, libc::PROT_READ as usize), (libc::SYS_mlock2, libc::MLOCK_ONFAULT as usize)];
    for (call, how) in changes {
        let Some(mut section) = section() else { return };
        let (pool, member, mut outcomes) = (pool(), Member::new(8), [Outcome::Gone; 4]);
        let run = member.run(2, 4);
        section.following.hold().begin_section();
        section.open().and_then(|()| section.guard(run)).unwrap();
        section.following.take_out_of_reach();
        section.move_out(run, &one_part(4), &mut outcomes);
        assert_eq!(outcomes, [Outcome::Folded; 4]);
        let arguments = [run.start.0 as usize, pages_to_bytes(run.pages) as usize, how, 0, 0, 0];
        // SAFETY: neither call changes contents.
        assert_eq!(unsafe { crate::raw::call(call, arguments) }, 0);
        let source = Source { pool: &pool, first: PoolSlot::new(0, 2).unwrap() };
        section.replace(&mut table::lock(), (run, 0), Some(source), &mut outcomes);
        section.end(run, &one_part(4), &outcomes);
        let access = section.following.mapping_of(run.start).unwrap().access;
        let is_as_set = if call == libc::SYS_mprotect { access == libc::PROT_READ as u8 } else { maps::is_locked(run) };
        assert!(is_as_set, "system call {call} was lost: {outcomes:?}");
        assert_eq!((outcomes, section.following.lost_track().is_some()), ([Outcome::NoVma; 4], true));
        (0..8).for_each(|page| assert_eq!(member.word(page, 0).load(Ordering::Relaxed), page + 1));
    }
}
