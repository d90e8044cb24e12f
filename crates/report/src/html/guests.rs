//! Every guest's figures.

use super::text::{NAME_CHARS, table};
use crate::table::{Align, shorten};
use crate::words;
use census::GuestFindings;
use cli::size::mib;
use page::{Region, pages_to_bytes};
use std::io::{self, Write};

/// A column of figures: heading, pages of a guest if they were counted, and whether it is shown when it is nothing but
/// zeros.
type Column = (&'static str, fn(&GuestFindings) -> Option<u64>, bool);

const COLUMNS: [Column; 13] = [
    ("resident", |g| Some(g.resident_pages), true),
    ("zero", |g| Some(g.zero_pages), true),
    ("distinct", |g| Some(g.distinct_pages), true),
    ("twice in itself", |g| Some(g.duplicates.within), true),
    ("in its group", |g| Some(g.duplicates.group), true),
    ("in other groups", |g| Some(g.duplicates.other_groups), true),
    ("on the host", |g| g.duplicates.host, true),
    ("shared already", |g| Some(g.already_shared_pages), true),
    ("incre\u{ad}mental", |g| Some(g.incremental_pages), true),
    ("if folded", |g| Some(g.incremental_folded_pages), true),
    ("held by KSM", |g| Some(g.ksm_pages), false),
    ("in swap", |g| Some(g.swapped_pages), false),
    ("not readable", |g| Some(g.unreadable_pages), false),
];

/// Writes the table of guests, and a table of the memory that would become free if a guest ended, by region.
pub fn write(out: &mut dyn Write, guests: &[GuestFindings]) -> io::Result<()> {
    if guests.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "<section id=\"guests\"><h2>Every guest</h2><p>In MiB. <b>Incremental</b> is what would be free if the guest \
         went; <b>if folded</b>, what would be if everything that can be merged were.</p>"
    )?;
    let shown: Vec<_> =
        COLUMNS.iter().filter(|(_, of, always)| *always || guests.iter().any(|g| of(g) > Some(0))).collect();
    let mut columns = vec![("guest", Align::Left), ("group", Align::Left), ("kind", Align::Left)];
    columns.extend(shown.iter().map(|(name, ..)| (*name, Align::Right)));
    let row = |g: &GuestFindings| {
        let names = [shorten(&g.name, NAME_CHARS), shorten(&g.group, NAME_CHARS), g.kind.clone()];
        names.into_iter().chain(shown.iter().map(|(_, of, _)| of(g).map_or("\u{2013}".to_owned(), size))).collect()
    };
    table(out, "Guests", &columns, guests.iter().map(row))?;
    by_region(out, guests)?;
    writeln!(out, "</section>")
}

fn by_region(out: &mut dyn Write, guests: &[GuestFindings]) -> io::Result<()> {
    let present: Vec<_> =
        Region::ALL.into_iter().filter(|r| guests.iter().any(|g| g.regions.iter().any(|x| x.region == *r))).collect();
    let mut columns = vec![("guest", Align::Left), ("together", Align::Right)];
    columns.extend(present.iter().map(|r| (words::region(*r), Align::Right)));
    let row = |g: &GuestFindings| {
        let of = |r: &Region| g.regions.iter().filter(|x| x.region == *r).map(|x| x.incremental_pages).sum();
        let pages = [g.incremental_pages].into_iter().chain(present.iter().map(of));
        [shorten(&g.name, NAME_CHARS)].into_iter().chain(pages.map(size)).collect()
    };
    writeln!(out, "<details><summary>Incremental memory by region, in MiB</summary>")?;
    table(out, "Incremental memory by region in MiB", &columns, guests.iter().map(row))?;
    writeln!(out, "</details>")
}

fn size(pages: u64) -> String {
    mib(pages_to_bytes(pages))
}
