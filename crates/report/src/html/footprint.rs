//! Footprint bars: the proportional set of each guest by region, with a mark at its resident set.

use super::bars::{self, Bar, Part};
use super::text::{NAME_CHARS, Text, folding, legend, table};
use crate::table::{Align, shorten};
use crate::words;
use cli::size::{bytes, mib};
use guest::Footprint;
use page::Region;
use std::io::{self, Write};

/// Writes the bars of all guests on one scale, and the same as a table.
pub fn write(out: &mut dyn Write, footprints: &[Footprint]) -> io::Result<()> {
    if footprints.is_empty() {
        return Ok(());
    }
    let pss: u64 = footprints.iter().map(|f| f.pss_bytes).sum();
    let rss: u64 = footprints.iter().map(|f| f.rss_bytes).sum();
    writeln!(
        out,
        "<section id=\"footprints\"><h2>Footprints</h2><p>By the kernel\u{2019}s own accounting the guests together hold {}. Each bar is a \
         guest\u{2019}s <b>proportional set</b>: what it holds alone, and its share of what it holds with others. \
         The mark shows its <b>resident set</b>, which counts what is shared in full ({} together).</p><figure>",
        bytes(pss),
        bytes(rss),
    )?;
    let present: Vec<_> = Region::ALL.into_iter().filter(|r| footprints.iter().any(|f| pss_of(f, *r) > 0)).collect();
    legend(out, present.iter().map(|r| (class(*r), words::region(*r))))?;
    let full = footprints.iter().map(|f| f.rss_bytes.max(f.pss_bytes)).max().unwrap_or(0);
    folding(out, footprints, "further guests", |out, some| bars::write(out, full, some.iter().map(bar)))?;
    writeln!(out, "</figure><details><summary>The same as a table, in MiB</summary>")?;
    let mut columns = vec![("guest", Align::Left)];
    columns.extend(["resident", "proportional", "unique", "swap"].map(|name| (name, Align::Right)));
    columns.extend(present.iter().map(|r| (words::region(*r), Align::Right)));
    let row = |f: &Footprint| {
        let whole = [f.rss_bytes, f.pss_bytes, f.uss_bytes, f.swap_bytes];
        let regions = present.iter().map(|r| pss_of(f, *r));
        [shorten(&f.guest.shown_name(), NAME_CHARS)]
            .into_iter()
            .chain(whole.into_iter().chain(regions).map(mib))
            .collect()
    };
    table(out, "Footprints in MiB", &columns, footprints.iter().map(row))?;
    writeln!(out, "<p class=\"quiet\">{}</p></details></section>", Text("Regions are proportional sets."))
}

fn bar(f: &Footprint) -> Bar {
    let parts = Region::ALL.into_iter().map(|region| {
        let amount = pss_of(f, region);
        Part { class: class(region), amount, title: format!("{} {}", words::region(region), bytes(amount)) }
    });
    Bar {
        name: f.guest.shown_name(),
        note: f.guest.group.clone(),
        parts: parts.collect(),
        mark: Some((f.rss_bytes, format!("resident set {}", bytes(f.rss_bytes)))),
        figure: bytes(f.pss_bytes),
    }
}

fn pss_of(f: &Footprint, region: Region) -> u64 {
    f.regions.iter().filter(|r| r.region == region).map(|r| r.pss_bytes).sum()
}

/// Class in the style sheet that gives a region its colour.
const fn class(region: Region) -> &'static str {
    match region {
        Region::GuestRam => "r-ram",
        Region::Heap => "r-heap",
        Region::Stack => "r-stack",
        Region::TranslationCache => "r-tcg",
        Region::Files => "r-files",
        Region::Shared => "r-shared",
        Region::Other => "r-other",
        Region::PageCache => "r-cache",
    }
}
