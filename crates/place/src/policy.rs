//! Policies: which guest belongs on which host, as if all were placed anew.
//!
//! | policy | order of guests | host |
//! |---|---|---|
//! | `pack` | the largest first | the first with room |
//! | `stripe` | the largest first | one after the other, over as few as have room for it |
//! | `likeness` | by key, then those that are alike, then the largest first | the first with room |
//!
//! All keep to the same sums ([`Load::needs`]), so they differ in what comes to lie side by side. Guests that are alike
//! are found by leaders: a guest joins the leader whose contents are most like its own, or becomes one. A large fleet
//! is cut into parts with hosts of their own, which threads place side by side. The parts do not depend on the number
//! of threads.

use crate::fleet::{Fleet, Guest, Load, Rules};
use serde::Serialize;
use std::collections::{BTreeMap, BinaryHeap};
use std::num::NonZero;
use std::thread;

/// Most hosts that `pack` tries for each guest. When it begins to fill another host, the one it began first gets no
/// more guests.
const OPEN: usize = 4;
/// Most leaders of a key. Once there are so many, guests only join leaders.
const MOST_LEADERS: usize = 16;
/// Likeness from 0 to 1. A guest that is less like every leader becomes a leader itself.
const LIKE: f64 = 0.3;
/// Number of hashes by which likeness is estimated.
const LIKENESS_HASHES: usize = 64;
/// Most guests of a part, which one thread places.
const PART_GUESTS: usize = 8192;
/// Most hosts in the sample by which `stripe` first searches for the number of hosts that it needs.
const SAMPLE_HOSTS: usize = 128;

/// A policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// As few hosts as can be
    Pack,
    /// Evenly over as few hosts as have room for it
    Stripe,
    /// Side by side with those that hold the same
    Likeness,
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::Pack, Self::Stripe, Self::Likeness];

    /// The host of each guest; `None` where none has room.
    pub fn place(self, fleet: &Fleet, rules: &Rules) -> Vec<Option<usize>> {
        let mut order: Vec<usize> = (0..fleet.guests.len()).collect();
        let size = |guest: &usize| std::cmp::Reverse(fleet.guests[*guest].claimed_pages);
        order.sort_by_key(size);
        let mut hosts: Vec<usize> = (0..fleet.hosts.len()).collect();
        hosts.sort_by_key(|host| std::cmp::Reverse(fleet.hosts[*host].room_pages));
        match self {
            Self::Pack => pack(fleet, &order, &hosts, rules),
            Self::Stripe => stripe(fleet, &order, &hosts, rules),
            Self::Likeness => {
                let leaders = leaders(fleet, &order);
                order.sort_by_key(|guest| (fleet.guests[*guest].key, leaders[*guest]));
                pack(fleet, &order, &hosts, rules)
            }
        }
    }
}

/// Places the guests in this order, each on the first open host with room.
fn pack(fleet: &Fleet, order: &[usize], hosts: &[usize], rules: &Rules) -> Vec<Option<usize>> {
    let parts = order.len().div_ceil(PART_GUESTS).max(1);
    let work: Vec<_> = (0..parts)
        .map(|part| {
            let guests = &order[part * order.len() / parts..(part + 1) * order.len() / parts];
            (guests, hosts.iter().copied().skip(part).step_by(parts).collect::<Vec<_>>())
        })
        .collect();
    let done = in_parallel(&work, |(guests, hosts)| fill(fleet, guests, hosts, rules));
    let mut placed = vec![None; fleet.guests.len()];
    let (mut left, mut loads) = (Vec::new(), Vec::new());
    for part in done {
        part.placed.into_iter().for_each(|(guest, host)| placed[guest] = Some(host));
        left.extend(part.left);
        loads.extend(part.loads);
    }
    // One part may have had too few hosts, and another too many. Each guest left over goes to the host with most room.
    let free = |host: usize, load: &Load| fleet.hosts[host].room_pages as i64 - load.needs(rules).ceil() as i64;
    let mut emptiest: BinaryHeap<_> =
        loads.iter().enumerate().map(|(n, (host, load))| (free(*host, load), n)).collect();
    for guest in left {
        let Some((_, n)) = emptiest.peek().copied() else { break };
        let (host, load) = &mut loads[n];
        if takes(fleet, *host, load, &fleet.guests[guest], rules) {
            load.add(&fleet.guests[guest]);
            placed[guest] = Some(*host);
            emptiest.pop();
            emptiest.push((free(*host, load), n));
        }
    }
    placed
}

/// The placement of one part of the fleet's guests, and those for which no host had room.
struct Part {
    placed: Vec<(usize, usize)>,
    left: Vec<usize>,
    loads: Vec<(usize, Load)>,
}

/// Places `guests` on `hosts`: each on the first open host with room, else on the next unused host.
fn fill(fleet: &Fleet, guests: &[usize], hosts: &[usize], rules: &Rules) -> Part {
    let mut part = Part { placed: Vec::new(), left: Vec::new(), loads: Vec::new() };
    let mut unused = hosts.iter().copied().peekable();
    let mut open: Vec<(usize, Load)> = Vec::new();
    for &guest in guests {
        let own = &fleet.guests[guest];
        if let Some((host, load)) = open.iter_mut().find(|(host, load)| takes(fleet, *host, load, own, rules)) {
            load.add(own);
            part.placed.push((guest, *host));
            continue;
        }
        // `hosts` are in descending order of room. If the next one has none for the guest, no later one has.
        let alone = Load::of([own]);
        let Some(host) = unused.next_if(|host| has_room(fleet, *host, &alone, rules)) else {
            part.left.push(guest);
            continue;
        };
        if open.len() == OPEN {
            part.loads.push(open.remove(0));
        }
        open.push((host, alone));
        part.placed.push((guest, host));
    }
    part.loads.extend(open);
    part.loads.extend(unused.map(|host| (host, Load::default())));
    part
}

/// Deals guests out over as few hosts as have room for them.
fn stripe(fleet: &Fleet, order: &[usize], hosts: &[usize], rules: &Rules) -> Vec<Option<usize>> {
    let dealt = |host: usize, over: usize| order.iter().skip(host).step_by(over).map(|guest| &fleet.guests[*guest]);
    let fits = |over: usize, sample: usize| {
        let step = over.div_ceil(sample).max(1);
        let looked_at: Vec<_> = (0..over).step_by(step).collect();
        in_parallel(&looked_at, |host| has_room(fleet, hosts[*host], &Load::of(dealt(*host, over)), rules))
            .into_iter()
            .all(|fits| fits)
    };
    // First the least number of hosts at which a sample of them has room for its guests. From there on upward to a
    // number at which all have.
    let (mut too_few, mut enough) = (0, hosts.len());
    while too_few + 1 < enough {
        let middle = usize::midpoint(too_few, enough);
        if fits(middle, SAMPLE_HOSTS) { enough = middle } else { too_few = middle }
    }
    while enough > 0 && !fits(enough, hosts.len()) {
        if enough == hosts.len() {
            return pack(fleet, order, hosts, rules);
        }
        enough = (enough + enough / 128 + 1).min(hosts.len());
    }
    let mut placed = vec![None; fleet.guests.len()];
    if enough > 0 {
        order.iter().enumerate().for_each(|(n, guest)| placed[*guest] = Some(hosts[n % enough]));
    }
    placed
}

/// Whether a host has room for a load.
pub fn has_room(fleet: &Fleet, host: usize, load: &Load, rules: &Rules) -> bool {
    load.needs(rules) <= fleet.hosts[host].room_pages as f64
}

/// Whether a host with this load has room for one more guest.
fn takes(fleet: &Fleet, host: usize, load: &Load, guest: &Guest, rules: &Rules) -> bool {
    load.needs_with(guest, rules) <= fleet.hosts[host].room_pages as f64
}

/// For each guest, the index of its leader among the leaders of its key.
fn leaders(fleet: &Fleet, order: &[usize]) -> Vec<usize> {
    let mut by_key: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    order.iter().for_each(|guest| by_key.entry(fleet.guests[*guest].key).or_default().push(*guest));
    let by_key: Vec<_> = by_key.into_values().collect();
    let found = in_parallel(&by_key, |guests| {
        let mut leaders: Vec<&Guest> = Vec::new();
        let mut led = Vec::with_capacity(guests.len());
        for &guest in guests {
            let own = &fleet.guests[guest];
            let like = |leader: &&Guest| leader.sketch.likeness(&own.sketch, LIKENESS_HASHES);
            let best = leaders.iter().map(like).enumerate().max_by(|a, b| a.1.total_cmp(&b.1));
            let leader = match best {
                Some((leader, likeness)) if likeness >= LIKE || leaders.len() == MOST_LEADERS => leader,
                _ => {
                    leaders.push(own);
                    leaders.len() - 1
                }
            };
            led.push((guest, leader));
        }
        led
    });
    let mut all = vec![0; fleet.guests.len()];
    found.into_iter().flatten().for_each(|(guest, leader)| all[guest] = leader);
    all
}

/// Calls `each` for every item, on all processors. Returns the results in the order of the items.
pub fn in_parallel<T: Sync, R: Send>(items: &[T], each: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(items.len()).max(1);
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some(item) = items.get(at) else { return done };
            done.push((at, each(item)));
        }
    };
    let mut done: Vec<(usize, R)> = thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    done.sort_unstable_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::tests::{FOLDED, fleet, guest, host};

    /// Two systems. A guest shares 900 of 1000 pages with its like. A host has room for four that are alike, and not
    /// for two others.
    fn two_systems() -> Fleet {
        let of = |system: u64, n: u64, host: &str| {
            let (common, own) = (system * 10_000, 100_000 * (1 + system * 10 + n));
            guest(host, &format!("{system}-{n}"), "acme", (common..common + 900).chain(own..own + 100))
        };
        let guests = (0..4).flat_map(|n| (0..2).map(move |system| of(system, n, if n < 2 { "a" } else { "b" })));
        fleet([host("a", 1400), host("b", 1400), host("c", 1400), host("d", 1400)].into_iter().chain(guests))
    }

    fn used(placed: &[Option<usize>]) -> usize {
        placed.iter().flatten().collect::<std::collections::BTreeSet<_>>().len()
    }

    #[test]
    fn likeness_needs_fewest_hosts() {
        let fleet = two_systems();
        let placed = Policy::ALL.map(|policy| policy.place(&fleet, &FOLDED));
        assert!(placed.iter().flatten().filter(|host| host.is_some()).count() >= 16, "{placed:?}");
        assert_eq!(used(&placed[2]), 2, "{placed:?}");
        let like = |host: usize| {
            let on = |(n, at): (usize, &Option<usize>)| (*at == Some(host)).then(|| fleet.guests[n].id[..1].to_owned());
            placed[2].iter().enumerate().filter_map(on).collect::<std::collections::BTreeSet<_>>().len()
        };
        assert_eq!((0..4).map(like).filter(|systems| *systems > 0).collect::<Vec<_>>(), [1, 1]);
    }

    #[test]
    fn no_policy_overfills_host() {
        let fleet = two_systems();
        for rules in [FOLDED, Rules { storm: 1.0, zero_pages: true }] {
            for policy in Policy::ALL {
                let placed = policy.place(&fleet, &rules);
                for host in 0..fleet.hosts.len() {
                    let on = placed.iter().zip(&fleet.guests).filter(|(at, _)| **at == Some(host)).map(|(_, g)| g);
                    assert!(has_room(&fleet, host, &Load::of(on), &rules), "{policy:?} {placed:?}");
                }
            }
        }
        // When all folded pages may break, sharing makes no room: a host bears one guest, and half of them have none.
        let placed = Policy::Likeness.place(&fleet, &Rules { storm: 1.0, zero_pages: true });
        assert_eq!((used(&placed), placed.iter().flatten().count()), (4, 4));
    }

    #[test]
    fn stripe_uses_all_of_its_hosts_evenly() {
        let rows = (0..12).map(|n| guest("a", &n.to_string(), "acme", n * 1000..n * 1000 + 500));
        let hosts = ["a", "b", "c", "d", "e", "f"].map(|name| host(name, 1600));
        let placed = Policy::Stripe.place(&fleet(hosts.into_iter().chain(rows)), &FOLDED);
        let on = |host| placed.iter().filter(|at| **at == Some(host)).count();
        assert_eq!((0..6).map(on).collect::<Vec<_>>(), [3, 3, 3, 3, 0, 0]);
    }

    #[test]
    fn parts_without_room_use_hosts_of_others() {
        let rows = (0..3).map(|n| guest("a", &n.to_string(), "acme", n * 1000..n * 1000 + 90));
        let fleet = fleet([host("a", 50), host("b", 300)].into_iter().chain(rows));
        let order = [0, 1, 2];
        assert_eq!(pack(&fleet, &order, &[0, 1], &FOLDED), [Some(1); 3]);
    }
}
