//! Copies files of pages without pages of zeros, and computes digests of their contents.
//!
//! The digest is the XXH3-64 of all pages that are not zero, each after its offset, and of the file's size. Holes and
//! pages of zeros are the same to it. It finds what a disk, a copy or a mistake has changed. It is no protection
//! against a user who may write the directory, because that user can change the digest, too.

use page::PAGE_BYTES;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::fs::File;
use std::hash::Hasher;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use twox_hash::XxHash3_64;

/// Bytes that are read at a time: 1 MiB.
const CHUNK: usize = 1 << 20;
/// A page of zeros.
const ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// Size and digest of a file's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Summary {
    /// Its size.
    pub(crate) bytes: u64,
    /// Bytes in pages that are not zero.
    pub(crate) stored_bytes: u64,
    /// Its digest.
    pub(crate) digest: String,
}

/// A digest that is being computed.
#[derive(Default)]
struct Sum {
    hash: XxHash3_64,
    stored_bytes: u64,
}

impl Sum {
    /// Adds bytes that begin at offset `at`, a page boundary. Calls `each` for each page that is not zero.
    fn add(&mut self, bytes: &[u8], at: u64, mut each: impl FnMut(&[u8], u64) -> io::Result<()>) -> io::Result<()> {
        for (number, page) in bytes.chunks(PAGE_BYTES).enumerate() {
            if page == &ZEROS[..page.len()] {
                continue;
            }
            let offset = at + (number * PAGE_BYTES) as u64;
            self.hash.write(&offset.to_le_bytes());
            self.hash.write(page);
            self.stored_bytes += page.len() as u64;
            each(page, offset)?;
        }
        Ok(())
    }

    fn summary(mut self, bytes: u64) -> Summary {
        self.hash.write(&bytes.to_le_bytes());
        let digest = format!("xxh3-64:{:016x}", self.hash.finish());
        Summary { bytes, stored_bytes: self.stored_bytes, digest }
    }
}

/// The summary of bytes in memory.
pub(crate) fn of(bytes: &[u8]) -> Summary {
    let mut sum = Sum::default();
    sum.add(bytes, 0, |_, _| Ok(())).expect("nothing is done that could fail");
    sum.summary(bytes.len() as u64)
}

/// Reads a file and returns its summary. Calls `each` for each page that is not zero, with its offset.
pub(crate) fn read(from: &File, mut each: impl FnMut(&[u8], u64) -> io::Result<()>) -> io::Result<Summary> {
    let bytes = from.metadata()?.len();
    let mut sum = Sum::default();
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while let Some(data) = next_data(from, at)? {
        // Whole pages, so that each is hashed once and with its number.
        at = data / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        let wanted = usize::try_from(bytes.saturating_sub(at)).unwrap_or(CHUNK).min(CHUNK);
        if wanted == 0 {
            break;
        }
        from.read_exact_at(&mut buffer[..wanted], at)?;
        sum.add(&buffer[..wanted], at, &mut each)?;
        at += wanted as u64;
    }
    Ok(sum.summary(bytes))
}

/// Offset of the next bytes that are no hole; `None` at the end.
fn next_data(file: impl AsFd, at: u64) -> io::Result<Option<u64>> {
    match seek(file, SeekFrom::Data(at)) {
        Ok(data) => Ok(Some(data)),
        Err(Errno::NXIO) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Copies a file's pages into one that is empty, and leaves holes where there are zeros.
pub(crate) fn copy(from: &File, to: &File) -> io::Result<Summary> {
    to.set_len(from.metadata()?.len())?;
    read(from, |bytes, offset| to.write_all_at(bytes, offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(pages: &[(u64, u8)], bytes: u64) -> File {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(bytes).expect("extend");
        for (number, byte) in pages {
            file.write_all_at(&[*byte; PAGE_BYTES], number * PAGE_BYTES as u64).expect("write");
        }
        file
    }

    #[test]
    fn copy_has_same_content_and_digest_whether_zeros_are_holes_or_not() {
        let bytes = 700 * PAGE_BYTES as u64;
        let plain = file(&[(0, 1), (300, 2), (699, 3)], bytes);
        let written = file(&[(0, 1), (5, 0), (300, 2), (400, 0), (699, 3)], bytes);
        let to = tempfile::tempfile().expect("a file");
        let copied = copy(&written, &to).expect("copy");
        assert_eq!(copied, read(&plain, |_, _| Ok(())).expect("read"));
        assert_eq!(copied, read(&to, |_, _| Ok(())).expect("read"));
        assert_eq!((copied.bytes, copied.stored_bytes), (bytes, 3 * PAGE_BYTES as u64));
    }

    #[test]
    fn digest_depends_on_each_byte_its_place_and_the_size() {
        let digest = |pages: &[(u64, u8)], more: u64| {
            let file = file(pages, 8 * PAGE_BYTES as u64 + more);
            read(&file, |_, _| Ok(())).expect("read").digest
        };
        let one = digest(&[(1, 1)], 0);
        assert_eq!(one, digest(&[(1, 1)], 0));
        for other in [digest(&[(2, 1)], 0), digest(&[(1, 2)], 0), digest(&[(1, 1)], 10), digest(&[], 0)] {
            assert_ne!(one, other);
        }
        let changed = file(&[(1, 1)], 8 * PAGE_BYTES as u64);
        changed.write_all_at(&[7], PAGE_BYTES as u64 + 9).expect("write");
        assert_ne!(one, read(&changed, |_, _| Ok(())).expect("read").digest);
    }
}
