//! A day of a simulated fleet: guests arrive and leave, and none is moved.
//!
//! | policy | puts a guest that arrives on |
//! |---|---|
//! | `pack` | the fullest host that has room for it as if it shared nothing |
//! | `stripe` | the emptiest of the hosts in use, likewise |
//! | `likeness` | the host where it needs least more memory, of the 16 with most guests of its key and some room; without room there, as `pack` does |
//!
//! Where no host in use has room, it gets another one. Guests are fewest at 3 in the night and most at 15, [`SWING`]
//! below and above their mean. Besides, a part of them is replaced in each hour. Departures are drawn by lot.

use crate::fleet::{Fleet, Guest, Load, Rules};
use crate::plan::outcome;
use crate::policy::Policy;
use crate::simulate::{Kinds, Random, Size, fleet};
use page::PAGE_BYTES;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// Number of hours in a simulated day.
const HOURS: usize = 24;
/// The hour at which there are most guests.
const PEAK_HOUR: f64 = 15.0;
/// Greatest deviation from the mean number of guests in a day, as a part of the mean: 1/4.
const SWING: f64 = 0.25;
/// Most hosts that `likeness` compares for one guest: those with most guests of its key.
const MOST_LOOKED_AT: usize = 16;

/// A day under one policy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Day {
    /// The policy.
    pub name: Policy,
    /// Guests that arrived, those of the first hour among them.
    pub arrived: usize,
    /// Guests for which no host had room.
    pub refused: usize,
    /// Most guests at the end of an hour.
    pub most_guests: usize,
    /// Most hosts in use at the end of an hour.
    pub most_hosts: usize,
    /// Hosts in use at the ends of hours, as their mean.
    pub mean_hosts: f64,
    /// Hosts that the guests of the fullest hour would need if the same policy placed all of them anew.
    pub hosts_anew: usize,
    /// Savings without zero pages at the ends of hours, as their mean.
    pub saved_without_zero_bytes: u64,
    /// Time for all placements, in seconds.
    pub seconds: f64,
}

/// Guests that arrive and leave in one hour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hour {
    leave: usize,
    arrive: usize,
}

/// The hours of a day with `mean` guests on average, of which the part `replaced` is replaced in the day. The first hour
/// begins without guests.
fn hours(mean: usize, replaced: f64) -> Vec<Hour> {
    let wanted = |hour: usize| {
        let angle = std::f64::consts::TAU * (hour as f64 - PEAK_HOUR) / HOURS as f64;
        (mean as f64 * SWING.mul_add(angle.cos(), 1.0)) as usize
    };
    let others = (mean as f64 * replaced / HOURS as f64) as usize;
    let mut before = 0_usize;
    let hour = |n| {
        let now = wanted(n);
        let hour = match n {
            0 => Hour { leave: 0, arrive: now },
            _ => Hour { leave: others + before.saturating_sub(now), arrive: others + now.saturating_sub(before) },
        };
        before = now;
        hour
    };
    (0..HOURS).map(hour).collect()
}

/// Hosts at some time of the day.
struct Hosts<'a> {
    fleet: &'a Fleet,
    rules: &'a Rules,
    loads: Vec<(Vec<usize>, Load)>,
    /// Hosts in use, in order of their free pages.
    free: BTreeSet<(i64, usize)>,
    /// By key: the hosts with guests of this key, and how many each has.
    of_key: BTreeMap<usize, BTreeMap<usize, usize>>,
    /// Hosts that are not in use.
    unused: BTreeSet<usize>,
}

impl<'a> Hosts<'a> {
    fn new(fleet: &'a Fleet, rules: &'a Rules) -> Self {
        let loads = fleet.hosts.iter().map(|_| (Vec::new(), Load::default())).collect();
        let unused = (0..fleet.hosts.len()).collect();
        Self { fleet, rules, loads, free: BTreeSet::new(), of_key: BTreeMap::new(), unused }
    }

    fn free_pages(&self, host: usize) -> i64 {
        self.fleet.hosts[host].room_pages as i64 - self.loads[host].1.needs(self.rules).ceil() as i64
    }

    /// The host on which the policy puts a guest that arrives; `None` if none has room.
    fn choose(&self, policy: Policy, guest: &Guest) -> Option<usize> {
        let alone = Load::of([guest]).needs(self.rules).ceil() as i64;
        let with_room = || self.free.range((alone, 0)..).map(|(_, host)| *host);
        let takes = |host: &usize| self.pages_more(*host, guest).is_some();
        let in_use = match policy {
            Policy::Pack => with_room().find(takes),
            Policy::Stripe => with_room().rev().find(takes),
            Policy::Likeness => self.most_alike(guest, alone).or_else(|| with_room().find(takes)),
        };
        let has_room = |host: &&usize| self.fleet.hosts[**host].room_pages as i64 >= alone;
        in_use.or_else(|| self.unused.iter().find(has_room).copied())
    }

    /// Pages that a host needs in addition if it takes the guest; `None` if it has too little memory.
    fn pages_more(&self, host: usize, guest: &Guest) -> Option<f64> {
        let load = &self.loads[host].1;
        let with = load.needs_with(guest, self.rules);
        (with <= self.fleet.hosts[host].room_pages as f64).then(|| with - load.needs(self.rules))
    }

    fn most_alike(&self, guest: &Guest, alone: i64) -> Option<usize> {
        // Even beside guests that hold the same contents, a guest is assumed to need half of its memory.
        let some_pages = alone / 2;
        let has_some = |(host, _): &(&usize, &usize)| self.free_pages(**host) >= some_pages;
        let mut hosts: Vec<(&usize, &usize)> = self.of_key.get(&guest.key)?.iter().filter(has_some).collect();
        hosts.sort_by_key(|(_, guests)| std::cmp::Reverse(**guests));
        let hosts = hosts.into_iter().take(MOST_LOOKED_AT);
        let more = hosts.filter_map(|(host, _)| Some((self.pages_more(*host, guest)?, *host)));
        more.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, host)| host)
    }

    fn put(&mut self, guest: usize, host: usize) {
        self.change(host, |guests, load, fleet| {
            guests.push(guest);
            load.add(&fleet.guests[guest]);
        });
        *self.of_key.entry(self.fleet.guests[guest].key).or_default().entry(host).or_default() += 1;
    }

    fn take(&mut self, guest: usize, host: usize) {
        self.change(host, |guests, load, fleet| {
            guests.retain(|other| *other != guest);
            *load = Load::of(guests.iter().map(|guest| &fleet.guests[*guest]));
        });
        let of_key = self.of_key.entry(self.fleet.guests[guest].key).or_default();
        let left = of_key.get(&host).map_or(0, |count| count - 1);
        if left == 0 {
            of_key.remove(&host)
        } else {
            of_key.insert(host, left)
        };
    }

    /// Changes the guests of a host, and keeps account of its free memory.
    fn change(&mut self, host: usize, change: impl FnOnce(&mut Vec<usize>, &mut Load, &Fleet)) {
        self.free.remove(&(self.free_pages(host), host));
        let (guests, load) = &mut self.loads[host];
        change(guests, load, self.fleet);
        if self.loads[host].0.is_empty() {
            self.unused.insert(host);
        } else {
            self.unused.remove(&host);
            self.free.insert((self.free_pages(host), host));
        }
    }

    fn in_use(&self) -> usize {
        self.free.len()
    }

    fn saved_pages(&self) -> f64 {
        self.loads.iter().map(|(_, load)| load.saved(false).pages).sum()
    }
}

/// A day under each policy, with the same guests: on average as many as `size` has, of which the part `replaced` is
/// replaced in the day.
pub fn days(kinds: &Kinds, size: &Size, rules: &Rules, replaced: f64) -> Vec<Day> {
    let hours = hours(size.guests, replaced);
    let arrive: usize = hours.iter().map(|hour| hour.arrive).sum();
    // As many hosts for each arriving guest as a fleet without arrivals has for each guest. So there are enough in the
    // hours with most guests.
    let hosts = (size.hosts * arrive).div_ceil(size.guests.max(1));
    let drawn = fleet(kinds, &Size { guests: arrive, hosts, ..*size });
    Policy::ALL.map(|policy| day(&drawn, &hours, policy, rules)).into()
}

fn day(fleet: &Fleet, hours: &[Hour], name: Policy, rules: &Rules) -> Day {
    let (begin, mut random, mut hosts) = (Instant::now(), Random(2), Hosts::new(fleet, rules));
    // Guests that are there at this hour, each with its host.
    let (mut there, mut next, mut refused): (Vec<(usize, usize)>, usize, usize) = (Vec::new(), 0, 0);
    let (mut used, mut saved, mut fullest) = (Vec::new(), 0.0, Vec::new());
    for hour in hours {
        for _ in 0..hour.leave.min(there.len()) {
            let (guest, host) = there.swap_remove(random.below(there.len()));
            hosts.take(guest, host);
        }
        for guest in next..next + hour.arrive {
            match hosts.choose(name, &fleet.guests[guest]) {
                Some(host) => {
                    hosts.put(guest, host);
                    there.push((guest, host));
                }
                None => refused += 1,
            }
        }
        next += hour.arrive;
        used.push(hosts.in_use());
        saved += hosts.saved_pages();
        if there.len() > fullest.len() {
            fullest.clone_from(&there);
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    let of_hours = hours.len().max(1) as f64;
    Day {
        name,
        arrived: next,
        refused,
        most_guests: fullest.len(),
        most_hosts: used.iter().copied().max().unwrap_or(0),
        mean_hosts: used.iter().sum::<usize>() as f64 / of_hours,
        hosts_anew: anew(fleet, &fullest, name, rules),
        saved_without_zero_bytes: (saved / of_hours) as u64 * PAGE_BYTES as u64,
        seconds,
    }
}

/// Hosts that these guests need when the policy places them anew.
fn anew(fleet: &Fleet, there: &[(usize, usize)], policy: Policy, rules: &Rules) -> usize {
    let guests = there.iter().map(|(guest, _)| fleet.guests[*guest].clone()).collect();
    let fleet = Fleet { guests, hosts: fleet.hosts.clone(), keys: fleet.keys.clone() };
    outcome(&fleet, &policy.place(&fleet, rules), rules).hosts_needed
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: Size = Size { hosts: 40, guests: 800, tenants: 8, hashes: 64 };
    const QUARTER: Rules = Rules { storm: 0.25, zero_pages: true };

    #[test]
    fn guests_follow_the_hours() {
        let hours = hours(1000, 0.48);
        let sum = |n: usize, of: fn(&Hour) -> usize| hours[..=n].iter().map(of).sum::<usize>();
        let there = |n| sum(n, |hour| hour.arrive) - sum(n, |hour| hour.leave);
        assert_eq!((there(15), there(3)), (1250, 750));
        assert!(hours[1..].iter().all(|hour| hour.leave >= 20 && hour.arrive >= 20), "{hours:?}");
        let changes = hours[1..].iter().map(|hour| hour.leave.min(hour.arrive)).collect::<BTreeSet<_>>();
        assert_eq!(changes, BTreeSet::from([20]), "no more leave and arrive than are replaced");
    }

    #[test]
    fn chosen_host_has_room_and_accounts_of_hosts_agree() {
        let drawn = fleet(&Kinds::measured(), &SIZE);
        for policy in Policy::ALL {
            let (mut hosts, mut random, mut there) = (Hosts::new(&drawn, &QUARTER), Random(7), Vec::new());
            for guest in 0..drawn.guests.len() {
                if let Some(host) = hosts.choose(policy, &drawn.guests[guest]) {
                    hosts.put(guest, host);
                    there.push((guest, host));
                    // The same pages summed up in another order may differ by less than a page.
                    assert!(hosts.free_pages(host) >= -1, "{policy:?}: {}", hosts.free_pages(host));
                }
                if guest % 3 == 0 && !there.is_empty() {
                    let (guest, host) = there.swap_remove(random.below(there.len()));
                    hosts.take(guest, host);
                }
            }
            assert_eq!(hosts.loads.iter().map(|(guests, _)| guests.len()).sum::<usize>(), there.len());
            let of_keys: usize = hosts.of_key.values().flat_map(BTreeMap::values).sum();
            assert_eq!(of_keys, there.len(), "{policy:?}");
            assert!(hosts.of_key.values().flat_map(BTreeMap::values).all(|guests| *guests > 0));
            for (host, (guests, _)) in hosts.loads.iter().enumerate() {
                assert_eq!(hosts.free.contains(&(hosts.free_pages(host), host)), !guests.is_empty());
                assert_eq!(hosts.unused.contains(&host), guests.is_empty());
            }
        }
    }

    #[test]
    fn likeness_saves_most_and_needs_fewest_hosts_over_a_day() {
        let days = days(&Kinds::measured(), &SIZE, &QUARTER, 1.0);
        let [pack, stripe, likeness] = &days[..] else { panic!("{days:?}") };
        for other in [pack, stripe] {
            assert!(likeness.saved_without_zero_bytes > other.saved_without_zero_bytes, "{days:#?}");
            assert!(likeness.mean_hosts <= other.mean_hosts, "{days:#?}");
            assert_eq!((other.arrived, other.most_guests), (likeness.arrived, likeness.most_guests));
        }
        assert!(days.iter().all(|day| day.refused == 0 && day.most_hosts >= day.mean_hosts as usize), "{days:#?}");
    }
}
