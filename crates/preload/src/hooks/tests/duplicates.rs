//! A folded range and its duplicate, which is neither folded nor enrolled, go through the same calls. Both must be
//! answered the same, and hold the same bytes.

use super::*;
use crate::testing::alone;
use proptest::prelude::*;

/// Largest size of a range, in pages.
const MOST: usize = 24;
/// Address space for each duplicate, in pages, so that it can grow where it is.
const ROOM: usize = 64;

#[derive(Clone, Debug)]
enum Step {
    /// Writes bytes value, value + 1, ... to pages: the first page, their number, and the value.
    Write(usize, usize, u8),
    Fold(usize, usize),
    FindBroken,
    Advise(usize, usize, i32),
    Protect(usize, usize, i32),
    /// The new size in pages, and the kind of call.
    Remap(usize, Kind),
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    InPlace,
    InPlaceBlocked,
    MayMove,
    MayMoveBlocked,
    Fixed,
    FixedOverlap,
    DontUnmap,
    Unaligned,
}

fn step() -> impl Strategy<Value = Step> {
    let part = || (0..MOST, 1..MOST);
    let kind = prop_oneof![
        Just(Kind::InPlace),
        Just(Kind::InPlaceBlocked),
        Just(Kind::MayMove),
        Just(Kind::MayMoveBlocked),
        Just(Kind::Fixed),
        Just(Kind::FixedOverlap),
        Just(Kind::DontUnmap),
        Just(Kind::Unaligned),
    ];
    let advice = prop_oneof![
        6 => Just(libc::MADV_DONTNEED),
        1 => Just(libc::MADV_REMOVE),
        1 => Just(libc::MADV_DONTDUMP),
        1 => Just(libc::MADV_DODUMP),
        1 => Just(libc::MADV_NOHUGEPAGE),
        1 => Just(libc::MADV_POPULATE_WRITE),
        1 => Just(24),
        1 => Just(12345),
    ];
    let access = prop_oneof![Just(1), Just(3), Just(3), Just(3), Just(0)];
    prop_oneof![
        4 => (part(), 0_u8..100).prop_map(|((a, n), value)| Step::Write(a, n, value)),
        6 => part().prop_map(|(a, n)| Step::Fold(a, n)),
        1 => Just(Step::FindBroken),
        2 => (part(), advice).prop_map(|((a, n), advice)| Step::Advise(a, n, advice)),
        1 => (part(), access).prop_map(|((a, n), access)| Step::Protect(a, n, access)),
        3 => (1..MOST, kind).prop_map(|(size, kind)| Step::Remap(size, kind)),
    ]
}

/// Maps a page without rights, if nothing is mapped there.
fn block(at: usize) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: maps only where nothing is mapped.
    unsafe { libc::mmap(at as *mut c_void, PAGE_BYTES, 0, flags, -1, 0) };
}

struct Duplicate {
    at: usize,
    size: usize,
    /// Beginning of its room.
    home: usize,
}

impl Duplicate {
    fn new(count: usize) -> Self {
        let home = fresh(ROOM);
        let duplicate = Self { at: home, size: count, home };
        duplicate.clear_room();
        duplicate.close_room();
        duplicate
    }

    /// Unmaps the pages behind it in its room.
    fn clear_room(&self) {
        let used = if self.at == self.home { self.size } else { 0 };
        unmap_all(self.home + used * PAGE_BYTES, ROOM - used);
    }

    /// Maps inaccessible pages in the free part of its room, so that nothing else comes to lie there.
    fn close_room(&self) {
        (0..ROOM).for_each(|page| block(self.home + page * PAGE_BYTES));
    }

    fn within(&self, first: usize, count: usize) -> (usize, usize) {
        let first = first.min(self.size - 1);
        (first, count.min(self.size - first))
    }

    fn page(&self, page: usize) -> usize {
        self.at + page * PAGE_BYTES
    }

    /// The byte that each page is full of, or why there is none.
    fn bytes(&self) -> Vec<Result<u8, String>> {
        (0..self.size)
            .map(|page| {
                let mut copy = [0_u8; PAGE_BYTES];
                let from = libc::iovec { iov_base: self.page(page) as *mut c_void, iov_len: PAGE_BYTES };
                let to = libc::iovec { iov_base: copy.as_mut_ptr().cast(), iov_len: PAGE_BYTES };
                // SAFETY: reads pages that may not be readable into a buffer of the right size.
                let n = unsafe {
                    libc::process_vm_readv(std::process::id() as i32, &raw const to, 1, &raw const from, 1, 0)
                };
                match n {
                    4096 if copy.iter().all(|byte| *byte == copy[0]) => Ok(copy[0]),
                    4096 => Err("mixed".into()),
                    _ => Err("not readable".into()),
                }
            })
            .collect()
    }

    /// Makes the call. Returns its answer without addresses.
    fn remap(&mut self, size: usize, kind: Kind) -> Result<&'static str, i32> {
        let target = fresh(MOST);
        if matches!(kind, Kind::InPlace | Kind::MayMove) {
            self.clear_room();
        }
        let (mut new_size, mut flags, mut to) = (size, 0, 0);
        match kind {
            Kind::InPlace | Kind::InPlaceBlocked => {}
            Kind::MayMove | Kind::MayMoveBlocked => flags = libc::MREMAP_MAYMOVE,
            Kind::Fixed => (flags, to) = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, target),
            Kind::FixedOverlap => (flags, to) = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, self.at),
            Kind::DontUnmap => (flags, new_size) = (libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP, self.size),
            Kind::Unaligned => (flags, to) = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, target + 5),
        }
        let (old, bytes) = (self.at as *mut c_void, self.size * PAGE_BYTES);
        // SAFETY: the duplicate's own pages; the target is its own room.
        let mapped = unsafe { remap::mremap(old, bytes, new_size * PAGE_BYTES, flags, to as *mut c_void) };
        let mapped = answer(mapped as isize);
        self.close_room();
        if mapped != Ok(target) {
            unmap_all(target, MOST);
        } else {
            unmap_all(target + new_size * PAGE_BYTES, MOST - new_size);
        }
        let mapped = mapped?;
        let how = if mapped == self.at {
            "stayed"
        } else if mapped == target {
            "went there"
        } else {
            "went"
        };
        if matches!(kind, Kind::DontUnmap) {
            // Its old place is still mapped: closing the room maps pages only where nothing is.
            let left = Self { at: self.at, size: self.size, home: self.home }.bytes();
            let readable = left.iter().filter(|byte| byte.is_ok()).all(|byte| *byte == Ok(0));
            assert!(readable, "what stays behind is not zero: {left:?}");
        }
        (self.at, self.size) = (mapped, new_size);
        Ok(how)
    }

    /// Moves it to where it has room behind it. Returns whether that could be done.
    fn go_home(&mut self) -> bool {
        if self.at == self.home {
            return true;
        }
        let home = fresh(ROOM);
        let (old, bytes) = (self.at as *mut c_void, self.size * PAGE_BYTES);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: the duplicate's own pages; the target is its own room.
        let mapped = unsafe { remap::mremap(old, bytes, bytes, flags, home as *mut c_void) };
        if mapped as usize != home {
            eprintln!(
                "{:x}+{} did not go home {home:x} (was {:x}): {:?}",
                self.at,
                self.size,
                self.home,
                answer(mapped as isize)
            );
            unmap_all(home, ROOM);
            return false;
        }
        unmap_all(self.home, ROOM);
        (self.at, self.home) = (home, home);
        true
    }
}

fn fold_what_can_be(duplicate: &Duplicate, pool: &OwnedFd, first: usize, count: usize) {
    let (first, count) = duplicate.within(first, count);
    let bytes = duplicate.bytes();
    let mut page = first;
    while page < first + count {
        let start = page;
        let Ok(slot) = bytes[start] else {
            page += 1;
            continue;
        };
        let next = |page: usize| bytes[page] == Ok(slot.wrapping_add((page - start) as u8));
        while page < first + count && next(page) && usize::from(slot) + page - start < SLOTS {
            page += 1;
        }
        if page == start {
            page += 1;
            continue;
        }
        if table::lock().is_foldable(pages(duplicate.page(start), page - start)) {
            fold(pool, duplicate.page(start), slot.into(), page - start);
        }
    }
}

/// Finds broken pages, as the agent's round does: they no longer hold the slot's frame. Here, written pages have other
/// bytes.
#[allow(clippy::needless_range_loop, reason = "the number of the page is what counts")]
fn find_broken(duplicate: &Duplicate) {
    let bytes = duplicate.bytes();
    let mut table = table::lock();
    for page in 0..duplicate.size {
        let range = pages(duplicate.page(page), 1);
        if table.slot_runs(range).first().is_some_and(|run| bytes[page] != Ok(run.slot.bits() as u8)) {
            table.set_broken(range);
        }
    }
}

/// Whether the kernel lets a page be read and written.
fn is_writable(duplicate: &Duplicate, page: usize) -> bool {
    let _table = table::lock();
    maps::mappings(pages(duplicate.page(page), 1), false).is_some_and(|m| m.iter().any(|m| m.access == 3))
}

/// A range that is folded, and its duplicate that is not.
struct Pair {
    pool: OwnedFd,
    plain: Duplicate,
    folded: Duplicate,
}

impl Pair {
    fn new() -> Self {
        Self { pool: pool(), plain: Duplicate::new(MOST), folded: Duplicate::new(MOST) }
    }

    /// Does a step to both. Returns whether they can still be compared.
    fn apply(&mut self, step: &Step) -> Result<bool, TestCaseError> {
        match *step {
            Step::Write(first, count, value) => self.write(step, (first, count), value)?,
            Step::Fold(first, count) => fold_what_can_be(&self.folded, &self.pool, first, count),
            Step::FindBroken => find_broken(&self.folded),
            Step::Advise(first, count, advice) => {
                let (first, count) = self.plain.within(first, count);
                let results = self.both().map(|duplicate| super::advise(duplicate.page(first), count, advice));
                prop_assert_eq!(results[0], results[1], "{:?}", step);
            }
            Step::Protect(first, count, access) => {
                let (first, count) = self.plain.within(first, count);
                let results = self.both().map(|duplicate| protect(duplicate.page(first), count, access));
                prop_assert_eq!(results[0], results[1], "{:?}", step);
            }
            Step::Remap(size, kind) => return self.remap(step, size, kind),
        }
        Ok(true)
    }

    const fn both(&self) -> [&Duplicate; 2] {
        [&self.plain, &self.folded]
    }

    #[allow(clippy::needless_range_loop, reason = "the number of the page is what counts")]
    fn write(&self, step: &Step, (first, count): (usize, usize), value: u8) -> Result<(), TestCaseError> {
        let (first, count) = self.plain.within(first, count);
        let bytes = self.plain.bytes();
        for page in first..first + count {
            let [plain, folded] = self.both().map(|duplicate| is_writable(duplicate, page));
            prop_assert_eq!(plain, folded, "page {} after {:?}", page, step);
            if bytes[page].is_ok() && plain {
                let value = value + (page - first) as u8;
                self.both().iter().for_each(|duplicate| write(duplicate.at, page, value));
            }
        }
        Ok(())
    }

    fn remap(&mut self, step: &Step, size: usize, kind: Kind) -> Result<bool, TestCaseError> {
        let before = format!("{:?}", table::lock().known(pages(self.folded.at, self.folded.size)));
        let answers = (self.plain.remap(size, kind), self.folded.remap(size, kind));
        // The kernel refuses to move two mappings this way. Whether it has joined two that are alike depends on their
        // past; the folded range is always treated as one.
        if answers.0 == Err(libc::EFAULT) {
            return Ok(false);
        }
        prop_assert_eq!(answers.0, answers.1, "{:?} of {}", step, before);
        prop_assert_eq!(self.plain.bytes(), self.folded.bytes(), "after {:?}", step);
        let home = (self.plain.go_home(), self.folded.go_home());
        prop_assert_eq!(home.0, home.1, "after {:?}", step);
        Ok(home.0)
    }

    fn unmap(&self) {
        for duplicate in self.both() {
            unmap_all(duplicate.home, ROOM);
            unmap_all(duplicate.at, duplicate.size);
        }
    }
}

fn run(steps: Vec<Step>) -> Result<(), TestCaseError> {
    let mut pair = Pair::new();
    prop_assert_eq!(super::advise(pair.folded.at, MOST, libc::MADV_MERGEABLE), Ok(()));
    for step in steps {
        if !pair.apply(&step)? {
            break;
        }
        prop_assert_eq!(pair.plain.bytes(), pair.folded.bytes(), "after {:?}", step);
    }
    pair.unmap();
    Ok(())
}

#[test]
fn folded_range_behaves_as_its_unfolded_duplicate() {
    if !alone("hooks::tests::duplicates::folded_range_behaves_as_its_unfolded_duplicate") {
        return;
    }
    member();
    let config = ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(steps in proptest::collection::vec(step(), 1..30))| run(steps)?);
}
