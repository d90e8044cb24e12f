//! The guest kernel's page table: translation of the kernel's addresses to guest-physical ones, and lists of its
//! mappings.
//!
//! The format of entries is the processor's (Intel SDM volume 3A, 4.5), so it does not depend on the kernel. Tables
//! of a hostile guest may point at each other, at themselves or nowhere. A walk is as deep as the hardware's, and the
//! number of tables that it reads is bounded.

use crate::memory::GuestMemory;
use page::{GuestPhys, PAGE_BYTES, PAGE_SHIFT};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
/// Bit of an entry that maps a large page, in tables of all levels but the last.
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const ENTRIES: usize = 512;
/// Bits of an address that one table resolves.
const TABLE_BITS: u32 = 9;
/// Most page tables of the guest that are cached, at 4 KiB each. With so many, all are dropped.
const MOST_KEPT: usize = 4096;

/// A mapping of a page, small or large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Its first address in the kernel.
    pub address: u64,
    /// Its first guest-physical address.
    pub phys: GuestPhys,
    /// Its size, in bytes.
    pub bytes: u64,
    /// Whether it may be written.
    pub writable: bool,
    /// Whether it may be executed.
    pub executable: bool,
}

type Table = [u64; ENTRIES];

/// The kernel's page table.
pub struct PageTables<'m> {
    memory: &'m dyn GuestMemory,
    root: GuestPhys,
    levels: u32,
    kept: RefCell<HashMap<u64, Box<Table>>>,
    /// First address and length of the direct map, once it is known.
    direct: Cell<Option<(u64, u64)>>,
}

impl<'m> PageTables<'m> {
    /// The tables below `root`, of 4 levels or 5.
    pub fn new(memory: &'m dyn GuestMemory, root: GuestPhys, five_levels: bool) -> Self {
        let levels = if five_levels { 5 } else { 4 };
        Self { memory, root, levels, kept: RefCell::default(), direct: Cell::new(None) }
    }

    /// Number of levels: 4 or 5.
    pub const fn levels(&self) -> u32 {
        self.levels
    }

    /// The lowest address of the kernel's half.
    pub const fn kernel_half(&self) -> u64 {
        u64::MAX << (self.address_bits() - 1)
    }

    const fn address_bits(&self) -> u32 {
        PAGE_SHIFT + TABLE_BITS * self.levels
    }

    /// Sets where the direct map is, so that [`PageTables::translate`] needs no walk for addresses in it: `bytes` of
    /// guest-physical memory from 0 on are mapped from `base` on.
    pub fn set_direct_map(&self, base: u64, bytes: u64) {
        self.direct.set(Some((base, bytes)));
    }

    /// The guest-physical address of an address of the kernel; `None` if it is not mapped.
    pub fn translate(&self, address: u64) -> Option<GuestPhys> {
        if let Some((base, bytes)) = self.direct.get()
            && let Some(offset) = address.checked_sub(base).filter(|offset| *offset < bytes)
        {
            return Some(GuestPhys(offset));
        }
        if address < self.kernel_half() {
            return None;
        }
        let mut table = self.root;
        for level in (1..=self.levels).rev() {
            let shift = PAGE_SHIFT + TABLE_BITS * (level - 1);
            let entry = self.entry(table, (address >> shift) as usize % ENTRIES)?;
            if entry & PRESENT == 0 {
                return None;
            }
            if level == 1 || entry & LARGE != 0 && level <= 3 {
                let within = (1 << shift) - 1;
                return Some(GuestPhys(entry & ADDRESS & !within | address & within));
            }
            table = GuestPhys(entry & ADDRESS);
        }
        None
    }

    /// Copies bytes at an address of the kernel. False if some are not mapped or cannot be read.
    pub fn read(&self, address: u64, into: &mut [u8]) -> bool {
        let (mut at, mut rest) = (address, into);
        while !rest.is_empty() {
            // One piece: as much as is mapped to consecutive guest-physical addresses.
            let Some(phys) = self.translate(at) else { return false };
            let mut bytes = rest.len().min(PAGE_BYTES - (at as usize % PAGE_BYTES));
            while bytes < rest.len()
                && at.checked_add(bytes as u64).and_then(|next| self.translate(next)).map(|p| p.0)
                    == phys.0.checked_add(bytes as u64)
            {
                bytes += (rest.len() - bytes).min(PAGE_BYTES);
            }
            let (piece, behind) = rest.split_at_mut(bytes);
            if !self.memory.read(phys, piece) {
                return false;
            }
            let Some(next) = at.checked_add(bytes as u64) else { return behind.is_empty() };
            (at, rest) = (next, behind);
        }
        true
    }

    /// Reads a number of 64 bits at an address of the kernel.
    pub fn u64(&self, address: u64) -> Option<u64> {
        let mut word = [0; 8];
        self.read(address, &mut word).then(|| u64::from_le_bytes(word))
    }

    /// Reads a number of 32 bits at an address of the kernel.
    pub fn u32(&self, address: u64) -> Option<u32> {
        let mut word = [0; 4];
        self.read(address, &mut word).then(|| u32::from_le_bytes(word))
    }

    /// Calls `each` with every mapping in the kernel's half from `first` to `last`, in order of addresses, until it
    /// returns false. Reads at most `most_tables` tables, and returns false if that was not enough.
    pub fn walk(&self, first: u64, last: u64, most_tables: u64, each: &mut dyn FnMut(Leaf) -> bool) -> bool {
        let mut walk = Walk { first: first.max(self.kernel_half()), last, tables_left: most_tables, each };
        let rights = Rights { writable: true, executable: true };
        let base = u64::MAX << self.address_bits().min(63);
        !matches!(self.walk_table(&mut walk, self.root, self.levels, base, rights), Step::TooMuch)
    }

    fn walk_table(&self, walk: &mut Walk<'_>, at: GuestPhys, level: u32, base: u64, above: Rights) -> Step {
        let Some(left) = walk.tables_left.checked_sub(1) else { return Step::TooMuch };
        walk.tables_left = left;
        let mut table = [0; ENTRIES];
        if !self.read_table(at, &mut table) {
            return Step::On;
        }
        let shift = PAGE_SHIFT + TABLE_BITS * (level - 1);
        let first = if level == self.levels { ENTRIES / 2 } else { 0 };
        for (n, entry) in table.iter().enumerate().skip(first) {
            let address = base.wrapping_add((n as u64) << shift);
            let end = address.wrapping_add((1 << shift) - 1);
            if entry & PRESENT == 0 || end < walk.first || address > walk.last {
                continue;
            }
            let rights = Rights {
                writable: above.writable && entry & WRITABLE != 0,
                executable: above.executable && entry & NO_EXECUTE == 0,
            };
            let step = if level == 1 || entry & LARGE != 0 && level <= 3 {
                let phys = GuestPhys(entry & ADDRESS & !((1 << shift) - 1));
                let Rights { writable, executable } = rights;
                let leaf = Leaf { address, phys, bytes: 1 << shift, writable, executable };
                if (walk.each)(leaf) { Step::On } else { Step::Stop }
            } else {
                self.walk_table(walk, GuestPhys(entry & ADDRESS), level - 1, address, rights)
            };
            if !matches!(step, Step::On) {
                return step;
            }
        }
        Step::On
    }

    fn entry(&self, table: GuestPhys, index: usize) -> Option<u64> {
        if let Some(kept) = self.kept.borrow().get(&table.0) {
            return Some(kept[index]);
        }
        let mut entries = [0; ENTRIES];
        if !self.read_table(table, &mut entries) {
            return None;
        }
        let mut kept = self.kept.borrow_mut();
        if kept.len() >= MOST_KEPT {
            kept.clear();
        }
        kept.insert(table.0, Box::new(entries));
        Some(entries[index])
    }

    fn read_table(&self, at: GuestPhys, table: &mut Table) -> bool {
        let mut bytes = [0; PAGE_BYTES];
        let read = self.memory.read(at, &mut bytes);
        for (entry, word) in table.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *entry = u64::from_le_bytes(*word);
        }
        read
    }
}

#[derive(Clone, Copy)]
struct Rights {
    writable: bool,
    executable: bool,
}

struct Walk<'a> {
    first: u64,
    last: u64,
    tables_left: u64,
    each: &'a mut dyn FnMut(Leaf) -> bool,
}

enum Step {
    On,
    Stop,
    TooMuch,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Saved;

    /// Eight frames; frame 1 is the root.
    fn memory(entries: &[(usize, usize, u64)]) -> Saved {
        let mut saved = Saved::new(vec![0; 8 * PAGE_BYTES]);
        for &(frame, index, entry) in entries {
            saved.bytes_mut()[frame * PAGE_BYTES + index * 8..][..8].copy_from_slice(&entry.to_le_bytes());
        }
        saved
    }

    const TABLE: u64 = PRESENT | WRITABLE;
    const BASE: u64 = 0xffff_8000_0000_0000;

    /// Page 0 at BASE + 5 pages (read-only, executable), a large page at BASE + 2 MiB.
    fn small_and_large() -> Saved {
        memory(&[
            (1, 256, 2 << 12 | TABLE),
            (2, 0, 3 << 12 | TABLE),
            (3, 0, 4 << 12 | TABLE),
            (4, 5, 7 << 12 | PRESENT),
            (3, 1, 0x20_0000 | TABLE | LARGE | NO_EXECUTE),
        ])
    }

    #[test]
    fn small_and_large_pages_are_translated_and_listed() {
        let memory = small_and_large();
        let tables = PageTables::new(&memory, GuestPhys(PAGE_BYTES as u64), false);
        assert_eq!(tables.translate(BASE + 0x5123), Some(GuestPhys(0x7123)));
        assert_eq!(tables.translate(BASE + 0x20_1234), Some(GuestPhys(0x20_1234)));
        assert_eq!(tables.translate(BASE), None);
        assert_eq!(tables.translate(0x5123), None, "not the kernel's half");
        assert_eq!(tables.u64(BASE + 0x5ff8), Some(0));
        assert_eq!(tables.u64(BASE + 0x5ffc), None, "goes on where nothing is mapped");
        let mut leaves = Vec::new();
        let all = |leaf| {
            leaves.push(leaf);
            true
        };
        assert!(tables.walk(0, u64::MAX, 100, &mut { all }));
        let small =
            Leaf { address: BASE + 0x5000, phys: GuestPhys(0x7000), bytes: 4096, writable: false, executable: true };
        let large = Leaf {
            address: BASE + 0x20_0000,
            phys: GuestPhys(0x20_0000),
            bytes: 2 << 20,
            writable: true,
            executable: false,
        };
        assert_eq!(leaves, [small, large]);
        let mut count = 0;
        tables.walk(BASE + 0x10_0000, u64::MAX, 100, &mut |_| {
            count += 1;
            true
        });
        assert_eq!(count, 1);
    }

    #[test]
    fn tables_of_five_levels_are_walked() {
        let memory = memory(&[
            (1, 511, 2 << 12 | TABLE),
            (2, 511, 3 << 12 | TABLE),
            (3, 510, 4 << 12 | TABLE),
            (4, 0, 5 << 12 | TABLE),
            (5, 0, 6 << 12 | TABLE),
        ]);
        let tables = PageTables::new(&memory, GuestPhys(PAGE_BYTES as u64), true);
        assert_eq!(tables.translate(0xffff_ffff_8000_0042), Some(GuestPhys(0x6042)));
        let mut found = None;
        assert!(tables.walk(0, u64::MAX, 100, &mut |leaf| {
            found = Some(leaf);
            true
        }));
        assert_eq!(found.map(|leaf| leaf.address), Some(0xffff_ffff_8000_0000));
    }

    #[test]
    fn walk_of_tables_that_point_at_themselves_ends() {
        let entries: Vec<_> = (0..512).map(|n| (1, n, 1 << 12 | TABLE)).collect();
        let memory = memory(&entries);
        let tables = PageTables::new(&memory, GuestPhys(PAGE_BYTES as u64), true);
        assert_eq!(tables.translate(u64::MAX), Some(GuestPhys(0x1fff)));
        let mut leaves = 0_u64;
        assert!(!tables.walk(0, u64::MAX, 1000, &mut |_| {
            leaves += 1;
            true
        }));
        assert!(leaves > 100_000 && leaves < 1000 * 512, "{leaves}");
        let mut into = vec![0; 1 << 20];
        assert!(!tables.read(u64::MAX - 100, &mut into), "the end of all addresses");
    }
}
