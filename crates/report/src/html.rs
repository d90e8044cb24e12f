//! The report: one HTML file that needs nothing else, neither network nor server.
//!
//! It is read from top to bottom:
//!
//! 1. the headline: the guests' memory, the duplicates in it, the savings inside groups, and the price of isolation;
//! 2. the pictures behind these figures, then the tables;
//! 3. the way the census was taken, and a glossary.
//!
//! Pictures are inline SVG. Their colours come from the style sheet, so that light, dark and print share the pictures.
//! Every picture has its figures in text beside it. Scripts only add hints under the pointer.
//!
//! Names of guests, groups and files are chosen by strangers: all text goes through `text::Text`. The file is
//! well-formed XML too, which is what its tests check.

mod bars;
mod curve;
mod footprint;
mod guests;
mod headline;
mod heat;
mod isolation;
mod kinds;
mod measured;
mod page_map;
mod text;

pub use text::{Text, legend, table};

use census::Findings;
use guest::Footprint;
use std::io::{self, Write};

/// The contents of a report.
#[derive(Clone, Copy)]
pub struct Report<'a> {
    /// Findings of the census.
    pub findings: &'a Findings,
    /// Footprints of the guests; empty where they were not taken.
    pub footprints: &'a [Footprint],
    /// Heading of the page.
    pub title: &'a str,
    /// Time and place of the census, for people.
    pub made_at: &'a str,
}

const STYLE: &str = include_str!("../assets/report.css");
const SCRIPT: &str = include_str!("../assets/report.js");

/// Pattern for savings that only merging across groups would bring: hatched, so that it does not depend on colour
/// alone.
const HATCH: &str = r#"<svg class="defs" width="0" height="0" aria-hidden="true"><defs>
<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect class="hatch-ground" width="6" height="6"/><rect class="hatch-line" width="2.2" height="6"/></pattern>
<pattern id="grid" width="1" height="1" patternUnits="userSpaceOnUse">
<path class="grid-line" d="M0 0H1M0 0V1"/></pattern></defs></svg>"#;

/// Navigation to the sections that every report has.
const NAVIGATION: &str = r##"<nav aria-label="In this report"><a href="#opportunity">opportunity</a>
<a href="#isolation">price of isolation</a> <a href="#measured">how it was measured</a> <a href="#words">words</a></nav>"##;

/// Writes the beginning of a page in the style of the report, up to its heading. `style` is added to the style sheet.
///
/// # Errors
/// `out` cannot be written.
pub fn begin(out: &mut dyn Write, title: &str, made_at: &str, style: &str) -> io::Result<()> {
    let title = Text(title);
    writeln!(
        out,
        r#"<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/><meta name="color-scheme" content="light dark"/>
<title>{title}</title><style>{STYLE}{style}</style></head><body>{HATCH}<main>
<header><h1>{title}</h1><p class="quiet">{}</p></header>"#,
        Text(made_at)
    )
}

/// Writes the report to `out`.
pub fn write(out: &mut dyn Write, report: &Report<'_>) -> io::Result<()> {
    begin(out, report.title, report.made_at, "")?;
    writeln!(out, "{NAVIGATION}")?;
    headline::write(out, report.findings)?;
    footprint::write(out, report.footprints)?;
    heat::write(out, report.findings)?;
    page_map::write(out, &report.findings.guests)?;
    kinds::write(out, &report.findings.guests)?;
    isolation::write(out, report.findings)?;
    curve::write(out, &report.findings.commonness)?;
    guests::write(out, &report.findings.guests)?;
    measured::write(out, report.findings)?;
    writeln!(out, "</main><div id=\"hint\" role=\"status\" hidden=\"\"></div>")?;
    writeln!(out, "<script>/*<![CDATA[*/\n{SCRIPT}/*]]>*/</script></body></html>")
}
