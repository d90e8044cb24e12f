//! Files of `/proc` and `/sys` as text. Bytes that are not UTF-8 are replaced; a process may have such bytes in its
//! name.

use crate::{Error, Result};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The text of a file whose length the kernel bounds.
pub fn read(path: impl AsRef<Path>) -> Result<String> {
    read_start(path, u64::MAX)
}

/// The first `most_bytes` of a file whose length another process decides.
pub fn read_start(path: impl AsRef<Path>, most_bytes: u64) -> Result<String> {
    let path = path.as_ref();
    let file = File::open(path).map_err(|e| Error::file("open", path, e))?;
    let mut bytes = Vec::new();
    file.take(most_bytes).read_to_end(&mut bytes).map_err(|e| Error::file("read", path, e))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_without_end_is_cut_off() {
        assert_eq!(read_start("/dev/zero", 5000).unwrap().len(), 5000);
        assert!(read("/nonexistent").unwrap_err().is_gone());
    }

    #[test]
    fn non_utf8_bytes_are_replaced() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"Name:\t\xff\xfe\nUid:\t0\n").unwrap();
        assert_eq!(read(file.path()).unwrap(), "Name:\t\u{fffd}\u{fffd}\nUid:\t0\n");
    }
}
