//! Pages that wait for slots to be filled: mostly two for each slot, the donor (whose bytes fill the slot) and a
//! duplicate of it. Each pending slot has a *ticket*, the index of its list of pages here.

use crate::table::PageRef;

/// Most pages of all slots that may wait, without the first two of each slot. Further ones are not added.
const MOST_MORE: usize = 4 << 20;

#[derive(Debug)]
struct Entry {
    first: [PageRef; 2],
    more: Vec<PageRef>,
}

/// Pages that wait for slots to be filled, by the slot's ticket.
#[derive(Debug, Default)]
pub struct Waiters {
    entries: Vec<Entry>,
    free: Vec<u32>,
    more: usize,
}

impl Waiters {
    /// Adds two pages that wait for a new slot; returns their ticket.
    pub fn insert(&mut self, first: [PageRef; 2]) -> u32 {
        let entry = Entry { first, more: Vec::new() };
        if let Some(ticket) = self.free.pop() {
            self.entries[ticket as usize] = entry;
            return ticket;
        }
        self.entries.push(entry);
        self.entries.len() as u32 - 1
    }

    /// Adds a page that waits for the same slot; `false` if too many wait.
    pub fn add(&mut self, ticket: u32, page: PageRef) -> bool {
        let room = self.more < MOST_MORE;
        if room {
            self.entries[ticket as usize].more.push(page);
            self.more += 1;
        }
        room
    }

    /// Ends a ticket; returns the pages that waited, the donor first.
    pub fn remove(&mut self, ticket: u32) -> impl Iterator<Item = PageRef> + use<> {
        let Entry { first, more } = &mut self.entries[ticket as usize];
        let (first, more) = (*first, std::mem::take(more));
        self.more -= more.len();
        self.free.push(ticket);
        if self.free.len() == self.entries.len() {
            // No page waits, so the memory of the lists is given back.
            *self = Self::default();
        }
        first.into_iter().chain(more)
    }

    /// Bytes of memory that the lists take.
    pub const fn bytes(&self) -> u64 {
        (self.entries.capacity() * size_of::<Entry>() + (self.free.capacity() + self.more) * 4) as u64
    }
}
