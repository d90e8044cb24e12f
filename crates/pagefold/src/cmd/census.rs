//! `pagefold census`: count every page of the selected guests, once or again and again.

use crate::cmd::which::Which;
use anyhow::Context;
use census::{Findings, Round};
use cli::exit::{Outcome, Stop};
use cli::size::parse_bytes;
use cli::{OutputFile, say};
use guest::{Footprint, Guest, HostSide};
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use survey::Inside;
use survey::Selection;
use survey::{Request, WatchRound, check_host_files, other_processes, take};

/// Number of cells of each guest's page map in a report.
const MAP_CELLS: u32 = 2048;
/// Greatest number of scanning threads.
const MOST_THREADS: i64 = 1024;

/// Arguments of `pagefold census`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold census                                all VMs and containers, each trusting nobody
  pagefold census --group-by name --html r.html  web-1 and web-2 trust each other; write a report with pictures
  pagefold census --group-by service             groups as the running service has them
  pagefold census --pid 4711 --pid 4712 --json   two processes, for a program
  pagefold census --watch 30                     again every 30 seconds: what changed, what stays duplicate")]
pub struct Args {
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    service: Which,
    /// Count the host's other processes too, as one owner beside the guests
    #[arg(long)]
    include_host: bool,
    /// Count this file's page cache as the host's, mapped or not: a disk image, say (repeatable)
    #[arg(long, value_name = "FILE")]
    host_file: Vec<PathBuf>,
    /// Scanning threads
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=MOST_THREADS))]
    threads: u16,
    /// Bound the index (64M, 1G, ...) and scan in several passes when it is reached
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    index_memory: Option<u64>,
    /// Read page frames through BPF, so that pages do not look recently used afterwards; slower for huge pages
    #[arg(long)]
    no_trace: bool,
    /// Do not look into VMs for what each page is to the guest itself (with --no-trace nobody looks)
    #[arg(long)]
    no_kinds: bool,
    /// Repeat every so many seconds and report what changed
    #[arg(long, value_name = "SECONDS", conflicts_with = "index_memory", value_parser = clap::value_parser!(u32).range(1..))]
    watch: Option<u32>,
    /// Stop a watch after so many rounds
    #[arg(long, value_name = "N", requires = "watch", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Print JSON; with --watch, one object a line and round
    #[arg(long)]
    json: bool,
    /// Write a self-contained report with pictures
    #[arg(long, value_name = "FILE", conflicts_with = "watch")]
    html: Option<PathBuf>,
    /// Write every sample as Parquet
    #[arg(long, value_name = "FILE", conflicts_with = "watch")]
    parquet: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<Outcome> {
    check_host_files(&args.host_file)?;
    match args.watch {
        Some(seconds) => watch(&args, Duration::from_secs(seconds.into())),
        None => once(&args),
    }
}

fn once(args: &Args) -> anyhow::Result<Outcome> {
    if args.html.is_some() && args.html == args.parquet {
        let twice = "--html and --parquet name the same file: they would overwrite each other";
        return Err(Stop::Usage(twice.to_owned()).into());
    }
    let guests = args.selection.resolve(&|| args.service.members())?;
    // Files first, so that an error about them does not come after a long census. A file that is there stays as it
    // is until the new one is complete.
    let html = args.html.as_deref().map(OutputFile::create).transpose()?;
    let parquet = args.parquet.as_deref().map(OutputFile::create).transpose()?;
    let export = parquet.map(|file| samples::Export::new(file, &guests)).transpose()?;
    let inside = inside(args, &guests);
    let request = request(args, &guests, &inside);
    let (findings, _) = match &export {
        Some(export) => take(&Request { samples: Some(&|sample| export.push(sample)), ..request })?,
        None => take(&request)?,
    };
    if let Some(export) = export {
        export.close()?;
    }
    if let Some(html) = html {
        write_report(html, &findings, &guests)?;
    }
    print(args, &findings)?;
    Ok(outcome(&findings))
}

fn watch(args: &Args, pause: Duration) -> anyhow::Result<Outcome> {
    let begin = Instant::now();
    let mut before: Option<Round> = None;
    let mut all = Outcome::Done;
    for number in 1..=args.rounds.unwrap_or(u32::MAX) {
        // Guests come and go between rounds.
        let guests = args.selection.resolve(&|| args.service.members())?;
        let round = WatchRound { number, since_start: begin.elapsed(), before: before.as_ref() };
        let inside = inside(args, &guests);
        let (findings, this) = take(&Request { round: Some(round), ..request(args, &guests, &inside) })?;
        before = this;
        print(args, &findings)?;
        if outcome(&findings) == Outcome::Partial {
            all = Outcome::Partial;
        }
        let next = pause * number;
        if args.rounds != Some(number) {
            std::thread::sleep(next.saturating_sub(begin.elapsed()));
        }
    }
    Ok(all)
}

/// Looks into the VMs. A VM that cannot be looked into is counted all the same.
fn inside(args: &Args, guests: &[Guest]) -> Vec<Option<Inside>> {
    if args.no_kinds || args.no_trace {
        return Vec::new();
    }
    guests.iter().map(|guest| Inside::of(guest, None, false).unwrap_or_default()).collect()
}

fn request<'a>(args: &Args, guests: &'a [Guest], inside: &'a [Option<Inside>]) -> Request<'a> {
    let pids = if args.include_host { other_processes(guests) } else { Vec::new() };
    Request {
        guests,
        host_side: HostSide { pids, files: args.host_file.clone() },
        threads: args.threads.into(),
        index_bytes: args.index_memory.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)),
        no_trace: args.no_trace,
        map_cells: if args.html.is_some() { MAP_CELLS } else { 0 },
        samples: None,
        inside,
        see: None,
        round: None,
    }
}

fn print(args: &Args, findings: &Findings) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let written = match (args.json, args.watch) {
        (true, Some(_)) => report::json::write_line(&mut out, findings),
        (true, None) => report::json::write(&mut out, findings),
        (false, _) => report::census_table::write(&mut out, findings),
    };
    written.and_then(|()| out.flush()).context("cannot write to stdout")
}

/// Prints the missing parts. A part that is missing of the host makes the census partial like any other.
fn outcome(findings: &Findings) -> Outcome {
    for missing in &findings.partial {
        let of_whom = if missing.pid == 0 { String::new() } else { format!(", process {}", missing.pid) };
        say!("pagefold: {}{of_whom}: {}", cli::printable(&missing.guest), cli::printable(&missing.reason));
    }
    if findings.partial.is_empty() { Outcome::Done } else { Outcome::Partial }
}

/// Writes the report, and puts it at its path.
fn write_report(file: OutputFile, findings: &Findings, guests: &[Guest]) -> anyhow::Result<()> {
    // A guest that ended meanwhile is in the census's own list of missing parts.
    let footprints: Vec<_> = guests.iter().map(|guest| Footprint::measure(guest).0).collect();
    let made_at = made_at();
    let (title, footprints) = ("Pagefold census", &footprints);
    let report = report::html::Report { findings, footprints, title, made_at: &made_at };
    let written = file.handle().map(BufWriter::new).and_then(|mut out| {
        report::html::write(&mut out, &report)?;
        out.flush()
    });
    written.with_context(|| format!("cannot write {}", file.path().display()))?;
    let path = file.path().to_owned();
    file.commit()?;
    say!("pagefold: wrote {}", path.display());
    Ok(())
}

/// Time and place of the census: `2026-11-20 14:30 UTC on host, Linux 6.18.1`.
#[expect(clippy::disallowed_methods, reason = "a date for people")]
fn made_at() -> String {
    let time = humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string();
    let (day, clock) = time.split_once('T').unwrap_or((&time, ""));
    let kernel = host::Kernel::this();
    format!("{day} {} UTC on {}, Linux {}", &clock[..clock.len().min(5)], kernel.host_name, kernel.release)
}

/// Export of samples, in builds that have it.
#[cfg(feature = "parquet")]
mod samples {
    use anyhow::Context;
    use cli::{OutputFile, say};
    use guest::Guest;
    use page::PageSample;
    use report::parquet::SampleWriter;
    use std::sync::{Mutex, PoisonError};

    /// An export in progress; the first error is kept until the end.
    pub struct Export {
        file: OutputFile,
        writer: Mutex<(SampleWriter, anyhow::Result<()>)>,
    }

    impl Export {
        pub fn new(file: OutputFile, guests: &[Guest]) -> anyhow::Result<Self> {
            let writer = file.handle().and_then(|handle| SampleWriter::new(file.path(), handle, guests));
            let writer = writer.with_context(|| format!("cannot write {}", file.path().display()))?;
            Ok(Self { file, writer: Mutex::new((writer, Ok(()))) })
        }

        pub fn push(&self, sample: &PageSample) {
            let mut guard = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
            let (writer, so_far) = &mut *guard;
            if so_far.is_ok() {
                *so_far = writer.write(std::slice::from_ref(sample)).map_err(anyhow::Error::from);
            }
        }

        pub fn close(self) -> anyhow::Result<()> {
            let (writer, so_far) = self.writer.into_inner().unwrap_or_else(PoisonError::into_inner);
            let path = self.file.path().to_owned();
            so_far
                .and_then(|()| writer.close().map_err(anyhow::Error::from))
                .with_context(|| format!("cannot write {}", path.display()))?;
            self.file.commit()?;
            say!("pagefold: wrote {}", path.display());
            Ok(())
        }
    }
}

/// Export of samples, in builds without it: an error.
#[cfg(not(feature = "parquet"))]
mod samples {
    use cli::OutputFile;
    use cli::exit::Stop;
    use guest::Guest;
    use page::PageSample;
    use std::convert::Infallible;

    /// No value of this type exists.
    pub struct Export(Infallible);

    impl Export {
        pub fn new(_: OutputFile, _: &[Guest]) -> anyhow::Result<Self> {
            let why = "this pagefold was built without Parquet: build it with --features parquet";
            Err(Stop::HostLacks(why.to_owned()).into())
        }

        pub fn push(&self, _: &PageSample) {
            match self.0 {}
        }

        pub fn close(self) -> anyhow::Result<()> {
            match self.0 {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use census::Partial;

    #[test]
    fn any_missing_part_makes_census_partial() {
        let missing = |guest: &str, pid| Partial { guest: guest.to_owned(), pid, reason: "it has ended".to_owned() };
        let of = |partial| outcome(&Findings { partial, ..Findings::default() });
        assert_eq!(of(Vec::new()), Outcome::Done);
        for partial in [missing("qemu:acme-1", 7), missing("host", 7), missing("host", 0)] {
            assert_eq!(of(vec![partial.clone()]), Outcome::Partial, "{partial:?}");
        }
    }
}
