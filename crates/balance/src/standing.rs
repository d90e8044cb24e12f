//! Facts of the last round of balancing, kept for decisions about further guests ([`admit`](crate::admit())) until the
//! next round.

use crate::admit::{Assurance, Costs};
use crate::facts::{Facts, GuestFacts};
use crate::ladder::Rung;
use crate::params::Params;
use crate::plan::Step;
use crate::reserve::{Reserve, expected_bytes, signed};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Age of a guest from which on the most memory that it has held counts as a measure for guests of its kind, in
/// seconds: 10 minutes.
const SETTLED_S: u64 = 600;

/// Facts of the last round of balancing, for admissions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// RAM of the host.
    pub total_bytes: u64,
    /// Memory that was available.
    pub available_bytes: u64,
    /// Memory that is never lent.
    pub floor_bytes: u64,
    /// Loans that can be withdrawn in 10 s.
    pub withdrawable_bytes: u64,
    /// The rung of the pressure ladder.
    pub rung: Rung,
    /// The guests.
    pub guests: Vec<Seen>,
}

/// A guest in that round.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its group.
    pub group: String,
    /// Its first process.
    #[serde(default)]
    pub pid: u32,
    /// Its RAM.
    pub ram_bytes: u64,
    /// Its size, by its balloon driver; `None` in looks of an earlier version.
    #[serde(default)]
    pub actual_bytes: Option<u64>,
    /// The part of its size that has no frames, and growth that it was told.
    pub untouched_bytes: u64,
    /// RAM whose frames others hold too.
    pub folded_bytes: u64,
    /// RAM in frames that it alone holds.
    pub private_bytes: u64,
    /// The most RAM that the guest was seen to hold alone.
    pub peak_bytes: u64,
    /// Private memory of its process beside its RAM.
    pub beside_bytes: u64,
    /// Seconds since its process started, or since the balancer saw it first, whichever is less.
    pub age_s: u64,
}

/// Memory promised to a guest that has not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Bytes.
    pub bytes: u64,
    /// Seconds until it lapses.
    pub left_s: u64,
}

/// Memory that is left for further guests, in the two sums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left {
    pub spare: i64,
    pub cover: i64,
}

impl Standing {
    /// The standing by these facts, after a plan that lets guests grow by `grows`.
    pub fn of(facts: &Facts, grows: &[Step], params: &Params) -> Self {
        let coming = |guest: &GuestFacts| {
            let told = grows.iter().filter(|step| step.guest == guest.id && !step.is_owed);
            told.fold(0, |sum: u64, step| sum.saturating_add(step.expected_bytes))
        };
        let seen = |guest: &GuestFacts| Seen {
            id: guest.id.clone(),
            name: guest.name.clone(),
            group: guest.group.clone(),
            pid: guest.pid,
            ram_bytes: guest.ram_bytes,
            actual_bytes: Some(guest.actual_bytes),
            untouched_bytes: guest
                .untouched_bytes()
                .saturating_add(expected_bytes(guest))
                .saturating_add(coming(guest)),
            folded_bytes: guest.folded_bytes,
            private_bytes: guest.private_bytes(),
            peak_bytes: guest.peak_bytes.max(guest.private_bytes()),
            beside_bytes: guest.beside_bytes,
            age_s: guest.age_s,
        };
        Self {
            total_bytes: facts.host.total_bytes,
            available_bytes: facts.host.available_bytes,
            floor_bytes: facts.host.floor_bytes,
            withdrawable_bytes: Reserve::of(facts, params).withdrawable_bytes,
            rung: facts.host.rung,
            guests: facts.guests.iter().map(seen).collect(),
        }
    }

    /// Memory above the floor, promises not subtracted. `available` may have fallen since the round. If it has risen,
    /// the figure of the round counts, because guests may take the difference again.
    fn above_floor(&self, available: u64) -> i64 {
        signed(available.min(self.available_bytes)).saturating_sub(signed(self.floor_bytes))
    }

    /// Memory that stands against a break storm.
    pub(crate) fn reserve_bytes(&self, available: u64) -> u64 {
        let above = u64::try_from(self.above_floor(available)).unwrap_or(0);
        above.saturating_add(self.withdrawable_bytes)
    }

    /// Everything that guests may take, and promises.
    pub(crate) fn storm_bytes(&self, held: &[Held]) -> u64 {
        self.guests.iter().map(Seen::storm_bytes).fold(promised(held), u64::saturating_add)
    }

    pub(crate) fn left(&self, held: &[Held], available: u64, policy: Assurance) -> Left {
        let free = self.above_floor(available).saturating_sub(signed(promised(held)));
        let peaks = if policy == Assurance::Likely { self.peaks() } else { BTreeMap::new() };
        let (mut untouched, mut all) = (0_u64, 0_u64);
        for guest in &self.guests {
            let (first, whole) = match policy {
                Assurance::Strict => (guest.untouched_bytes, guest.storm_bytes()),
                Assurance::Likely => {
                    let whole = peaks.get(&guest.kind()).map_or(guest.storm_bytes(), |peak| guest.likely_bytes(*peak));
                    (whole.min(guest.untouched_bytes), whole)
                }
                Assurance::None => (0, 0),
            };
            (untouched, all) = (untouched.saturating_add(first), all.saturating_add(whole));
        }
        let cover = free.saturating_add(signed(self.withdrawable_bytes)).saturating_sub(signed(all));
        Left { spare: free.saturating_sub(signed(untouched)), cover }
    }

    /// The most that a guest of each kind was seen to hold alone.
    fn peaks(&self) -> BTreeMap<Kind<'_>, u64> {
        let mut peaks = BTreeMap::new();
        for guest in self.guests.iter().filter(|guest| guest.age_s >= SETTLED_S) {
            let peak: &mut u64 = peaks.entry(guest.kind()).or_default();
            *peak = guest.peak_bytes.max(*peak);
        }
        peaks
    }

    /// RAM of the most frequent kind of guest in a group; `None` if the group has no guest.
    pub fn usual_of(&self, group: &str) -> Option<u64> {
        let mut count: BTreeMap<u64, u64> = BTreeMap::new();
        for guest in self.guests.iter().filter(|guest| guest.group == group) {
            let entry = count.entry(guest.ram_bytes).or_default();
            *entry = entry.saturating_add(1);
        }
        count.into_iter().max_by_key(|(ram, guests)| (*guests, *ram)).map(|(ram, _)| ram)
    }

    /// Memory that one guest of a kind takes.
    pub(crate) fn costs(&self, group: Option<&str>, ram_bytes: u64) -> Costs {
        let of_kind =
            || self.guests.iter().filter(move |guest| Some(guest.kind()) == group.map(|group| (group, ram_bytes)));
        let beside = of_kind().map(|guest| guest.beside_bytes).max().unwrap_or(0);
        let settled = of_kind().filter(|guest| guest.age_s >= SETTLED_S).count();
        let of = |bytes: Option<u64>| bytes.unwrap_or(ram_bytes).saturating_add(beside);
        Costs {
            start_bytes: of(of_kind().map(|guest| guest.private_bytes).min()),
            diverged_bytes: of(of_kind().map(|guest| guest.peak_bytes).max()),
            storm_bytes: of(None),
            measured_guests: of_kind().count() as u64,
            settled_guests: settled as u64,
        }
    }
}

/// Guests of one kind have the same group and RAM.
type Kind<'a> = (&'a str, u64);

impl Seen {
    fn kind(&self) -> Kind<'_> {
        (&self.group, self.ram_bytes)
    }

    const fn storm_bytes(&self) -> u64 {
        self.untouched_bytes.saturating_add(self.folded_bytes)
    }

    fn likely_bytes(&self, peak_bytes: u64) -> u64 {
        peak_bytes.saturating_sub(self.private_bytes).min(self.storm_bytes())
    }
}

fn promised(held: &[Held]) -> u64 {
    held.iter().map(|held| held.bytes).fold(0, u64::saturating_add)
}
