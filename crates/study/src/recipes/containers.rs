//! `agarwal-t6.2`, `agarwal-t6.3`, `agarwal-s6.4`, `sonone-base`: the footprint of containers, beside that of VMs.

use super::{CONTAINER, D256, D512, GROUP, alike, first_of, merger_of};
use crate::data::Length;
use crate::guest::DOUBLES;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Asked, Containers, Group, Merger, Rig, SETTLED_FOR, Taken, Vms, footprint, pause, wait};
use crate::stats;
use anyhow::{Context, ensure};
use host::{KsmStat, Mapping, Usage};
use lab::Image;
use page::PAGE_BYTES;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Number of readings of a footprint, whose mean counts, and the interval between them.
const SAMPLES: (usize, Duration) = (10, Duration::from_millis(300));
/// Numbers of containers in the short form.
const SHORT: [usize; 3] = [1, 4, 8];
/// Numbers of containers in the full form.
const FULL: [usize; 4] = [1, 4, 8, 16];
/// Pages of the control process that must be merged before merging of the guest can count as settled: 98% of them.
const MERGED_PAGES: u64 = 2 * DOUBLES as u64 * 98 / 100;
/// Growth of the guest's merged pages below which merging counts as settled: 1%.
const SETTLED: f64 = 0.01;
/// Time limit for merging to settle: 3 min.
const LONGEST: Duration = Duration::from_secs(180);

/// A single guest: a VM or a container.
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

/// The recipe of `agarwal-t6.2`.
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

/// The recipe of `sonone-base`: a single server, in a VM or a container, in an arm such as `vm-apache`.
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

/// Sum of the PSS of all processes of the host. Those that end meanwhile are left out.
fn all_pss_bytes() -> anyhow::Result<u64> {
    Ok(host::pids()?.into_iter().filter_map(|pid| Usage::of(pid).ok()).map(|usage| usage.pss_bytes).sum())
}

/// Memory of the host that is in use: the total less what is free.
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

/// The control: a process in the guests' group that holds two copies of each page. That its pages are merged proves
/// that the guests' pages could have been merged, too.
struct Control(Asked);

impl Control {
    /// Starts the control, which no merger knows yet.
    fn start(rig: &Rig) -> anyhow::Result<Self> {
        Asked::start_alone(rig.dir(), "doubles", &["doubles"]).map(Self)
    }

    /// Has the control merged in the way in which a container's processes are merged: Pagefold attaches to it while it
    /// runs.
    fn join(&self, merger: &mut Merger) -> anyhow::Result<()> {
        let pid = self.0.pid();
        if let Some(fold) = merger.lab()? {
            let mut attach = Command::new(&fold.pagefold);
            attach.args(["attach", &pid.to_string(), "--group", GROUP, "--all-anonymous"]);
            if let Some(service) = &fold.service {
                attach.arg("--service").arg(service);
            }
            let status = attach.stdin(Stdio::null()).stdout(Stdio::null()).status();
            let status = status.context("cannot start this program to attach to the control")?;
            ensure!(status.success(), "the control cannot be attached to: {status}");
        }
        merger.meet(&[(pid, GROUP.to_owned())])
    }

    /// Merges until the control's pages are merged and the guest's merged pages grow no more. Returns the number of the
    /// guest's merged pages.
    fn settle(&self, merger: &Merger, pids: &[u32], timeline: &mut Timeline) -> anyhow::Result<u64> {
        let begin = Instant::now();
        merger.on()?;
        if merger.ksmd().is_some() {
            // ksmd makes its full rounds meanwhile.
            merger.settle(begin, &mut Timeline::default())?;
        }
        let mut looks: Vec<Look> = Vec::new();
        let is_settled = wait(LONGEST, || {
            let at_s = begin.elapsed().as_secs_f64();
            let look = Look { at_s, own: merged_of(merger, pids)?, control: merged_of(merger, &[self.0.pid()])? };
            if timeline.points.last().is_none_or(|(at, _)| at_s - at >= 1.0) {
                timeline.points.push((at_s, look.own as f64));
            }
            looks.push(look);
            Ok(is_settled(&looks))
        })?;
        if !is_settled {
            timeline.events.push((begin.elapsed().as_secs_f64(), "still merging after three minutes".into()));
        }
        Ok(looks.last().map_or(0, |look| look.own))
    }

    /// Number of the control's merged pages, by page frames. The control reads all of its pages for that, and then maps
    /// its part of the pool.
    fn proof(&mut self) -> anyhow::Result<u64> {
        let proof = self.0.ask("touch")?;
        proof["merged"].as_u64().with_context(|| format!("the process answers {proof}"))
    }

    /// The footprint of these processes in MB, without the part of the pool that the control maps. Call `Self::proof`
    /// before: then the control maps all of its part.
    fn footprint_without(&self, pids: &[u32], merger: &Merger) -> anyhow::Result<f64> {
        let all = footprint(pids, (merger, GROUP))?.pss_bytes;
        let Merger::Fold(_) = merger else { return Ok(bytes_mb(all)) };
        let mappings = Mapping::read_all(self.0.pid())?;
        let of_pool = mappings.iter().filter(|m| guest::pool_name(&m.name).is_some());
        let of_control = of_pool.map(|m| m.usage.pss_bytes).sum();
        Ok(bytes_mb(without(all, of_control, Taken::of_pool(self.0.pid())?)))
    }
}

/// Bytes of the guest: `all` has those of its processes and the worker's share of the pool. The control's share of the
/// pool is added, and the pages that the control maps are subtracted whole: the shares of a page, over all that map it,
/// add up to a page.
const fn without(all: u64, of_control: u64, controls_pages: u64) -> u64 {
    (all + of_control).saturating_sub(controls_pages * PAGE_BYTES as u64)
}

/// Numbers of merged pages at one moment.
struct Look {
    at_s: f64,
    /// The guest's merged pages.
    own: u64,
    /// The control's merged pages.
    control: u64,
}

/// Whether the control's pages have been merged for `SETTLED_FOR`, and the guest's merged pages have not grown since.
/// The guest may have none.
fn is_settled(looks: &[Look]) -> bool {
    let Some(last) = looks.last() else { return false };
    let before = looks.iter().rev().find(|look| look.at_s <= last.at_s - SETTLED_FOR.as_secs_f64());
    before.is_some_and(|look| look.control >= MERGED_PAGES && last.own as f64 <= look.own as f64 * (1.0 + SETTLED))
}

/// Pages of these processes that are merged, and their pages of zeros whose frames were freed, by the merger's account
/// of each process.
fn merged_of(merger: &Merger, pids: &[u32]) -> anyhow::Result<u64> {
    match merger {
        Merger::Off => Ok(0),
        Merger::Ksm(..) => {
            let stats = pids.iter().filter_map(|pid| KsmStat::of(*pid).ok());
            Ok(stats.map(|of| of.ksm_merging_pages.unwrap_or(0) + of.ksm_zero_pages.unwrap_or(0)).sum())
        }
        Merger::Fold(folding) => folding.folded_pages_of(pids),
    }
}

fn timeline() -> Timeline {
    Timeline { name: "merged pages, without the control's".into(), unit: "pages".into(), ..Timeline::default() }
}

/// The recipe of `agarwal-t6.3`: what merging saves in a single guest.
pub fn merged_alone(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger(merger_of(planned), &[Group::of(GROUP)])?;
    let mut control = Control::start(rig)?;
    let mut one = One::start(rig, planned, &mut merger)?;
    let pids = one.pids();
    let pss = |merger: &Merger| Ok::<_, anyhow::Error>(bytes_mb(footprint(&pids, (merger, GROUP))?.pss_bytes));
    let before = pss(&merger)?;
    if let One::Container(containers) = &mut one {
        containers.attach(&merger)?;
    }
    control.join(&mut merger)?;
    let attached = pss(&merger)?;
    let (mut measured, mut timeline) = (Measured::default(), timeline());
    let own = control.settle(&merger, &pids, &mut timeline)?;
    let proof = control.proof()?;
    let after = control.footprint_without(&pids, &merger)?;
    measured.put(MERGED, proof as f64);
    measured.put("own_pages", own as f64);
    for (when, value) in [("before", before), ("member", attached), ("merged", after)] {
        measured.put_at("pss_mb", when, value);
    }
    measured.put("saved_share", 1.0 - after / before);
    measured.timelines.push(timeline);
    Ok(measured)
}

/// The recipe of `agarwal-s6.4`: containers on a shared and on a copied root directory.
pub fn by_root(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let numbers = if planned.length == Length::Full { &FULL[..] } else { &SHORT[..] };
    let mut merger = rig.merger(merger_of(planned), &[Group::of(GROUP)])?;
    let mut control = Control::start(rig)?;
    let mut measured = Measured::default();
    let shared = averages(rig, (Image::LxcShared, numbers), &mut merger, ("shared_mb", &mut measured))?.0;
    let (copied, mut containers) =
        averages(rig, (Image::LxcCopied, numbers), &mut merger, ("copied_mb", &mut measured))?;
    containers.attach(&merger)?;
    control.join(&mut merger)?;
    let (pids, mut timeline) = (containers.pids_inside(), timeline());
    let own = control.settle(&merger, &pids, &mut timeline)?;
    let proof = control.proof()?;
    let merged = control.footprint_without(&pids, &merger)? / containers.guests.len() as f64;
    measured.put(MERGED, proof as f64);
    measured.put("own_pages", own as f64);
    let (last, end) = (numbers.len() - 1, numbers[numbers.len() - 1]);
    measured.put_at("merged_mb", end, merged);
    measured.put("lost", 1.0 - (copied[0] - copied[last]) / (shared[0] - shared[last]));
    measured.put("brought_back", (copied[last] - merged) / (copied[last] - shared[last]));
    measured.timelines.push(timeline);
    Ok(measured)
}

/// The average footprint of a container, for each of these numbers of containers. Returns also the containers, which go
/// on running.
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

/// The average footprint of a container's processes, without LXC's monitor.
fn average(containers: &Containers, merger: &Merger) -> anyhow::Result<f64> {
    let pss = footprint(&containers.pids_inside(), (merger, GROUP))?.pss_bytes;
    Ok(bytes_mb(pss) / containers.guests.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Answer, judge_all};
    use crate::record::Samples;

    #[test]
    fn guest_without_a_merged_page_is_settled_once_the_control_is_merged() {
        let looks = |of: &[(f64, u64, u64)]| {
            is_settled(
                &of.iter()
                    .map(|(at_s, own, control)| Look { at_s: *at_s, own: *own, control: *control })
                    .collect::<Vec<_>>(),
            )
        };
        let all = 2 * DOUBLES as u64;
        assert!(!looks(&[]) && !looks(&[(0.0, 0, all), (7.0, 0, all)]), "too soon");
        assert!(looks(&[(0.0, 0, all), (9.0, 0, all)]));
        assert!(!looks(&[(0.0, 0, 0), (9.0, 0, all)]), "the control has only just been merged");
        assert!(!looks(&[(0.0, 0, all), (9.0, 50, all)]), "the guest's first pages");
        assert!(!looks(&[(0.0, 100, all), (9.0, 150, all)]), "few pages of the guest, beside many of the control");
        assert!(looks(&[(0.0, 50, all), (5.0, 150, all), (9.0, 150, all), (14.0, 151, all)]));
    }

    #[test]
    fn control_has_no_part_in_the_footprint() {
        // Of 300 pages in the pool, 200 are the control's. It maps each in two places, and the worker in one.
        let page = PAGE_BYTES as u64;
        let (guest, worker, control) = (70 * page, 30 * page + 67 * page, 133 * page);
        assert_eq!(without(guest + worker, control, 200), 100 * page);
    }

    #[test]
    fn loss_in_a_container_fails_and_is_no_small_saving() {
        for (id, metric, arm) in
            [("agarwal-t6.3", "saved_share", "fold-container"), ("agarwal-s6.4", "brought_back", "fold")]
        {
            let study = crate::data::all().into_iter().find(|study| study.id == id).unwrap();
            let answer = |value: f64| {
                let mut samples = Samples::default();
                for rep in 0..3 {
                    let mut measured = Measured::default();
                    measured.put(MERGED, DOUBLES as f64);
                    measured.put(metric, value);
                    samples.add(arm, rep, &measured.samples);
                }
                let verdicts = judge_all(&study, &samples);
                verdicts.into_iter().find(|v| v.rule.starts_with(&format!("{metric} in {arm}:"))).unwrap().verdict
            };
            assert_eq!([-0.4, 0.01, 0.2].map(answer), [Answer::Fails, Answer::Holds, Answer::Fails], "{id}");
        }
    }
}
