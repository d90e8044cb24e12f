//! `agarwal-t6.2`, `agarwal-t6.3`, `agarwal-s6.4`, `sonone-base`: the footprint of containers, beside that of VMs.

use super::{CONTAINER, D256, D512, GROUP, alike, first_of, merger_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Asked, Containers, Group, Merger, Rig, Vms, footprint, pause};
use crate::stats;
use anyhow::Context;
use host::Usage;
use lab::Image;
use std::time::{Duration, Instant};

/// Samples of a footprint, and the interval between them.
const SAMPLES: (usize, Duration) = (10, Duration::from_millis(300));
/// Numbers of containers of the short form.
const SHORT: [usize; 3] = [1, 4, 8];
/// Numbers of containers of the full form.
const FULL: [usize; 4] = [1, 4, 8, 16];
/// Group of the process that proves that the merger works.
const CONTROL: &str = "control";

/// One guest of either kind.
enum One {
    Vm(Vms),
    Container(Containers),
}

impl One {
    fn start(rig: &mut Rig, planned: &Planned, merger: &mut Merger) -> anyhow::Result<Self> {
        if planned.arm.ends_with(CONTAINER) {
            return Ok(Self::Container(rig.containers(Image::LxcShared, 1, (merger, GROUP))?));
        }
        Ok(Self::Vm(rig.vms(&alike(1, first_of(planned, 1), D512), merger)?))
    }

    fn pids(&self) -> Vec<u32> {
        match self {
            Self::Vm(vms) => vms.pids(),
            Self::Container(containers) => containers.pids(),
        }
    }
}

/// Bytes as MB (10^6 bytes).
fn bytes_mb(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

/// `agarwal-t6.2`.
pub fn one_guest(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger("off", &[Group::of(GROUP)])?;
    let one = One::start(rig, planned, &mut merger)?;
    let pids = one.pids();
    let (mut usages, mut over_used) = (Vec::new(), Vec::new());
    for _ in 0..SAMPLES.0 {
        pause(SAMPLES.1)?;
        usages.push(footprint(&pids, (&merger, GROUP))?);
        over_used.push(all_pss_bytes()? as f64 / used_bytes()? as f64);
    }
    let mean = |of: fn(&Usage) -> u64| stats::mean(&usages.iter().map(|usage| bytes_mb(of(usage))).collect::<Vec<_>>());
    let (rss, pss) = (mean(|usage| usage.rss_bytes), mean(|usage| usage.pss_bytes));
    let mut measured = Measured::default();
    for (kind, value) in [("RSS", rss), ("PSS", pss), ("USS", mean(|usage| usage.uss_bytes))] {
        measured.put_at("footprint_mb", kind, value);
    }
    measured.put("rss_over_pss", rss / pss);
    measured.put("processes", pids.len() as f64);
    measured.put("pss_over_used", over_used.iter().copied().fold(0.0, f64::max));
    Ok(measured)
}

/// `sonone-base`: a single instance of a server, in an arm such as `vm-apache`.
pub fn single(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger("off", &[Group::of(GROUP)])?;
    let (kind, server) = planned.arm.split_once('-').context("an arm without a server")?;
    let one = if kind == CONTAINER {
        let image = if server == "apache" { Image::LxcApache } else { Image::LxcMariadb };
        One::Container(rig.containers(image, 1, (&mut merger, GROUP))?)
    } else {
        let vms = rig.vms(&alike(1, first_of(planned, 1), D256), &mut merger)?;
        vms.tell(&vms.guests, if server == "apache" { "systemctl stop mariadb" } else { "systemctl stop apache2" })?;
        vms.settle()?;
        One::Vm(vms)
    };
    let pss = bytes_mb(footprint(&one.pids(), (&merger, GROUP))?.pss_bytes);
    let mut measured = Measured::default();
    measured.put("pss_mb", pss);
    measured.put_at("pss_by_arm_mb", &planned.arm, pss);
    Ok(measured)
}

/// PSS of all processes of the host. Those that end meanwhile are left out.
fn all_pss_bytes() -> anyhow::Result<u64> {
    Ok(host::pids()?.into_iter().filter_map(|pid| Usage::of(pid).ok()).map(|usage| usage.pss_bytes).sum())
}

/// Memory of the host that is not free.
fn used_bytes() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let of = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let (total, free) = (of("MemTotal:"), of("MemFree:"));
    let both = total.zip(free).context("/proc/meminfo lacks MemTotal or MemFree")?;
    Ok((both.0 - both.1) * 1024)
}

/// Merges until it is settled. A process in a group of its own, which holds pages twice, proves that the merger works: the
/// number of its merged pages.
fn merge(merger: &mut Merger, timeline: &mut Timeline) -> anyhow::Result<f64> {
    let mut doubles = Asked::start(merger, (CONTROL, "doubles"), &["doubles"])?;
    merger.on()?;
    merger.settle(Instant::now(), timeline)?;
    let proof = doubles.ask("touch")?;
    proof["merged"].as_f64().with_context(|| format!("the process answers {proof}"))
}

fn timeline() -> Timeline {
    Timeline { name: "saved, 32 MB of the control among it".into(), unit: "MB".into(), ..Timeline::default() }
}

/// `agarwal-t6.3`.
pub fn merged_alone(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger(merger_of(planned), &[Group::of(GROUP), Group::of(CONTROL)])?;
    let mut one = One::start(rig, planned, &mut merger)?;
    let pids = one.pids();
    let pss = |merger: &Merger| Ok::<_, anyhow::Error>(bytes_mb(footprint(&pids, (merger, GROUP))?.pss_bytes));
    let before = pss(&merger)?;
    if let One::Container(containers) = &mut one {
        containers.attach(&merger)?;
    }
    let attached = pss(&merger)?;
    let (mut measured, mut timeline) = (Measured::default(), timeline());
    measured.put(MERGED, merge(&mut merger, &mut timeline)?);
    let after = pss(&merger)?;
    for (when, value) in [("before", before), ("member", attached), ("merged", after)] {
        measured.put_at("pss_mb", when, value);
    }
    measured.put("saved_share", 1.0 - after / before);
    measured.timelines.push(timeline);
    Ok(measured)
}

/// `agarwal-s6.4`.
pub fn by_root(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let numbers = if planned.length == Length::Full { &FULL[..] } else { &SHORT[..] };
    let mut merger = rig.merger(merger_of(planned), &[Group::of(GROUP), Group::of(CONTROL)])?;
    let mut measured = Measured::default();
    let shared = averages(rig, (Image::LxcShared, numbers), &mut merger, ("shared_mb", &mut measured))?.0;
    let (copied, mut containers) =
        averages(rig, (Image::LxcCopied, numbers), &mut merger, ("copied_mb", &mut measured))?;
    containers.attach(&merger)?;
    let mut timeline = timeline();
    measured.put(MERGED, merge(&mut merger, &mut timeline)?);
    let merged = average(&containers, &merger)?;
    let (last, end) = (numbers.len() - 1, numbers[numbers.len() - 1]);
    measured.put_at("merged_mb", end, merged);
    measured.put("lost", 1.0 - (copied[0] - copied[last]) / (shared[0] - shared[last]));
    measured.put("brought_back", (copied[last] - merged) / (copied[last] - shared[last]));
    measured.timelines.push(timeline);
    Ok(measured)
}

/// The average footprint of a container, for each number of them.
fn averages(
    rig: &mut Rig,
    (image, numbers): (Image, &[usize]),
    merger: &mut Merger,
    (metric, measured): (&str, &mut Measured),
) -> anyhow::Result<(Vec<f64>, Containers)> {
    let mut containers = rig.containers(image, numbers[0], (merger, GROUP))?;
    let mut averages = Vec::new();
    for number in numbers {
        let more = number - containers.guests.len();
        if more > 0 {
            containers.add(rig, image, more, (merger, GROUP))?;
        }
        averages.push(average(&containers, merger)?);
        measured.put_at(metric, number, averages[averages.len() - 1]);
    }
    Ok((averages, containers))
}

/// The average footprint of what runs inside a container.
fn average(containers: &Containers, merger: &Merger) -> anyhow::Result<f64> {
    let pss = footprint(&containers.pids_inside(), (merger, GROUP))?.pss_bytes;
    Ok(bytes_mb(pss) / containers.guests.len() as f64)
}
