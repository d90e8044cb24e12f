//! `pagefold bench ksm --churn`: pages that stay merged while the guests work, over time. For Pagefold also the merged
//! pages that broke.

use super::curve::Curve;
use super::equal::equal_pages;
use super::folding::AgentStalls;
use super::frames::{FramesOverTime, follow};
use super::measure::{Scene, Side};
use super::merger::Folds;
use super::options::Options;
use super::{svg, turns};
use crate::guardian::Guardian;
use crate::median::median;
use anyhow::Context;
use cli::exit::Outcome;
use cli::say;
use report::{Align, Table};
use serde::Serialize;
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

/// Pause between the first merging and the work: 90 s. A fold that is undone sooner than in about a minute counts as
/// short-lived; the folds of the first merging must not be among these when the work begins.
const REST: Duration = Duration::from_secs(90);
/// Most rows of the table that is printed.
const ROWS: usize = 20;

/// The result of one side's turn.
#[derive(Clone, Debug, Serialize)]
pub struct Worked {
    /// Private pages of the guests' processes before merging.
    resident_pages: u64,
    /// Pages merged when the work began.
    begin_merged_pages: u64,
    /// Mean number of merged pages over the second half of the time.
    mean_merged_pages: f64,
    /// Pages merged at the end.
    end_merged_pages: u64,
    /// Frames that the guests take at the end.
    end_frames: u64,
    /// Frames over time, and net savings.
    #[serde(flatten)]
    course: FramesOverTime,
    /// Broken pages at the end, as a share of the pages that are merged or broken.
    #[serde(skip_serializing_if = "Option::is_none")]
    end_broken_share: Option<f64>,
    /// Pages folded while the guests worked.
    #[serde(skip_serializing_if = "Option::is_none")]
    folds: Option<Folds>,
    /// Share of these folds that were written again within about a minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    short_folds_share: Option<f64>,
    /// Processor time per fold: all that was used while the guests worked, divided by the folds.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_us_per_fold: Option<f64>,
    /// How long agents kept pages out of reach, or write-protected, from the first merging on.
    #[serde(skip_serializing_if = "Option::is_none")]
    agent_stalls: Option<AgentStalls>,
    /// Mappings of the guests' processes when the work began, and at the end.
    vmas: (u64, u64),
    /// Processor time while the guests worked.
    cpu_s: f64,
    /// The curve; its times begin with the work.
    pub curve: Curve,
}

/// The result of `--churn`.
#[derive(Debug, Serialize)]
struct Churn {
    /// Minutes of work.
    minutes: f64,
    /// Seconds that guests wait after each half of a pass; 0: they work flat out.
    pause_s: u16,
    /// Pagefold's figures over ksmd's.
    ratio: Ratio,
    /// The single rounds.
    rounds: Vec<Round>,
}

/// Pagefold's figures over ksmd's: medians over the rounds.
#[derive(Debug, Serialize)]
struct Ratio {
    /// Of `mean_saved`.
    saved: f64,
    /// Of `mean_merged_pages`.
    merged: f64,
    /// Of `cpu_s`.
    cpu: f64,
}

impl Ratio {
    fn of(rounds: &[Round]) -> Self {
        let median = |of: fn(&Worked) -> f64| {
            let ratios: Vec<f64> =
                rounds.iter().map(|r| of(&r.pagefold) / of(&r.ksmd).max(f64::MIN_POSITIVE)).collect();
            median(&ratios)
        };
        Self {
            saved: median(|w| w.course.mean_saved),
            merged: median(|w| w.mean_merged_pages),
            cpu: median(|w| w.cpu_s),
        }
    }
}

/// One turn of each side.
#[derive(Debug, Serialize)]
pub struct Round {
    /// ksmd's turn.
    pub ksmd: Worked,
    /// Pagefold's turn.
    pub pagefold: Worked,
}

/// Runs the bench and prints its result.
pub fn run(o: &Options, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Outcome> {
    let rounds = turns(o, |side| work(side, o, dir, guardian))?;
    let rounds: Vec<Round> = rounds.into_iter().map(|(ksmd, pagefold)| Round { ksmd, pagefold }).collect();
    if let (Some(path), Some(first)) = (&o.svg, rounds.first()) {
        let total = first.ksmd.resident_pages.max(first.pagefold.resident_pages);
        std::fs::write(path, svg::draw(first, total)).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let churn = Churn { minutes: o.minutes, pause_s: o.pause, ratio: Ratio::of(&rounds), rounds };
    let mut out = std::io::stdout().lock();
    if o.json {
        report::json::write(&mut out, &churn)?;
    } else {
        churn.rounds.iter().try_for_each(|round| print(&mut out, round))?;
        if churn.rounds.len() > 1 {
            let Ratio { saved, merged, cpu } = churn.ratio;
            writeln!(
                out,
                "ratio, medians of {} rounds: {saved:.3} of the frames that ksmd saves, {merged:.3} of the pages that it has merged, for {cpu:.3} of its processor time",
                churn.rounds.len()
            )?;
        }
    }
    Ok(Outcome::Done)
}

fn work(side: Side, o: &Options, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Worked> {
    let mut scene = Scene::set(side, o, dir, guardian)?;
    let resident_pages = scene.taken()?.frames;
    let (equal, cpu_before) = (equal_pages(&scene.processes)?, scene.merger.cpu_s()?);
    scene.merger.on()?;
    let first = Curve::until_stable(Instant::now(), cpu_before, equal, o.settle, || scene.merger.progress())?;
    std::thread::sleep(REST);
    let vmas_before = scene.taken()?.vmas;
    let (begin, cpu_before) = (Instant::now(), scene.merger.cpu_s()?);
    scene.guests.work(o.pause)?;
    let time = Duration::from_secs_f64(o.minutes * 60.0);
    let (curve, course) = follow(&scene, begin, cpu_before, time)?;
    let (taken, end) = (scene.taken()?, curve.end().so_far);
    let at_first = curve.0.first().and_then(|point| point.so_far.details);
    let folds = end.details.zip(at_first).map(|(after, before)| Folds {
        all: after.folds.all - before.folds.all,
        again: after.folds.again - before.folds.again,
        short: after.folds.short - before.folds.short,
    });
    let (name, agent_stalls) = (scene.merger.name(), scene.merger.account()?.agent_stalls);
    scene.end()?;
    say!(
        "pagefold: {name}: {} pages merged before, {} after {:.1} min of work",
        first.end().so_far.merged_pages,
        end.merged_pages,
        o.minutes
    );
    let later: Vec<u64> = curve.0.iter().skip(curve.0.len() / 2).map(|p| p.so_far.merged_pages).collect();
    Ok(Worked {
        resident_pages,
        begin_merged_pages: first.end().so_far.merged_pages,
        mean_merged_pages: later.iter().sum::<u64>() as f64 / later.len().max(1) as f64,
        end_merged_pages: end.merged_pages,
        end_frames: taken.frames,
        course,
        end_broken_share: end.details.map(|details| share(details.broken_pages, end.merged_pages)),
        folds,
        short_folds_share: folds.map(|folds| folds.short as f64 / folds.all.max(1) as f64),
        cpu_us_per_fold: folds.map(|folds| end.cpu_s * 1e6 / folds.all.max(1) as f64),
        agent_stalls,
        vmas: (vmas_before, taken.vmas),
        cpu_s: end.cpu_s,
        curve,
    })
}

/// Broken pages as a share of those that are merged or broken; 0 if there are none.
fn share(broken: u64, merged: u64) -> f64 {
    broken as f64 / (broken + merged).max(1) as f64
}

fn print(out: &mut dyn Write, round: &Round) -> std::io::Result<()> {
    writeln!(out, "{}", table(round))?;
    writeln!(out, "{}", frames_table(&round.ksmd.course.frames, &round.pagefold.course.frames))?;
    print_folding(out, &round.pagefold)?;
    writeln!(
        out,
        "ratio: {:.3} of the frames that ksmd saves, {:.3} of the pages that it has merged, for {:.3} of its processor time",
        round.pagefold.course.mean_saved / round.ksmd.course.mean_saved.max(1.0),
        round.pagefold.mean_merged_pages / round.ksmd.mean_merged_pages.max(1.0),
        round.pagefold.cpu_s / round.ksmd.cpu_s.max(0.001)
    )?;
    for (name, w) in [("ksmd", &round.ksmd), ("pagefold", &round.pagefold)] {
        writeln!(
            out,
            "{name}: {:.0} frames saved, net, and {:.0} taken, on average of the second half; {} pages merged before the work, {:.0} on average; {:.1} s of CPU",
            w.course.mean_saved, w.course.mean_resident, w.begin_merged_pages, w.mean_merged_pages, w.cpu_s
        )?;
    }
    Ok(())
}

/// Table of both sides' merged pages over time, in at most `ROWS` rows, which are points of Pagefold's curve.
fn table(round: &Round) -> Table {
    use Align::Right;
    let columns = ["s", "ksmd", "pagefold", "broken", "% broken", "slots", "mappings", "short folds"];
    let mut table = Table::new(&columns.map(|name| (name, Right)));
    for ours in &round.pagefold.curve.thinned(ROWS).0 {
        let theirs = round.ksmd.curve.0.iter().rev().find(|p| p.seconds <= ours.seconds + 0.5);
        let details = ours.so_far.details.unwrap_or_default();
        table.row([
            format!("{:.0}", ours.seconds),
            theirs.map_or_else(String::new, |p| p.so_far.merged_pages.to_string()),
            ours.so_far.merged_pages.to_string(),
            details.broken_pages.to_string(),
            format!("{:.1}", share(details.broken_pages, ours.so_far.merged_pages) * 100.0),
            details.slots.to_string(),
            details.vmas.to_string(),
            format!("{} of {}", details.folds.short, details.folds.all),
        ]);
    }
    table
}

/// Table of where the frames of both sides are, on average over the second half of the time.
fn frames_table(ksmd: &Value, pagefold: &Value) -> Table {
    let mut table = Table::new(&[("frames", Align::Left), ("ksmd", Align::Right), ("pagefold", Align::Right)]);
    let cell = |side: &Value, of: &str| side.pointer(of).map_or_else(String::new, Value::to_string);
    for (what, pointer) in [
        ("taken", "/resident"),
        ("  different contents", "/contents"),
        ("  idle slots", "/pool_idle"),
        ("  slots that nobody maps", "/slots_by_sharers/0"),
        ("  broken, equal to a slot", "/broken_equal_to_a_slot"),
        ("  duplicates: young", "/duplicates_not_folded/young"),
        ("  duplicates: backed off", "/duplicates_not_folded/backed_off"),
        ("  duplicates: busy", "/duplicates_not_folded/busy"),
        ("  duplicates: in huge pages", "/duplicates_not_folded/huge"),
        ("  duplicates: not enrolled", "/duplicates_not_folded/not_enrolled"),
        ("  duplicates: other", "/duplicates_not_folded/other"),
        ("  zeros", "/zero_resident"),
        ("tables of the merger", "/tables"),
        ("mappings", "/mappings"),
        ("page tables", "/page_tables"),
        ("saved, net", "/saved"),
    ] {
        table.row([what.to_owned(), cell(ksmd, pointer), cell(pagefold, pointer)]);
    }
    table
}

/// Prints Pagefold's folds and stalls.
fn print_folding(out: &mut dyn Write, worked: &Worked) -> std::io::Result<()> {
    if let Some(folds) = worked.folds {
        let share = worked.short_folds_share.unwrap_or(0.0) * 100.0;
        writeln!(
            out,
            "pagefold: {} pages folded meanwhile, {} of them again, {share:.1}% for less than a minute or so, {:.1} us of CPU each; {} mappings before, {} in the end",
            folds.all,
            folds.again,
            worked.cpu_us_per_fold.unwrap_or(0.0),
            worked.vmas.0,
            worked.vmas.1
        )?;
    }
    if let Some(stalls) = worked.agent_stalls {
        writeln!(
            out,
            "pagefold: pages out of reach, or not to be written, for {} us at the median, {} us at the 99th percentile, {} us at most",
            stalls.p50_us, stalls.p99_us, stalls.max_us
        )?;
    }
    Ok(())
}
