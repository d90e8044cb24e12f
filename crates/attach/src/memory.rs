//! Memory of another process. Nothing is read for which the reader could have to wait for a user's program.
//!
//! A page of a file comes from the file when it is touched. The server of a file (FUSE, a network file system) need not
//! answer. So a page is read only if it has no file, if its file is local ([`LocalFiles`]), or if the page table shows
//! it present. A process that changes this in the same microseconds keeps its reader waiting. Callers wait for this
//! program with a time limit (`enrol::attach`).

use host::{LocalFiles, Mapping, Pagemap, PagemapEntry};
use page::{HostVirt, PAGE_BYTES};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Memory of another process, read without waiting for a file's server or a userfaultfd.
#[derive(Debug)]
pub struct Memory {
    file: File,
    mappings: Vec<Mapping>,
    local: LocalFiles,
    present: Present,
}

impl Memory {
    /// The memory of a process, with the mappings of this moment.
    ///
    /// # Errors
    /// It must not be looked at, or is gone.
    pub fn open(pid: u32) -> io::Result<Self> {
        let mappings = Mapping::list(pid).map_err(io::Error::other)?;
        let file = File::open(host::proc_file(pid, "mem"))?;
        Ok(Self { file, mappings, local: LocalFiles::of(pid), present: Present::of(pid) })
    }

    /// The mappings at the time of [`Memory::open`].
    pub fn mappings(&self) -> &[Mapping] {
        &self.mappings
    }

    /// Whether all pages of a mapping can be read without waiting for anybody but this host: it has no file, or a local
    /// one.
    pub fn is_local(&self, mapping: &Mapping) -> bool {
        self.local.hold(mapping)
    }

    /// Reads all of these bytes, or none.
    pub fn read(&self, start: u64, bytes: &mut [u8]) -> Option<()> {
        let end = start.checked_add(bytes.len() as u64)?;
        let is_readable = |page: u64| {
            let at = self.mappings.partition_point(|mapping| mapping.end.0 <= page);
            let mapping = self.mappings.get(at).filter(|mapping| mapping.start.0 <= page);
            mapping.is_some_and(|mapping| self.is_local(mapping) || self.present.has(page))
        };
        let first = start / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        let all = (first..end).step_by(PAGE_BYTES).all(is_readable);
        all.then(|| self.file.read_exact_at(bytes, start).ok()).flatten()
    }
}

/// Tells which pages are present in a process's page table. Reading those keeps nobody waiting.
#[derive(Debug)]
pub struct Present(Option<Pagemap>);

impl Present {
    /// The pages of process `pid`.
    pub fn of(pid: u32) -> Self {
        Self(Pagemap::open(pid).ok())
    }

    /// Whether the page at this address is there.
    pub fn has(&self, address: u64) -> bool {
        let (page, mut entries) = (HostVirt(address / PAGE_BYTES as u64 * PAGE_BYTES as u64), Vec::new());
        let read = self.0.as_ref().is_some_and(|map| map.read(page, 1, &mut entries).is_ok());
        read && entries.first().copied().is_some_and(PagemapEntry::present)
    }

    /// A number of eight bytes, if its pages are there.
    pub fn number(&self, memory: &File, at: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        let is_there = self.has(at) && self.has(at.checked_add(7)?);
        is_there.then(|| memory.read_exact_at(&mut bytes, at).ok()).flatten().map(|()| u64::from_ne_bytes(bytes))
    }
}
