//! Folded pages of guests: those of mappings of a pool that are not private. Hardly any page table has them all, so they are looked
//! up in the pool's file.
//!
//! Any process may map a file by the name of a pool, as long and as often as it likes. Only memory that the file really holds is looked
//! at, and of a guest no more than [`MOST_PAGES`].

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
/// Pages that are looked up at once.
const BATCH_PAGES: u64 = 1 << 14;
/// Most looks at a guest whose mappings change.
const LOOKS: usize = 5;

/// Folded pages of a guest, in page tables or not.
#[derive(Default)]
pub struct Folded {
    /// Their number, without those of zeros.
    pub pages: u64,
    /// Their contents.
    pub contents: HashSet<u64>,
    /// Mappings that were gone, or had become others, before they could be looked at.
    pub gone_mappings: u64,
}

/// Contents of the slots of pools, each read once, by the device and inode of their file and their offset there.
#[derive(Default)]
pub struct Slots {
    contents: BTreeMap<(u64, u64), BTreeMap<u64, u64>>,
}

impl Slots {
    /// Number of slots that guests map.
    pub fn pages(&self) -> u64 {
        self.contents.values().map(|slots| slots.len() as u64).sum()
    }

    /// The folded pages of a guest. It is looked at again, a few times, when mappings of it change meanwhile.
    ///
    /// # Errors
    /// A process has ended or may not be looked at, or there are too many.
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

/// Number of slots that a guest maps, and no other process.
///
/// # Errors
/// A process of it has ended or may not be looked at, or there are too many.
pub fn of_nobody_else(guest: &Guest) -> anyhow::Result<u64> {
    let (mut own, mut files): (HashSet<Slot>, HashSet<(u64, u64)>) = Default::default();
    for pid in &guest.pids {
        each_slot(*pid, &|_| true, &mut |slot| _ = own.insert(slot))?;
    }
    files.extend(own.iter().map(|(file, _)| *file));
    for pid in host::pids()?.into_iter().filter(|pid| !files.is_empty() && !guest.pids.contains(pid)) {
        // One that has ended meanwhile maps nothing. Other files are not looked at, whatever they are called.
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

/// Sees neighbouring slots that take memory: their mapping, their file, the offset of the first, and their page-table entries.
type See<'a> = &'a mut dyn FnMut(&Mapping, &File, u64, &[PagemapEntry]) -> anyhow::Result<()>;

/// Shows all slots that a process maps by mappings that are wanted. Returns the number of mappings that changed meanwhile.
fn each_stretch(pid: u32, wanted: &dyn Fn(&Mapping) -> bool, see: See<'_>) -> anyhow::Result<u64> {
    let (mut gone_mappings, mut looked_at, mut entries) = (0, 0, Vec::new());
    let (mappings, pagemap) = (Mapping::list(pid)?, Pagemap::open(pid)?);
    for mapping in mappings.iter().filter(|m| holds_folded_pages(m) && m.is_memory_file() && wanted(m)) {
        // One is open at a time: a process may map more files than may be open.
        let path = mapping.file_path(pid);
        let file = match File::open(&path) {
            // A member folds and unfolds while it is looked at.
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

/// Whether a page of a mapping of the pool was written, and is no slot any more.
fn is_private(entry: &PagemapEntry) -> bool {
    entry.swapped() || entry.present() && !entry.file_or_shared()
}

/// The next slots of a mapping that take memory, from this offset in the file on: the offset of the first, and their number.
fn filled(file: &File, mapping: &Mapping, at: u64) -> Option<(u64, u64)> {
    let end = mapping.offset.saturating_add(mapping.bytes());
    // Behind the last data, `seek` fails.
    let start = seek(file, SeekFrom::Data(at)).ok()?;
    let stop = seek(file, SeekFrom::Hole(start)).ok()?.min(end);
    (start < stop).then(|| (start, (stop - start).div_ceil(PAGE_BYTES as u64).min(BATCH_PAGES)))
}

impl Folded {
    /// Adds those of the slots from this offset on whose pages are neither private nor in swap.
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
