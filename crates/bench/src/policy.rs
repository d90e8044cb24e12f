//! `pagefold bench policy`: what folding by each rule would have saved and cost, on recorded traces of programs. Nothing is folded.
//!
//! `--record` makes a trace: it fingerprints a program's private pages every two seconds.

mod replay;
mod textbook;
mod trace;

use ::policy::TODAY;
use anyhow::{Context, bail};
use cli::exit::Outcome;
use cli::output;
use host::{Pagemap, ProcessMemory};
use page::{Fingerprint, HostVirt, PAGE_BYTES, PAGE_SHIFT, PageRange};
use replay::{Rule, Score, Today, replay};
use report::{Align, Table};
use serde::Serialize;
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use textbook::{RENTAL, Textbook};
use trace::Trace;

/// Time between two readings of a program's pages while a trace is recorded, in seconds.
const LOOK_SECONDS: u32 = 2;
/// Length of the blocks of pages of which `--one-in` records some, in pages.
const BLOCK_PAGES: u64 = 64;
/// Most pages that are read by one call.
const AT_ONCE_PAGES: u64 = 64;
/// End of the addresses that a program may have: the kernel keeps the last page below it.
const LAST: HostVirt = HostVirt((1 << 47) - PAGE_BYTES as u64);

/// Arguments of `pagefold bench policy`.
#[derive(clap::Args)]
pub struct Args {
    /// Traces to replay
    #[arg(value_name = "FILE", required_unless_present = "record")]
    traces: Vec<PathBuf>,
    /// Record what this process and its descendants write, and print the trace
    #[arg(long, value_name = "PID", conflicts_with = "traces")]
    record: Option<u32>,
    /// Seconds to record
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u32).range(4..=86_400))]
    seconds: u32,
    /// Record one block of 64 pages in this many
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=4096))]
    one_in: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// One rule on one trace.
#[derive(Serialize)]
struct Row {
    /// The file's name without its ending.
    trace: String,
    /// `today`: the agent's policy. `textbook`: a page is folded when it has rested for a while, which doubles for its
    /// block with a short-lived fold and halves with one that lived.
    policy: &'static str,
    /// Page seconds folded, of those that are possible: rests of a minute and more, from the first look on.
    merged_of_possible: f64,
    /// Page seconds folded, of all page seconds of the pages that appear in the trace.
    folded_share: f64,
    /// Share of folds that ended within a minute.
    short_share: f64,
    /// Estimate of processor time: 4 us for each fold, 3 for each written page that was folded, 1 for each noted write.
    cpu_s: f64,
    /// Number of folds.
    folds: u64,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    if let Some(pid) = args.record {
        let trace = Recording::new(pid, args.one_in).record(args.seconds)?;
        output::bytes(trace.to_text().as_bytes())?;
        return Ok(Outcome::Done);
    }
    let mut rows = Vec::new();
    for file in &args.traces {
        let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let trace = Trace::parse(&text).map_err(|e| anyhow::anyhow!("{}: {e}", file.display()))?;
        rows.push(row(file, "today", &trace, &mut Today::new(&TODAY)));
        rows.push(row(file, "textbook", &trace, &mut Textbook::new(&RENTAL)));
    }
    if args.json {
        output::line(serde_json::to_string_pretty(&rows)?)?;
    } else {
        output::bytes(table(&rows).as_bytes())?;
    }
    Ok(Outcome::Done)
}

fn row(file: &Path, policy: &'static str, trace: &Trace, rule: &mut impl Rule) -> Row {
    let Score { merged_of_possible, folded_share, short_share, cpu_s, folds } = replay(trace, rule, 0);
    let trace = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Row { trace, policy, merged_of_possible, folded_share, short_share, cpu_s, folds }
}

fn table(rows: &[Row]) -> String {
    let mut table = Table::new(&[
        ("trace", Align::Left),
        ("policy", Align::Left),
        ("merged of possible", Align::Right),
        ("short", Align::Right),
        ("CPU s", Align::Right),
        ("folds", Align::Right),
    ]);
    for row in rows {
        table.row([
            row.trace.clone(),
            row.policy.to_string(),
            format!("{:.1}%", row.merged_of_possible * 100.0),
            format!("{:.1}%", row.short_share * 100.0),
            format!("{:.2}", row.cpu_s),
            row.folds.to_string(),
        ]);
    }
    table.to_string()
}

/// A trace that is being recorded.
struct Recording {
    pid: u32,
    one_in: u64,
    /// Each page's number in the trace and its fingerprint, by process and page number in the address space.
    pages: HashMap<(u32, u64), (u64, Fingerprint)>,
    /// Numbers of pages that the program gave back. New pages get these numbers first, as new memory gets frames that
    /// were freed.
    free: BTreeSet<u64>,
    buffer: Vec<u8>,
}

impl Recording {
    fn new(pid: u32, one_in: u64) -> Self {
        let buffer = vec![0; AT_ONCE_PAGES as usize * PAGE_BYTES];
        Self { pid, one_in, pages: HashMap::new(), free: BTreeSet::new(), buffer }
    }

    fn record(mut self, seconds: u32) -> anyhow::Result<Trace> {
        let (began, mut written, mut pages) = (Instant::now(), Vec::new(), 0);
        self.look()?;
        for look in 1..=seconds / LOOK_SECONDS {
            let due = Duration::from_secs(u64::from(look * LOOK_SECONDS));
            std::thread::sleep(due.saturating_sub(began.elapsed()));
            let Ok(changed) = self.look() else { break };
            written.push(runs(&changed));
            pages = pages.max((self.pages.len() + self.free.len()) as u64);
        }
        if written.is_empty() {
            bail!("process {} has ended", self.pid);
        }
        Ok(Trace { pages, look_seconds: LOOK_SECONDS, written })
    }

    /// Reads all pages. Returns the numbers of those that were written or given back since the reading before.
    fn look(&mut self) -> anyhow::Result<BTreeSet<u64>> {
        let mut changed = BTreeSet::new();
        let mut before = std::mem::take(&mut self.pages);
        let found = self.find()?;
        let is_there: BTreeSet<(u32, u64)> = found.iter().map(|(key, _)| *key).collect();
        before.retain(|key, (number, _)| {
            let stays = is_there.contains(key);
            if !stays {
                changed.insert(*number);
                self.free.insert(*number);
            }
            stays
        });
        let mut next = (before.len() + self.free.len()) as u64;
        for (key, fingerprint) in found {
            let (number, is_same) = if let Some((number, known)) = before.get(&key) {
                (*number, *known == fingerprint)
            } else if let Some(free) = self.free.pop_first() {
                (free, false)
            } else {
                next += 1;
                (next - 1, false)
            };
            if !is_same {
                changed.insert(number);
            }
            self.pages.insert(key, (number, fingerprint));
        }
        Ok(changed)
    }

    /// All pages of the process and its descendants that are recorded, with their fingerprints.
    fn find(&mut self) -> anyhow::Result<Vec<((u32, u64), Fingerprint)>> {
        let (mut found, mut pids, mut at) = (Vec::new(), vec![self.pid], 0);
        while at < pids.len() {
            let pid = pids[at];
            at += 1;
            pids.extend(host::children(pid));
            match self.find_in(pid, &mut found) {
                Err(e) if pid == self.pid => return Err(e),
                // A descendant that has ended since it was found has no pages.
                _ => {}
            }
        }
        Ok(found)
    }

    fn find_in(&mut self, pid: u32, found: &mut Vec<((u32, u64), Fingerprint)>) -> anyhow::Result<()> {
        let (pagemap, memory) = (Pagemap::open(pid)?, ProcessMemory::open(pid)?);
        let ranges = pagemap.private_ranges(HostVirt(0), LAST)?;
        let picked: Vec<PageRange> =
            ranges.iter().flat_map(|range| blocks(*range)).filter(|range| self.picks(*range)).collect();
        for range in picked {
            // Reading stops at a page that is not there any more.
            let read = memory.read(&[range], &mut self.buffer).unwrap_or(0);
            for (n, page) in self.buffer.chunks_exact(PAGE_BYTES).take(read).enumerate() {
                found.push(((pid, range.start.page() + n as u64), Fingerprint::of(page)));
            }
        }
        Ok(())
    }

    fn picks(&self, block: PageRange) -> bool {
        let number = block.start.page() / BLOCK_PAGES;
        (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32).is_multiple_of(self.one_in)
    }
}

/// Cuts a range at the borders of blocks.
fn blocks(range: PageRange) -> impl Iterator<Item = PageRange> {
    let (mut at, end) = (range.start.page(), range.end().page());
    std::iter::from_fn(move || {
        let first = at;
        at = end.min((first / BLOCK_PAGES + 1) * BLOCK_PAGES);
        (first < end).then(|| PageRange { start: HostVirt(first << PAGE_SHIFT), pages: at - first })
    })
}

/// Numbers in ascending order as runs: the first number, and how many follow each other.
fn runs(numbers: &BTreeSet<u64>) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for number in numbers {
        match runs.last_mut().filter(|(first, count)| first + count == *number) {
            Some((_, count)) => *count += 1,
            None => runs.push((*number, 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_and_runs_are_cut() {
        let cut = blocks(PageRange { start: HostVirt(60 << PAGE_SHIFT), pages: 70 });
        assert_eq!(
            cut.map(|range| (range.start.page(), range.pages)).collect::<Vec<_>>(),
            [(60, 4), (64, 64), (128, 2)]
        );
        assert_eq!(runs(&BTreeSet::from([1, 2, 3, 7, 9])), [(1, 3), (7, 1), (9, 1)]);
    }

    #[test]
    fn recording_shows_pages_that_were_written() {
        let mut memory = vec![1_u8; 256 * PAGE_BYTES];
        let mut recording = Recording::new(std::process::id(), 1);
        recording.look().unwrap();
        let number = |recording: &Recording, byte: usize| {
            let page = (memory.as_ptr() as usize + byte) as u64 >> PAGE_SHIFT;
            recording.pages[&(std::process::id(), page)].0
        };
        let [one, other] = [100, 150].map(|page| number(&recording, page * PAGE_BYTES));
        memory[100 * PAGE_BYTES] = 2;
        let changed = recording.look().unwrap();
        assert_eq!([one, other].map(|page| changed.contains(&page)), [true, false]);
    }
}
