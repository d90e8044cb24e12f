//! Guests that are restored by copying, as members of a group that has their template: how soon their pages are folded.

use super::scene::{Guests, Scene};
use crate::guardian::Guardian;
use crate::ksm::account::{self, ByReason};
use crate::ksm::folding::{self, Folding as Service};
use crate::ksm::merger::Merger;
use audit::contents::{Contents, Places};
use lab::Image;
use serde::Serialize;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Seconds after the last restore at which folded pages are counted. A count reads all frames that are not folded, and
/// takes processor time from guests and agents. So there is none before the first that matters.
const COUNTS: [u64; 3] = [10, 20, 40];

/// When this share of the pages is folded, counting ends.
const ALL: f64 = 0.995;

/// Guests that were restored by copying.
#[derive(Serialize)]
pub struct Restored {
    /// Image of the guests.
    pub image: Image,
    /// Number of guests.
    pub n: u32,
    /// Time until all had answered.
    pub all_answered_s: f64,
    /// Of all guests, and of the last one, over time.
    pub folded: Vec<Folded>,
    /// Pages of all guests whose content a slot has, by the reason why they are not folded at the last count.
    pub open: ByReason,
}

/// How much is folded at one time.
#[derive(Serialize)]
pub struct Folded {
    /// Since the last guest was restored.
    pub seconds: u64,
    /// Share of the pages whose content a slot has.
    pub share: f64,
    /// The same of the guest that was restored last.
    pub share_of_last: f64,
    /// Processor time of the merger until then, in seconds.
    pub merger_cpu_s: f64,
}

/// Restores guests one after the other, and counts how soon their pages are folded.
///
/// # Errors
/// A guest does not come up.
pub fn run(scene: &Scene, n: u32, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Restored> {
    let mut service = Service::start(dir, true, guardian)?;
    service.set(folding::folds())?;
    let folding = scene.folding(service.dir())?;
    scene.save(folding.as_ref())?;
    // This clone maps the template, by which the template's memory is recognized as a part of the pool: no process of
    // the service maps it.
    let first = scene.cloned("first-folded", 1, folding.as_ref())?;
    let guests = scene.restored(1..=n, true)?;
    service.meet(&guests.pids().into_iter().map(|pid| (pid, 1)).collect::<Vec<_>>())?;
    let (folded, open) = watch(&service, &guests, &first.pids())?;
    let all_answered_s = guests.all_answered_s;
    drop((guests, first));
    service.off()?;
    Ok(Restored { image: scene.image(), n, all_answered_s, folded, open })
}

fn watch(service: &Service, guests: &Guests, of_template: &[u32]) -> anyhow::Result<(Vec<Folded>, ByReason)> {
    let (begin, pids) = (Instant::now(), guests.pids());
    let (mut folded, mut found) = (Vec::new(), None);
    for seconds in COUNTS {
        sleep((begin + Duration::from_secs(seconds)).saturating_duration_since(Instant::now()));
        let own = [&service.own_pids()?[..], of_template].concat();
        let merger_cpu_s = service.cpu_s()?;
        let (share, share_of_last) =
            shares(&pids, &own, found.insert(Places::of(&pids, &own)?.read_against_all_slots()?))?;
        folded.push(Folded { seconds, share, share_of_last, merger_cpu_s });
        if folded.last().is_some_and(|folded| folded.share > ALL && folded.share_of_last > ALL) {
            break;
        }
    }
    let open = found.map_or_else(|| Ok(ByReason::new()), |found| account::open_by_reason(service, &found))?;
    Ok((folded, open))
}

/// Share of pages that are folded, among those whose content a slot has: of all guests, and of the last one.
fn shares(pids: &[u32], own: &[u32], found: &Contents) -> anyhow::Result<(f64, f64)> {
    let Some(last) = pids.last() else { return Ok((0.0, 0.0)) };
    let mapped_by_last = Places::of(&[*last], own)?.taken().folded_places;
    let open: Vec<u32> = found
        .duplicates
        .iter()
        .filter(|class| class.has_slot)
        .flat_map(|class| &class.pages)
        .map(|page| page.pid)
        .collect();
    let share = |mapped: u64, open: usize| mapped as f64 / (mapped as f64 + open as f64).max(1.0);
    let open_of_last = open.iter().filter(|pid| *pid == last).count();
    Ok((share(found.taken.folded_places, open.len()), share(mapped_by_last, open_of_last)))
}
