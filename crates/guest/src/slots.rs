//! Folded pages of processes: pages in mappings of a pool that were not copied on write. Most have no page-table entry,
//! because they were not touched since, so they are looked up in the pool's file.
//!
//! Any process may map a file with the name of a pool, of any length and any number of times. Only data that the file
//! really holds is read (`SEEK_DATA`), and at most [`MOST_PAGES`] for one process.

use crate::{Guest, holds_folded_pages};
use host::{Error, Mapping, Pagemap, PagemapEntry};
use page::{HostVirt, PAGE_BYTES};
use rustix::fs::{SeekFrom, seek};
use std::collections::HashSet;
use std::fs::File;
use std::io;

/// Most folded pages of one process that are looked at: 2^28, or 1 TiB. With more, the process is not read.
const MOST_PAGES: u64 = 1 << 28;
/// Most pages of one read of `pagemap`.
const BATCH_PAGES: u64 = 1 << 14;

/// A slot: device and inode of the pool's file, and its offset in bytes in the file.
type Slot = ((u64, u64), u64);

/// A function that is called with neighbouring slots that the file really holds: the mapping, the file, the offset of
/// the first slot in bytes, and the page-table entries.
pub type SeeSlots<'a, E> = &'a mut dyn FnMut(&Mapping, &File, u64, &[PagemapEntry]) -> Result<(), E>;

/// Number of slots that a guest's processes map, and no process outside of the guest. At most `most_pages` page-table
/// entries are read.
///
/// # Errors
/// A process of the guest has ended or may not be read, or there are more pages.
pub(crate) fn of_nobody_else(guest: &Guest, most_pages: u64) -> host::Result<u64> {
    let (mut own, mut left) = (HashSet::new(), most_pages);
    for pid in &guest.pids {
        each_slot(*pid, &|_| true, &mut left, &mut |slot| _ = own.insert(slot))?;
    }
    let files: HashSet<(u64, u64)> = own.iter().map(|(file, _)| *file).collect();
    for pid in host::pids()?.into_iter().filter(|pid| !files.is_empty() && !guest.pids.contains(pid)) {
        // A process that has ended meanwhile maps nothing. Only the files of the guest's own slots are read.
        let wanted = |mapping: &Mapping| files.contains(&(mapping.device, mapping.inode));
        match each_slot(pid, &wanted, &mut left, &mut |slot| _ = own.remove(&slot)) {
            Err(why) if left == 0 => return Err(why),
            _ => {}
        }
    }
    Ok(own.len() as u64)
}

fn each_slot(
    pid: u32,
    wanted: &dyn Fn(&Mapping) -> bool,
    left: &mut u64,
    see: &mut dyn FnMut(Slot),
) -> host::Result<()> {
    each_slots(pid, wanted, &mut |mapping, _, offset, entries| {
        *left = left.saturating_sub(entries.len() as u64);
        if *left == 0 {
            return Err(Error::file(
                "read",
                format!("/proc/{pid}/pagemap"),
                io::Error::other("more pages are folded than are read"),
            ));
        }
        let slots = entries.iter().enumerate().filter(|(_, entry)| !is_private_copy(entry));
        slots.for_each(|(n, _)| see(((mapping.device, mapping.inode), offset + (n * PAGE_BYTES) as u64)));
        Ok(())
    })?;
    Ok(())
}

/// Calls `see` for all slots that process `pid` maps by `wanted` mappings. Returns the number of mappings that changed
/// meanwhile.
///
/// # Errors
/// The process has ended or may not be read, it maps more than [`MOST_PAGES`] slots, or `see` failed.
pub fn each_slots<E: From<Error>>(pid: u32, wanted: &dyn Fn(&Mapping) -> bool, see: SeeSlots<'_, E>) -> Result<u64, E> {
    let (mut gone_mappings, mut looked_at, mut entries) = (0, 0, Vec::new());
    let (mappings, pagemap) = (Mapping::list(pid)?, Pagemap::open(pid)?);
    for mapping in mappings.iter().filter(|m| holds_folded_pages(m) && m.is_memory_file() && wanted(m)) {
        // One file is open at a time: a process may map more files than this process may have open.
        let path = mapping.file_path(pid);
        let file = match File::open(&path) {
            // The file name is gone, because the member folded or unfolded meanwhile.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                gone_mappings += 1;
                continue;
            }
            opened => opened.map_err(|e| Error::file("open", &path, e))?,
        };
        let mut at = mapping.offset;
        while let Some((offset, pages)) = filled(&file, mapping, at) {
            looked_at += pages;
            if looked_at > MOST_PAGES {
                return Err(
                    Error::file("read", &path, io::Error::other("more than 2^28 pages of a pool are mapped")).into()
                );
            }
            let start = HostVirt(mapping.start.0 + (offset - mapping.offset));
            pagemap.read(start, pages, &mut entries)?;
            see(mapping, &file, offset, &entries)?;
            at = offset + pages * PAGE_BYTES as u64;
        }
    }
    Ok(gone_mappings)
}

/// Whether a page in a mapping of a pool was written since it was folded: it is a private copy then, and shows no slot
/// any more.
pub fn is_private_copy(entry: &PagemapEntry) -> bool {
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
