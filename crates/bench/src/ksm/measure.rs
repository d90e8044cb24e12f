//! One side's turn: guests are started afresh, the merger merges until merging is stable, then the processor time of
//! the idle state is measured. Last, the prober measures reactions, first writes and stalls.

use super::curve::{Curve, Point};
use super::equal::{Guest, equal_pages};
use super::folding::{AgentStalls, Folding};
use super::guests::Guests;
use super::ksmd::Ksmd;
use super::merger::{Account, Merger};
use super::options::Options;
use super::probe::Stall;
use super::prober::Prober;
use super::timings::Spread;
use crate::guardian::Guardian;
use anyhow::Context;
use audit::contents::{Places, Taken};
use cli::say;
use serde::Serialize;
use std::path::Path;
use std::time::{Duration, Instant};

/// Least size in bytes of the prober's mappings that count as guest memory.
const LEAST_OF_PROBER: u64 = 1 << 20;

/// The side whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The kernel's merger.
    Ksmd,
    /// Pagefold.
    Pagefold,
}

/// The result of a turn.
#[derive(Clone, Debug, Serialize)]
pub struct Turn {
    /// Private pages of the guests' processes that were in memory before merging.
    pub resident_pages: u64,
    /// Pages of these that could be merged: of every content all copies but one.
    pub equal_pages: u64,
    /// Pages saved in the end, by the merger's own account.
    pub merged_pages: u64,
    /// Frames saved: those that the guests took before merging, less those they take after it.
    pub frames_saved: i64,
    /// Time until 99% of the share that ksmd merged in the end of this round; absent if it was never reached.
    pub wall_s: Option<f64>,
    /// Processor time until then.
    pub cpu_s: Option<f64>,
    /// Time until merging was stable.
    pub total_wall_s: f64,
    /// Processor time until then.
    pub total_cpu_s: f64,
    /// All processor time until then, per merged page.
    pub cpu_us_per_merged_page: f64,
    /// Processor time per second while the guests are idle.
    pub steady_cpu_s_per_s: f64,
    /// Median time until a new duplicate is merged.
    pub reaction_s: Option<f64>,
    /// Longest time until a new duplicate is merged.
    pub reaction_max_s: Option<f64>,
    /// New duplicates that were not merged within the time limit.
    pub reactions_missed: u64,
    /// Times of first writes to merged pages.
    #[serde(rename = "break")]
    pub first_writes: Spread,
    /// Times of reads of pages while they are merged.
    pub stall: Stall,
    /// Memory for bookkeeping, per page of the guests'.
    pub metadata_bytes_per_page: f64,
    /// The same as a share of a page's size.
    pub metadata_share: f64,
    /// Mappings of the guests' processes before merging.
    pub vmas_before: u64,
    /// Mappings of the guests' processes after merging.
    pub vmas_after: u64,
    /// The merger's bookkeeping, and its own report.
    pub account: Account,
    /// Merged pages over time.
    pub curve: Curve,
}

/// A merger with its guests and its prober; dropping it ends them all.
pub struct Scene {
    /// The merger.
    pub merger: Box<dyn Merger>,
    /// The guests.
    pub guests: Guests,
    /// One more process whose memory is merged; it measures from inside how merging affects it.
    pub prober: Prober,
    /// The processes of all guests, the prober's among them.
    pub processes: Vec<Guest>,
}

impl Scene {
    /// Starts the merger, the guests and the prober; nothing is merged yet.
    ///
    /// # Errors
    /// The merger, a guest or the prober does not start.
    pub fn set(side: Side, o: &Options, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Self> {
        let mut merger: Box<dyn Merger> = match side {
            Side::Ksmd => Box::new(Ksmd::new(o.use_zero_pages)?),
            Side::Pagefold => Box::new(Folding::start(dir, !o.no_prover, guardian)?),
        };
        let guests = Guests::start(o, merger.as_ref(), dir, guardian).context("the guests do not come up")?;
        let prober = Prober::start(merger.as_ref(), "probe", &["probe".to_owned()])?;
        // A VMM has a little private memory besides the guest's. Its mappings are smaller than half of the guest's
        // memory, and are left out.
        let mut processes: Vec<Guest> = guests.pids()?.into_iter().map(|pid| (pid, o.memory / 2)).collect();
        processes.push((prober.pid(), LEAST_OF_PROBER));
        merger.meet(&processes)?;
        Ok(Self { merger, guests, prober, processes })
    }

    /// Page frames, pages and mappings that the guests and the merger's own processes take at this moment.
    ///
    /// # Errors
    /// A guest has ended.
    pub fn taken(&self) -> anyhow::Result<Taken> {
        let pids: Vec<u32> = self.processes.iter().map(|(pid, _)| *pid).collect();
        Ok(Places::of(&pids, &self.merger.own_pids()?)?.taken())
    }

    /// Ends the prober and the guests, then the merger.
    ///
    /// # Errors
    /// The merger cannot be ended.
    pub fn end(self) -> anyhow::Result<()> {
        let Self { mut merger, guests, prober, .. } = self;
        drop((prober, guests));
        merger.off()
    }
}

/// Measures one side in a turn.
///
/// # Errors
/// A process does not start, ends too early, or cannot be read.
pub fn turn(side: Side, o: &Options, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Turn> {
    let mut scene = Scene::set(side, o, dir, guardian)?;
    let merging = merge(&mut scene, o.settle)?;
    let steady_cpu_s_per_s = steady(scene.merger.as_ref(), Duration::from_secs(o.steady))?;
    let probed = probe(&mut scene, o.reactions)?;
    // Read again: agents have counted further stalls while the prober worked.
    let agent_stalls = scene.merger.account()?.agent_stalls;
    scene.end()?;
    Ok(summary(merging, steady_cpu_s_per_s, probed, agent_stalls))
}

/// The guests before and after merging, and the merger's progress in between.
struct Merging {
    equal_pages: u64,
    before: Taken,
    after: Taken,
    account: Account,
    curve: Curve,
}

/// Switches the merger on, and follows it until merging is stable.
fn merge(scene: &mut Scene, settle_s: u64) -> anyhow::Result<Merging> {
    let equal_pages = equal_pages(&scene.processes)?;
    let before = scene.taken()?;
    let name = scene.merger.name();
    say!("pagefold: {name}: merging begins; {} pages in memory, {equal_pages} equal to another", before.frames);
    let cpu_before = scene.merger.cpu_s()?;
    let begin = Instant::now();
    scene.merger.on()?;
    let curve = Curve::until_stable(begin, cpu_before, equal_pages, settle_s, || scene.merger.progress())?;
    let after = scene.taken()?;
    let account = scene.merger.account()?;
    let Point { seconds, so_far: end } = curve.end();
    say!("pagefold: {name}: {} pages merged in {:.1} s, {:.2} s of CPU", end.merged_pages, seconds, end.cpu_s);
    Ok(Merging { equal_pages, before, after, account, curve })
}

/// What the prober has measured.
struct Probed {
    /// Seconds until each new duplicate was merged, in ascending order.
    reactions: Vec<f64>,
    reactions_missed: u64,
    first_writes: Spread,
    stall: Stall,
}

/// Has the prober measure reactions, first writes and stalls, one after the other.
fn probe(scene: &mut Scene, reactions: u8) -> anyhow::Result<Probed> {
    let (mut reactions, reactions_missed) = scene.prober.react(reactions)?;
    let first_writes = scene.prober.first_writes()?;
    let stall = scene.prober.stalls()?;
    if stall.merged_share < 0.99 {
        let (name, share) = (scene.merger.name(), stall.merged_share * 100.0);
        say!("pagefold: {name}: warning: {share:.0}% of what was read was merged meanwhile: so its stalls are too low");
    }
    reactions.sort_by(f64::total_cmp);
    Ok(Probed { reactions, reactions_missed, first_writes, stall })
}

/// The result of a turn. `wall_s` and `cpu_s` follow when both sides' turns are known.
fn summary(merging: Merging, steady_cpu_s_per_s: f64, probed: Probed, agent_stalls: Option<AgentStalls>) -> Turn {
    let Merging { equal_pages, before, after, account, curve } = merging;
    let Probed { reactions, reactions_missed, first_writes, stall } = probed;
    let Point { seconds, so_far: end } = curve.end();
    let metadata_bytes_per_page = account.metadata_bytes as f64 / before.frames.max(1) as f64;
    Turn {
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
    }
}

/// Processor time of the merger per second over `time`. The bench does not ask the merger for its progress meanwhile.
fn steady(merger: &dyn Merger, time: Duration) -> anyhow::Result<f64> {
    let (begin, before) = (Instant::now(), merger.cpu_s()?);
    std::thread::sleep(time);
    let used = merger.cpu_s()? - before;
    Ok(used / begin.elapsed().as_secs_f64())
}
