//! Threads that sleep on memory of this very process, and what wakes them.

use super::*;
use crate::MemberMemory;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

fn open() -> Option<Userfault> {
    Userfault::open(Purpose::Follow).inspect_err(|e| eprintln!("skipped: no userfaultfd here: {e}")).ok()
}

/// A page that is never unmapped, because a thread may still sleep on it when a test has failed.
fn page() -> (PageRange, &'static AtomicU64) {
    let memory = MemberMemory::new(1).unwrap();
    let range = memory.range();
    memory.forget();
    // SAFETY: aligned, and within a mapping that lasts as long as the process.
    (range, unsafe { AtomicU64::from_ptr(range.start.0 as usize as *mut u64) })
}

/// Waits until a thread sleeps on memory that is registered.
fn wait_for_sleeper(watch: &Userfault) {
    let began = Instant::now();
    while !matches!(watch.next_message(), Ok(Some(Message::Fault(..)))) {
        assert!(began.elapsed() < Duration::from_secs(20), "nobody touches the page");
        std::thread::yield_now();
    }
}

#[test]
fn unregistering_wakes_those_who_sleep_on_a_protected_page() {
    let Some(watch) = open() else { return };
    let (page, touched) = page();
    touched.store(1, Ordering::Relaxed);
    watch.register(page, Watch::Writes).unwrap();
    watch.protect(page, true).unwrap();
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || done.send(touched.swap(2, Ordering::Relaxed)));
    wait_for_sleeper(&watch);
    watch.unregister(page).unwrap();
    assert_eq!(is_done.recv_timeout(Duration::from_secs(10)), Ok(1), "the writer sleeps on");
}

/// The kernel wakes first and ends the handling then. A thread that touches the page in between falls asleep.
#[test]
fn touch_during_unregistering_does_not_sleep_for_ever() {
    const TIME: Duration = Duration::from_secs(3);
    let Some(watch) = open() else { return };
    let (page, touched) = page();
    let (touches, stop) = ([const { AtomicU64::new(0) }; 2], AtomicBool::new(false));
    std::thread::scope(|scope| {
        for counter in &touches {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    touched.load(Ordering::Relaxed);
                    counter.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let end = Instant::now() + TIME;
        let sleeper = (0_u64..).take_while(|_| Instant::now() < end).find(|_| {
            take_page_away(&watch, page, touched);
            // Everybody goes on.
            let before = touches.each_ref().map(|counter| counter.load(Ordering::Relaxed));
            let goes_on = || touches.iter().zip(before).all(|(counter, then)| counter.load(Ordering::Relaxed) > then);
            let began = Instant::now();
            while !goes_on() && began.elapsed() < Duration::from_secs(5) {
                std::thread::yield_now();
            }
            !goes_on()
        });
        stop.store(true, Ordering::Relaxed);
        watch.wake(page).unwrap();
        assert_eq!(sleeper, None, "in this turn, a thread fell asleep on memory that nobody handles");
    });
}

/// Takes a page out of reach for a moment, and leaves no page there.
fn take_page_away(watch: &Userfault, page: PageRange, touched: &AtomicU64) {
    let stage = MemberMemory::new(1).unwrap();
    touched.store(1, Ordering::Relaxed);
    for range in [page, stage.range()] {
        watch.register(range, Watch::Missing).unwrap();
    }
    // SAFETY: nobody needs the page's content. Those who touch it sleep until it is unregistered.
    unsafe { watch.move_pages(page, stage.range().start) };
    watch.unregister(page).unwrap();
}

#[test]
fn huge_page_is_never_moved_whole() {
    let Some(watch) = open() else { return };
    let (from, to) = (MemberMemory::new(HUGE_PAGES).unwrap(), MemberMemory::new(HUGE_PAGES).unwrap());
    watch.register(to.range(), Watch::Missing).unwrap();
    // SAFETY: nobody uses either memory.
    let moved = unsafe { watch.move_pages(from.range(), to.range().start) };
    assert_eq!(moved, Moved { pages: 0, stopped_by: Some(Errno::INVAL) });
}

#[test]
fn survey_finds_what_three_scans_find() {
    let Ok(notes) = Userfault::open(Purpose::Note) else { return eprintln!("skipped: no notes of writes here") };
    let pagemap = host::Pagemap::open(std::process::id()).unwrap();
    let memory = MemberMemory::new(4 * HUGE_PAGES).unwrap();
    let range = memory.range();
    let use_one_in = |step: usize, of: PageRange| {
        (0..of.pages).step_by(step).for_each(|n| {
            // SAFETY: aligned, and within the mapping, which lasts until the end of this test.
            unsafe { AtomicU64::from_ptr(of.start.add_pages(n).0 as usize as *mut u64) }
                .store(n + 1, Ordering::Relaxed);
        });
    };
    let agrees = || {
        let survey = pagemap.survey(range.start, range.end()).unwrap();
        assert_eq!(survey.unwatched, pagemap.unwatched_ranges(range.start, range.end()).unwrap());
        assert_eq!(survey.written, pagemap.written_ranges(range.start, range.end()).unwrap());
        assert_eq!(survey.huge, pagemap.huge_ranges(range.start, range.end()).unwrap());
        [&survey.unwatched, &survey.written].map(|found| found.iter().map(|range| range.pages).sum::<u64>())
    };
    use_one_in(3, PageRange { pages: HUGE_PAGES, ..range });
    use_one_in(1, PageRange { start: range.start.add_pages(HUGE_PAGES), pages: 2 * HUGE_PAGES });
    let [unwatched, written] = agrees();
    assert!(unwatched >= HUGE_PAGES && written == 0, "{unwatched} unwatched, {written} written");
    let watched = PageRange { pages: 2 * HUGE_PAGES, ..range };
    notes.register(watched, Watch::Writes).unwrap();
    let [still_unwatched, written] = agrees();
    assert!(
        still_unwatched < unwatched && written > 0,
        "{still_unwatched} of {unwatched} unwatched, {written} written"
    );
    pagemap.take_written(range.start, range.end()).unwrap();
    assert_eq!(agrees(), [still_unwatched, 0], "nothing was written since");
    use_one_in(7, PageRange { pages: HUGE_PAGES, ..range });
    assert!(agrees()[1] >= HUGE_PAGES / 7, "written pages");
}

#[test]
fn discarded_memory_that_is_used_again_reads_as_written() {
    let Ok(notes) = Userfault::open(Purpose::Note) else { return eprintln!("skipped: no notes of writes here") };
    let pagemap = host::Pagemap::open(std::process::id()).unwrap();
    // Some pages of a look-out, and two megabytes that may be a huge page.
    let memory = MemberMemory::new(3 * HUGE_PAGES).unwrap();
    let range = memory.range();
    let use_all = || {
        (0..range.pages).for_each(|n| {
            // SAFETY: aligned, and within the mapping, which lasts until the end of this test.
            unsafe { AtomicU64::from_ptr(range.start.add_pages(n).0 as usize as *mut u64) }.store(n, Ordering::Relaxed);
        });
    };
    use_all();
    notes.register(range, Watch::Writes).unwrap();
    let written = || {
        let ranges = pagemap.take_written(range.start, range.end()).unwrap();
        let huge = pagemap.huge_ranges(range.start, range.end()).unwrap();
        ranges.iter().chain(&huge).map(|range| range.pages).sum::<u64>()
    };
    written();
    assert_eq!(pagemap.take_written(range.start, range.end()).unwrap(), [], "nothing was written since");
    for pages in [3, range.pages] {
        let part = PageRange { pages, ..range };
        // SAFETY: the contents of this memory are of no use to anybody.
        let discarded = unsafe {
            libc::madvise(part.start.0 as usize as *mut _, pages_to_bytes(pages) as usize, libc::MADV_DONTNEED)
        };
        assert_eq!(discarded, 0);
        written();
        use_all();
        assert!(
            written() >= pages,
            "{pages} pages were discarded, and do not read as written when they are there again"
        );
    }
}
