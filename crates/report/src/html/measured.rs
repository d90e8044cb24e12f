//! The end of the report: run lengths, change, the course of the census, missing parts, and a glossary.

use super::bars::{self, Bar, Part};
use super::text::{Text, table};
use crate::table::Align;
use crate::words::{self, plural};
use census::{Findings, FrameIdentity, HostFindings, Partial};
use cli::size::{bytes, count};
use page::pages_to_bytes;
use std::io::{self, Write};

/// Writes the end of the report.
pub fn write(out: &mut dyn Write, findings: &Findings) -> io::Result<()> {
    run_lengths(out, findings)?;
    if let Some(change) = &findings.change {
        writeln!(out, "<section><h2>Change</h2><p>{}</p></section>", Text(&words::change(change)))?;
    }
    how(out, &findings.host)?;
    partial(out, findings)?;
    glossary(out)
}

fn run_lengths(out: &mut dyn Write, findings: &Findings) -> io::Result<()> {
    let Some(sentence) = words::run_lengths(findings) else { return Ok(()) };
    writeln!(
        out,
        "<section id=\"runs\"><h2>Runs</h2><p>{} Long runs are cheap to merge: each is one mapping. The bars count pages \
         by the length of the run that they are part of.</p><figure>",
        Text(&sentence)
    )?;
    let (runs, pages) = (&findings.runs.runs_by_log2_length, &findings.runs.pages_by_log2_length);
    let bar = |(log2, (&runs, &pages)): (usize, (&u64, &u64))| Bar {
        name: lengths(log2),
        note: plural(runs, "run"),
        parts: vec![Part { class: "s-group", amount: pages, title: plural(pages, "page") }],
        mark: None,
        figure: plural(pages, "page"),
    };
    bars::write(out, pages.iter().copied().max().unwrap_or(0), runs.iter().zip(pages).enumerate().map(bar))?;
    writeln!(out, "</figure></section>")
}

/// The lengths that one bar covers: `1 page`, `2\u{2013}3 pages`, ...
fn lengths(log2: usize) -> String {
    match 1u64.checked_shl(log2 as u32) {
        Some(1) => "1 page".into(),
        Some(least) => format!("{}\u{2013}{} pages", count(least), count(least.saturating_mul(2) - 1)),
        None => "longer".into(),
    }
}

fn how(out: &mut dyn Write, host: &HostFindings) -> io::Result<()> {
    let frames = match host.frames {
        FrameIdentity::Exact => "exact, by page frame number",
        FrameIdentity::Inferred => "inferred from file and address",
    };
    let facts = [
        ("pages scanned", count(host.pages_scanned)),
        ("pages read and fingerprinted", count(host.pages_hashed)),
        ("time", format!("{:.2} s", host.seconds)),
        ("speed", format!("{:.2} GiB/s", host.hash_gib_per_s)),
        ("threads", count(host.threads as u64)),
        ("page frames", frames.into()),
        ("largest index", bytes(host.index_bytes)),
        ("most memory of the census itself", host.peak_rss_bytes.map_or("not told".into(), bytes)),
        ("passes over the hash space", count(u64::from(host.passes))),
        ("changed between passes", plural(host.drifted_pages, "page")),
        (
            "host\u{2019}s own memory",
            host.host_resident_pages.map_or("not counted".into(), |pages| bytes(pages_to_bytes(pages))),
        ),
    ];
    writeln!(out, "<section id=\"measured\"><h2>How it was measured</h2><dl class=\"facts\">")?;
    for (what, figure) in facts {
        writeln!(out, "<div><dt>{what}</dt><dd>{figure}</dd></div>")?;
    }
    writeln!(out, "</dl></section>")
}

fn partial(out: &mut dyn Write, findings: &Findings) -> io::Result<()> {
    if findings.partial.is_empty() {
        return Ok(());
    }
    writeln!(out, "<section id=\"partial\"><h2>What could not be read</h2>")?;
    let row = |p: &Partial| vec![p.guest.clone(), p.pid.to_string(), p.reason.clone()];
    let columns = [("guest", Align::Left), ("process", Align::Right), ("what is missing and why", Align::Left)];
    table(out, "What could not be read", &columns, findings.partial.iter().map(row))?;
    writeln!(out, "</section>")
}

/// Terms of the report, with their explanations.
const WORDS: [(&str, &str); 10] = [
    ("guest", "A virtual machine, a container, or a process that was named."),
    ("group", "Guests that trust each other and may therefore share pages: a tenant, a trust domain."),
    ("page, frame", "4 KiB of memory as a process sees it; and the piece of the host\u{2019}s memory that holds it."),
    (
        "resident set (RSS)",
        "All pages that are mapped, shared or not: counts what is shared once for each who shares it.",
    ),
    ("proportional set (PSS)", "A frame that n processes map counts 1/n for each. Adds up to what is really held."),
    ("unique set (USS)", "Frames that nobody else maps."),
    ("anonymous, file", "Memory that programs filled themselves; memory that is a copy of a file\u{2019}s content."),
    ("duplicate", "A frame with the same bytes as another one. One frame that many map is not a duplicate."),
    ("incremental", "What would be free if this guest went, and so what one more like it costs."),
    ("merging, folding", "Keeping one frame for equal pages, and copying it again for whoever writes to it."),
];

fn glossary(out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "<section id=\"words\"><h2>Words</h2><dl class=\"words\">")?;
    for (word, meaning) in WORDS {
        writeln!(out, "<div><dt>{word}</dt><dd>{meaning}</dd></div>")?;
    }
    writeln!(out, "</dl></section>")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_lengths_are_named_as_ranges() {
        assert_eq!([0, 1, 3, 10].map(lengths), ["1 page", "2–3 pages", "8–15 pages", "1,024–2,047 pages"]);
        assert_eq!(lengths(64), "longer");
    }
}
