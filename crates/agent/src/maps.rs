//! The kernel's view of this process's mappings, for questions that the table cannot answer.

use crate::map::{Advice, Traits, everything};
use crate::{raw, world};
use page::{HostVirt, PAGE_BYTES, PageRange};
use rustix::fs::{Stat, makedev};
use rustix::io::Errno;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A mapping, or the part of it that was asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Its addresses.
    pub range: PageRange,
    /// `PROT_` bits.
    pub access: u8,
    /// Whether it is private and maps no file.
    pub anonymous: bool,
    /// Whether it is part of the main heap. Known only of mappings in a list.
    pub heap: bool,
    /// Whether it is private.
    pub private: bool,
    /// Whether it is the mapping of a lease ([`act::SharedMark`]), made by this process or inherited. Known only of
    /// mappings in a list.
    pub lease: bool,
    /// Whether it is private and of a file that has a name like a pool's. Known only of mappings in a list.
    pub has_pool_name: bool,
    /// The mapped file: its device and its inode number, which is 0 without a file.
    pub file: (u64, u64),
    /// Offset of the first page in the file, in bytes.
    pub offset: u64,
    /// Whether it is locked into memory. Known only with flags.
    pub locked: bool,
    /// Whether it has a property that a mapping of the pool cannot have: cleared for children, growing, sealed, or with
    /// a protection key. Known only with flags.
    pub special: bool,
    /// The advice given for it. Known only with flags.
    pub advice: Advice,
}

/// `struct procmap_query` of `linux/fs.h`, from Linux 6.11 on.
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    vma_flags: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name: u64,
    build_id: u64,
}

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: usize = 0xc068_6611;
const _: () = assert!(size_of::<Query>() == 104 && PROCMAP_QUERY >> 16 & 0x3fff == 104);

/// The name of a lease's file, as the kernel shows it.
const LEASE: &str = "/memfd:pagefold-lease";
/// `PROCMAP_QUERY_VMA_READABLE` and so on.
const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
const EXECUTABLE: u64 = 4;
const SHARED: u64 = 8;

/// Inode numbers, on [`POOL_DEVICE`], of files whose mappings are known to be the pool's; 0 in unused elements.
static POOL_FILES: [AtomicU64; 512] = [const { AtomicU64::new(0) }; 512];
/// Device of the pool's files: memory files lie on one nameless filesystem of the kernel's.
static POOL_DEVICE: AtomicU64 = AtomicU64::new(0);
/// Whether memory is locked as soon as it is mapped (`mlockall(MCL_FUTURE)`).
static LOCKS_FUTURE: AtomicBool = AtomicBool::new(false);

/// Notes whether all new mappings are locked from here on (`mlockall(MCL_FUTURE)`).
pub fn lock_future(locks: bool) {
    LOCKS_FUTURE.store(locks, Ordering::Relaxed);
}

/// Whether all new mappings are locked, as far as the hooks have seen.
pub fn locks_future() -> bool {
    LOCKS_FUTURE.load(Ordering::Relaxed)
}

/// Notes that private mappings of this file are the pool's. For the agent's thread.
pub fn know_pool(file: &Stat) {
    POOL_DEVICE.store(file.st_dev, Ordering::Relaxed);
    if !know_file(file.st_ino) {
        // All elements are in use, although a pool has 256 segments at most. So files of which nothing is mapped any
        // more are dropped from the list.
        let mapped = mappings(everything(), false).unwrap_or_default();
        let is_mapped = |number| mapped.iter().any(|mapping| mapping.file == (file.st_dev, number));
        let gone = POOL_FILES.iter().filter(|known| !is_mapped(known.load(Ordering::Relaxed)));
        gone.for_each(|known| known.store(0, Ordering::Relaxed));
        // If there is no room even now, mappings of the file are taken for the program's own, and left alone.
        know_file(file.st_ino);
    }
}

/// Notes the pools' files of which something is mapped in this process, by their names. A forked child may not have
/// been told of them.
pub fn know_named_pools() {
    let all = mappings(everything(), false).unwrap_or_default();
    for mapping in all.iter().filter(|mapping| mapping.has_pool_name) {
        POOL_DEVICE.store(mapping.file.0, Ordering::Relaxed);
        know_file(mapping.file.1);
    }
}

/// Notes an inode number. Returns whether there was room for it.
fn know_file(number: u64) -> bool {
    let free = POOL_FILES.iter().find(|known| [0, number].contains(&known.load(Ordering::Relaxed)));
    free.inspect(|free| free.store(number, Ordering::Relaxed)).is_some()
}

/// Whether mappings of this file are the pool's, as far as is known.
pub fn is_pool_file((device, number): (u64, u64)) -> bool {
    let is_known = |known: &AtomicU64| known.load(Ordering::Relaxed) == number;
    number != 0 && device == POOL_DEVICE.load(Ordering::Relaxed) && POOL_FILES.iter().any(is_known)
}

/// The kind of memory that the table expects at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Memory without a file.
    Anonymous,
    /// Slots of the pool, or private copies that writes have made of them.
    Pool,
    /// Memory of either kind, or of both.
    Either,
}

/// A file of `/proc`, open in the calling thread's table of descriptors. Hooks open it on threads of the program. The C
/// library's `open` and `close` are cancellation points, and would end a thread that was cancelled (`pthread_cancel`).
#[derive(Debug)]
struct File(usize);

impl File {
    fn open(path: &CStr) -> Result<Self, Errno> {
        let arguments = [path.as_ptr() as usize, (libc::O_RDONLY | libc::O_CLOEXEC) as usize, 0, 0, 0, 0];
        // SAFETY: the path is a string that lives as long as the call.
        let file = unsafe { raw::call(libc::SYS_open, arguments) };
        raw::error(file).map_or(Ok(Self(file as usize)), |number| Err(Errno::from_raw_os_error(number)))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: the descriptor was opened here, and only this refers to it.
        unsafe { raw::call(libc::SYS_close, [self.0, 0, 0, 0, 0, 0]) };
    }
}

/// The kernel's list of this process's mappings, open for questions about single addresses.
#[derive(Debug)]
pub struct Maps(File);

impl Maps {
    /// Opens the list, for the calling thread.
    ///
    /// # Errors
    /// No descriptor is left, or `/proc` is not there.
    pub fn open() -> Result<Self, Errno> {
        File::open(c"/proc/thread-self/maps").map(Self)
    }

    /// Whether all of a range is private memory of this kind, has the protection of these traits, and is not locked.
    pub fn shows(&self, range: PageRange, traits: Traits, kind: Kind) -> bool {
        let mut at = range.start;
        while at < range.end() {
            let Some(there) = self.ask(at) else { return false };
            let is_anonymous = there.file.1 == 0;
            let is_kind = match kind {
                Kind::Anonymous => is_anonymous,
                Kind::Pool => is_pool_file(there.file),
                Kind::Either => is_anonymous || is_pool_file(there.file),
            };
            if !is_kind || !there.private || there.access != traits.access {
                return false;
            }
            at = there.range.end();
        }
        !traits.is_locked() && !is_locked(range)
    }

    /// Whether all of a range maps this file privately, from this offset in bytes on.
    pub fn shows_file(&self, range: PageRange, file: (u64, u64), offset: u64) -> bool {
        let mut at = range.start;
        while at < range.end() {
            let Some(there) = self.ask(at) else { return false };
            let expected = offset.wrapping_add(there.range.start.0).wrapping_sub(range.start.0);
            if !there.private || there.file != file || there.offset != expected {
                return false;
            }
            at = there.range.end();
        }
        true
    }

    /// The pages directly behind a range that belong to the same mapping as its last page.
    pub fn behind(&self, range: PageRange) -> PageRange {
        let end = self.ask(HostVirt(range.end().0 - PAGE_BYTES as u64)).map_or(range.end(), |last| last.range.end());
        PageRange { start: range.end(), pages: end.page() - range.end().page() }
    }

    /// The mapping that contains an address; `None` if there is none, or the list cannot be read.
    pub fn ask(&self, at: HostVirt) -> Option<Mapping> {
        let page = PageRange { start: at, pages: 1 };
        let query = match query(self.0.0, at) {
            Ok(query) => query,
            // A kernel before Linux 6.11 has to be asked for all mappings.
            Err(libc::ENOTTY) => return mappings(page, false)?.pop(),
            Err(_) => return None,
        };
        let bit = |flag, bit: i32| if query.vma_flags & flag != 0 { bit as u8 } else { 0 };
        let pages = (query.end - query.start) / PAGE_BYTES as u64;
        Some(Mapping {
            range: PageRange { start: HostVirt(query.start), pages },
            access: bit(READABLE, libc::PROT_READ) | bit(WRITABLE, libc::PROT_WRITE) | bit(EXECUTABLE, libc::PROT_EXEC),
            heap: false,
            private: query.vma_flags & SHARED == 0,
            lease: false,
            has_pool_name: false,
            file: (makedev(query.device[0], query.device[1]), query.inode),
            offset: query.offset,
            anonymous: query.inode == 0,
            locked: false,
            special: false,
            advice: Advice::default(),
        })
    }
}

/// Whether a part of a range of private memory is locked. `msync(MS_INVALIDATE)` fails with `EBUSY` on locked memory,
/// and does nothing to other memory.
pub fn is_locked(range: PageRange) -> bool {
    let bytes = range.pages as usize * PAGE_BYTES;
    // SAFETY: without `MS_SYNC`, the call changes nothing.
    let answer =
        unsafe { raw::call(libc::SYS_msync, [range.start.0 as usize, bytes, libc::MS_INVALIDATE as usize, 0, 0, 0]) };
    raw::error(answer) == Some(libc::EBUSY)
}

/// Asks an open list for the mapping that holds an address. The error is the kernel's error number.
fn query(file: usize, at: HostVirt) -> Result<Query, i32> {
    let mut query = Query { size: size_of::<Query>() as u64, address: at.0, ..Query::default() };
    let arguments = [file, PROCMAP_QUERY, &raw mut query as usize, 0, 0, 0];
    // SAFETY: the kernel reads and writes a structure of the size that the structure states, which is borrowed for the
    // call.
    let answer = unsafe { raw::call(libc::SYS_ioctl, arguments) };
    raw::error(answer).map_or(Ok(query), Err)
}

/// Whether a range is one mapping to the kernel, or a part of one.
pub fn is_one(range: PageRange) -> bool {
    let Ok(maps) = Maps::open() else { return false };
    match query(maps.0.0, range.start) {
        Ok(query) => query.start <= range.start.0 && range.end().0 <= query.end,
        // A kernel before Linux 6.11 has to be asked for all mappings.
        Err(libc::ENOTTY) => mappings(range, false).is_some_and(|all| all.len() == 1 && all[0].range == range),
        Err(_) => false,
    }
}

/// The mappings within a range, in order; `None` if they cannot be read. Flags and advice are read only on demand,
/// because the kernel counts all pages of the mappings then. It allocates, so callers hold the table's lock.
pub fn mappings(within: PageRange, flags: bool) -> Option<Vec<Mapping>> {
    let path = if flags { c"/proc/thread-self/smaps" } else { c"/proc/thread-self/maps" };
    read_all(File::open(path).ok()?.0, within)
}

fn read_all(file: usize, within: PageRange) -> Option<Vec<Mapping>> {
    const BUFFER_BYTES: usize = 64 << 10;
    let mut found = Vec::new();
    let mut buffer = vec![0_u8; BUFFER_BYTES];
    let mut filled = 0;
    loop {
        let free = buffer.get_mut(filled..).filter(|free| !free.is_empty())?;
        // SAFETY: reads into memory that is borrowed mutably, and no more than it has.
        let read = unsafe { raw::call(libc::SYS_read, [file, free.as_mut_ptr() as usize, free.len(), 0, 0, 0]) };
        if raw::error(read).is_some() {
            return None;
        }
        if read == 0 {
            return Some(found);
        }
        filled += read as usize;
        let mut done = 0;
        let text = buffer.get(..filled)?;
        for line in text.split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n")) {
            done += line.len();
            if !take_line(line, within, &mut found) {
                return Some(found);
            }
        }
        buffer.copy_within(done..filled, 0);
        filled -= done;
    }
}

/// Parses a line. Returns whether later lines can still matter.
fn take_line(line: &[u8], within: PageRange, found: &mut Vec<Mapping>) -> bool {
    let line = &*String::from_utf8_lossy(line);
    if let Some(key) = line.strip_prefix("ProtectionKey:") {
        found
            .iter_mut()
            .next_back()
            .filter(|_| key.trim() != "0")
            .into_iter()
            .for_each(|mapping| mapping.special = true);
        return true;
    }
    if let Some(flags) = line.strip_prefix("VmFlags:") {
        if let Some(mapping) = found.last_mut() {
            flags.split_ascii_whitespace().for_each(|flag| take_flag(flag, mapping));
        }
        return true;
    }
    let Some((start, end, rest)) = header(line) else { return true };
    if start >= within.end().0 {
        return false;
    }
    let (first, last) = (start.max(within.start.0), end.min(within.end().0));
    if first < last {
        let pages = (last - first) / PAGE_BYTES as u64;
        let mut found_here = mapping(PageRange { start: HostVirt(first), pages }, rest);
        found_here.offset = found_here.offset.wrapping_add(first - start);
        found.push(found_here);
    }
    true
}

/// The addresses at the beginning of a mapping's line, and the rest of the line.
fn header(line: &str) -> Option<(u64, u64, &str)> {
    let (addresses, rest) = line.split_once(' ')?;
    let (start, end) = addresses.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?, rest))
}

/// A mapping, from the text behind its addresses: `rw-p 00000000 00:00 0   [heap]`.
fn mapping(range: PageRange, rest: &str) -> Mapping {
    let mut words = rest.split_ascii_whitespace();
    let access = words.next().unwrap_or("");
    let bit = |letter, bit| if access.contains(letter) { bit } else { 0 };
    let bits = bit('r', libc::PROT_READ) | bit('w', libc::PROT_WRITE) | bit('x', libc::PROT_EXEC);
    let offset = words.next().and_then(|offset| u64::from_str_radix(offset, 16).ok());
    let device = words.next().and_then(|device| device.split_once(':')).unwrap_or(("", ""));
    let [major, minor] = [device.0, device.1].map(|part| u32::from_str_radix(part, 16).unwrap_or(u32::MAX));
    let file = words.next().unwrap_or("?");
    let name = words.next().unwrap_or("");
    let private = access.ends_with('p');
    Mapping {
        range,
        access: bits as u8,
        heap: name == "[heap]",
        private,
        lease: !private && name == LEASE,
        has_pool_name: private && name.starts_with(act::POOL_NAMES),
        file: (makedev(major, minor), file.parse().unwrap_or(u64::MAX)),
        offset: offset.unwrap_or(u64::MAX),
        anonymous: private && file == "0" && (name.is_empty() || name == "[heap]" || name.starts_with("[anon:")),
        locked: false,
        special: false,
        advice: Advice::default(),
    }
}

fn take_flag(flag: &str, mapping: &mut Mapping) {
    match flag {
        "lo" => mapping.locked = true,
        "wf" | "gd" | "sl" | "ss" => mapping.special = true,
        "sh" | "ht" | "pf" | "io" => mapping.anonymous = false,
        "dc" => mapping.advice.dont_fork = true,
        "dd" => mapping.advice.dont_dump = true,
        "hg" => mapping.advice.huge = Some(true),
        "nh" => mapping.advice.huge = Some(false),
        // The hooks do not record these two, so they must not appear in a table that the hooks keep.
        "mg" if !world::is_hooked() => mapping.advice.mergeable = true,
        "nr" if !world::is_hooked() => mapping.advice.no_reserve = true,
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::fstat;

    /// Over weeks, a member may see any number of segments come and go.
    #[test]
    fn mappings_of_pool_are_known_however_many_segments_there_were() {
        if !crate::testing::alone("maps::tests::mappings_of_pool_are_known_however_many_segments_there_were") {
            return;
        }
        let segment = || {
            let file = act::PoolSegment::create("segment", 1).unwrap().read_only().unwrap();
            let stat = fstat(&file).unwrap();
            know_pool(&stat);
            (act::PoolView::new(file, 1).unwrap(), (stat.st_dev, stat.st_ino))
        };
        let (first, passed) = (segment(), segment().1);
        for _ in 0..3 * POOL_FILES.len() {
            assert!(is_pool_file(segment().1));
        }
        assert!(is_pool_file(first.1), "still mapped");
        assert!(!is_pool_file(passed));
    }
}
