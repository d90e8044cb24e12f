//! The processes that an audit looks at, and the files of the pools.

use super::frames::Seen;
use super::pool::PoolFile;
use super::{GroupFindings, Missed, Place};
use host::{Mapping, Pagemap, ProcessId};
use page::{HostVirt, PAGE_SHIFT, Pfn, Savings};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Number of page-table entries read at once.
const BATCH_PAGES: u64 = 1 << 14;

/// A member of a group.
#[derive(Clone, Debug)]
pub struct Member {
    /// The group.
    pub group: String,
    /// The process.
    pub process: ProcessId,
}

/// The service's account: the members it names and, to be compared with the frames, the savings it reports.
#[derive(Clone, Debug, Default)]
pub struct Engine {
    /// Members of all groups.
    pub members: Vec<Member>,
    /// Savings of each group by the engine's account.
    pub savings: BTreeMap<String, Savings>,
    /// The groups whose members it names completely.
    pub groups: BTreeSet<String>,
    /// Its own processes, which keep open the files of pools that nobody maps.
    pub pids: Vec<u32>,
}

/// Takes a frame, its address, and the group whose pool's mapping a private page lies in. `false` stops the scan.
type Take<'a> = dyn FnMut(HostVirt, Seen, Option<u16>) -> bool + 'a;

/// A process that is looked at.
#[derive(Debug)]
pub struct Subject {
    /// The process.
    pub process: ProcessId,
    /// Its group.
    pub group: u16,
    /// Whether it is a member; other subjects only map a pool.
    pub is_member: bool,
    /// Number of its mappings.
    pub mappings: u64,
}

/// Counts of pages in mappings of a pool.
#[derive(Clone, Copy, Debug, Default)]
struct InPool {
    member_mappings: u64,
    other_mappings: u64,
    broken: u64,
}

/// All processes and files that are looked at.
#[derive(Debug, Default)]
pub struct Subjects {
    /// The processes.
    pub all: Vec<Subject>,
    /// By group, the number of frames, and of those that it maps more than once.
    pub frames: Vec<(u64, u64)>,
    /// Processes and files that could not be looked at.
    pub missed: Vec<Missed>,
    names: Vec<String>,
    numbers: HashMap<String, u16>,
    in_pool: Vec<InPool>,
    /// Files of the pools, by device and inode.
    files: BTreeMap<(u64, u64), PoolFile>,
}

impl Subjects {
    /// Finds the members, all other processes that map a pool, and the pools' files.
    ///
    /// # Errors
    /// `/proc` cannot be read, or there are more groups than can be told apart.
    pub fn find(engine: &Engine) -> anyhow::Result<Self> {
        let mut subjects = Self::default();
        let members: HashMap<u32, &Member> = engine.members.iter().map(|m| (m.process.pid, m)).collect();
        for name in engine.members.iter().map(|m| &m.group).chain(engine.savings.keys()) {
            subjects.number(name);
        }
        for pid in host::pids()? {
            let Ok(process) = ProcessId::of(pid) else { continue };
            let member = members.get(&pid).filter(|m| m.process == process).copied();
            match Mapping::list(pid) {
                Ok(mappings) => subjects.add(process, member, &mappings),
                Err(e) if e.is_gone() => {}
                Err(e) => subjects.miss(pid, member, &e),
            }
        }
        for pid in &engine.pids {
            subjects.add_open_files(*pid);
        }
        anyhow::ensure!(subjects.names.len() < usize::from(u16::MAX), "too many groups for one audit");
        Ok(subjects)
    }

    fn number(&mut self, name: &str) -> u16 {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        // The number of groups is checked at the end.
        let number = u16::try_from(self.names.len()).unwrap_or(u16::MAX);
        self.numbers.insert(name.to_owned(), number);
        self.names.push(name.to_owned());
        self.frames.push((0, 0));
        self.in_pool.push(InPool::default());
        number
    }

    fn miss(&mut self, pid: u32, member: Option<&Member>, error: &host::Error) {
        self.missed.push(Missed { group: member.map(|m| m.group.clone()), pid, reason: error.to_string() });
    }

    fn add(&mut self, process: ProcessId, member: Option<&Member>, mappings: &[Mapping]) {
        let mut group = member.map(|m| self.number(&m.group));
        for mapping in mappings {
            let Some(pool) = guest::pool_group(mapping) else { continue };
            let pool = self.number(pool);
            if guest::holds_folded_pages(mapping) {
                group.get_or_insert(pool);
            }
            let file = mapping.file_path(process.pid);
            self.add_file((mapping.device, mapping.inode), pool, process.pid, &file);
        }
        if let Some(group) = group {
            let (is_member, mappings) = (member.is_some(), mappings.len() as u64);
            self.all.push(Subject { process, group, is_member, mappings });
        }
    }

    fn add_open_files(&mut self, pid: u32) {
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let name = fs::read_link(entry.path()).unwrap_or_default();
            let Some(group) = name.to_str().and_then(guest::pool_name) else { continue };
            let group = self.number(group);
            if let Ok(found) = fs::metadata(entry.path()) {
                self.add_file((found.dev(), found.ino()), group, pid, &entry.path());
            }
        }
    }

    fn add_file(&mut self, key: (u64, u64), group: u16, pid: u32, path: &Path) {
        if self.files.contains_key(&key) {
            return;
        }
        match PoolFile::read(path, group) {
            Ok(file) => _ = self.files.insert(key, file),
            // Unmapped meanwhile, or the process has ended. The other processes that map the file are asked for it as
            // well.
            Err(e) if e.is_gone() => {}
            Err(e) => self.missed.push(Missed {
                group: Some(self.names[usize::from(group)].clone()),
                pid,
                reason: e.to_string(),
            }),
        }
    }

    /// Resets the counts of an earlier attempt.
    pub fn begin(&mut self) {
        self.frames.fill((0, 0));
        self.in_pool.fill(InPool::default());
    }

    /// Passes every frame with a `wanted` number of every process to `take`, until `take` returns `false`. Returns
    /// `false` in that case. With `count`, mappings of pools are counted, whatever their frames.
    pub fn scan(&mut self, count: bool, wanted: &dyn Fn(u64) -> bool, mut take: impl FnMut(Seen) -> bool) -> bool {
        let mut in_pool = std::mem::take(&mut self.in_pool);
        let mut missed = Vec::new();
        let mut enough = false;
        for subject in &self.all {
            let scanned = subject.each_page(self, &mut |_, seen, broken_of| {
                if count {
                    let counts = &mut in_pool[usize::from(seen.pool.or(broken_of).unwrap_or(seen.group))];
                    match (seen.pool.is_some(), subject.is_member) {
                        (true, true) => counts.member_mappings += 1,
                        (true, false) => counts.other_mappings += 1,
                        (false, true) => counts.broken += u64::from(broken_of.is_some()),
                        (false, false) => {}
                    }
                }
                enough |= wanted(seen.pfn.0) && !take(seen);
                !enough
            });
            match scanned {
                Ok(()) => {}
                Err(e) if e.is_gone() => {}
                Err(e) => missed.push((subject.process.pid, subject.group, e.to_string())),
            }
            if enough {
                break;
            }
        }
        for (pid, group, reason) in missed.into_iter().filter(|_| count) {
            self.missed.push(Missed { group: Some(self.names[usize::from(group)].clone()), pid, reason });
        }
        self.in_pool = in_pool;
        !enough
    }

    /// The groups, without the figures that follow from their frames.
    pub fn groups(&self, engine: &Engine) -> Vec<GroupFindings> {
        let group = |(n, name): (usize, &String)| {
            let processes =
                |is_member| self.all.iter().filter(move |s| usize::from(s.group) == n && s.is_member == is_member);
            let mappings = |is_member| processes(is_member).map(|subject| subject.mappings).sum::<u64>();
            let pool_frames = self.files.values().filter(|f| usize::from(f.group) == n).map(PoolFile::pages).sum();
            let in_pool = self.in_pool[n];
            // The engine does not name the members of another service's group. All processes that map its pool count
            // then.
            let others = if engine.groups.contains(name) { (0, 0) } else { (in_pool.other_mappings, mappings(false)) };
            let told = engine.savings.get(name).copied();
            let counted = Savings::of(in_pool.member_mappings + others.0, 0, pool_frames, 0, mappings(true) + others.1);
            let Savings { zero_bytes, tables_bytes, .. } = told.unwrap_or_default();
            let savings = Savings { zero_bytes, tables_bytes, ..counted };
            GroupFindings {
                name: name.clone(),
                members: processes(true).count(),
                other_processes: processes(false).count(),
                pool_frames,
                pool_mappings: in_pool.member_mappings,
                other_pool_mappings: in_pool.other_mappings,
                broken_pages: in_pool.broken,
                saved_bytes: savings.saved_bytes(),
                savings,
                engine_saved_bytes: told.map(|told| told.saved_bytes()),
                engine: told,
                ..GroupFindings::default()
            }
        };
        self.names.iter().enumerate().map(group).collect()
    }

    /// A place, with names in place of numbers.
    pub fn place(&self, (_, subject, address, pool): &(Pfn, usize, HostVirt, Option<u16>)) -> Place {
        let subject = &self.all[*subject];
        let name = |group: u16| self.names[usize::from(group)].clone();
        Place { group: name(subject.group), pid: subject.process.pid, address: address.0, pool: pool.map(name) }
    }
}

impl Subject {
    /// Passes every frame of the process's private memory with its address to `take`, until `take` returns `false`.
    ///
    /// # Errors
    /// It has ended, or may not be looked at.
    pub fn each_frame(&self, subjects: &Subjects, take: &mut dyn FnMut(HostVirt, Seen) -> bool) -> host::Result<()> {
        self.each_page(subjects, &mut |address, seen, _| take(address, seen))
    }

    /// The same, with the group in whose pool's mapping an anonymous page lies.
    fn each_page(&self, subjects: &Subjects, take: &mut Take<'_>) -> host::Result<()> {
        let pid = self.process.pid;
        // The page table is opened first: it stays with this address space, even if another process gets the pid
        // later.
        let pagemap = Pagemap::open(pid)?;
        if !self.process.is_alive() {
            return Ok(());
        }
        for mapping in Mapping::list(pid)?.iter().filter(|m| !m.shared && !m.is_device()) {
            let goes_on = match guest::pool_group(mapping).and_then(|name| subjects.numbers.get(name)) {
                Some(pool) => self.each_of_pool(subjects, &pagemap, mapping, *pool, take)?,
                None => self.each_anonymous(&pagemap, mapping, take)?,
            };
            if !goes_on {
                break;
            }
        }
        Ok(())
    }

    fn each_anonymous(&self, pagemap: &Pagemap, mapping: &Mapping, take: &mut Take<'_>) -> host::Result<bool> {
        let mut entries = Vec::new();
        for range in pagemap.present_ranges(mapping.start, mapping.end)? {
            for first in (0..range.pages).step_by(BATCH_PAGES as usize) {
                let start = range.start.add_pages(first);
                pagemap.read(start, BATCH_PAGES.min(range.pages - first), &mut entries)?;
                for (n, entry) in entries.iter().enumerate().filter(|(_, e)| !e.file_or_shared()) {
                    let Some(pfn) = entry.pfn() else { continue };
                    let seen = Seen { pfn, group: self.group, pool: None };
                    if !take(start.add_pages(n as u64), seen, None) {
                        return Ok(false);
                    }
                }
            }
        }
        Ok(true)
    }

    /// Pages of the pool belong to the process even before it touches them: its first access will map them.
    fn each_of_pool(
        &self,
        subjects: &Subjects,
        pagemap: &Pagemap,
        mapping: &Mapping,
        pool: u16,
        take: &mut Take<'_>,
    ) -> host::Result<bool> {
        let file = subjects.files.get(&(mapping.device, mapping.inode));
        let (pages, mut entries) = (mapping.bytes() >> PAGE_SHIFT, Vec::new());
        for first in (0..pages).step_by(BATCH_PAGES as usize) {
            let start = mapping.start.add_pages(first);
            pagemap.read(start, BATCH_PAGES.min(pages - first), &mut entries)?;
            for (n, entry) in entries.iter().enumerate() {
                let offset = mapping.offset + ((first + n as u64) << PAGE_SHIFT);
                let broken = !entry.file_or_shared() && (entry.present() || entry.swapped());
                let frame = entry.pfn().or_else(|| file.filter(|_| !broken)?.frame(offset));
                let Some(pfn) = frame else { continue };
                let seen = Seen { pfn, group: self.group, pool: (!broken).then_some(pool) };
                if !take(start.add_pages(n as u64), seen, broken.then_some(pool)) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}
