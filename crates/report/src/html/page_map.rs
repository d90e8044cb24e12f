//! The page map: every guest as rows of small squares in address order. Each square stands for some neighbouring
//! pages, and has the colour of the state of most of them. All guests have one scale, coarse enough to keep the file
//! small.

use super::bars::{self, Part};
use super::text::{Text, folding, legend};
use crate::words;
use census::{GuestFindings, MapCell, Share};
use cli::size::{bytes, count, percent};
use page::{Region, pages_to_bytes};
use std::fmt::Write as _;
use std::io::{self, Write};

/// Number of squares in a row.
const COLUMNS: usize = 128;
/// Greatest number of squares of one guest, to bound the size of the file.
const GUEST_CELLS: usize = 4096;
/// Greatest number of squares of all guests, to bound the size of the file.
const ALL_CELLS: usize = 65_536;

/// Squares of one region of one guest: numbers of pages by [`Share`].
type Cells = Vec<[u32; Share::ALL.len()]>;

/// Writes one map for each guest, under a common key.
pub fn write(out: &mut dyn Write, guests: &[GuestFindings]) -> io::Result<()> {
    let guests: Vec<_> = guests.iter().filter(|guest| pages_of(&guest.page_map) > 0).collect();
    if guests.is_empty() {
        return Ok(());
    }
    let scale = scale(&guests);
    writeln!(
        out,
        "<section id=\"maps\"><h2>Page maps</h2><p>What each guest\u{2019}s pages are and who else holds the same. The bar \
         counts them all. Below it lies the memory, part by part in the order of its addresses: a square is up to {} \
         ({} pages), coloured by what most of its pages are. Of what applies to a page, the first in the key \
         counts. Point at a square, or walk with the arrow keys, for its figures.</p><figure>",
        bytes(pages_to_bytes(scale)),
        count(scale),
    )?;
    legend(out, Share::ALL.map(|share| (class(share), meaning(share))))?;
    folding(out, &guests, "further guests", |out, some| some.iter().try_for_each(|guest| map(out, guest, scale)))?;
    writeln!(out, "</figure></section>")
}

/// One guest: its totals in words, and a block of squares for each region.
fn map(out: &mut dyn Write, guest: &GuestFindings, scale: u64) -> io::Result<()> {
    writeln!(
        out,
        "<div class=\"map\"><h3>{} <span class=\"quiet\">{}</span></h3>",
        Text(&guest.name),
        Text(&guest.group),
    )?;
    shares(out, &guest.page_map)?;
    for region in Region::ALL {
        let cells = merge(cells_of(guest, region), scale);
        if !cells.is_empty() {
            block(out, guest, region, &cells)?;
        }
    }
    writeln!(out, "</div>")
}

/// The squares of one region. `data-cells` carries their figures for the hints under the pointer.
fn block(out: &mut dyn Write, guest: &GuestFindings, region: Region, cells: &Cells) -> io::Result<()> {
    let pages = guest.regions.iter().filter(|r| r.region == region).map(|r| r.resident_pages).sum();
    let size = bytes(pages_to_bytes(pages));
    let name = words::region(region);
    let rows = cells.len().div_ceil(COLUMNS);
    write!(
        out,
        "<div class=\"block\"><span>{name}</span><span class=\"quiet\">{size}</span><svg class=\"cells\" \
         viewBox=\"0 0 {COLUMNS} {rows}\" tabindex=\"0\" role=\"img\" aria-label=\"{}: {name}, {size}\" \
         data-cells=\"{}\">",
        Text(&guest.name),
        encode(cells)
    )?;
    for share in Share::ALL {
        let path = path(cells, share);
        if !path.is_empty() {
            write!(out, "<path class=\"{}\" d=\"{path}\"/>", class(share))?;
        }
    }
    writeln!(out, "<rect class=\"grid\" width=\"{COLUMNS}\" height=\"{rows}\"/></svg></div>")
}

/// Number of pages that a full square stands for, the same for all guests. It begins as the pages of the fullest cell,
/// and is doubled until all maps keep within the bounds.
fn scale(guests: &[&GuestFindings]) -> u64 {
    let largest = guests.iter().flat_map(|g| &g.page_map).map(|cell| pages_of([cell])).max().unwrap_or(1);
    let whole = guests.iter().map(|g| pages_of(&g.page_map)).max().unwrap_or(1);
    let mut scale = largest.max(1);
    while scale < whole {
        let cells: Vec<_> = guests.iter().map(|guest| cells_at(guest, scale)).collect();
        if cells.iter().all(|n| *n <= GUEST_CELLS) && cells.iter().sum::<usize>() <= ALL_CELLS {
            break;
        }
        scale *= 2;
    }
    scale
}

/// Number of squares that a guest takes at `scale`.
fn cells_at(guest: &GuestFindings, scale: u64) -> usize {
    Region::ALL.into_iter().map(|region| merge(cells_of(guest, region), scale).len()).sum()
}

/// The cells of one region that have pages, in address order.
fn cells_of(guest: &GuestFindings, region: Region) -> impl Iterator<Item = &MapCell> {
    guest.page_map.iter().filter(move |cell| cell.region == Some(region))
}

/// Joins neighbouring cells until they make squares of `scale` pages.
fn merge<'a>(cells: impl Iterator<Item = &'a MapCell>, scale: u64) -> Cells {
    let mut merged = Cells::new();
    let mut open = 0;
    for cell in cells {
        let pages = pages_of([cell]);
        match merged.last_mut() {
            Some(last) if open + pages <= scale => {
                last.iter_mut().zip(cell.pages).for_each(|(sum, n)| *sum = sum.saturating_add(n));
                open += pages;
            }
            _ => {
                merged.push(cell.pages);
                open = pages;
            }
        }
    }
    merged
}

/// The [`Share`] of most pages of a square; if several are equally common, the first.
fn dominating(cell: &[u32; Share::ALL.len()]) -> Share {
    let most = cell.iter().max().copied().unwrap_or(0);
    Share::ALL.into_iter().find(|share| cell[*share as usize] == most).unwrap_or(Share::Unique)
}

/// SVG path of the squares that are mostly `share`: a line as wide as a square for each run in a row.
fn path(cells: &Cells, share: Share) -> String {
    let mut path = String::new();
    for (y, row) in cells.chunks(COLUMNS).enumerate() {
        let mut x = 0;
        for run in row.chunk_by(|a, b| dominating(a) == dominating(b)) {
            if dominating(&run[0]) == share {
                // Writing to a string cannot fail.
                let _ = write!(path, "M{x} {y}.5h{}", run.len());
            }
            x += run.len();
        }
    }
    path
}

/// Squares in the code that the script reads: `a12g20` is 12 pages of the first share and 20 of the seventh. Squares
/// are separated by blanks. A square equal to the one before it is left empty.
fn encode(cells: &Cells) -> String {
    let mut code = String::new();
    let mut before = None;
    for cell in cells {
        if before.is_some() {
            code.push(' ');
        }
        if before != Some(cell) {
            for (letter, n) in ('a'..).zip(cell).filter(|(_, n)| **n > 0) {
                let _ = write!(code, "{letter}{n}");
            }
        }
        before = Some(cell);
    }
    code
}

fn pages_of<'a>(cells: impl IntoIterator<Item = &'a MapCell>) -> u64 {
    cells.into_iter().flat_map(|cell| cell.pages).map(u64::from).sum()
}

/// A guest's exact numbers of pages by share; squares only show the prevailing one.
fn shares(out: &mut dyn Write, cells: &[MapCell]) -> io::Result<()> {
    let sum = |share: Share| -> u64 { cells.iter().map(|cell| u64::from(cell.pages[share as usize])).sum() };
    let whole = pages_of(cells);
    let part = |share| {
        let title = format!("{} {}", percent(sum(share), whole), meaning(share));
        Part { class: class(share), amount: sum(share), title }
    };
    let mut parts: Vec<_> = Share::ALL.map(part).into();
    parts.retain(|part| part.amount > 0);
    let told: Vec<_> = parts.iter().map(|part| part.title.as_str()).collect();
    let size = bytes(pages_to_bytes(whole));
    writeln!(
        out,
        "<p class=\"quiet\">{}</p><div class=\"block\"><span>altogether</span><span class=\"quiet\">{size}</span>",
        Text(&told.join(", "))
    )?;
    bars::picture(out, whole, "altogether", &parts, None)?;
    writeln!(out, "</div>")
}

/// The text of the key. The script has the same list.
const fn meaning(share: Share) -> &'static str {
    match share {
        Share::Zero => "zeros",
        Share::AlreadyShared => "shared already",
        Share::Group => "also in the group",
        Share::OtherGroups => "only in other groups",
        Share::Within => "twice in the guest",
        Share::Host => "also on the host",
        Share::Unique => "nowhere else",
    }
}

/// Class in the style sheet that gives a [`Share`] its colour.
const fn class(share: Share) -> &'static str {
    match share {
        Share::Zero => "s-zero",
        Share::AlreadyShared => "s-shared",
        Share::Group => "s-group",
        Share::OtherGroups => "s-others",
        Share::Within => "s-within",
        Share::Host => "s-host",
        Share::Unique => "s-unique",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(pages: [u32; 7]) -> MapCell {
        MapCell { pages, region: Some(Region::Heap) }
    }

    #[test]
    fn neighbours_join_until_a_square_is_full() {
        let cells = [cell([1, 0, 0, 0, 0, 0, 1]), cell([0, 0, 2, 0, 0, 0, 0]), cell([0, 0, 0, 0, 0, 0, 1])];
        assert_eq!(merge(cells.iter(), 4), [[1, 0, 2, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1]]);
        assert_eq!(merge(cells.iter(), 2).len(), 3);
        assert!(merge([].iter(), 2).is_empty());
    }

    #[test]
    fn a_path_covers_each_square_of_its_share_once() {
        let cells: Cells = (0..COLUMNS + 3)
            .map(|n| if n % 2 == 0 || n == COLUMNS + 1 { [0, 0, 5, 0, 0, 0, 2] } else { [3, 0, 0, 0, 0, 0, 0] })
            .collect();
        let covered = |share| -> usize {
            path(&cells, share).split('h').skip(1).map(|s| s.split('M').next().unwrap().parse::<usize>().unwrap()).sum()
        };
        assert_eq!(covered(Share::Group) + covered(Share::Zero), cells.len());
        assert!(path(&cells, Share::Group).ends_with("M0 1.5h3"));
        assert_eq!(path(&cells, Share::Host), "");
    }

    #[test]
    fn the_code_names_what_is_there_and_leaves_repetitions_empty() {
        let a = [12, 0, 0, 0, 0, 0, 20];
        assert_eq!(encode(&vec![a, a, [0, 0, 32, 0, 0, 0, 0]]), "a12g20  c32");
    }

    #[test]
    fn one_scale_keeps_every_guest_within_bounds() {
        let guest = |cells| GuestFindings { page_map: vec![cell([0, 0, 0, 0, 0, 0, 16]); cells], ..Default::default() };
        let (small, large) = (guest(10), guest(20_000));
        assert_eq!(scale(&[&small]), 16);
        assert_eq!(scale(&[&small, &large]), 128);
        assert_eq!(scale(&vec![&small; 10_000]), 32, "five squares each");
        assert_eq!(scale(&vec![&small; 70_000]), 256, "more guests than squares: one each");
        let uneven = GuestFindings { page_map: vec![cell([9, 0, 0, 0, 0, 0, 8]); 3], ..Default::default() };
        assert_eq!(scale(&[&small, &uneven]), 17, "cells of 16 and of 17 pages are squares alike");
    }
}
