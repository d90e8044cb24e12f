//! The price of isolation: all possible savings in three parts. Each group makes the first on its own. Frames that
//! groups share anyway bring the second. Only merging across groups would bring the third.

use super::bars::{self, Bar, Part};
use super::text::{NAME_CHARS, Text, folding, legend, table};
use crate::table::{Align, shorten};
use crate::words::{self, plural};
use census::{Findings, GroupFindings};
use cli::size::{bytes, mib, percent};
use page::pages_to_bytes;
use std::io::{self, Write};

/// Number of groups up to which the bar shows each; of more, it shows the sum.
const GROUPS_APART: usize = 8;

/// Writes a bar with the three parts of all savings, and a table of what each group can save.
pub fn write(out: &mut dyn Write, findings: &Findings) -> io::Result<()> {
    writeln!(
        out,
        "<section id=\"isolation\"><h2>The price of isolation</h2><p>{}</p>",
        Text(&words::price_of_isolation(findings))
    )?;
    if findings.all_saved_pages > 0 {
        write!(out, "<figure>")?;
        let shared = findings.across_groups_saved_pages > 0;
        let keys = [("s-group", "saved inside each group"), ("s-shared", "saved in files that groups share already")];
        legend(out, keys.into_iter().take(1 + usize::from(shared)).chain([("hatched", "only across groups")]))?;
        let size = bytes(pages_to_bytes(findings.all_saved_pages));
        let bar =
            Bar { name: "all guests".into(), note: String::new(), parts: parts(findings), mark: None, figure: size };
        bars::write(out, findings.all_saved_pages, [bar])?;
        write!(out, "</figure>")?;
    }
    if !findings.groups.is_empty() {
        groups(out, &findings.groups)?;
    }
    writeln!(out, "</section>")
}

fn groups(out: &mut dyn Write, groups: &[GroupFindings]) -> io::Result<()> {
    let row = |g: &GroupFindings| {
        vec![
            shorten(&g.name, NAME_CHARS),
            g.guests.len().to_string(),
            mib(pages_to_bytes(g.resident_pages)),
            mib(pages_to_bytes(g.saved_pages)),
            percent(g.saved_pages, g.resident_pages),
        ]
    };
    let figures = ["guests", "resident, MiB", "can save, MiB", "share"].map(|name| (name, Align::Right));
    let columns: Vec<_> = [("group", Align::Left)].into_iter().chain(figures).collect();
    folding(out, groups, "further groups", |out, some| {
        table(out, "What each group can save", &columns, some.iter().map(row))
    })
}

fn parts(findings: &Findings) -> Vec<Part> {
    let part = |class, what: &str, pages: u64| Part {
        class,
        amount: pages,
        title: format!("{what} {}", bytes(pages_to_bytes(pages))),
    };
    let mut parts: Vec<_> = if findings.groups.len() <= GROUPS_APART {
        findings.groups.iter().map(|g| part("s-group apart", &format!("inside {}", g.name), g.saved_pages)).collect()
    } else {
        let saved = findings.groups.iter().map(|g| g.saved_pages).sum();
        vec![part("s-group", &format!("inside {}", plural(findings.groups.len() as u64, "group")), saved)]
    };
    parts.push(part("s-shared", "in files that groups share already", findings.across_groups_saved_pages));
    parts.push(part("hatched", "only across groups", findings.isolation_price_pages));
    parts
}
