//! Threads that take units of a plan and turn them into samples.

use super::found::{Found, join, mix};
use super::frames::{FrameTables, SharedFrames};
use super::plan::{AddressSpace, Missed, Plan, Source, Unit};
use host::{CachedFile, FrameReader, PagemapEntry};
use page::{Fingerprint, FrameId, GuestIndex, HostVirt, PAGE_BYTES, PageKind, PageSample, Pfn, Region};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Pages that are copied at a time: 64. They and the working memory of the hash fit into a core's second-level cache.
const BATCH_PAGES: usize = FrameReader::BATCH;

/// Options of a scan.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScanOptions {
    /// Whether to read `/proc/kpageflags` for every sample, not only for those that may be KSM's.
    pub all_flags: bool,
    /// Whether to read page frames themselves and not the memory of processes, which leaves no trace in the processes.
    /// Takes root and BPF.
    pub no_trace: bool,
}

/// Counts of a scan besides its samples.
#[derive(Clone, Debug, Default)]
pub struct ScanTotals {
    /// Number of present page-table entries of each guest, without those of the kernel's zero page.
    pub mapped_pages: Vec<u64>,
    /// Number of present pages that could not be read, by guest.
    pub unreadable_pages: Vec<u64>,
    /// Number of guests' page-table entries that map a frame of KSM.
    pub ksm_mappings: u64,
    /// Number of pages read and fingerprinted.
    pub hashed_pages: u64,
    /// Whether frames were distinguished by their numbers, because the kernel showed them.
    pub exact: bool,
    /// Pages and processes that went away meanwhile, or could not be read.
    pub missed: Vec<Missed>,
}

/// What has been counted of one guest so far.
#[derive(Debug, Default)]
struct Progress {
    units_done: AtomicUsize,
    mapped_pages: AtomicU64,
    ksm_mappings: AtomicU64,
    shared: Mutex<SharedFrames>,
    /// By process: number of pages that went away, and number of present pages that could not be read.
    lost: Mutex<BTreeMap<u32, (u64, u64)>>,
    missed: Mutex<Vec<Missed>>,
}

/// A scan under way.
struct Scan<'a> {
    plan: &'a Plan,
    guests: Vec<Progress>,
    next_unit: AtomicUsize,
    hashed_pages: AtomicU64,
    /// `Some` if the kernel shows frame numbers.
    tables: Option<FrameTables>,
    /// Whether KSM has merged any pages on this host.
    ksm: bool,
    options: ScanOptions,
}

/// Takes a lock, even if a thread panicked while it held it: the panic ends the scan anyway.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Plan {
    /// Scans with one thread for each of `sinks`, and gives every sample to the sink of its thread. `done` counts the
    /// pages that have been dealt with.
    ///
    /// # Errors
    /// [`ScanOptions::no_trace`] is set, and page frames cannot be read.
    pub fn scan<S: Send>(
        &self,
        sinks: &mut [S],
        push: impl Fn(&mut S, &PageSample) + Sync,
        options: ScanOptions,
        done: &AtomicU64,
    ) -> host::Result<ScanTotals> {
        let scan = Scan {
            plan: self,
            guests: self.units_of.iter().map(|_| Progress::default()).collect(),
            next_unit: AtomicUsize::new(0),
            hashed_pages: AtomicU64::new(0),
            tables: if host::frames_visible() { FrameTables::open() } else { None },
            ksm: host::Ksm::read().is_some_and(|ksm| ksm.pages_shared > 0),
            options,
        };
        let workers = sinks.iter().map(|_| Worker::new(&scan)).collect::<host::Result<Vec<_>>>()?;
        std::thread::scope(|threads| {
            for (worker, sink) in workers.into_iter().zip(sinks) {
                threads.spawn(|| worker.run(&mut |sample| push(sink, sample), done));
            }
        });
        Ok(scan.totals())
    }
}

impl Scan<'_> {
    /// Index of an owner in lists with one entry for each guest, and a last one for the host.
    fn place(&self, owner: GuestIndex) -> usize {
        if owner == GuestIndex::HOST { self.guests.len() - 1 } else { usize::from(owner.0) }
    }

    fn progress(&self, owner: GuestIndex) -> &Progress {
        &self.guests[self.place(owner)]
    }

    fn totals(self) -> ScanTotals {
        let mut totals = ScanTotals {
            hashed_pages: self.hashed_pages.into_inner(),
            exact: self.tables.is_some(),
            ..ScanTotals::default()
        };
        let last = self.guests.len() - 1;
        for (n, progress) in self.guests.into_iter().enumerate() {
            let owner = if n == last { GuestIndex::HOST } else { GuestIndex(n as u16) };
            totals.missed.append(&mut lock(&progress.missed));
            let lost = lock(&progress.lost);
            for (&pid, &(vanished, unreadable)) in lost.iter() {
                let mut miss = |pages, what| {
                    if pages > 0 {
                        totals.missed.push(Missed { owner, pid, reason: format!("{pages} pages {what}") });
                    }
                };
                // The host's other processes may discard pages at will. The user asked for the guests, so their
                // vanished pages are reported.
                if owner != GuestIndex::HOST {
                    miss(vanished, "were unmapped or discarded before they could be read");
                }
                miss(unreadable, "are present but cannot be read");
            }
            if owner != GuestIndex::HOST {
                totals.ksm_mappings += progress.ksm_mappings.into_inner();
                totals.mapped_pages.push(progress.mapped_pages.into_inner());
                totals.unreadable_pages.push(lost.values().map(|l| l.1).sum());
            }
        }
        totals
    }
}

/// The buffers and tools of one thread.
struct Worker<'a> {
    scan: &'a Scan<'a>,
    /// `Some` if page frames themselves are read.
    frames: Option<FrameReader>,
    bytes: Vec<u8>,
    entries: Vec<PagemapEntry>,
    alone: Vec<Found>,
    shared: Vec<Found>,
}

impl<'a> Worker<'a> {
    fn new(scan: &'a Scan<'a>) -> host::Result<Self> {
        let frames = scan.options.no_trace.then(FrameReader::open).transpose()?;
        let bytes = vec![0; BATCH_PAGES * PAGE_BYTES];
        Ok(Self { scan, frames, bytes, entries: Vec::new(), alone: Vec::new(), shared: Vec::new() })
    }

    fn run(mut self, push: &mut dyn FnMut(&PageSample), done: &AtomicU64) {
        while let Some(unit) = self.scan.plan.units.get(self.scan.next_unit.fetch_add(1, Ordering::Relaxed)) {
            self.look_up(unit);
            let progress = self.scan.progress(unit.owner);
            // A frame that was read before need not be read again.
            {
                let mut seen = lock(&progress.shared);
                self.shared.retain(|found| !self.scan.frame_is_known(found) || !seen.count(found));
            }
            let (mut alone, mut shared) = (std::mem::take(&mut self.alone), std::mem::take(&mut self.shared));
            self.scan.read_flags(&mut alone);
            self.read(unit, &mut alone);
            self.read(unit, &mut shared);
            progress.mapped_pages.fetch_add(alone.len() as u64, Ordering::Relaxed);
            let in_ksm = alone.iter().filter(|f| f.in_ksm()).count();
            progress.ksm_mappings.fetch_add(in_ksm as u64, Ordering::Relaxed);
            for found in &alone {
                push(&found.sample(unit.owner));
            }
            lock(&progress.shared).add_all(shared.iter().map(|f| self.scan.with_frame(f)));
            (self.alone, self.shared) = (alone, shared);
            self.finish_unit(unit, push);
            done.fetch_add(unit.ranges.iter().map(|r| r.pages).sum(), Ordering::Relaxed);
        }
    }

    /// Fills `alone` and `shared` with the unit's resident pages.
    fn look_up(&mut self, unit: &Unit) {
        self.alone.clear();
        self.shared.clear();
        let mut vanished = 0;
        for (range, position) in unit.placed_ranges() {
            let read = match &unit.source {
                Source::Process(space, _) => space.pagemap.read(range.start, range.pages, &mut self.entries),
                Source::File(file) => file.entries(range, &mut self.entries),
            };
            if let Err(error) = read {
                self.miss(unit, error.to_string());
                self.entries.clear();
            }
            let present = self.entries.iter().enumerate().filter(|(_, e)| e.present());
            vanished += range.pages;
            for (n, entry) in present {
                vanished -= 1;
                let found = self.scan.found(unit, range.start.add_pages(n as u64), position + n as u32, *entry);
                if found.shared { &mut self.shared } else { &mut self.alone }.push(found);
            }
        }
        if vanished > 0 {
            lock(&self.scan.progress(unit.owner).lost).entry(unit.pid()).or_default().0 += vanished;
        }
    }

    /// Reads and fingerprints pages. Pages that cannot be read are removed from `pages` and counted.
    fn read(&mut self, unit: &Unit, pages: &mut Vec<Found>) {
        match (&unit.source, self.frames.take()) {
            (_, Some(mut frames)) => {
                pages.chunks_mut(BATCH_PAGES).for_each(|batch| self.read_frames(unit, &mut frames, batch));
                self.frames = Some(frames);
            }
            (Source::Process(space, facts), None) => {
                let careful = |found: &Found| facts.careful || self.scan.may_be_shared(found);
                for alike in pages.chunk_by_mut(|a, b| careful(a) == careful(b)) {
                    let careful = careful(&alike[0]);
                    for batch in alike.chunks_mut(BATCH_PAGES) {
                        self.read_batch(unit, space, careful, batch);
                    }
                }
            }
            (Source::File(file), None) => self.read_cached(file, pages),
        }
        for failed in pages.iter().filter(|f| f.fingerprint.is_none()) {
            self.lose(unit, failed.address);
        }
        pages.retain(|f| f.fingerprint.is_some());
        self.scan.hashed_pages.fetch_add(pages.len() as u64, Ordering::Relaxed);
    }

    fn read_frames(&mut self, unit: &Unit, frames: &mut FrameReader, batch: &mut [Found]) {
        let mut numbers = [Pfn(0); BATCH_PAGES];
        for (number, found) in numbers.iter_mut().zip(batch.iter()) {
            *number = Pfn(found.frame.0);
        }
        let read = frames.read(&numbers[..batch.len()], |n, page| batch[n].fingerprint = Some(Fingerprint::of(page)));
        if let Err(error) = read {
            self.miss(unit, error.to_string());
        }
    }

    fn read_batch(&mut self, unit: &Unit, space: &AddressSpace, careful: bool, batch: &mut [Found]) {
        let mut rest = batch;
        while !rest.is_empty() {
            let ranges = join(rest);
            let read = if careful {
                space.memory.read(&ranges, &mut self.bytes)
            } else {
                space.memory.read_unshared(&ranges, &mut self.bytes)
            };
            let got = match read {
                Ok(got) => got,
                Err(error) if error.is_bad_address() => 0,
                // The process is gone, which `finish_unit` will report.
                Err(error) if error.is_gone() => return,
                Err(error) => return self.miss(unit, error.to_string()),
            };
            for (found, page) in rest.iter_mut().zip(self.bytes.chunks_exact(PAGE_BYTES)).take(got) {
                found.fingerprint = Some(Fingerprint::of(page));
            }
            // The page behind those that were copied is the one that could not be read.
            rest = rest.get_mut(got + 1..).unwrap_or_default();
        }
    }

    fn read_cached(&mut self, file: &CachedFile, batch: &mut [Found]) {
        for found in batch {
            let page = &mut self.bytes[..PAGE_BYTES];
            if file.read(found.address, page).is_ok() {
                found.fingerprint = Some(Fingerprint::of(page));
            }
        }
    }

    /// Counts a page that could not be read.
    fn lose(&mut self, unit: &Unit, at: HostVirt) {
        let still_there = match &unit.source {
            Source::Process(space, _) => {
                space.pagemap.read(at, 1, &mut self.entries).is_ok()
                    && self.entries.first().is_some_and(|e| e.present())
            }
            Source::File(_) => false,
        };
        let mut lost = lock(&self.scan.progress(unit.owner).lost);
        let (vanished, unreadable) = lost.entry(unit.pid()).or_default();
        *(if still_there { unreadable } else { vanished }) += 1;
    }

    fn miss(&self, unit: &Unit, reason: String) {
        let missed = Missed { owner: unit.owner, pid: unit.pid(), reason };
        let mut list = lock(&self.scan.progress(unit.owner).missed);
        if !list.contains(&missed) {
            list.push(missed);
        }
    }

    /// After a guest's last unit: makes the samples of its shared frames, and reports processes that have ended
    /// meanwhile.
    fn finish_unit(&self, unit: &Unit, push: &mut dyn FnMut(&PageSample)) {
        let progress = self.scan.progress(unit.owner);
        let units = &self.scan.plan.units[self.scan.plan.units_of[self.scan.place(unit.owner)].clone()];
        // AcqRel: what other threads wrote about this guest happens before the last thread reads it.
        if progress.units_done.fetch_add(1, Ordering::AcqRel) + 1 < units.len() {
            return;
        }
        let frames = std::mem::take(&mut *lock(&progress.shared));
        match frames.resolve(unit.owner, self.scan.tables.as_ref()) {
            Ok(resolved) => {
                resolved.samples.iter().for_each(push);
                progress.mapped_pages.fetch_add(resolved.mappings, Ordering::Relaxed);
                progress.ksm_mappings.fetch_add(resolved.ksm_mappings, Ordering::Relaxed);
            }
            Err(error) => self.miss(unit, error.to_string()),
        }
        for space in units.chunk_by(|a, b| a.pid() == b.pid()) {
            if let Source::Process(living, _) = &space[0].source
                && unit.owner != GuestIndex::HOST
                && !living.pagemap.is_alive()
            {
                self.miss(&space[0], "ended, or executed another program, while it was scanned".to_owned());
            }
        }
    }
}

impl Scan<'_> {
    fn found(&self, unit: &Unit, address: HostVirt, position: u32, entry: PagemapEntry) -> Found {
        let (pid, region, kind) = match &unit.source {
            Source::Process(space, facts) if entry.file_or_shared() => (space.pid, facts.region, facts.file_kind),
            Source::Process(space, facts) => (space.pid, facts.region, PageKind::Anon),
            Source::File(_) => (0, Region::PageCache, PageKind::File),
        };
        let frame = match entry.pfn() {
            Some(Pfn(pfn)) if self.tables.is_some() => FrameId(pfn & FrameId::MAX),
            _ => unit.inferred_frame(address, kind),
        };
        let shared = !entry.exclusive() || pid == 0;
        Found { position, frame, fingerprint: None, pid, address, kind, region, shared, kpageflags: None }
    }

    /// Whether reading a page with `process_vm_readv` could end its sharing; see [`host::ProcessMemory`].
    fn may_be_shared(&self, found: &Found) -> bool {
        let ksm = if self.tables.is_some() { found.in_ksm() } else { self.ksm };
        found.kind == PageKind::Anon && (found.shared || ksm)
    }

    /// Whether a page's frame is known before its content is read.
    fn frame_is_known(&self, found: &Found) -> bool {
        self.tables.is_some() || found.kind != PageKind::Anon
    }

    /// The page with its frame, inferred from the content if need be. Private memory shared by `fork` has the same
    /// address and the same content in both processes.
    fn with_frame(&self, found: &Found) -> Found {
        if self.frame_is_known(found) {
            return *found;
        }
        let content = found.fingerprint.map_or(0, |f| f.0);
        Found { frame: mix(&[content, found.address.page()]), ..*found }
    }

    /// Reads the flags of frames, if KSM holds pages of this host or all flags are asked for.
    fn read_flags(&self, pages: &mut [Found]) {
        let Some(tables) = self.tables.as_ref().filter(|_| self.ksm || self.options.all_flags) else { return };
        pages.sort_unstable_by_key(|f| f.frame);
        let numbers: Vec<_> = pages.iter().map(|f| Pfn(f.frame.0)).collect();
        let mut page = pages.iter_mut();
        // The files were opened, so the read can fail only for a frame that the machine lost meanwhile. Its flags
        // then stay unknown.
        let _ = tables.flags.read(&numbers, |_, word| {
            if let Some(found) = page.next() {
                found.kpageflags = Some(word);
            }
        });
        pages.sort_unstable_by_key(|f| f.position);
    }
}

impl Unit {
    fn pid(&self) -> u32 {
        match &self.source {
            Source::Process(space, _) => space.pid,
            Source::File(_) => 0,
        }
    }

    /// The frame number inferred from visible properties of a page, for callers without root; see the head of
    /// `scan.rs`.
    fn inferred_frame(&self, address: HostVirt, kind: PageKind) -> FrameId {
        match &self.source {
            Source::Process(space, _) if kind == PageKind::Anon => mix(&[u64::from(space.pid), address.page()]),
            Source::Process(_, facts) => {
                let offset = facts.mapping.offset + (address.0 - facts.mapping.start.0);
                mix(&[facts.mapping.device, facts.mapping.inode, offset])
            }
            Source::File(file) => mix(&[file.device, file.inode, address.0]),
        }
    }
}
