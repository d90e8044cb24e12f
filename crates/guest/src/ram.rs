//! A VM's memory, read while the VM runs, for `insight`.
//!
//! Only pages that the page table shows as present are touched, because reading another page would make it resident.
//! `insight` reads in two ways:
//!
//! - The memory that it follows from address to address is read through `/proc/PID/mem`. This neither ends the
//!   sharing of a page nor waits for user space.
//! - The beginnings of all frames, among which it looks for the kernel's note, are read many at a time where that is
//!   safe. It is not safe for pages that are shared, or whose page faults are handled by user space (userfaultfd);
//!   `crates/host/src/vm_read.rs` says why.

use crate::qmp::{Qmp, QmpError};
use crate::ram_map::RamMap;
use crate::{Guest, GuestKind};
use host::{Mapping, Pagemap, PagemapEntry, ProcessMemory};
use insight::{FrameIndex, GuestMemory, HEAD_BYTES, PhysRange};
use page::{GuestPhys, HostVirt, PAGE_BYTES, PAGE_SHIFT, PageRange};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

/// The memory of a running guest.
#[derive(Debug)]
pub struct GuestRam {
    /// The VMM's process.
    pub pid: u32,
    /// The places of the guest's memory in that process.
    pub map: RamMap,
    ranges: Vec<PhysRange>,
    index: FrameIndex,
    /// Frames that the host backs, one bit for each frame.
    backed: Vec<u64>,
    /// Frames that the host has in swap, one bit for each frame.
    swapped: Vec<u64>,
    memory: ProcessMemory,
    pagemap: Pagemap,
    /// Which pages must be read one by one.
    careful: Careful,
    /// Mapped files, in order of address. A page there that the host does not back is in the file; elsewhere it is
    /// zeros. This includes pages that were folded and not touched since.
    files: Vec<Piece>,
}

/// A file mapped into guest memory.
#[derive(Clone, Debug)]
struct Piece {
    start: HostVirt,
    end: HostVirt,
    offset: u64,
    file: Arc<File>,
}

impl Piece {
    /// The files mapped into this memory. Each file is opened once, however many mappings it has. A file that cannot be
    /// opened is left out, and reads as zeros.
    fn all(pid: u32, map: &RamMap) -> host::Result<Vec<Self>> {
        let mut open: HashMap<(u64, u64), Option<Arc<File>>> = HashMap::new();
        let mut pieces = Vec::new();
        for m in Mapping::list(pid)?.iter().filter(|m| m.has_file()) {
            if !map.blocks().iter().any(|b| b.host.0 < m.end.0 && m.start.0 < b.host.0 + b.bytes) {
                continue;
            }
            let file =
                open.entry((m.device, m.inode)).or_insert_with(|| File::open(m.file_path(pid)).ok().map(Arc::new));
            if let Some(file) = file.clone() {
                pieces.push(Self { start: m.start, end: m.end, offset: m.offset, file });
            }
        }
        pieces.sort_by_key(|piece| piece.start);
        Ok(pieces)
    }
}

/// Which pages must be read one by one, through `/proc/PID/mem`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Careful {
    /// All pages, because a process handles page faults in this memory (userfaultfd), or may do so.
    All,
    /// Private pages, because KSM may hold them.
    Private,
    /// Private pages that are mapped elsewhere too.
    PrivateShared,
}

impl Careful {
    fn of(pid: u32, map: &RamMap) -> Self {
        if !host::is_userfaultfd_open().is_ok_and(|open| !open) {
            let served = |m: &Mapping| !m.read || m.has_flag(b"um") || m.has_flag(b"ui") || m.vm_flags.is_empty();
            let inside =
                |m: &Mapping| map.blocks().iter().any(|b| b.host.0 < m.end.0 && m.start.0 < b.host.0 + b.bytes);
            match Mapping::read_all(pid) {
                Ok(mappings) if !mappings.iter().any(|m| inside(m) && served(m)) => {}
                _ => return Self::All,
            }
        }
        let ksm = host::Ksm::read().is_some_and(|ksm| ksm.pages_shared > 0);
        if ksm { Self::Private } else { Self::PrivateShared }
    }

    const fn allows(self, entry: PagemapEntry) -> bool {
        match self {
            Self::All => false,
            Self::Private => entry.file_or_shared(),
            Self::PrivateShared => entry.file_or_shared() || entry.exclusive(),
        }
    }
}

/// Opens the memory of a VM in each layout that it may have, the likeliest first.
///
/// The layout that QEMU reports comes first, if `qmp` is a connection to it, or it answers at the QMP socket on its
/// command line. Then come the layouts that the mappings allow.
///
/// # Errors
/// The VM's process is gone, or belongs to another user.
pub fn open_ram(guest: &Guest, qmp: Option<Qmp>) -> host::Result<Vec<GuestRam>> {
    let pid = guest.pids.first().copied().unwrap_or(0);
    let qmp = qmp.or_else(|| open_qmp(guest)?.ok());
    let told = qmp.filter(|_| guest.kind == GuestKind::Qemu).and_then(|mut qmp| RamMap::by_qmp(&mut qmp).ok());
    let mappings = Mapping::read_all(pid)?;
    let told = told.map(|map| map.within(&mappings)).filter(|map| !map.blocks().is_empty());
    let mut maps = Vec::from_iter(told);
    maps.extend(RamMap::by_mappings(guest, &mappings));
    maps.dedup();
    maps.into_iter().map(|map| GuestRam::open(pid, map)).collect()
}

/// Connects to the QMP socket that a guest's QEMU has on its command line; `None` if there is none.
///
/// # Errors
/// The inner result: QEMU does not answer there in time.
pub fn open_qmp(guest: &Guest) -> Option<Result<Qmp, QmpError>> {
    qmp_place(guest).map(|(pid, path)| Qmp::of(pid, &path))
}

/// Process of a guest's QEMU, and the host's path to its QMP socket; `None` if its command line names none.
pub fn qmp_place(guest: &Guest) -> Option<(u32, PathBuf)> {
    let (pid, socket) = guest.pids.first().zip(guest.facts.qemu.as_ref()?.qmp_socket.as_ref())?;
    Some((*pid, seen_by(*pid, socket)))
}

/// The host's path to a file that process `pid` names `path`.
fn seen_by(pid: u32, path: &str) -> PathBuf {
    match path.strip_prefix('/') {
        Some(below_root) => PathBuf::from(format!("/proc/{pid}/root")).join(below_root),
        None => PathBuf::from(format!("/proc/{pid}/cwd")).join(path),
    }
}

impl GuestRam {
    /// Opens the memory of process `pid` with the layout `map`.
    ///
    /// # Errors
    /// The process is gone, or belongs to another user.
    pub fn open(pid: u32, map: RamMap) -> host::Result<Self> {
        let ranges: Vec<_> =
            map.blocks().iter().map(|b| PhysRange { start: b.guest, frames: b.bytes >> PAGE_SHIFT }).collect();
        let index = FrameIndex::new(&ranges);
        let (pagemap, memory) = (Pagemap::open(pid)?, ProcessMemory::open(pid)?);
        let words = index.count().div_ceil(64);
        let careful = Careful::of(pid, &map);
        let (backed, swapped) = (vec![0; words], vec![0; words]);
        let files = Piece::all(pid, &map)?;
        // A page that is not present, and whose next write the kernel is to note, looks like a page in swap. So pages
        // in swap are looked for only if the process has any.
        let has_swap = host::swapped_bytes(pid)? > 0;
        let mut ram = Self { pid, ranges, index, backed, swapped, memory, pagemap, careful, files, map };
        for block in ram.map.0.clone() {
            let end = HostVirt(block.host.0 + block.bytes);
            let backed = ram.pagemap.present_ranges(block.host, end)?;
            // Kernels without `PAGEMAP_SCAN` cannot list pages in swap in one call. Such pages then read as zeros.
            let swapped = if has_swap { ram.pagemap.swapped_ranges(block.host, end) } else { Ok(Vec::new()) };
            let swapped = swapped.unwrap_or_default();
            mark(&mut ram.backed, &ram.index, &ram.map, &backed);
            mark(&mut ram.swapped, &ram.index, &ram.map, &swapped);
        }
        Ok(ram)
    }

    /// The place of each frame in lists that have an entry for each frame of the guest.
    pub const fn index(&self) -> &FrameIndex {
        &self.index
    }

    /// Whether the host backed a frame when this was opened, by its place in [`GuestRam::index`].
    pub fn is_backed(&self, place: usize) -> bool {
        self.backed.get(place / 64).is_some_and(|word| word >> (place % 64) & 1 == 1)
    }

    /// Number of frames that the host backs.
    pub fn backed_frames(&self) -> u64 {
        self.backed.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Reads bytes of one page that the host does not back: from the mapped file, or else zeros.
    fn read_absent(&self, at: HostVirt, into: &mut [u8]) {
        into.fill(0);
        let piece = self.files.partition_point(|piece| piece.start <= at).checked_sub(1).map(|n| &self.files[n]);
        if let Some(piece) = piece.filter(|piece| at < piece.end) {
            // Bytes behind the end of the file stay zeros.
            let _ = piece.file.read_at(into, piece.offset + (at.0 - piece.start.0));
        }
    }

    fn is_swapped(&self, place: usize) -> bool {
        self.swapped.get(place / 64).is_some_and(|word| word >> (place % 64) & 1 == 1)
    }
}

fn mark(bits: &mut [u64], index: &FrameIndex, map: &RamMap, ranges: &[PageRange]) {
    for range in ranges {
        let Some(first) = map.guest_of(range.start).and_then(|at| index.of(at.frame())) else { continue };
        for place in first..first + range.pages as usize {
            if let Some(word) = bits.get_mut(place / 64) {
                *word |= 1 << (place % 64);
            }
        }
    }
}

impl GuestMemory for GuestRam {
    fn ranges(&self) -> &[PhysRange] {
        &self.ranges
    }

    fn read(&self, at: GuestPhys, into: &mut [u8]) -> bool {
        let (mut at, mut rest) = (at, into);
        while !rest.is_empty() {
            let Some((host, behind)) = self.map.host_of(at) else { return false };
            let Some(place) = self.index.of(at.frame()) else { return false };
            // One piece: as far as all pages are backed, or none is.
            let backed = self.is_backed(place);
            let most = rest.len().min(usize::try_from(behind).unwrap_or(usize::MAX));
            let mut bytes = PAGE_BYTES - at.0 as usize % PAGE_BYTES;
            let mut next = place + 1;
            let one_by_one = !backed && !self.files.is_empty();
            while bytes < most && !one_by_one && self.is_backed(next) == backed && !self.is_swapped(next) {
                bytes += PAGE_BYTES;
                next += 1;
            }
            let bytes = bytes.min(most);
            let (piece, behind) = rest.split_at_mut(bytes);
            match backed {
                _ if self.is_swapped(place) => return false,
                true if self.memory.read_bytes(host, piece).is_err() => return false,
                true => {}
                false if one_by_one => self.read_absent(host, piece),
                false => piece.fill(0),
            }
            at = GuestPhys(at.0 + bytes as u64);
            rest = behind;
        }
        true
    }

    fn heads(&self, each: &mut dyn FnMut(GuestPhys, &[u8]) -> bool) {
        let mut heads = Heads { bytes: vec![0; HEADS_AT_ONCE * HEAD_BYTES], at: Vec::new(), entries: Vec::new() };
        for block in self.map.blocks() {
            let mut first = 0;
            while first < block.bytes >> PAGE_SHIFT {
                let pages = ((block.bytes >> PAGE_SHIFT) - first).min(HEADS_AT_ONCE as u64);
                let offset = first << PAGE_SHIFT;
                let (guest, host) = (GuestPhys(block.guest.0 + offset), HostVirt(block.host.0 + offset));
                if !self.some_heads(guest, host, pages, &mut heads, each) {
                    return;
                }
                first += pages;
            }
        }
        self.absent_heads(each);
    }
}

/// Frames whose beginnings are read by one system call: the most pieces that the kernel takes.
const HEADS_AT_ONCE: usize = 1024;

/// Buffers for reading the beginnings of frames.
struct Heads {
    bytes: Vec<u8>,
    at: Vec<HostVirt>,
    entries: Vec<PagemapEntry>,
}

impl GuestRam {
    /// Calls `each` with the beginnings of pages that are not present and whose bytes are in a mapped file. This is
    /// done last, because these are read one by one.
    fn absent_heads(&self, each: &mut dyn FnMut(GuestPhys, &[u8]) -> bool) {
        let mut head = [0; HEAD_BYTES];
        for piece in &self.files {
            for page in 0..(piece.end.0 - piece.start.0) >> PAGE_SHIFT {
                let at = piece.start.add_pages(page);
                let Some(guest) = self.map.guest_of(at) else { continue };
                if self.index.of(guest.frame()).is_some_and(|place| self.is_backed(place)) {
                    continue;
                }
                self.read_absent(at, &mut head);
                if !each(guest, &head) {
                    return;
                }
            }
        }
    }

    fn some_heads(
        &self,
        guest: GuestPhys,
        host: HostVirt,
        pages: u64,
        heads: &mut Heads,
        each: &mut dyn FnMut(GuestPhys, &[u8]) -> bool,
    ) -> bool {
        let Heads { bytes, at, entries } = heads;
        let Some(place) = self.index.of(guest.frame()) else { return true };
        // Pages that were not backed when this was opened are not looked up.
        if !(place..place + pages as usize).any(|place| self.is_backed(place))
            || self.pagemap.read(host, pages, entries).is_err()
        {
            return true;
        }
        at.clear();
        let present = entries.iter().enumerate().filter(|(n, entry)| entry.present() && self.is_backed(place + n));
        let (fast, slow): (Vec<_>, Vec<_>) = present.partition(|(_, entry)| self.careful.allows(**entry));
        at.extend(fast.iter().map(|(n, _)| host.add_pages(*n as u64)));
        let guest_of = |at: HostVirt| GuestPhys(guest.0 + (at.0 - host.0));
        let mut done = 0;
        while done < at.len() {
            let got = self.memory.read_pieces_unshared(&at[done..], HEAD_BYTES, bytes).unwrap_or(0);
            for (at, head) in at[done..done + got].iter().zip(bytes.chunks_exact(HEAD_BYTES)) {
                if !each(guest_of(*at), head) {
                    return false;
                }
            }
            // The page behind those that were read is gone.
            done += got + 1;
        }
        for (n, _) in slow {
            let at = host.add_pages(n as u64);
            let head = &mut bytes[..HEAD_BYTES];
            if self.memory.read_bytes(at, head).is_ok() && !each(guest_of(at), head) {
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
#[path = "ram_extreme_tests.rs"]
mod extreme_tests;
