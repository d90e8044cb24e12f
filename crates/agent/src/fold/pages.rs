//! Pages that are examined, copied or made private, without being folded.

use crate::round::{scan, spans};
use crate::section::{Section, cut};
use crate::table;
use act::{HUGE_PAGES, make_private};
use host::Pagemap;
use page::PageRange;
use rustix::fd::OwnedFd;

/// Makes pages exclusive that the kernel still treats as shared, because a child that shared them has ended and they
/// were not written since. This does what a write does: if nobody else maps them, the kernel does not copy them. They
/// can be folded when they have rested again.
pub fn reclaim(pagemap: &Pagemap, range: PageRange) {
    let mut entries = Vec::new();
    let _table = table::lock();
    if pagemap.read(range.start, range.pages, &mut entries).is_ok()
        && entries.iter().all(|e| e.present() && e.exclusive() && !e.file_or_shared())
    {
        // If it fails, the pages stay as they are.
        let _ = make_private(range);
    }
}

/// Finds folded pages that the member has written since: they have become private, and their slots are released. If the
/// kernel does not note writes, it also finds written pages that were folded as zeros.
///
/// # Errors
/// The kernel refused to look.
pub fn find_broken(pagemap: &Pagemap) -> host::Result<()> {
    for range in scan(pagemap, &spans(), Pagemap::private_ranges)? {
        // The lock is taken anew for each range, because a thread of the program may wait for it.
        let mut table = table::lock();
        for run in table.slot_runs(range) {
            table.set_broken(PageRange { start: run.start, pages: run.pages.into() });
        }
        for zeroed in table.zeroed_pages(range) {
            table.set_pending(zeroed);
        }
    }
    find_away(pagemap)
}

/// Number of pages that count as broken and are not private: they map a pool without a worker.
///
/// # Errors
/// The kernel refused to look.
pub fn orphaned_pages(pagemap: &Pagemap) -> host::Result<u64> {
    let broken = table::lock().broken_pages(table::everything());
    let mut pages: u64 = broken.iter().map(|range| range.pages).sum();
    for own in scan(pagemap, &broken, Pagemap::private_ranges)? {
        pages = pages.saturating_sub(own.pages);
    }
    Ok(pages)
}

/// As [`find_broken`], for memory with homes.
fn find_away(pagemap: &Pagemap) -> host::Result<()> {
    let homes: Vec<PageRange> = {
        let known = table::lock().known(table::everything());
        known.into_iter().filter(|(_, traits)| traits.asked && traits.home.is_some()).map(|(range, _)| range).collect()
    };
    for range in scan(pagemap, &homes, Pagemap::private_ranges)? {
        let mut table = table::lock();
        for run in table.slot_runs(range) {
            table.set_broken(PageRange { start: run.start, pages: run.pages.into() });
        }
        table.at_home(range).into_iter().for_each(|range| table.set_broken(range));
    }
    homes.into_iter().try_for_each(|range| find_returned(pagemap, range))
}

/// Finds pages that show their homes again, because the program has discarded their private copies in a way that
/// bypasses the hooks.
fn find_returned(pagemap: &Pagemap, home: PageRange) -> host::Result<()> {
    let mut entries = Vec::new();
    let broken = table::lock().broken_pages(home);
    for piece in broken.into_iter().flat_map(|range| cut(range, HUGE_PAGES)) {
        let mut table = table::lock();
        for range in table.broken_pages(piece) {
            pagemap.read(range.start, range.pages, &mut entries)?;
            for (n, entry) in (0..).zip(&entries) {
                let page = PageRange { start: range.start.add_pages(n), pages: 1 };
                let is_own = entry.swapped() || entry.present() && !entry.file_or_shared();
                if !is_own && table.placement(page) == Some(false) {
                    table.come_back(page);
                }
            }
        }
    }
    Ok(())
}

/// Copies pages into the donation window, in the order of `runs`. Returns which of them could be copied.
pub fn donate(section: &Section, window: &OwnedFd, runs: &[PageRange]) -> Vec<bool> {
    let mut given = Vec::new();
    for run in runs {
        let at = given.len() as u64;
        // The table's lock is held, so that the pages still are what the table says when they are read.
        let table = table::lock();
        let may = |range| table.is_refoldable(range) || table.is_foldable(range) && section.may_touch(range);
        let page = |n| PageRange { start: run.start.add_pages(n), pages: 1 };
        let open = if may(*run) { run.pages } else { (0..run.pages).take_while(|n| may(page(*n))).count() as u64 };
        let written = act::write_pages(window, at, PageRange { pages: open, ..*run });
        given.extend((0..run.pages).map(|n| n < written));
    }
    given
}
