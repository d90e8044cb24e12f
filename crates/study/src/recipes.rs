//! Recipes: functions that measure a turn of a study. All else about studies is data, see `crate::data`.

mod average;
mod balloons;
mod builds;
mod containers;
mod copying;
mod counters;
mod crowded;
mod disk;
mod duplicates;
mod floor;
mod footprint;
mod forks;
mod giving;
mod groups;
mod guest_size;
mod idle;
mod live;
mod loads;
mod machines;
mod many;
mod memory_change;
mod moved;
mod overcommit;
mod passes;
mod placing;
mod primitives;
mod ram;
mod rates;
mod scanner;
mod services;
mod slices;
mod starting;
mod swapping;
mod systems;
mod under_load;
mod used;

use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Group, Merger, Rig, SETTLED_FOR, System, Vms, VmsWanted, pause};
use bench::{SmallHost, Swap};
use std::time::Instant;

/// A function that measures one turn of an arm.
pub type Recipe = fn(&mut Rig, &Planned) -> anyhow::Result<Measured>;

/// The recipe of a study, if it has one.
pub fn of(id: &str) -> Option<Recipe> {
    match id {
        "agarwal-fig4.1" => Some(crowded::computing),
        "agarwal-fig4.3" => Some(disk::among_spinning),
        "agarwal-fig6.2" => Some(average::by_number),
        "agarwal-fig6.4" => Some(footprint::next_guest),
        "agarwal-s4.3" => Some(disk::among_the_same),
        "agarwal-s6.4" => Some(containers::by_root),
        "agarwal-s6.6.3" => Some(idle::given_back),
        "agarwal-s6.7" => Some(machines::kernels),
        "agarwal-s6.8" => Some(machines::together),
        "agarwal-t5.1" => Some(starting::one),
        "agarwal-t6.2" => Some(containers::one_guest),
        "agarwal-t6.3" => Some(containers::merged_alone),
        "agarwal-t6.4" => Some(duplicates::by_place),
        "agarwal-t6.5" => Some(machines::trimmed),
        "kim-bill" => Some(groups::bill),
        "kim-fig2" | "kim-fig3" => Some(giving::two_groups),
        "kim-fig5" => Some(giving::by_rate),
        "kim-floor" => Some(floor::storm),
        "kim-group" => Some(systems::grouped),
        "kim-isolate" => Some(groups::isolate),
        "kim-live" => Some(live::rate),
        "kim-rate" => Some(giving::by_yield),
        "li-exp1-1" => Some(used::by_rate),
        "li-exp1-2" => Some(counters::by_number),
        "li-exp1-3" => Some(systems::counters),
        "li-exp2-1" => Some(swapping::by_size),
        "li-exp2-2" => Some(balloons::while_merging),
        "li-exp3" => Some(moved::migrated),
        "li-host" => Some(copying::file),
        "li-place" => Some(placing::by_rule),
        "li-t1" => Some(used::by_number),
        "sonone-base" => Some(containers::single),
        "sonone-fig1" => Some(scanner::cpu),
        "sonone-fig13" => Some(starting::storm),
        "sonone-fig2" => Some(services::databases),
        "sonone-fig4" => Some(services::web_servers),
        "sonone-fig6" => Some(services::mixed),
        "sonone-fig8" => Some(under_load::saving),
        "sonone-t2" => Some(rates::transactions),
        _ => of_kloster(id),
    }
}

fn of_kloster(id: &str) -> Option<Recipe> {
    match id {
        "kloster-clone" => Some(starting::added),
        "kloster-fig2.2" => Some(memory_change::over_time),
        "kloster-fig2.3" | "kloster-fig2.4" => Some(duplicates::over_time),
        "kloster-fig7.1" => Some(many::idle),
        "kloster-fig7.2" => Some(loads::after_build),
        "kloster-fig7.3" => Some(builds::zeros_consumed),
        "kloster-fig7.4" => Some(loads::all_different),
        "kloster-fig7.5" | "kloster-s7.9" => Some(loads::servers_then_builds),
        "kloster-fig7.6" => Some(loads::by_load),
        "kloster-fig7.7" => Some(overcommit::idle_then_awake),
        "kloster-fig7.8" => Some(guest_size::breaks),
        "kloster-fig7.9" => Some(loads::by_size),
        "kloster-fig8.1" => Some(rates::five_loads),
        "kloster-fig8.2" => Some(balloons::by_size),
        "kloster-fig8.3" => Some(rates::connections),
        "kloster-t6.1" => Some(passes::by_bound),
        "kloster-t7.1" => Some(builds::run_time),
        "kloster-t7.2" => Some(systems::pairs),
        "kloster-t8.1" => Some(forks::rates),
        "kloster-t8.3" => Some(primitives::costs),
        _ => None,
    }
}

/// Memory of the smaller guests.
const D256: u64 = 256 << 20;
/// Memory of the larger guests.
const D512: u64 = 512 << 20;

/// The number of the first saved guest for a turn that takes `guests` of them. Each repetition takes other guests,
/// which were booted separately.
fn first_of(planned: &Planned, guests: usize) -> usize {
    planned.rep.unwrap_or(0) as usize * guests
}

/// The number of the first saved guest for a turn with many guests. Each repetition takes one other guest in place of
/// one of the last repetition.
fn rep_of(planned: &Planned) -> usize {
    planned.rep.unwrap_or(0) as usize
}

/// Ending of the name of an arm with containers.
const CONTAINER: &str = "container";

/// The merger in the name of an arm, such as `ksm` in `ksm-container`.
fn merger_of(planned: &Planned) -> &str {
    planned.arm.split('-').next().unwrap_or_default()
}

/// Restored guests with Debian, all in one group.
fn alike(guests: usize, first: usize, memory_bytes: u64) -> VmsWanted {
    VmsWanted { guests, first, memory_bytes, groups: vec![GROUP.to_owned()], system: System::DEBIAN }
}

/// An empty timeline of saved memory.
fn timeline() -> Timeline {
    Timeline { name: "saved".into(), unit: "MB".into(), ..Timeline::default() }
}

/// Name of the group in studies that have only one.
const GROUP: &str = "study";

/// Restores guests in a control group that stands for a small host, with `swap` MiB of swap space for it. The control
/// group has no limit yet. Values are returned in the order in which they must end: guests, merger, swap, host.
fn on_small_host(
    rig: &mut Rig,
    planned: &Planned,
    wanted: &VmsWanted,
    swap_mib: usize,
) -> anyhow::Result<(SmallHost, Swap, Merger, Vms)> {
    let small = SmallHost::make("study", rig.guardian())?;
    let dir = rig.dir().to_owned();
    let swap = Swap::on(&dir, swap_mib, rig.guardian())?;
    let (merger, vms) = small.inside(|| {
        let mut merger = rig.merger(merger_of(planned), &[Group::of(GROUP)])?;
        let vms = rig.vms(wanted, &mut merger)?;
        Ok((merger, vms))
    })?;
    Ok((small, swap, merger, vms))
}

/// Waits until merging has settled. If nobody merges, waits for `SETTLED_FOR`, the least time that merging takes to
/// settle.
fn settle_or_rest(merger: &Merger, begin: Instant, timeline: &mut Timeline) -> anyhow::Result<()> {
    match merger {
        Merger::Off => pause(SETTLED_FOR),
        _ => merger.settle(begin, timeline),
    }
}

/// Pages that these guests save, counted from page frames: ksmd's own account also has those of all other guests of the
/// host.
struct Saved {
    /// Page-table entries beyond the first for the same frame.
    merged: f64,
    /// Pages of zeros that were given back.
    zeros: f64,
    /// Frames that the guests take.
    frames: f64,
}

impl Saved {
    fn of(merger: &Merger, pids: &[u32]) -> anyhow::Result<Self> {
        let taken = merger.taken(pids)?;
        let zeros = merger.zero_pages()? as f64;
        Ok(Self { merged: taken.merged_pages as f64, zeros, frames: taken.frames as f64 })
    }

    fn all(&self) -> f64 {
        self.merged + self.zeros
    }

    /// The saved pages as a share of those that the guests would take without merging.
    fn share(&self) -> f64 {
        self.all() / (self.all() + self.frames)
    }
}

/// Merges the guests' memory until merging has settled. Returns when merging began, the timeline of saved memory since
/// then, and a result with the number of merged pages.
fn merge(merger: &Merger, vms: &Vms) -> anyhow::Result<(Instant, Timeline, Measured)> {
    let begin = Instant::now();
    let mut timeline = timeline();
    merger.on()?;
    settle_or_rest(merger, begin, &mut timeline)?;
    let mut measured = Measured::default();
    measured.put(MERGED, merger.taken(&vms.pids())?.merged_pages as f64);
    Ok((begin, timeline, measured))
}

/// The guests of a lab, in the form in which a census takes them.
fn as_guests(vms: &Vms) -> anyhow::Result<Vec<guest::Guest>> {
    let pids = vms.pids();
    let mut guests = guest::Survey::take()?.guests(&[], &[]);
    guests.retain(|guest| guest.pids.iter().any(|pid| pids.contains(pid)));
    anyhow::ensure!(guests.len() == pids.len(), "{} of {} guests are found", guests.len(), pids.len());
    for guest in &mut guests {
        guest.group = GROUP.to_owned();
    }
    // Sorts them in the order in which they were started.
    guests.sort_by_key(|guest| pids.iter().position(|pid| guest.pids.contains(pid)));
    Ok(guests)
}

#[cfg(test)]
mod tests {
    use crate::data::{self, Length};

    /// Studies whose full forms have fewer repetitions than the others.
    const FEWER: [&str; 2] = ["agarwal-fig4.1", "kloster-t8.1"];
    /// Repetitions of a full form at least.
    const FULL: u32 = 5;
    /// Longest time of a short form by its estimate, in seconds.
    const SHORT_S: f64 = 600.0;

    #[test]
    fn full_forms_have_five_repetitions_and_short_ones_end_in_ten_minutes() {
        for study in data::all().iter().filter(|study| study.why_not().is_none()) {
            let form = |length| study.form(length).expect("a study with a recipe has both forms");
            assert!(form(Length::Full).reps >= FULL || FEWER.contains(&study.id.as_str()), "{}", study.id);
            let arms = study.arms.iter().filter(|arm| arm.is_in(Length::Short)).count() as u32;
            let short = form(Length::Short);
            let turns = (short.reps + u32::from(short.warm_up)) * arms;
            assert!(f64::from(turns) * short.turn_seconds <= SHORT_S, "{}: {turns} turns", study.id);
        }
    }
}
