//! The critical section on memory of this very process, with threads that use it meanwhile.

use super::*;
use crate::refold::{self, Part};
use crate::regain;
use crate::table;
use crate::table::Traits;
use crate::unfold::Unfold;
use crate::witness::Witness;
use host::{Pagemap, Purpose, map_anonymous_over};
use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create, open};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const SLOTS: u32 = 1024;

/// A pool whose slot `n` holds `content(n)`.
fn pool() -> PoolView {
    let file = memfd_create("pool", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, u64::from(SLOTS) * PAGE_BYTES as u64).unwrap();
    for n in 0..u64::from(SLOTS) {
        rustix::io::pwrite(&file, &content(n), n * PAGE_BYTES as u64).unwrap();
    }
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    PoolView::new(open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap(), SLOTS).unwrap()
}

fn content(n: u64) -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    page[..8].copy_from_slice(&(n + 1).to_ne_bytes());
    page[PAGE_BYTES - 8..].copy_from_slice(&(n * 7 + 1).to_ne_bytes());
    page
}

/// Memory that may be folded, whose page `n` holds `content(n)`.
struct Member(MemberMemory);

impl Member {
    fn new(pages: u64) -> Self {
        Self::of(MemberMemory::new(pages).unwrap())
    }

    fn of(memory: MemberMemory) -> Self {
        let (pages, this) = (memory.range().pages, Self(memory));
        // First of all: what is asked in is not shared with the shadows that other tests cast.
        table::lock().ask(this.0.range());
        for n in 0..pages {
            content(n).chunks_exact(8).enumerate().for_each(|(i, word)| {
                this.word(n, i).store(u64::from_ne_bytes(word.try_into().unwrap()), Ordering::Relaxed);
            });
        }
        this
    }

    fn word(&self, page: u64, word: usize) -> &AtomicU64 {
        assert!(page < self.0.range().pages && word < PAGE_BYTES / 8);
        let at = self.0.range().start.add_pages(page).0 as usize + word * 8;
        // SAFETY: aligned and within the mapping, which lives as long as `self`; everything in it is accessed as atomics.
        unsafe { AtomicU64::from_ptr(at as *mut u64) }
    }

    fn run(&self, first: u64, pages: u64) -> PageRange {
        PageRange { start: self.0.range().start.add_pages(first), pages }
    }

    /// How many of the pages are a file's.
    fn in_pool(&self) -> usize {
        let range = self.0.range();
        let (mut entries, pagemap) = (Vec::new(), Pagemap::open(std::process::id()).unwrap());
        host::make_present(range).unwrap();
        pagemap.read(range.start, range.pages, &mut entries).unwrap();
        entries.iter().filter(|e| e.present() && e.file_or_shared()).count()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        table::lock().forget(self.0.range());
    }
}

/// Of memory that may be folded.
fn traits() -> Traits {
    Traits { asked: true, ..Traits::default() }
}

fn section() -> Option<Section> {
    match Userfault::open(Purpose::MoveAndNote) {
        Ok(guard) => Some(Section::new(guard, true).unwrap()),
        Err(e) => {
            eprintln!("skipped: no userfaultfd that moves pages here: {e}");
            None
        }
    }
}

fn fold(section: &mut Section, run: PageRange, source: Option<(&PoolView, u32)>) -> Vec<Outcome> {
    let mut outcomes = vec![Outcome::Gone; run.pages as usize];
    let source = source.map(|(pool, first)| Source { pool, first: PoolSlot::new(0, first).unwrap() });
    section.fold(&mut table::lock(), run, source, references::generation(), &mut outcomes);
    outcomes
}

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
    // Written, it is the member's own again, and the slot is as it was.
    member.word(5, 1).store(5, Ordering::Relaxed);
    assert_eq!((member.in_pool(), member.word(5, 0).load(Ordering::Relaxed)), (6, 6));
    let slot = pool.slots(PoolSlot::new(0, 5).unwrap(), 1).unwrap();
    let mut copy = [1; PAGE_BYTES];
    // SAFETY: the slot lies in the view.
    unsafe { host::copy_page(slot.start, &mut copy) };
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
fn what_was_opened_meanwhile_undoes_it() {
    let Some(mut section) = section() else { return };
    let (pool, member) = (pool(), Member::new(4));
    let mut outcomes = [Outcome::Gone; 4];
    let source = Some(Source { pool: &pool, first: PoolSlot::new(0, 0).unwrap() });
    let earlier = references::generation().wrapping_sub(1);
    section.fold(&mut table::lock(), member.run(0, 4), source, earlier, &mut outcomes);
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
    // That nobody shares them any more, the kernel finds out when they are written next.
    assert_eq!(fold(&mut section, member.run(0, 1), Some((&pool, 0))), [Outcome::Busy]);
    crate::fold::reclaim(&Pagemap::open(std::process::id()).unwrap(), member.run(0, 2));
    assert_eq!(fold(&mut section, member.run(0, 2), Some((&pool, 0))), [Outcome::Folded; 2]);
}

/// Whether the kernel may write (or else read) a page for us.
fn kernel_may(write: bool, page: PageRange) -> bool {
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
fn what_may_not_be_written_is_unfolded_as_it_is() {
    let Some(mut section) = section() else { return };
    let mut unfold = Unfold::new(Userfault::open(Purpose::KeepOut).unwrap());
    let (pool, member) = (pool(), Member::new(6));
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    assert_eq!(fold(&mut section, member.run(0, 6), Some((&pool, 0))), [Outcome::Folded; 6]);
    for (first, access) in [(0, libc::PROT_READ), (3, libc::PROT_NONE)] {
        let run = member.run(first, 3);
        // One of them is the member's own before.
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

/// Marks that the program itself leaves in place of absent pages once made slots be given back that were still mapped.
#[test]
fn an_absent_page_whose_write_is_awaited_is_not_a_broken_one() {
    let Some(mut section) = section() else { return };
    let (pool, member) = (pool(), Member::new(4));
    assert_eq!(fold(&mut section, member.run(0, 4), Some((&pool, 0))), [Outcome::Folded; 4]);
    let all = member.0.range();
    // SAFETY: the pages are this test's, and the pool holds what they hold.
    unsafe { libc::madvise(all.start.0 as usize as *mut _, 4 * PAGE_BYTES, libc::MADV_DONTNEED) };
    section.guard().register(all, Watch::Writes).unwrap();
    section.guard().protect(all, true).unwrap();
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    let mut entries = Vec::new();
    pagemap.read(all.start, 4, &mut entries).unwrap();
    assert!(entries.iter().all(|e| !e.present() && e.swapped()), "{entries:?}");
    assert_eq!(pagemap.private_ranges(all.start, all.end()).unwrap(), []);
    member.word(2, 1).store(9, Ordering::Relaxed);
    assert_eq!(pagemap.private_ranges(all.start, all.end()).unwrap(), [member.run(2, 1)]);
}

/// Without a prover.
fn witness() -> Witness {
    Witness::new(PathBuf::from("/nonexistent"))
}

/// Refolds a run, and says what became of each page.
fn fold_again(
    witness: &mut Witness,
    unfold: &Unfold,
    run: PageRange,
    source: Option<(&PoolView, u32)>,
) -> Vec<Outcome> {
    let mut outcomes = vec![Outcome::Gone; run.pages as usize];
    let source = source.map(|(pool, first)| Source { pool, first: PoolSlot::new(0, first).unwrap() });
    let (mut table, pagemap) = (table::lock(), Pagemap::open(std::process::id()).unwrap());
    witness.end();
    witness.call(&table).unwrap();
    let with = (&pagemap, unfold.keep_out(), witness);
    let parts = [Part { range: run, source, at: 0 }];
    assert_eq!(refold::some(&mut table, with, &parts, references::generation(), &mut outcomes).0, 1);
    outcomes
}

/// Writes each page, as its owner, without changing it, and has it known as broken.
fn break_all(member: &Member, pages: u64) {
    (0..pages).for_each(|n| member.word(n, 3).store(0, Ordering::Relaxed));
    table::lock().set_broken(member.run(0, pages));
}

#[test]
fn broken_pages_are_folded_again() {
    let Some(mut section) = section() else { return };
    let (mut witness, unfold) = (witness(), Unfold::new(Userfault::open(Purpose::KeepOut).unwrap()));
    let (pool, member) = (pool(), Member::new(8));
    assert_eq!(fold(&mut section, member.run(0, 8), Some((&pool, 0))), [Outcome::Folded; 8]);
    break_all(&member, 8);
    member.word(3, 100).store(77, Ordering::Relaxed);
    assert_eq!(member.in_pool(), 0);
    let outcomes = fold_again(&mut witness, &unfold, member.run(0, 8), Some((&pool, 0)));
    let expected: Vec<_> = (0..8).map(|n| if n == 3 { Outcome::Changed } else { Outcome::Folded }).collect();
    assert_eq!((outcomes, member.in_pool()), (expected, 7));
    assert_eq!(member.word(3, 100).load(Ordering::Relaxed), 77);
    (0..8).for_each(|n| assert_eq!(member.word(n, 0).load(Ordering::Relaxed), n + 1));
    // Writing goes on as before.
    member.word(5, 1).store(5, Ordering::Relaxed);
    assert_eq!((member.in_pool(), member.word(5, 0).load(Ordering::Relaxed)), (6, 6));
    // A page of zeros becomes anonymous again.
    table::lock().set_broken(member.run(5, 1));
    (0..PAGE_BYTES / 8).for_each(|i| member.word(5, i).store(0, Ordering::Relaxed));
    assert_eq!(fold_again(&mut witness, &unfold, member.run(5, 1), None), [Outcome::Folded]);
    member.word(5, 9).store(9, Ordering::Relaxed);
    assert_eq!((member.word(5, 8).load(Ordering::Relaxed), member.word(5, 9).load(Ordering::Relaxed)), (0, 9));
    assert!(table::lock().is_foldable(member.run(5, 1)));
}

/// A device that answers late: reads that io_uring has begun into registered buffers, from a pipe that is empty yet. What
/// they bring is put into the page frame itself, whatever the page table says by then.
struct LateDevice {
    ring: io_uring::IoUring,
    pipe: (std::io::PipeReader, std::io::PipeWriter),
    pages: u32,
}

impl LateDevice {
    fn new() -> Option<Self> {
        let ring = io_uring::IoUring::new(256).inspect_err(|e| eprintln!("skipped: no io_uring here: {e}")).ok()?;
        Some(Self { ring, pipe: std::io::pipe().unwrap(), pages: 0 })
    }

    /// Begins to read into a word of each of these pages.
    fn begin(&mut self, member: &Member, pages: &[u64], word: usize) {
        let at = |page: &u64| std::ptr::from_ref(member.word(*page, 0)).cast_mut();
        let buffers: Vec<_> =
            pages.iter().map(|page| libc::iovec { iov_base: at(page).cast(), iov_len: PAGE_BYTES }).collect();
        // SAFETY: the pages outlive the registration, which ends in `finish`.
        unsafe { self.ring.submitter().register_buffers(&buffers) }.unwrap();
        for (n, page) in pages.iter().enumerate() {
            let fd = io_uring::types::Fd(self.pipe.0.as_raw_fd());
            let to = std::ptr::from_ref(member.word(*page, word)).cast_mut().cast();
            let entry = io_uring::opcode::ReadFixed::new(fd, to, 8, n as u16).build();
            // SAFETY: the buffer is registered, and is the test's until the read is done.
            unsafe { self.ring.submission().push(&entry) }.unwrap();
        }
        self.ring.submit().unwrap();
        self.pages = pages.len() as u32;
    }

    /// The device answers, with the same for everybody, and lets the pages go.
    fn finish(&mut self, word: u64) {
        for _ in 0..self.pages {
            self.pipe.1.write_all(&word.to_ne_bytes()).unwrap();
        }
        self.ring.submit_and_wait(self.pages as usize).unwrap();
        assert!(self.ring.completion().all(|done| done.result() == 8));
        self.ring.submitter().unregister_buffers().unwrap();
    }
}

/// Pages that were broken are folded again while a device has yet to write some of them. Seen with the look at what is shared
/// taken out of `Refold`: what was written to 30 of 30 pinned pages was lost in the first round.
#[test]
fn what_a_device_has_yet_to_write_is_not_folded_again() {
    const PAGES: u64 = 64;
    const TRIES: u64 = 100_000;
    let (Some(mut section), Some(mut device)) = (section(), LateDevice::new()) else { return };
    let (mut witness, unfold) = (witness(), Unfold::new(Userfault::open(Purpose::KeepOut).unwrap()));
    let (pool, member) = (pool(), Member::new(PAGES));
    assert_eq!(fold(&mut section, member.run(0, PAGES), Some((&pool, 0))), [Outcome::Folded; PAGES as usize]);
    let mut random = 1_u64;
    for round in 1..=TRIES / PAGES {
        break_all(&member, PAGES);
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let pinned: Vec<u64> = (0..PAGES).filter(|n| random.rotate_left(*n as u32) & 1 == 0).collect();
        device.begin(&member, &pinned, 7);
        let outcomes = fold_again(&mut witness, &unfold, member.run(0, PAGES), Some((&pool, 0)));
        device.finish(round);
        let mut lost = Vec::new();
        for page in 0..PAGES {
            let written = if pinned.contains(&page) { round } else { 0 };
            if member.word(page, 7).swap(0, Ordering::Relaxed) != written {
                lost.push(page);
            }
        }
        assert!(lost.is_empty(), "round {round}: lost is what was written to {} of {}", lost.len(), pinned.len());
        let refused: Vec<u64> = (0..PAGES).filter(|page| outcomes[*page as usize] == Outcome::Busy).collect();
        assert_eq!(refused, pinned, "round {round}: {outcomes:?}");
    }
}

/// Threads write a counter into every page, and would see if one of their writes were lost, while pages are folded, broken,
/// unfolded and folded again. Seen with the comparison taken out of the section: both writers lost a write within two seconds.
#[test]
fn no_write_is_lost_to_threads_that_never_stop() {
    const PAGES: u64 = 256;
    const WORD: usize = 64;
    let Some(mut section) = section() else { return };
    let keep_out = Userfault::open(Purpose::KeepOut).unwrap();
    let (pool, member, stop) = (pool(), Member::new(PAGES), AtomicBool::new(false));
    let (mut unfold, pagemap) = (Unfold::new(keep_out), Pagemap::open(std::process::id()).unwrap());
    let (writes, mut folded, mut unfolded, mut refolded) = (AtomicU64::new(0), 0, 0, 0);
    let mut witness = witness();
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
            for first in 0..PAGES {
                if !table::lock().is_foldable(member.run(first, 1)) {
                    continue;
                }
                let pages = (first..PAGES.min(first + 16))
                    .take_while(|page| table::lock().is_foldable(member.run(*page, 1)))
                    .count() as u64;
                let outcomes = fold(&mut section, member.run(first, pages), Some((&pool, first as u32)));
                folded += outcomes.iter().filter(|o| **o == Outcome::Folded).count();
            }
            let runs = table::lock().slot_runs(member.0.range());
            for run in runs {
                let range = PageRange { start: run.start, pages: run.pages.into() };
                for (piece, target) in pieces(range.start, range.pages, Target::Slot(run.slot)) {
                    let Target::Slot(slot) = target else { continue };
                    let mut table = table::lock();
                    unfold.run(&mut table, &pagemap, piece, (&pool, slot), traits()).unwrap();
                    unfolded += 1;
                }
            }
            let range = member.0.range();
            for run in pagemap.private_ranges(range.start, range.end()).unwrap() {
                let mut table = table::lock();
                table.slot_runs(run).iter().for_each(|run| {
                    table.set_broken(PageRange { start: run.start, pages: run.pages.into() });
                });
            }
            let broken = table::lock().broken_pages(range);
            witness.end();
            witness.call(&table::lock()).unwrap();
            let (mut parts, mut outcomes) = (Vec::new(), Vec::new());
            for run in broken {
                for (piece, _) in pieces(run.start, run.pages, Target::Zero) {
                    let first = (piece.start.page() - range.start.page()) as u32;
                    let source = Some(Source { pool: &pool, first: PoolSlot::new(0, first).unwrap() });
                    parts.push(Part { range: piece, source, at: outcomes.len() });
                    outcomes.resize(outcomes.len() + piece.pages as usize, Outcome::Gone);
                }
            }
            let mut left = &parts[..];
            while !left.is_empty() {
                let generation = references::generation();
                let with = (&pagemap, unfold.keep_out(), &mut witness);
                let (done, _) = refold::some(&mut table::lock(), with, left, generation, &mut outcomes);
                left = &left[done..];
            }
            refolded += outcomes.iter().filter(|o| **o == Outcome::Folded).count();
            // As if the program had discarded what was broken, with nobody looking: else it would soon all be broken.
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

    /// Lets the writers end, also when a check failed.
    struct Stop<'a>(&'a AtomicBool);

    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// Every page in turn: writes, looks whether the last write is still there, and puts the page's content back.
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

    static LOCKS: [std::sync::Mutex<()>; PAGES as usize] = [const { std::sync::Mutex::new(()) }; PAGES as usize];

    /// Puts each page that is broken, and as it was made, where it can be moved again.
    fn stop_the_world(member: &Member, discard: &mut impl FnMut(u64)) {
        for page in 0..PAGES {
            let broken = !table::lock().broken_pages(member.run(page, 1)).is_empty();
            let _held = LOCKS[page as usize].lock().unwrap();
            if broken {
                let kept: Vec<u64> =
                    (0..PAGE_BYTES / 8).map(|i| member.word(page, i).load(Ordering::Relaxed)).collect();
                discard(page);
                kept.iter().enumerate().for_each(|(i, word)| member.word(page, i).store(*word, Ordering::Relaxed));
            }
        }
    }
}

/// As `Folder` does it. Says whether the piece is whole now.
fn make_whole(watcher: &Userfault, witness: &mut Witness, unfold: &Unfold, piece: PageRange) -> bool {
    let (mut table, pagemap) = (table::lock(), Pagemap::open(std::process::id()).unwrap());
    let copy = MemberMemory::huge_page(Some(true)).unwrap();
    let act = || {
        regain::make_own(&mut table, piece).map_err(|e| ("make it its own", e))?;
        witness.end();
        witness.call_for(&table, &[piece]).map_err(|e| ("call a witness", e))?;
        let with = (&pagemap, watcher, unfold.keep_out(), witness);
        regain::make_whole(&mut table, with, (piece, traits()), copy, references::generation())
            .map_err(|e| ("make it whole", e))
    };
    let result = act();
    // Whoever panics needs the lock, to show where it was.
    drop(table);
    result.unwrap()
}

/// Mappings that lie within a range.
fn mappings(range: PageRange) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let bounds = |line: &str| {
        let (from, to) = line.split_once(' ')?.0.split_once('-')?;
        Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?))
    };
    maps.lines().filter_map(bounds).filter(|(from, to)| *from < range.end().0 && *to > range.start.0).count()
}

#[test]
fn what_is_no_longer_folded_becomes_one_mapping_and_a_huge_page_again() {
    let Some(mut section) = section() else { return };
    let (mut witness, unfold) = (witness(), Unfold::new(Userfault::open(Purpose::KeepOut).unwrap()));
    let (pool, member) = (pool(), Member::of(MemberMemory::huge_page(Some(true)).unwrap()));
    let (all, pagemap) = (member.0.range(), Pagemap::open(std::process::id()).unwrap());
    let is_huge = || pagemap.huge_ranges(all.start, all.end()).unwrap() == [all];
    let was_huge = is_huge();
    // What other tests' shadows were given cannot be moved before they end.
    let fold_all = |section: &mut Section, first: u64| {
        let end = Instant::now() + Duration::from_secs(10);
        for page in first..first + 8 {
            host::split_huge_page(all.start);
            while fold(section, member.run(page, 1), Some((&pool, page as u32))) != [Outcome::Folded] {
                assert!(Instant::now() < end, "page {page} cannot be folded");
                member.word(page, 3).store(0, Ordering::Relaxed);
            }
        }
    };
    (0..512).step_by(32).for_each(|first| fold_all(&mut section, first));
    // Some are written, some still map slots.
    (0..256).for_each(|page| member.word(page, 9).store(page, Ordering::Relaxed));
    assert!(mappings(all) > 16 && !is_huge());
    assert!(make_whole(section.guard(), &mut witness, &unfold, all));
    assert_eq!((mappings(all), is_huge(), member.in_pool()), (1, was_huge, 0));
    for page in 0..512 {
        let words = [0, 9, PAGE_BYTES / 8 - 1].map(|word| member.word(page, word).load(Ordering::Relaxed));
        assert_eq!(words, [page + 1, if page < 256 { page } else { 0 }, page * 7 + 1]);
    }
    // All of it can be folded as before.
    let is_foldable = table::lock().is_foldable(all);
    assert!(is_foldable);
    fold_all(&mut section, 256);
}

/// While a device has yet to write a page, its piece stays as it is. With the witness not asked, what it wrote was lost
/// in the first of the tries.
#[test]
fn what_a_device_has_yet_to_write_is_not_moved() {
    let (Some(section), Some(mut device)) = (section(), LateDevice::new()) else { return };
    let (mut witness, unfold) = (witness(), Unfold::new(Userfault::open(Purpose::KeepOut).unwrap()));
    let member = Member::of(MemberMemory::huge_page(Some(true)).unwrap());
    for round in 1..=200 {
        let page = round * 89 % 512;
        device.begin(&member, &[page], 7);
        let is_whole = make_whole(section.guard(), &mut witness, &unfold, member.0.range());
        device.finish(round);
        assert_eq!(member.word(page, 7).swap(0, Ordering::Relaxed), round, "what a device wrote is lost");
        assert!(!is_whole, "round {round}");
    }
    assert!(make_whole(section.guard(), &mut witness, &unfold, member.0.range()));
}

/// Threads that write all the time find every write of theirs, while what they write is made whole again and again. With
/// writers not kept out, one was lost in the first second.
#[test]
fn no_write_is_lost_to_what_is_made_whole() {
    let Some(section) = section() else { return };
    let (mut witness, unfold) = (witness(), Unfold::new(Userfault::open(Purpose::KeepOut).unwrap()));
    let (member, stop) = (Member::of(MemberMemory::huge_page(Some(true)).unwrap()), AtomicBool::new(false));
    let whole = std::thread::scope(|scope| {
        for writer in 0..2 {
            let (member, stop) = (&member, &stop);
            scope.spawn(move || {
                let mut counts = [0; 512];
                for turn in 0.. {
                    // Often enough, nobody writes between the shadow and the moment when writers are kept out.
                    std::thread::sleep(Duration::from_micros(turn * 37 % 4000));
                    let page = turn * 89 % 512;
                    let word = member.word(page, 20 + writer);
                    assert_eq!(word.load(Ordering::Relaxed), counts[page as usize], "a write to page {page} is lost");
                    counts[page as usize] += 1;
                    word.store(counts[page as usize], Ordering::Relaxed);
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
        let end = Instant::now() + Duration::from_secs(2);
        let mut whole = 0;
        while Instant::now() < end {
            whole += u32::from(make_whole(section.guard(), &mut witness, &unfold, member.0.range()));
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, Ordering::Relaxed);
        whole
    });
    assert!(whole > 20, "made whole {whole} times");
}
