//! `kloster-fig7.8`: merged pages that a web server's load breaks, by the size of the guests. Balloons give the guests their sizes.

use super::{GROUP, Saved, alike, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, OPERATIONS, Timeline};
use crate::rig::{Group, Rig, System, VmsWanted, mb, pause};
use bench::workload;
use std::time::{Duration, Instant};

/// Memory of a guest without a balloon, in bytes.
const WHOLE: u64 = 512 << 20;
/// Number of guests.
const GUESTS: usize = 3;
/// Sizes in MiB, the smallest and the largest.
const SIZES: [u64; 2] = [192, 384];
/// Size in MiB between them, of the full form.
const BETWEEN: u64 = 256;

/// The recipe of `kloster-fig7.8`. In every second repetition, the order of the sizes is reversed.
pub fn breaks(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let full = planned.length == Length::Full;
    let time = Duration::from_secs(if full { 60 } else { 15 });
    let mut sizes = SIZES.to_vec();
    if full {
        sizes.insert(1, BETWEEN);
    }
    if rep_of(planned) % 2 == 1 {
        sizes.reverse();
    }
    let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
    let vms = rig.vms(&VmsWanted { system: System::BALLOONED, ..alike(GUESTS, 0, WHOLE) }, &mut merger)?;
    let (mut measured, mut operations, mut merged) = (Measured::default(), 0, f64::MAX);
    let begin = Instant::now();
    let mut timeline = Timeline { name: "saved".into(), unit: "MB".into(), ..Timeline::default() };
    let mut rates = Vec::new();
    for size in sizes {
        vms.resize(&[size << 20; GUESTS])?;
        timeline.events.push((begin.elapsed().as_secs_f64(), format!("{size} MiB each")));
        merger.on()?;
        merger.settle(begin, &mut timeline)?;
        let saved = Saved::of(&merger, &vms.pids())?;
        merged = merged.min(saved.merged);
        measured.put_at("saved_percent", format!("{size}, idle"), percent(saved.all(), size));
        vms.load(&vms.guests, &workload::web_and_files_script())?;
        let (since, before) = (Instant::now(), merger.broken_pages()?);
        pause(time)?;
        let broken = merger.broken_pages()?.saturating_sub(before) as f64 / since.elapsed().as_secs_f64();
        measured.put_at("breaks_per_s", size, broken);
        measured.put_at(
            "saved_percent",
            format!("{size}, load"),
            percent(Saved::of(&merger, &vms.pids())?.all(), size),
        );
        rates.push((size, broken));
        vms.tell(&vms.guests, workload::STOP_SCRIPT)?;
        operations += vms.operations(&vms.guests)?.iter().sum::<u64>();
        vms.settle()?;
    }
    let of = |size: u64| rates.iter().find(|(of, _)| *of == size).map_or(f64::NAN, |(_, rate)| *rate);
    measured.put("small_over_large", of(SIZES[0]) / of(SIZES[1]));
    measured.put(MERGED, merged);
    measured.put(OPERATIONS, operations as f64);
    measured.timelines.push(timeline);
    Ok(measured)
}

/// Pages as a share of the guests' memory, in percent.
fn percent(pages: f64, size_mib: u64) -> f64 {
    mb(pages) * 1e6 * 100.0 / ((size_mib << 20) * GUESTS as u64) as f64
}
