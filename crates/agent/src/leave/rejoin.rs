//! Makes one mapping again of memory that is one to the program, and several to the kernel.
//!
//! Memory that was moved with its pages (`mremap`) keeps the offsets of its first place. Memory that has grown beside it got its own
//! pages before the two could join. Such mappings never join others by themselves. But fresh memory that has no page does:
//! so it takes their place, piece by piece, and gets their pages.

use super::{READ_WRITE, Side, is_free, pieces_of, put_fresh, replace};
use crate::enrol;
use crate::fold::Folder;
use crate::maps::{self, Kind, Mapping};
use crate::table::{self, Traits};
use act::Watch;
use host::Pagemap;
use page::PageRange;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most pages that are copied for that: 1 GiB.
const MOST_PAGES: u64 = 1 << 18;
/// Most looks at all memory; and looks one after another after which nothing could be changed, until the rest is left as it
/// is: 16, 4.
const MOST_LOOKS: u32 = 16;
const IN_VAIN: u32 = 4;
/// Longest time of a look for which the program's threads may stand still: 5 ms.
const LOOK_TIME: Duration = Duration::from_millis(5);

/// Memory that is one mapping to the program.
struct Region {
    range: PageRange,
    traits: Traits,
}

/// See the module. Huge pages stay as they are, and so does what somebody holds.
pub fn rejoin(folder: &mut Folder, pagemap: &Pagemap) {
    let (mut left, mut in_vain, mut looked) = (MOST_PAGES, 0, Duration::MAX);
    for _ in 0..MOST_LOOKS {
        // Between a look and the first change, a program that runs may move what was found.
        if looked < LOOK_TIME {
            folder.hold();
        }
        let began = Instant::now();
        let all = regions(folder, pagemap);
        looked = began.elapsed();
        in_vain += 1;
        for Region { range, traits } in &all {
            let Some(rest) = left.checked_sub(range.pages) else { continue };
            left = rest;
            let mut side = Side::None;
            for run in runs(pagemap, *range) {
                if !folder.hold() {
                    break;
                }
                if rebuild(folder, pagemap, run, *traits, side) {
                    in_vain = 0;
                }
                side = Side::Before;
            }
        }
        folder.parts().2.rest();
        if all.is_empty() || in_vain == IN_VAIN {
            return;
        }
    }
}

/// All regions of which the kernel sees parts.
fn regions(folder: &mut Folder, pagemap: &Pagemap) -> Vec<Region> {
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
    let following = Arc::clone(folder.parts().0.following());
    let region = |(whole, parts): (Mapping, u32)| {
        let huge = || pagemap.huge_ranges(whole.range.start, whole.range.end()).ok();
        if parts == 1 || !huge()?.is_empty() {
            return None;
        }
        let mut table = table::lock();
        enrol::agree(&mut table, &following, whole.range);
        let traits = table.traits(whole.range).filter(|traits| traits.asked)?;
        Some(Region { range: whole.range, traits })
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

/// Puts fresh memory in the place of a run, which gets its pages. Says whether that was done. The program's threads are stopped.
fn rebuild(
    folder: &mut Folder,
    pagemap: &Pagemap,
    (run, has_pages): (PageRange, bool),
    traits: Traits,
    side: Side,
) -> bool {
    let table = table::lock();
    let following = Arc::clone(folder.parts().0.following());
    // Without such a neighbour, it begins a mapping.
    let neighbour = side.neighbour((&following, &table), run, traits).flatten();
    if !following.may_replace(run, traits, Kind::Anonymous) {
        return false;
    }
    let watch = following.watch();
    if watch.register(run, Watch::MissingAndWrites).is_err() {
        return false;
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
    is_done
}
