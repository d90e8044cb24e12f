//! `agarwal-t6.4`: duplicates by place and kind. `kloster-fig2.3`, `kloster-fig2.4`: duplicates over time.

use super::{D256, D512, GROUP, alike, as_guests, first_of, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{Measured, OPERATIONS, Timeline};
use crate::rig::{Group, Rig, mb, pause};
use anyhow::Context;
use bench::workload;
use census::{ByKinds, Findings};
use guest::HostSide;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use survey::{Request, other_processes, take};

/// Number of guests whose duplicates are counted over time.
const GUESTS: usize = 3;
/// Interval between two counts.
const EVERY: Duration = Duration::from_secs(10);

/// The recipe of `agarwal-t6.4`.
pub fn by_place(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
    let vms = rig.vms(&alike(2, first_of(planned, 2), D512), &mut merger)?;
    let guests = as_guests(&vms)?;
    let host_side = HostSide { pids: other_processes(&guests), files: disks(&vms.pids())? };
    let request = Request { host_side, ..Request::of(&guests) };
    let findings = take(&request)?.0;
    let mut measured = Measured::default();
    let missed = findings.partial.iter().filter(|missing| missing.guest != survey::HOST).count();
    anyhow::ensure!(missed == 0, "the census could not read {missed} parts of the guests");
    table(&findings, &mut measured)?;
    Ok(measured)
}

/// The files that these VMMs have open and that the host may cache: their disks.
fn disks(pids: &[u32]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = Vec::new();
    for pid in pids {
        files.extend(host::open_files(*pid)?.into_iter().filter(|path| path.is_file() && !path.starts_with("/proc")));
    }
    files.sort();
    files.dedup();
    Ok(files)
}

fn table(findings: &Findings, measured: &mut Measured) -> anyhow::Result<()> {
    let found = &findings.opportunity;
    let host = found.host.context("the census did not count the host")?;
    for (metric, cells) in
        [("within_mb", found.within), ("host_mb", host), ("between_mb", found.between), ("total_mb", found.total)]
    {
        let ByKinds { anon_anon, file_file, anon_file, total } = cells;
        for (kinds, pages) in
            [("anon/anon", anon_anon), ("file/file", file_file), ("anon/file", anon_file), ("total", total)]
        {
            measured.put_at(metric, kinds, mb(pages as f64));
        }
    }
    let zeros = findings.guests.iter().map(|guest| guest.zero_pages).sum::<u64>() as f64;
    // Each guest's pages of zeros but one are duplicates within that guest.
    let of_zeros = findings.guests.iter().map(|guest| guest.zero_pages.saturating_sub(1)).sum::<u64>() as f64;
    let (within, between, total) = (found.within.total as f64, found.between.total as f64, found.total.total as f64);
    measured.put("zero_mb", mb(zeros));
    measured.put("between_less_host_mb", mb(between - host.total as f64));
    measured.put("host_less_within_mb", mb(host.total as f64 - (within - of_zeros)));
    measured.put("anon_share", found.total.anon_anon as f64 / total.max(1.0));
    measured.put("file_share", (found.total.file_file + found.total.anon_file) as f64 / total.max(1.0));
    measured.put("host_resident_mb", mb(findings.host.host_resident_pages.unwrap_or(0) as f64));
    Ok(())
}

/// The recipe of `kloster-fig2.3` and `kloster-fig2.4`.
pub fn over_time(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger("off", &[Group::of(GROUP)])?;
    let vms = rig.vms(&alike(GUESTS, rep_of(planned), D256), &mut merger)?;
    let guests = as_guests(&vms)?;
    let loaded = planned.arm != "idle";
    let mut measured = Measured::default();
    let mut timeline = Timeline { name: "duplicates within".into(), unit: "%".into(), ..Timeline::default() };
    let looks = if planned.length == Length::Full { 6 } else { 2 };
    let (begin, mut last) = (Instant::now(), Shares::default());
    for look in 0..=looks {
        pause((EVERY * look).saturating_sub(begin.elapsed()))?;
        last = Shares::of(&take(&Request::of(&guests))?.0);
        let seconds = EVERY.as_secs() * u64::from(look);
        measured.put_at("within_percent", seconds, last.within * 100.0);
        measured.put_at("between_percent", seconds, last.between * 100.0);
        measured.put_at("zero_percent", seconds, last.zeros * 100.0);
        timeline.points.push((begin.elapsed().as_secs_f64(), last.within * 100.0));
        if loaded && look == 0 {
            vms.load(&vms.guests, &workload::paced_transactions_script())?;
            timeline.events.push((begin.elapsed().as_secs_f64(), "transactions begin".into()));
        }
    }
    measured.put("within_end", last.within);
    measured.put("between_less_within", last.between - last.within);
    let done = if loaded { vms.operations(&vms.guests)?.iter().sum() } else { 1 };
    measured.put(OPERATIONS, done as f64);
    measured.timelines.push(timeline);
    Ok(measured)
}

/// Kinds of pages, as shares of the resident pages of all guests.
#[derive(Clone, Copy, Debug, Default)]
struct Shares {
    /// Copies beyond the first within a guest, zeros left out.
    within: f64,
    /// Copies between guests.
    between: f64,
    /// Pages of zeros.
    zeros: f64,
}

impl Shares {
    fn of(findings: &Findings) -> Self {
        let sum = |of: fn(&census::GuestFindings) -> u64| findings.guests.iter().map(of).sum::<u64>() as f64;
        let resident = sum(|guest| guest.resident_pages).max(1.0);
        let of_zeros = sum(|guest| guest.zero_pages.saturating_sub(1));
        Self {
            within: (findings.opportunity.within.total as f64 - of_zeros) / resident,
            between: findings.opportunity.between.total as f64 / resident,
            zeros: sum(|guest| guest.zero_pages) / resident,
        }
    }
}
