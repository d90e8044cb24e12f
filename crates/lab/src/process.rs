//! A guest that needs neither rights nor packages: a plain process that maps files of the host and holds data.
//!
//! Its memory consists of:
//!
//! | share | content | equal pages elsewhere |
//! |---|---|---|
//! | 1/4 | mapped files of the host | the page cache: the same frames |
//! | 1/4 | the bytes of these files as private data | the page cache, and all other process guests |
//! | 1/4 | data of its own | none |
//! | 1/8 | data that all guests of its group hold | its group |
//! | 1/8 | zeros that were written | all zero pages |

use crate::error::{Error, Result};
use host::FileMap;
use page::PAGE_BYTES;
use std::fs::{self, File};
use std::hash::Hasher;
use std::hint::black_box;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_64;

/// Smallest memory of a process guest: 1 MiB.
const MIN_BYTES: u64 = 1 << 20;
/// Directories from which files are mapped: any host has enough files there for any sensible amount of memory.
const FILES_FROM: [&str; 3] = ["/usr/bin", "/usr/lib/x86_64-linux-gnu", "/usr/lib"];

/// The memory that a process guest holds until it ends.
#[derive(Debug)]
struct Holding {
    _files: Vec<FileMap>,
    _data: Vec<Pages>,
}

/// Private bytes that begin at a page, as a file's bytes do in the page cache.
#[derive(Debug)]
struct Pages {
    room: Vec<u8>,
    start: usize,
    len: usize,
}

impl Pages {
    fn new(len: usize) -> Self {
        let room = vec![0; len + PAGE_BYTES];
        let start = room.as_ptr().align_offset(PAGE_BYTES);
        Self { room, start, len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.room[self.start..self.start + self.len]
    }
}

impl Holding {
    /// Allocates and fills `memory_bytes`, as guest `name` of group `group`.
    ///
    /// # Errors
    /// The amount is below [`MIN_BYTES`], or a file that was there a moment ago cannot be mapped.
    fn take(name: &str, group: &str, memory_bytes: u64) -> Result<Self> {
        let Some(eighth) = usize::try_from(memory_bytes / 8).ok().filter(|_| memory_bytes >= MIN_BYTES) else {
            return Err(Error::usage(format!("a process guest holds at least {MIN_BYTES} bytes")));
        };
        let eighth = eighth / PAGE_BYTES * PAGE_BYTES;
        let paths = files(2 * eighth);
        let mut data = vec![contents(&paths, 2 * eighth), noise(group, eighth), noise(name, 2 * eighth)];
        let mut zeros = Pages::new(eighth);
        zeros.bytes().fill(1);
        black_box(zeros.bytes()).fill(0);
        data.push(zeros);
        // Keeps the compiler from leaving out the data, which nothing reads.
        black_box(&mut data);
        let files = paths.iter().map(|path| FileMap::open(path)).collect::<host::Result<_>>()?;
        Ok(Self { _files: files, _data: data })
    }
}

/// Files of at least a page, whose sizes add up to at most `bytes`. The same amount always gets the same files.
fn files(bytes: usize) -> Vec<PathBuf> {
    let mut left = bytes;
    let mut chosen = Vec::new();
    for dir in FILES_FROM {
        let entries = fs::read_dir(dir).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
        let mut paths: Vec<PathBuf> = entries.collect();
        paths.sort();
        for path in paths {
            let len = fs::symlink_metadata(&path).ok().filter(fs::Metadata::is_file).map_or(0, |meta| meta.len());
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            if (PAGE_BYTES..=left).contains(&len) && File::open(&path).is_ok() {
                left -= len;
                chosen.push(path);
            }
        }
    }
    chosen
}

/// Contents of these files, each beginning at a page, as far as `bytes` have room.
fn contents(paths: &[PathBuf], bytes: usize) -> Pages {
    let mut pages = Pages::new(bytes);
    let mut at = 0;
    for path in paths {
        let rest = &mut pages.bytes()[at.min(bytes)..];
        at += read_into(path, rest).next_multiple_of(PAGE_BYTES);
    }
    pages
}

fn read_into(path: &Path, room: &mut [u8]) -> usize {
    let Ok(mut file) = File::open(path) else { return 0 };
    let mut filled = 0;
    while let Ok(count @ 1..) = file.read(&mut room[filled..]) {
        filled += count;
    }
    filled
}

/// Bytes that look random; equal seeds give equal bytes (splitmix64).
fn noise(seed: &str, bytes: usize) -> Pages {
    let mut hasher = XxHash3_64::new();
    hasher.write(seed.as_bytes());
    let mut state = hasher.finish();
    let mut pages = Pages::new(bytes);
    for chunk in pages.bytes().chunks_exact_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = state;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        chunk.copy_from_slice(&(value ^ (value >> 31)).to_le_bytes());
    }
    pages
}

/// The life of a process guest: fills its memory, reports `ready` on standard output, and stays until it is ended.
///
/// # Errors
/// The amount is below 1 MiB, a file that was there a moment ago cannot be mapped, or standard output is closed.
pub fn live(name: &str, group: &str, memory_bytes: u64) -> Result<std::convert::Infallible> {
    set_own_name(name)?;
    let holding = Holding::take(name, group, memory_bytes)?;
    let mut out = std::io::stdout();
    out.write_all(b"ready\n").and_then(|()| out.flush()).map_err(|e| Error::file("write", "standard output", e))?;
    loop {
        std::thread::park();
        black_box(&holding);
    }
}

/// Sets the name that `/proc/PID/comm` shows.
fn set_own_name(name: &str) -> Result<()> {
    let path = "/proc/self/comm";
    fs::write(path, name).map_err(|e| Error::file("write", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const BYTES: usize = 2 << 20;

    fn set(pages: &mut Pages) -> HashSet<Vec<u8>> {
        pages.bytes().chunks(PAGE_BYTES).map(<[u8]>::to_vec).collect()
    }

    #[test]
    fn equal_seeds_give_equal_pages_and_others_share_none() {
        let acme = set(&mut noise("acme", BYTES));
        assert_eq!(acme, set(&mut noise("acme", BYTES)));
        assert_eq!(acme.len(), BYTES / PAGE_BYTES);
        assert!(acme.is_disjoint(&set(&mut noise("acme-1", BYTES))));
    }

    #[test]
    fn copied_files_are_page_aligned() {
        let paths = files(BYTES);
        let total: u64 = paths.iter().map(|path| fs::metadata(path).expect("stat").len()).sum();
        assert!(total <= BYTES as u64 && total > BYTES as u64 / 2, "{total} of {BYTES} bytes in {paths:?}");
        let mut copy = contents(&paths, BYTES);
        assert_eq!(copy.bytes().as_ptr().align_offset(PAGE_BYTES), 0);
        let first = fs::read(&paths[0]).expect("read");
        assert!(set(&mut copy).contains(&first[..PAGE_BYTES]));
    }

    #[test]
    fn memory_below_minimum_is_refused() {
        assert!(Holding::take("acme-1", "acme", MIN_BYTES - 1).is_err());
        assert!(Holding::take("acme-1", "acme", MIN_BYTES).is_ok());
    }
}
