//! Every guest's figures.

use super::text::table;
use crate::size::mib;
use crate::words;
use census::GuestFindings;
use page::{Region, pages_to_bytes};
use std::io::{self, Write};

/// Writes the table of guests, and what would go with each of them, by region.
pub fn write(out: &mut dyn Write, guests: &[GuestFindings]) -> io::Result<()> {
    if guests.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "<section><h2>Every guest</h2><p>In MiB. <b>Incremental</b> is what would be free if the guest went; \
         <b>if folded</b>, what would be if everything that can be merged were.</p>"
    )?;
    let headings = [
        "guest",
        "group",
        "kind",
        "resident",
        "zero",
        "distinct",
        "twice within itself",
        "in its group",
        "in other groups",
        "on the host",
        "shared already",
        "by KSM",
        "incremental",
        "if folded",
        "in swap",
        "unreadable",
    ];
    table(out, "Guests", &headings, guests.iter().map(row))?;
    let present: Vec<_> =
        Region::ALL.into_iter().filter(|r| guests.iter().any(|g| g.regions.iter().any(|x| x.region == *r))).collect();
    let mut headings = vec!["guest", "incremental"];
    headings.extend(present.iter().map(|r| words::region(*r)));
    let by_region = |g: &GuestFindings| {
        let of = |r: &Region| g.regions.iter().filter(|x| x.region == *r).map(|x| x.incremental_pages).sum();
        let pages = [g.incremental_pages].into_iter().chain(present.iter().map(of));
        [g.name.clone()].into_iter().chain(pages.map(size)).collect()
    };
    writeln!(out, "<details><summary>Incremental memory by region, in MiB</summary>")?;
    table(out, "Incremental memory by region in MiB", &headings, guests.iter().map(by_region))?;
    writeln!(out, "</details></section>")
}

fn row(g: &GuestFindings) -> Vec<String> {
    let d = &g.duplicates;
    let pages = [
        g.resident_pages,
        g.zero_pages,
        g.distinct_pages,
        d.within,
        d.group,
        d.other_groups,
        d.host,
        g.already_shared_pages,
        g.ksm_pages,
        g.incremental_pages,
        g.incremental_folded_pages,
        g.swapped_pages,
        g.unreadable_pages,
    ];
    [g.name.clone(), g.group.clone(), g.kind.clone()].into_iter().chain(pages.map(size)).collect()
}

fn size(pages: u64) -> String {
    mib(pages_to_bytes(pages))
}
