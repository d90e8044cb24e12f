//! Compares the memory that a forked child has inherited with the kernel's list of mappings.

use crate::maps::{self, Mapping};
use crate::table::{self, Guard};
use act::{Userfault, Watch};
use page::{PageRange, PageSet};
use std::collections::BTreeMap;

/// Attempts to read the list of mappings without the table's lock. They fail if the program changes mappings meanwhile.
const ATTEMPTS: usize = 4;

/// Removes all memory from the child's table that is not as the kernel lists it: what was folded at the fork, or
/// changed during it. With `notes`, memory that is registered with another userfaultfd is removed, too. For the agent's
/// thread of a child, before anything is folded.
///
/// # Errors
/// The list of mappings cannot be read.
pub fn compare(notes: Option<&Userfault>) -> Result<(), ()> {
    let mut left = ATTEMPTS;
    loop {
        left -= 1;
        let generation = table::lock().generation();
        // The list is read without the table's lock, because hooks must not wait that long. Only the last attempt holds
        // the lock.
        let held = (left == 0).then(table::lock);
        let mappings = maps::mappings(table::everything(), false).ok_or(())?;
        let mut table = held.unwrap_or_else(table::lock);
        if table.generation() == generation || left == 0 {
            keep(&mut table, &mappings, notes);
            return Ok(());
        }
    }
}

fn keep(table: &mut Guard, mappings: &[Mapping], notes: Option<&Userfault>) {
    let mut anonymous: BTreeMap<u8, PageSet> = BTreeMap::new();
    for mapping in mappings.iter().filter(|mapping| mapping.private && mapping.anonymous) {
        anonymous.entry(mapping.access).or_default().insert(mapping.range);
    }
    // A mapping that the parent was folding at the fork is registered with the userfaultfd that the keeper reads.
    let is_free =
        |range| notes.is_none_or(|notes| notes.register(range, Watch::Writes) != Err(rustix::io::Errno::BUSY));
    for (range, traits) in table.known(table::everything()) {
        let same = anonymous.entry(traits.access).or_default();
        for gone in same.missing(range) {
            table.forget(gone);
        }
        if !traits.open(true) {
            continue;
        }
        let first = mappings.partition_point(|mapping| mapping.range.end() <= range.start);
        for mapping in mappings[first..].iter().take_while(|mapping| mapping.range.start < range.end()) {
            let (start, end) = (mapping.range.start.max(range.start), mapping.range.end().min(range.end()));
            let part = PageRange { start, pages: end.page() - start.page() };
            if same.contains(start) && !is_free(part) {
                table.forget(part);
            }
        }
    }
}
