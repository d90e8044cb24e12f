//! The prober: a guest among the others that measures from inside how merging affects it.
//!
//! It holds *originals*, pages that nobody else has, and pages equal to them. A page counts as merged when it lies in
//! the same frame as its original. That test is the same for both mergers.
//!
//! The bench sends requests on its input, one a line:
//!
//! | request | the prober |
//! |---|---|
//! | `react` | writes pages equal to an original, one at a time, and waits until each is merged |
//! | `break` | reads merged pages, then times the first write to each |
//! | `stall` | fills a region with duplicates, and times every read of it until it is merged |
//!
//! For comparison, `stall` then does the same with memory that nobody merges: that shows what else takes time on this
//! machine.

use super::timings::{Spread, Timings};
use crate::synthetic::{AlignedPage, filled};
use anyhow::{Context, bail};
use cli::exit::Outcome;
use host::{Pagemap, PagemapEntry};
use page::{HostVirt, PAGE_BYTES, Pfn};
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

/// Number of originals: pages whose content no other guest has.
const ORIGINALS: usize = 512;
/// Number of pages equal to each original, from the start on.
const COPIES: usize = 4;
/// Number of pages that merging the copies with their originals saves.
pub const SUPERFLUOUS: u64 = (ORIGINALS * COPIES) as u64;
/// Most new duplicates for which `react` measures the time until they are merged.
pub const REACTIONS: u8 = 25;
/// Time limit for a new duplicate, or for the pages of `stall`, to be merged: 20 s.
const PATIENCE: Duration = Duration::from_secs(20);
/// After 30 s, `react` writes no more duplicates once it has written 5.
const REACTIONS_FOR: (Duration, usize) = (Duration::from_secs(30), 5);
/// Interval between two checks whether a page is merged.
const LOOK_EVERY: Duration = Duration::from_micros(500);
/// Number of pages that `stall` reads while they are merged. One half of them equals the other.
const READ_PAGES: usize = 8192;
/// Time of reading in `stall` between two counts of the merged pages.
const READ_LOOK_EVERY: Duration = Duration::from_millis(100);
/// Time for which `stall` reads memory that nobody merges.
const FLOOR_FOR: Duration = Duration::from_secs(2);
/// Least duration of a read that counts as waiting for the merger.
const STALL_FROM: Duration = Duration::from_micros(5);

/// The prober's answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The prober's memory is there.
    Ready,
    /// Answer to `react`.
    Reaction {
        /// Seconds until each was merged.
        seconds: Vec<f64>,
        /// Number of duplicates that were not merged within the time limit.
        missed: u64,
    },
    /// Answer to `break`: times of first writes to merged pages.
    Break(Spread),
    /// Answer to `stall`.
    Stall(Stall),
    /// Answer to `walk`.
    Walk {
        /// Nanoseconds per step.
        step_ns: f64,
    },
}

/// Times of reads while pages are merged.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Stall {
    /// All reads while the pages were merged.
    pub reads: Spread,
    /// Reads that took 5 us or longer.
    pub waits: Spread,
    /// Reads of memory that nobody merges that took 5 us or longer.
    pub floor_waits: Spread,
    /// Waits per million reads.
    pub waits_per_million: f64,
    /// Waits per million reads of memory that nobody merges.
    pub floor_waits_per_million: f64,
    /// Seconds until the pages were merged.
    pub seconds: f64,
    /// Merged pages in the end, as a share of those that could be.
    pub merged_share: f64,
}

/// Memory that the merger may merge. It has a fixed capacity, and no pages at first.
struct Region(Vec<AlignedPage>);

/// Least capacity of a region, in pages: 32 MiB. From this size on, the C library's allocator always maps memory of its
/// own for an allocation. Smaller ones may lie in the heap, which is not folded.
const REGION_PAGES: usize = 8192;

impl Region {
    fn new(pages: usize) -> anyhow::Result<Self> {
        let mut memory = Vec::with_capacity(pages.max(REGION_PAGES));
        act::ask_to_merge(memory.spare_capacity_mut())?;
        Ok(Self(memory))
    }

    fn fill(&mut self, seeds: impl IntoIterator<Item = u64>) {
        // More pages than the capacity would make the vector move to memory that is not marked for merging.
        let left = self.0.capacity() - self.0.len();
        self.0.extend(seeds.into_iter().take(left).map(filled));
    }
}

struct Prober {
    pagemap: Pagemap,
    originals: Region,
    copies: Region,
    fresh: Region,
    read: Region,
}

/// The seed of the nth content that no other guest of the bench has.
fn seed(n: usize) -> u64 {
    1 << 60 | n as u64
}

/// Runs the prober's process until its standard input closes.
pub fn run() -> anyhow::Result<Outcome> {
    let mut prober = Prober::new()?;
    answer_to(|what| match what {
        "break" => prober.first_writes(),
        "stall" => prober.stalls(),
        other => match other.strip_prefix("react ").and_then(|number| number.parse().ok()) {
            Some(duplicates) => prober.react(duplicates),
            None => bail!("the prober cannot do {other:?}"),
        },
    })
}

/// Reports `Answer::Ready`, and then answers a request a line until standard input closes.
pub fn answer_to(mut answer: impl FnMut(&str) -> anyhow::Result<Answer>) -> anyhow::Result<Outcome> {
    let mut out = std::io::stdout();
    let mut say = |answer: &Answer| -> anyhow::Result<()> {
        writeln!(out, "{}", serde_json::to_string(answer)?).and_then(|()| out.flush()).context("cannot answer")
    };
    say(&Answer::Ready)?;
    for line in std::io::stdin().lock().lines() {
        say(&answer(&line.context("cannot read what is asked")?)?)?;
    }
    Ok(Outcome::Done)
}

impl Prober {
    fn new() -> anyhow::Result<Self> {
        let pages = ORIGINALS * COPIES;
        let mut prober = Self {
            pagemap: Pagemap::open(std::process::id())?,
            originals: Region::new(ORIGINALS)?,
            copies: Region::new(pages)?,
            fresh: Region::new(REACTIONS.into())?,
            read: Region::new(READ_PAGES)?,
        };
        prober.originals.fill((0..ORIGINALS).map(seed));
        prober.copies.fill((0..pages).map(|n| seed(n % ORIGINALS)));
        Ok(prober)
    }

    /// The frame in which a page lies. The page is read first, so that it is in memory; `None` if the kernel does not
    /// show the frame.
    fn frame(&self, page: &AlignedPage) -> anyhow::Result<Option<Pfn>> {
        black_box(read_once(page));
        let mut entries: Vec<PagemapEntry> = Vec::new();
        self.pagemap.read(HostVirt(page.0.as_ptr() as u64), 1, &mut entries)?;
        Ok(entries.first().and_then(|entry| entry.pfn()))
    }

    fn is_merged(&self, page: &AlignedPage, original: &AlignedPage) -> anyhow::Result<bool> {
        let frame = self.frame(page)?;
        Ok(frame.is_some() && frame == self.frame(original)?)
    }

    fn react(&mut self, duplicates: u8) -> anyhow::Result<Answer> {
        let (mut seconds, mut missed) = (Vec::new(), 0);
        let first = Instant::now();
        for n in 0..usize::from(duplicates.min(REACTIONS)) {
            if n >= REACTIONS_FOR.1 && first.elapsed() > REACTIONS_FOR.0 {
                break;
            }
            // The pauses have unequal lengths, so that they do not keep in step with a merger's rounds.
            std::thread::sleep(Duration::from_millis(37 + 61 * (n as u64 % 7)));
            self.fresh.fill([seed(n)]);
            let begin = Instant::now();
            let page = self.fresh.0.last().context("no page is left to write")?;
            while !self.is_merged(page, &self.originals.0[n])? && begin.elapsed() < PATIENCE {
                std::thread::sleep(LOOK_EVERY);
            }
            if begin.elapsed() < PATIENCE { seconds.push(begin.elapsed().as_secs_f64()) } else { missed += 1 }
        }
        Ok(Answer::Reaction { seconds, missed })
    }

    fn first_writes(&mut self) -> anyhow::Result<Answer> {
        let mut merged = Vec::new();
        for (n, page) in self.copies.0.iter().enumerate() {
            merged.push(self.is_merged(page, &self.originals.0[n % ORIGINALS])?);
        }
        let mut timings = Timings::default();
        for (page, _) in self.copies.0.iter_mut().zip(merged).filter(|(_, merged)| *merged) {
            let begin = Instant::now();
            black_box(&mut *page).0[8] = 1;
            timings.add(begin.elapsed());
        }
        Ok(Answer::Break(timings.spread()))
    }

    fn stalls(&mut self) -> anyhow::Result<Answer> {
        let half = READ_PAGES / 2;
        let seeds = || (0..READ_PAGES).map(|n| seed(1 << 32 | (n % half)));
        self.read.fill(seeds());
        let mut timings = Timings::new(STALL_FROM);
        let begin = Instant::now();
        let mut merged = 0;
        while merged < half * 99 / 100 && begin.elapsed() < PATIENCE {
            read_for(&self.read.0, READ_LOOK_EVERY, &mut timings)?;
            merged = 0;
            for n in 0..half {
                merged += usize::from(self.is_merged(&self.read.0[n], &self.read.0[n + half])?);
            }
        }
        let seconds = begin.elapsed().as_secs_f64();
        let plain: Vec<AlignedPage> = seeds().map(filled).collect();
        let mut floor = Timings::new(STALL_FROM);
        read_for(&plain, FLOOR_FOR, &mut floor)?;
        let per_million = |t: &Timings| t.spread_of_kept().count as f64 * 1e6 / t.spread().count.max(1) as f64;
        Ok(Answer::Stall(Stall {
            reads: timings.spread(),
            waits: timings.spread_of_kept(),
            floor_waits: floor.spread_of_kept(),
            waits_per_million: per_million(&timings),
            floor_waits_per_million: per_million(&floor),
            seconds,
            merged_share: merged as f64 / half as f64,
        }))
    }
}

/// Reads one byte of a page, from memory.
fn read_once(page: &AlignedPage) -> u8 {
    black_box(page).0[0]
}

/// Reads the pages again and again for `time`, timing each read and checking the value.
fn read_for(pages: &[AlignedPage], time: Duration, timings: &mut Timings) -> anyhow::Result<()> {
    let expected: Vec<u8> = pages.iter().map(read_once).collect();
    let begin = Instant::now();
    while begin.elapsed() < time {
        for (page, expected) in pages.iter().zip(&expected) {
            let before = Instant::now();
            let read = read_once(page);
            timings.add(before.elapsed());
            if read != *expected {
                bail!("a page of {PAGE_BYTES} bytes that nobody writes has changed under the prober");
            }
        }
    }
    Ok(())
}
