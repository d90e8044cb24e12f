//! Processes that a study starts: each holds pages of known contents in memory that may be merged, and answers
//! requests.
//!
//! | process | holds | is asked |
//! |---|---|---|
//! | `victim` | pages of secret contents | `touch` |
//! | `prober` | guesses: half of them contents of the victim's, half of nobody's; and pages that it holds twice | `touch`, `time` |
//! | `writer` | pages that nobody else has, of which it rewrites some each second | `rate N` |
//! | `doubles` | pages that it holds twice, in runs of eight | `touch`, `time`, `primitives` |
//! | `forker N` | pages that it holds twice, each beside one that nobody else has: folding them makes N mappings | `mappings`, `fork` |
//!
//! Every answer is a line of JSON.

use crate::stats;
use anyhow::{Context, bail};
use bench::{AlignedPage, filled};
use cli::exit::Outcome;
use host::{Mapping, Pagemap, PagemapEntry};
use page::{Fingerprint, HostVirt, PAGE_BYTES, Pfn};
use serde_json::{Value, json};
use std::hint::black_box;
use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Number of secret contents of the victim; and of the prober's guesses, both right and wrong.
pub const SECRETS: usize = 2048;
/// Number of pages of which the prober holds two copies.
const TWICE: usize = 512;
/// Number of pages of the writer.
const WRITTEN: usize = 16_384;
/// Number of pages of which `doubles` holds two copies.
pub const DOUBLES: usize = 8192;
/// Least capacity of a region, in pages: 32 MiB. From this size on, the C library's allocator always maps memory of its
/// own for an allocation. Smaller ones may lie in the heap, which is not folded.
const REGION_PAGES: usize = 8192;
/// Number of pages that are timed together, when the cost of comparing, hashing and copying is measured.
const BATCH_PAGES: usize = 128;
/// Number of children that `forker` forks; their median time is the answer.
const FORKS: usize = 31;
/// Interval between two batches of the writer's writes.
const BATCH: Duration = Duration::from_millis(100);

/// A page of zeros.
static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// Arguments of the hidden command that is a process of a study.
#[derive(clap::Args)]
pub struct GuestArgs {
    /// Which process
    what: String,
    /// Number of mappings, of `forker`
    number: Option<u64>,
}

/// Memory that may be merged.
struct Region(Vec<AlignedPage>);

impl Region {
    fn filled(seeds: impl ExactSizeIterator<Item = u64>) -> anyhow::Result<Self> {
        let mut memory = Vec::with_capacity(seeds.len().max(REGION_PAGES));
        act::ask_to_merge(memory.spare_capacity_mut())?;
        memory.extend(seeds.map(filled));
        Ok(Self(memory))
    }

    /// The frame of each page. Each page is read first, so that it is in memory.
    fn frames(&self, pagemap: &Pagemap) -> anyhow::Result<Vec<Option<Pfn>>> {
        let start = HostVirt(self.0.as_ptr() as u64);
        self.0.iter().for_each(|page| _ = black_box(black_box(page).0[0]));
        let mut entries: Vec<PagemapEntry> = Vec::new();
        pagemap.read(start, self.0.len() as u64, &mut entries)?;
        Ok(entries.iter().map(|entry| entry.pfn()).collect())
    }

    /// Writes page `n`, and returns how many microseconds that took.
    fn write(&mut self, n: usize) -> f64 {
        let begin = Instant::now();
        black_box(&mut self.0[n]).0[8] = 1;
        begin.elapsed().as_secs_f64() * 1e6
    }
}

const fn secret(n: usize) -> u64 {
    1 << 50 | n as u64
}

const fn nobodys(n: usize) -> u64 {
    1 << 51 | n as u64
}

/// Runs the process with this name until its standard input closes.
///
/// # Errors
/// No process has this name.
pub fn run(args: &GuestArgs) -> anyhow::Result<Outcome> {
    let pagemap = Pagemap::open(std::process::id())?;
    match args.what.as_str() {
        "victim" => {
            let secrets = Region::filled((0..SECRETS).map(secret))?;
            answer(|_| secrets.frames(&pagemap).map(|_| json!({})))
        }
        "prober" => prober(&pagemap),
        "writer" => writer(),
        "doubles" => doubles(&pagemap),
        "forker" => forker(args.number.unwrap_or(0)),
        other => bail!("there is no process {other:?} in a study"),
    }
}

/// Reports that the process's memory is filled, and then answers a request a line until standard input closes.
fn answer(mut to: impl FnMut(&str) -> anyhow::Result<Value>) -> anyhow::Result<Outcome> {
    let mut out = std::io::stdout();
    let mut say = |answer: &Value| writeln!(out, "{answer}").and_then(|()| out.flush()).context("cannot answer");
    say(&Value::from("ready"))?;
    for line in std::io::stdin().lock().lines() {
        say(&to(&line.context("cannot read what is asked")?)?)?;
    }
    Ok(Outcome::Done)
}

/// The numbers below `count` in an order that looks random and is always the same.
fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for n in (1..count).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        order.swap(n, (state % (n as u64 + 1)) as usize);
    }
    order
}

/// Runs the prober. Its right and wrong guesses lie in a random order, so that their addresses tell nothing.
fn prober(pagemap: &Pagemap) -> anyhow::Result<Outcome> {
    let kinds: Vec<usize> = shuffled(2 * SECRETS);
    let seed = |n: &usize| if *n < SECRETS { secret(*n) } else { nobodys(*n) };
    let mut guesses = Region::filled(kinds.iter().map(seed).collect::<Vec<_>>().into_iter())?;
    let twice = Region::filled((0..2 * TWICE).map(|n| 1 << 52 | (n % TWICE) as u64))?;
    answer(|what| match what {
        "touch" => {
            guesses.frames(pagemap)?;
            Ok(json!({"merged": merged(&twice.frames(pagemap)?)}))
        }
        "time" => {
            let (mut present, mut absent) = (Vec::new(), Vec::new());
            for n in shuffled(2 * SECRETS) {
                let time = guesses.write(n);
                if kinds[n] < SECRETS { present.push(time) } else { absent.push(time) }
            }
            let auc = stats::area_under_curve(&present, &absent);
            let median = |times: &[f64]| stats::quantile(times, 0.5);
            Ok(json!({"auc": auc, "present_us": median(&present), "absent_us": median(&absent)}))
        }
        other => bail!("the prober cannot do {other:?}"),
    })
}

/// Number of pages of the second half that lie in the same frame as the page at the same place of the first half.
fn merged(frames: &[Option<Pfn>]) -> usize {
    let (first, second) = frames.split_at(frames.len() / 2);
    first.iter().zip(second).filter(|(a, b)| a.is_some() && a == b).count()
}

/// Runs the writer: it rewrites pages at the rate that it was told last, spread evenly over time.
fn writer() -> anyhow::Result<Outcome> {
    let rate = std::sync::Arc::new(AtomicU64::new(0));
    let mut pages = Region::filled((0..WRITTEN).map(|n| 1 << 53 | n as u64))?;
    let wanted = rate.clone();
    let written = std::sync::Arc::new(AtomicU64::new(0));
    let count = written.clone();
    std::thread::spawn(move || {
        let (mut n, begin) = (0_u64, Instant::now());
        let mut next = BATCH;
        loop {
            for _ in 0..wanted.load(Ordering::Relaxed) * BATCH.as_millis() as u64 / 1000 {
                n += 1;
                let at = n as usize % pages.0.len();
                black_box(&mut pages.0[at]).0[..8].copy_from_slice(&n.to_ne_bytes());
                count.fetch_add(1, Ordering::Relaxed);
            }
            std::thread::sleep(next.saturating_sub(begin.elapsed()));
            next += BATCH;
        }
    });
    answer(|what| {
        let number = what.strip_prefix("rate ").and_then(|n| n.parse().ok());
        rate.store(number.with_context(|| format!("the writer cannot do {what:?}"))?, Ordering::Relaxed);
        Ok(json!({"written": written.load(Ordering::Relaxed)}))
    })
}

/// Runs `doubles`. Its pages lie in runs of eight: a run, its copy, the next run and its copy.
fn doubles(pagemap: &Pagemap) -> anyhow::Result<Outcome> {
    let seed = |n: usize| 1 << 54 | (n / 16 * 8 + n % 8) as u64;
    let mut pages = Region::filled((0..2 * DOUBLES).map(seed))?;
    let is_second = |n: &usize| n % 16 >= 8;
    answer(|what| match what {
        "touch" => {
            let frames = pages.frames(pagemap)?;
            let merged =
                (0..frames.len()).filter(is_second).filter(|n| frames[*n].is_some() && frames[*n] == frames[n - 8]);
            Ok(json!({"merged": merged.count()}))
        }
        "time" => {
            let frames = pages.frames(pagemap)?;
            let seconds = (0..frames.len()).filter(is_second);
            let merged: Vec<usize> = seconds.filter(|n| frames[*n].is_some() && frames[*n] == frames[n - 8]).collect();
            let times: Vec<f64> = merged.into_iter().map(|n| pages.write(n)).collect();
            let at = |share| stats::quantile(&times, share);
            Ok(json!({"count": times.len(), "p50_us": at(0.5), "p99_us": at(0.99), "p999_us": at(0.999)}))
        }
        "primitives" => Ok(primitives()),
        other => bail!("it cannot do {other:?}"),
    })
}

/// Runs `forker`, whose folding makes this number of mappings. Each page that has a copy lies beside one that has none.
/// So it is folded alone and becomes a mapping, and the page after it another.
fn forker(mappings: u64) -> anyhow::Result<Outcome> {
    // Processes for other numbers of mappings hold other contents.
    let own = mappings << 24;
    let folded = |n: u64| (1 << 56) | own | ((n / 2) % (mappings / 4).max(1));
    let alone = |n: u64| (1 << 57) | own | n;
    let pages = Region::filled(
        (0..mappings).map(|n| if n % 2 == 0 { folded(n) } else { alone(n) }).collect::<Vec<_>>().into_iter(),
    )?;
    answer(|what| match what {
        "mappings" => Ok(json!({"mappings": Mapping::list(std::process::id())?.len()})),
        "fork" => {
            black_box(&pages.0);
            let times = (0..FORKS).map(|_| fork_ms()).collect::<anyhow::Result<Vec<f64>>>()?;
            Ok(json!({"fork_ms": stats::quantile(&times, 0.5)}))
        }
        other => bail!("it cannot do {other:?}"),
    })
}

/// Milliseconds to fork a child that executes another program and ends. The standard library forks only because a user
/// id is set (the same one). Otherwise it uses `posix_spawn`, and the child would share memory with its parent until it
/// executes the program.
fn fork_ms() -> anyhow::Result<f64> {
    let begin = Instant::now();
    let mut command = std::process::Command::new("/bin/true");
    command.uid(rustix::process::getuid().as_raw());
    let status = command.status().context("cannot start /bin/true")?;
    anyhow::ensure!(status.success(), "/bin/true: {status}");
    Ok(begin.elapsed().as_secs_f64() * 1e3)
}

/// Microseconds per page for comparing, hashing and copying, over 32 MB of pages, more than a cache holds. The time is
/// the median of batches, so that a batch in which another process had the processor does not count.
fn primitives() -> Value {
    let pages: Vec<AlignedPage> = (0..DOUBLES as u64).map(|n| filled(1 << 55 | n)).collect();
    let mut copies = pages.clone();
    let zeros = vec![AlignedPage(ZEROS); DOUBLES];
    let each = |work: &mut dyn FnMut(usize)| {
        let batch = |first: usize| {
            let begin = Instant::now();
            (first..first + BATCH_PAGES).for_each(&mut *work);
            begin.elapsed().as_secs_f64() * 1e6 / BATCH_PAGES as f64
        };
        let times: Vec<f64> = (0..DOUBLES).step_by(BATCH_PAGES).map(batch).collect();
        stats::quantile(&times, 0.5)
    };
    let zero_us = each(&mut |n| _ = black_box(black_box(&zeros[n]).0 == ZEROS));
    let hash_us = each(&mut |n| _ = black_box(Fingerprint::of(black_box(&pages[n].0))));
    let compare_us = each(&mut |n| _ = black_box(black_box(&pages[n].0) == black_box(&copies[n].0)));
    let copy_us = each(&mut |n| black_box(&mut copies[n].0).copy_from_slice(black_box(&pages[n].0)));
    json!({"zero_us": zero_us, "hash_us": hash_us, "compare_us": compare_us, "copy_us": copy_us})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffled_numbers_are_all_there_in_another_order() {
        let mut order = shuffled(1000);
        assert!(order.iter().enumerate().filter(|(n, m)| n == *m).count() < 20);
        order.sort_unstable();
        assert!(order.into_iter().eq(0..1000));
    }

    #[test]
    fn only_pages_in_one_frame_are_merged() {
        let frames = [Some(Pfn(1)), None, Some(Pfn(3)), Some(Pfn(1)), None, Some(Pfn(4))];
        assert_eq!(merged(&frames), 1);
    }
}
