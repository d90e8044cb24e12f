//! `agarwal-fig4.3` and `agarwal-s4.3`: files on the disk of a guest, among guests that spin, or that do the same. VMs and containers.

use super::{CONTAINER, D256, GROUP, alike, merge, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{Measured, OPERATIONS};
use crate::rig::{Containers, Group, Merger, Rate, Rig, Vms, finishers, run, tell};
use anyhow::Context;
use bench::workload::{self, Timed};
use lab::{Guest, Image};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

/// Numbers of spinning guests for each processor, in the short form.
const SHORT: [usize; 2] = [1, 2];
/// Numbers of guests for each processor.
const DENSITIES: [usize; 3] = [1, 2, 4];
/// Number of files that a load handles, where it has to finish. Each takes six operations.
const FILES: u32 = 60;
/// Number of operations on a file.
const OF_A_FILE: f64 = 6.0;
/// Time limit of a command in a guest.
const COMMAND: Duration = Duration::from_secs(60);
/// Seconds of a load's first run, which is not counted.
const FIRST_RUN: u32 = 2;

/// The guests: VMs or containers.
enum Kind {
    Vms(Vms),
    Containers(Containers),
}

impl Kind {
    fn start(rig: &mut Rig, planned: &Planned, guests: usize, merger: &mut Merger) -> anyhow::Result<Self> {
        if planned.arm == CONTAINER {
            return Ok(Self::Containers(rig.containers(Image::LxcCopied, guests, (merger, GROUP))?));
        }
        Ok(Self::Vms(rig.vms(&alike(guests, rep_of(planned), D256), merger)?))
    }

    fn guests(&self) -> &[Guest] {
        match self {
            Self::Vms(vms) => &vms.guests,
            Self::Containers(containers) => &containers.guests,
        }
    }
}

fn cores() -> anyhow::Result<usize> {
    Ok(available_parallelism().context("cannot count the processors")?.get())
}

/// The recipe of `agarwal-fig4.3`: one guest with files, among guests that spin.
pub fn among_spinning(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let full = planned.length == Length::Full;
    let (densities, seconds) = if full { (&DENSITIES[..], 30) } else { (&SHORT[..], 6) };
    let cores = cores()?;
    let merger = if planned.arm == CONTAINER { "off" } else { &planned.arm };
    let mut merger = rig.merger(merger, &[Group::of(GROUP)])?;
    let kind = Kind::start(rig, planned, cores * densities[densities.len() - 1], &mut merger)?;
    let guests = kind.guests();
    run(&guests[..1], Timed::DiskFiles, FIRST_RUN)?;
    let mut measured = match &kind {
        Kind::Vms(vms) => merge(&merger, vms)?.2,
        Kind::Containers(_) => Measured::default(),
    };
    if let Some(ksmd) = merger.ksmd() {
        // At its highest rate, ksmd would take a whole processor.
        ksmd.set_rate(Rate::of("ksm-default").context("a rate without a name")?)?;
    }
    let mut operations = 0.0;
    let mut rate = |measured: &mut Measured, x: &str| -> anyhow::Result<f64> {
        let speed = run(&guests[..1], Timed::DiskFiles, seconds)?[0];
        operations += speed.operations;
        measured.put_at("rate", x, speed.rate);
        Ok(speed.rate)
    };
    let (alone, mut spinning) = (rate(&mut measured, "alone")?, 0);
    for density in densities {
        let wanted = cores * density - 1;
        for guest in &guests[1 + spinning..=wanted] {
            tell(guest, &workload::spin_script(), COMMAND)?;
        }
        spinning = wanted;
        let among = rate(&mut measured, &density.to_string())?;
        measured.put_at("relative", density, among / alone);
    }
    measured.put(OPERATIONS, operations);
    Ok(measured)
}

/// The recipe of `agarwal-s4.3`: all guests handle files.
pub fn among_the_same(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let cores = cores()?;
    let mut merger = rig.merger("off", &[Group::of(GROUP)])?;
    let kind = Kind::start(rig, planned, cores * DENSITIES[DENSITIES.len() - 1], &mut merger)?;
    let (mut measured, mut operations) = (Measured::default(), 0.0);
    for density in DENSITIES {
        let working = &kind.guests()[..cores * density];
        let begin = Instant::now();
        let finished = finishers(working, Timed::FixedDiskFiles(FILES)) as f64;
        measured.put_at("finished", density, finished / working.len() as f64);
        measured.put_at("slowest_s", density, begin.elapsed().as_secs_f64());
        operations += finished * f64::from(FILES) * OF_A_FILE;
    }
    measured.put(OPERATIONS, operations);
    Ok(measured)
}
