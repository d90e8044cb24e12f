//! One side's turn: guests afresh, merging from nothing until it is stable, the steady state, and what the prober sees.

use super::curve::{Curve, Point};
use super::equal::{Guest, equal_pages};
use super::folding::Folding;
use super::frames::Taken;
use super::guardian::Guardian;
use super::guests::Guests;
use super::ksmd::Ksmd;
use super::merger::{Account, Merger};
use super::options::Options;
use super::probe::Stall;
use super::prober::Prober;
use super::timings::Spread;
use crate::output::say;
use anyhow::Context;
use serde::Serialize;
use std::path::Path;
use std::time::{Duration, Instant};

/// The regions that the prober measures with are no smaller.
const LEAST_OF_PROBER: u64 = 1 << 20;

/// Whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The kernel's.
    Ksmd,
    /// Ours.
    Pagefold,
}

/// What a turn came to.
#[derive(Clone, Debug, Serialize)]
pub struct Turn {
    /// Private pages of the guests' processes that were in memory before.
    pub resident_pages: u64,
    /// Of these, pages that are equal to another one, all but one of each content: what there was to merge.
    pub equal_pages: u64,
    /// Pages saved in the end, by the merger's own account.
    pub merged_pages: u64,
    /// The same by page frames: frames that the guests took before, less those they take now.
    pub frames_saved: i64,
    /// Until 99% of the share that ksmd merged in the end of this round; absent if it was never reached.
    pub wall_s: Option<f64>,
    /// Processor time until then.
    pub cpu_s: Option<f64>,
    /// Until it was stable.
    pub total_wall_s: f64,
    /// Processor time until then.
    pub total_cpu_s: f64,
    /// Of all processor time, a page's share.
    pub cpu_us_per_merged_page: f64,
    /// Processor time of a second when guests are idle.
    pub steady_cpu_s_per_s: f64,
    /// Until a new duplicate is merged: median and longest.
    pub reaction_s: Option<f64>,
    /// See above.
    pub reaction_max_s: Option<f64>,
    /// New duplicates that were not merged in good time.
    pub reactions_missed: u64,
    /// First writes to merged pages.
    #[serde(rename = "break")]
    pub first_writes: Spread,
    /// Reads of pages while they are merged.
    pub stall: Stall,
    /// Bookkeeping, of each page that could be merged.
    pub metadata_bytes_per_page: f64,
    /// The same as a share of the page.
    pub metadata_share: f64,
    /// Mappings of the guests' processes.
    pub vmas_before: u64,
    /// See above.
    pub vmas_after: u64,
    /// What the merger keeps, and says of itself.
    pub account: Account,
    /// Pages over time.
    pub curve: Curve,
}

/// A merger with its guests and its prober; all end when this is dropped.
pub struct Scene {
    /// Who merges.
    pub merger: Box<dyn Merger>,
    /// The guests.
    pub guests: Guests,
    /// One guest more, which measures.
    pub prober: Prober,
    /// Everybody's process.
    pub processes: Vec<Guest>,
}

impl Scene {
    /// Sets everything up; nothing is merged yet.
    ///
    /// # Errors
    /// Something does not start.
    pub fn set(side: Side, o: &Options, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Self> {
        let mut merger: Box<dyn Merger> = match side {
            Side::Ksmd => Box::new(Ksmd::new(o.use_zero_pages)?),
            Side::Pagefold => Box::new(Folding::start(dir, !o.no_prover, guardian)?),
        };
        let guests = Guests::start(o, merger.as_ref(), dir, guardian).context("the guests do not come up")?;
        let prober = Prober::start(merger.as_ref(), "probe", &["probe".to_owned()])?;
        // VMMs have more memory than their guests'.
        let mut processes: Vec<Guest> = guests.pids()?.into_iter().map(|pid| (pid, o.memory / 2)).collect();
        processes.push((prober.pid(), LEAST_OF_PROBER));
        merger.meet(&processes)?;
        Ok(Self { merger, guests, prober, processes })
    }

    /// What the guests take now.
    ///
    /// # Errors
    /// One has ended.
    pub fn taken(&self) -> anyhow::Result<Taken> {
        let pids: Vec<u32> = self.processes.iter().map(|(pid, _)| *pid).collect();
        Taken::by(&pids, &self.merger.own_pids()?)
    }

    /// Ends everybody, the guests first.
    ///
    /// # Errors
    /// The merger cannot be ended.
    pub fn end(self) -> anyhow::Result<()> {
        let Self { mut merger, guests, prober, .. } = self;
        drop((prober, guests));
        merger.off()
    }
}

/// Has one side's turn.
///
/// # Errors
/// It could not be measured.
pub fn turn(side: Side, o: &Options, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Turn> {
    let mut scene = Scene::set(side, o, dir, guardian)?;
    let equal_pages = equal_pages(&scene.processes)?;
    let before = scene.taken()?;
    let name = scene.merger.name();
    say!("pagefold: {name}: merging begins; {} pages in memory, {equal_pages} equal to another", before.frames);
    let cpu_before = scene.merger.cpu_s()?;
    let begin = Instant::now();
    scene.merger.on()?;
    let curve = Curve::until_stable(begin, cpu_before, equal_pages, || scene.merger.progress())?;
    let after = scene.taken()?;
    let account = scene.merger.account()?;
    let Point { seconds, so_far: end } = curve.end();
    say!("pagefold: {name}: {} pages merged in {:.1} s, {:.2} s of CPU", end.merged_pages, seconds, end.cpu_s);
    let steady_cpu_s_per_s = steady(scene.merger.as_ref(), Duration::from_secs(o.steady))?;
    let (mut reactions, reactions_missed) = scene.prober.react()?;
    let first_writes = scene.prober.first_writes()?;
    let stall = scene.prober.stalls()?;
    if stall.merged_share < 0.99 {
        let share = stall.merged_share * 100.0;
        say!("pagefold: {name}: warning: {share:.0}% of what was read was merged meanwhile: so its stalls are too low");
    }
    // Agents count on while the prober is at work.
    let agent_stalls = scene.merger.account()?.agent_stalls;
    scene.end()?;
    reactions.sort_by(f64::total_cmp);
    let metadata_bytes_per_page = account.metadata_bytes as f64 / before.frames.max(1) as f64;
    Ok(Turn {
        resident_pages: before.frames,
        equal_pages,
        merged_pages: end.merged_pages,
        frames_saved: before.frames.cast_signed() - after.frames.cast_signed(),
        wall_s: None,
        cpu_s: None,
        total_wall_s: seconds,
        total_cpu_s: end.cpu_s,
        cpu_us_per_merged_page: end.cpu_s * 1e6 / end.merged_pages.max(1) as f64,
        steady_cpu_s_per_s,
        reaction_s: reactions.get(reactions.len() / 2).copied(),
        reaction_max_s: reactions.last().copied(),
        reactions_missed,
        first_writes,
        stall,
        metadata_bytes_per_page,
        metadata_share: metadata_bytes_per_page / page::PAGE_BYTES as f64,
        vmas_before: before.vmas,
        vmas_after: after.vmas,
        account: Account { agent_stalls, ..account },
        curve,
    })
}

/// Processor time of a second, with nobody asking how it goes.
fn steady(merger: &dyn Merger, time: Duration) -> anyhow::Result<f64> {
    let (begin, before) = (Instant::now(), merger.cpu_s()?);
    std::thread::sleep(time);
    let used = merger.cpu_s()? - before;
    Ok(used / begin.elapsed().as_secs_f64())
}
