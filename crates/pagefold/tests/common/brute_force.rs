//! A process's memory, counted by brute force: page by page and byte by byte, with none of Pagefold's code.
//! Needs root, and a process that changes nothing meanwhile.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

const ZERO_PAGE: u64 = 1 << 24;
const REFERENCED: u64 = 1 << 2;
const ACTIVE: u64 = 1 << 6;

/// The frames of some processes.
#[derive(Default)]
pub struct Frames {
    /// Content of each frame.
    pub content: HashMap<u64, Vec<u8>>,
    /// How often each process maps each frame.
    pub mappings: BTreeMap<u32, BTreeMap<u64, u64>>,
    /// Whether each frame is anonymous.
    pub anonymous: HashMap<u64, bool>,
}

fn word(file: &File, n: u64) -> u64 {
    let mut bytes = [0; 8];
    match file.read_at(&mut bytes, n * 8) {
        Ok(8) => u64::from_ne_bytes(bytes),
        _ => 0,
    }
}

impl Frames {
    pub fn of(pids: &[u32]) -> Self {
        let mut frames = Self::default();
        for &pid in pids {
            let memory = File::open(format!("/proc/{pid}/mem")).expect("mem");
            frames.add(pid, |page| {
                let mut bytes = vec![0; 4096];
                memory.read_exact_at(&mut bytes, page * 4096).expect("a present page");
                bytes
            });
        }
        frames
    }

    /// The frames alone, without reading their content.
    pub fn without_content(pid: u32) -> Self {
        let mut frames = Self::default();
        frames.add(pid, |_| Vec::new());
        frames
    }

    fn add(&mut self, pid: u32, read: impl Fn(u64) -> Vec<u8>) {
        let pagemap = File::open(format!("/proc/{pid}/pagemap")).expect("pagemap");
        let flags = File::open("/proc/kpageflags").expect("root");
        let mine = self.mappings.entry(pid).or_default();
        for line in fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps").lines() {
            if line.ends_with("[vvar]") || line.ends_with("[vvar_vclock]") || line.ends_with("[vsyscall]") {
                continue;
            }
            let (start, rest) = line.split_once('-').expect("a range");
            let end = rest.split_once(' ').expect("a range").0;
            let page = |hex| u64::from_str_radix(hex, 16).expect("an address") / 4096;
            for page in page(start)..page(end) {
                let entry = word(&pagemap, page);
                let pfn = entry & ((1 << 55) - 1);
                if entry >> 63 == 0 || word(&flags, pfn) & ZERO_PAGE != 0 {
                    continue;
                }
                self.content.insert(pfn, read(page));
                self.anonymous.insert(pfn, entry >> 61 & 1 == 0);
                *mine.entry(pfn).or_default() += 1;
            }
        }
    }

    pub fn mapped(&self, pid: u32) -> u64 {
        self.mappings[&pid].values().sum()
    }

    pub fn resident(&self, pid: u32) -> u64 {
        self.mappings[&pid].len() as u64
    }

    pub fn zero(&self, pid: u32) -> u64 {
        self.mappings[&pid].keys().filter(|f| self.content[f].iter().all(|&b| b == 0)).count() as u64
    }

    pub fn distinct(&self, pid: u32) -> u64 {
        self.mappings[&pid].keys().map(|f| &self.content[f]).collect::<BTreeSet<_>>().len() as u64
    }

    /// Frames that this process maps, and no other process on the host.
    pub fn alone(&self, pid: u32) -> u64 {
        let counts = File::open("/proc/kpagecount").expect("root");
        self.mappings[&pid].iter().filter(|&(&frame, &n)| word(&counts, frame) == n).count() as u64
    }

    /// Frames that the kernel regards as recently used.
    pub fn used(&self) -> usize {
        let flags = File::open("/proc/kpageflags").expect("root");
        self.content.keys().filter(|&&frame| word(&flags, frame) & (REFERENCED | ACTIVE) != 0).count()
    }

    /// Frames beyond the first of each content, over all processes.
    pub fn superfluous(&self) -> u64 {
        let contents: BTreeSet<_> = self.content.values().collect();
        (self.content.len() - contents.len()) as u64
    }

    /// Superfluous frames if only anonymous frames may merge.
    pub fn superfluous_anonymous(&self) -> u64 {
        let anonymous: Vec<_> = self.content.iter().filter(|(f, _)| self.anonymous[f]).map(|(_, c)| c).collect();
        (anonymous.len() - anonymous.iter().collect::<BTreeSet<_>>().len()) as u64
    }

    /// Superfluous frames without merging between processes: those within each process, of frames that only it maps,
    /// and those among the frames that several processes map.
    pub fn superfluous_isolated(&self) -> u64 {
        let mut homes: BTreeMap<Option<u32>, (u64, BTreeSet<&Vec<u8>>)> = BTreeMap::new();
        for (frame, content) in &self.content {
            let mut owners = self.mappings.iter().filter(|(_, frames)| frames.contains_key(frame)).map(|(&pid, _)| pid);
            let first = owners.next();
            let home = if owners.next().is_some() { None } else { first };
            let (frames, contents) = homes.entry(home).or_default();
            *frames += 1;
            contents.insert(content);
        }
        homes.values().map(|(frames, contents)| frames - contents.len() as u64).sum()
    }

    /// Frames that several of the processes map, and their mappings by processes beyond the first.
    pub fn shared(&self) -> (u64, u64) {
        let owners = |frame| self.mappings.values().filter(|frames| frames.contains_key(frame)).count() as u64;
        let shared = self.content.keys().map(owners).filter(|&n| n > 1);
        shared.fold((0, 0), |(frames, more), n| (frames + 1, more + n - 1))
    }
}
