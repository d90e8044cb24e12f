//! Memory by page frames: what guests take, whoever merges.

use anyhow::Context;
use host::{Mapping, Pagemap, PagemapEntry};
use page::{PAGE_BYTES, Pfn};
use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;

/// The frames of guests at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Distinct frames of private memory that no file backs, and the pools' pages.
    pub frames: u64,
    /// Merged pages: places in page tables beyond the first that map the same frame, pools' frames included. Pages of
    /// zeros that were given back are in no page table, and not counted.
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
            each_frame(*pid, &mut |pfn, of_pool| if of_pool { of_pools.push(pfn) } else { own.push(pfn) })?;
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
}

/// The frames that a process maps privately, its pool's among them.
///
/// # Errors
/// The process has ended.
pub fn frames_of(pid: u32) -> anyhow::Result<HashSet<Pfn>> {
    let mut frames = HashSet::new();
    each_frame(pid, &mut |pfn, _| _ = frames.insert(pfn))?;
    Ok(frames)
}

/// Visits the frames of private memory: anonymous ones, and those of pools. Code that an emulator has translated is left
/// out: a VM of KVM has none.
fn each_frame(pid: u32, visit: &mut dyn FnMut(Pfn, bool)) -> anyhow::Result<()> {
    let pagemap = Pagemap::open(pid)?;
    let mut entries: Vec<PagemapEntry> = Vec::new();
    for mapping in Mapping::list(pid)?.iter().filter(|m| !m.shared && !m.is_device() && !is_translated(m)) {
        let in_pool = guest::pool_name(&mapping.name).is_some();
        for range in pagemap.present_ranges(mapping.start, mapping.end)? {
            pagemap.read(range.start, range.pages, &mut entries)?;
            for entry in entries.iter().filter(|e| e.present() && (in_pool || !e.file_or_shared())) {
                if let Some(pfn) = entry.pfn() {
                    visit(pfn, entry.file_or_shared());
                }
            }
        }
    }
    Ok(())
}

fn is_translated(mapping: &Mapping) -> bool {
    mapping.execute && mapping.write && !mapping.has_file()
}

/// Pages of the pools that a process maps, by the kernel's account of their files.
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
