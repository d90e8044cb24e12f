//! The processes that an audit looks at, and the files of the pools.

use super::families::Places;
use super::frames::Seen;
use super::pool::PoolFile;
use super::{GroupFindings, Missed, Place};
use host::{Execution, Mapping, Pagemap, ProcessId};
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

/// A service's account: the members it names and, to be compared with the frames, the savings it reports.
#[derive(Clone, Debug, Default)]
pub struct Engine {
    /// The service's directory.
    pub service: String,
    /// Members of all groups.
    pub members: Vec<Member>,
    /// Savings of each group by the engine's account.
    pub savings: BTreeMap<String, Savings>,
    /// The groups of which the service names all members.
    pub groups: BTreeSet<String>,
    /// The service's own processes. They keep pool files open that no process maps.
    pub pids: Vec<u32>,
}

/// A group: its service and its name. Groups of two services differ even with one name.
type GroupKey = (Of, String);

/// The service to which a group belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Of {
    /// A service that was asked, by its index in the list of accounts.
    Asked(usize),
    /// A service that was not asked. The number tells its pool from others with the same name: two files belong to one
    /// pool if a process maps both.
    Other(usize),
}

impl Of {
    const fn asked(self) -> Option<usize> {
        match self {
            Self::Asked(service) => Some(service),
            Self::Other(_) => None,
        }
    }
}

/// A page of a pool's mapping: the pool's group, device and inode of its file, and the offset.
#[derive(Clone, Copy)]
struct PoolPage {
    group: u16,
    file: (u64, u64),
    offset: u64,
}

/// A callback for each frame: gets the frame, the address at which it is mapped, and, in a mapping of the pool, the
/// page of the pool's file there. Returning `false` stops the scan.
type Take<'a> = dyn FnMut(HostVirt, Seen, Option<PoolPage>) -> bool + 'a;

/// A process whose page table is read.
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
    /// Identifies the process's last `execve`, which forked children have in common with it. `None` if no other subject
    /// may be a fork of it.
    execution: Option<Execution>,
}

/// Counts of pages in mappings of a pool.
#[derive(Clone, Copy, Debug, Default)]
struct InPool {
    member_mappings: u64,
    other_mappings: u64,
    /// Places that an earlier process of the same family of forks has, too: of members, and of other processes.
    inherited: [u64; 2],
    broken: u64,
}

/// All processes and files that are looked at.
#[derive(Debug, Default)]
pub struct Subjects {
    /// The processes.
    pub all: Vec<Subject>,
    /// By group, the number of frames that it maps, and of those that it maps more than once.
    pub frames: Vec<(u64, u64)>,
    /// Processes and files that could not be looked at.
    pub missed: Vec<Missed>,
    names: Vec<GroupKey>,
    numbers: HashMap<GroupKey, u16>,
    in_pool: Vec<InPool>,
    /// Files of the pools, by device and inode.
    files: BTreeMap<(u64, u64), PoolFile>,
}

impl Subjects {
    /// Finds the members, all other processes that map a pool, and the pools' files.
    ///
    /// # Errors
    /// `/proc` cannot be read, or there are more groups than can be told apart.
    pub fn find(engines: &[Engine]) -> anyhow::Result<Self> {
        let mut subjects = Self::default();
        let mut members: BTreeMap<u32, (usize, &Member)> = BTreeMap::new();
        for (service, engine) in engines.iter().enumerate() {
            members.extend(engine.members.iter().map(|m| (m.process.pid, (service, m))));
            for name in engine.members.iter().map(|m| &m.group).chain(engine.savings.keys()) {
                subjects.number((Of::Asked(service), name.clone()));
            }
            for pid in &engine.pids {
                subjects.add_open_files(*pid, service);
            }
        }
        // Members come first: a file that no service holds is of the group of the members that map it.
        let others = host::pids()?.into_iter().filter(|pid| !members.contains_key(pid));
        for pid in members.keys().copied().chain(others) {
            let Ok(process) = ProcessId::of(pid) else { continue };
            let member = members.get(&pid).filter(|(_, m)| m.process == process);
            let member = member.map(|(service, m)| (Of::Asked(*service), m.group.clone()));
            match Mapping::list(pid) {
                Ok(mappings) => subjects.add(process, member, &mappings),
                Err(e) if e.is_gone() => {}
                Err(e) => subjects.missed.push(Missed { group: member.map(|m| m.1), pid, reason: e.to_string() }),
            }
        }
        // Processes of one family follow each other, so that their places are counted together.
        subjects.all.sort_by_key(|subject| (subject.is_member, subject.execution));
        anyhow::ensure!(subjects.names.len() < usize::from(u16::MAX), "too many groups for one audit");
        Ok(subjects)
    }

    fn number(&mut self, key: GroupKey) -> u16 {
        if let Some(number) = self.numbers.get(&key) {
            return *number;
        }
        // An overflow is no error here: `find` checks the number of groups at the end.
        let number = u16::try_from(self.names.len()).unwrap_or(u16::MAX);
        self.names.push(key.clone());
        self.numbers.insert(key, number);
        self.frames.push((0, 0));
        self.in_pool.push(InPool::default());
        number
    }

    /// Guesses the service of a pool file with this name that no asked service holds open. A member's own service comes
    /// first, if the file has the name of the member's group. Then comes the service of another file with this name
    /// that the process maps.
    fn holder(&self, name: &str, member: Option<&GroupKey>, mappings: &[Mapping]) -> Of {
        let own = member.filter(|member| member.1 == name).map(|member| member.0);
        let of = |group: u16| self.names[usize::from(group)].0;
        let mapped = || self.mapped(name, mappings).map(of).max_by_key(|of| of.asked().is_some());
        own.or_else(mapped).unwrap_or(Of::Other(self.names.len()))
    }

    /// Groups of the known files with this name that a process maps.
    fn mapped(&self, name: &str, mappings: &[Mapping]) -> impl Iterator<Item = u16> {
        let files = mappings.iter().filter(move |m| guest::pool_group(m) == Some(name));
        files.filter_map(|m| Some(self.files.get(&(m.device, m.inode))?.group))
    }

    /// Treats several pools with this name, of services that were not asked, as one pool if a process maps them all.
    fn unite(&mut self, name: &str, mappings: &[Mapping]) {
        let mut others: BTreeSet<u16> = self.mapped(name, mappings).collect();
        others.retain(|group| self.names[usize::from(*group)].0.asked().is_none());
        let Some(one) = others.pop_first() else { return };
        let groups = self.files.values_mut().map(|file| &mut file.group);
        let groups = groups.chain(self.all.iter_mut().map(|subject| &mut subject.group));
        groups.filter(|group| others.contains(group)).for_each(|group| *group = one);
    }

    fn add(&mut self, process: ProcessId, member: Option<GroupKey>, mappings: &[Mapping]) {
        let mut group = member.clone().map(|key| self.number(key));
        let mut maps_pool = false;
        let names: BTreeSet<&str> = mappings.iter().filter_map(guest::pool_group).collect();
        names.into_iter().for_each(|name| self.unite(name, mappings));
        for mapping in mappings {
            let Some(name) = guest::pool_group(mapping) else { continue };
            let key = (mapping.device, mapping.inode);
            let pool = match self.files.get(&key) {
                Some(file) => file.group,
                None => self.number((self.holder(name, member.as_ref(), mappings), name.to_owned())),
            };
            if guest::holds_folded_pages(mapping) {
                group.get_or_insert(pool);
                maps_pool = true;
            }
            let file = mapping.file_path(process.pid);
            self.add_file(key, pool, process.pid, &file);
        }
        if let Some(group) = group {
            let (is_member, mappings) = (member.is_some(), mappings.len() as u64);
            let execution = if maps_pool { Execution::of(process.pid) } else { None };
            self.all.push(Subject { process, group, is_member, mappings, execution });
        }
    }

    fn add_open_files(&mut self, pid: u32, service: usize) {
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let name = fs::read_link(entry.path()).unwrap_or_default();
            let Some(group) = name.to_str().and_then(guest::pool_name) else { continue };
            let group = self.number((Of::Asked(service), group.to_owned()));
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
            // The mapping or the process is gone meanwhile. Other processes that map the file are tried too.
            Err(e) if e.is_gone() => {}
            Err(e) => self.missed.push(Missed {
                group: Some(self.names[usize::from(group)].1.clone()),
                pid,
                reason: e.to_string(),
            }),
        }
    }

    /// Sets all counts to zero, for another attempt with more passes.
    pub fn begin(&mut self) {
        self.frames.fill((0, 0));
        self.in_pool.fill(InPool::default());
    }

    /// Passes every frame of every process whose number is `wanted` to `take`, until `take` returns `false`. Returns
    /// `false` in that case. With `count`, pages in mappings of pools are counted, also those whose frames are not
    /// wanted.
    pub fn scan(&mut self, count: bool, wanted: &dyn Fn(u64) -> bool, mut take: impl FnMut(Seen) -> bool) -> bool {
        let mut in_pool = std::mem::take(&mut self.in_pool);
        let mut missed = Vec::new();
        let mut enough = false;
        let mut places = [Places::default(), Places::default()];
        for subject in &self.all {
            let others = usize::from(!subject.is_member);
            let scanned = subject.each_page(self, &mut |address, seen, page| {
                if let Some(page) = page.filter(|_| count) {
                    let counts = &mut in_pool[usize::from(page.group)];
                    match (seen.pool.is_some(), subject.is_member) {
                        (true, true) => counts.member_mappings += 1,
                        (true, false) => counts.other_mappings += 1,
                        (false, true) => counts.broken += 1,
                        (false, false) => {}
                    }
                    let place = (address, page.file, page.offset);
                    let is_inherited = seen.pool.is_some() && places[others].is_inherited(subject.execution, place);
                    counts.inherited[others] += u64::from(is_inherited);
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
            self.missed.push(Missed { group: Some(self.names[usize::from(group)].1.clone()), pid, reason });
        }
        self.in_pool = in_pool;
        !enough
    }

    /// The groups, without the figures that follow from their frames.
    pub fn groups(&self, engines: &[Engine]) -> Vec<GroupFindings> {
        let group = |(n, (service, name)): (usize, &GroupKey)| {
            let processes =
                |is_member| self.all.iter().filter(move |s| usize::from(s.group) == n && s.is_member == is_member);
            let mappings = |is_member| processes(is_member).map(|subject| subject.mappings).sum::<u64>();
            let pool_frames = self.files.values().filter(|f| usize::from(f.group) == n).map(PoolFile::pages).sum();
            let in_pool = self.in_pool[n];
            let engine = service.asked().map(|service| &engines[service]);
            let own = in_pool.member_mappings - in_pool.inherited[0];
            // The engine does not name the members of another service's group. All processes that map its pool count
            // then.
            let is_known = engine.is_some_and(|engine| engine.groups.contains(name));
            let others =
                if is_known { (0, 0) } else { (in_pool.other_mappings - in_pool.inherited[1], mappings(false)) };
            let told = engine.and_then(|engine| engine.savings.get(name)).copied();
            let counted = Savings::of(own + others.0, 0, pool_frames, 0, mappings(true) + others.1);
            let Savings { zero_bytes, tables_bytes, .. } = told.unwrap_or_default();
            let savings = Savings { zero_bytes, tables_bytes, ..counted };
            GroupFindings {
                name: name.clone(),
                service: engine.map(|engine| engine.service.clone()),
                members: processes(true).count(),
                other_processes: processes(false).count(),
                pool_frames,
                pool_mappings: in_pool.member_mappings,
                other_pool_mappings: in_pool.other_mappings,
                inherited_mappings: in_pool.inherited.iter().sum(),
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
        let name = |group: u16| self.names[usize::from(group)].1.clone();
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

    /// The same, with the page of the pool's mapping in which the frame lies.
    fn each_page(&self, subjects: &Subjects, take: &mut Take<'_>) -> host::Result<()> {
        let pid = self.process.pid;
        // The page table is opened first: it stays with this address space, even if another process gets the pid
        // later.
        let pagemap = Pagemap::open(pid)?;
        if !self.process.is_alive() {
            return Ok(());
        }
        for mapping in Mapping::list(pid)?.iter().filter(|m| !m.shared && !m.is_device()) {
            let goes_on = match guest::pool_group(mapping) {
                Some(name) => self.each_of_pool(subjects, &pagemap, mapping, name, take)?,
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
        name: &str,
        take: &mut Take<'_>,
    ) -> host::Result<bool> {
        let key = (mapping.device, mapping.inode);
        let file = subjects.files.get(&key);
        // A file that could not be opened belongs to the process's own group if it has that name, else to none.
        let unread = || subjects.numbers.get(&(subjects.names[usize::from(self.group)].0, name.to_owned())).copied();
        let Some(group) = file.map(|file| file.group).or_else(unread) else {
            return self.each_anonymous(pagemap, mapping, take);
        };
        let (pages, mut entries) = (mapping.bytes() >> PAGE_SHIFT, Vec::new());
        for first in (0..pages).step_by(BATCH_PAGES as usize) {
            let start = mapping.start.add_pages(first);
            pagemap.read(start, BATCH_PAGES.min(pages - first), &mut entries)?;
            for (n, entry) in entries.iter().enumerate() {
                let offset = mapping.offset + ((first + n as u64) << PAGE_SHIFT);
                let broken = !entry.file_or_shared() && (entry.present() || entry.swapped());
                let frame = entry.pfn().or_else(|| file.filter(|_| !broken)?.frame(offset));
                let Some(pfn) = frame else { continue };
                let seen = Seen { pfn, group: self.group, pool: (!broken).then_some(group) };
                if !take(start.add_pages(n as u64), seen, Some(PoolPage { group, file: key, offset })) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn savings_are_counted_whatever_the_engine_tells() {
        let mut subjects = Subjects::default();
        let group = subjects.number((Of::Asked(0), "acme".to_owned()));
        subjects.in_pool[usize::from(group)].member_mappings = 10;
        let told = Savings::of(7000, 3, 5, 4096, 9);
        let savings = BTreeMap::from([("acme".to_owned(), told)]);
        let engine = Engine { savings, groups: BTreeSet::from(["acme".to_owned()]), ..Engine::default() };
        let [found] = &subjects.groups(&[engine])[..] else { panic!("one group") };
        // Zero pages and tables are nobody else's to count.
        assert_eq!(found.savings, Savings::of(10, 3, 0, 4096, 0));
        assert_eq!(found.saved_bytes, found.savings.saved_bytes());
        assert_eq!((found.engine, found.engine_saved_bytes), (Some(told), Some(told.saved_bytes())));
    }
}
