//! `li-place`: eight guests of two systems on two hosts, by three rules of placement.
//!
//! ```text
//!   room-4, room-6   the contents of all guests -> every order in which the systems can come -> pages that the hosts hold by each rule
//!   run-RULE         one order, placed by the rule: a group of Pagefold's for each host -> page frames once folding has settled
//! ```
//!
//! The rules are those of `pagefold-place`. `pack` fills one host after the other. `stripe` deals guests out. `likeness` puts those
//! together that are alike, and then packs them.

use super::systems::{clusters, contents, of};
use super::{rep_of, timeline};
use crate::plan::Planned;
use crate::record::{MERGED, Measured};
use crate::rig::{Group, Rig, System, mb};
use anyhow::{Context, ensure};
use page::Fingerprint;
use std::collections::{HashMap, HashSet};
use std::time::Instant;

/// Number of guests of each system.
const EACH: usize = 4;
/// Number of all guests.
const GUESTS: usize = 2 * EACH;
/// Order in which guests of the two systems arrive in arms `run-`.
const ARRIVAL: [usize; GUESTS] = [0, 0, 1, 1, 0, 0, 1, 1];
/// Number of guests for which a host has room in arms `run-`.
const ROOM: usize = 6;
/// Names of the hosts' groups.
const HOSTS: [&str; 2] = ["one", "two"];
/// The rules.
const RULES: [Rule; 3] = [Rule::Pack, Rule::Stripe, Rule::Likeness];

/// A rule of placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    Pack,
    Stripe,
    Likeness,
}

impl Rule {
    const fn name(self) -> &'static str {
        match self {
            Self::Pack => "pack",
            Self::Stripe => "stripe",
            Self::Likeness => "likeness",
        }
    }

    /// The host (0 or 1) of each guest. Guests come in this `order` to two hosts, each with room for `room` guests.
    /// `kinds` has the cluster to which each guest belongs.
    fn place(self, order: &[usize], room: usize, kinds: &[usize]) -> Vec<usize> {
        let mut order = order.to_vec();
        if self == Self::Likeness {
            order.sort_by_key(|guest| kinds[*guest]);
        }
        let mut placed = vec![0; order.len()];
        for (n, guest) in order.into_iter().enumerate() {
            placed[guest] = match self {
                Self::Stripe => n % HOSTS.len(),
                Self::Pack | Self::Likeness => n / room,
            };
        }
        placed
    }
}

/// For each set of guests (a bit for each guest), the number of contents that exactly these guests hold.
struct Held(HashMap<u32, u64>);

impl Held {
    fn of(contents: &[HashSet<Fingerprint>]) -> Self {
        let mut holders: HashMap<Fingerprint, u32> = HashMap::new();
        for (n, guest) in contents.iter().enumerate() {
            guest.iter().for_each(|content| *holders.entry(*content).or_default() |= 1 << n);
        }
        let mut held = HashMap::new();
        holders.into_values().for_each(|guests| *held.entry(guests).or_default() += 1);
        Self(held)
    }

    /// Pages that the two hosts hold together, if a host holds each content of its guests once.
    fn total(&self, placed: &[usize]) -> u64 {
        let guests_of =
            |host: usize| (0..placed.len()).filter(|n| placed[*n] == host).fold(0_u32, |all, n| all | 1 << n);
        let on = |host: usize| {
            let guests = guests_of(host);
            self.0.iter().filter(|(holders, _)| **holders & guests != 0).map(|(_, pages)| pages).sum::<u64>()
        };
        on(0) + on(1)
    }
}

/// All orders in which guests of two kinds can come. Those of the same kind keep their order.
fn orders(kinds: &[usize]) -> Vec<Vec<usize>> {
    let of_kind = |kind: usize| (0..kinds.len()).filter(move |n| (kinds[*n] > 0) == (kind > 0));
    let first = of_kind(0).count() as u32;
    let is_order = |mask: &u32| mask.count_zeros() - (u32::BITS - kinds.len() as u32) == first;
    let order = |mask: u32| {
        let mut next = [of_kind(0).collect::<Vec<_>>().into_iter(), of_kind(1).collect::<Vec<_>>().into_iter()];
        (0..kinds.len()).filter_map(|n| next[(mask >> n & 1) as usize].next()).collect()
    };
    (0..1 << kinds.len()).filter(is_order).map(order).collect()
}

/// The recipe of `li-place`.
pub fn by_rule(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    match planned.arm.strip_prefix("run-") {
        Some(name) => {
            let rule = RULES.into_iter().find(|rule| rule.name() == name);
            run(rig, planned, rule.context("there is no such rule")?)
        }
        None => computed(rig, planned),
    }
}

/// Computes how many pages the hosts hold by each rule, from the contents of guests that nobody merges.
fn computed(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let room: usize =
        planned.arm.rsplit('-').next().and_then(|room| room.parse().ok()).context("no room in the arm")?;
    let mut nobody = rig.merger("off", &[])?;
    let mut vms = rig.vms(&of(System::DEBIAN, EACH, rep_of(planned), super::GROUP), &mut nobody)?;
    vms.add(rig, &of(System::TINY, EACH, rep_of(planned), super::GROUP), &mut nobody)?;
    let contents = contents(&vms)?;
    let kinds = clusters(&contents);
    ensure!(kinds.iter().all(|kind| *kind < 2), "fingerprints make clusters {kinds:?}, and two systems were started");
    let (held, orders) = (Held::of(&contents), orders(&kinds));
    let mean = |rule: Rule| {
        let total = |order: &Vec<usize>| held.total(&rule.place(order, room, &kinds)) as f64;
        orders.iter().map(total).sum::<f64>() / orders.len() as f64
    };
    let [pack, stripe, likeness] = RULES.map(mean);
    let mut measured = Measured::default();
    for (rule, pages) in RULES.iter().zip([pack, stripe, likeness]) {
        measured.put_at("total_mb", rule.name(), mb(pages));
    }
    measured.put("likeness_over_pack", likeness / pack);
    measured.put("pack_over_stripe", pack / stripe);
    measured.put("orders", orders.len() as f64);
    Ok(measured)
}

/// Runs the guests as a rule places them, each host as a group of its own, and counts page frames.
fn run(rig: &mut Rig, planned: &Planned, rule: Rule) -> anyhow::Result<Measured> {
    let order: Vec<usize> = (0..GUESTS).collect();
    let placed = rule.place(&order, ROOM, &ARRIVAL);
    let mut merger = rig.merger("fold", &HOSTS.map(Group::of))?;
    let (mut vms, mut first) = (None, [rep_of(planned); 2]);
    for (kind, system) in [System::DEBIAN, System::TINY].into_iter().enumerate() {
        for (host, name) in HOSTS.into_iter().enumerate() {
            let guests = (0..GUESTS).filter(|n| ARRIVAL[*n] == kind && placed[*n] == host).count();
            if guests == 0 {
                continue;
            }
            let wanted = of(system, guests, first[kind], name);
            first[kind] += guests;
            match &mut vms {
                None => vms = Some(rig.vms(&wanted, &mut merger)?),
                Some(vms) => vms.add(rig, &wanted, &mut merger)?,
            }
        }
    }
    let (vms, mut measured, mut timeline) = (vms.context("no guest")?, Measured::default(), timeline());
    merger.on()?;
    merger.settle(Instant::now(), &mut timeline)?;
    let taken = merger.taken(&vms.pids())?;
    measured.put(MERGED, taken.merged_pages as f64);
    measured.put("taken_mb", mb(taken.frames as f64));
    measured.put_at("taken_by_rule_mb", rule.name(), mb(taken.frames as f64));
    measured.timelines.push(timeline);
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    const D: usize = 0;
    const T: usize = 1;

    #[test]
    fn rules_fill_deal_out_and_put_alike_together() {
        let order: Vec<usize> = (0..8).collect();
        let kinds = [D, T, D, T, D, D, T, T];
        let place = |rule: Rule, room| rule.place(&order, room, &kinds);
        assert_eq!(place(Rule::Pack, 6), [0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!(place(Rule::Stripe, 6), [0, 1, 0, 1, 0, 1, 0, 1]);
        assert_eq!(place(Rule::Likeness, 4), [0, 1, 0, 1, 0, 0, 1, 1]);
        assert_eq!(place(Rule::Likeness, 6), [0, 0, 0, 0, 0, 0, 1, 1]);
    }

    #[test]
    fn hosts_hold_each_content_once_whoever_of_their_guests_has_it() {
        let set = |range: std::ops::Range<u8>| range.map(|n| Fingerprint::of(&[n; page::PAGE_BYTES])).collect();
        let held = Held::of(&[set(0..10), set(5..15), set(0..20)]);
        assert_eq!([held.total(&[0, 0, 0]), held.total(&[0, 0, 1]), held.total(&[1, 0, 1])], [20, 15 + 20, 20 + 10]);
    }

    #[test]
    fn each_order_of_two_kinds_comes_once() {
        let all = orders(&[D, D, T, T]);
        let distinct: HashSet<_> = all.iter().cloned().collect();
        assert_eq!((all.len(), distinct.len()), (6, 6));
        assert!(distinct.contains(&vec![0, 2, 1, 3]) && all.iter().all(|order| order.len() == 4));
        assert_eq!(orders(&ARRIVAL).len(), 70);
    }
}
