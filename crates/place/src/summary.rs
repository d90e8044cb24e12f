//! Holdings of a fleet, and savings of folding where guests are, by group. Other engines make the same sums of
//! the same table: `packaging/spark`, docs/fleet.md.

use crate::fleet::{Fleet, Guest};
use crate::theta::Sketch;
use page::PAGE_BYTES;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Sums over guests with one key on one host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sum {
    /// The host that the guests are on.
    pub host: String,
    /// Public name of the key of the guests' sketches.
    pub key: String,
    /// Group of the guests.
    pub group: String,
    /// Number of guests.
    pub guests: u64,
    /// Pages that folding reaches, zeros aside.
    pub held_pages: u64,
    /// Zero pages of the guests.
    pub zero_pages: u64,
    /// Sum over the guests of the number of different contents that each holds.
    pub distinct_pages: u64,
    /// Number of different contents of the guest that has most.
    pub most_distinct_pages: u64,
    /// Number of different contents of all guests together: the estimate of the union of their sketches.
    pub contents_pages: f64,
}

/// A fleet, as `--json` prints it.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// The engine that made the sums.
    pub engine: &'static str,
    /// Time that it took, with reading the table.
    pub seconds: f64,
    /// Hosts with guests.
    pub hosts: usize,
    /// The totals.
    #[serde(flatten)]
    pub total: Total,
    /// By group.
    pub groups: Vec<Group>,
}

/// A group.
#[derive(Clone, Debug, Serialize)]
pub struct Group {
    /// Its name.
    pub group: String,
    /// Hosts on which it has guests.
    pub hosts: usize,
    /// Its totals.
    #[serde(flatten)]
    pub total: Total,
}

/// Totals over guests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Total {
    /// Number of guests.
    pub guests: u64,
    /// Memory that folding reaches, zeros aside.
    pub held_bytes: u64,
    /// Zero pages.
    pub zero_bytes: u64,
    /// The part of it that folding saves where the guests are, zero pages aside.
    pub saved_without_zero_bytes: u64,
    /// The part of `saved_without_zero_bytes` of contents that one guest holds more than once.
    pub inside_bytes: u64,
}

impl Sum {
    fn saved_pages(&self) -> f64 {
        let most = self.distinct_pages as f64;
        // The contents of a single guest were counted, not estimated.
        let union = if self.guests == 1 { most } else { self.contents_pages };
        self.held_pages as f64 - union.clamp((self.most_distinct_pages as f64).min(most), most)
    }
}

/// The sums of each host and key, as this program computes them.
pub fn sums(fleet: &Fleet) -> Vec<Sum> {
    let mut by_place: BTreeMap<(usize, usize), Vec<&Guest>> = BTreeMap::new();
    fleet.guests.iter().for_each(|guest| by_place.entry((guest.host, guest.key)).or_default().push(guest));
    let sum = |((host, key), guests): ((usize, usize), Vec<&Guest>)| {
        let of = |pages: fn(&Guest) -> u64| guests.iter().map(move |guest| pages(guest));
        Sum {
            host: fleet.hosts[host].name.clone(),
            key: fleet.keys[key].clone(),
            group: guests[0].group.clone(),
            guests: guests.len() as u64,
            held_pages: of(|g| g.held_pages).sum(),
            zero_pages: of(|g| g.zero_pages).sum(),
            distinct_pages: of(|g| g.distinct_pages).sum(),
            most_distinct_pages: of(|g| g.distinct_pages).max().unwrap_or(0),
            contents_pages: Sketch::union_of(guests.iter().map(|guest| &guest.sketch)).size().pages,
        }
    };
    by_place.into_iter().map(sum).collect()
}

/// Adds sums up, by group and in all. `engine` and `seconds` tell who made the sums, and how long it took.
pub fn summary(sums: &[Sum], engine: &'static str, seconds: f64) -> Summary {
    let mut groups: BTreeMap<&str, (BTreeSet<&str>, Total, f64)> = BTreeMap::new();
    for sum in sums {
        let (hosts, total, saved) = groups.entry(&sum.group).or_default();
        hosts.insert(&sum.host);
        total.guests += sum.guests;
        total.held_bytes += sum.held_pages * PAGE_BYTES as u64;
        total.zero_bytes += sum.zero_pages * PAGE_BYTES as u64;
        total.inside_bytes += sum.held_pages.saturating_sub(sum.distinct_pages) * PAGE_BYTES as u64;
        *saved += sum.saved_pages() * PAGE_BYTES as f64;
        total.saved_without_zero_bytes = saved.round() as u64;
    }
    let total = groups.values().fold(Total::default(), |a, (_, b, _)| Total {
        guests: a.guests + b.guests,
        held_bytes: a.held_bytes + b.held_bytes,
        zero_bytes: a.zero_bytes + b.zero_bytes,
        saved_without_zero_bytes: a.saved_without_zero_bytes + b.saved_without_zero_bytes,
        inside_bytes: a.inside_bytes + b.inside_bytes,
    });
    let hosts = sums.iter().map(|sum| &sum.host).collect::<BTreeSet<_>>().len();
    let group = |(name, (hosts, total, _)): (&str, (BTreeSet<&str>, Total, f64))| Group {
        group: name.to_owned(),
        hosts: hosts.len(),
        total,
    };
    Summary { engine, seconds, hosts, total, groups: groups.into_iter().map(group).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::tests::{fleet, guest, host};
    use crate::row::Row;

    #[test]
    fn savings_are_those_within_hosts_and_groups() {
        let rows = [
            host("a", 1),
            host("b", 1),
            Row { resident_pages: 1300, zero_pages: 200, ..guest("a", "1", "acme", 0..1000) },
            guest("a", "2", "acme", 500..1500),
            guest("a", "3", "beta", 0..1000),
            guest("b", "1", "acme", 0..1000),
        ];
        let found = summary(&sums(&fleet(rows)), "own", 0.0);
        let pages = |pages: u64| pages << 12;
        let total = Total {
            guests: 4,
            held_bytes: pages(4100),
            zero_bytes: pages(200),
            saved_without_zero_bytes: pages(600),
            inside_bytes: pages(100),
        };
        assert_eq!((found.hosts, found.total), (2, total));
        let groups: Vec<_> = found.groups.iter().map(|g| (g.group.as_str(), g.hosts, g.total.guests)).collect();
        assert_eq!(groups, [("acme", 2, 3), ("beta", 1, 1)]);
    }
}
