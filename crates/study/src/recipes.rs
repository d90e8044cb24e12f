//! Recipes: how a turn of each study is measured. All else about a study is data.

mod average;
mod builds;
mod counters;
mod duplicates;
mod floor;
mod footprint;
mod groups;
mod memory_change;
mod primitives;
mod ram;
mod rates;
mod scanner;
mod services;
mod under_load;

use crate::plan::Planned;
use crate::record::{Measured, Timeline};
use crate::rig::{Merger, Rig, SETTLED_FOR, Vms, VmsWanted, pause};
use std::time::Instant;

/// Measures one turn.
pub type Recipe = fn(&mut Rig, &Planned) -> anyhow::Result<Measured>;

/// The recipe of a study, if it has one.
pub fn of(id: &str) -> Option<Recipe> {
    match id {
        "agarwal-fig6.2" => Some(average::by_number),
        "agarwal-fig6.4" => Some(footprint::next_guest),
        "agarwal-t6.4" => Some(duplicates::by_place),
        "kim-bill" => Some(groups::bill),
        "kim-floor" => Some(floor::storm),
        "kim-isolate" => Some(groups::isolate),
        "kloster-fig2.2" => Some(memory_change::over_time),
        "kloster-fig2.3" | "kloster-fig2.4" => Some(duplicates::over_time),
        "kloster-fig7.3" => Some(builds::zeros_consumed),
        "kloster-fig8.1" => Some(rates::five_loads),
        "kloster-t7.1" => Some(builds::run_time),
        "kloster-t8.3" => Some(primitives::costs),
        "li-exp1-2" => Some(counters::by_number),
        "sonone-fig1" => Some(scanner::cpu),
        "sonone-fig2" => Some(services::databases),
        "sonone-fig4" => Some(services::web_servers),
        "sonone-fig6" => Some(services::mixed),
        "sonone-fig8" => Some(under_load::saving),
        "sonone-t2" => Some(rates::transactions),
        _ => None,
    }
}

/// Memory of the smaller guests.
const D256: u64 = 256 << 20;
/// Memory of the larger guests.
const D512: u64 = 512 << 20;

/// The number of the first saved guest of a turn that takes `guests` of them: each repetition has boots of its own.
fn first_of(planned: &Planned, guests: usize) -> usize {
    planned.rep.unwrap_or(0) as usize * guests
}

/// The number of the first saved guest of a turn with many of them: each repetition changes one for another boot.
fn rep_of(planned: &Planned) -> usize {
    planned.rep.unwrap_or(0) as usize
}

/// Guests of one group.
fn alike(guests: usize, first: usize, memory_bytes: u64) -> VmsWanted {
    VmsWanted { guests, first, memory_bytes, groups: vec![GROUP.to_owned()] }
}

/// Name of the group where there is one only.
const GROUP: &str = "study";

/// Waits until merging is settled. Where nobody merges, as long as that takes others at least: guests rest meanwhile.
fn settle_or_rest(merger: &Merger, begin: Instant, timeline: &mut Timeline) -> anyhow::Result<()> {
    match merger {
        Merger::Off => pause(SETTLED_FOR),
        _ => merger.settle(begin, timeline).map(drop),
    }
}

/// The guests of a lab as a census takes them.
fn as_guests(vms: &Vms) -> anyhow::Result<Vec<guest::Guest>> {
    let pids = vms.pids();
    let mut guests = guest::Survey::take()?.guests(&[], &[]);
    guests.retain(|guest| guest.pids.iter().any(|pid| pids.contains(pid)));
    anyhow::ensure!(guests.len() == pids.len(), "{} of {} guests are found", guests.len(), pids.len());
    for guest in &mut guests {
        guest.group = GROUP.to_owned();
    }
    // In the order in which they were started.
    guests.sort_by_key(|guest| pids.iter().position(|pid| guest.pids.contains(pid)));
    Ok(guests)
}
