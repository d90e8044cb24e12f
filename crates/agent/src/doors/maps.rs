//! What the kernel says about mappings of this process, where the table cannot know.

use crate::raw;
use crate::table::Advice;
use page::{HostVirt, PAGE_BYTES, PageRange};

/// A mapping, or the part of it that was asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Where.
    pub range: PageRange,
    /// `PROT_` bits.
    pub access: u8,
    /// Private and of no file.
    pub anonymous: bool,
    /// Locked into memory.
    pub locked: bool,
    /// With a property that a mapping of the pool cannot have: cleared for children, growing, with a protection key.
    pub special: bool,
    /// What was advised. Only with flags.
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

/// `_IOWR('f', 17, struct procmap_query)`
const PROCMAP_QUERY: usize = 0xc068_6611;
const _: () = assert!(size_of::<Query>() == 104 && PROCMAP_QUERY >> 16 & 0x3fff == 104);

/// Whether a range is one mapping, or a part of one.
pub fn is_one(range: PageRange) -> bool {
    let path = c"/proc/thread-self/maps";
    let arguments = [path.as_ptr() as usize, (libc::O_RDONLY | libc::O_CLOEXEC) as usize, 0, 0, 0, 0];
    // SAFETY: the path is a string that lives as long as the call.
    let file = unsafe { raw::call(libc::SYS_open, arguments) };
    if raw::error(file).is_some() {
        return false;
    }
    let mut query = Query { size: size_of::<Query>() as u64, address: range.start.0, ..Query::default() };
    let arguments = [file as usize, PROCMAP_QUERY, &raw mut query as usize, 0, 0, 0];
    // SAFETY: the kernel reads and writes a structure of the size that it states, which is borrowed for the call.
    let answer = unsafe { raw::call(libc::SYS_ioctl, arguments) };
    // SAFETY: the descriptor was opened here.
    unsafe { raw::call(libc::SYS_close, [file as usize, 0, 0, 0, 0, 0]) };
    match raw::error(answer) {
        None => query.start <= range.start.0 && range.end().0 <= query.end,
        // An older kernel has to be asked for all of them.
        Some(libc::ENOTTY) => mappings(range, false).is_some_and(|all| all.len() == 1 && all[0].range == range),
        Some(_) => false,
    }
}

/// The mappings within a range, in order. Flags and advice are read only on demand, because the kernel then counts pages.
/// `None` where they cannot be read. For who holds the table's lock: it allocates.
pub fn mappings(within: PageRange, flags: bool) -> Option<Vec<Mapping>> {
    let path = if flags { c"/proc/thread-self/smaps" } else { c"/proc/thread-self/maps" };
    let arguments = [path.as_ptr() as usize, (libc::O_RDONLY | libc::O_CLOEXEC) as usize, 0, 0, 0, 0];
    // SAFETY: the path is a string that lives as long as the call.
    let file = unsafe { raw::call(libc::SYS_open, arguments) };
    if raw::error(file).is_some() {
        return None;
    }
    let found = read_all(file as usize, within);
    // SAFETY: the descriptor was opened here.
    unsafe { raw::call(libc::SYS_close, [file as usize, 0, 0, 0, 0, 0]) };
    found
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

/// Takes a line in. Says whether lines behind it can still matter.
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
        found.push(mapping(PageRange { start: HostVirt(first), pages }, rest));
    }
    true
}

/// The addresses that a mapping's line begins with, and what follows.
fn header(line: &str) -> Option<(u64, u64, &str)> {
    let (addresses, rest) = line.split_once(' ')?;
    let (start, end) = addresses.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?, rest))
}

/// A mapping by what follows its addresses: `rw-p 00000000 00:00 0   [heap]`.
fn mapping(range: PageRange, rest: &str) -> Mapping {
    let mut words = rest.split_ascii_whitespace();
    let access = words.next().unwrap_or("");
    let bit = |letter, bit| if access.contains(letter) { bit } else { 0 };
    let bits = bit('r', libc::PROT_READ) | bit('w', libc::PROT_WRITE) | bit('x', libc::PROT_EXEC);
    let file = words.nth(2).unwrap_or("?");
    let name = words.next().unwrap_or("");
    Mapping {
        range,
        access: bits as u8,
        anonymous: access.ends_with('p')
            && file == "0"
            && (name.is_empty() || name == "[heap]" || name.starts_with("[anon:")),
        locked: false,
        special: false,
        advice: Advice::default(),
    }
}

fn take_flag(flag: &str, mapping: &mut Mapping) {
    match flag {
        "lo" => mapping.locked = true,
        "wf" | "gd" | "sl" => mapping.special = true,
        "sh" | "ht" | "pf" | "io" => mapping.anonymous = false,
        "dc" => mapping.advice.dont_fork = true,
        "dd" => mapping.advice.dont_dump = true,
        "hg" => mapping.advice.huge = Some(true),
        "nh" => mapping.advice.huge = Some(false),
        _ => {}
    }
}
