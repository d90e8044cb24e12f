//! `kim-isolate` and `kim-bill`: groups that share nothing and pay for themselves.

use super::D256;
use crate::data::Length;
use crate::guest::SECRETS;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, OPERATIONS, Timeline};
use crate::rig::{Asked, Group, Merger, Payer, Rig, System, VmsWanted, frames_of, pause};
use anyhow::Context;
use serde_json::Value;
use std::time::{Duration, Instant};

/// The two groups.
pub(super) const GROUPS: [Group; 2] = [Group::of("acme"), Group::of("beta")];
/// Guests of each group.
const GUESTS: usize = 2;
/// The merger is known to work once this many of the 512 pages of which the prober holds two copies are merged.
const TWICE: u64 = 480;
/// Time limit for the prober's pages to be merged.
const PATIENCE: Duration = Duration::from_secs(40);
/// Once the merger is known to work, time for which it gets the chance to merge across groups: 8 s.
const CHANCE: Duration = Duration::from_secs(8);

/// A request for two guests in each of the two groups.
pub(super) fn two_groups() -> VmsWanted {
    let groups = GROUPS.iter().map(|group| group.name.to_owned()).collect();
    VmsWanted { guests: 2 * GUESTS, first: 0, memory_bytes: D256, groups, system: System::DEBIAN }
}

/// The recipe of `kim-isolate`.
pub fn isolate(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger(&planned.arm, &GROUPS)?;
    let vms = rig.vms(&two_groups(), &mut merger)?;
    let victims_group = if planned.arm == "fold-within" { "acme" } else { "beta" };
    let mut victim = Asked::start(&mut merger, (victims_group, "victim"), &["victim"])?;
    let mut prober = Asked::start(&mut merger, ("acme", "prober"), &["prober"])?;
    vms.load(&vms.guests, &bench::workload::rewrite_script(1.0))?;
    merger.on()?;
    let mut measured = Measured::default();
    let watched = watch(&merger, &mut prober, &mut victim, planned)?;
    let times = prober.ask("time")?;
    measured.put(MERGED, watched.merged as f64);
    measured.put("disclosed_pages", watched.disclosed as f64);
    measured.put("looks", watched.looks as f64);
    let (most, arm) = (watched.most_crossing as f64, &planned.arm);
    for (metric, value) in [("auc", number(&times, "auc")?), ("cross_group_frames", most)] {
        measured.put(metric, value);
        measured.put_at(metric, arm, value);
    }
    measured.put("write_present_us", number(&times, "present_us")?);
    measured.put("write_absent_us", number(&times, "absent_us")?);
    measured.put(OPERATIONS, vms.operations(&vms.guests)?.iter().sum::<u64>() as f64);
    measured.timelines.push(watched.crossing);
    Ok(measured)
}

fn number(answer: &Value, name: &str) -> anyhow::Result<f64> {
    answer[name].as_f64().with_context(|| format!("the process answers {answer}"))
}

/// What was found while the prober waited.
#[derive(Default)]
struct Watched {
    merged: u64,
    disclosed: usize,
    looks: usize,
    most_crossing: u64,
    crossing: Timeline,
}

/// Looks at all page frames each second, until the prober's own pages are merged, and its guesses, too, if they ever
/// will be. A full run then goes on for 20 s.
fn watch(merger: &Merger, prober: &mut Asked, victim: &mut Asked, planned: &Planned) -> anyhow::Result<Watched> {
    let begin = Instant::now();
    let crossing = Timeline { name: "frames of both groups".into(), unit: "frames".into(), ..Timeline::default() };
    let mut seen = Watched { crossing, ..Watched::default() };
    let mut merged_since: Option<Instant> = None;
    let more = if planned.length == Length::Full { Duration::from_secs(20) } else { Duration::ZERO };
    loop {
        pause(Duration::from_millis(800))?;
        let crossing = merger.cross_group_frames()?;
        seen.crossing.points.push((begin.elapsed().as_secs_f64(), crossing as f64));
        seen.most_crossing = seen.most_crossing.max(crossing);
        seen.looks += 1;
        seen.merged = prober.ask("touch")?["merged"].as_u64().unwrap_or(0);
        victim.ask("touch")?;
        seen.disclosed = frames_of(prober.pid())?.intersection(&frames_of(victim.pid())?).count();
        if seen.merged >= TWICE && merged_since.is_none() {
            merged_since = Some(Instant::now());
            seen.crossing.events.push((begin.elapsed().as_secs_f64(), "the prober's own pages are merged".into()));
        }
        let all = seen.disclosed >= SECRETS * 9 / 10 && merged_since.is_some();
        let had_chance = merged_since.is_some_and(|since| since.elapsed() >= CHANCE);
        if begin.elapsed() > more && (all || had_chance) || begin.elapsed() > PATIENCE + more {
            return Ok(seen);
        }
    }
}

/// The recipe of `kim-bill`.
pub fn bill(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let homes = rig.homes(&GROUPS.map(|group| group.name))?;
    let mut merger = rig.merger(&planned.arm, &GROUPS)?;
    let vms = rig.vms(&two_groups(), &mut merger)?;
    for guest in &vms.guests {
        homes.add(&guest.group, guest.pid.context("a guest without a process")?)?;
    }
    let begin = Instant::now();
    let mut timeline = Timeline { name: "saved".into(), unit: "MB".into(), ..Timeline::default() };
    merger.on()?;
    merger.settle(begin, &mut timeline)?;
    let busy: Vec<_> = vms.guests.iter().filter(|guest| guest.group == GROUPS[0].name).collect();
    vms.load(busy.iter().copied(), &bench::workload::rewrite_script(1.0))?;
    timeline.events.push((begin.elapsed().as_secs_f64(), "the first group begins to write".into()));
    let mut measured = Measured::default();
    let time = Duration::from_secs(if planned.length == Length::Full { 45 } else { 25 });
    payers(&merger, time, &mut measured)?;
    measured.put(MERGED, merger.taken(&vms.pids())?.merged_pages as f64);
    measured.put(OPERATIONS, vms.operations(busy.iter().copied())?.iter().sum::<u64>() as f64);
    timeline.points.push((begin.elapsed().as_secs_f64(), crate::rig::mb(merger.saved_pages()? as f64)));
    measured.timelines.push(timeline);
    Ok(measured)
}

/// Puts the processor time that each payer had over this time.
fn payers(merger: &Merger, time: Duration, measured: &mut Measured) -> anyhow::Result<()> {
    let (begin, before) = (Instant::now(), merger.cpu()?);
    pause(time)?;
    let used = merger.cpu()?.since(&before);
    let percent = 100.0 / begin.elapsed().as_secs_f64();
    let group = |n: usize| used.of(&Payer::Group(GROUPS[n].name.to_owned()));
    let nobody = used.of(&Payer::Nobody);
    measured.put("billed_share", (group(0) + group(1)) / used.total().max(f64::MIN_POSITIVE));
    for (metric, payer, seconds) in [
        ("busy_group_cpu", "busy group", group(0)),
        ("quiet_group_cpu", "quiet group", group(1)),
        ("nobodys_cpu", "nobody", nobody),
    ] {
        measured.put(metric, seconds * percent);
        measured.put_at("payer_cpu", payer, seconds * percent);
    }
    Ok(())
}
