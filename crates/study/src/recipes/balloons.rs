//! `li-exp2-2`: a balloon while memory is merged. `kloster-fig8.2`: throughput by the guest's size.

use super::{GROUP, Saved, alike, first_of, merge, merger_of, rep_of};
use crate::plan::Planned;
use crate::record::{Measured, OPERATIONS, Timeline};
use crate::rig::{Group, Merger, Places, Rig, System, Vms, VmsWanted, mb, pause};
use crate::stats;
use anyhow::Context;
use balance::price::{self, Need};
use bench::workload::{self, Timed};
use lend::{Gatherer, Ledger, Rules};
use std::path::Path;
use std::time::{Duration, Instant};

/// Memory of a guest without a balloon, in MiB.
const WHOLE: u64 = 512;
/// Sizes to which guests shrink, in MiB.
const SMALLER: [u64; 2] = [384, 256];
/// Page frames that the guests are to free in each step of an arm `-priced`, in bytes: about as many as become free in
/// the arm `-blind`.
const PRICED_FRAMES: u64 = 128 << 20;
/// Sizes of the guests in `kloster-fig8.2`, in MiB.
const SIZES: [u64; 5] = [512, 416, 352, 288, 256];
/// Size of the disk from which guests read, in MiB. At the first size of a guest, its page cache holds all of it, and
/// at the last one less than half.
const DATA_MIB: u64 = 160;
/// Time of one load, in seconds.
const LOAD_S: u32 = 4;
/// Pause after a change of size: guests report statistics twice, and a merger sees what balloons have taken.
const STATISTICS: Duration = Duration::from_secs(5);

fn ballooned(guests: usize, first: usize) -> VmsWanted {
    VmsWanted { system: System::BALLOONED, ..alike(guests, first, WHOLE << 20) }
}

/// Guests with balloons whose memory is merged. The fields are dropped in order, so guests end before their merger.
struct Ballooned {
    vms: Vms,
    merger: Merger,
    begin: Instant,
    /// Memory that merging saves, over time.
    timeline: Timeline,
    measured: Measured,
    /// Pages that the guests would take without merging, before any balloon took memory.
    unmerged: f64,
}

impl Ballooned {
    /// Measures the memory of all guests; `x` names their present size. Returns what they save, and their page frames.
    fn look(&mut self, x: &str) -> anyhow::Result<(Saved, Places)> {
        let pids = self.vms.pids();
        let (saved, places) = (Saved::of(&self.merger, &pids)?, Places::of(&pids)?);
        let (sharing, shared) = places.sharing_and_shared();
        self.measured.put_at("sharing", x, sharing as f64);
        self.measured.put_at("shared", x, shared as f64);
        if shared > 0 {
            self.measured.put_at("ratio", x, sharing as f64 / shared as f64);
        }
        self.measured.put_at("saved_mb", x, mb(saved.all()));
        self.measured.put_at("given_mb", x, mb(self.unmerged - saved.frames));
        self.timeline.points.push((self.begin.elapsed().as_secs_f64(), mb(saved.all())));
        Ok((saved, places))
    }

    /// Shrinks the guests to these sizes in bytes, and measures what the balloons took and what became free.
    fn shrink(&mut self, x: u64, sizes: &[u64]) -> anyhow::Result<()> {
        self.timeline.events.push((self.begin.elapsed().as_secs_f64(), format!("{x} MiB each")));
        let pids = self.vms.pids();
        let (before, frames) = (Places::of(&pids)?, Saved::of(&self.merger, &pids)?.frames);
        let reached = self.vms.resize(sizes)?;
        pause(STATISTICS)?;
        let (saved, after) = self.look(&x.to_string())?;
        let gone = before.gone_until(&after);
        let taken = (gone.alone + gone.shared).max(1) as f64;
        let (sharing, _) = before.sharing_and_shared();
        let smaller_mb = reached.iter().map(|bytes| WHOLE as f64 * 1.048_576 - *bytes as f64 / 1e6).sum::<f64>();
        self.measured.put_at("inflated_mb", x, smaller_mb);
        self.measured.put_at("freed_mb", x, mb(frames - saved.frames));
        self.measured.put_at("shared_taken", x, gone.shared as f64 / taken);
        self.measured.put_at("shared_held", x, sharing as f64 / before.pages().max(1) as f64);
        Ok(())
    }
}

/// The recipe of `li-exp2-2`. One guest has filled and freed an array, the other is idle.
pub fn while_merging(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger(merger_of(planned), &[Group::of(GROUP)])?;
    let vms = rig.vms(&ballooned(2, first_of(planned, 2)), &mut merger)?;
    vms.tell(&vms.guests[..1], workload::ARRAY_SCRIPT)?;
    vms.settle()?;
    let (begin, timeline, measured) = merge(&merger, &vms)?;
    let saved = Saved::of(&merger, &vms.pids())?;
    let is_priced = planned.arm.ends_with("-priced");
    let goes_by_price = is_priced || planned.arm.ends_with("-aware");
    let mut aware = goes_by_price.then(|| Aware::new(rig.dir(), &vms)).transpose()?;
    let mut guests = Ballooned { vms, merger, begin, timeline, measured, unmerged: saved.all() + saved.frames };
    guests.look(&WHOLE.to_string())?;
    for size in SMALLER {
        let sizes = match &mut aware {
            Some(aware) if is_priced => aware.sizes_that_free(PRICED_FRAMES)?,
            Some(aware) => aware.sizes_of((WHOLE - size) * guests.vms.guests.len() as u64)?,
            None => vec![size << 20; guests.vms.guests.len()],
        };
        guests.shrink(size, &sizes)?;
    }
    guests.timeline.events.push((begin.elapsed().as_secs_f64(), format!("{WHOLE} MiB again")));
    guests.vms.resize(&vec![WHOLE << 20; guests.vms.guests.len()])?;
    pause(STATISTICS)?;
    guests.look("512 again")?;
    let mut measured = guests.measured;
    compare(planned.arm != "off-blind", &mut measured)?;
    measured.timelines.push(guests.timeline);
    Ok(measured)
}

/// Puts the figures that compare the guests at different sizes.
fn compare(merges: bool, measured: &mut Measured) -> anyhow::Result<()> {
    let [first, second] = SMALLER;
    let ratio = |of: &Measured, above: &str, below: &str, x| value(of, above, x).zip(value(of, below, x));
    let per_mb = ratio(measured, "freed_mb", "inflated_mb", first).map(|(freed, inflated)| freed / inflated);
    let gain = value(measured, "given_mb", WHOLE).zip(value(measured, "given_mb", second));
    measured.put("balloon_adds_mb", gain.map(|(before, after)| after - before).context("no size was measured")?);
    measured.put("freed_per_mb", per_mb.context("no balloon was inflated")?);
    measured.put("freed_per_mb_in_all", freed_in_all(measured).context("no balloon was inflated")?);
    if merges {
        let ratios = value(measured, "ratio", WHOLE).zip(value(measured, "ratio", second));
        let parts = ratio(measured, "shared_taken", "shared_held", first);
        measured.put("ratio_change", ratios.map(|(before, after)| after / before).context("nothing was shared")?);
        measured.put("taken_over_held", parts.map(|(took, held)| took / held).context("nothing was shared")?);
    }
    Ok(())
}

/// Memory that became free on the host for each MB that balloons took, over both steps together. Frames freed by a step
/// are counted for it alone, while balloons keep what they took before.
fn freed_in_all(measured: &Measured) -> Option<f64> {
    let freed = SMALLER.map(|size| value(measured, "freed_mb", size)).into_iter().sum::<Option<f64>>()?;
    Some(freed / value(measured, "inflated_mb", SMALLER[1])?)
}

/// A figure at one size of the guests, in MiB.
fn value(measured: &Measured, metric: &str, size: u64) -> Option<f64> {
    let x = size.to_string();
    measured.samples.iter().find(|s| s.metric == metric && s.x.as_ref() == Some(&x)).map(|s| s.value)
}

/// Chooses guests' sizes by price: memory is taken where it frees most page frames.
struct Aware {
    gatherer: Gatherer,
    ledger: Ledger,
    pids: Vec<u32>,
}

impl Aware {
    fn new(dir: &Path, vms: &Vms) -> anyhow::Result<Self> {
        let guaranteed = vec![("*".parse().map_err(anyhow::Error::msg)?, SMALLER[1] << 20)];
        let gatherer = Gatherer::new(Rules { guaranteed, ..Rules::default() });
        Ok(Self { gatherer, ledger: Ledger::open(&dir.join("ledger"))?, pids: vms.pids() })
    }

    /// The size of each guest if all guests together give up `taken_mib`, the cheapest memory first.
    fn sizes_of(&mut self, taken_mib: u64) -> anyhow::Result<Vec<u64>> {
        let facts = self.facts_after_a_while()?;
        let mut left = taken_mib << 20;
        let mut sizes: Vec<u64> = facts.guests.iter().map(balance::GuestFacts::size_bytes).collect();
        left = left.saturating_sub(sizes.iter().map(|size| (WHOLE << 20).saturating_sub(*size)).sum());
        for offer in price::offers(&facts) {
            let taken = offer.bytes.min(left);
            sizes[offer.guest] -= taken;
            left -= taken;
        }
        Ok(sizes)
    }

    /// The sizes at which guests free this many further bytes of page frames, the cheapest memory first.
    fn sizes_that_free(&mut self, frames_bytes: u64) -> anyhow::Result<Vec<u64>> {
        let facts = self.facts_after_a_while()?;
        let mut sizes: Vec<u64> = facts.guests.iter().map(balance::GuestFacts::size_bytes).collect();
        for taken in price::take(&facts, Need { frames_bytes, ..Need::default() }, |_| u64::MAX) {
            sizes[taken.guest] -= taken.bytes;
        }
        Ok(sizes)
    }

    /// Facts about the guests. A guest reports statistics only some seconds after it was first asked for them.
    fn facts_after_a_while(&mut self) -> anyhow::Result<balance::Facts> {
        self.facts()?;
        pause(STATISTICS)?;
        self.facts()
    }

    fn facts(&mut self) -> anyhow::Result<balance::Facts> {
        let mut guests = guest::Survey::take()?.guests(&[], &[]);
        guests.retain(|guest| guest.pids.iter().any(|pid| self.pids.contains(pid)));
        guests.sort_by_key(|guest| self.pids.iter().position(|pid| guest.pids.contains(pid)));
        let facts = self.gatherer.gather(&guests, &self.ledger, &lend::Saved::default())?;
        anyhow::ensure!(facts.guests.len() == self.pids.len(), "facts of {} guests only", facts.guests.len());
        Ok(facts)
    }
}

/// The recipe of `kloster-fig8.2`.
pub fn by_size(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
    let vms = rig.vms(&ballooned(2, rep_of(planned)), &mut merger)?;
    vms.plug(&vms.guests, &rig.data(DATA_MIB)?)?;
    // The page cache gets as much of the disk as fits into it.
    let warm = vms.run(Timed::RandomReads, LOAD_S)?;
    let (begin, mut timeline, mut measured) = merge(&merger, &vms)?;
    let mut rates = Vec::new();
    for size in SIZES {
        timeline.events.push((begin.elapsed().as_secs_f64(), format!("{size} MiB each")));
        vms.resize(&vec![size << 20; vms.guests.len()])?;
        let speeds = vms.run(Timed::RandomReads, LOAD_S)?;
        rates.push(speeds.iter().map(|speed| speed.rate).sum::<f64>());
        measured.put_at("rate", size, rates[rates.len() - 1]);
        measured.put_at("saved_mb", size, mb(Saved::of(&merger, &vms.pids())?.all()));
    }
    measured.put("most_over_least", rates[0] / rates[rates.len() - 1]);
    // The mean is that of logarithms, so that each size counts as much as another. The rate of the largest size is by
    // far the highest.
    let logs: Vec<f64> = rates.iter().map(|rate| rate.ln()).collect();
    measured.put("typical_rate", stats::mean(&logs).exp());
    measured.put(OPERATIONS, warm.iter().map(|speed| speed.operations).sum());
    measured.timelines.push(timeline);
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figures of a turn, with what each of two steps of the balloons freed, in MB.
    fn turn(freed: [f64; 2]) -> Measured {
        let mut measured = Measured::default();
        for (size, step) in SMALLER.into_iter().zip(1..) {
            measured.put_at("freed_mb", size, freed[step - 1]);
            measured.put_at("inflated_mb", size, 250.0 * step as f64);
            measured.put_at("shared_taken", size, 0.2);
            measured.put_at("shared_held", size, 0.4);
        }
        for (size, ratio, given) in [(WHOLE, 4.0, 100.0), (SMALLER[1], 2.0, 350.0)] {
            measured.put_at("ratio", size, ratio);
            measured.put_at("given_mb", size, given);
        }
        measured
    }

    fn once(measured: &Measured, metric: &str) -> Option<f64> {
        measured.samples.iter().find(|s| s.metric == metric && s.x.is_none()).map(|s| s.value)
    }

    #[test]
    fn order_of_two_steps_does_not_change_what_both_free() {
        let (mut early, mut late) = (turn([180.0, 75.0]), turn([75.0, 180.0]));
        compare(true, &mut early).unwrap();
        compare(true, &mut late).unwrap();
        assert_eq!((once(&early, "freed_per_mb"), once(&late, "freed_per_mb")), (Some(0.72), Some(0.3)));
        assert_eq!(once(&early, "freed_per_mb_in_all"), Some(0.51));
        assert_eq!(once(&late, "freed_per_mb_in_all"), Some(0.51));
        assert_eq!((once(&early, "ratio_change"), once(&early, "taken_over_held")), (Some(0.5), Some(0.5)));
        assert_eq!(once(&early, "balloon_adds_mb"), Some(250.0));
    }

    #[test]
    fn arm_without_merger_has_no_ratio_of_shared_pages() {
        let mut measured = turn([10.0, 10.0]);
        compare(false, &mut measured).unwrap();
        assert_eq!((once(&measured, "ratio_change"), once(&measured, "taken_over_held")), (None, None));
        assert!(compare(false, &mut Measured::default()).is_err(), "nothing was measured");
    }
}
