//! Plans: what each policy would save and need, and the moves that lead to one of them.
//!
//! A policy places all guests anew, no matter where they are. The plan then gives the guests that lie together the host
//! on which most of them are already. Moves are made in an order in which each finds room:
//!
//! ```text
//!   hosts by what they will save --> guests that go there --> room? --no--> again when others have left
//!                                                              |
//!                                                              yes: saving = contents found there - contents left behind
//! ```

use crate::fleet::{Fleet, Guest, Load, Rules};
use crate::policy::{Policy, has_room, in_parallel};
use crate::theta::{Estimate, Sketch};
use page::PAGE_BYTES;
use serde::Serialize;
use std::collections::BTreeMap;

/// A plan, as `--json` prints it.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// Number of hosts.
    pub hosts: usize,
    /// Number of guests.
    pub guests: usize,
    /// Age of the oldest sketch, in seconds.
    pub age_s: u64,
    /// The present placement.
    pub now: Outcome,
    /// The placement by each policy.
    pub policies: Vec<Named>,
    /// The policy that the moves follow.
    pub policy: Policy,
    /// The moves, in order.
    pub moves: Vec<Move>,
    /// Number of further moves that the plan needs and does not list.
    pub further_moves: usize,
}

/// The sums of a placement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// Hosts with guests.
    pub hosts_needed: usize,
    /// Hosts whose guests need more memory than the host has for them.
    pub hosts_overfull: usize,
    /// Guests for which no host has room.
    pub without_room: usize,
    /// Savings of folding, zero pages included, in bytes.
    pub saved_bytes: u64,
    /// Savings of folding without zero pages, in bytes.
    pub saved_without_zero_bytes: u64,
    /// Error bar of both savings, in bytes: two standard deviations.
    pub error_bytes: u64,
}

/// The outcome of a policy.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Named {
    /// The policy.
    pub name: Policy,
    /// Its outcome.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// One guest's move.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Move {
    /// The guest.
    pub guest: String,
    /// Its group.
    pub group: String,
    /// The host where the guest is.
    pub from: String,
    /// The host where the guest goes.
    pub to: String,
    /// Savings that the move adds, in bytes; negative if it loses more than it adds.
    pub saved_bytes: i64,
    /// Error bar of `saved_bytes`, in bytes: two standard deviations.
    pub error_bytes: u64,
    /// Memory to be copied, in bytes: all pages of the guest that folding reaches, without zero pages.
    pub cost_bytes: u64,
    /// The part of `cost_bytes` whose content guests of the other host hold already.
    pub already_there_bytes: u64,
    /// Age of the oldest sketch of guests on both hosts, in seconds.
    pub age_s: u64,
    /// Time after which the move is to be planned anew, in seconds since 1970.
    pub expires_s: u64,
}

/// Bounds of a plan.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The policy that the moves follow.
    pub policy: Policy,
    /// Rules for all policies.
    pub rules: Rules,
    /// Most moves that are listed.
    pub most_moves: usize,
    /// Greatest age of a sketch by which a move may be made, in seconds.
    pub valid_s: u64,
    /// The present, in seconds since 1970.
    pub now_s: u64,
}

/// Places the guests by every policy, and lists the moves that lead to the placement of one of them.
pub fn plan(fleet: &Fleet, settings: &Settings) -> Plan {
    let rules = &settings.rules;
    let present: Vec<_> = fleet.guests.iter().map(|guest| Some(guest.host)).collect();
    let (mut policies, mut target) = (Vec::new(), Vec::new());
    for name in Policy::ALL {
        let placed = name.place(fleet, rules);
        policies.push(Named { name, outcome: outcome(fleet, &placed, rules) });
        if name == settings.policy {
            target = settle(fleet, &placed, rules);
        }
    }
    let (moves, further_moves) = Mover::new(fleet, settings).moves(&target);
    Plan {
        hosts: fleet.hosts.len(),
        guests: fleet.guests.len(),
        age_s: fleet.guests.iter().map(|guest| settings.now_s.saturating_sub(guest.epoch_s)).max().unwrap_or(0),
        now: outcome(fleet, &present, rules),
        policies,
        policy: settings.policy,
        moves,
        further_moves,
    }
}

/// The guests of each host.
fn by_host(fleet: &Fleet, placed: &[Option<usize>]) -> Vec<Vec<usize>> {
    let mut by_host = vec![Vec::new(); fleet.hosts.len()];
    placed.iter().enumerate().for_each(|(guest, host)| host.iter().for_each(|host| by_host[*host].push(guest)));
    by_host
}

/// The sums of a placement, which has the host of each guest, or `None` for a guest without room.
pub fn outcome(fleet: &Fleet, placed: &[Option<usize>], rules: &Rules) -> Outcome {
    let by_host: Vec<_> =
        by_host(fleet, placed).into_iter().enumerate().filter(|(_, guests)| !guests.is_empty()).collect();
    let loads = in_parallel(&by_host, |(host, guests)| {
        let load = Load::of(guests.iter().map(|guest| &fleet.guests[*guest]));
        (load.saved(true), load.saved(false), has_room(fleet, *host, &load, rules))
    });
    let sum = |of: fn(&(Estimate, Estimate, bool)) -> Estimate| {
        loads.iter().map(of).fold(Estimate::default(), Estimate::plus)
    };
    let (all, without_zero) = (sum(|load| load.0), sum(|load| load.1));
    Outcome {
        hosts_needed: loads.len(),
        hosts_overfull: loads.iter().filter(|load| !load.2).count(),
        without_room: placed.iter().filter(|host| host.is_none()).count(),
        saved_bytes: bytes(all.pages) as u64,
        saved_without_zero_bytes: bytes(without_zero.pages) as u64,
        error_bytes: bytes(all.error) as u64,
    }
}

/// Gives guests that were placed together the host on which most of them are, if it has room for them. Returns `placed`
/// unchanged if some guests would then find no host.
fn settle(fleet: &Fleet, placed: &[Option<usize>], rules: &Rules) -> Vec<Option<usize>> {
    let together = by_host(fleet, placed);
    let mut at_home: Vec<(usize, usize, usize)> = Vec::new();
    for (bin, guests) in together.iter().enumerate() {
        let mut on: BTreeMap<usize, usize> = BTreeMap::new();
        guests.iter().for_each(|guest| *on.entry(fleet.guests[*guest].host).or_default() += 1);
        at_home.extend(on.into_iter().map(|(host, guests)| (guests, bin, host)));
    }
    at_home.sort_unstable_by_key(|(guests, bin, host)| (std::cmp::Reverse(*guests), *bin, *host));
    let needs = in_parallel(&together, |guests| Load::of(guests.iter().map(|g| &fleet.guests[*g])).needs(rules));
    let fits = |bin: usize, host: usize| needs[bin] <= fleet.hosts[host].room_pages as f64;
    let (mut home, mut taken) = (vec![None; together.len()], vec![false; together.len()]);
    for (_, bin, host) in at_home {
        if home[bin].is_none() && !taken[host] && fits(bin, host) {
            (home[bin], taken[host]) = (Some(host), true);
        }
    }
    // The remaining sets of guests, the one that needs most memory first, go to the smallest free host with room.
    let mut rest: Vec<_> =
        (0..together.len()).filter(|bin| home[*bin].is_none() && !together[*bin].is_empty()).collect();
    rest.sort_by(|a, b| needs[*b].total_cmp(&needs[*a]));
    let mut free: Vec<_> = (0..together.len()).filter(|host| !taken[*host]).collect();
    free.sort_by_key(|host| fleet.hosts[*host].room_pages);
    for bin in rest {
        let Some(at) = free.iter().position(|host| fits(bin, *host)) else { return placed.to_vec() };
        home[bin] = Some(free.remove(at));
    }
    placed.iter().map(|bin| home[(*bin)?]).collect()
}

/// The fleet while moves are made, one after the other.
struct Mover<'a> {
    fleet: &'a Fleet,
    settings: &'a Settings,
    /// The guests that are on each host at the moment.
    on: Vec<Vec<usize>>,
    at: Vec<usize>,
}

impl<'a> Mover<'a> {
    fn new(fleet: &'a Fleet, settings: &'a Settings) -> Self {
        let at: Vec<_> = fleet.guests.iter().map(|guest| guest.host).collect();
        let present: Vec<_> = at.iter().map(|host| Some(*host)).collect();
        Self { fleet, settings, on: by_host(fleet, &present), at }
    }

    /// The moves from the present placement to `target`, and the number of moves that are not listed.
    fn moves(mut self, target: &[Option<usize>]) -> (Vec<Move>, usize) {
        let mut hosts: Vec<_> = by_host(self.fleet, target).into_iter().enumerate().collect();
        let worth = in_parallel(&hosts, |(_, guests)| {
            Load::of(guests.iter().map(|guest| &self.fleet.guests[*guest])).saved(false).pages
        });
        hosts.sort_by(|a, b| worth[b.0].total_cmp(&worth[a.0]).then(a.0.cmp(&b.0)));
        let mut left: Vec<(usize, usize)> = hosts
            .iter()
            .flat_map(|(host, guests)| guests.iter().map(|guest| (*guest, *host)))
            .filter(|(guest, host)| self.at[*guest] != *host)
            .collect();
        let (mut moves, mut waiting) = (Vec::new(), usize::MAX);
        while left.len() < waiting && moves.len() < self.settings.most_moves {
            waiting = left.len();
            left.retain(|(guest, to)| {
                let made = moves.len() < self.settings.most_moves && self.has_room(*guest, *to);
                if made {
                    moves.push(self.make(*guest, *to));
                }
                !made
            });
        }
        (moves, left.len())
    }

    fn has_room(&self, guest: usize, to: usize) -> bool {
        let guests = self.on[to].iter().chain([&guest]).map(|guest| &self.fleet.guests[*guest]);
        has_room(self.fleet, to, &Load::of(guests), &self.settings.rules)
    }

    fn make(&mut self, guest: usize, to: usize) -> Move {
        let from = std::mem::replace(&mut self.at[guest], to);
        self.on[from].retain(|other| *other != guest);
        let own = &self.fleet.guests[guest];
        let (found, left) = (self.in_common(own, to), self.in_common(own, from));
        self.on[to].push(guest);
        let saved = found.minus(left);
        let evidence_s = self.epoch_s(from).min(self.epoch_s(to)).min(own.epoch_s);
        Move {
            guest: own.id.clone(),
            group: own.group.clone(),
            from: self.fleet.hosts[from].name.clone(),
            to: self.fleet.hosts[to].name.clone(),
            saved_bytes: bytes(saved.pages),
            error_bytes: bytes(saved.error).unsigned_abs(),
            cost_bytes: own.held_pages * PAGE_BYTES as u64,
            already_there_bytes: bytes(found.pages).unsigned_abs(),
            age_s: self.settings.now_s.saturating_sub(evidence_s),
            expires_s: evidence_s + self.settings.valid_s,
        }
    }

    /// Number of the guest's contents that other guests on `host` hold.
    fn in_common(&self, guest: &Guest, host: usize) -> Estimate {
        let others =
            self.on[host].iter().map(|other| &self.fleet.guests[*other]).filter(|other| other.key == guest.key);
        let common = guest.sketch.common(&Sketch::union_of(others.map(|other| &other.sketch)));
        Estimate { pages: common.pages.min(guest.distinct_pages as f64), ..common }
    }

    /// Time of the oldest sketch of a guest on `host`, in seconds since 1970.
    fn epoch_s(&self, host: usize) -> u64 {
        self.on[host].iter().map(|guest| self.fleet.guests[*guest].epoch_s).min().unwrap_or(u64::MAX)
    }
}

/// The bytes of `pages` pages.
fn bytes(pages: f64) -> i64 {
    (pages * PAGE_BYTES as f64).round() as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::tests::{FOLDED, fleet, guest, host};

    const SETTINGS: Settings =
        Settings { policy: Policy::Likeness, rules: FOLDED, most_moves: 100, valid_s: 3600, now_s: 1060 };

    /// Two hosts, each with a guest of two systems. Host a cannot take the second debian before an alpine has left.
    fn mixed() -> Fleet {
        fleet([
            host("a", 1600),
            host("b", 1600),
            guest("a", "debian-1", "acme", 0..1000),
            guest("a", "alpine-1", "acme", 5000..5500),
            guest("b", "debian-2", "acme", 100..1100),
            guest("b", "alpine-2", "acme", 5000..5500),
        ])
    }

    #[test]
    fn moves_bring_together_those_that_are_alike() {
        let found = plan(&mixed(), &SETTINGS);
        assert_eq!(found.now.saved_bytes, 0);
        assert_eq!(found.policies[2].outcome.saved_bytes, 1400 << 12);
        let moves: Vec<_> = found.moves.iter().map(|step| (step.guest.as_str(), step.saved_bytes)).collect();
        assert_eq!((moves, found.further_moves), (vec![("alpine-1", 500 << 12), ("debian-2", 900 << 12)], 0));
        let last = &found.moves[1];
        assert_eq!((last.from.as_str(), last.to.as_str()), ("b", "a"));
        assert_eq!((last.cost_bytes, last.already_there_bytes), (1000 << 12, 900 << 12));
        assert_eq!((last.age_s, last.expires_s, last.error_bytes), (60, 4600, 0));
    }

    #[test]
    fn guests_that_lie_together_stay() {
        let fleet = fleet([
            host("a", 1100),
            host("b", 1100),
            guest("b", "1", "acme", 0..1000),
            guest("b", "2", "acme", 0..1000),
            guest("a", "3", "beta", 0..1000),
        ]);
        assert_eq!(plan(&fleet, &SETTINGS).moves, []);
    }

    #[test]
    fn move_without_room_is_not_listed() {
        // Neither guest can go before the other has left, and there is no third host.
        let full = fleet([
            host("a", 1520),
            host("b", 1520),
            guest("a", "1", "acme", 0..1000),
            guest("a", "2", "beta", 0..500),
            guest("b", "3", "beta", 0..1000),
            guest("b", "4", "acme", 0..500),
        ]);
        let found = plan(&full, &SETTINGS);
        assert_eq!((found.moves, found.further_moves), (Vec::new(), 2));
    }

    #[test]
    fn list_of_moves_is_bounded() {
        let found = plan(&mixed(), &Settings { most_moves: 1, ..SETTINGS });
        assert_eq!((found.moves.len(), found.further_moves), (1, 1));
    }
}
