//! Sketches of the guests of this host: a census that keeps no fingerprint.
//!
//! ```text
//!   census: classes of equal contents --> for each holder: HMAC with its group's key --> theta sketch
//!   mappings of the pool: folded pages that no page table shows, read from the pool's file --+
//! ```
//!
//! Zero pages are counted, and are in no sketch. Of containers and processes, zero pages of files count as anonymous
//! ones.

use crate::key::Key;
use crate::row::Row;
use crate::slots::{Folded, Slots};
use crate::theta;
use anyhow::Context;
use census::Findings;
use cli::exit::in_words;
use datasketches::theta::ThetaSketch;
use guest::{Glob, Guest, Plan};
use page::{Fingerprint, GuestIndex, PAGE_BYTES, PageKind, Region};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use survey::{Request, See, take as take_census};

/// Options of taking sketches.
pub struct Settings<'a> {
    /// Scanning threads.
    pub threads: usize,
    /// Bound of the census's index, in bytes; `None` for no bound.
    pub index_bytes: Option<usize>,
    /// Size of a sketch: the binary logarithm of its number of hashes.
    pub lg_k: u8,
    /// Guaranteed sizes in bytes, by a glob over ids and names of guests.
    pub guaranteed: &'a [(Glob, u64)],
    /// Time of the sketches, in seconds since 1970.
    pub epoch_s: u64,
}

/// Takes a sketch of each guest, with the key that `key_of` has for its group. Returns the rows, the host's first, and
/// what could not be read.
///
/// # Errors
/// There are too many guests, or the key of a group cannot be read.
pub fn take(
    guests: &[Guest],
    key_of: &dyn Fn(&str) -> anyhow::Result<Key>,
    settings: &Settings<'_>,
) -> anyhow::Result<(Vec<Row>, Vec<String>)> {
    let (mut pool, mut missed, mut held) = (Slots::default(), Vec::new(), Vec::new());
    for guest in guests {
        let folded = pool.of(guest).unwrap_or_else(|error| {
            missed.push(format!("{}: folded pages are left out: {}", guest.id, in_words(&error)));
            Folded::default()
        });
        if folded.gone_mappings > 0 {
            missed.push(format!("{}: {} mappings of its pool changed meanwhile", guest.id, folded.gone_mappings));
        }
        held.push(Held::begin(guest, key_of(&guest.group)?, folded, settings.lg_k));
    }
    let held = RefCell::new(held);
    let index_bytes = settings.index_bytes;
    let watch = Watch { held: &held };
    let request = Request { threads: settings.threads, index_bytes, see: Some(&watch), ..Request::of(guests) };
    let (findings, _) = take_census(&request)?;
    missed.extend(findings.partial.iter().map(|partial| format!("{}: {}", partial.guest, partial.reason)));
    let templates = templates();
    let rows: Vec<_> = held
        .into_inner()
        .into_iter()
        .enumerate()
        .map(|(n, held)| row(&guests[n], n, held, &findings, settings))
        .collect();
    let mut all = vec![host_row(&rows, pool.pages(), settings)?];
    all.extend(
        rows.into_iter()
            .zip(guests)
            .map(|(row, guest)| Row { template: template_of(guest, &templates), ..row }.bounded()),
    );
    Ok((all, missed))
}

/// Counts and contents of one guest while the census runs.
struct Held {
    key: Key,
    is_vm: bool,
    sketch: ThetaSketch,
    folded_pages: u64,
    /// Contents of folded pages that the census has not reported yet.
    folded: HashSet<u64>,
    resident_pages: u64,
    distinct_pages: u64,
}

impl Held {
    fn begin(guest: &Guest, key: Key, folded: Folded, lg_k: u8) -> Self {
        let Folded { pages, contents, .. } = folded;
        Self {
            key,
            is_vm: guest.kind.is_vm(),
            sketch: theta::begin(lg_k),
            folded_pages: pages,
            folded: contents,
            resident_pages: 0,
            distinct_pages: 0,
        }
    }

    fn add(&mut self, content: Fingerprint) {
        self.distinct_pages += 1;
        self.sketch.update(self.key.hide(content));
    }
}

/// Receives the classes of the census, and adds each content to its holders' sketches.
struct Watch<'a> {
    held: &'a RefCell<Vec<Held>>,
}

impl See for Watch<'_> {
    fn plan(&self, _: &Plan) {}

    fn class(&self, class: &[census::Entry]) {
        let content = class[0].fingerprint();
        if content == Fingerprint::ZERO_PAGE {
            return;
        }
        let mut held = self.held.borrow_mut();
        let mut holders: Vec<usize> = Vec::new();
        for entry in class.iter().filter(|entry| entry.owner() != GuestIndex::HOST) {
            let owner = usize::from(entry.owner().0);
            let is_folded = entry.kind() == PageKind::Folded;
            if is_folded || entry.kind().can_be_folded(entry.region(), held[owner].is_vm) {
                // Folded pages are counted in `folded_pages` already.
                held[owner].resident_pages += u64::from(!is_folded);
                holders.push(owner);
            }
        }
        holders.sort_unstable();
        holders.dedup();
        for owner in holders {
            held[owner].folded.remove(&content.0);
            held[owner].add(content);
        }
    }
}

/// The row of a guest.
fn row(guest: &Guest, n: usize, mut held: Held, findings: &Findings, settings: &Settings<'_>) -> Row {
    for content in std::mem::take(&mut held.folded) {
        held.add(Fingerprint(content));
    }
    let found = &findings.guests[n];
    let in_reach = |region: Region| {
        if held.is_vm { region == Region::GuestRam } else { !matches!(region, Region::Shared | Region::PageCache) }
    };
    let zero_pages = found.regions.iter().filter(|r| in_reach(r.region)).map(|r| r.zero_pages).sum();
    let frames = held.resident_pages + zero_pages;
    let is_meant = |glob: &Glob| glob.matches(&guest.id) || glob.matches(&guest.name);
    Row {
        epoch_s: settings.epoch_s,
        host: host::Kernel::this().host_name,
        group: Some(guest.group.clone()),
        guest: Some(guest.id.clone()),
        template: None,
        key: Some(held.key.id().to_owned()),
        memory_bytes: guest.ram_bytes,
        guaranteed_bytes: settings.guaranteed.iter().find(|(glob, _)| is_meant(glob)).map(|(_, bytes)| *bytes),
        resident_pages: frames + held.folded_pages,
        zero_pages,
        distinct_pages: held.distinct_pages,
        folded_pages: held.folded_pages,
        other_pages: if held.is_vm {
            found.regions.iter().filter(|r| !in_reach(r.region)).map(|r| r.incremental_pages).sum()
        } else {
            found.incremental_pages.saturating_sub(frames)
        },
        sketch: Some(theta::finish(held.sketch)),
    }
}

/// The row of the host itself: its RAM, and its pages in use that are neither the guests' nor slots that they map.
fn host_row(guests: &[Row], slots: u64, settings: &Settings<'_>) -> anyhow::Result<Row> {
    let memory_bytes = host::ram_bytes();
    let available_bytes = host::available_bytes().context("cannot tell how much memory is free")?;
    let own = |row: &Row| row.resident_pages - row.folded_pages + row.other_pages;
    let of_guests = guests.iter().map(own).sum::<u64>() + slots;
    let used = memory_bytes.saturating_sub(available_bytes) / PAGE_BYTES as u64;
    Ok(Row {
        epoch_s: settings.epoch_s,
        host: host::Kernel::this().host_name,
        memory_bytes: Some(memory_bytes),
        other_pages: used.saturating_sub(of_guests),
        ..Row::default()
    })
}

/// Names of clones' templates, by the pid of the clone's first process.
fn templates() -> BTreeMap<u32, String> {
    let clones = start::Clones::open(&start::clones_dir()).seen();
    clones.into_iter().filter_map(|clone| Some((clone.process?.pid, clone.template))).collect()
}

fn template_of(guest: &Guest, templates: &BTreeMap<u32, String>) -> Option<String> {
    guest.pids.iter().find_map(|pid| templates.get(pid)).cloned()
}
