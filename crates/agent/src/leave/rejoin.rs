//! Makes one mapping again of memory that is one to the program, and several to the kernel.
//!
//! Memory that was moved with its pages (`mremap`) keeps the offsets of its first place. Memory that has grown beside it got its own
//! pages before the two could join. Such mappings never join others by themselves. But fresh memory that has no page does:
//! so it takes their place, piece by piece, and gets their pages.

use super::{READ_WRITE, Side, is_free, pieces_of, put_fresh, replace};
use crate::fold::Folder;
use crate::maps::{self, Kind, Mapping};
use crate::table::{self, Traits};
use act::Watch;
use host::Pagemap;
use page::PageRange;
use std::sync::Arc;

/// Most pages that are copied for that: 1 GiB.
const MOST_PAGES: u64 = 1 << 18;

/// Memory that is one mapping to the program.
struct Region {
    range: PageRange,
    traits: Traits,
}

/// See the module. Huge pages stay as they are, and so does what somebody holds.
pub fn rejoin(folder: &mut Folder, pagemap: &Pagemap) {
    let mut left = MOST_PAGES;
    for region in regions(pagemap) {
        let Some(rest) = left.checked_sub(region.range.pages) else { continue };
        left = rest;
        let mut side = Side::None;
        for (piece, has_pages) in runs(pagemap, region.range) {
            if !folder.hold() {
                break;
            }
            rebuild(folder, pagemap, (piece, has_pages), region.traits, side);
            side = Side::Before;
        }
        folder.parts().2.rest();
    }
}

/// All regions of which the kernel sees parts.
fn regions(pagemap: &Pagemap) -> Vec<Region> {
    let all = maps::mappings(table::everything(), true).unwrap_or_default();
    let is_plain = |mapping: &&Mapping| {
        mapping.anonymous && mapping.access == READ_WRITE && !mapping.locked && !mapping.special && !mapping.heap
    };
    let mut groups: Vec<(Mapping, u32)> = Vec::new();
    for mapping in all.iter().filter(is_plain) {
        match groups.last_mut() {
            Some((last, parts)) if last.range.end() == mapping.range.start && last.advice == mapping.advice => {
                last.range.pages += mapping.range.pages;
                *parts += 1;
            }
            _ => groups.push((*mapping, 1)),
        }
    }
    let table = table::lock();
    let region = |(whole, parts): (Mapping, u32)| {
        let traits = table.traits(whole.range).filter(|traits| traits.asked && parts > 1)?;
        let huge = pagemap.huge_ranges(whole.range.start, whole.range.end()).ok()?;
        huge.is_empty().then_some(Region { range: whole.range, traits })
    };
    groups.into_iter().filter_map(region).collect()
}

/// The pieces of a range, and whether they have pages: all or none.
fn runs(pagemap: &Pagemap, range: PageRange) -> Vec<(PageRange, bool)> {
    let mut runs: Vec<(PageRange, bool)> = Vec::new();
    for piece in pieces_of(range) {
        let mut entries = Vec::new();
        if pagemap.read(piece.start, piece.pages, &mut entries).is_err() {
            return Vec::new();
        }
        let first = runs.len();
        for (page, entry) in (0..piece.pages).map(|n| piece.start.add_pages(n)).zip(entries) {
            let has_page = entry.present() || entry.swapped();
            match runs[first..].last_mut() {
                Some((run, has_pages)) if *has_pages == has_page => run.pages += 1,
                _ => runs.push((PageRange { start: page, pages: 1 }, has_page)),
            }
        }
    }
    runs
}

/// Puts fresh memory in the place of a run, which gets its pages. The program's threads are stopped.
fn rebuild(folder: &mut Folder, pagemap: &Pagemap, (run, has_pages): (PageRange, bool), traits: Traits, side: Side) {
    let table = table::lock();
    let following = Arc::clone(folder.parts().0.following());
    // Without such a neighbour, it begins a mapping.
    let neighbour = side.neighbour((&following, &table), run, traits).flatten();
    if !following.may_replace(run, traits, Kind::Anonymous) {
        return;
    }
    let watch = following.watch();
    if watch.register(run, Watch::MissingAndWrites).is_err() {
        return;
    }
    let is_done = if has_pages {
        is_free(folder, &table, pagemap, run) && replace(&following, (run, neighbour), traits.advice).is_ok()
    } else {
        // A thread that touches it sleeps from here on.
        let is_empty = pagemap.present_ranges(run.start, run.end()).is_ok_and(|present| present.is_empty());
        is_empty && put_fresh(&following, (run, neighbour), traits.advice, None).is_ok()
    };
    if is_done {
        following.hold().forget(run);
    } else {
        following.let_writers_in(run);
        let _ = watch.unregister(run);
    }
    following.end_section(&[]);
    let _ = watch.wake(run);
}
