//! The four main figures.

use super::text::Text;
use crate::words::{self, plural};
use census::{Findings, FrameIdentity};
use cli::size::{bytes, percent};
use page::pages_to_bytes;
use std::io::{self, Write};

/// Writes the figures, and the remarks that are needed to read them.
pub fn write(out: &mut dyn Write, findings: &Findings) -> io::Result<()> {
    let mapped: u64 = findings.guests.iter().map(|guest| guest.resident_pages).sum();
    let held = mapped.saturating_sub(findings.already_shared.saved_pages);
    let copies = findings.opportunity.total.total;
    let with_host = findings.opportunity.host.map_or(0, |host| host.total);
    let apart = findings.all_saved_pages.saturating_sub(findings.isolation_price_pages);
    let size = |pages| bytes(pages_to_bytes(pages));
    writeln!(out, "<section aria-label=\"In short\"><dl class=\"tiles\">")?;
    let guests = plural(findings.guests.len() as u64, "guest");
    let shared = size(findings.already_shared.saved_pages);
    let sharing = format!("in page frames; sharing saves {shared} already");
    tile(out, "", &format!("held by {guests}"), &size(held), &sharing)?;
    let mut more = format!("superfluous copies, {} of what is held", percent(copies, held));
    if with_host > 0 {
        more += &format!("; {} of them the host holds too", size(with_host));
    }
    tile(out, "", "held more than once", &size(copies), &more)?;
    let groups = plural(findings.groups.len() as u64, "group");
    let inside = format!("merging guests only with guests of their own group ({groups})");
    tile(out, "good", "can be saved inside groups", &size(apart), &inside)?;
    let price = "only merging across groups would save this";
    tile(out, "price", "is the price of isolation", &size(findings.isolation_price_pages), price)?;
    writeln!(out, "</dl>")?;
    if findings.host.frames == FrameIdentity::Inferred {
        writeln!(out, "<p class=\"note\">{}</p>", Text(words::FRAMES_INFERRED))?;
    }
    if !findings.partial.is_empty() {
        let missing = plural(findings.partial.len() as u64, "thing");
        writeln!(out, "<p class=\"note\">{missing} could not be read; <a href=\"#partial\">see what</a>.</p>")?;
    }
    writeln!(out, "</section>")
}

fn tile(out: &mut dyn Write, class: &str, what: &str, figure: &str, more: &str) -> io::Result<()> {
    writeln!(
        out,
        "<div class=\"tile {class}\"><dt>{}</dt><dd class=\"big\">{}</dd><dd>{}</dd></div>",
        Text(what),
        Text(figure),
        Text(more)
    )
}
