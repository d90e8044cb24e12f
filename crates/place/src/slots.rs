//! Contents of folded pages of guests, by the slots that they map (`guest::each_slots`).

use anyhow::Context;
use guest::{Guest, each_slots, is_private_copy};
use host::PagemapEntry;
use page::{Fingerprint, PAGE_BYTES};
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Most attempts to read a guest whose mappings change meanwhile.
const LOOKS: usize = 5;

/// Folded pages of a guest, whether its page tables have entries for them or not.
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
    /// A process has ended or may not be read, or maps more slots than are read.
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
            folded.gone_mappings += each_slots(pid, &|_| true, &mut |mapping, file, offset, entries| {
                let known = self.contents.entry((mapping.device, mapping.inode)).or_default();
                folded.add(file, known, offset, entries)
            })?;
        }
        Ok(folded)
    }
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
            if is_private_copy(entry) {
                continue;
            }
            let content = content(file, known, offset + (n * PAGE_BYTES) as u64)?;
            // Zero pages of a template are holes in its file, which take no memory.
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
