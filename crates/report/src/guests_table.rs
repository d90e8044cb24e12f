//! Output of `pagefold guests`: each guest's memory by the kernel's own accounting, in total and by region. In MiB.

use crate::table::{Align, Table, shorten};
use crate::words;
use cli::size::mib;
use guest::Footprint;
use page::Region;
use std::io::{self, Write};

/// Greatest lengths of an id and of a group's name, in characters.
const NAME_CHARS: [usize; 2] = [26, 14];
/// Length of the bar that shows the parts of a footprint, in characters.
const BAR_CHARS: u64 = 24;

/// Writes what each guest holds, and where its PSS lies, as two tables. Without guests, nothing is written.
pub fn write(out: &mut dyn Write, footprints: &[Footprint]) -> io::Result<()> {
    if !footprints.is_empty() {
        write!(out, "What each guest holds, in MiB\n{}", totals(footprints))?;
        write!(out, "\nWhere its proportional set (PSS) lies, in MiB\n{}", regions(footprints))?;
    }
    Ok(())
}

/// One row per guest. Columns that would be empty throughout are left out.
fn totals(footprints: &[Footprint]) -> Table {
    type Figure = fn(&Footprint) -> Option<u64>;
    let figures: [(&str, Figure); 9] = [
        ("RAM", |f| f.guest.ram_bytes),
        ("RSS", |f| Some(f.rss_bytes)),
        ("PSS", |f| Some(f.pss_bytes)),
        ("USS", |f| Some(f.uss_bytes)),
        ("swap", |f| Some(f.swap_bytes).filter(|b| *b > 0)),
        ("KSM", |f| f.ksm_bytes.filter(|b| *b > 0)),
        ("folded", |f| Some(f.folded_bytes).filter(|b| *b > 0)),
        ("THP", |f| Some(f.thp_bytes).filter(|b| *b > 0)),
        ("hugetlb", |f| Some(f.hugetlb_bytes).filter(|b| *b > 0)),
    ];
    let figures: Vec<_> =
        figures.into_iter().filter(|(_, figure)| footprints.iter().any(|f| figure(f).is_some())).collect();
    let mut columns = vec![("guest", Align::Left), ("group", Align::Left), ("processes", Align::Right)];
    columns.extend(figures.iter().map(|(name, _)| (*name, Align::Right)));
    let mut table = Table::new(&columns);
    for f in footprints {
        let names = [shorten(&f.guest.id, NAME_CHARS[0]), shorten(&f.guest.group, NAME_CHARS[1])];
        let cells = names.into_iter().chain([f.guest.pids.len().to_string()]);
        table.row(cells.chain(figures.iter().map(|(_, figure)| figure(f).map_or("-".into(), mib))));
    }
    table
}

/// One row per guest and one column per region that any guest has, with a bar of the row.
fn regions(footprints: &[Footprint]) -> Table {
    let pss = |f: &Footprint, region: Region| f.regions.iter().find(|r| r.region == region).map_or(0, |r| r.pss_bytes);
    let present: Vec<Region> = Region::ALL
        .into_iter()
        .filter(|r| footprints.iter().any(|f| f.regions.iter().any(|x| x.region == *r)))
        .collect();
    let mut columns = vec![("guest", Align::Left)];
    columns.extend(present.iter().map(|r| (words::region(*r), Align::Right)));
    let legend = format!("split ({})", present.iter().map(|r| letter(*r).to_string()).collect::<Vec<_>>().join(" "));
    columns.push((&legend, Align::Left));
    let mut table = Table::new(&columns);
    for f in footprints {
        let parts: Vec<(char, u64)> = present.iter().map(|r| (letter(*r), pss(f, *r))).collect();
        let cells = [shorten(&f.guest.id, NAME_CHARS[0])].into_iter().chain(parts.iter().map(|(_, b)| mib(*b)));
        table.row(cells.chain([bar(&parts)]));
    }
    table
}

/// The letter of a region in the bar, in the order of the columns.
const fn letter(region: Region) -> char {
    match region {
        Region::GuestRam => 'R',
        Region::Heap => 'h',
        Region::Stack => 's',
        Region::TranslationCache => 't',
        Region::Files => 'f',
        Region::Shared => 'm',
        Region::Other => 'o',
        Region::PageCache => 'c',
    }
}

/// A bar of letters, one letter for each part. Its length is always the same, because boundaries are rounded rather
/// than lengths.
fn bar(parts: &[(char, u64)]) -> String {
    let whole: u64 = parts.iter().map(|(_, b)| b).sum();
    let mut bar = String::new();
    let (mut sum, mut drawn) = (0, 0);
    for (letter, bytes) in parts {
        sum += bytes;
        let until = (u128::from(sum) * u128::from(BAR_CHARS)).checked_div(u128::from(whole)).unwrap_or(0) as usize;
        bar.extend(std::iter::repeat_n(*letter, until - drawn));
        drawn = until;
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest::{Facts, Guest, GuestKind, RegionFootprint};

    const M: u64 = 1 << 20;

    fn footprint(kind: GuestKind, name: &str, ram_bytes: Option<u64>, split: &[(Region, u64)]) -> Footprint {
        let id = format!("{}:{name}", kind.name());
        let region = |(region, bytes): &(Region, u64)| RegionFootprint {
            region: *region,
            rss_bytes: bytes * 2,
            pss_bytes: *bytes,
            uss_bytes: bytes / 2,
            swap_bytes: 0,
        };
        let pss_bytes = split.iter().map(|(_, b)| b).sum::<u64>();
        Footprint {
            guest: Guest {
                group: id.clone(),
                id,
                name: name.into(),
                kind,
                pids: vec![1, 2],
                ram_bytes,
                facts: Facts::default(),
            },
            rss_bytes: pss_bytes * 2,
            pss_bytes,
            uss_bytes: pss_bytes / 2,
            swap_bytes: 0,
            ksm_bytes: Some(0),
            folded_bytes: 0,
            thp_bytes: 4 * M,
            hugetlb_bytes: 0,
            regions: split.iter().map(region).collect(),
        }
    }

    fn text(footprints: &[Footprint]) -> String {
        let mut out = Vec::new();
        write(&mut out, footprints).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_vm_and_a_container() {
        let guests = [
            footprint(GuestKind::Qemu, "acme-1", Some(256 * M), &[(Region::GuestRam, 90 * M), (Region::Heap, 30 * M)]),
            footprint(GuestKind::Lxc, "web\u{1b}[2J", None, &[(Region::Heap, 3 * M), (Region::Files, M)]),
        ];
        assert_eq!(
            text(&guests),
            "\
What each guest holds, in MiB
guest        group        processes    RAM    RSS    PSS   USS  THP
qemu:acme-1  qemu:acme-1          2  256.0  240.0  120.0  60.0  4.0
lxc:web?[2J  lxc:web?[2J          2      -    8.0    4.0   2.0  4.0

Where its proportional set (PSS) lies, in MiB
guest        guest RAM  heap  files  split (R h f)
qemu:acme-1       90.0  30.0      0  RRRRRRRRRRRRRRRRRRhhhhhh
lxc:web?[2J          0   3.0    1.0  hhhhhhhhhhhhhhhhhhffffff
"
        );
    }

    #[test]
    fn without_guests_there_is_no_table() {
        assert_eq!(text(&[]), "");
    }

    #[test]
    fn bars_are_equally_long_whatever_is_rounded() {
        assert_eq!(bar(&[('a', 1), ('b', 1), ('c', 1)]), "aaaaaaaabbbbbbbbcccccccc");
        assert_eq!(bar(&[('a', u64::MAX / 2), ('b', 1), ('c', u64::MAX / 2 - 1)]).len(), BAR_CHARS as usize);
        assert_eq!(bar(&[('a', 0)]), "");
        assert_eq!(bar(&[]), "");
    }
}
