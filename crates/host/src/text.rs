//! Files of `/proc` and `/sys` as text. Bytes that are not UTF-8, as a process may have in its name, are replaced.

use crate::{Error, Result};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The text of a file whose length the kernel decides.
pub(crate) fn read(path: impl AsRef<Path>) -> Result<String> {
    read_start(path, u64::MAX)
}

/// The first bytes of a file whose length somebody else decides.
pub(crate) fn read_start(path: impl AsRef<Path>, most_bytes: u64) -> Result<String> {
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
    fn a_file_without_end_is_cut_off() {
        assert_eq!(read_start("/dev/zero", 5000).unwrap().len(), 5000);
        assert!(read("/nonexistent").unwrap_err().is_gone());
    }

    #[test]
    fn what_is_not_text_is_replaced() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"Name:\t\xff\xfe\nUid:\t0\n").unwrap();
        assert_eq!(read(file.path()).unwrap(), "Name:\t\u{fffd}\u{fffd}\nUid:\t0\n");
    }
}
