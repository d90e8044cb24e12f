//! The list of pages that a scan will read. It is made beforehand, so that every pass and every thread uses the same
//! list.

use crate::Guest;
use crate::region::RegionMap;
use host::{CachedFile, Mapping, PageRange, Pagemap, ProcessMemory};
use page::{GuestIndex, HostVirt, PAGE_SHIFT, PageKind, Region};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Most pages of a unit: 16 MiB.
const UNIT_PAGES: u64 = 4096;
/// A unit that is more than half full ends at a gap of more pages than this.
const NEAR_PAGES: u64 = 32;
/// Most positions of a scan: the census's index keeps a position in 32 bits, and needs two values for itself.
const MOST_POSITIONS: u64 = u32::MAX as u64 - 2;

/// Message for processes that the caller may not read.
const NO_RIGHT: &str = "no right to read it: run as root (with CAP_SYS_PTRACE)";

/// The host's own processes and files that a scan reads besides the guests.
#[derive(Clone, Debug, Default)]
pub struct HostSide {
    /// Processes that belong to no guest.
    pub pids: Vec<u32>,
    /// Files whose page cache is read, mapped or not: disk images, for instance.
    pub files: Vec<PathBuf>,
}

/// A process or file that a scan could not read, or not completely.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missed {
    /// Its owner.
    pub owner: GuestIndex,
    /// The process; 0 for none.
    pub pid: u32,
    /// The reason.
    pub reason: String,
}

/// Where the pages of a unit are read from.
#[derive(Debug)]
pub(super) enum Source {
    /// The address space of a process.
    Process(Arc<AddressSpace>, Arc<MappingFacts>),
    /// The page cache of a file; addresses are offsets in the file.
    File(Arc<CachedFile>),
}

/// One process that is scanned.
#[derive(Debug)]
pub(super) struct AddressSpace {
    pub pid: u32,
    pub pagemap: Pagemap,
    pub memory: ProcessMemory,
}

/// The properties of a mapping that the scan needs.
#[derive(Debug)]
pub(super) struct MappingFacts {
    pub region: Region,
    /// The kind of those of its pages that the kernel does not call anonymous.
    pub file_kind: PageKind,
    /// Whether it must be read through `/proc/PID/mem`. Either the process itself may not read it, or its faults are
    /// served by user space (userfaultfd), which may never answer.
    pub careful: bool,
    pub mapping: Mapping,
}

/// A piece of work of a scanning thread: neighbouring resident pages of one mapping or file.
#[derive(Debug)]
pub(super) struct Unit {
    pub owner: GuestIndex,
    pub source: Source,
    pub ranges: Vec<PageRange>,
    /// Position of the first page. Each page of a range takes one position, and so does each gap between ranges.
    pub position: u32,
}

/// The list of all pages that a scan will read.
#[derive(Debug)]
pub struct Plan {
    pub(super) units: Vec<Unit>,
    /// Units of each guest, in order of guests; the host's come last.
    pub(super) units_of: Vec<Range<usize>>,
    /// Positions of each guest's pages; those of the host's own pages come last.
    positions_of: Vec<Range<u32>>,
    /// Number of pages in swap, by guest; the host's come last.
    swapped_pages: Vec<u64>,
    pages: u64,
    missed: Vec<Missed>,
}

impl Plan {
    /// Looks up the resident pages of `guests`, and of the processes and files in `host_side`. Those that cannot be
    /// read are listed in [`Plan::missed`].
    pub fn new(guests: &[Guest], host_side: &HostSide) -> Self {
        // If this process's own page table cannot be read, reading other processes' page tables will give the reason.
        let has_pagemap_scan = host::has_pagemap_scan().unwrap_or(true);
        // Any process may handle the page faults of another (userfaultfd), and only root sees every process.
        let faults_are_the_kernels = host::frames_visible() && host::is_userfaultfd_open().is_ok_and(|open| !open);
        let list_is_enough = has_pagemap_scan && faults_are_the_kernels;
        let mut plan = Planner { has_pagemap_scan, list_is_enough, ..Planner::default() };
        for (n, guest) in guests.iter().enumerate() {
            plan.begin(GuestIndex(n as u16));
            for &pid in &guest.pids {
                plan.add_process(pid, Some(guest));
            }
            plan.end();
        }
        plan.begin(GuestIndex::HOST);
        for &pid in &host_side.pids {
            plan.add_process(pid, None);
        }
        for path in &host_side.files {
            plan.add_file(path);
        }
        plan.end();
        plan.sum_up_denied();
        plan.finish()
    }

    /// Number of page-table entries that will be looked at.
    pub const fn pages(&self) -> u64 {
        self.pages
    }

    /// Positions of each guest in the order of the scan.
    pub fn positions(&self) -> &[Range<u32>] {
        &self.positions_of[..self.positions_of.len() - 1]
    }

    /// Number of pages in swap of each guest, the host's last.
    pub fn swapped_pages(&self) -> &[u64] {
        &self.swapped_pages
    }

    /// The processes and files that cannot be read.
    pub fn missed(&self) -> &[Missed] {
        &self.missed
    }

    /// Every stretch of neighbouring pages of guests: the pid, the number of the first page, how many pages it has, and
    /// the position of the first one.
    pub fn stretches(&self) -> impl Iterator<Item = (u32, u64, u32, u32)> {
        self.units
            .iter()
            .filter_map(|u| match &u.source {
                Source::Process(space, _) if u.owner != GuestIndex::HOST => Some((space.pid, u)),
                _ => None,
            })
            .flat_map(|(pid, unit)| {
                unit.placed_ranges()
                    .map(move |(range, position)| (pid, range.start.page(), range.pages as u32, position))
            })
    }
}

/// A stretch of neighbouring pages in the order of the scan, with its process or file.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Position of the first page.
    pub position: u32,
    /// Number of pages.
    pub pages: u32,
    /// The process; 0 for the page cache of a file.
    pub pid: u32,
    /// Address of the first page in the process, or its offset in the file.
    pub first: HostVirt,
    /// The file, if the pages are of a mapped file or of its page cache.
    pub file: Option<&'a str>,
}

impl Plan {
    /// All stretches of pages, including the host's, by ascending position.
    pub fn places(&self) -> impl Iterator<Item = Place<'_>> {
        self.units.iter().flat_map(|unit| {
            let (pid, file) = match &unit.source {
                Source::Process(space, facts) => {
                    (space.pid, Some(facts.mapping.name.as_str()).filter(|_| facts.mapping.has_file()))
                }
                Source::File(file) => (0, file.path().to_str()),
            };
            unit.placed_ranges().map(move |(range, position)| Place {
                position,
                pages: range.pages as u32,
                pid,
                first: range.start,
                file,
            })
        })
    }
}

impl Unit {
    /// The ranges with the position of the first page of each.
    pub fn placed_ranges(&self) -> impl Iterator<Item = (PageRange, u32)> {
        self.ranges.iter().scan(self.position, |position, range| {
            let here = *position;
            *position += range.pages as u32 + 1;
            Some((*range, here))
        })
    }
}

/// A plan to which processes and files are still added.
#[derive(Default)]
struct Planner {
    has_pagemap_scan: bool,
    /// Whether `/proc/PID/maps` is enough. It lacks usage and flags of mappings, for which the kernel would have to
    /// walk their page tables (`smaps`).
    list_is_enough: bool,
    owner: Option<GuestIndex>,
    units: Vec<Unit>,
    units_of: Vec<Range<usize>>,
    positions_of: Vec<Range<u32>>,
    swapped_pages: Vec<u64>,
    missed: Vec<Missed>,
    /// Processes of the host that the caller may not read.
    denied: Vec<u32>,
    first_unit: usize,
    first_position: u64,
    position: u64,
    pages: u64,
    full: bool,
}

impl Planner {
    fn begin(&mut self, owner: GuestIndex) {
        self.owner = Some(owner);
        self.first_unit = self.units.len();
        self.first_position = self.position;
        self.swapped_pages.push(0);
    }

    fn end(&mut self) {
        self.units_of.push(self.first_unit..self.units.len());
        self.positions_of.push(self.first_position as u32..self.position as u32);
    }

    fn owner(&self) -> GuestIndex {
        self.owner.unwrap_or(GuestIndex::HOST)
    }

    fn miss(&mut self, pid: u32, reason: String) {
        let owner = self.owner();
        self.missed.push(Missed { owner, pid, reason });
    }

    fn add_process(&mut self, pid: u32, guest: Option<&Guest>) {
        if let Err(error) = self.try_process(pid, guest) {
            // Other processes of the host come and go, so one that is gone is no loss. The user asked for the guests'
            // processes, so each that is missing is reported.
            match guest {
                None if error.is_gone() => {}
                None if error.is_denied() => self.denied.push(pid),
                _ if error.is_denied() => self.miss(pid, NO_RIGHT.to_owned()),
                _ => self.miss(pid, error.to_string()),
            }
        }
    }

    fn try_process(&mut self, pid: u32, guest: Option<&Guest>) -> host::Result<()> {
        // The page table is opened first: it will show whether the process executed another program after this point.
        let pagemap = Pagemap::open(pid)?;
        let mappings = if self.list_is_enough { Mapping::list(pid)? } else { Mapping::read_all(pid)? };
        let regions = RegionMap::new(guest, &mappings);
        let space = Arc::new(AddressSpace { pid, pagemap, memory: ProcessMemory::open(pid)? });
        *self.swapped_pages.last_mut().expect("begin pushed one") += host::swapped_bytes(pid)? >> PAGE_SHIFT;
        for (n, mapping) in mappings.into_iter().enumerate() {
            // Without `PAGEMAP_SCAN` entries are read one by one, so mappings that only reserve address space, which
            // may be terabytes, are skipped.
            let empty = !self.has_pagemap_scan && mapping.usage.rss_bytes + mapping.usage.hugetlb_bytes == 0;
            if empty || mapping.is_device() {
                continue;
            }
            let ranges = space.pagemap.present_ranges(mapping.start, mapping.end)?;
            let facts = Arc::new(MappingFacts {
                region: regions.region_of(n),
                file_kind: match () {
                    () if crate::holds_folded_pages(&mapping) => PageKind::Folded,
                    () if mapping.shmem => PageKind::Shmem,
                    () => PageKind::File,
                },
                careful: !mapping.read || mapping.has_flag(b"um") || mapping.has_flag(b"ui"),
                mapping,
            });
            self.add_ranges(&ranges, || Source::Process(space.clone(), facts.clone()));
        }
        Ok(())
    }

    fn add_file(&mut self, path: &std::path::Path) {
        let ranges = CachedFile::open(path).and_then(|file| Ok((file.cached_ranges()?, Arc::new(file))));
        match ranges {
            Ok((ranges, file)) => self.add_ranges(&ranges, || Source::File(file.clone())),
            Err(error) => self.miss(0, error.to_string()),
        }
    }

    /// Cuts ranges into units.
    fn add_ranges(&mut self, ranges: &[PageRange], source: impl Fn() -> Source) {
        let mut unit: Vec<PageRange> = Vec::new();
        let mut unit_pages = 0;
        for range in ranges {
            let mut rest = *range;
            while rest.pages > 0 {
                let far = unit.last().is_some_and(|l| rest.start.page() - l.end().page() > NEAR_PAGES);
                if unit_pages >= UNIT_PAGES || far && unit_pages > UNIT_PAGES / 2 {
                    let goes_on = unit.last().is_some_and(|l| l.end() == rest.start);
                    self.add_unit(std::mem::take(&mut unit), goes_on, source());
                    unit_pages = 0;
                }
                let taken = rest.pages.min(UNIT_PAGES - unit_pages);
                unit.push(PageRange { start: rest.start, pages: taken });
                rest = PageRange { start: rest.start.add_pages(taken), pages: rest.pages - taken };
                unit_pages += taken;
            }
        }
        if !unit.is_empty() {
            self.add_unit(unit, false, source());
        }
    }

    /// Adds a unit. `goes_on` says that the next unit's first page is the neighbour of this one's last, so that there
    /// is no gap between them.
    fn add_unit(&mut self, ranges: Vec<PageRange>, goes_on: bool, source: Source) {
        let pages: u64 = ranges.iter().map(|r| r.pages).sum();
        let positions = pages + ranges.len() as u64 - u64::from(goes_on);
        if self.position + positions > MOST_POSITIONS {
            if !std::mem::replace(&mut self.full, true) {
                self.miss(0, format!("more than {MOST_POSITIONS} pages: select fewer guests"));
            }
            return;
        }
        self.units.push(Unit { owner: self.owner(), source, ranges, position: self.position as u32 });
        self.position += positions;
        self.pages += pages;
    }

    fn sum_up_denied(&mut self) {
        match *self.denied.as_slice() {
            [] => {}
            [pid] => self.miss(pid, NO_RIGHT.to_owned()),
            [pid, ref others @ ..] => self.miss(pid, format!("{NO_RIGHT}; so with {} others", others.len())),
        }
    }

    fn finish(self) -> Plan {
        let Self { units, units_of, positions_of, swapped_pages, missed, pages, .. } = self;
        Plan { units, units_of, positions_of, swapped_pages, pages, missed }
    }
}
