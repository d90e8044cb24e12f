//! `kim-fig2`, and the traces of `kim-fig3`: memory that merging saves is given back, by a policy, to two kinds of
//! guests: those that count words, and those that read a disk. `kim-fig5`: how fast a group saves memory, by its scan
//! rate.
//!
//! ```text
//!   every few seconds: pages that each guest saves, by page frames -> a policy of `pagefold balance` -> sizes of the balloons
//! ```
//!
//! The name of an arm is a case and a way. The case `fio-low` or `mr-low` says which kind of guests has little memory.
//! The ways `ksm` and `fold` are mergers with all guests in one group. `1-9` is Pagefold with a group for each kind of
//! guests, whose scan rates are as 1 to 9. In arms `two-`, the two kinds of guests also have different kernels, the
//! rates are the paper's, and the loads last for six passes over all memory. `kim-rate` compares these with rates that
//! follow their yield (`adaptive`), and has a group that computes.

use super::{D256, GROUP, Saved, alike, first_of, merge};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, OPERATIONS, Timeline};
use crate::rig::{Group, Merger, Places, Rig, System, Vms, VmsWanted, mb, pause};
use crate::stats;
use anyhow::{Context, bail};
use balance::{DriverState, Facts, GuestFacts, policy};
use bench::workload;
use page::PAGE_BYTES;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Names of the two kinds of guests, and of their groups: word count, and reads of a disk.
const KINDS: [&str; 2] = ["mr", "fio"];
/// Number of guests of each kind.
const OF_A_KIND: usize = 2;
/// Memory of a guest without a balloon, in MiB.
const WHOLE: u64 = 640;
/// Pages a second that are scanned by ksmd, or by the agents of all groups together.
const RATE: u32 = 5000;
/// Pages a second that are scanned in arms `two-`: the paper's rate.
const RATE_OF_TWO: u32 = 10_000;
/// Time for which the loads run in arms `two-`: six passes over the guests' memory at their first sizes.
const TIME_OF_TWO: Duration = Duration::from_secs(210);
/// Beginning of the name of an arm in which the two kinds of guests have different kernels.
const TWO: &str = "two-";
/// The Debian suite whose kernel the guests that read a disk boot in arms `two-`.
const OTHER_SUITE: &str = "trixie";
/// Size of the text, in MiB.
const TEXT_MIB: u32 = 100;
/// Size of the disk that is read, in MiB.
const DATA_MIB: u64 = 350;
/// Time between two rounds of giving memory back.
const EVERY: Duration = Duration::from_secs(5);
/// The paper says that most pages are reclaimed within this time.
const MINUTE: Duration = Duration::from_secs(60);
/// Most processor time of a group whose scan rate follows its yield, in percent of a processor: the service's default.
const ADAPTIVE_PERCENT: u8 = 10;
/// Number of guests that compress in `kim-rate`.
const COMPUTING: usize = 2;
/// Scan rates of `kim-fig5`, in pages a second.
const RATES: [u32; 3] = [1000, 3000, 9000];

/// What an arm of `kim-fig2` stands for.
struct Way {
    /// For each kind of guests, the size that a guest always keeps, in MiB.
    kept: [u64; 2],
    merger: &'static str,
    policy: &'static str,
    /// Scan rates of the two groups; `None` for a group whose rate follows its yield. `None` for both: all guests are
    /// in one group.
    rates: Option<[Option<u32>; 2]>,
    /// Pages that are scanned a second, over all groups.
    rate: u32,
    /// Whether the kinds of guests have different kernels.
    systems_differ: bool,
}

impl Way {
    fn of(arm: &str) -> anyhow::Result<Self> {
        let (systems_differ, arm) = arm.strip_prefix(TWO).map_or((false, arm), |arm| (true, arm));
        let rate = if systems_differ { RATE_OF_TWO } else { RATE };
        let (kept, way) = match (arm.strip_prefix("fio-low-"), arm.strip_prefix("mr-low-")) {
            (Some(way), _) => ([320, 320], way),
            (_, Some(way)) => ([288, 384], way),
            _ => bail!("no case in {arm}"),
        };
        let (merger, policy, rates) = match way {
            "ksm-equal" => ("ksm-5k", "equal", None),
            "fold-equal" => ("fold", "equal", None),
            "fold-se" => ("fold", "entitlement", None),
            "1-9" => ("fold", "group", Some([Some(rate / 10), Some(rate / 10 * 9)])),
            "9-1" => ("fold", "group", Some([Some(rate / 10 * 9), Some(rate / 10)])),
            "adaptive" => ("fold", "group", Some([None, None])),
            _ => bail!("no way in {arm}"),
        };
        Ok(Self { kept, merger, policy, rates, rate, systems_differ })
    }

    /// The Debian suite whose kernel this kind of guests boots; `None` for the installed kernel.
    fn kernel_of(&self, kind: usize) -> Option<&'static str> {
        (self.systems_differ && kind == 1).then_some(OTHER_SUITE)
    }

    fn groups(&self) -> Vec<Group> {
        let of = |name, rate: Option<u32>| match rate {
            Some(_) => Group { scan_rate: rate, ..Group::of(name) },
            None => following(name),
        };
        let one = || vec![of(GROUP, Some(self.rate))];
        self.rates.map_or_else(one, |rates| vec![of(KINDS[0], rates[0]), of(KINDS[1], rates[1])])
    }
}

/// A group whose scan rate follows its yield: what scanning saves.
fn following(name: &'static str) -> Group {
    Group { adaptive_percent: Some(ADAPTIVE_PERCENT), ..Group::of(name) }
}

/// Guests of both kinds with their loads. They are dropped before their merger.
struct Two {
    vms: Vms,
    merger: Merger,
    way: Way,
    begin: Instant,
    timelines: [Timeline; 4],
}

fn kind(n: usize) -> usize {
    n / OF_A_KIND
}

impl Two {
    fn start(rig: &mut Rig, way: Way) -> anyhow::Result<Self> {
        let mut merger = rig.merger(way.merger, &way.groups())?;
        let wanted = |kind: usize| VmsWanted {
            guests: OF_A_KIND,
            first: kind * OF_A_KIND,
            memory_bytes: WHOLE << 20,
            groups: vec![way.rates.map_or(GROUP, |_| KINDS[kind]).to_owned()],
            system: System { kernel_of: way.kernel_of(kind), ..System::BALLOONED },
        };
        let mut vms = rig.vms(&wanted(0), &mut merger)?;
        vms.add(rig, &wanted(1), &mut merger)?;
        vms.plug(&vms.guests[..OF_A_KIND], &text(rig)?)?;
        vms.plug(&vms.guests[OF_A_KIND..], &rig.data(DATA_MIB)?)?;
        let kept: Vec<u64> = (0..vms.guests.len()).map(|n| way.kept[kind(n)] << 20).collect();
        vms.resize(&kept)?;
        let line = |name: String| Timeline { name, unit: "MB".into(), ..Timeline::default() };
        let timelines = [
            line(format!("saved by {}", KINDS[0])),
            line(format!("saved by {}", KINDS[1])),
            line(format!("size of a guest of {}", KINDS[0])),
            line(format!("size of a guest of {}", KINDS[1])),
        ];
        Ok(Self { vms, merger, way, begin: Instant::now(), timelines })
    }

    /// Bytes that each guest saves.
    fn saved(&self) -> anyhow::Result<Vec<u64>> {
        let saved = Places::of(&self.vms.pids())?.saved_by_each();
        Ok(saved.into_iter().map(|pages| pages as u64 * PAGE_BYTES as u64).collect())
    }

    /// Gives the saved memory back: sets the guests' sizes by the policy. Returns the savings of both kinds, in bytes.
    fn give_back(&mut self) -> anyhow::Result<[f64; 2]> {
        let saved = self.saved()?;
        let sizes = sizes(&self.way, &saved).context("there is no such policy")?;
        self.vms.set_sizes(&sizes)?;
        let at = self.begin.elapsed().as_secs_f64();
        let of_kind = |bytes: &[u64], k: usize| bytes[k * OF_A_KIND..(k + 1) * OF_A_KIND].iter().sum::<u64>() as f64;
        let saved = [of_kind(&saved, 0), of_kind(&saved, 1)];
        let (actual, each) = (self.vms.sizes()?, OF_A_KIND as f64 * 1e6);
        let points = [saved[0] / 1e6, saved[1] / 1e6, of_kind(&actual, 0) / each, of_kind(&actual, 1) / each];
        self.timelines.iter_mut().zip(points).for_each(|(line, point)| line.points.push((at, point)));
        Ok(saved)
    }
}

/// The size of each guest by the arm's policy, from the bytes that each saves. `None` if there is no such policy.
fn sizes(way: &Way, saved: &[u64]) -> Option<Vec<u64>> {
    let group = |n: usize| way.rates.map_or(GROUP, |_| KINDS[kind(n)]);
    let guest = |(n, saved): (usize, &u64)| GuestFacts {
        id: n.to_string(),
        group: group(n).to_owned(),
        ram_bytes: WHOLE << 20,
        guaranteed_bytes: way.kept[kind(n)] << 20,
        actual_bytes: way.kept[kind(n)] << 20,
        saved_bytes: saved.cast_signed(),
        folded_bytes: *saved,
        driver: DriverState::Works,
        ..GuestFacts::default()
    };
    let mut facts = Facts { guests: saved.iter().enumerate().map(guest).collect(), ..Facts::default() };
    for (n, bytes) in saved.iter().enumerate() {
        let of = facts.groups.entry(group(n).to_owned()).or_default();
        of.saved_bytes += bytes.cast_signed();
    }
    let wishes = policy::named(way.policy)?.sizes(&facts, saved.iter().sum());
    Some(wishes.into_iter().map(|wish| wish.size_bytes).collect())
}

/// A file of words of two to nine letters, no two of whose pages are equal.
fn text(rig: &Rig) -> anyhow::Result<PathBuf> {
    let path = rig.dir().join("text");
    if path.exists() {
        return Ok(path);
    }
    let page = |n: u32| {
        let mut page = bench::filled(u64::from(n % 512) + 1);
        // The first word is different on each page.
        page.0[..8].copy_from_slice(format!("{n:07} ").as_bytes());
        for byte in &mut page.0[8..] {
            *byte = if *byte < 48 { b' ' } else { b'a' + *byte % 4 };
        }
        page.0[PAGE_BYTES - 1] = b'\n';
        page
    };
    bench::write_pages(&path, (0..TEXT_MIB << 8).map(page))?;
    Ok(path)
}

/// The recipe of `kim-fig2`.
pub fn two_groups(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let way = Way::of(&planned.arm)?;
    let time = match planned.length {
        _ if way.systems_differ => TIME_OF_TWO,
        Length::Full => Duration::from_secs(90),
        Length::Short => Duration::from_secs(45),
    };
    both(rig, way, time)
}

/// The recipe of `kim-rate`.
pub fn by_yield(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let time = Duration::from_secs(if planned.length == Length::Full { 400 } else { 45 });
    if planned.arm.starts_with("xz-") {
        return computing(rig, planned, time);
    }
    both(rig, Way { systems_differ: true, ..Way::of(&planned.arm)? }, time)
}

/// Guests that compress. Their group is scanned at a rate that follows its yield, or not at all.
fn computing(rig: &mut Rig, planned: &Planned, time: Duration) -> anyhow::Result<Measured> {
    let name = if planned.arm == "xz-off" { "off" } else { "fold" };
    let mut merger = rig.merger(name, &[following(GROUP)])?;
    let vms = rig.vms(&alike(COMPUTING, first_of(planned, COMPUTING), D256), &mut merger)?;
    vms.load(&vms.guests, &workload::compress_script())?;
    let (before, begin) = (vms.operations(&vms.guests)?, Instant::now());
    merger.on()?;
    pause(time)?;
    let done = vms.operations(&vms.guests)?.iter().sum::<u64>().saturating_sub(before.iter().sum()) as f64;
    let mut measured = Measured::default();
    measured.put_at("rate", "xz", done / begin.elapsed().as_secs_f64());
    measured.put(OPERATIONS, done);
    measured.put(MERGED, merger.taken(&vms.pids())?.merged_pages as f64);
    Ok(measured)
}

/// Runs both kinds of guests under an arm's policy for a time.
fn both(rig: &mut Rig, way: Way, time: Duration) -> anyhow::Result<Measured> {
    let mut two = Two::start(rig, way)?;
    let (counting, reading) = two.vms.guests.split_at(OF_A_KIND);
    two.vms.load(counting, &workload::word_count_script(TEXT_MIB))?;
    two.vms.load(reading, &workload::reads_script())?;
    let before = two.vms.operations(&two.vms.guests)?;
    two.begin = Instant::now();
    two.merger.on()?;
    let mut first_minute = None;
    while two.begin.elapsed() < time {
        pause(EVERY)?;
        let saved = two.give_back()?;
        if two.begin.elapsed() < MINUTE {
            first_minute = Some(saved);
        }
    }
    let seconds = two.begin.elapsed().as_secs_f64();
    let after = two.vms.operations(&two.vms.guests)?;
    let mut measured = Measured::default();
    let done: Vec<f64> = after.iter().zip(&before).map(|(now, then)| now.saturating_sub(*then) as f64).collect();
    for (k, name) in KINDS.into_iter().enumerate() {
        let operations: f64 = done[k * OF_A_KIND..(k + 1) * OF_A_KIND].iter().sum();
        measured.put_at("rate", name, operations / seconds);
        let last = |line: &Timeline| line.points.last().map_or(0.0, |(_, value)| *value);
        measured.put_at("saved_mb", name, last(&two.timelines[k]));
        measured.put_at("size_mb", name, last(&two.timelines[2 + k]));
    }
    let [mr, fio] = first_minute.context("no look in the first minute")?;
    measured.put("mr_share", mr / (mr + fio).max(1.0));
    measured.put(OPERATIONS, done.iter().sum());
    measured.put(MERGED, two.merger.taken(&two.vms.pids())?.merged_pages as f64);
    measured.timelines.extend(two.timelines);
    Ok(measured)
}

/// The recipe of `kim-fig5`: two guests of one group, at each of several scan rates.
pub fn by_rate(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut measured = Measured::default();
    let mut points = Vec::new();
    for rate in RATES {
        let mut merger = rig.merger("fold", &[Group { scan_rate: Some(rate), ..Group::of(GROUP) }])?;
        let vms = rig.vms(&alike(OF_A_KIND, first_of(planned, OF_A_KIND), D256), &mut merger)?;
        let (_, mut timeline, of_rate) = merge(&merger, &vms)?;
        let saved = Saved::of(&merger, &vms.pids())?.all();
        let half = reached(&timeline.points, mb(saved) / 2.0).context("merging settled before it was looked at")?;
        measured.put_at("half_s", rate, half);
        measured.put_at("saved_mb", rate, mb(saved));
        measured.put_at("half_by_rate", rate, half * f64::from(rate));
        points.push(half * f64::from(rate));
        timeline.name = format!("saved at {rate} pages/s");
        measured.timelines.push(timeline);
        measured.samples.extend(of_rate.samples.into_iter().filter(|_| rate == RATES[0]));
    }
    let spread = points.iter().copied().fold(0.0, f64::max) / points.iter().copied().fold(f64::MAX, f64::min);
    measured.put("spread", spread);
    measured.put("mean_half_pages", stats::mean(&points));
    Ok(measured)
}

/// The time at which a line through these points first reaches a value, interpolated.
fn reached(points: &[(f64, f64)], wanted: f64) -> Option<f64> {
    let between = points.windows(2).find(|two| two[0].1 < wanted && two[1].1 >= wanted)?;
    let ((from, low), (to, high)) = (between[0], between[1]);
    Some(from + (to - from) * (wanted - low) / (high - low))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_of_a_value_lies_between_two_looks() {
        let points = [(0.0, 0.0), (1.0, 10.0), (2.0, 10.0), (3.0, 50.0)];
        assert_eq!(reached(&points, 5.0), Some(0.5));
        assert_eq!(reached(&points, 10.0), Some(1.0));
        assert_eq!(reached(&points, 30.0), Some(2.5));
        assert_eq!(reached(&points, 51.0), None);
    }

    #[test]
    fn savings_go_where_the_policy_says() {
        let saved = [64 << 20, 0, 16 << 20, 0];
        let mib = |arm: &str| -> Vec<u64> {
            sizes(&Way::of(arm).unwrap(), &saved).unwrap().into_iter().map(|bytes| bytes >> 20).collect()
        };
        assert_eq!(mib("fio-low-fold-equal"), [340, 340, 340, 340]);
        assert_eq!(mib("fio-low-fold-se"), [384, 320, 336, 320]);
        assert_eq!(mib("fio-low-1-9"), [352, 352, 328, 328]);
        assert_eq!(mib("mr-low-9-1"), [320, 320, 392, 392]);
        assert!(Way::of("fio-low-fold").is_err() && Way::of("1-9").is_err());
    }

    #[test]
    fn rates_of_two_groups_are_the_whole() {
        assert!(Way::of("mr-low-adaptive").unwrap().groups().iter().all(|group| group.adaptive_percent.is_some()));
        for arm in ["fio-low-1-9", "mr-low-9-1", "mr-low-fold-se"] {
            let rates: u32 = Way::of(arm).unwrap().groups().iter().filter_map(|group| group.scan_rate).sum();
            assert_eq!(rates, RATE, "{arm}");
        }
        let two = Way::of("two-mr-low-9-1").unwrap();
        assert_eq!(two.rates, Some([9000, 1000].map(Some)));
        assert_eq!([0, 1].map(|kind| two.kernel_of(kind)), [None, Some(OTHER_SUITE)]);
        assert_eq!(Way::of("fio-low-1-9").unwrap().kernel_of(1), None);
    }

    #[test]
    fn guests_of_two_systems_are_scanned_six_times() {
        for arm in ["two-fio-low-fold-se", "two-mr-low-fold-equal"] {
            let way = Way::of(arm).unwrap();
            let pages: u64 = way.kept.iter().map(|mib| mib * OF_A_KIND as u64 * 256).sum();
            assert!(u64::from(way.rate) * TIME_OF_TWO.as_secs() >= 6 * pages, "{arm}: {pages}");
        }
    }
}
