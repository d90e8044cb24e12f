//! Memory of guests while they work, by page frames, and the processor time of merging it.
//!
//! | arm | guests | merger |
//! |---|---|---|
//! | `clone` | clones | none |
//! | `merge` | restored by copying, and strangers to any template | Pagefold |
//! | `clone+ksmd` | clones | ksmd, at its highest rate |
//! | `clone+fold` | clones, born folded | Pagefold |
//!
//! The template's own memory is in no figure: every arm but `merge` has it once.

use super::scene::{Guests, Scene};
use crate::guardian::Guardian;
use crate::ksm::folding::Folding as Service;
use crate::ksm::ksmd::Ksmd;
use crate::ksm::merger::Merger;
use crate::workload::{TURNS_SCRIPT, churn_script, daily_script, in_memory_script};
use audit::contents::{Contents, Places, Pooled};
use cli::say;
use lab::Image;
use page::HostVirt;
use serde::Serialize;
use start::Folding;
use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The arms.
pub const ARMS: [&str; 4] = ["clone", "merge", KSMD, "clone+fold"];
/// The arm of ksmd.
pub const KSMD: &str = "clone+ksmd";
/// Seconds after the beginning of the work at which memory is counted. It is also counted at the end.
const COUNTS: [u64; 2] = [0, 60];
/// Pages count as duplicates only if they have been equal for this long: 20 s, or half of the work if that is less.
const LIVED: Duration = Duration::from_secs(20);
/// Pause after each turn of a guest's work, in seconds.
const PAUSE: u64 = 5;
/// Rows of the database that each turn of the work deletes.
const DELETED_ROWS: u32 = 300;
/// Least size of a mapping that counts as a guest's RAM, for the arms' mergers.
const LEAST_RAM: u64 = 32 << 20;

/// Memory at one time of an arm.
#[derive(Serialize)]
pub struct Memory {
    /// Image of the guests.
    pub image: Image,
    /// `clone`, `merge` (restored by copying, and strangers to any template), `clone+ksmd` or `clone+fold`.
    pub arm: &'static str,
    /// Number of guests.
    pub n: u32,
    /// Since the work began.
    pub seconds: u64,
    /// Frames of the guests' processes and of the pool, but for the template.
    pub bytes_each: f64,
    /// Share of the duplicates that are folded, of those that are or have lived for 20 s; at the end alone.
    pub folded_of_possible: Option<f64>,
    /// Processor time of the merger since the work began.
    pub merger_cpu_s: f64,
    /// Mappings of each process.
    pub mappings_each: f64,
    /// Turns of work that each guest has made until the end; `None` if a guest has made none. Arms whose guests have made other numbers
    /// of turns are not to be compared.
    pub turns_each: Option<f64>,
}

/// Measures these arms, one after the other.
///
/// # Errors
/// A guest ends.
pub fn run(
    scene: &Scene,
    arms: &[&'static str],
    (n, seconds): (u32, u64),
    (dir, guardian): (&Path, &mut Guardian),
) -> anyhow::Result<Vec<Memory>> {
    let mut all = Vec::new();
    for &arm in arms {
        say!("pagefold: {}: {n} guests work for {seconds} s: {arm}", scene.name());
        all.append(&mut one_arm(scene, arm, (n, seconds), (dir, &mut *guardian))?);
    }
    Ok(all)
}

/// The merger of an arm: none, ksmd, or a service of Pagefold.
pub enum Side {
    Nobody,
    Ksmd(Ksmd),
    Service(Service),
}

impl Side {
    /// Starts the merger of an arm. Nothing is merged before [`Self::meet`].
    pub fn start(arm: &str, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Self> {
        Ok(match arm {
            "clone" => Self::Nobody,
            KSMD => Self::Ksmd(Ksmd::new(false)?),
            _ => Self::Service(Service::start(dir, true, guardian)?),
        })
    }

    /// The service that folds the guests of this arm, with folding switched on; `None` if Pagefold is not the merger.
    pub fn folding(&self, scene: &Scene) -> anyhow::Result<Option<Folding>> {
        let Self::Service(service) = self else { return Ok(None) };
        service.set(crate::ksm::folding::folds())?;
        scene.folding(service.dir())
    }

    /// Tells the merger the processes of all guests, and has it merge.
    pub fn meet(&mut self, pids: &[u32]) -> anyhow::Result<()> {
        let Some(merger) = self.merger() else { return Ok(()) };
        merger.meet(&pids.iter().map(|pid| (*pid, LEAST_RAM)).collect::<Vec<_>>())?;
        merger.on()
    }

    /// Ends the merger. Its guests have ended before.
    pub fn off(&mut self) -> anyhow::Result<()> {
        self.merger().map_or(Ok(()), |merger| merger.off())
    }

    /// Page frames of these processes and of the pool, without those of the file `template`; and the pages that merging
    /// or cloning saves beyond the template's.
    pub fn taken(&mut self, pids: &[u32], template: (u64, u64)) -> anyhow::Result<(u64, u64)> {
        let own = self.merger().map_or_else(|| Ok(Vec::new()), |merger| merger.own_pids())?;
        let places = Places::of(pids, &own)?;
        let (taken, pool) = (places.taken(), places.pooled_but(template));
        Ok((taken.frames - taken.pool + pool.pages, taken.shared_places + pool.places - pool.mapped))
    }

    fn merger(&mut self) -> Option<&mut dyn Merger> {
        match self {
            Self::Nobody => None,
            Self::Ksmd(ksmd) => Some(ksmd),
            Self::Service(service) => Some(service),
        }
    }

    fn cpu_s(&mut self) -> anyhow::Result<f64> {
        self.merger().map_or(Ok(0.0), |merger| merger.cpu_s())
    }
}

fn one_arm(
    scene: &Scene,
    arm: &'static str,
    (n, seconds): (u32, u64),
    (dir, guardian): (&Path, &mut Guardian),
) -> anyhow::Result<Vec<Memory>> {
    let mut side = Side::start(arm, dir, guardian)?;
    let folding = side.folding(scene)?;
    let guests = started(scene, arm, 1..=n, folding.as_ref())?;
    side.meet(&guests.pids())?;
    let counted = work(scene, arm, &mut side, &guests, seconds)?;
    drop(guests);
    side.off()?;
    Ok(counted)
}

/// Starts guests with these numbers as the arm has them: clones, or guests restored by copying.
pub fn started<'a>(
    scene: &'a Scene,
    arm: &str,
    numbers: RangeInclusive<u32>,
    folding: Option<&Folding>,
) -> anyhow::Result<Guests<'a>> {
    if arm == "merge" {
        scene.save(folding)?;
        return scene.restored(numbers, false);
    }
    scene.cloned("works-%d", numbers.end() + 1 - numbers.start(), folding)
}

/// Has the guests work, and counts their memory at the times `COUNTS` and at the end.
fn work(
    scene: &Scene,
    arm: &'static str,
    side: &mut Side,
    guests: &Guests,
    seconds: u64,
) -> anyhow::Result<Vec<Memory>> {
    let cpu_before = side.cpu_s()?;
    let lived = LIVED.min(Duration::from_secs(seconds) / 2);
    let mut counted = vec![(0, Count::now(side, guests)?, 0.0, None)];
    let script = match scene.image() {
        Image::Tiny => in_memory_script(PAUSE),
        _ => format!("{} {}", churn_script(PAUSE, DELETED_ROWS), daily_script(PAUSE)),
    };
    let once = format!("[ -e /run/works ] || {{ : >/run/works; {script} }}");
    let begin = Instant::now();
    guests.dirs().iter().try_for_each(|dir| start::measure::run(dir, &once).map(drop))?;
    let until = |time: Duration| sleep((begin + time).saturating_duration_since(Instant::now()));
    for at in COUNTS.into_iter().filter(|at| (1..seconds).contains(at)) {
        until(Duration::from_secs(at));
        let cpu = side.cpu_s()? - cpu_before;
        counted.push((at, Count::now(side, guests)?, cpu, None));
    }
    until(Duration::from_secs(seconds) - lived);
    let before = Count::now(side, guests)?.duplicates();
    sleep(lived);
    let cpu = side.cpu_s()? - cpu_before;
    let last = Count::now(side, guests)?;
    let share = last.folded_of_possible(&before);
    counted.push((begin.elapsed().as_secs(), last, cpu, side.merger().map(|_| share)));
    let (n, turns_each) = (guests.pids().len().max(1), turns_each(guests)?);
    let shown = |(seconds, count, merger_cpu_s, folded_of_possible): (u64, Count, f64, Option<f64>)| Memory {
        image: scene.image(),
        arm,
        n: n as u32,
        seconds,
        bytes_each: page::pages_to_bytes(count.frames()) as f64 / n as f64,
        folded_of_possible,
        merger_cpu_s,
        mappings_each: count.contents.taken.vmas as f64 / n as f64,
        turns_each,
    };
    Ok(counted.into_iter().map(shown).collect())
}

/// Mean number of turns of work that the guests have made; `None` if a guest has made none.
fn turns_each(guests: &Guests) -> anyhow::Result<Option<f64>> {
    let mut sum = 0.0;
    for dir in guests.dirs() {
        let Ok(turns) = start::measure::run(&dir, TURNS_SCRIPT)?.trim().parse::<f64>() else { return Ok(None) };
        sum += turns;
    }
    Ok(Some(sum / guests.dirs().len().max(1) as f64))
}

/// A count of the page frames of an arm's guests and of their pool, without the template.
struct Count {
    contents: Contents,
    pool: Pooled,
}

impl Count {
    fn now(side: &mut Side, guests: &Guests) -> anyhow::Result<Self> {
        let own = side.merger().map_or_else(|| Ok(Vec::new()), |merger| merger.own_pids())?;
        let places = Places::of(&guests.pids(), &own)?;
        let pool = places.pooled_but(Scene::memory_of(guests));
        Ok(Self { pool, contents: places.read()? })
    }

    fn frames(&self) -> u64 {
        let taken = &self.contents.taken;
        taken.frames - taken.pool + self.pool.pages
    }

    /// All pages of which there are several with the same content.
    fn duplicates(&self) -> HashSet<(u32, HostVirt)> {
        let pages = self.contents.duplicates.iter().flat_map(|class| &class.pages);
        pages.map(|page| (page.pid, page.at)).collect()
    }

    /// See [`Memory::folded_of_possible`]. Pages that show the template again count as if they had never been written.
    fn folded_of_possible(&self, before: &HashSet<(u32, HostVirt)>) -> f64 {
        let folded = self.contents.taken.shared_places + (self.pool.places - self.pool.mapped);
        let lived = self.contents.duplicates.iter().map(|class| {
            let pages = class.pages.iter().filter(|page| before.contains(&(page.pid, page.at))).count() as u64;
            pages.saturating_sub(u64::from(!class.has_slot))
        });
        let open: u64 = lived.sum();
        folded as f64 / (folded + open).max(1) as f64
    }
}
