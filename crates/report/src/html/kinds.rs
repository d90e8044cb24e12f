//! VMs from inside: the memory of each by kind inside the guest, backed by the host or not.

use super::bars::{self, Bar, Part};
use super::text::{NAME_CHARS, folding, legend, table};
use crate::table::{Align, shorten};
use crate::words;
use census::{CostPart, GuestFindings};
use cli::size::{bytes, mib};
use page::{GuestPageKind, pages_to_bytes};
use std::io::{self, Write};

/// Writes the bars of all VMs on one scale, and a table of their cost.
pub fn write(out: &mut dyn Write, guests: &[GuestFindings]) -> io::Result<()> {
    let known: Vec<&GuestFindings> = guests.iter().filter(|g| !g.kinds.is_empty()).collect();
    if known.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "<section id=\"kinds\"><h2>The VMs from inside</h2><p>What the memory that the host backs is to the guest itself: its \
         kernel, its page cache, its processes, and what it has free. The mark shows all memory the guest was \
         given.</p><figure>"
    )?;
    let backed =
        |g: &GuestFindings, kind| g.kinds.iter().filter(|k| k.kind == kind).map(|k| k.backed_pages).sum::<u64>();
    let present = GuestPageKind::ALL.into_iter().filter(|kind| known.iter().any(|g| backed(g, *kind) > 0));
    let mut keys: Vec<(&str, &str)> = Vec::new();
    for kind in present {
        let key = (class(kind), meaning(kind));
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    legend(out, keys)?;
    let given = |g: &GuestFindings| g.kinds.iter().map(|k| k.pages).sum::<u64>();
    let full = known.iter().map(|g| given(g)).max().unwrap_or(0);
    let bar = |g: &&GuestFindings| {
        let part = |kind| {
            let size = bytes(pages_to_bytes(backed(g, kind)));
            Part { class: class(kind), amount: backed(g, kind), title: format!("{} {size}", words::guest_kind(kind)) }
        };
        let all: u64 = g.kinds.iter().map(|k| k.backed_pages).sum();
        Bar {
            name: g.name.clone(),
            note: g.group.clone(),
            parts: GuestPageKind::ALL.map(part).into(),
            mark: Some((given(g), format!("given {}", bytes(pages_to_bytes(given(g)))))),
            figure: bytes(pages_to_bytes(all)),
        }
    };
    folding(out, &known, "further guests", |out, some| bars::write(out, full, some.iter().map(bar)))?;
    writeln!(out, "</figure><details><summary>What each VM costs, in MiB</summary>")?;
    let mut columns = vec![("guest", Align::Left)];
    columns.extend(CostPart::ALL.map(|part| (words::cost_part(part), Align::Right)));
    let row = |g: &&GuestFindings| {
        let figures = g.cost().into_iter().map(|cost| mib(pages_to_bytes(cost.incremental_pages)));
        [shorten(&g.name, NAME_CHARS)].into_iter().chain(figures).collect()
    };
    table(out, "Incremental cost in MiB", &columns, known.iter().map(row))?;
    writeln!(out, "<p class=\"quiet\">Frames that would be free if the guest went.</p></details></section>")
}

/// The meaning of a kind's colour; kinds of one colour share it.
const fn meaning(kind: GuestPageKind) -> &'static str {
    match kind {
        GuestPageKind::KernelText | GuestPageKind::KernelRodata => "kernel text and read-only data",
        _ => words::guest_kind(kind),
    }
}

const fn class(kind: GuestPageKind) -> &'static str {
    match kind {
        GuestPageKind::KernelText | GuestPageKind::KernelRodata => "k-text",
        GuestPageKind::KernelData => "k-data",
        GuestPageKind::PageTables => "k-tables",
        GuestPageKind::Slab => "k-slab",
        GuestPageKind::KernelStack => "k-stack",
        GuestPageKind::PageCache => "k-cache",
        GuestPageKind::Shmem => "k-shmem",
        GuestPageKind::Anonymous => "k-anon",
        GuestPageKind::Free => "k-free",
        GuestPageKind::Balloon => "k-balloon",
        GuestPageKind::Reserved => "k-reserved",
        GuestPageKind::Unknown => "k-unknown",
    }
}
