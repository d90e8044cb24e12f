//! Tests of loads and fleets, with hosts and guests that are made up.

use super::*;
use crate::theta::{begin, finish};

pub const FOLDED: Rules = Rules { storm: 0.0, zero_pages: true };

/// A host with so many pages.
pub fn host(name: &str, pages: u64) -> Row {
    Row { host: name.into(), epoch_s: 1000, memory_bytes: Some(pages << 12), ..Row::default() }
}

/// A guest with these contents, each once, and 10 pages beside them.
pub fn guest(host: &str, id: &str, key: &str, contents: impl Iterator<Item = u64>) -> Row {
    let mut sketch = begin(13);
    let pages = contents.map(|content| sketch.update(content)).count() as u64;
    Row {
        host: host.into(),
        epoch_s: 1000,
        guest: Some(id.into()),
        group: Some(key.into()),
        key: Some(key.into()),
        resident_pages: pages,
        distinct_pages: pages,
        other_pages: 10,
        sketch: Some(finish(sketch)),
        ..Row::default()
    }
}

fn collected(rows: impl IntoIterator<Item = Row>) -> anyhow::Result<Fleet> {
    let mut collector = Collector::of_rows(0);
    rows.into_iter().try_for_each(|row| collector.add(row))?;
    collector.finish(0.0)
}

pub fn fleet(rows: impl IntoIterator<Item = Row>) -> Fleet {
    collected(rows).unwrap()
}

#[test]
fn only_guests_with_one_key_share() {
    let fleet = fleet([
        host("a", 10_000),
        guest("a", "1", "acme", 0..1000),
        guest("a", "2", "acme", 500..1500),
        guest("a", "3", "beta", 0..1000),
    ]);
    let load = Load::of(&fleet.guests);
    assert_eq!(load.saved(true), Estimate::exact(500.0));
    assert_eq!(load.needs(&FOLDED), 3030.0 - 500.0);
    let mut added = Load::default();
    for guest in &fleet.guests {
        let needs = added.needs_with(guest, &FOLDED);
        added.add(guest);
        assert_eq!(needs, added.needs(&FOLDED));
    }
    assert_eq!((added.saved(true), added.needs(&FOLDED)), (load.saved(true), load.needs(&FOLDED)));
}

#[test]
fn zero_pages_and_repeats_count_for_one_guest() {
    let row = Row { resident_pages: 1600, zero_pages: 400, ..guest("a", "1", "acme", 0..1000) };
    let load = Load::of(&fleet([host("a", 10_000), row]).guests);
    assert_eq!((load.saved(true).pages, load.saved(false).pages), (600.0, 200.0));
}

#[test]
fn guest_may_take_all_that_it_was_given_beyond_savings() {
    let row = |kept: Option<u64>| Row {
        memory_bytes: Some(2000 << 12),
        guaranteed_bytes: kept.map(|pages| pages << 12),
        resident_pages: 1500,
        ..guest("a", "1", "acme", 0..1000)
    };
    let needs = |kept, storm| {
        let load = Load::of(&fleet([host("a", 10_000), row(kept)]).guests);
        load.needs(&Rules { storm, zero_pages: true })
    };
    assert_eq!(needs(None, 0.0), 2010.0 - 500.0);
    // All folded pages break at once.
    assert_eq!(needs(None, 1.0), 2010.0);
    // Withdrawable memory takes the place of this room, up to the size of the folded pages.
    assert_eq!((needs(Some(1800), 1.0), needs(Some(100), 1.0)), (1810.0, 1510.0));
}

#[test]
fn last_epoch_of_each_host_counts() {
    let old = |row: Row| Row { epoch_s: 900, ..row };
    let rows = [
        host("a", 100),
        old(guest("a", "gone", "acme", 0..10)),
        guest("a", "1", "acme", 0..10),
        old(host("b", 50)),
        old(guest("b", "1", "acme", 0..10)),
    ];
    let fleet = fleet(rows);
    let found: Vec<_> = fleet.guests.iter().map(|g| (g.host, g.id.as_str(), g.epoch_s)).collect();
    assert_eq!(found, [(0, "1", 1000), (1, "1", 900)]);
    assert_eq!(fleet.hosts.iter().map(|h| h.room_pages).collect::<Vec<_>>(), [100, 50]);
    let lone = collected([guest("c", "1", "acme", 0..10)]);
    assert!(lone.unwrap_err().to_string().contains("host c has no row of its own"));
}

#[test]
fn rows_in_any_order_and_twice_are_one_fleet() {
    let rows = [
        host("a", 100),
        guest("a", "1", "acme", 0..10),
        guest("a", "2", "beta", 0..10),
        host("b", 50),
        guest("b", "1", "acme", 0..10),
    ];
    let told = |fleet: &Fleet| format!("{fleet:?}");
    let once = fleet(rows.clone());
    assert_eq!(told(&fleet(rows.iter().rev().cloned())), told(&once));
    assert_eq!(told(&fleet(rows.iter().chain(&rows).cloned())), told(&once));
}

#[test]
fn sketch_of_other_contents_than_its_row_is_refused() {
    let lies = Row { distinct_pages: 100, ..guest("a", "1", "acme", 0..50) };
    let error = collected([host("a", 100), lies]).unwrap_err().to_string();
    assert!(error.contains("is of 50 contents, and its row says 100"), "{error}");
    let estimated = Row { distinct_pages: 30_500, resident_pages: 30_500, ..guest("a", "1", "acme", 0..30_000) };
    assert_eq!(fleet([host("a", 100), estimated]).guests[0].distinct_pages, 30_500);
}

/// Sketches are compared by the name of their key. A guest without a sketch counts as one under a key of its own, named
/// `HOST/ID`. A third guest whose real key has that name must not match it.
#[test]
fn guest_without_sketch_shares_with_nobody() {
    let bare = |id: &str| Row { sketch: None, ..guest("a", id, "acme", 0..1000) };
    let named = guest("a", "3", "a/1", 0..1000);
    let fleet = fleet([host("a", 10_000), bare("1"), bare("2"), named]);
    assert_eq!(Load::of(&fleet.guests).saved(true), Estimate::exact(0.0));
}
