//! The course of a census: plan, scan in as many passes as the index needs, count.

use crate::Inside;
use crate::progress::Progress;
use census::{
    Census, Collected, Entry, Findings, FrameIdentity, GuestFindings, Interval, Layout, Partial, ReadThrough, Round,
    Stretch,
};
use cli::exit::Stop;
use guest::{Guest, HostSide, Missed, Plan, ScanOptions, ScanTotals};
use page::{GuestIndex, PAGE_BYTES, PageSample};
use std::time::{Duration, Instant};

/// Stands for the host itself among the ids of guests, all of which have a colon.
pub const HOST: &str = "host";

/// Greatest number of guests in one census: the index numbers them with 16 bits, and one number is the host's.
const MOST_GUESTS: usize = u16::MAX as usize - 1;

/// Which guests a census counts, and how.
pub struct Request<'a> {
    /// The guests that are counted.
    pub guests: &'a [Guest],
    /// The part of the host that is included.
    pub host_side: HostSide,
    /// Number of scanning threads.
    pub threads: usize,
    /// Bound of the index, all threads together, in bytes.
    pub index_bytes: Option<usize>,
    /// Read page frames themselves, not the memory of processes.
    pub no_trace: bool,
    /// Number of cells of each guest's page map.
    pub map_cells: u32,
    /// Called with every sample, from any thread.
    pub samples: Option<&'a (dyn Fn(&PageSample) + Sync)>,
    /// Knowledge of the guests' memory from inside, by guest; may be shorter than the list of guests.
    pub inside: &'a [Option<Inside>],
    /// An observer of the plan and of every class.
    pub see: Option<&'a dyn See>,
    /// Set if this is a round of a watch.
    pub round: Option<WatchRound<'a>>,
}

impl<'a> Request<'a> {
    /// A census of these guests alone, by one thread, from the memory of their processes.
    pub fn of(guests: &'a [Guest]) -> Self {
        Self {
            guests,
            host_side: HostSide::default(),
            threads: 1,
            index_bytes: None,
            no_trace: false,
            map_cells: 0,
            samples: None,
            inside: &[],
            see: None,
            round: None,
        }
    }
}

/// An observer that learns all holders of every content.
pub trait See {
    /// Called once, before the scan, with the places of all pages.
    fn plan(&self, plan: &Plan);
    /// Called for each content, with all of its entries, frame by frame. A zero page that only its owner maps has no
    /// entry.
    fn class(&self, class: &[Entry]);
}

/// A round of a watch.
pub struct WatchRound<'a> {
    /// Number of the round, from 1.
    pub number: u32,
    /// Time since the watch began.
    pub since_start: Duration,
    /// The round before.
    pub before: Option<&'a Round>,
}

/// Takes a census. In a watch, it also returns the round, with which the next round is compared.
///
/// # Errors
/// There are too many guests, or `no_trace` is asked for and this host does not allow it.
pub fn take(request: &Request<'_>) -> anyhow::Result<(Findings, Option<Round>)> {
    let begin = Instant::now();
    if request.guests.len() > MOST_GUESTS {
        let too_many = format!("{} guests are too many for one census: select {MOST_GUESTS}", request.guests.len());
        return Err(Stop::Usage(too_many).into());
    }
    let plan = Plan::new(request.guests, &request.host_side);
    let uses = crate::uses(&plan, request.inside);
    let HostSide { pids, files } = &request.host_side;
    let with_host = !(pids.is_empty() && files.is_empty());
    let layout = Layout { guests: plan.positions().to_vec(), map_cells: request.map_cells, uses, with_host };
    if let Some(see) = request.see {
        see.plan(&plan);
    }
    let mut census = Census::new(request.guests.iter().map(label).collect(), layout);
    if let Some(round) = &request.round {
        census.watch(round.number, round.since_start.as_secs() as u32, stretches(&plan));
    }
    let Scanned { totals, hashed_pages, seen_in_first_pass } = scan(request, &plan, &mut census)?;
    let (mut findings, round) = census.finish(request.round.as_ref().and_then(|r| r.before));
    fill_in(&mut findings, request, &plan, totals);
    let host = &mut findings.host;
    host.pages_hashed = hashed_pages;
    host.peak_rss_bytes = host::own_peak_rss_bytes();
    host.seconds = begin.elapsed().as_secs_f64();
    host.hash_gib_per_s = (hashed_pages * PAGE_BYTES as u64) as f64 / f64::from(1 << 30) / host.seconds;
    let resident: u64 = findings.guests.iter().map(|g| g.resident_pages).sum();
    host.drifted_pages = seen_in_first_pass.abs_diff(resident + host.host_resident_pages.unwrap_or(0));
    Ok((findings, round))
}

/// Totals of the scans of all passes.
struct Scanned {
    totals: ScanTotals,
    hashed_pages: u64,
    seen_in_first_pass: u64,
}

/// Scans in as many passes as the index needs, and counts each pass in the census.
fn scan(request: &Request<'_>, plan: &Plan, census: &mut Census) -> anyhow::Result<Scanned> {
    let progress = Progress::start("pages", plan.pages());
    let mut totals: Option<ScanTotals> = None;
    let (mut hashed_pages, mut seen_in_first_pass) = (0, 0);
    let mut from = Some(0);
    while let Some(first) = from {
        let interval = Interval::from(first);
        let (scanned, seen, collected) = pass(request, plan, census, &interval, &progress, totals.is_none())?;
        hashed_pages += scanned.hashed_pages;
        match &mut totals {
            // All passes scan the same pages, so the counts of the first pass are kept. Pages that could not be read
            // are added up.
            Some(totals) => totals.missed.extend(scanned.missed),
            None => {
                seen_in_first_pass = seen;
                totals = Some(scanned);
            }
        }
        census.pass_seen(&interval, collected, &mut |class| {
            if let Some(see) = request.see {
                see.class(class);
            }
        });
        from = interval.next();
        if let Some(next) = from {
            // From the share of the hash space that is done follows how many passes the whole of it takes.
            let share_done = next as f64 / u64::MAX as f64;
            let scans = (f64::from(census.passes()) / share_done).ceil();
            progress.set_total((plan.pages() as f64 * scans) as u64);
        }
    }
    Ok(Scanned { totals: totals.unwrap_or_default(), hashed_pages, seen_in_first_pass })
}

/// The collector and the sample count of one scanning thread.
struct Sink<'a> {
    collector: census::Collector<'a>,
    seen: u64,
}

/// Makes one pass. Returns the totals of the scan, the number of its samples, and the entries that the index took.
fn pass(
    request: &Request<'_>,
    plan: &Plan,
    census: &Census,
    interval: &Interval,
    progress: &Progress,
    first: bool,
) -> anyhow::Result<(ScanTotals, u64, Vec<Collected>)> {
    let share = request.index_bytes.map(|bytes| bytes / request.threads);
    let samples = request.samples.filter(|_| first);
    let sink = || Sink { collector: census.collector(interval, share), seen: 0 };
    let mut sinks: Vec<_> = (0..request.threads).map(|_| sink()).collect();
    let push = |sink: &mut Sink<'_>, sample: &PageSample| {
        sink.seen += 1;
        sink.collector.push(sample);
        if let Some(samples) = samples {
            samples(sample);
        }
    };
    let options = ScanOptions { all_flags: samples.is_some(), no_trace: request.no_trace };
    let scanned = plan.scan(&mut sinks, push, options, progress.done());
    let totals = scanned.map_err(|e| Stop::HostLacks(format!("{e}: --no-trace needs root, BPF and no lockdown")))?;
    let seen = sinks.iter().map(|s| s.seen).sum();
    // Sorting is the larger part of indexing, so the threads share it too.
    let collected = std::thread::scope(|threads| {
        let finishing: Vec<_> = sinks.into_iter().map(|s| threads.spawn(|| s.collector.finish())).collect();
        finishing.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    Ok((totals, seen, collected))
}

fn label(guest: &Guest) -> GuestFindings {
    GuestFindings {
        id: guest.id.clone(),
        name: guest.shown_name(),
        group: guest.group.clone(),
        kind: guest.kind.name().to_owned(),
        ..GuestFindings::default()
    }
}

fn stretches(plan: &Plan) -> Vec<Stretch> {
    plan.stretches().map(|(pid, page, pages, position)| Stretch { pid, page, pages, position }).collect()
}

/// Adds the findings that come from the scan, not from the samples: counts of pages, threads, time, missing parts.
fn fill_in(findings: &mut Findings, request: &Request<'_>, plan: &Plan, totals: ScanTotals) {
    let host = &mut findings.host;
    host.page_bytes = PAGE_BYTES as u64;
    host.pages_scanned = plan.pages();
    host.threads = request.threads;
    host.frames = if totals.exact { FrameIdentity::Exact } else { FrameIdentity::Inferred };
    host.read = if request.no_trace { ReadThrough::Frames } else { ReadThrough::Processes };
    for (n, guest) in findings.guests.iter_mut().enumerate() {
        guest.mapped_pages = totals.mapped_pages.get(n).copied().unwrap_or(0);
        guest.unreadable_pages = totals.unreadable_pages.get(n).copied().unwrap_or(0);
        guest.swapped_pages = plan.swapped_pages()[n];
        match request.inside.get(n).and_then(Option::as_ref) {
            Some(inside) => inside.complete(&mut guest.kinds, guest.duplicates.host.is_some()),
            None => guest.kinds.clear(),
        }
    }
    findings.already_shared.ksm_saved_pages = totals.ksm_mappings.saturating_sub(findings.already_shared.ksm_frames);
    let missed = plan.missed().iter().chain(&totals.missed);
    findings.partial = missed.map(|m| partial(m, request.guests)).collect();
    findings.partial.sort();
    findings.partial.dedup();
}

fn partial(missed: &Missed, guests: &[Guest]) -> Partial {
    let guest = if missed.owner == GuestIndex::HOST { HOST } else { &guests[usize::from(missed.owner.0)].id };
    Partial { guest: guest.to_owned(), pid: missed.pid, reason: missed.reason.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest::{Facts, GuestKind};
    use std::io::{Read, Write};
    use std::process::{Child, Command, Stdio};
    use std::sync::Mutex;

    fn guest(child: &Child) -> Guest {
        Guest {
            id: format!("process:{}", child.id()),
            name: "cat".to_owned(),
            kind: GuestKind::Process,
            pids: vec![child.id()],
            group: "test".to_owned(),
            ram_bytes: None,
            facts: Facts::default(),
        }
    }

    #[test]
    fn a_guest_that_dies_after_the_first_pass_is_partial() {
        let start = || {
            let mut command = Command::new("cat");
            let mut cat = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start cat");
            // Once it has answered, it has all of its memory.
            let mut answer = [0; 3];
            cat.stdin.as_mut().expect("a pipe").write_all(b"up\n").expect("ask");
            cat.stdout.as_mut().expect("a pipe").read_exact(&mut answer).expect("hear");
            cat
        };
        let mut quiet: Vec<_> = (0..6).map(|_| start()).collect();
        let doomed = Mutex::new(start());
        let guests: Vec<_> = [guest(&doomed.lock().unwrap())].into_iter().chain(quiet.iter().map(guest)).collect();
        // With one thread, the first sample of the second guest comes after the first guest's last.
        let kill_the_first = |sample: &PageSample| {
            if sample.owner == GuestIndex(1) {
                let mut doomed = doomed.lock().unwrap();
                doomed.kill().and_then(|()| doomed.wait()).expect("end our own child");
            }
        };
        let request = Request { index_bytes: Some(1), samples: Some(&kill_the_first), ..Request::of(&guests) };
        let findings = take(&request).expect("a census").0;
        for child in &mut quiet {
            child.kill().and_then(|()| child.wait()).expect("end our own child");
        }
        assert!(findings.host.passes > 1, "{:?}", findings.host);
        assert!(findings.partial.iter().any(|p| p.reason.contains("ended")), "{:?}", findings.partial);
        assert!(findings.partial.iter().all(|p| p.guest == guests[0].id), "{:?}", findings.partial);
    }
}
