//! Folded pages of guests: pages of pool mappings that were not copied on write. Most have no page-table entry, so they
//! are looked up in the pool's file.
//!
//! Any process may map a file with the name of a pool, of any length and any number of times. Only data that the file
//! really holds is read (`SEEK_DATA`), and at most [`MOST_PAGES`] for one guest.

use anyhow::{Context, ensure};
use guest::{Guest, holds_folded_pages};
use host::{Mapping, Pagemap, PagemapEntry};
use page::{Fingerprint, HostVirt, PAGE_BYTES};
use rustix::fs::{SeekFrom, seek};
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;

/// Most folded pages of a guest: 1 TiB.
const MOST_PAGES: u64 = 1 << 28;
/// Most pages of one read of `pagemap`.
const BATCH_PAGES: u64 = 1 << 14;
/// Most attempts to read a guest whose mappings change meanwhile.
const LOOKS: usize = 5;

/// Folded pages of a guest, in page tables or not.
#[derive(Default)]
pub struct Folded {
    /// Number of the folded pages, without zero pages.
    pub pages: u64,
    /// Fingerprints of the folded pages' contents.
    pub contents: HashSet<u64>,
    /// Number of mappings that were unmapped or replaced before their file could be opened.
    pub gone_mappings: u64,
}

/// Fingerprints of the slots of pools, by device and inode of the pool's file and by offset in the file. Each slot is
/// read once.
#[derive(Default)]
pub struct Slots {
    contents: BTreeMap<(u64, u64), BTreeMap<u64, u64>>,
}

impl Slots {
    /// Number of slots that the guests read so far map.
    pub fn pages(&self) -> u64 {
        self.contents.values().map(|slots| slots.len() as u64).sum()
    }

    /// The folded pages of a guest. If mappings of the guest change meanwhile, all are read again, [`LOOKS`] times at
    /// most.
    ///
    /// # Errors
    /// A process has ended or may not be read, or maps more than [`MOST_PAGES`] slots.
    pub fn of(&mut self, guest: &Guest) -> anyhow::Result<Folded> {
        let mut folded = self.look(guest)?;
        for _ in 1..LOOKS {
            if folded.gone_mappings == 0 {
                break;
            }
            folded = self.look(guest)?;
        }
        Ok(folded)
    }

    fn look(&mut self, guest: &Guest) -> anyhow::Result<Folded> {
        let mut folded = Folded::default();
        for &pid in &guest.pids {
            folded.gone_mappings += each_stretch(pid, &|_| true, &mut |mapping, file, offset, entries| {
                let known = self.contents.entry((mapping.device, mapping.inode)).or_default();
                folded.add(file, known, offset, entries)
            })?;
        }
        Ok(folded)
    }
}

/// A slot: the device and inode of its file, and its offset there.
pub type Slot = ((u64, u64), u64);

/// Number of slots that a guest maps and no process outside the guest.
///
/// # Errors
/// A process of the guest has ended or may not be read, or maps more than [`MOST_PAGES`] slots.
pub fn of_nobody_else(guest: &Guest) -> anyhow::Result<u64> {
    let (mut own, mut files): (HashSet<Slot>, HashSet<(u64, u64)>) = Default::default();
    for pid in &guest.pids {
        each_slot(*pid, &|_| true, &mut |slot| _ = own.insert(slot))?;
    }
    files.extend(own.iter().map(|(file, _)| *file));
    for pid in host::pids()?.into_iter().filter(|pid| !files.is_empty() && !guest.pids.contains(pid)) {
        // A process that has ended meanwhile maps nothing. Only the files of the guest's own slots are read.
        let _ = each_slot(pid, &|mapping| files.contains(&(mapping.device, mapping.inode)), &mut |slot| {
            own.remove(&slot);
        });
    }
    Ok(own.len() as u64)
}

fn each_slot(pid: u32, wanted: &dyn Fn(&Mapping) -> bool, see: &mut dyn FnMut(Slot)) -> anyhow::Result<()> {
    each_stretch(pid, wanted, &mut |mapping, _, offset, entries| {
        let slots = entries.iter().enumerate().filter(|(_, entry)| !is_private(entry));
        slots.for_each(|(n, _)| see(((mapping.device, mapping.inode), offset + (n * PAGE_BYTES) as u64)));
        Ok(())
    })?;
    Ok(())
}

/// Called with neighbouring slots that take memory: their mapping, their file, the offset of the first slot, and their
/// page-table entries.
type See<'a> = &'a mut dyn FnMut(&Mapping, &File, u64, &[PagemapEntry]) -> anyhow::Result<()>;

/// Calls `see` for all slots that process `pid` maps by `wanted` mappings. Returns the number of mappings that changed
/// meanwhile.
fn each_stretch(pid: u32, wanted: &dyn Fn(&Mapping) -> bool, see: See<'_>) -> anyhow::Result<u64> {
    let (mut gone_mappings, mut looked_at, mut entries) = (0, 0, Vec::new());
    let (mappings, pagemap) = (Mapping::list(pid)?, Pagemap::open(pid)?);
    for mapping in mappings.iter().filter(|m| holds_folded_pages(m) && m.is_memory_file() && wanted(m)) {
        // One file is open at a time: a process may map more files than this process may have open.
        let path = mapping.file_path(pid);
        let file = match File::open(&path) {
            // The file name is gone, because the member folded or unfolded meanwhile.
            Err(e) if e.kind() == ErrorKind::NotFound => {
                gone_mappings += 1;
                continue;
            }
            opened => opened.with_context(|| format!("cannot open {}", path.display()))?,
        };
        let mut at = mapping.offset;
        while let Some((offset, pages)) = filled(&file, mapping, at) {
            looked_at += pages;
            ensure!(looked_at <= MOST_PAGES, "more than {MOST_PAGES} pages of a pool are mapped");
            let start = HostVirt(mapping.start.0 + (offset - mapping.offset));
            pagemap.read(start, pages, &mut entries)?;
            see(mapping, &file, offset, &entries)?;
            at = offset + pages * PAGE_BYTES as u64;
        }
    }
    Ok(gone_mappings)
}

/// Whether a page of a pool mapping was written: it is a private copy, and no slot any more.
fn is_private(entry: &PagemapEntry) -> bool {
    entry.swapped() || entry.present() && !entry.file_or_shared()
}

/// The next slots of a mapping that take memory, from file offset `at` on: the offset of the first slot, and their
/// number.
fn filled(file: &File, mapping: &Mapping, at: u64) -> Option<(u64, u64)> {
    let end = mapping.offset.saturating_add(mapping.bytes());
    // `SEEK_DATA` fails with ENXIO behind the last data.
    let start = seek(file, SeekFrom::Data(at)).ok()?;
    let stop = seek(file, SeekFrom::Hole(start)).ok()?.min(end);
    (start < stop).then(|| (start, (stop - start).div_ceil(PAGE_BYTES as u64).min(BATCH_PAGES)))
}

impl Folded {
    /// Adds the slots from `offset` on, without those whose page is a private copy, present or in swap.
    fn add(
        &mut self,
        file: &File,
        known: &mut BTreeMap<u64, u64>,
        offset: u64,
        entries: &[PagemapEntry],
    ) -> anyhow::Result<()> {
        for (n, entry) in entries.iter().enumerate() {
            if is_private(entry) {
                continue;
            }
            let content = content(file, known, offset + (n * PAGE_BYTES) as u64)?;
            // A template's own zero pages take no memory.
            if content != Fingerprint::ZERO_PAGE.0 {
                self.pages += 1;
                self.contents.insert(content);
            }
        }
        Ok(())
    }
}

fn content(file: &File, known: &mut BTreeMap<u64, u64>, offset: u64) -> anyhow::Result<u64> {
    if let Some(content) = known.get(&offset) {
        return Ok(*content);
    }
    let mut page = [0; PAGE_BYTES];
    file.read_exact_at(&mut page, offset).context("cannot read the pool")?;
    let content = Fingerprint::of(&page).0;
    if content != Fingerprint::ZERO_PAGE.0 {
        known.insert(offset, content);
    }
    Ok(content)
}
