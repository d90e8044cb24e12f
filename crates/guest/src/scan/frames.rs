//! Frames of one guest that it maps more than once, or that are mapped outside the guest too.

use super::found::Found;
use host::{FrameTable, Mapping, Pagemap, kpf};
use page::{FrameId, GuestIndex, PAGE_SHIFT, PageKind, PageSample, Pfn};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// A page frame, and how often the guest maps it.
#[derive(Debug)]
struct Frame {
    /// Its first mapping in the order of the scan.
    first: Found,
    mappings: u32,
}

/// The frames, by number.
#[derive(Debug, Default)]
pub(super) struct SharedFrames {
    frames: HashMap<FrameId, Frame>,
}

impl SharedFrames {
    /// Counts a mapping of a frame that is known already. False if the frame is not known, and must be read.
    pub fn count(&mut self, found: &Found) -> bool {
        let Some(frame) = self.frames.get_mut(&found.frame) else { return false };
        frame.count(found);
        true
    }

    /// Adds frames with their content.
    pub fn add_all(&mut self, found: impl Iterator<Item = Found>) {
        for found in found {
            match self.frames.entry(found.frame) {
                // The frame is mapped twice in this unit, or another thread has added it meanwhile.
                Entry::Occupied(mut seen) => seen.get_mut().count(&found),
                Entry::Vacant(place) => {
                    place.insert(Frame { first: found, mappings: 1 });
                }
            }
        }
    }

    /// All frames as samples, in order of frame numbers. The kernel's huge zero page is left out.
    pub fn resolve(self, owner: GuestIndex, tables: Option<&FrameTables>) -> host::Result<Resolved> {
        let mut numbers: Vec<_> = self.frames.keys().map(|f| Pfn(f.0)).collect();
        numbers.sort_unstable();
        let (mut counts, mut flags) = (Vec::new(), Vec::new());
        if let Some(tables) = tables {
            let own = own_mappings()?;
            tables
                .counts
                .read(&numbers, |pfn, n| counts.push(n.saturating_sub(own.get(&pfn).copied().unwrap_or(0))))?;
            tables.flags.read(&numbers, |_, word| flags.push(word))?;
        }
        let mut resolved = Resolved::default();
        for (n, pfn) in numbers.iter().enumerate() {
            let Frame { first, mappings } = &self.frames[&FrameId(pfn.0)];
            let (count, word) = (counts.get(n), flags.get(n).copied());
            if word.is_some_and(|w| w & kpf::ZERO_PAGE != 0) {
                continue;
            }
            let ksm = word.is_some_and(|w| w & kpf::KSM != 0);
            resolved.mappings += u64::from(*mappings);
            resolved.ksm_mappings += if ksm { u64::from(*mappings) } else { 0 };
            // If the kernel hides the number of mappings: each frame here has several mappings. If the guest has only
            // one of them, another one is outside of the guest.
            let mapped_elsewhere = count.map_or(*mappings == 1, |&count| count > u64::from(*mappings));
            resolved.samples.push(PageSample { mapped_elsewhere, ksm, kpageflags: word, ..first.sample(owner) });
        }
        Ok(resolved)
    }
}

/// The samples of a guest's [`SharedFrames`], and counts of their mappings.
#[derive(Debug, Default)]
pub(super) struct Resolved {
    pub samples: Vec<PageSample>,
    /// Number of page-table entries that map the frames.
    pub mappings: u64,
    /// Number of those entries that map a frame of KSM.
    pub ksm_mappings: u64,
}

impl Frame {
    fn count(&mut self, found: &Found) {
        self.mappings += 1;
        // The agent's own mapping of the pool in the guest's process may map a folded page, too. The sample is made
        // from the mapping in which the page was folded.
        let folded = |found: &Found| found.kind == PageKind::Folded;
        let rank = |found: &Found| (!folded(found), found.position);
        if rank(found) < rank(&self.first) {
            let fingerprint = self.first.fingerprint;
            self.first = *found;
            self.first.fingerprint = fingerprint;
        }
    }
}

/// Number of this process's mappings of each frame of a file. The census's own mappings must not count as other owners.
fn own_mappings() -> host::Result<HashMap<Pfn, u64>> {
    let pagemap = Pagemap::open(std::process::id())?;
    let (mut own, mut entries) = (HashMap::new(), Vec::new());
    for mapping in Mapping::list(std::process::id())?.iter().filter(|m| m.has_file() && !m.is_device()) {
        pagemap.read(mapping.start, mapping.bytes() >> PAGE_SHIFT, &mut entries)?;
        for pfn in entries.iter().filter_map(|e| e.pfn()) {
            *own.entry(pfn).or_default() += 1;
        }
    }
    Ok(own)
}

/// Flags and mapping counts of frames, which only root may read.
#[derive(Debug)]
pub(super) struct FrameTables {
    pub counts: FrameTable,
    pub flags: FrameTable,
}

impl FrameTables {
    /// Opens both tables; `None` if the caller is not root.
    pub fn open() -> Option<Self> {
        Some(Self { counts: FrameTable::counts().ok()?, flags: FrameTable::flags().ok()? })
    }
}
