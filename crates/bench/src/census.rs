//! `pagefold bench census`: the census beside plain hashing of the same bytes.
//!
//! A round measures each contestant once, one after the other, so that a disturbance of the machine touches all alike.
//! The figures are medians over the rounds.

use super::median::median;
use super::synthetic::{AlignedPage, Guests, contents};
use anyhow::{Context, bail};
use cli::exit::Outcome;
use cli::say;
use cli::size::parse_bytes;
use guest::{Guest, HostSide};
use page::{Fingerprint, PAGE_BYTES};
use report::{Align, Table};
use serde::Serialize;
use std::hint::black_box;
use std::io::Write;
use std::process::Command;
use std::time::Instant;
use survey::{Request, take};

/// Arguments of `pagefold bench census`.
#[derive(clap::Args)]
pub struct Args {
    /// Guests
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=64))]
    guests: u64,
    /// Memory of all guests together
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_bytes)]
    memory: u64,
    /// Times that everything is measured
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The result of the bench.
#[derive(Debug, Serialize)]
struct Bench {
    /// Number of guests.
    guests: u64,
    /// Number of rounds; figures are medians over them.
    rounds: u32,
    /// Guests' memory in transparent huge pages, as VMMs hold guest RAM.
    huge_pages: Figures,
    /// Guests' memory in small pages, as containers and VMs on a fragmented host hold theirs.
    small_pages: Figures,
}

/// Results with one backing of the guests' memory. Bandwidths are GiB of guest memory a second.
#[derive(Debug, Serialize)]
struct Figures {
    /// Pages of all guests.
    pages: u64,
    /// Bandwidth of copying.
    memcpy_gib_per_s: f64,
    /// Bandwidth of XXH3 alone.
    plain_xxh3_gib_per_s: f64,
    /// Ways of taking the census.
    census: Vec<CensusFigures>,
    /// The census with one thread over a quarter, half and all of the guests.
    by_size: Vec<SizeFigures>,
    /// Ratios of these.
    ratio: Ratios,
    /// Peak resident set of a census of all guests that runs in a process of its own.
    peak_rss_bytes: u64,
    /// Memory of the index for one page.
    index_bytes_per_page: f64,
}

/// One way of taking the census.
#[derive(Debug, Serialize)]
struct CensusFigures {
    /// Scanning threads.
    threads: usize,
    /// The source of the bytes.
    read: census::ReadThrough,
    /// Bound of the index; `None` without one.
    index_bound_bytes: Option<usize>,
    /// Passes over the hash space.
    passes: u32,
    /// Most memory that the index held.
    index_bytes: u64,
    /// Time of the census.
    seconds: f64,
    /// Bandwidth of the census.
    gib_per_s: f64,
    /// Superfluous frames that it found.
    duplicate_pages: u64,
}

/// The census over some of the guests.
#[derive(Debug, Serialize)]
struct SizeFigures {
    /// Number of guests.
    guests: usize,
    /// Their pages.
    pages: u64,
    /// Time for one page.
    us_per_page: f64,
}

/// Ratios of bandwidths and times.
#[derive(Debug, Serialize)]
struct Ratios {
    /// Bandwidth of the census with one thread, as a multiple of plain XXH3's.
    census_to_xxh3: f64,
    /// The same as a multiple of copying's.
    census_to_memcpy: f64,
    /// Time with one thread, as a multiple of the time with two.
    two_threads_speedup: f64,
    /// Time with room for a quarter of the index, as a multiple of the time with room for all of it.
    bounded_to_unbounded: f64,
    /// Time with `--no-trace`, as a multiple of the time without.
    no_trace_to_plain: f64,
    /// Time per page with all guests, as a multiple of the time per page with a quarter of them.
    us_per_page_growth: f64,
}

/// One way of taking the census, timed again and again.
struct Contestant {
    guests: Vec<Guest>,
    threads: usize,
    index_bytes: Option<usize>,
    no_trace: bool,
    seconds: Vec<f64>,
    last: census::Findings,
}

impl Contestant {
    fn new(guests: Vec<Guest>, threads: usize, index_bytes: Option<usize>) -> Self {
        Self { guests, threads, index_bytes, no_trace: false, seconds: Vec::new(), last: census::Findings::default() }
    }

    fn run(&mut self) -> anyhow::Result<()> {
        let begin = Instant::now();
        let request = Request {
            guests: &self.guests,
            host_side: HostSide::default(),
            threads: self.threads,
            index_bytes: self.index_bytes,
            no_trace: self.no_trace,
            map_cells: 0,
            samples: None,
            inside: &[],
            see: None,
            round: None,
        };
        self.last = take(&request)?.0;
        self.seconds.push(begin.elapsed().as_secs_f64());
        Ok(())
    }

    fn figures(&self) -> CensusFigures {
        let (host, seconds) = (&self.last.host, median(&self.seconds));
        CensusFigures {
            threads: self.threads,
            read: host.read,
            index_bound_bytes: self.index_bytes,
            passes: host.passes,
            index_bytes: host.index_bytes,
            seconds,
            gib_per_s: gib(host.pages_scanned) / seconds,
            duplicate_pages: self.last.all_saved_pages,
        }
    }

    fn us_per_page(&self) -> f64 {
        median(&self.seconds) * 1e6 / self.last.host.pages_scanned as f64
    }
}

/// Runs the bench and prints its result.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let pages = usize::try_from(args.memory).context("more memory than this machine can address")? / PAGE_BYTES;
    let pages_a_guest = pages / args.guests as usize;
    if pages_a_guest < 1024 {
        bail!(cli::exit::Stop::Usage("--memory gives a guest less than 4M: nothing to measure".to_owned()));
    }
    let bench = Bench {
        guests: args.guests,
        rounds: args.rounds,
        huge_pages: measure(args, pages_a_guest, true)?,
        small_pages: measure(args, pages_a_guest, false)?,
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        report::json::write(&mut out, &bench)?;
    } else {
        for (what, figures) in [("huge", &bench.huge_pages), ("small", &bench.small_pages)] {
            print(&mut out, args, what, figures)?;
        }
    }
    Ok(Outcome::Done)
}

/// Seconds that hashing and copying the guests' pages took without a census, one figure a round.
#[derive(Default)]
struct Plain {
    xxh3: Vec<f64>,
    memcpy: Vec<f64>,
}

fn measure(args: &Args, pages_a_guest: usize, huge: bool) -> anyhow::Result<Figures> {
    let backing = if huge { "huge" } else { "small" };
    say!("pagefold: filling {} guests of {} MiB in {backing} pages", args.guests, pages_a_guest >> 8);
    let running = Guests::start(args.guests, pages_a_guest, huge)?;
    let all = args.guests as usize;
    let copies = (0..args.guests).map(|n| contents(n, pages_a_guest, huge)).collect::<anyhow::Result<Vec<_>>>()?;
    let mut target = contents(0, pages_a_guest, huge)?;
    let mut ways = contestants(&running, all, pages_a_guest);
    let mut plain = Plain::default();
    for round in 1..=args.rounds {
        say!("pagefold: round {round} of {}", args.rounds);
        plain.xxh3.push(time(|| hash_all(&copies)));
        plain.memcpy.push(time(|| copy_all(&copies, &mut target)));
        ways.iter_mut().try_for_each(Contestant::run)?;
    }
    figures(&ways, &plain, gib((pages_a_guest * all) as u64))
}

/// The ways of taking the census: one thread, two threads, a bounded index, no trace; a quarter and half of the guests.
fn contestants(running: &Guests, all: usize, pages_a_guest: usize) -> [Contestant; 6] {
    let quarter_of_index = pages_a_guest * all * 20 / 4;
    let way = |guests, threads, bound| Contestant::new(running.first(guests), threads, bound);
    [
        way(all, 1, None),
        way(all, 2, None),
        way(all, 1, Some(quarter_of_index)),
        Contestant { no_trace: true, ..way(all, 1, None) },
        way(all.div_ceil(4), 1, None),
        way(all.div_ceil(2), 1, None),
    ]
}

/// The figures of [`contestants`], while their guests still run. The guests' memory in GiB is `gib_of_guests`.
fn figures(ways: &[Contestant; 6], plain: &Plain, gib_of_guests: f64) -> anyhow::Result<Figures> {
    let [one, two, bounded, no_trace, quarter, half] = ways;
    let pids = |guests: &[Guest]| guests.iter().flat_map(|g| g.pids.clone()).collect::<Vec<_>>();
    let size = |c: &Contestant| SizeFigures {
        guests: c.guests.len(),
        pages: c.last.host.pages_scanned,
        us_per_page: c.us_per_page(),
    };
    Ok(Figures {
        pages: one.last.host.pages_scanned,
        memcpy_gib_per_s: gib_of_guests / median(&plain.memcpy),
        plain_xxh3_gib_per_s: gib_of_guests / median(&plain.xxh3),
        census: [one, two, bounded, no_trace].map(Contestant::figures).into(),
        by_size: [quarter, half, one].map(size).into(),
        ratio: Ratios {
            census_to_xxh3: one.figures().gib_per_s * median(&plain.xxh3) / gib_of_guests,
            census_to_memcpy: one.figures().gib_per_s * median(&plain.memcpy) / gib_of_guests,
            two_threads_speedup: median(&one.seconds) / median(&two.seconds),
            bounded_to_unbounded: median(&bounded.seconds) / median(&one.seconds),
            no_trace_to_plain: median(&no_trace.seconds) / median(&one.seconds),
            us_per_page_growth: one.us_per_page() / quarter.us_per_page(),
        },
        peak_rss_bytes: peak_of_census(&pids(&one.guests))?,
        index_bytes_per_page: one.last.host.index_bytes as f64 / one.last.host.pages_scanned as f64,
    })
}

fn print(out: &mut dyn Write, args: &Args, backing: &str, f: &Figures) -> std::io::Result<()> {
    use Align::{Left, Right};
    let mut table =
        Table::new(&[("", Left), ("GiB/s", Right), ("of xxh3", Right), ("index", Right), ("passes", Right)]);
    let row = |table: &mut Table, what: &str, gib_per_s: f64, index: String, passes: String| {
        let ratio = format!("{:.2}", gib_per_s / f.plain_xxh3_gib_per_s);
        table.row([what.to_owned(), format!("{gib_per_s:.1}"), ratio, index, passes]);
    };
    row(&mut table, "memcpy", f.memcpy_gib_per_s, String::new(), String::new());
    row(&mut table, "plain xxh3", f.plain_xxh3_gib_per_s, String::new(), String::new());
    for c in &f.census {
        let bound = if c.index_bound_bytes.is_some() { ", bounded index" } else { "" };
        let plural = if c.threads == 1 { "" } else { "s" };
        let through = match c.read {
            census::ReadThrough::Frames => ", no trace",
            census::ReadThrough::Processes => "",
        };
        let what = format!("census, {} thread{plural}{bound}{through}", c.threads);
        row(&mut table, &what, c.gib_per_s, cli::bytes(c.index_bytes), c.passes.to_string());
    }
    writeln!(
        out,
        "{} of {} guests in {backing} pages, median of {} rounds\n",
        cli::bytes(page::pages_to_bytes(f.pages)),
        args.guests,
        args.rounds
    )?;
    write!(out, "{table}")?;
    writeln!(
        out,
        "\nindex {:.1} bytes a page, peak resident set {}; {:.3} us a page with all guests, {:.2} times that of a quarter\n",
        f.index_bytes_per_page,
        cli::bytes(f.peak_rss_bytes),
        f.by_size.last().map_or(0.0, |s| s.us_per_page),
        f.ratio.us_per_page_growth,
    )
}

fn hash_all(copies: &[Vec<AlignedPage>]) {
    for page in copies.iter().flatten() {
        black_box(Fingerprint::of(&page.0));
    }
}

fn copy_all(copies: &[Vec<AlignedPage>], to: &mut [AlignedPage]) {
    for copy in copies {
        for (to, from) in to.iter_mut().zip(copy) {
            to.0.copy_from_slice(&from.0);
        }
        black_box(&mut *to);
    }
}

fn time(work: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    work();
    begin.elapsed().as_secs_f64()
}

/// Peak resident set of a census in a process of its own.
fn peak_of_census(pids: &[u32]) -> anyhow::Result<u64> {
    let mut command = Command::new(cli::pagefold());
    command.args(["census", "--json"]);
    for pid in pids {
        command.arg("--pid").arg(pid.to_string());
    }
    let output = command.output().context("cannot run a census in a process of its own")?;
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).context("its output is not JSON")?;
    found["host"]["peak_rss_bytes"].as_u64().context("its output lacks host.peak_rss_bytes")
}

fn gib(pages: u64) -> f64 {
    (pages * PAGE_BYTES as u64) as f64 / f64::from(1 << 30)
}
