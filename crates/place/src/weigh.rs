//! Memory of one guest: what its host gets back when the guest moves, and how much of its content another host has
//! already.

use crate::key::Key;
use crate::row::Row;
use crate::sketch::{Settings, take};
use crate::table::{self, Source};
use crate::theta::{MOST_BYTES, Sketch};
use anyhow::{Context, bail};
use cli::exit::Stop;
use guest::{Guest, Leaving};
use page::pages_to_bytes;
use serde::Serialize;
use std::collections::BTreeSet;

/// Most attempts to read a guest's pages, which may change while they are read.
const LOOKS: usize = 5;

/// Memory of a guest, as `pagefold-place weigh` prints it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Weighed {
    /// Guest memory that folding reaches, without zero pages, in bytes. Folded pages are included.
    pub ram_bytes: u64,
    /// Memory that the guest takes on another host like this one before anything is folded there, in bytes. A huge page
    /// counts as a whole.
    pub takes_bytes: u64,
    /// Backed memory in the last bytes of the guest's RAM (`--last`), in bytes.
    pub last_bytes: u64,
    /// Memory that this host gets back when the guest leaves, in bytes: private pages, those of its VMM too, and slots
    /// that nobody else maps.
    pub frees_bytes: u64,
    /// The part of `ram_bytes` whose content guests of the other host hold already; `None` if unknown.
    pub already_there_bytes: Option<u64>,
    /// Why `already_there_bytes` is unknown although a table was given.
    pub problem: Option<String>,
}

/// Measures a guest's memory, and compares its contents with the guests of another host in `tables`. `last` is the
/// length of the end of its RAM, in bytes.
///
/// # Errors
/// The guest has ended or cannot be read, a key cannot be read, or the tables are of several hosts.
pub fn weigh(
    guest: &Guest,
    key_of: &dyn Fn(&str) -> anyhow::Result<Key>,
    settings: &Settings<'_>,
    tables: &[Source],
    last: u64,
) -> anyhow::Result<Weighed> {
    let look = || take(std::slice::from_ref(guest), key_of, settings);
    let (mut rows, mut missed) = look()?;
    // A member may fold and unfold pages while it is read. Then mappings are missed, and all is read again.
    for _ in 1..LOOKS {
        if missed.is_empty() {
            break;
        }
        (rows, missed) = look()?;
    }
    if let Some(missed) = missed.first() {
        bail!("{missed}");
    }
    let row = rows.iter().find(|row| row.guest.is_some()).context("no row of the guest")?;
    let ram_pages = row.resident_pages.saturating_sub(row.zero_pages);
    let (already, problem) = match already_there(row, tables)? {
        Some(pages) => (Some(pages_to_bytes((pages as u64).min(ram_pages))), None),
        None if tables.is_empty() => (None, None),
        None => {
            let group = &guest.group;
            let why =
                "no guest there has that key: is it another group, or is GROUP.key not the same file on both hosts?";
            (None, Some(format!("the sketches tell nothing of group {group}: {why}")))
        }
    };
    let (ram_bytes, leaving) = (pages_to_bytes(ram_pages), Leaving::of(guest, last, u64::MAX)?);
    Ok(Weighed {
        ram_bytes,
        takes_bytes: leaving.takes_bytes.unwrap_or(0).max(ram_bytes),
        last_bytes: leaving.last_bytes.min(ram_bytes),
        frees_bytes: leaving.frees_bytes,
        already_there_bytes: already,
        problem,
    })
}

/// Number of the guest's contents that guests of another host hold, by that host's table; `None` if no sketch there has
/// the same key.
fn already_there(row: &Row, tables: &[Source]) -> anyhow::Result<Option<f64>> {
    let (mut hosts, mut there) = (BTreeSet::new(), Vec::new());
    let read = |bytes: &Option<Vec<u8>>| Sketch::read(bytes.as_deref().context("a row without a sketch")?, MOST_BYTES);
    table::read(tables, &mut |other| {
        hosts.insert(other.host.clone());
        if other.guest.is_some() && other.key == row.key {
            there.push(read(&other.sketch)?);
        }
        Ok(())
    })?;
    if hosts.len() > 1 {
        let text =
            format!("these sketches are of {} hosts: name the table of the one where the guest goes", hosts.len());
        return Err(Stop::Usage(text).into());
    }
    if there.is_empty() {
        return Ok(None);
    }
    Ok(Some(read(&row.sketch)?.common(&Sketch::union_of(there.iter())).pages))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(host: &str, guest: &str, key: &str, contents: std::ops::Range<u64>) -> Row {
        let hashes = contents.map(|n| (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1).collect();
        Row {
            host: host.into(),
            group: Some("g".into()),
            guest: Some(guest.into()),
            key: Some(key.into()),
            sketch: Some(Sketch::sample(i64::MAX as u64, hashes).bytes()),
            ..Row::default()
        }
    }

    #[test]
    fn contents_are_there_that_any_guest_with_the_key_holds() {
        let dir = tempfile::tempdir().unwrap();
        let found = |rows: &[Row]| {
            let path = dir.path().join("table");
            table::write(&path, rows).unwrap();
            already_there(&row("here", "x", "k", 0..100), &[Source::named(&path)])
        };
        let there = [row("b", "1", "k", 0..20), row("b", "2", "k", 10..30), row("b", "3", "other", 0..100)];
        assert_eq!(found(&there).unwrap(), Some(30.0));
        assert_eq!(found(&there[2..]).unwrap(), None);
        assert!(found(&[row("b", "1", "k", 0..20), row("c", "1", "k", 0..20)]).is_err());
    }
}
