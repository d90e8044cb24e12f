//! Replacing pieces that lie in mappings of the pool by private memory, for the sake of something else than memory: a
//! process that forks often gets rid of mappings (`forks`), and a thread that waits for anonymous memory can go on
//! (`give_way`).

use super::Folder;
use crate::give_way;
use crate::pool::Pool;
use crate::section::cut;
use crate::{references, table};
use act::{HUGE_PAGES, MemberMemory, give_to_children, make_private};
use host::Pagemap;
use page::PageRange;
use rustix::io::Errno;
use std::time::{Duration, Instant};
use wire::MemberStats;

/// Time after which [`Folder::withdraw`] lets the agent's thread do other work: 20 ms.
const AT_ONCE: Duration = Duration::from_millis(20);

impl Folder {
    /// Makes one private mapping of each piece of memory that has mappings of the pool, the piece with the most
    /// mappings first. Ends when folding has at most `most` mappings, when `room` pages have become private, or after
    /// [`AT_ONCE`]. Returns whether it is done: few enough mappings are left, or there is no room for more private
    /// pages.
    pub fn withdraw(&mut self, with: (&Pagemap, &Pool), (most, mut room): (u64, u64), stats: &mut MemberStats) -> bool {
        let begin = Instant::now();
        let mut pieces = table::lock().pieces_in_pool();
        pieces.sort_unstable_by_key(|(_, mappings)| *mappings);
        let mut all: u64 = pieces.iter().map(|(_, mappings)| mappings).sum();
        while all > most
            && begin.elapsed() < AT_ONCE
            && let Some((piece, mappings)) = pieces.pop()
        {
            let Some(left) = room.checked_sub(piece.pages) else { return true };
            // This fails if a page is shared with a child that was just forked, or pinned.
            if self.withdraw_piece(with, piece, stats) == Ok(true) {
                (all, room) = (all - mappings, left);
            }
        }
        self.turns.rest();
        self.vmas.hurry(Instant::now());
        all <= most
    }

    /// Replaces mappings of the pool in this range by anonymous memory. A piece that is pinned, shared with a child, or
    /// may not be folded stays as it is. Ends when no thread waits for the range any more.
    pub fn make_anonymous(&mut self, with: (&Pagemap, &Pool), range: PageRange, stats: &mut MemberStats) {
        let parts: Vec<_> = {
            let table = table::lock();
            table.pooled_pages(range).into_iter().flat_map(|pooled| table.known(pooled)).collect()
        };
        for piece in parts.into_iter().flat_map(|(part, _)| cut(part, HUGE_PAGES)) {
            if !give_way::is_wanted(range) {
                break;
            }
            let _ = self.withdraw_piece(with, piece, stats);
        }
        self.turns.rest();
        self.vmas.hurry(Instant::now());
    }

    fn withdraw_piece(
        &mut self,
        (pagemap, pool): (&Pagemap, &Pool),
        piece: PageRange,
        stats: &mut MemberStats,
    ) -> Result<bool, Errno> {
        self.survey();
        let Ok(generation) = self.surveyed else { return Ok(false) };
        let Some(traits) = table::lock().open_traits(piece) else { return Ok(false) };
        let copy = if piece.pages == HUGE_PAGES {
            MemberMemory::huge_page(traits.advice.huge)?
        } else {
            let copy = MemberMemory::new(piece.pages)?;
            // Children that are forked before the copy has taken the piece's place do not get it.
            give_to_children(copy.range(), false)?;
            make_private(copy.range())?;
            copy
        };
        if !self.hold() {
            return Ok(false);
        }
        let table = table::lock();
        if table.open_traits(piece) != Some(traits) || references::generation() != generation {
            return Ok(false);
        }
        self.make_one_mapping(table, (pagemap, pool), (piece, traits), (copy, generation), stats)
    }
}
