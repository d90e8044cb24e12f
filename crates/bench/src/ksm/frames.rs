//! Memory that guests take, counted from page tables: the kernel's figures, to check a merger's own.

use anyhow::Context;
use host::{Mapping, Pagemap, PagemapEntry};
use page::{PAGE_BYTES, Pfn};
use std::fs;
use std::os::unix::fs::MetadataExt;

/// Prefix of the names of pools' files.
const POOL: &str = "/memfd:pagefold-";

/// Frames, pages and mappings of the guests at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Distinct frames of private memory, plus the pools' pages.
    pub frames: u64,
    /// Mapped pages of private memory.
    pub mapped_pages: u64,
    /// Number of mappings.
    pub vmas: u64,
}

impl Taken {
    /// Counts those of the processes `pids`, plus the pages of the pools that `pool_owners` map.
    ///
    /// # Errors
    /// A process has ended, or may not be looked at.
    pub fn by(pids: &[u32], pool_owners: &[u32]) -> anyhow::Result<Self> {
        let mut taken = Self::default();
        let mut frames: Vec<Pfn> = Vec::new();
        for pid in pids {
            let pagemap = Pagemap::open(*pid)?;
            let mappings = Mapping::list(*pid)?;
            taken.vmas += mappings.len() as u64;
            for mapping in mappings.iter().filter(|m| !m.shared && !m.is_device()) {
                private_frames(&pagemap, mapping, &mut frames)?;
            }
        }
        taken.mapped_pages = frames.len() as u64;
        frames.sort_unstable();
        frames.dedup();
        taken.frames =
            frames.len() as u64 + pool_owners.iter().map(|pid| pool_pages(*pid)).sum::<anyhow::Result<u64>>()?;
        Ok(taken)
    }
}

fn private_frames(pagemap: &Pagemap, mapping: &Mapping, frames: &mut Vec<Pfn>) -> anyhow::Result<()> {
    let mut entries: Vec<PagemapEntry> = Vec::new();
    for range in pagemap.present_ranges(mapping.start, mapping.end)? {
        pagemap.read(range.start, range.pages, &mut entries)?;
        frames.extend(entries.iter().filter(|e| e.present() && !e.file_or_shared()).filter_map(|e| e.pfn()));
    }
    Ok(())
}

/// Pages of the pools that a process maps, by the kernel's account of their files.
fn pool_pages(pid: u32) -> anyhow::Result<u64> {
    let mut mappings = Mapping::list(pid)?;
    mappings.retain(|m| m.name.starts_with(POOL));
    // One mapping of each file is enough.
    mappings.sort_by_key(|m| m.inode);
    mappings.dedup_by_key(|m| m.inode);
    let pages_of = |mapping: &Mapping| {
        let path = mapping.file_path(pid);
        let file = fs::metadata(&path).with_context(|| format!("cannot look at the pool {}", path.display()))?;
        Ok(file.blocks() * 512 / PAGE_BYTES as u64)
    };
    mappings.iter().map(pages_of).sum()
}
