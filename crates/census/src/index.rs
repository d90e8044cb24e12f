//! The content index: it brings together the pages that hold the same bytes.
//!
//! Each scanning thread pushes entries into a shard of its own. At the end of a pass every shard is sorted by
//! fingerprint, and the shards are merged. So all entries of one content - a *class* - come by side by side. Sorting
//! beats a hash table here: 20 bytes a page and nothing besides, sequential memory access, and the same order whatever
//! the threads did.
//!
//! **Bounded memory** (after Kloster et al., 2006): when the index may not grow further, a pass covers only an
//! interval of the hash space. Further passes scan again for the rest. The length of the interval need not be known
//! beforehand:
//!
//! ```text
//!   pass covers [first ........................ last]      last = end of the hash space at first
//!                     a shard is full:
//!               [first ......... last]                     last = median of that shard; what lies behind
//!                                                          is dropped here, and by the others when they fill
//!   next pass:                   [last + 1 ........]       until last is the end of the hash space
//! ```
//!
//! A single content with more entries than a shard may hold cannot be divided. The shard then grows past its bound,
//! and the reported size includes that. Zero pages, the usual case, have no entries (see [`crate::Census`]).

use crate::Entry;
use std::sync::atomic::{AtomicU64, Ordering};

/// Part of its entries by which a shard grows when its memory is used up: 1/16, so that little memory stands empty.
const GROWTH_PART: usize = 16;
/// Least number of entries by which a shard grows.
const LEAST_GROWTH_ENTRIES: usize = 1024;
/// Fewest entries that a bounded shard may hold, even if its bound is smaller: with fewer, too many passes would be
/// needed.
const LEAST_SHARD_ENTRIES: usize = 1024;

/// The part of the hash space that one pass covers; shared by its shards.
#[derive(Debug)]
pub struct Interval {
    first: u64,
    last: AtomicU64,
}

impl Interval {
    /// The interval from `first` to the end of the hash space.
    pub const fn from(first: u64) -> Self {
        Self { first, last: AtomicU64::new(u64::MAX) }
    }

    /// Whether this pass covers a fingerprint.
    pub fn covers(&self, fingerprint: u64) -> bool {
        // Relaxed suffices: a stale `last` is too large, and the entry it lets in is dropped before the pass is read.
        self.first <= fingerprint && fingerprint <= self.last.load(Ordering::Relaxed)
    }

    /// Where the next pass begins; `None` when this one reached the end.
    pub fn next(&self) -> Option<u64> {
        self.last.load(Ordering::Relaxed).checked_add(1)
    }
}

/// The entries that one scanning thread found in one pass.
#[derive(Debug)]
pub struct Shard<'a> {
    interval: &'a Interval,
    most_entries: Option<usize>,
    entries: Vec<Entry>,
    peak_bytes: usize,
}

impl<'a> Shard<'a> {
    /// A shard of at most `most_bytes`; without a bound if that is `None`.
    pub fn new(interval: &'a Interval, most_bytes: Option<usize>) -> Self {
        let most_entries = most_bytes.map(|b| (b / size_of::<Entry>()).max(LEAST_SHARD_ENTRIES));
        Self { interval, most_entries, entries: Vec::new(), peak_bytes: 0 }
    }

    /// Takes an entry if its fingerprint lies in the interval of this pass.
    pub fn push(&mut self, entry: Entry) {
        if !self.interval.covers(entry.fingerprint().0) {
            return;
        }
        if self.entries.len() == self.entries.capacity() {
            self.make_room();
        }
        self.entries.push(entry);
    }

    fn make_room(&mut self) {
        let wanted = (self.entries.len() / GROWTH_PART).max(LEAST_GROWTH_ENTRIES);
        let growth = match self.most_entries.map(|most| most.saturating_sub(self.entries.len())) {
            None => wanted,
            Some(0) => {
                if self.drop_upper_half() {
                    return;
                }
                // All entries have the same fingerprint, so none can be dropped: the shard grows past its bound.
                wanted
            }
            Some(left) => wanted.min(left),
        };
        self.entries.reserve_exact(growth);
        self.peak_bytes = self.peak_bytes.max(self.entries.capacity() * size_of::<Entry>());
    }

    /// Shortens the interval so that at least one entry is dropped; false if all have the same fingerprint.
    fn drop_upper_half(&mut self) -> bool {
        let middle = self.entries.len() / 2;
        let (below, median, _) = self.entries.select_nth_unstable_by_key(middle, |e| e.fingerprint().0);
        let median = median.fingerprint().0;
        // The last fingerprint to keep: the largest one below the median, or the median itself if it is the smallest.
        let last = below.iter().map(|e| e.fingerprint().0).filter(|&f| f < median).max().unwrap_or(median);
        self.interval.last.fetch_min(last, Ordering::Relaxed);
        let before = self.entries.len();
        self.trim();
        self.entries.len() < before
    }

    fn trim(&mut self) {
        let interval = self.interval;
        self.entries.retain(|e| interval.covers(e.fingerprint().0));
    }

    /// Ends the pass for this shard and sorts it. The caller must have stopped all shards from taking entries.
    pub fn finish(mut self) -> SortedShard {
        self.trim();
        self.entries.sort_unstable_by_key(|e| e.key());
        SortedShard { entries: self.entries, peak_bytes: self.peak_bytes }
    }
}

/// A shard whose pass has ended.
#[derive(Debug)]
pub struct SortedShard {
    entries: Vec<Entry>,
    peak_bytes: usize,
}

impl SortedShard {
    /// Most memory that the shard ever held.
    pub const fn peak_bytes(&self) -> usize {
        self.peak_bytes
    }
}

/// Calls `each` with every class of entries that hold the same content, in order of fingerprints; within
/// a class in order of frames, then owners.
pub fn for_each_class(shards: &[SortedShard], mut each: impl FnMut(&[Entry])) {
    let mut rests: Vec<&[Entry]> = shards.iter().map(|s| s.entries.as_slice()).collect();
    let mut joined = Vec::new();
    loop {
        rests.retain(|r| !r.is_empty());
        let Some(smallest) = rests.iter().map(|r| r[0].fingerprint()).min() else { return };
        let mut parts = 0;
        for rest in &mut rests {
            let length = class_length(rest, smallest);
            if length == 0 {
                continue;
            }
            let (class, behind) = rest.split_at(length);
            *rest = behind;
            joined.extend_from_slice(class);
            parts += 1;
        }
        if parts > 1 {
            joined.sort_unstable_by_key(|e: &Entry| e.key());
        }
        each(&joined);
        joined.clear();
    }
}

fn class_length(sorted: &[Entry], fingerprint: page::Fingerprint) -> usize {
    sorted.iter().take_while(|e| e.fingerprint() == fingerprint).count()
}
