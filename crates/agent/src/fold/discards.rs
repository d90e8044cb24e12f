//! Mapping anonymous memory where folded pages were discarded.

use super::{Folder, parts_by_page};
use crate::follow::{Following, Shared};
use crate::home;
use crate::maps::Kind;
use crate::section::pieces;
use crate::{calls, raw, table};
use host::Pagemap;
use page::{PageRange, PageSet};
use std::sync::Arc;
use wire::Target;

impl Folder {
    /// Maps anonymous memory where the program has discarded folded pages, as far as these have lost their page-table
    /// entries. After that, the kernel handles their faults without the follower.
    ///
    /// # Errors
    /// The kernel refused to look.
    pub fn settle_discards(&mut self, pagemap: &Pagemap) -> host::Result<()> {
        let following = Arc::clone(self.section.following());
        let discarded: Vec<PageRange> = following.hold().all_discarded().ranges().collect();
        if discarded.is_empty() || !self.hold() {
            return Ok(());
        }
        for (piece, _) in discarded.into_iter().flat_map(|range| pieces(range.start, range.pages, Target::Zero)) {
            let mut table = table::lock();
            // While this lock is held, the follower maps no page for a thread that touches one: a page without an entry
            // stays without one.
            let held = following.hold();
            let mut settled = Vec::new();
            for gone in held.all_discarded().within(piece) {
                settle(&mut table, (&following, &held), pagemap, gone, &mut settled)?;
            }
            drop(held);
            // A child that was forked before this has the mapping of the pool. Its follower copies these records when
            // the message of the fork is read, so they are forgotten only after that.
            let mut held = following.hold_caught_up();
            settled.into_iter().for_each(|range| held.forget(range));
            drop(held);
            let _ = following.watch().wake(piece);
        }
        self.turns.rest();
        Ok(())
    }
}

/// See [`Folder::settle_discards`]. Adds to `settled` the pages whose discards no longer need to be remembered.
fn settle(
    table: &mut table::Table,
    (following, shared): (&Following, &Shared),
    pagemap: &Pagemap,
    gone: PageRange,
    settled: &mut Vec<PageRange>,
) -> host::Result<()> {
    let mut entries = Vec::new();
    pagemap.read(gone.start, gone.pages, &mut entries)?;
    let is_absent = |page: PageRange| {
        let entry = &entries[(page.start.page() - gone.start.page()) as usize];
        !entry.present() && !entry.swapped()
    };
    let mut pooled = PageSet::new();
    table.pooled_pages(gone).into_iter().for_each(|range| pooled.insert(range));
    let with_homes: Vec<_> = pooled.within(gone).into_iter().flat_map(|range| table.known(range)).collect();
    for (part, traits) in with_homes.into_iter().filter(|(_, traits)| traits.home.is_some()) {
        for page in (0..part.pages).map(|n| PageRange { start: part.start.add_pages(n), pages: 1 }) {
            settled.extend(home::settle(table, (following, shared), (page, traits), is_absent(page)));
        }
    }
    for (from, pages) in parts_by_page(gone, is_absent) {
        let absent = PageRange { start: gone.start.add_pages(from), pages };
        for range in pooled.within(absent) {
            for (part, traits) in table.known(range).into_iter().filter(|(_, traits)| traits.home.is_none()) {
                if following.may_replace(part, traits, Kind::Pool)
                    && raw::error(calls::map_fresh(part, traits)).is_none()
                {
                    table.discard(part);
                    settled.push(part);
                }
            }
        }
    }
    // Discards of memory outside mappings of the pool need not be remembered: it was unmapped, or is private.
    settled.append(&mut pooled.missing(gone));
    Ok(())
}
