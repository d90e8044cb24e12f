//! Output of `pagefold census`: each guest's memory, the duplicates in it, the savings of each group on its own, and
//! the price of keeping groups apart. In MiB, within 100 columns.

use crate::table::{Align, Table, shorten, wrap};
use crate::words::{self, plural};
use census::{ByKinds, CostPart, Findings, FrameIdentity, GuestFindings};
use cli::size::{bytes, count, mib, percent};
use page::{GuestPageKind, pages_to_bytes};
use std::io::{self, Write};

/// Greatest length of a line, in characters.
const COLUMNS: usize = 100;
/// Greatest lengths of the names of a guest and of a group beside figures, in characters.
const NAME_CHARS: [usize; 2] = [18, 12];

/// Writes the tables for `findings` to `out`.
pub fn write(out: &mut dyn Write, findings: &Findings) -> io::Result<()> {
    header(out, findings)?;
    guests(out, &findings.guests)?;
    duplicates(out, &findings.guests)?;
    kinds(out, &findings.guests)?;
    opportunity(out, findings)?;
    groups(out, findings)?;
    writeln!(out)?;
    let sentences = [
        Some(words::price_of_isolation(findings)),
        Some(words::already_shared(findings)),
        words::run_lengths(findings),
        findings.change.as_ref().map(words::change),
    ];
    for sentence in sentences.into_iter().flatten() {
        write!(out, "{}", wrap(&sentence, COLUMNS))?;
    }
    Ok(())
}

/// The course of the census, and remarks that are needed to read the tables.
fn header(out: &mut dyn Write, findings: &Findings) -> io::Result<()> {
    let host = &findings.host;
    writeln!(
        out,
        "{}, {} in {:.2} s: {:.2} GiB/s on {}",
        plural(findings.guests.len() as u64, "guest"),
        plural(host.pages_scanned, "page"),
        host.seconds,
        host.hash_gib_per_s,
        plural(host.threads as u64, "thread"),
    )?;
    if host.frames == FrameIdentity::Inferred {
        write!(out, "{}", wrap(words::FRAMES_INFERRED, COLUMNS))?;
    }
    if host.passes > 1 {
        writeln!(
            out,
            "{} over the hash space, index {}; {} changed between passes.",
            plural(u64::from(host.passes), "pass"),
            bytes(host.index_bytes),
            plural(host.drifted_pages, "page"),
        )?;
    }
    Ok(())
}

fn guests(out: &mut dyn Write, guests: &[GuestFindings]) -> io::Result<()> {
    type Figure = fn(&GuestFindings) -> u64;
    let mut figures: Vec<(&str, Figure)> = vec![
        ("resident", |g| g.resident_pages),
        ("zero", |g| g.zero_pages),
        ("distinct", |g| g.distinct_pages),
        ("shared", |g| g.already_shared_pages),
        ("folded", |g| g.folded_pages),
        ("incremental", |g| g.incremental_pages),
        ("if folded", |g| g.incremental_folded_pages),
    ];
    // Without folding in any guest, the column is left out.
    figures.retain(|(name, figure)| *name != "folded" || guests.iter().any(|g| figure(g) > 0));
    let mut columns = vec![("guest", Align::Left), ("group", Align::Left)];
    columns.extend(figures.iter().map(|(name, _)| (*name, Align::Right)));
    let mut table = Table::new(&columns);
    for g in guests {
        table.row(names(g).into_iter().chain(figures.iter().map(|(_, figure)| pages_mib(figure(g)))));
    }
    section(out, "What each guest holds, in MiB", &table)
}

fn duplicates(out: &mut dyn Write, guests: &[GuestFindings]) -> io::Result<()> {
    let mut table = Table::new(&[
        ("guest", Align::Left),
        ("group", Align::Left),
        ("within itself", Align::Right),
        ("in its group", Align::Right),
        ("in other groups", Align::Right),
        ("on the host", Align::Right),
    ]);
    for g in guests {
        let d = g.duplicates;
        table.row(
            names(g).into_iter().chain([Some(d.within), Some(d.group), Some(d.other_groups), d.host].map(counted_mib)),
        );
    }
    section(out, "What of it is held once more, and where, in MiB", &table)?;
    if guests.iter().any(|g| g.duplicates.host.is_none()) {
        writeln!(out, "-: the host's own memory was not counted; --include-host and --host-file do that.")?;
    }
    Ok(())
}

/// VMs from inside: their memory by kind, and the cost of each part.
fn kinds(out: &mut dyn Write, guests: &[GuestFindings]) -> io::Result<()> {
    let known = || guests.iter().filter(|g| !g.kinds.is_empty());
    let present = |kind: GuestPageKind| known().any(|g| g.kinds.iter().any(|k| k.kind == kind && k.backed_pages > 0));
    let columns: Vec<GuestPageKind> = GuestPageKind::ALL.into_iter().filter(|kind| present(*kind)).collect();
    let mut kinds = Table::new(&[("kind", Align::Left), ("all VMs", Align::Right), ("incremental", Align::Right)]);
    for kind in columns {
        let of_kind = || known().flat_map(|g| &g.kinds).filter(|k| k.kind == kind);
        let backed = of_kind().map(|k| k.backed_pages).sum();
        let incremental = of_kind().map(|k| k.incremental_pages).sum();
        kinds.row([words::guest_kind(kind).to_owned(), pages_mib(backed), pages_mib(incremental)]);
    }
    section(out, "What the VMs' memory is inside, in MiB", &kinds)?;
    let mut heads = vec![("guest", Align::Left)];
    heads.extend(CostPart::ALL.map(|part| (words::cost_part(part), Align::Right)));
    let mut costs = Table::new(&heads);
    for g in known() {
        let figures = g.cost().into_iter().map(|cost| pages_mib(cost.incremental_pages));
        costs.row([shorten(&g.name, NAME_CHARS[0])].into_iter().chain(figures));
    }
    section(out, "What each VM costs, by whose memory it is (incremental), in MiB", &costs)
}

fn opportunity(out: &mut dyn Write, findings: &Findings) -> io::Result<()> {
    let mut table = Table::new(&[
        ("", Align::Left),
        ("anon-anon", Align::Right),
        ("file-file", Align::Right),
        ("anon-file", Align::Right),
        ("total", Align::Right),
    ]);
    let o = &findings.opportunity;
    let rows: [(&str, Option<ByKinds>); 4] = [
        ("within a guest", Some(o.within)),
        ("guest and host", o.host),
        ("between guests", Some(o.between)),
        ("total", Some(o.total)),
    ];
    for (place, k) in rows {
        let figure = |of: fn(ByKinds) -> u64| counted_mib(k.map(of));
        let figures = [figure(|k| k.anon_anon), figure(|k| k.file_file), figure(|k| k.anon_file), figure(|k| k.total)];
        table.row([place.to_owned()].into_iter().chain(figures));
    }
    section(out, "Opportunity: superfluous copies by place and kind, in MiB", &table)
}

fn groups(out: &mut dyn Write, findings: &Findings) -> io::Result<()> {
    let mut table = Table::new(&[
        ("group", Align::Left),
        ("guests", Align::Right),
        ("resident", Align::Right),
        ("can save", Align::Right),
        ("share", Align::Right),
    ]);
    for g in &findings.groups {
        table.row([
            shorten(&g.name, COLUMNS / 2),
            count(g.guests.len() as u64),
            pages_mib(g.resident_pages),
            pages_mib(g.saved_pages),
            percent(g.saved_pages, g.resident_pages),
        ]);
    }
    let mut whole = |name: &str, pages| {
        table.row([name.to_owned(), String::new(), String::new(), pages_mib(pages)]);
    };
    whole("in files groups share", findings.across_groups_saved_pages);
    whole("only across groups", findings.isolation_price_pages);
    whole("all guests together", findings.all_saved_pages);
    section(out, "What merging could save, in MiB", &table)
}

fn section(out: &mut dyn Write, title: &str, table: &Table) -> io::Result<()> {
    if table.is_empty() {
        return Ok(());
    }
    write!(out, "\n{title}\n{table}")
}

fn names(guest: &GuestFindings) -> [String; 2] {
    [shorten(&guest.name, NAME_CHARS[0]), shorten(&guest.group, NAME_CHARS[1])]
}

/// A figure; `-` if it was not counted.
fn counted_mib(pages: Option<u64>) -> String {
    pages.map_or("-".to_owned(), pages_mib)
}

fn pages_mib(pages: u64) -> String {
    mib(pages_to_bytes(pages))
}
