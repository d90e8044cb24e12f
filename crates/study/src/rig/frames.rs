//! Memory of guests by page frames, under any merger.

use anyhow::Context;
use host::{Mapping, Pagemap, PagemapEntry};
use page::{HostVirt, PAGE_BYTES, Pfn};
use std::collections::{HashMap, HashSet};
use std::os::unix::fs::MetadataExt;

/// Page frames that guests take at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Distinct frames of private memory that no file backs, and the pools' pages.
    pub frames: u64,
    /// Merged pages: page-table entries beyond the first that map the same frame, the pools' frames among them. Pages
    /// of zeros that were given back are in no page table, and not counted.
    pub merged_pages: u64,
}

impl Taken {
    /// Counts the frames of these processes, and of the pools that `pool_owners` keep open.
    ///
    /// # Errors
    /// A process has ended.
    pub fn by(pids: &[u32], pool_owners: &[u32]) -> anyhow::Result<Self> {
        let (mut own, mut of_pools): (Vec<Pfn>, Vec<Pfn>) = (Vec::new(), Vec::new());
        for pid in pids {
            each_frame(*pid, &mut |_, pfn, of_pool| if of_pool { of_pools.push(pfn) } else { own.push(pfn) })?;
        }
        let pools = pool_owners.iter().map(|pid| pool_pages(*pid)).sum::<anyhow::Result<u64>>()?;
        let mut merged_pages = 0;
        for frames in [&mut own, &mut of_pools] {
            let places = frames.len();
            frames.sort_unstable();
            frames.dedup();
            merged_pages += (places - frames.len()) as u64;
        }
        Ok(Self { frames: own.len() as u64 + pools, merged_pages })
    }

    /// Number of the pool's frames that a process maps: of its folded pages, those that it has accessed since they were
    /// folded.
    ///
    /// # Errors
    /// The process has ended.
    pub fn of_pool(pid: u32) -> anyhow::Result<u64> {
        let mut frames = HashSet::new();
        each_frame(pid, &mut |_, pfn, of_pool| _ = of_pool && frames.insert(pfn))?;
        Ok(frames.len() as u64)
    }
}

/// The frames of a process's private memory, with those of the pool that it maps.
///
/// # Errors
/// The process has ended.
pub fn frames_of(pid: u32) -> anyhow::Result<HashSet<Pfn>> {
    let mut frames = HashSet::new();
    each_frame(pid, &mut |_, pfn, _| _ = frames.insert(pfn))?;
    Ok(frames)
}

/// Calls `visit` for each page of private memory with its frame: anonymous pages and pages of the pool. Code that an
/// emulator has translated is left out, since a VM under KVM has none.
fn each_frame(pid: u32, visit: &mut dyn FnMut(HostVirt, Pfn, bool)) -> anyhow::Result<()> {
    let pagemap = Pagemap::open(pid)?;
    let mut entries: Vec<PagemapEntry> = Vec::new();
    for mapping in Mapping::list(pid)?.iter().filter(|m| !m.shared && !m.is_device() && !is_translated(m)) {
        let in_pool = guest::pool_name(&mapping.name).is_some();
        for range in pagemap.present_ranges(mapping.start, mapping.end)? {
            pagemap.read(range.start, range.pages, &mut entries)?;
            let numbered = (0..).zip(&entries);
            for (n, entry) in numbered.filter(|(_, e)| e.present() && (in_pool || !e.file_or_shared())) {
                if let Some(pfn) = entry.pfn() {
                    visit(range.start.add_pages(n), pfn, entry.file_or_shared());
                }
            }
        }
    }
    Ok(())
}

fn is_translated(mapping: &Mapping) -> bool {
    mapping.execute && mapping.write && !mapping.has_file()
}

/// Pages of the pools that a process maps, from the kernel's account of the mapped files.
fn pool_pages(pid: u32) -> anyhow::Result<u64> {
    let mut mappings = Mapping::list(pid)?;
    mappings.retain(|m| guest::pool_name(&m.name).is_some());
    mappings.sort_by_key(|m| m.inode);
    mappings.dedup_by_key(|m| m.inode);
    let pages_of = |mapping: &Mapping| {
        let path = mapping.file_path(pid);
        let file = std::fs::metadata(&path).with_context(|| format!("cannot look at the pool {}", path.display()))?;
        Ok(file.blocks() * 512 / PAGE_BYTES as u64)
    };
    mappings.iter().map(pages_of).sum()
}

/// For each guest, its pages in order, with the frames in which they lie.
pub struct Places(Vec<Vec<(HostVirt, Pfn)>>);

/// Numbers of pages that have lost their frame, by whether other pages lay in it, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gone {
    /// Pages whose frame no other page lay in.
    pub alone: u64,
    /// Pages whose frame other pages lay in, too.
    pub shared: u64,
}

impl Places {
    /// Reads the frames of these processes.
    ///
    /// # Errors
    /// A process has ended.
    pub fn of(pids: &[u32]) -> anyhow::Result<Self> {
        let of_one = |pid: &u32| {
            let mut places = Vec::new();
            each_frame(*pid, &mut |page, pfn, _| places.push((page, pfn)))?;
            Ok(places)
        };
        Ok(Self(pids.iter().map(of_one).collect::<anyhow::Result<_>>()?))
    }

    fn holders(&self) -> HashMap<Pfn, u32> {
        let mut holders = HashMap::new();
        self.0.iter().flatten().for_each(|(_, pfn)| *holders.entry(*pfn).or_default() += 1);
        holders
    }

    /// Number of pages that lie in a frame with others, and the number of these frames. KSM calls the two `sharing` and
    /// `shared`, but its `sharing` leaves out one page of each frame.
    pub fn sharing_and_shared(&self) -> (u64, u64) {
        let shared = self.holders().into_values().filter(|n| *n > 1);
        shared.fold((0, 0), |(sharing, shared), n| (sharing + u64::from(n), shared + 1))
    }

    /// Pages that each guest saves: if n pages lie in a frame, each of them saves 1 - 1/n.
    pub fn saved_by_each(&self) -> Vec<f64> {
        let holders = self.holders();
        let saved = |pfn: &Pfn| 1.0 - 1.0 / f64::from(holders[pfn]);
        let of_one = |places: &Vec<(HostVirt, Pfn)>| places.iter().map(|(_, pfn)| saved(pfn)).sum();
        self.0.iter().map(of_one).collect()
    }

    /// Number of pages that have a frame.
    pub fn pages(&self) -> u64 {
        self.0.iter().map(|places| places.len() as u64).sum()
    }

    /// Pages that have a frame here and none in `later`.
    pub fn gone_until(&self, later: &Self) -> Gone {
        let holders = self.holders();
        let mut gone = Gone::default();
        for (before, after) in self.0.iter().zip(&later.0) {
            let is_gone = |page: &HostVirt| after.binary_search_by_key(page, |(page, _)| *page).is_err();
            for (_, pfn) in before.iter().filter(|(page, _)| is_gone(page)) {
                *if holders[pfn] > 1 { &mut gone.shared } else { &mut gone.alone } += 1;
            }
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(guests: &[&[(u64, u64)]]) -> Places {
        let of_one =
            |pages: &&[(u64, u64)]| pages.iter().map(|(page, pfn)| (HostVirt(page << 12), Pfn(*pfn))).collect();
        Places(guests.iter().map(of_one).collect())
    }

    #[test]
    fn pages_are_told_by_who_else_holds_their_frame() {
        let before = places(&[&[(1, 7), (2, 8), (3, 9)], &[(1, 7), (5, 7)]]);
        assert_eq!((before.sharing_and_shared(), before.pages()), ((3, 1), 5));
        let saved = before.saved_by_each();
        assert!((saved[0] - 2.0 / 3.0).abs() < 1e-9 && (saved[1] - 4.0 / 3.0).abs() < 1e-9, "{saved:?}");
        let after = places(&[&[(2, 6)], &[(1, 7), (5, 7)]]);
        assert_eq!(before.gone_until(&after), Gone { alone: 1, shared: 1 });
    }
}
