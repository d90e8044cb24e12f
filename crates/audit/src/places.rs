//! Finds, by page tables, where some processes map private memory and slots of their pool.

use super::pool::PoolFile;
use anyhow::Context;
use host::{Mapping, Pagemap, PagemapEntry};
use page::{HostVirt, PAGE_BYTES, PAGE_SHIFT, PageRange, Pfn};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// Number of page-table entries read at once.
const BATCH_PAGES: u64 = 1 << 14;

/// A page of a member's private memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrivatePage {
    /// The process.
    pub pid: u32,
    /// Its address.
    pub at: HostVirt,
    /// Whether the page lies in a mapping of the pool: it was folded, and copied on a write since.
    pub is_broken: bool,
}

/// Counts of frames, and of the pages that map them, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Number of distinct frames of private memory and pool together.
    pub frames: u64,
    /// Frames of the pool.
    pub pool: u64,
    /// Private pages beyond the first that map the same frame.
    pub shared_places: u64,
    /// Members' pages that map a slot, touched or not, and were not written since.
    pub folded_places: u64,
    /// Number of mappings of all members.
    pub vmas: u64,
}

/// Counts of the pool without one of its files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pooled {
    /// Pages of the other files that take memory.
    pub pages: u64,
    /// Slots of the other files that members map.
    pub mapped: u64,
    /// Members' pages that map those slots.
    pub places: u64,
}

/// Private pages of some members, and the files of their pool with their mapped slots.
#[derive(Default)]
pub struct Places {
    /// Private pages and their frames. The kernel's zero page is no frame.
    pub(crate) private: Vec<(Pfn, PrivatePage)>,
    /// Files of the pool, by device and inode.
    pub(crate) pools: HashMap<(u64, u64), Pool>,
    vmas: u64,
}

/// A file of the pool.
pub(crate) struct Pool {
    /// Path of the file: `/proc/PID/map_files/...` of a process that maps it.
    path: PathBuf,
    /// Number of pages of the file that take memory.
    pages: u64,
    /// By offset of a page in the file, the number of members' pages that map it.
    pub(crate) sharers: HashMap<u64, u32>,
}

impl Places {
    /// Finds the places of the processes `members`, and the pools that the processes `pool_owners` map.
    ///
    /// # Errors
    /// A process has ended, or may not be looked at.
    pub fn of(members: &[u32], pool_owners: &[u32]) -> anyhow::Result<Self> {
        let mut places = Self::default();
        for pid in pool_owners {
            for mapping in Mapping::list(*pid)?.iter().filter(|mapping| guest::pool_group(mapping).is_some()) {
                if let Entry::Vacant(place) = places.pools.entry((mapping.device, mapping.inode)) {
                    place.insert(Pool::of(mapping.file_path(*pid))?);
                }
            }
        }
        members.iter().try_for_each(|pid| places.add(*pid))?;
        places.private.sort_unstable_by_key(|(pfn, page)| (*pfn, page.pid, page.at));
        Ok(places)
    }

    /// Numbers of frames and places.
    pub fn taken(&self) -> Taken {
        let distinct = self.private.chunk_by(|one, next| one.0 == next.0).count() as u64;
        let pool = self.pools.values().map(|pool| pool.pages).sum();
        Taken {
            frames: distinct + pool,
            pool,
            shared_places: self.private.len() as u64 - distinct,
            folded_places: self.pools.values().flat_map(|pool| pool.sharers.values()).map(|n| u64::from(*n)).sum(),
            vmas: self.vmas,
        }
    }

    /// Counts of the pool without the file `template` (device and inode). Members map pages of a template that they
    /// never touch.
    pub fn pooled_but(&self, template: (u64, u64)) -> Pooled {
        let mut sum = Pooled::default();
        for (_, pool) in self.pools.iter().filter(|(file, _)| **file != template) {
            sum.pages += pool.pages;
            sum.mapped += pool.sharers.len() as u64;
            sum.places += pool.sharers.values().map(|n| u64::from(*n)).sum::<u64>();
        }
        sum
    }

    fn add(&mut self, pid: u32) -> anyhow::Result<()> {
        let mut mappings = Mapping::list(pid)?;
        self.vmas += mappings.len() as u64;
        mappings.retain(|m| !m.shared && !m.is_device());
        let mut table = Table { pagemap: Pagemap::open(pid)?, start: HostVirt(0), entries: Vec::new() };
        // Mappings without rights are skipped: their page-table entries would be many, and all empty.
        mappings.retain(|m| m.read || m.write);
        // Folding leaves many small mappings side by side. Neighbours are read as one span.
        for span in mappings.chunk_by(|one, next| one.end == next.start) {
            self.add_span(pid, span, &mut table)?;
        }
        Ok(())
    }

    fn add_span(&mut self, pid: u32, span: &[Mapping], table: &mut Table) -> anyhow::Result<()> {
        let (Some(first), Some(last)) = (span.first(), span.last()) else { return Ok(()) };
        let private = table.pagemap.private_ranges(first.start, last.end)?;
        for range in private {
            for at in (0..range.pages).map(|n| range.start.add_pages(n)) {
                let entry = table.entry(at, last.end)?;
                if let Some(pfn) = entry.filter(|entry| !entry.file_or_shared()).and_then(PagemapEntry::pfn) {
                    let mapping = &span[span.partition_point(|mapping| mapping.end <= at)];
                    let is_broken = guest::pool_group(mapping).is_some();
                    self.private.push((pfn, PrivatePage { pid, at, is_broken }));
                }
            }
        }
        for mapping in span.iter().filter(|mapping| guest::pool_group(mapping).is_some()) {
            if let Some(pool) = self.pools.get_mut(&(mapping.device, mapping.inode)) {
                pool.add(mapping, last.end, table)?;
            }
        }
        Ok(())
    }
}

impl Pool {
    fn of(path: PathBuf) -> anyhow::Result<Self> {
        let found = fs::metadata(&path).with_context(|| format!("cannot look at the pool {}", path.display()))?;
        let pages = found.blocks() * 512 / PAGE_BYTES as u64;
        Ok(Self { path, pages, sharers: HashMap::new() })
    }

    /// The pages of the file, and their frames.
    pub(crate) fn file(&self) -> host::Result<PoolFile> {
        PoolFile::read(&self.path, 0)
    }

    /// Adds the places of a mapping. A page that maps a slot counts even before the process has touched it.
    fn add(&mut self, mapping: &Mapping, end: HostVirt, table: &mut Table) -> anyhow::Result<()> {
        for n in 0..mapping.bytes() >> PAGE_SHIFT {
            let Some(entry) = table.entry(mapping.start.add_pages(n), end)? else { break };
            if entry.file_or_shared() || !entry.present() && !entry.swapped() {
                *self.sharers.entry(mapping.offset + (n << PAGE_SHIFT)).or_default() += 1;
            }
        }
        Ok(())
    }
}

/// A process's page table, with a batch of its entries that was read at once.
struct Table {
    pagemap: Pagemap,
    start: HostVirt,
    entries: Vec<PagemapEntry>,
}

impl Table {
    /// The entry of the page at `at`. A batch of entries up to `end` is read with it, for the next calls.
    fn entry(&mut self, at: HostVirt, end: HostVirt) -> host::Result<Option<PagemapEntry>> {
        let known = PageRange { start: self.start, pages: self.entries.len() as u64 };
        if at < known.start || at >= known.end() {
            self.pagemap.read(at, (end.page() - at.page()).min(BATCH_PAGES), &mut self.entries)?;
            self.start = at;
        }
        Ok(self.entries.get((at.page() - self.start.page()) as usize).copied())
    }
}
