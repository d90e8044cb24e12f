//! What each mapping of a guest's processes is used for: its region ([`Region`]).
//!
//! Most mappings show their region by themselves: the kernel names heap and stack, and files have names. The RAM of a
//! VM is anonymous or shared memory like any other. It is recognised by its size, which the command line gives. One
//! block of RAM is one mapping when the VMM starts. The kernel splits the mapping when advice or protection changes
//! on a part of it. A block is therefore a row of neighbouring mappings whose sizes add up to the block's.

use crate::{Guest, GuestKind, cloud_hypervisor, firecracker};
use host::Mapping;
use page::Region;
use std::ops::Range;

/// Sizes of huge pages in bytes, to which a block of RAM on hugetlbfs is rounded up.
const HUGETLB_BYTES: [u64; 2] = [2 << 20, 1 << 30];
/// Bytes of a base page.
const PAGE: u64 = page::PAGE_BYTES as u64;

/// The regions of the mappings of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionMap(Vec<Region>);

impl RegionMap {
    /// Classifies all mappings of one process, which belongs to `guest` or to no guest. Mappings without `VmFlags`
    /// ([`Mapping::list`]) suffice, unless two rows of mappings have the size of the VM's RAM.
    pub fn new(guest: Option<&Guest>, mappings: &[Mapping]) -> Self {
        let kind = guest.map(|g| g.kind);
        let mut regions: Vec<Region> = mappings.iter().map(|m| region_by_itself(m, kind)).collect();
        if let Some(guest) = guest.filter(|g| g.kind.is_vm()) {
            for range in guest_ram(guest, mappings) {
                regions[range].fill(Region::GuestRam);
            }
        }
        Self(regions)
    }

    /// The region of the mapping with this index in the list that the map was made of.
    pub fn region_of(&self, index: usize) -> Region {
        self.0[index]
    }
}

/// The region of a mapping by its own properties alone.
fn region_by_itself(m: &Mapping, kind: Option<GuestKind>) -> Region {
    let emulator = kind == Some(GuestKind::Qemu);
    let anonymous = m.name.is_empty() || m.name.starts_with("[anon:") || m.name == "/dev/zero";
    match m.name.as_str() {
        _ if m.has_flag(b"io") || m.has_flag(b"pf") => Region::Other,
        // With `split-wx=on`, QEMU's translation cache is a memfd that is mapped twice, once writable and once
        // executable.
        name if emulator && (anonymous && m.execute || name.starts_with("/memfd:tcg-jit")) => Region::TranslationCache,
        "[heap]" => Region::Heap,
        name if name == "[stack]" || name.starts_with("[stack:") => Region::Stack,
        // Folded pages belong to the region that they had before.
        _ if crate::holds_folded_pages(m) => Region::Heap,
        _ if m.shmem => Region::Shared,
        _ if anonymous => Region::Heap,
        name if name.starts_with("/dev/") || name.starts_with("/[") || !name.starts_with('/') => Region::Other,
        _ => Region::Files,
    }
}

/// The mappings of a VM's RAM, as ranges of indexes. Of the layouts that the VMM may have made, the first one is taken
/// for which every block is found among the mappings.
///
/// No layout fits if the VM was resized, or its size is not known. The RAM is then the largest row of mappings with the
/// advice that RAM gets, or else the largest row of all.
pub(crate) fn guest_ram(guest: &Guest, mappings: &[Mapping]) -> Vec<Range<usize>> {
    let rows = rows(mappings, could_be_ram);
    let found = layouts(guest).into_iter().find_map(|blocks| place(&blocks, &rows, mappings));
    found.unwrap_or_else(|| {
        let advised = self::rows(mappings, |m| could_be_ram(m) && is_advised(m));
        let candidates = if advised.is_empty() { rows } else { advised };
        candidates.into_iter().max_by_key(|r| bytes(mappings, r)).into_iter().collect()
    })
}

/// Layouts of the RAM that the VMM may have made, each with the sizes of its blocks.
fn layouts(guest: &Guest) -> Vec<Vec<u64>> {
    let told = guest.facts.ram_blocks_bytes.clone();
    let hole = match guest.kind {
        GuestKind::Firecracker => firecracker::RAM_BELOW_HOLE_BYTES,
        GuestKind::CloudHypervisor => cloud_hypervisor::RAM_BELOW_HOLE_BYTES,
        _ => return if told.is_empty() { vec![] } else { vec![told] },
    };
    match guest.ram_bytes {
        None => vec![],
        Some(ram) if ram > hole => vec![vec![hole, ram - hole], told],
        Some(_) => vec![told],
    }
}

/// Finds a place for every block, the largest first, without overlaps. The places are in the order of the blocks.
fn place(blocks: &[u64], rows: &[Range<usize>], mappings: &[Mapping]) -> Option<Vec<Range<usize>>> {
    let mut order: Vec<usize> = (0..blocks.len()).collect();
    order.sort_by_key(|n| std::cmp::Reverse(blocks[*n]));
    let mut taken: Vec<(usize, Range<usize>)> = Vec::new();
    for n in order {
        let free = |r: &Range<usize>| taken.iter().all(|(_, t)| t.end <= r.start || r.end <= t.start);
        let candidates = rows.iter().flat_map(|row| parts_of(row, blocks[n], mappings)).filter(free);
        let best = candidates.max_by_key(|r| (looks_like_ram(&mappings[r.start]), rss(mappings, r)))?;
        taken.push((n, best));
    }
    taken.sort_by_key(|(n, _)| *n);
    (!taken.is_empty()).then_some(taken.into_iter().map(|(_, range)| range).collect())
}

/// The parts of a row of mappings that are as large as a block of RAM.
fn parts_of(row: &Range<usize>, block: u64, mappings: &[Mapping]) -> Vec<Range<usize>> {
    // Without `VmFlags` it is not known which files are on hugetlbfs, so every file is tried as one.
    let huge = if mappings[row.start].has_file() { &HUGETLB_BYTES[..] } else { &[] };
    let mut parts = Vec::new();
    for unit in [PAGE].iter().chain(huge) {
        let Some(wanted) = block.checked_next_multiple_of(*unit).filter(|b| *b > 0) else { continue };
        let mut first = row.start;
        for last in row.clone() {
            while mappings[last].end.0 - mappings[first].start.0 > wanted {
                first += 1;
                if first > last {
                    break;
                }
            }
            if first <= last && mappings[last].end.0 - mappings[first].start.0 == wanted {
                parts.push(first..last + 1);
            }
        }
    }
    parts
}

/// Rows of neighbouring mappings for each of which `wanted` holds.
fn rows(mappings: &[Mapping], wanted: impl Fn(&Mapping) -> bool) -> Vec<Range<usize>> {
    let mut rows: Vec<Range<usize>> = Vec::new();
    for (n, m) in mappings.iter().enumerate().filter(|(_, m)| wanted(m)) {
        match rows.last_mut() {
            Some(row) if row.end == n && mappings[n - 1].end == m.start => row.end += 1,
            _ => rows.push(n..n + 1),
        }
    }
    rows
}

/// Whether a mapping is readable, writable, not executable, and not the VMM's own heap or stack.
fn could_be_ram(m: &Mapping) -> bool {
    let special = m.name.starts_with('[') && !m.name.starts_with("[anon");
    m.read && m.write && !m.execute && !special && !m.has_flag(b"io") && !m.has_flag(b"pf")
}

/// Whether a mapping has the properties that VMMs give to RAM but not to their heaps: mergeable, huge pages, or a file.
fn looks_like_ram(m: &Mapping) -> bool {
    is_advised(m) || m.has_file()
}

/// Whether a mapping is advised as mergeable or made of hugetlbfs pages. This is known only if `VmFlags` were read.
fn is_advised(m: &Mapping) -> bool {
    m.has_flag(b"mg") || m.has_flag(b"ht")
}

fn bytes(mappings: &[Mapping], range: &Range<usize>) -> u64 {
    mappings[range.end - 1].end.0 - mappings[range.start].start.0
}

fn rss(mappings: &[Mapping], range: &Range<usize>) -> u64 {
    mappings[range.clone()].iter().map(|m| m.usage.rss_bytes + m.usage.hugetlb_bytes).sum()
}

/// The RAM of a VM, by its mappings alone: the largest row of mappings. A second row is added if there is so much RAM
/// that it goes on behind the hole for devices.
pub(crate) fn ram_by_mappings(kind: GuestKind, mappings: &[Mapping]) -> Option<u64> {
    let hole = match kind {
        GuestKind::Firecracker => firecracker::RAM_BELOW_HOLE_BYTES,
        _ => cloud_hypervisor::RAM_BELOW_HOLE_BYTES,
    };
    let mut sizes: Vec<u64> = rows(mappings, could_be_ram).iter().map(|row| bytes(mappings, row)).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    match sizes[..] {
        [] => None,
        [largest, ..] if largest > hole => Some(largest + hole * u64::from(sizes.contains(&hole))),
        [largest, next, ..] if largest == hole => Some(largest + next),
        [largest, ..] => Some(largest),
    }
}

#[cfg(test)]
#[path = "region_tests.rs"]
mod tests;
