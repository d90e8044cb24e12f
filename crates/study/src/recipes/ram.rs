//! The RAM of a guest, read from outside.

use host::{Mapping, Pagemap, ProcessMemory};
use page::{Fingerprint, HostVirt, PAGE_BYTES, PageRange};
use std::collections::{HashMap, HashSet};

/// Pages that are read at once.
const AT_ONCE: u64 = 64;

/// The addresses of a VM's RAM in its process. A merger may split the mappings, but the addresses stay the same.
pub struct Ram {
    pid: u32,
    ranges: Vec<(HostVirt, HostVirt)>,
}

impl Ram {
    /// The RAM of a VM: private writable mappings of at least this size.
    ///
    /// # Errors
    /// The process has ended.
    pub fn of(pid: u32, least_bytes: u64) -> anyhow::Result<Self> {
        let mut mappings = Mapping::list(pid)?;
        mappings.retain(|m| m.write && !m.shared && !m.has_file() && m.bytes() >= least_bytes);
        Ok(Self { pid, ranges: mappings.iter().map(|m| (m.start, m.end)).collect() })
    }

    fn resident_ranges(&self) -> anyhow::Result<Vec<PageRange>> {
        let pagemap = Pagemap::open(self.pid)?;
        let mut found = Vec::new();
        for (start, end) in &self.ranges {
            found.extend(pagemap.present_ranges(*start, *end)?);
        }
        Ok(found)
    }

    /// Addresses of the pages that have a frame, their own or a merged one. Pages that map the kernel's zero page are
    /// left out.
    ///
    /// # Errors
    /// The process has ended.
    pub fn resident(&self) -> anyhow::Result<HashSet<HostVirt>> {
        let pages = |range: PageRange| (0..range.pages).map(move |n| range.start.add_pages(n));
        Ok(self.resident_ranges()?.into_iter().flat_map(pages).collect())
    }

    /// The content of each resident page.
    ///
    /// # Errors
    /// The process has ended.
    pub fn fingerprints(&self) -> anyhow::Result<HashMap<HostVirt, Fingerprint>> {
        let memory = ProcessMemory::open(self.pid)?;
        let mut found = HashMap::new();
        let mut buffer = vec![0; AT_ONCE as usize * PAGE_BYTES];
        for range in self.resident_ranges()? {
            let mut from = range.start;
            while from < range.end() {
                let pages = (range.end().page() - from.page()).min(AT_ONCE);
                let read = memory.read(&[PageRange { start: from, pages }], &mut buffer)?;
                let pages_read = buffer.as_chunks::<PAGE_BYTES>().0[..read].iter().enumerate();
                found.extend(pages_read.map(|(n, page)| (from.add_pages(n as u64), Fingerprint::of(page))));
                from = from.add_pages(pages);
            }
        }
        Ok(found)
    }

    /// Addresses of the resident pages that hold zeros.
    ///
    /// # Errors
    /// The process has ended.
    pub fn zeros(&self) -> anyhow::Result<HashSet<HostVirt>> {
        let zero = Fingerprint::of(&[0; PAGE_BYTES]);
        Ok(self.fingerprints()?.into_iter().filter(|(_, content)| *content == zero).map(|(at, _)| at).collect())
    }
}
