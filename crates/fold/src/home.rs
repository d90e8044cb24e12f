//! Members that begin with the pages of a template: they map the template's file privately (`MAP_PRIVATE`) and as a
//! whole. Each page of such a mapping has a *home*, the slot at the page's place in the template. It shows the bytes of
//! its home (is *at home*) until it is written. From then on it is *away*.
//!
//! ```text
//!            Released                       Folded, and its slot is its home
//!   at home ----------> away: like any ------------------------------------> at home
//!                       other page         (the member drops its own copy: the mapping heals)
//! ```
//!
//! The worker keeps no record of each page at home: it keeps ranges of pages with a home, and a [`Mark`] for each page
//! that is away. The slots have a hold and a reference for each page at home, as if the page had been folded to it. A
//! page that is away is folded to its home rather than to any other slot.

use crate::plan::Planner;
use crate::settle::NotBooked;
use crate::table::{CHUNK_PAGES, Mark, MemberId, PageRef};
use crate::transition::{Event, Lie};
use page::PoolSlot;
use std::collections::BTreeMap;
use wire::SlotRun;

/// Most ranges of pages with a home that a member may have; claims of more are refused. 256 GiB of memory take 1024.
const MOST_RANGES: usize = 2048;

/// A member's pages that have a home, in ranges. For the number of each range's first page: the number of the page
/// behind the range, and the home of the first page.
#[derive(Debug, Default)]
pub struct Homes(BTreeMap<u64, (u64, PoolSlot)>);

impl Homes {
    /// The home of the page with this number in the address space; `None` if it has none.
    pub fn of(&self, page: u64) -> Option<PoolSlot> {
        let (first, (end, slot)) = self.0.range(..=page).next_back()?;
        if page < *end { slot.add((page - first) as u32) } else { None }
    }

    fn touches(&self, first: u64, end: u64) -> bool {
        self.0.range(..end).next_back().is_some_and(|(_, (behind, _))| *behind > first)
    }

    /// The ranges: number of the first page, number of the page behind the last, and home of the first page.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (u64, u64, PoolSlot)> {
        self.0.iter().map(|(first, (end, slot))| (*first, *end, *slot))
    }

    /// Bytes of memory that the ranges take.
    pub fn bytes(&self) -> usize {
        self.0.len() * 32
    }
}

impl Planner {
    /// Books a member's message that it maps these slots of a template, and that the pages show them. Returns `true` if
    /// members are to share nothing and any of these slots has a page frame.
    ///
    /// # Errors
    /// The member cannot have these slots at these addresses.
    pub fn at_home(&mut self, member: MemberId, run: SlotRun) -> Result<bool, NotBooked> {
        let (first, lie) = (run.start.page(), Lie::Held(run.start, run.slot));
        let end = first + u64::from(run.pages);
        let is_within =
            u64::from(run.slot.index()) + u64::from(run.pages) <= u64::from(self.pool.slots_of(run.slot.segment()));
        let homes = &self.place(member).homes;
        if homes.of(first) == Some(run.slot) && homes.of(end - 1) == run.slot.add(u32::from(run.pages) - 1) {
            return Ok(self.back_home(member, run));
        }
        if !run.slot.is_of_template() || !is_within || homes.touches(first, end) || homes.0.len() >= MOST_RANGES {
            return Err(lie.into());
        }
        for number in first / CHUNK_PAGES..=(end - 1) / CHUNK_PAGES {
            let Some(chunk) = self.place(member).chunks.get(&number).copied() else { continue };
            for at in (0..CHUNK_PAGES).filter(|at| (first..end).contains(&(number * CHUNK_PAGES + at))) {
                let page = PageRef::new(chunk, at as usize);
                if self.table.is_any(page, &[Mark::Sent, Mark::Mapped, Mark::Away]) {
                    return Err(lie.into());
                }
                self.forget(page);
            }
        }
        let before = self.place(member).mapped;
        (0..run.pages).filter_map(|n| run.slot.add(n.into())).for_each(|slot| self.came_home(member, slot));
        let place = self.place(member);
        place.homes.0.insert(first, (end, run.slot));
        let is_any = place.mapped > before;
        self.look_again();
        Ok(self.policy.intra_member_only && is_any)
    }

    /// Books that pages which were away show their homes again, because the member has discarded their private copies.
    /// If members are to share nothing, returns whether the member shares these slots with others.
    fn back_home(&mut self, member: MemberId, run: SlotRun) -> bool {
        let before = self.place(member).mapped;
        for n in 0..run.pages {
            let (page, home) = (self.page_at(member, run.start.add_pages(n.into())), run.slot.add(n.into()));
            let (Some(page), Some(home)) = (page, home) else { continue };
            // A page of an unanswered request to fold is skipped: the answer says whether it was folded.
            if !self.table.is(page, Mark::Away) || self.table.is_any(page, &[Mark::Sent, Mark::Mapped]) {
                continue;
            }
            self.forget(page);
            self.advance(page, Event::Home(home));
        }
        let is_any = self.place(member).mapped > before;
        self.look_again();
        self.policy.intra_member_only && is_any
    }

    /// The home of a page; `None` if it has none.
    pub(crate) fn home(&self, page: PageRef) -> Option<PoolSlot> {
        let place = self.places.get(self.table.member(page).0 as usize)?.as_ref()?;
        place.homes.of(self.table.chunk_number(page) * CHUNK_PAGES + page.place() as u64)
    }

    /// Ends the records of all pages at home of a member whose connection has ended. Returns their slots, each with the
    /// page's hold.
    pub(crate) fn leave_homes(&mut self, member: MemberId) -> Vec<PoolSlot> {
        let (mut slots, homes) = (Vec::new(), std::mem::take(&mut self.place(member).homes));
        for (first, end, home) in homes.ranges() {
            for page in first..end {
                let chunk = self.place(member).chunks.get(&(page / CHUNK_PAGES)).copied();
                let away = chunk.map_or(0, |chunk| self.table.chunk(chunk).all(Mark::Away));
                if away >> (page % CHUNK_PAGES) & 1 == 0 {
                    slots.extend(home.add((page - first) as u32).and_then(|slot| self.left_home(member, slot)));
                }
            }
        }
        slots
    }
}

#[cfg(test)]
#[path = "home_tests.rs"]
pub(crate) mod tests;
