//! Hosts and guests as a plan sees them, and the sums that it keeps to.
//!
//! ```text
//!   claimed = what the guests were given, and what they hold beside it
//!   saved   = pages held - contents, among guests with one key; zero pages, where they are given back
//!   needs   = claimed - saved + storm * saved - withdrawable,  at least claimed - saved
//! ```
//!
//! The crate `balance` computes with the same sums: a host has room for everything that its guests may take if their
//! folded pages are written, and so become private. Memory that can be withdrawn from guests, which is all that each
//! has beyond its guarantee, counts as room. `storm` is the part of the folded pages that are written at once. Of
//! savings, the lower bound of the estimate counts.

use crate::row::Row;
use crate::theta::{Estimate, Sketch};
use anyhow::{Context, ensure};
use cli::exit::Stop;
use page::PAGE_BYTES;
use std::collections::BTreeMap;

/// Most hashes of all sketches together, which take 512 MiB. More are kept only if each sketch has been cut to
/// [`LEAST_HASHES`].
const MOST_HASHES: usize = 64 << 20;
/// Fewest hashes to which a sketch is cut: a million guests take 2 GiB.
const LEAST_HASHES: usize = 256;
/// A row is refused if its number of contents and the estimate of its sketch differ by more than four error bars, that
/// is eight standard deviations.
const PLAUSIBLE: f64 = 4.0;

/// Rules of a plan.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Part of the folded pages that break (by copy on write) at once, from 0 to 1.
    pub storm: f64,
    /// Whether guests' zero pages are given back to the host.
    pub zero_pages: bool,
}

/// A host.
#[derive(Clone, Debug)]
pub struct Host {
    /// Name of the host.
    pub name: String,
    /// Time when the host's sketches were taken, in seconds since 1970.
    pub epoch_s: u64,
    /// Memory of the host for guests, in pages.
    pub room_pages: u64,
}

/// A guest.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Id of the guest.
    pub id: String,
    /// Group of the guest.
    pub group: String,
    /// Index of the guest's host in [`Fleet::hosts`].
    pub host: usize,
    /// Index of the sketch's key in [`Fleet::keys`].
    pub key: usize,
    /// Time when the guest's sketch was taken, in seconds since 1970.
    pub epoch_s: u64,
    /// Most memory that the guest may hold: its RAM and `other_pages`.
    pub claimed_pages: u64,
    /// Pages of `claimed_pages` that folding does not reach.
    pub other_pages: u64,
    /// Pages of `claimed_pages` that can be withdrawn from the guest: its RAM beyond its guarantee.
    pub withdrawable_pages: u64,
    /// Pages of the guest that folding reaches, without zero pages.
    pub held_pages: u64,
    /// Number of different contents of `held_pages`.
    pub distinct_pages: u64,
    /// Zero pages of the guest.
    pub zero_pages: u64,
    /// Sketch of the guest's contents.
    pub sketch: Sketch,
}

/// All hosts and guests.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    /// The hosts, by name.
    pub hosts: Vec<Host>,
    /// The guests.
    pub guests: Vec<Guest>,
    /// Public names of the keys.
    pub keys: Vec<String>,
}

impl Guest {
    /// A guest by its row and sketch.
    fn of(row: Row, id: String, sketch: Sketch, host: usize, key: usize) -> Self {
        let given = row.memory_bytes.map_or(0, |bytes| bytes / PAGE_BYTES as u64).max(row.resident_pages);
        let kept = row.guaranteed_bytes.map_or(given, |bytes| bytes / PAGE_BYTES as u64);
        let held_pages = row.resident_pages.saturating_sub(row.zero_pages);
        Self {
            id,
            group: row.group.unwrap_or_default(),
            host,
            key,
            epoch_s: row.epoch_s,
            claimed_pages: given.saturating_add(row.other_pages),
            other_pages: row.other_pages,
            withdrawable_pages: given.saturating_sub(kept),
            held_pages,
            distinct_pages: row.distinct_pages.min(held_pages),
            zero_pages: row.zero_pages.min(row.resident_pages),
            sketch,
        }
    }

    /// Pages beyond the first with the same content within the guest.
    pub fn inside_pages(&self) -> u64 {
        self.held_pages - self.distinct_pages
    }
}

/// Collects rows into a fleet. Of each host, only rows of its latest epoch (the time of its sketches) count; of each
/// guest, the row that was added last. Otherwise the order of rows does not matter.
pub struct Collector {
    most_hashes: usize,
    hosts: BTreeMap<String, Epoch>,
}

/// Rows of the last epoch of a host.
#[derive(Default)]
struct Epoch {
    epoch_s: u64,
    /// RAM of the host in bytes, and its pages in use by others than its guests. `None` before the host's own row was
    /// read.
    own: Option<(u64, u64)>,
    guests: BTreeMap<String, (Row, Option<Sketch>)>,
}

impl Collector {
    /// A collector of at most `rows` rows. Sketches are cut so that all of them fit into memory.
    pub fn of_rows(rows: usize) -> Self {
        Self { most_hashes: (MOST_HASHES / rows.max(1)).max(LEAST_HASHES), hosts: BTreeMap::new() }
    }

    /// Adds a row. Ignores it if rows of a later epoch of its host were added before.
    ///
    /// # Errors
    /// Its sketch cannot be read, or is not of as many contents as the row says.
    pub fn add(&mut self, mut row: Row) -> anyhow::Result<()> {
        let epoch = self.hosts.entry(row.host.clone()).or_default();
        if epoch.epoch_s > row.epoch_s {
            return Ok(());
        }
        if epoch.epoch_s < row.epoch_s {
            *epoch = Epoch { epoch_s: row.epoch_s, ..Epoch::default() };
        }
        let Some(id) = row.guest.clone() else {
            epoch.own = row.memory_bytes.map(|bytes| (bytes, row.other_pages));
            return Ok(());
        };
        let read = |bytes: Vec<u8>| Sketch::read(&bytes, self.most_hashes);
        let sketch = row.sketch.take().map(read).transpose();
        let sketch = sketch.with_context(|| format!("the sketch of {id} on host {}", row.host))?;
        if let Some(size) = sketch.as_ref().map(Sketch::size) {
            ensure!(
                (size.pages - row.distinct_pages as f64).abs() <= PLAUSIBLE * size.error + 1.0,
                "the sketch of {id} on host {} is of {:.0} contents, and its row says {}",
                row.host,
                size.pages,
                row.distinct_pages
            );
        }
        epoch.guests.insert(id, (row, sketch));
        Ok(())
    }

    /// The fleet. `floor` is the part of each host's memory that guests do not get.
    ///
    /// # Errors
    /// A host has no row of its own.
    pub fn finish(self, floor: f64) -> anyhow::Result<Fleet> {
        let (mut fleet, mut keys) = (Fleet::default(), BTreeMap::<String, usize>::new());
        for (name, epoch) in self.hosts {
            let Some((memory_bytes, others)) = epoch.own else {
                let text = format!("host {name} has no row of its own: nobody knows how much memory it has");
                return Err(Stop::Usage(text).into());
            };
            let memory_pages = (memory_bytes / PAGE_BYTES as u64) as f64;
            let room_pages = ((memory_pages * (1.0 - floor)) as u64).saturating_sub(others);
            let host = fleet.hosts.len();
            for (id, (mut row, sketch)) in epoch.guests {
                let key = match (row.key.take(), &sketch) {
                    (Some(key), Some(_)) => *keys.entry(key).or_insert_with_key(|key| fleet.new_key(key.clone())),
                    // A guest without a sketch shares with nobody.
                    _ => fleet.new_key(format!("{name}/{id}")),
                };
                fleet.guests.push(Guest::of(row, id, sketch.unwrap_or_default(), host, key));
            }
            fleet.hosts.push(Host { name, epoch_s: epoch.epoch_s, room_pages });
        }
        Ok(fleet)
    }
}

impl Fleet {
    fn new_key(&mut self, name: String) -> usize {
        self.keys.push(name);
        self.keys.len() - 1
    }
}

/// Sums over the guests on one host that have the same key.
#[derive(Clone, Debug)]
struct Sharing {
    key: usize,
    guests: usize,
    held_pages: u64,
    distinct_pages: u64,
    most_distinct_pages: u64,
    contents: Sketch,
}

/// Sums over the guests on one host.
#[derive(Clone, Debug, Default)]
pub struct Load {
    claimed_pages: u64,
    withdrawable_pages: u64,
    zero_pages: u64,
    sharing: Vec<Sharing>,
}

impl Load {
    /// Sums over these guests.
    pub fn of<'a>(guests: impl IntoIterator<Item = &'a Guest>) -> Self {
        let mut by_key: BTreeMap<usize, Vec<&Guest>> = BTreeMap::new();
        for guest in guests {
            by_key.entry(guest.key).or_default().push(guest);
        }
        let mut load = Self::default();
        for (key, guests) in by_key {
            guests.iter().for_each(|guest| load.count(guest));
            let distinct = || guests.iter().map(|guest| guest.distinct_pages);
            load.sharing.push(Sharing {
                key,
                guests: guests.len(),
                held_pages: guests.iter().map(|guest| guest.held_pages).sum(),
                distinct_pages: distinct().sum(),
                most_distinct_pages: distinct().max().unwrap_or(0),
                contents: Sketch::union_of(guests.iter().map(|guest| &guest.sketch)),
            });
        }
        load
    }

    /// Adds a guest to the sums.
    pub fn add(&mut self, guest: &Guest) {
        self.count(guest);
        let with = self.sharing_with(guest);
        match self.sharing.iter_mut().find(|sharing| sharing.key == guest.key) {
            Some(sharing) => *sharing = with,
            None => self.sharing.push(with),
        }
    }

    /// Sums over the guests with the key of `guest`, and over `guest` itself.
    fn sharing_with(&self, guest: &Guest) -> Sharing {
        let contents = self.sharing.iter().find(|sharing| sharing.key == guest.key);
        let before = contents.cloned().unwrap_or_else(|| Sharing::of_nobody(guest.key));
        Sharing {
            key: guest.key,
            guests: before.guests + 1,
            held_pages: before.held_pages + guest.held_pages,
            distinct_pages: before.distinct_pages + guest.distinct_pages,
            most_distinct_pages: before.most_distinct_pages.max(guest.distinct_pages),
            contents: before.contents.union(&guest.sketch),
        }
    }

    fn count(&mut self, guest: &Guest) {
        self.claimed_pages += guest.claimed_pages;
        self.withdrawable_pages += guest.withdrawable_pages;
        self.zero_pages += guest.zero_pages;
    }

    /// Pages that folding saves, zero pages included if `zero_pages`.
    pub fn saved(&self, zero_pages: bool) -> Estimate {
        let zeros = if zero_pages { self.zero_pages } else { 0 };
        self.sharing.iter().map(Sharing::saved).fold(Estimate::exact(zeros as f64), Estimate::plus)
    }

    /// Memory that these guests need, in pages.
    pub fn needs(&self, rules: &Rules) -> f64 {
        self.needs_at(self.saved(rules.zero_pages), rules)
    }

    /// Memory that these guests and one more need, in pages.
    pub fn needs_with(&self, guest: &Guest, rules: &Rules) -> f64 {
        let zeros = if rules.zero_pages { self.zero_pages + guest.zero_pages } else { 0 };
        let others = self.sharing.iter().filter(|sharing| sharing.key != guest.key).map(Sharing::saved);
        let own = self.sharing_with(guest).saved();
        let saved = others.fold(Estimate::exact(zeros as f64).plus(own), Estimate::plus);
        let (claimed_pages, withdrawable_pages) =
            (self.claimed_pages + guest.claimed_pages, self.withdrawable_pages + guest.withdrawable_pages);
        Self { claimed_pages, withdrawable_pages, zero_pages: 0, sharing: Vec::new() }.needs_at(saved, rules)
    }

    fn needs_at(&self, saved: Estimate, rules: &Rules) -> f64 {
        let sure = (saved.pages - saved.error).max(0.0);
        let folded = self.claimed_pages as f64 - sure;
        folded.max(folded + rules.storm * sure - self.withdrawable_pages as f64)
    }
}

impl Sharing {
    fn of_nobody(key: usize) -> Self {
        let contents = Sketch::default();
        Self { key, guests: 0, held_pages: 0, distinct_pages: 0, most_distinct_pages: 0, contents }
    }

    fn saved(&self) -> Estimate {
        if self.guests == 1 {
            return Estimate::exact((self.held_pages - self.distinct_pages) as f64);
        }
        let union = self.contents.size();
        let contents = union.pages.clamp(self.most_distinct_pages as f64, self.distinct_pages as f64);
        Estimate { pages: self.held_pages as f64 - contents, error: union.error }
    }
}

#[cfg(test)]
#[path = "fleet_tests.rs"]
pub(crate) mod tests;
