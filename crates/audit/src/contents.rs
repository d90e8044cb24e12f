//! Counts the frames of some members and of their pool by content, to show what memory is left after merging.
//!
//! ```text
//!   resident = private frames + pool
//!            = contents             one frame for each content but zeros
//!            + zeros                private frames of zeros: they need none
//!            + duplicates           private frames whose content a slot, or another private frame, has too
//!            + slots nobody maps    by the page tables of the members
//!            + slots alike          mapped slots whose content another mapped slot has too
//! ```
//!
//! Places are found in page tables, and contents are read from the frames themselves (`host::FrameReader`). So a count
//! changes nothing in the members, not even which pages look recently used. A frame that changes hands between the two
//! is counted by its new content.

pub use super::places::{Places, Pooled, PrivatePage, Taken};
use host::FrameReader;
use page::{Fingerprint, Pfn};

/// The private frames with one content, and whether a slot that members map has the same content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Class {
    /// Whether a mapped slot has the content.
    pub has_slot: bool,
    /// One page of each private frame with the content.
    pub pages: Vec<PrivatePage>,
}

impl Class {
    /// Frames that merging would free: all if a slot has the content, else all but one.
    pub fn superfluous(&self) -> u64 {
        self.pages.len() as u64 - u64::from(!self.has_slot)
    }
}

/// Counts of the frames of members and pool by content. All numbers are of frames, unless the name says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Frames and places, before contents were read.
    pub taken: Taken,
    /// Frames of the pool, by the number of members' pages that map them: 0, 1, 2, 3 to 7, 8 and more.
    pub slots_by_sharers: [u64; 5],
    /// Contents but zeros, each counted once, of private frames and mapped slots.
    pub contents: u64,
    /// Private frames of zeros.
    pub zeros: u64,
    /// Mapped slots beyond the first of each content.
    pub alike: u64,
    /// Private frames whose content a slot or another private frame has too, by content.
    pub duplicates: Vec<Class>,
}

impl Contents {
    /// Private frames that merging would free, frames of zeros left out.
    pub fn superfluous(&self) -> u64 {
        self.duplicates.iter().map(Class::superfluous).sum()
    }
}

/// The index in [`Contents::slots_by_sharers`] for a slot that `sharers` pages map.
const fn bucket(sharers: u32) -> usize {
    match sharers {
        0..3 => sharers as usize,
        3..8 => 3,
        _ => 4,
    }
}

impl Places {
    /// Reads and counts the contents of the frames.
    ///
    /// # Errors
    /// Frames cannot be read.
    pub fn read(self) -> anyhow::Result<Contents> {
        self.read_against(|sharers| sharers > 0)
    }

    /// The same, but every page of the pool counts as a mapped slot. Members map few pages of a template at first.
    ///
    /// # Errors
    /// Frames cannot be read.
    pub fn read_against_all_slots(self) -> anyhow::Result<Contents> {
        self.read_against(|_| true)
    }

    /// Reads and counts the contents. `counts` tells, by the number of members' pages that map a slot, whether the slot
    /// counts as mapped.
    fn read_against(mut self, counts: impl Fn(u32) -> bool) -> anyhow::Result<Contents> {
        let mut found = Contents { taken: self.taken(), ..Contents::default() };
        let mut mapped: Vec<Pfn> = Vec::new();
        for pool in self.pools.values() {
            for (offset, pfn) in pool.file()?.frames() {
                let sharers = pool.sharers.get(&offset).copied().unwrap_or(0);
                found.slots_by_sharers[bucket(sharers)] += 1;
                mapped.extend(counts(sharers).then_some(pfn));
            }
        }
        mapped.sort_unstable();
        self.private.dedup_by_key(|(pfn, _)| *pfn);
        let mut reader = FrameReader::open()?;
        let slots = fingerprints(&mut reader, mapped.into_iter())?;
        let fingerprints = fingerprints(&mut reader, self.private.iter().map(|(pfn, _)| *pfn))?;
        count(
            &mut found,
            slots,
            fingerprints.into_iter().zip(self.private.into_iter().map(|(_, page)| page)).collect(),
        );
        Ok(found)
    }
}

/// The fingerprints of frames; of a frame that cannot be read, one that no other has.
fn fingerprints(reader: &mut FrameReader, frames: impl Iterator<Item = Pfn>) -> host::Result<Vec<Fingerprint>> {
    let frames: Vec<Pfn> = frames.collect();
    let mut found: Vec<Fingerprint> = frames.iter().map(|pfn| Fingerprint(!pfn.0)).collect();
    for (n, batch) in frames.chunks(FrameReader::BATCH).enumerate() {
        let first = n * FrameReader::BATCH;
        reader.read(batch, |at, bytes| found[first + at] = Fingerprint::of(bytes))?;
    }
    Ok(found)
}

/// Counts contents: of mapped slots, and of private frames.
fn count(found: &mut Contents, mut slots: Vec<Fingerprint>, mut private: Vec<(Fingerprint, PrivatePage)>) {
    slots.sort_unstable();
    let mapped = slots.len() as u64;
    slots.dedup();
    found.alike = mapped - slots.len() as u64;
    found.contents = slots.len() as u64;
    private.sort_unstable_by_key(|(fingerprint, page)| (*fingerprint, page.pid, page.at));
    for class in private.chunk_by(|one, next| one.0 == next.0) {
        let (content, frames) = (class[0].0, class.len() as u64);
        if content == Fingerprint::ZERO_PAGE {
            found.zeros += frames;
            continue;
        }
        let has_slot = slots.binary_search(&content).is_ok();
        found.contents += u64::from(!has_slot);
        if has_slot || frames > 1 {
            found.duplicates.push(Class { has_slot, pages: class.iter().map(|(_, page)| *page).collect() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use page::{HostVirt, PAGE_SHIFT};

    #[test]
    fn every_frame_is_counted_once_by_its_content() {
        let page = |n: u64| PrivatePage { pid: 1, at: HostVirt(n << PAGE_SHIFT), is_broken: n == 3 };
        let private = [5, 7, 7, 9, 9, 9, 0].map(|content| match content {
            0 => Fingerprint::ZERO_PAGE,
            n => Fingerprint(n),
        });
        let places: Vec<_> = private.into_iter().zip((0..).map(page)).collect();
        let slots = vec![Fingerprint(9), Fingerprint(11), Fingerprint(11)];
        let mut found = Contents { slots_by_sharers: [1, 3, 0, 0, 0], ..Contents::default() };
        count(&mut found, slots, places);
        assert_eq!((found.contents, found.zeros, found.alike, found.superfluous()), (4, 1, 1, 4));
        let sum = found.contents + found.zeros + found.alike + found.superfluous() + found.slots_by_sharers[0];
        assert_eq!(sum, 7 + 4);
        let of_slot: Vec<_> = found.duplicates.iter().filter(|class| class.has_slot).collect();
        assert!(of_slot.len() == 1 && of_slot[0].pages.iter().filter(|page| page.is_broken).count() == 1);
    }
}
