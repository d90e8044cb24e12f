//! The storms themselves.

use crate::area::Area;
use crate::{Done, await_folded};
use anyhow::{Context, ensure};
use std::hint::black_box;
use std::io;
use std::time::{Duration, Instant};

/// Number of blocks that are allocated at the same time.
const LIVE_BLOCKS: usize = 64;
/// Number of block sizes: the smallest is 4 KiB, and each is twice the one before.
const SIZES: u64 = 11;
/// Memory that one pass of `discard` discards, in pages.
const DISCARDED_PAGES: usize = 32 << 10;
/// Sizes in pages of the pieces in which memory is discarded, again and again in this order.
const PIECES: [usize; 6] = [1, 4, 16, 64, 16, 4];
/// Number of folded runs, of one page each, in the process of `fork`.
const RUNS: usize = 5000;
/// Memory of `walk`, in pages.
const WALKED_PAGES: usize = 64 << 10;
/// Pages of a run: all of its pages are equal to another run's, or none.
const RUN: usize = 16;

/// Random numbers by a linear congruence: the high half of each is good enough here.
struct Random(u64);

impl Random {
    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        self.0 >> 32
    }

    const fn below(&mut self, end: u64) -> u64 {
        (self.next() * end) >> 32
    }
}

/// A block from the C library's allocator. Each of its pages is written when it is made.
struct Block(*mut libc::c_void);

impl Block {
    fn new(bytes: usize) -> anyhow::Result<Self> {
        // SAFETY: takes a number of bytes.
        let block = unsafe { libc::malloc(bytes) };
        ensure!(!block.is_null(), "no {bytes} bytes can be had");
        for at in (0..bytes).step_by(4096) {
            // SAFETY: within the block, which has `bytes` bytes and belongs to nobody else.
            unsafe { block.cast::<u8>().wrapping_add(at).write_volatile(1) };
        }
        Ok(Self(block))
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: `malloc` returned it, and it is freed once.
        unsafe { libc::free(self.0) };
    }
}

/// Allocates blocks, each of which replaces an older one.
pub fn allocate(units: u64) -> anyhow::Result<Done> {
    let mut random = Random(1);
    let mut blocks: Vec<Option<Block>> = (0..LIVE_BLOCKS).map(|_| None).collect();
    let begin = Instant::now();
    for _ in 0..units {
        let least = 4096_u64 << random.below(SIZES - 1);
        let bytes = (least + random.below(least + 1)) as usize;
        let place = random.below(LIVE_BLOCKS as u64) as usize;
        blocks[place] = Some(Block::new(bytes)?);
    }
    Ok(Done { units, time: begin.elapsed(), folded_pages: 0 })
}

/// Discards all of the memory in pieces, and writes each piece again. Pauses before each pass but the first, so that
/// the memory is folded again.
pub fn discard(passes: u64, folded: u64, rest: Duration) -> anyhow::Result<Done> {
    let seed = |n: usize| (n % (DISCARDED_PAGES / 2)) as u64;
    let mut area = Area::filled(DISCARDED_PAGES, seed)?;
    let mut done = Done::default();
    await_folded(&area, folded)?;
    for pass in 0..passes {
        if pass > 0 {
            std::thread::sleep(rest);
        }
        done.folded_pages += area.folded_pages()? / passes;
        let begin = Instant::now();
        let (mut at, mut pieces) = (0, PIECES.iter().cycle());
        while at < area.pages() {
            let pages = (*pieces.next().context("no pieces")?).min(area.pages() - at);
            area.advise(at, pages, libc::MADV_DONTNEED).context("cannot discard")?;
            for n in at..at + pages {
                let page = area.page(n);
                page[0] = 1;
                ensure!(black_box(&*page)[8] == 0, "page {n} was discarded and is not zero");
            }
            (at, done.units) = (at + pages, done.units + 1);
        }
        done.time += begin.elapsed();
        (0..area.pages()).for_each(|n| area.fill(n, seed(n)));
    }
    Ok(done)
}

/// Forks children that end at once.
pub fn fork(units: u64, folded: u64) -> anyhow::Result<Done> {
    // Every second page is equal to some others, and no two equal ones lie side by side: each run that is folded has
    // one page.
    let seed = |n: usize| if n.is_multiple_of(2) { (n / 2 % (RUNS / 2)) as u64 } else { 1 << 40 | n as u64 };
    let area = Area::filled(2 * RUNS, seed)?;
    let folded_pages = await_folded(&area, folded)?;
    let begin = Instant::now();
    for _ in 0..units {
        // SAFETY: this program has one thread of its own, and the child does nothing but end.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child, which has nothing to clean up.
            unsafe { libc::_exit(0) };
        }
        ensure!(child > 0, "cannot fork: {}", io::Error::last_os_error());
        let mut status = 0;
        // SAFETY: the pointer is to a local variable.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        ensure!(waited == child && status == 0, "a child ended with {status}");
    }
    Ok(Done { units, time: begin.elapsed(), folded_pages })
}

/// Creates threads that end at once.
pub fn threads(units: u64) -> anyhow::Result<Done> {
    let begin = Instant::now();
    for n in 0..units {
        let thread = std::thread::Builder::new().spawn(move || black_box(n)).context("cannot create a thread")?;
        ensure!(thread.join().is_ok_and(|found| found == n), "a thread failed");
    }
    Ok(Done { units, time: begin.elapsed(), folded_pages: 0 })
}

/// Walks in memory one half of which is equal to the other half, except for the quarter that is written.
pub fn walk(units: u64, folded: u64) -> anyhow::Result<Done> {
    const WRITTEN: usize = WALKED_PAGES * 3 / 4;
    let common = |n: usize| n < WRITTEN && (n / RUN).is_multiple_of(2);
    let seed = |n: usize| if common(n) { (n % (WRITTEN / 2)) as u64 } else { 1 << 40 | n as u64 };
    let mut area = Area::filled(WALKED_PAGES, seed)?;
    let folded_pages = await_folded(&area, folded)?;
    let (mut random, mut sum) = (Random(1), 0_u64);
    let begin = Instant::now();
    for n in 0..units {
        // The next place depends on the byte read here, so the processor cannot begin the next read earlier.
        let place = random.below((WALKED_PAGES * 4096) as u64) as usize;
        let byte = &mut area.page(place / 4096)[place % 4096];
        sum = sum.wrapping_add(u64::from(*black_box(&*byte)));
        random.0 = random.0.wrapping_add(sum & 0xff);
        if n.is_multiple_of(8) {
            let place = WRITTEN + random.below((WALKED_PAGES - WRITTEN) as u64) as usize;
            area.page(place)[8] = sum as u8;
        }
    }
    black_box(sum);
    Ok(Done { units, time: begin.elapsed().max(Duration::from_nanos(1)), folded_pages })
}
