//! Suggestions of groups: which guests that do not trust each other would save most if they did, and what each would
//! let the others learn. Nothing is changed: whom a guest trusts is for its operator to say.
//!
//! Groups are joined two by two, those with most contents in common first, as long as that is worth it.

use crate::fleet::{Fleet, Guest, Load};
use crate::policy::in_parallel;
use crate::theta::{Estimate, FINE_LG_K, Sketch};
use cli::exit::Stop;
use page::PAGE_BYTES;
use serde::Serialize;
use std::collections::BTreeMap;

/// Most groups that are compared, each with each.
const MOST_GROUPS: usize = 500;
/// Number of hashes by which groups are compared.
const COMPARED_HASHES: usize = 1 << FINE_LG_K;

/// Groups that would save memory if they were one group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Suggestion {
    /// The groups as they are; a guest by itself is a group of its own id.
    pub groups: Vec<String>,
    /// Number of guests of all these groups.
    pub guests: usize,
    /// Savings of one group of all, less the savings of the groups apart, in bytes.
    pub saves_bytes: u64,
    /// Error bar of `saves_bytes`, in bytes: two standard deviations.
    pub error_bytes: u64,
    /// For each guest, the contents that guests of the other groups could then learn it holds.
    pub reveals: Vec<Revealed>,
}

/// The contents of one guest that guests of the other groups hold too, and of which they could then learn.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Revealed {
    /// The guest.
    pub guest: String,
    /// Memory of the contents in common, in bytes.
    pub bytes: u64,
    /// Number of guests of the other groups.
    pub to_guests: usize,
}

/// Suggests groups of guests whose sketches have one key. Two groups are worth being one if they have at least the part
/// `least` of the smaller one's contents in common.
///
/// # Errors
/// There are more than [`MOST_GROUPS`] groups.
pub fn suggest(fleet: &Fleet, least: f64) -> anyhow::Result<Vec<Suggestion>> {
    let mut by_group: BTreeMap<&str, Vec<&Guest>> = BTreeMap::new();
    fleet.guests.iter().for_each(|guest| by_group.entry(&guest.group).or_default().push(guest));
    if by_group.len() > MOST_GROUPS {
        let text = format!("{} groups are too many to compare each with each: select {MOST_GROUPS}", by_group.len());
        return Err(Stop::Usage(text).into());
    }
    let mut joined: Vec<Option<Joined>> = by_group.into_values().map(|guests| Some(Joined::of(guests))).collect();
    let all: Vec<usize> = (0..joined.len()).collect();
    // `worth[a][b]` for each pair of groups, only for a < b.
    let mut worth = in_parallel(&all, |a| -> Vec<f64> {
        all.iter().map(|b| if a < b { worth_of(&joined, *a, *b, least) } else { 0.0 }).collect()
    });
    while let Some((a, b)) = best(&worth) {
        let other = joined[b].take();
        if let (Some(one), Some(other)) = (&mut joined[a], other) {
            one.join(other);
        }
        for &n in &all {
            worth[n.min(b)][n.max(b)] = 0.0;
            worth[n.min(a)][n.max(a)] = if n == a { 0.0 } else { worth_of(&joined, a, n, least) };
        }
    }
    let several = joined.iter().flatten().filter(|group| group.groups.len() > 1);
    let mut found: Vec<_> = several.map(Joined::suggestion).collect();
    found.sort_by_key(|suggestion| std::cmp::Reverse(suggestion.saves_bytes));
    Ok(found)
}

/// Groups that were joined to one so far.
struct Joined<'a> {
    groups: Vec<Vec<&'a Guest>>,
    contents: Sketch,
}

impl<'a> Joined<'a> {
    fn of(guests: Vec<&'a Guest>) -> Self {
        let contents = Sketch::union_of(guests.iter().map(|guest| &guest.sketch)).cut(COMPARED_HASHES);
        Self { contents, groups: vec![guests] }
    }

    fn join(&mut self, other: Self) {
        self.contents = self.contents.union(&other.contents).cut(COMPARED_HASHES);
        self.groups.extend(other.groups);
    }

    fn suggestion(&self) -> Suggestion {
        let saved = |guests: &[&Guest]| Load::of(guests.iter().copied()).saved(false);
        let all: Vec<_> = self.groups.iter().flatten().copied().collect();
        let apart = self.groups.iter().map(|guests| saved(guests)).fold(Estimate::default(), Estimate::plus);
        let gain = saved(&all).minus(apart);
        let reveals = self.groups.iter().enumerate().flat_map(|(n, guests)| {
            let others = || self.groups.iter().enumerate().filter(move |(m, _)| *m != n).flat_map(|(_, guests)| guests);
            let contents = Sketch::union_of(others().map(|guest| &guest.sketch));
            let to_guests = others().count();
            guests.iter().map(move |guest| Revealed {
                guest: guest.id.clone(),
                bytes: bytes(guest.sketch.common(&contents).pages),
                to_guests,
            })
        });
        Suggestion {
            groups: self.groups.iter().map(|guests| guests[0].group.clone()).collect(),
            guests: all.len(),
            saves_bytes: bytes(gain.pages),
            error_bytes: bytes(gain.error),
            reveals: reveals.collect(),
        }
    }
}

/// Number of contents that groups `a` and `b` have in common; 0 if it is less than the part `least` of the smaller
/// group's contents.
fn worth_of(groups: &[Option<Joined<'_>>], a: usize, b: usize, least: f64) -> f64 {
    let (Some(one), Some(other)) = (&groups[a], &groups[b]) else { return 0.0 };
    let common = one.contents.common(&other.contents).pages;
    let smaller = one.contents.size().pages.min(other.contents.size().pages);
    if common >= least * smaller { common } else { 0.0 }
}

/// The pair of groups with most contents in common.
fn best(worth: &[Vec<f64>]) -> Option<(usize, usize)> {
    let pairs =
        worth.iter().enumerate().flat_map(|(a, row)| row.iter().enumerate().map(move |(b, worth)| (*worth, a, b)));
    pairs.filter(|pair| pair.0 > 0.0).max_by(|x, y| x.0.total_cmp(&y.0)).map(|(_, a, b)| (a, b))
}

fn bytes(pages: f64) -> u64 {
    (pages * PAGE_BYTES as f64).max(0.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::tests::{fleet, guest, host};
    use crate::row::Row;

    #[test]
    fn those_that_hold_the_same_are_suggested() {
        let of = |group: &str, id: &str, from: u64| Row {
            group: Some(group.into()),
            ..guest("a", id, "once", from..from + 1000)
        };
        let rows = [of("debian", "d1", 0), of("debian", "d2", 100), of("qemu:d3", "d3", 200), of("alpine", "a1", 9000)];
        let fleet = fleet(rows.into_iter().chain([host("a", 1)]));
        let found = suggest(&fleet, 0.1).unwrap();
        let reveals =
            |guest: &str, pages: u64, to_guests| Revealed { guest: guest.into(), bytes: pages << 12, to_guests };
        let expected = Suggestion {
            groups: vec!["debian".into(), "qemu:d3".into()],
            guests: 3,
            saves_bytes: 900 << 12,
            error_bytes: 0,
            reveals: vec![reveals("d1", 800, 1), reveals("d2", 900, 1), reveals("d3", 900, 2)],
        };
        assert_eq!(found, [expected]);
        assert_eq!(suggest(&fleet, 0.95).unwrap(), []);
    }

    /// Each has half of its contents in common with the next one, and nothing with others.
    #[test]
    fn groups_are_joined_one_by_one() {
        let of = |n: u64| Row {
            group: Some(format!("{n:03}")),
            ..guest("a", &format!("{n:03}"), "once", n * 100..n * 100 + 200)
        };
        let most = |n: usize| fleet((0..n as u64).map(of).chain([host("a", 1)]));
        let found = suggest(&most(MOST_GROUPS), 0.1).unwrap();
        assert_eq!(found.iter().map(|one| one.guests).sum::<usize>(), MOST_GROUPS, "{}", found.len());
        assert!(suggest(&most(MOST_GROUPS + 1), 0.1).unwrap_err().to_string().contains("select 500"));
    }
}
