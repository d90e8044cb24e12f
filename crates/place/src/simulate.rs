//! Fleets that are drawn: tenants, whose guests are of kinds that were measured on real ones (`data/kinds.toml`).
//!
//! ```text
//!   contents of a guest = everywhere: what all kinds of its tenant hold
//!                       + common:     what guests of its kind and tenant hold
//!                       + its own:    as many as the kind has, by a factor from 0.5 to 1.5, and so have its zero pages
//! ```
//!
//! Of each set only the hashes below theta are drawn, so a fleet of 200,000 guests takes seconds.

use crate::fleet::{Fleet, Guest, Host};
use crate::row::Row;
use crate::theta::{FLEET_LG_K, Sketch, theta_for};
use page::PAGE_BYTES;
use serde::{Deserialize, Serialize};

/// Part of a host's memory that a drawn fleet gives to guests, if all hosts have equally many.
const FILLED: f64 = 0.85;
/// Kinds of guests that a tenant has.
const KINDS_OF_TENANT: usize = 2;
/// Usual number of hashes in the sketch of a simulated guest: with more, 200,000 guests do not fit into 512 MiB.
pub const HASHES: usize = 256;

/// Kinds of guests.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Kinds {
    /// Contents that guests of all kinds hold in common.
    pub everywhere_pages: u64,
    /// The kinds.
    pub kinds: Vec<Kind>,
}

/// A kind of guests: means of real ones.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Kind {
    /// Name of the kind.
    pub name: String,
    /// RAM that each guest was given.
    pub given_pages: u64,
    /// Pages that each guest holds.
    pub resident_pages: u64,
    /// Zero pages among `resident_pages`.
    pub zero_pages: u64,
    /// Number of different contents of the pages that are not zero.
    pub distinct_pages: u64,
    /// Pages that folding leaves alone.
    pub other_pages: u64,
    /// Contents that two guests of the kind have in common.
    pub common_pages: u64,
}

/// Size of a fleet.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Hosts, all alike.
    pub hosts: usize,
    /// Guests.
    pub guests: usize,
    /// Tenants, each a group with a key of its own.
    pub tenants: usize,
    /// Hashes of a guest's sketch.
    pub hashes: usize,
}

impl Kinds {
    /// The kinds that were measured on real guests.
    pub fn measured() -> Self {
        toml::from_str(include_str!("../data/kinds.toml")).expect("a test reads it")
    }

    /// Means over a fleet's guests of each kind. The kind is a guest's id without the number at its end.
    pub fn of(fleet: &Fleet) -> Self {
        let kind_of =
            |guest: &Guest| guest.id.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('-').to_owned();
        let mut by_kind: std::collections::BTreeMap<String, Vec<&Guest>> = std::collections::BTreeMap::new();
        fleet.guests.iter().for_each(|guest| by_kind.entry(kind_of(guest)).or_default().push(guest));
        let mut everywhere = f64::INFINITY;
        let groups: Vec<_> = by_kind.values().collect();
        for (n, one) in groups.iter().enumerate() {
            for other in &groups[n + 1..] {
                everywhere = everywhere.min(one[0].sketch.common(&other[0].sketch).pages);
            }
        }
        let kinds = by_kind.iter().map(|(name, guests)| Kind::of(name, guests)).collect();
        Self { everywhere_pages: if everywhere.is_finite() { everywhere as u64 } else { 0 }, kinds }
    }
}

impl Kind {
    fn of(name: &str, guests: &[&Guest]) -> Self {
        let mean = |of: fn(&Guest) -> u64| guests.iter().map(|guest| of(guest)).sum::<u64>() / guests.len() as u64;
        let pairs: Vec<f64> = guests.windows(2).map(|pair| pair[0].sketch.common(&pair[1].sketch).pages).collect();
        let common = if pairs.is_empty() { 0.0 } else { pairs.iter().sum::<f64>() / pairs.len() as f64 };
        Self {
            name: name.to_owned(),
            given_pages: mean(|guest| guest.claimed_pages - guest.other_pages),
            resident_pages: mean(|guest| guest.held_pages + guest.zero_pages),
            zero_pages: mean(|guest| guest.zero_pages),
            distinct_pages: mean(|guest| guest.distinct_pages),
            other_pages: mean(|guest| guest.other_pages),
            common_pages: common as u64,
        }
    }
}

/// Draws a fleet.
pub fn fleet(kinds: &Kinds, size: &Size) -> Fleet {
    let mut tenants = Pools::new(kinds, size);
    let guests: Vec<_> = (0..size.guests).map(|n| tenants.guest(n)).collect();
    let claimed: u64 = guests.iter().map(|guest| guest.claimed_pages).sum();
    let room_pages = (claimed as f64 / size.hosts.max(1) as f64 / FILLED) as u64;
    let hosts = (0..size.hosts).map(|n| Host { name: format!("host-{n}"), epoch_s: 0, room_pages }).collect();
    Fleet { hosts, guests, keys: (0..size.tenants).map(|tenant| format!("tenant-{tenant}")).collect() }
}

/// The same fleet as rows of a table.
pub fn rows(fleet: &Fleet, epoch_s: u64) -> impl Iterator<Item = Row> {
    let bytes = |pages: u64| Some(pages * PAGE_BYTES as u64);
    let host = move |host: &Host| Row {
        epoch_s,
        host: host.name.clone(),
        memory_bytes: bytes(host.room_pages),
        ..Row::default()
    };
    let guest = move |guest: &Guest| Row {
        epoch_s,
        host: fleet.hosts[guest.host].name.clone(),
        group: Some(guest.group.clone()),
        guest: Some(guest.id.clone()),
        key: Some(fleet.keys[guest.key].clone()),
        memory_bytes: bytes(guest.claimed_pages - guest.other_pages),
        resident_pages: guest.held_pages + guest.zero_pages,
        zero_pages: guest.zero_pages,
        distinct_pages: guest.distinct_pages,
        other_pages: guest.other_pages,
        sketch: Some(guest.sketch.bytes()),
        ..Row::default()
    };
    fleet.hosts.iter().map(host).chain(fleet.guests.iter().map(guest))
}

/// Contents that guests of a tenant have in common, by their hashes.
struct Pools<'a> {
    kinds: &'a Kinds,
    size: &'a Size,
    random: Random,
    /// Contents that all guests of a tenant hold.
    everywhere: Vec<Vec<u64>>,
    /// Contents that all guests of a tenant and kind hold.
    common: Vec<Vec<Vec<u64>>>,
}

impl<'a> Pools<'a> {
    fn new(kinds: &'a Kinds, size: &'a Size) -> Self {
        let mut random = Random(1);
        let least = kinds.kinds.iter().map(|kind| kind.distinct_pages).min().unwrap_or(1) as f64 / 2.0;
        let theta = theta_for(least, size.hashes);
        let pool = |random: &mut Random, pages: u64| random.hashes(pages as f64, theta);
        let common = |kind: &Kind| kind.common_pages.saturating_sub(kinds.everywhere_pages);
        let everywhere = (0..size.tenants).map(|_| pool(&mut random, kinds.everywhere_pages)).collect();
        let of_tenant = |random: &mut Random| -> Vec<Vec<u64>> {
            kinds.kinds.iter().map(|kind| pool(random, common(kind))).collect()
        };
        let common = (0..size.tenants).map(|_| of_tenant(&mut random)).collect();
        Self { kinds, size, random, everywhere, common }
    }

    fn guest(&mut self, n: usize) -> Guest {
        let tenant = self.random.below(self.size.tenants);
        let which = (tenant + self.random.below(KINDS_OF_TENANT)) % self.kinds.kinds.len();
        let kind = &self.kinds.kinds[which];
        let factor = 0.5 + self.random.part();
        let shared = kind.common_pages.max(self.kinds.everywhere_pages).min(kind.distinct_pages);
        let own = (kind.distinct_pages - shared) as f64 * factor;
        let distinct_pages = shared + own as u64;
        let theta = theta_for(distinct_pages as f64, self.size.hashes);
        let mut hashes = self.random.hashes(own, theta);
        hashes.extend(&self.everywhere[tenant]);
        hashes.extend(&self.common[tenant][which]);
        let inside = kind.resident_pages.saturating_sub(kind.zero_pages + kind.distinct_pages);
        let (held_pages, zero_pages) = (distinct_pages + inside, (kind.zero_pages as f64 * factor) as u64);
        let given = kind.given_pages.max(held_pages + zero_pages);
        Guest {
            id: format!("{}-{n}", kind.name),
            group: format!("tenant-{tenant}"),
            host: n % self.size.hosts.max(1),
            key: tenant,
            epoch_s: 0,
            claimed_pages: given + kind.other_pages,
            other_pages: kind.other_pages,
            withdrawable_pages: 0,
            held_pages,
            distinct_pages,
            zero_pages,
            sketch: Sketch::sample(theta, hashes).cut(1 << FLEET_LG_K),
        }
    }
}

/// Numbers that look random, the same in every run: splitmix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.next()) * end as u128) >> 64) as usize
    }

    /// A number from 0 to 1.
    fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Random hashes below `theta`, as many as a set of `contents` contents has.
    fn hashes(&mut self, contents: f64, theta: u64) -> Vec<u64> {
        let expected = contents * (theta as f64 / i64::MAX as f64);
        let found = expected as usize + usize::from(self.part() < expected.fract());
        // A sketch cannot hold hash 0.
        (0..found)
            .map(|_| ((u128::from(self.next()) * u128::from(theta)) >> 64) as u64)
            .map(|hash| hash.max(1))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{Collector, Load};

    #[test]
    fn drawn_guests_are_as_their_kinds() {
        let kinds = Kinds::measured();
        let size = Size { hosts: 10, guests: 200, tenants: 2, hashes: 1024 };
        let fleet = fleet(&kinds, &size);
        for kind in &kinds.kinds {
            let of_kind = |guest: &&Guest| guest.key == 0 && guest.id.starts_with(&format!("{}-", kind.name));
            let guests: Vec<_> = fleet.guests.iter().filter(of_kind).take(2).collect();
            let [a, b] = guests[..] else { continue };
            for guest in [a, b] {
                let size = guest.sketch.size();
                assert!(
                    (size.pages - guest.distinct_pages as f64).abs() <= 2.0 * size.error + 1.0,
                    "{size:?} {guest:?}"
                );
            }
            let common = a.sketch.common(&b.sketch);
            let expected = kind.common_pages.max(kinds.everywhere_pages) as f64;
            assert!((common.pages - expected).abs() <= 2.0 * common.error + 1.0, "{common:?} {kind:?}");
        }
    }

    #[test]
    fn rows_of_drawn_fleet_are_that_fleet() {
        let drawn = fleet(&Kinds::measured(), &Size { hosts: 3, guests: 20, tenants: 2, hashes: 256 });
        let mut collector = Collector::of_rows(23);
        rows(&drawn, 7).try_for_each(|row| collector.add(row)).unwrap();
        let read = collector.finish(0.0).unwrap();
        let [one, other] = [&drawn, &read].map(|fleet| Load::of(&fleet.guests));
        assert!((one.saved(true).pages - other.saved(true).pages).abs() < 1.0, "{one:?} {other:?}");
        assert_eq!(read.guests.len(), 20);
        assert_eq!(Kinds::of(&read).kinds.len(), Kinds::of(&drawn).kinds.len());
    }
}
