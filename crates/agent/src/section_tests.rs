//! The critical section on memory of this very process, with threads that use it meanwhile.

use super::*;
use crate::refold::{self, Part};
use crate::table::{self, Traits};
use crate::testing::map_anonymous_over;
use crate::testing::{
    Member, advise, alone, content, discard_past_hooks, fold, pool, section, shows_advice, spin, traits, witness,
};
use crate::unfold::Unfold;
use crate::witness::Witness;
use act::SoftReader;
use host::Pagemap;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

#[test]
fn equal_pages_are_folded_and_others_are_as_they_were() {
    let Some(mut section) = section() else { return };
    let (pool, member) = (pool(), Member::new(8));
    member.word(3, 100).store(77, Ordering::Relaxed);
    let outcomes = fold(&mut section, member.run(0, 8), Some((&pool, 0)));
    let expected: Vec<_> = (0..8).map(|n| if n == 3 { Outcome::Changed } else { Outcome::Folded }).collect();
    assert_eq!(outcomes, expected);
    assert_eq!(member.in_pool(), 7);
    assert_eq!(member.word(3, 100).load(Ordering::Relaxed), 77);
    for n in 0..8 {
        assert_eq!(member.word(n, 0).load(Ordering::Relaxed), n + 1);
    }
    // After a write, the page is private to the member again, and the slot is as it was.
    member.word(5, 1).store(5, Ordering::Relaxed);
    assert_eq!((member.in_pool(), member.word(5, 0).load(Ordering::Relaxed)), (6, 6));
    let slot = pool.slots(PoolSlot::new(0, 5).unwrap(), 1).unwrap();
    let mut copy = [1; PAGE_BYTES];
    // SAFETY: the slot lies in the view.
    unsafe { act::copy_page(slot.start, &mut copy) };
    assert_eq!(copy, content(5));
    // A page that is put back can be moved again.
    member.word(3, 100).store(0, Ordering::Relaxed);
    assert_eq!(fold(&mut section, member.run(3, 1), Some((&pool, 3))), [Outcome::Folded]);
    // One that was broken in the pool's mapping cannot, and keeps what was written.
    assert_eq!(fold(&mut section, member.run(5, 1), Some((&pool, 5))), [Outcome::Gone]);
    assert_eq!(member.word(5, 1).load(Ordering::Relaxed), 5);
}

#[test]
fn zeros_are_given_back_and_read_as_zeros() {
    let Some(mut section) = section() else { return };
    let member = Member::new(4);
    for n in [0, 1, 3] {
        (0..PAGE_BYTES / 8).for_each(|i| member.word(n, i).store(0, Ordering::Relaxed));
    }
    let outcomes = fold(&mut section, member.run(0, 4), None);
    assert_eq!(outcomes, [Outcome::Folded, Outcome::Folded, Outcome::Changed, Outcome::Folded]);
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    let mut entries = Vec::new();
    pagemap.read(member.run(0, 4).start, 4, &mut entries).unwrap();
    let present: Vec<_> = entries.iter().map(|e| e.present()).collect();
    assert_eq!(present, [false, false, true, false]);
    member.word(1, 9).store(9, Ordering::Relaxed);
    assert_eq!([0, 1, 3].map(|n| member.word(n, 9).load(Ordering::Relaxed)), [0, 9, 0]);
    assert_eq!(member.word(2, 0).load(Ordering::Relaxed), 3);
}

#[test]
fn fold_is_undone_when_something_was_opened_meanwhile() {
    let Some(mut section) = section() else { return };
    let (pool, member) = (pool(), Member::new(4));
    let mut outcomes = [Outcome::Gone; 4];
    let source = Some(Source { pool: &pool, first: PoolSlot::new(0, 0).unwrap() });
    let before = openings::number().wrapping_sub(1);
    let part = super::Part { pages: 4, source };
    section.fold(&mut table::lock(), member.run(0, 4), &[part], before, &mut outcomes);
    assert_eq!(outcomes, [Outcome::Unpinned; 4]);
    assert_eq!(member.in_pool(), 0);
    assert_eq!(member.word(2, 0).load(Ordering::Relaxed), 3);
}

#[test]
fn pages_that_are_not_there_are_left_out() {
    let Some(mut section) = section() else { return };
    let (pool, member) = (pool(), Member::new(6));
    for hole in [0, 3] {
        // SAFETY: the page is this test's, which misses nothing of it.
        unsafe { map_anonymous_over(member.run(hole, 1)) }.unwrap();
    }
    let outcomes = fold(&mut section, member.run(0, 6), Some((&pool, 0)));
    assert_eq!(outcomes.iter().filter(|o| **o == Outcome::Folded).count(), 4, "{outcomes:?}");
    assert_eq!((outcomes[0], outcomes[3]), (Outcome::Gone, Outcome::Gone));
    assert_eq!(member.word(3, 0).load(Ordering::Relaxed), 0);
}

#[test]
fn a_page_that_a_child_shares_is_refused() {
    if !alone("section::tests::a_page_that_a_child_shares_is_refused") {
        return;
    }
    let Some(mut section) = section() else { return };
    let (pool, member) = (pool(), Member::new(2));
    // SAFETY: the child does nothing but wait for its end.
    let child = unsafe { libc::fork() };
    if child == 0 {
        loop {
            // SAFETY: takes no argument.
            unsafe { libc::pause() };
        }
    }
    assert_eq!(fold(&mut section, member.run(0, 2), Some((&pool, 0))), [Outcome::Busy; 2]);
    // SAFETY: the child is ours and not waited for yet.
    unsafe { libc::kill(child, libc::SIGKILL) };
    let mut status = 0;
    // SAFETY: `status` is ours.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    // The kernel finds out that nobody shares them any more when they are written next.
    assert_eq!(fold(&mut section, member.run(0, 1), Some((&pool, 0))), [Outcome::Busy]);
    crate::fold::reclaim(&Pagemap::open(std::process::id()).unwrap(), member.run(0, 2));
    assert_eq!(fold(&mut section, member.run(0, 2), Some((&pool, 0))), [Outcome::Folded; 2]);
}

/// Whether the kernel may write (or else read) a page for us.
pub fn kernel_may(write: bool, page: PageRange) -> bool {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let at = page.start.0 as usize as *mut u8;
    if write {
        writer.write_all(b"x").unwrap();
        // SAFETY: where the kernel may not write, it says so; where it may, the page is this test's.
        1 == unsafe { libc::read(reader.as_raw_fd(), at.cast(), 1) }
    } else {
        // SAFETY: where the kernel may not read, it says so.
        1 == unsafe { libc::write(writer.as_raw_fd(), at.cast(), 1) }
    }
}

#[test]
fn memory_without_write_access_is_unfolded_as_it_is() {
    let Some(mut section) = section() else { return };
    let mut unfold = Unfold::new(Arc::clone(section.following()));
    let (pool, member) = (pool(), Member::new(6));
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    assert_eq!(fold(&mut section, member.run(0, 6), Some((&pool, 0))), [Outcome::Folded; 6]);
    for (first, access) in [(0, libc::PROT_READ), (3, libc::PROT_NONE)] {
        let run = member.run(first, 3);
        // One of these pages was written, and is private already.
        member.word(first + 1, 5).store(5, Ordering::Relaxed);
        // SAFETY: the pages are this test's.
        assert_eq!(unsafe { libc::mprotect(run.start.0 as usize as *mut _, 3 * PAGE_BYTES, access) }, 0);
        let traits = Traits { access: access as u8, ..traits() };
        unfold
            .run(&mut table::lock(), &pagemap, run, (&pool, PoolSlot::new(0, first as u32).unwrap()), traits)
            .unwrap();
        for n in 0..3 {
            let page = member.run(first + n, 1);
            assert!(!kernel_may(true, page), "{access}: page {n} can be written");
            assert_eq!(kernel_may(false, page), access == libc::PROT_READ, "{access}: page {n}");
        }
        // SAFETY: the pages are this test's.
        unsafe { libc::mprotect(run.start.0 as usize as *mut _, 3 * PAGE_BYTES, libc::PROT_READ | libc::PROT_WRITE) };
    }
    assert_eq!(member.in_pool(), 0);
    for n in 0..6 {
        assert_eq!(member.word(n, 0).load(Ordering::Relaxed), n + 1);
        assert_eq!(member.word(n, 5).load(Ordering::Relaxed), if n % 3 == 1 { 5 } else { 0 });
    }
    let broken: u64 = table::lock().pooled_pages(member.0.range()).iter().map(|range| range.pages).sum();
    assert_eq!((table::lock().slot_runs(member.0.range()), broken), (Vec::new(), 2));
}

#[test]
fn unfolded_memory_keeps_advice() {
    let Some(mut section) = section() else { return };
    let mut unfold = Unfold::new(Arc::clone(section.following()));
    let (pool, member, pagemap) = (pool(), Member::new(4), Pagemap::open(std::process::id()).unwrap());
    advise(&member);
    let run = member.0.range();
    assert_eq!(fold(&mut section, run, Some((&pool, 0))), [Outcome::Folded; 4]);
    let (slot, traits) = (PoolSlot::new(0, 0).unwrap(), table::lock().traits(run).unwrap());
    unfold.run(&mut table::lock(), &pagemap, run, (&pool, slot), traits).unwrap();
    assert_eq!((member.in_pool(), member.word(3, 0).load(Ordering::Relaxed)), (0, 4));
    assert!(shows_advice(run), "{:?}", crate::maps::mappings(run, true));
}

/// The program itself may leave marks in place of absent pages. Once, such marks made the agent release slots that
/// were still mapped.
#[test]
fn absent_protected_page_is_not_broken() {
    let Some(mut section) = section() else { return };
    let (pool, member) = (pool(), Member::new(4));
    assert_eq!(fold(&mut section, member.run(0, 4), Some((&pool, 0))), [Outcome::Folded; 4]);
    let all = member.0.range();
    // SAFETY: the pages are this test's, and the pool holds what they hold.
    unsafe { libc::madvise(all.start.0 as usize as *mut _, 4 * PAGE_BYTES, libc::MADV_DONTNEED) };
    let watch = section.following().watch();
    // Our userfaultfd is told nothing of what the program does with its own: as if these pages had not been followed.
    watch.unregister(all).unwrap();
    let notes = section.notes().unwrap();
    notes.register(all, Watch::Writes).unwrap();
    notes.protect(all, true).unwrap();
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    let mut entries = Vec::new();
    pagemap.read(all.start, 4, &mut entries).unwrap();
    assert!(entries.iter().all(|e| !e.present() && e.swapped()), "{entries:?}");
    assert_eq!(pagemap.private_ranges(all.start, all.end()).unwrap(), []);
    member.word(2, 1).store(9, Ordering::Relaxed);
    assert_eq!(pagemap.private_ranges(all.start, all.end()).unwrap(), [member.run(2, 1)]);
}

/// Half of the pages are folded and unfolded; the others differ from their slots, and are put back.
#[test]
fn discards_past_the_hooks_are_not_undone() {
    const PAGES: u64 = 16;
    const ROUNDS: u64 = 1500;
    let Some(mut section) = section() else { return };
    let following = Arc::clone(section.following());
    following.expect_discards();
    let (pool, member, pagemap) = (pool(), Member::new(PAGES), Pagemap::open(std::process::id()).unwrap());
    let (mut unfold, mut folded) = (Unfold::new(following), 0);
    let (begin, end, stop) = (Barrier::new(2), Barrier::new(2), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let discarding = scope.spawn(|| discard_in_rounds(&member, ROUNDS, (&begin, &end)));
        // More threads than processors: the kernel tells of a discard, and others touch the page before it is done.
        let _stop = Stop(&stop);
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    (0..PAGES).for_each(|page| _ = member.word(page, 1).load(Ordering::Relaxed));
                }
            });
        }
        for _ in 0..ROUNDS {
            // SAFETY: the other thread waits.
            unsafe { map_anonymous_over(member.0.range()) }.unwrap();
            table::lock().discard(member.0.range());
            member.write_content();
            begin.wait();
            let outcomes = fold(&mut section, member.run(0, PAGES / 2), Some((&pool, 0)));
            folded += count_folded(&outcomes);
            fold(&mut section, member.run(PAGES / 2, PAGES / 2), Some((&pool, 0)));
            unfold_what_can_be(&mut unfold, &pagemap, &member, &pool);
            end.wait();
            end.wait();
        }
        let wrong = discarding.join().unwrap();
        stop.store(true, Ordering::Relaxed);
        assert!(wrong.is_empty(), "not zeros, in round and page: {wrong:?}");
    });
    assert!(folded as u64 > ROUNDS, "{folded} folds");
}

/// Discards every third page in each round, at another moment of the fold each time. Returns the rounds and pages
/// that did not read as zeros: right after the discard, or when the other thread was done with them.
fn discard_in_rounds(member: &Member, rounds: u64, (begin, end): (&Barrier, &Barrier)) -> Vec<(u64, u64)> {
    let mut wrong = Vec::new();
    let pages = (0..member.0.range().pages).step_by(3);
    for round in 0..rounds {
        begin.wait();
        spin(Duration::from_nanos(round * 7919 % 400_000));
        for page in pages.clone() {
            discard_past_hooks(member, page);
            wrong.extend((!is_zero(member, page)).then_some((round, page)));
        }
        end.wait();
        wrong.extend(pages.clone().filter(|page| !is_zero(member, *page)).map(|page| (round, page)));
        end.wait();
    }
    wrong
}

/// Whether a page's first and last words are zeros.
fn is_zero(member: &Member, page: u64) -> bool {
    [0, PAGE_BYTES / 8 - 1].map(|word| member.word(page, word).load(Ordering::Relaxed)) == [0; 2]
}

fn count_folded(outcomes: &[Outcome]) -> usize {
    outcomes.iter().filter(|o| **o == Outcome::Folded).count()
}

fn unfold_what_can_be(unfold: &mut Unfold, pagemap: &Pagemap, member: &Member, pool: &PoolView) {
    let mut table = table::lock();
    for run in table.slot_runs(member.0.range()) {
        let range = PageRange { start: run.start, pages: run.pages.into() };
        let _ = unfold.run(&mut table, pagemap, range, (pool, run.slot), traits());
    }
}

/// Threads write a counter into every page, and would see if one of their writes were lost. Meanwhile, pages are
/// folded, broken, unfolded and folded again. Seen with the comparison taken out of the section: both writers lost a
/// write within two seconds.
#[test]
fn no_write_is_lost_to_threads_that_never_stop() {
    let Some(mut folding) = Folding::new() else { return };
    let member = Arc::clone(&folding.member);
    let (stop, writes) = (AtomicBool::new(false), AtomicU64::new(0));
    let (mut folded, mut unfolded, mut refolded) = (0, 0, 0);
    std::thread::scope(|scope| {
        for writer in 0..2 {
            let (member, stop, writes) = (&member, &stop, &writes);
            scope.spawn(move || write_for_ever(member, writer, stop, writes));
        }
        let _stop = Stop(&stop);
        let began = Instant::now();
        let end = began + Duration::from_secs(2);
        // On a busy machine it takes longer until enough has happened.
        let enough = |folded, unfolded, refolded| folded > 1000 && unfolded > 100 && refolded > 100;
        while Instant::now() < end || !enough(folded, unfolded, refolded) && Instant::now() < end + 20 * (end - began) {
            folded += folding.fold_all();
            unfolded += folding.unfold_all();
            folding.find_broken();
            refolded += folding.refold_all();
            // As if the program had discarded the broken pages, with nobody looking: else all would soon be broken.
            stop_the_world(&member, &mut |page| {
                // SAFETY: nobody uses the page: its writer waits.
                unsafe { map_anonymous_over(member.run(page, 1)) }.unwrap();
                table::lock().discard(member.run(page, 1));
            });
        }
    });
    assert!(
        folded > 1000 && unfolded > 100 && refolded > 100 && writes.load(Ordering::Relaxed) > 10_000,
        "{folded} {unfolded} {refolded} {writes:?}"
    );
}

/// Pages of the member whose writers never stop.
const PAGES: u64 = 256;
/// Index of the word in each page that holds the counter.
const WORD: usize = 64;

/// The agent's side of [`no_write_is_lost_to_threads_that_never_stop`].
struct Folding {
    section: Section,
    unfold: Unfold,
    pool: PoolView,
    member: Arc<Member>,
    pagemap: Pagemap,
    witness: Witness,
    reader: SoftReader,
}

impl Folding {
    fn new() -> Option<Self> {
        let section = section()?;
        let unfold = Unfold::new(Arc::clone(section.following()));
        let (pool, member) = (pool(), Arc::new(Member::new(PAGES).not_inherited()));
        let pagemap = Pagemap::open(std::process::id()).unwrap();
        let (witness, reader) = (witness(), SoftReader::new(refold::GROUP_PAGES).unwrap());
        Some(Self { section, unfold, pool, member, pagemap, witness, reader })
    }

    /// Folds runs of up to 16 pages. Returns how many pages were folded.
    fn fold_all(&mut self) -> usize {
        let mut folded = 0;
        for first in 0..PAGES {
            if !table::lock().is_foldable(self.member.run(first, 1)) {
                continue;
            }
            let pages = (first..PAGES.min(first + 16))
                .take_while(|page| table::lock().is_foldable(self.member.run(*page, 1)))
                .count() as u64;
            let run = self.member.run(first, pages);
            folded += count_folded(&fold(&mut self.section, run, Some((&self.pool, first as u32))));
        }
        folded
    }

    /// Returns how many runs were unfolded.
    fn unfold_all(&mut self) -> usize {
        let mut unfolded = 0;
        let runs = table::lock().slot_runs(self.member.0.range());
        for run in runs {
            for (piece, target) in pieces(run.start, run.pages.into(), Target::Slot(run.slot)) {
                let Target::Slot(slot) = target else { continue };
                let mut table = table::lock();
                self.unfold.run(&mut table, &self.pagemap, piece, (&self.pool, slot), traits()).unwrap();
                unfolded += 1;
            }
        }
        unfolded
    }

    /// Has the table know which pages are broken.
    fn find_broken(&self) {
        let range = self.member.0.range();
        for run in self.pagemap.private_ranges(range.start, range.end()).unwrap() {
            let mut table = table::lock();
            table.slot_runs(run).iter().for_each(|run| {
                table.set_broken(PageRange { start: run.start, pages: run.pages.into() });
            });
        }
    }

    /// Folds broken pages again. Returns how many were folded.
    fn refold_all(&mut self) -> usize {
        let range = self.member.0.range();
        let broken = table::lock().broken_pages(range);
        self.witness.end();
        self.witness.call(&table::lock(), &self.pagemap, &broken).unwrap();
        let (mut parts, mut outcomes) = (Vec::new(), Vec::new());
        for run in broken {
            for (piece, _) in pieces(run.start, run.pages, Target::Zero) {
                let first = (piece.start.page() - range.start.page()) as u32;
                let source = Some(Source { pool: &self.pool, first: PoolSlot::new(0, first).unwrap() });
                parts.push(Part { range: piece, source, at: outcomes.len() });
                outcomes.resize(outcomes.len() + piece.pages as usize, Outcome::Gone);
            }
        }
        let mut left = &parts[..];
        while !left.is_empty() {
            let generation = openings::number();
            let following = &**self.section.following();
            let with = (&self.pagemap, following, &mut self.reader, &mut self.witness);
            let (done, _) = refold::fold_group(&mut table::lock(), with, left, generation, &mut outcomes);
            left = &left[done..];
        }
        count_folded(&outcomes)
    }
}

/// Lets the writers end, also when a check failed.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Writes to the pages in random order. Each time, it looks whether its last write is still there, and whether the
/// page's content is.
fn write_for_ever(member: &Member, writer: u64, stop: &AtomicBool, writes: &AtomicU64) {
    let mut counts = vec![0_u64; PAGES as usize];
    let mut random = writer + 1;
    while !stop.load(Ordering::Relaxed) {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let page = (random >> 33) % (PAGES / 2) * 2 + writer;
        let (lock, word) = (&LOCKS[page as usize], member.word(page, WORD));
        let held = lock.lock().unwrap();
        let count = &mut counts[page as usize];
        let seen = word.load(Ordering::Relaxed);
        assert_eq!(seen, *count, "a write to page {page} is lost");
        // Mostly zero, which is what the slot has there, so that it can be folded.
        *count = if random & 7 == 0 { *count + 1 } else { 0 };
        word.store(*count, Ordering::Relaxed);
        let intact = member.word(page, 0).load(Ordering::Relaxed);
        assert_eq!(intact, page + 1, "page {page} is not what it was");
        writes.fetch_add(1, Ordering::Relaxed);
        drop(held);
    }
}

/// Locks of the pages: the writer of a page holds its lock while it writes.
static LOCKS: [std::sync::Mutex<()>; PAGES as usize] = [const { std::sync::Mutex::new(()) }; PAGES as usize];

/// Discards each broken page and writes its content anew, so that it can be moved again.
fn stop_the_world(member: &Member, discard: &mut impl FnMut(u64)) {
    for page in 0..PAGES {
        let broken = !table::lock().broken_pages(member.run(page, 1)).is_empty();
        let _held = LOCKS[page as usize].lock().unwrap();
        if broken {
            let kept: Vec<u64> = (0..PAGE_BYTES / 8).map(|i| member.word(page, i).load(Ordering::Relaxed)).collect();
            discard(page);
            kept.iter().enumerate().for_each(|(i, word)| member.word(page, i).store(*word, Ordering::Relaxed));
        }
    }
}

#[test]
fn refused_pages_are_left_where_they_are_and_counted() {
    for (error, outcome) in [
        (Errno::AGAIN, Outcome::Busy),
        (Errno::BUSY, Outcome::Busy),
        (Errno::NOMEM, Outcome::NoMemory),
        (Errno::NOENT, Outcome::Gone),
        (Errno::INVAL, Outcome::Gone),
    ] {
        assert_eq!(refusal(error), outcome, "{error}");
    }
    let Some(mut section) = section() else { return };
    let (pool, member) = (pool(), Member::new(3));
    // SAFETY: the page is this test's, which misses nothing of it.
    unsafe { map_anonymous_over(member.run(1, 1)) }.unwrap();
    let outcomes = fold(&mut section, member.run(0, 3), Some((&pool, 0)));
    assert_eq!(outcomes, [Outcome::Folded, Outcome::Gone, Outcome::Folded]);
}

#[test]
fn only_section_moves_pages() {
    let rooms = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut dirs = ["agent", "preload", "attached"].map(|room| rooms.join(room).join("src")).to_vec();
    let mut movers = Vec::new();
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if path.is_dir() {
                dirs.push(path);
            } else if !name.ends_with("tests.rs") && std::fs::read_to_string(&path).unwrap().contains(".move_pages(") {
                movers.push(name);
            }
        }
    }
    // Its methods borrow it exclusively, or are called by those that do, with the table's lock held.
    movers.sort();
    // `leave.rs` moves copies of its own, while the program's threads are stopped.
    assert_eq!(movers, ["leave.rs", "section.rs"]);
}
