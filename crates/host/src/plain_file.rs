//! Files that users name. Reading such a file must not wait for ever, fill the memory, or start a device.

use crate::{Error, Result};
use rustix::fd::OwnedFd;
use rustix::fs::OFlags;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a plain file for reading. Pipes, which may have no process at the other end, and devices are refused.
///
/// # Errors
/// It cannot be opened, or is something else.
pub fn open_plain_file(path: &Path) -> Result<(File, Metadata)> {
    open(path).map_err(|e| Error::file("open", path, e))
}

fn open(path: &Path) -> io::Result<(File, Metadata)> {
    // Opening alone may wait, or set off a device. O_PATH only finds the file. Once its type is known, that very file
    // is opened, even if the path leads to another one by then.
    let found = File::options().read(true).custom_flags(OFlags::PATH.bits() as i32).open(path)?;
    open_found(&found)
}

/// Opens a file that was found by `O_PATH`.
fn open_found(found: &File) -> io::Result<(File, Metadata)> {
    if !found.metadata()?.is_file() {
        return Err(io::Error::other("not a plain file"));
    }
    let again = format!("/proc/self/fd/{}", found.as_raw_fd());
    let file = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(again)?;
    let metadata = file.metadata()?;
    Ok((file, metadata))
}

/// The content of a plain file of at most `most` bytes.
///
/// # Errors
/// It cannot be read, is something else than a plain file, or is longer.
pub fn read_plain_file(path: &Path, most: u64) -> Result<Vec<u8>> {
    read(path, most).map_err(|e| Error::file("read", path, e))
}

fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    read_open(open(path)?.0, most)
}

/// The content of a plain file of at most `most` bytes that was found by `O_PATH`.
pub(crate) fn read_found(found: OwnedFd, most: u64) -> io::Result<Vec<u8>> {
    read_open(open_found(&found.into())?.0, most)
}

fn read_open(file: File, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(io::Error::other(format!("more than {most} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::fs;

    #[test]
    fn plain_files_are_read_up_to_a_bound() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "12345").unwrap();
        assert_eq!(read_plain_file(&path, 5).unwrap(), b"12345");
        let error = read_plain_file(&path, 4).unwrap_err().to_string();
        assert!(error.ends_with("file: more than 4 bytes"), "{error}");
        assert!(read_plain_file(&dir.path().join("none"), 4).unwrap_err().is_gone());
    }

    #[test]
    fn other_files_than_plain_ones_are_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
        for path in [&pipe, Path::new("/dev/zero"), dir.path()] {
            let error = read_plain_file(path, 4).unwrap_err().to_string();
            assert!(error.ends_with("not a plain file"), "{error}");
        }
    }
}
