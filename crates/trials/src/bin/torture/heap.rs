//! `heap`: blocks of the allocator, for a member whose anonymous memory is all folded.
//!
//! Blocks of all sizes hold duplicates of other pages; they grow, are freed and used again. Blocks that must be zero
//! when they are allocated are checked. Threads come and go, and their stacks with them.

use crate::area::trim_heap;
use crate::content::{Random, mark, word};
use crate::tally::{CHECKED, Mismatch, Until, count, lost, report, stopping};
use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, realloc};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Have blocks of the heap written and checked
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    until: Until,
    /// Threads
    #[arg(long, default_value_t = 3)]
    threads: usize,
    /// Bytes that each of them has allocated, about
    #[arg(long, default_value_t = 24 << 20)]
    bytes: usize,
}

/// Period of a block's contents: a page, in words.
const PERIOD: usize = 512;
/// Distance between the words of a block that its owner changes, in words.
const OWN: usize = 61;

/// A block from the allocator.
struct Block {
    start: *mut u64,
    words: usize,
    class: u32,
    sequence: u32,
}

impl Block {
    fn layout(words: usize) -> Layout {
        Layout::array::<u64>(words).expect("a size")
    }

    fn new(words: usize, zeroed: bool) -> Self {
        let allocate = if zeroed { alloc_zeroed } else { alloc };
        // SAFETY: the size is not zero.
        let start = unsafe { allocate(Self::layout(words)) };
        assert!(!start.is_null(), "no memory");
        let block = Self { start: start.cast(), words, class: 0, sequence: 0 };
        if zeroed && let Some(n) = (0..words).find(|n| block.get(*n) != 0) {
            lost("in new zeros", &block.mismatch(n, 0, block.get(n)));
        }
        block
    }

    fn at(&self, n: usize) -> *mut u64 {
        assert!(n < self.words);
        // SAFETY: within the block.
        unsafe { self.start.add(n) }
    }

    fn get(&self, n: usize) -> u64 {
        // SAFETY: within the block, and written before or zero. The volatile read takes the value from memory, and not
        // from what the compiler knows.
        unsafe { self.at(n).read_volatile() }
    }

    fn set(&self, n: usize, value: u64) {
        // SAFETY: within the block, which is this thread's.
        unsafe { self.at(n).write_volatile(value) };
    }

    fn mismatch(&self, n: usize, expected: u64, found: u64) -> Mismatch {
        let address = self.at(n) as usize;
        Mismatch { address, page: self.words, offset: n * 8, expected, found }
    }

    fn expected(&self, n: usize) -> u64 {
        if self.sequence > 0 && n.is_multiple_of(OWN) { mark(n, self.sequence) } else { word(self.class, n % PERIOD) }
    }

    fn fill(&mut self, class: u32) {
        (self.class, self.sequence) = (class, 0);
        (0..self.words).for_each(|n| self.set(n, word(class, n % PERIOD)));
    }

    fn write(&mut self) {
        self.sequence += 1;
        (0..self.words).step_by(OWN).for_each(|n| self.set(n, mark(n, self.sequence)));
    }

    fn check(&self, words: usize) {
        for n in 0..words.min(self.words) {
            let (expected, found) = (self.expected(n), self.get(n));
            if expected != found {
                lost("in a block", &self.mismatch(n, expected, found));
            }
        }
        if self.sequence > 0 {
            CHECKED.fetch_add(words.min(self.words).div_ceil(OWN) as u64, Relaxed);
        }
    }

    fn resize(&mut self, words: usize) {
        // SAFETY: this block, its layout, and a size that is not zero.
        let start = unsafe { realloc(self.start.cast(), Self::layout(self.words), words * 8) };
        assert!(!start.is_null(), "no memory");
        let kept = words.min(self.words);
        (self.start, self.words) = (start.cast(), words);
        self.check(kept);
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.check(self.words);
        // SAFETY: allocated with this layout, and not used any more.
        unsafe { dealloc(self.start.cast(), Self::layout(self.words)) };
    }
}

/// Runs the mode.
pub fn run(args: &Args) {
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..args.threads {
            scope.spawn(|| {
                // Each thread lives for a short time; then another thread gets its stack and its arena of the
                // allocator.
                while !stopping() {
                    let life = Duration::from_millis(3000 + Random::unforeseen().next() % 9000);
                    std::thread::scope(|scope| _ = scope.spawn(|| live(args.bytes, life)));
                    count("threads");
                }
            });
        }
        args.until.wait();
    });
    report("heap", began);
}

/// A random size: few blocks are large, but they hold most of the bytes.
fn size(random: &mut Random) -> usize {
    match random.below(20) {
        0 => (256 << 10) / 8 + random.below((1 << 20) / 8),
        1..=4 => 4096 / 8 + random.below((96 << 10) / 8),
        _ => 2 + random.below(600),
    }
}

fn live(bytes: usize, life: Duration) {
    let mut random = Random::unforeseen();
    let (end, mut blocks, mut words) = (Instant::now() + life, Vec::<Block>::new(), 0);
    while Instant::now() < end && !stopping() {
        if words * 8 < bytes {
            let mut block = Block::new(size(&mut random), random.one_in(3));
            block.fill(random.below(60) as u32);
            words += block.words;
            blocks.push(block);
        }
        let i = random.below(blocks.len());
        match random.below(64) {
            0 => {
                let block = blocks.swap_remove(i);
                words -= block.words;
                count("frees");
            }
            1 => {
                words -= blocks[i].words;
                let new = blocks[i].words / 2 + 1 + random.below(blocks[i].words);
                blocks[i].resize(new);
                blocks[i].fill(random.below(60) as u32);
                words += new;
                count("reallocations");
            }
            2 if random.one_in(30) => {
                trim_heap();
                count("trims");
            }
            3 => blocks[i].fill(random.below(60) as u32),
            // Only the youngest blocks are worked on; most blocks are left alone most of the time, so that they may be
            // folded.
            _ => {
                let i = blocks.len() - 1 - random.below(blocks.len().min(24));
                blocks[i].check(blocks[i].words);
                blocks[i].write();
            }
        }
        if random.one_in(16) {
            std::thread::sleep(Duration::from_micros(500));
        }
    }
}
