//! The auxiliary vector: facts that the kernel gives to a program when it executes that.

use crate::memory_files::proc_file;
use crate::{Error, Result};
use std::fs::File;
use std::io::Read;

/// Longest vector that is read, in bytes. The kernel's has some 400.
const MOST_BYTES: u64 = 4096;

/// The auxiliary vector of a program. The kernel draws the addresses in it by lot for each program that is executed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuxiliaryVector(Vec<u8>);

impl AuxiliaryVector {
    /// That of the program which a process runs.
    ///
    /// # Errors
    /// [`Error::is_gone`] and [`Error::is_denied`].
    pub fn of(pid: u32) -> Result<Self> {
        let path = proc_file(pid, "auxv");
        let mut bytes = Vec::new();
        let read = File::open(&path).and_then(|file| file.take(MOST_BYTES).read_to_end(&mut bytes));
        read.map_err(|e| Error::file("read", &path, e))?;
        Ok(Self(bytes))
    }

    /// The value of this kind (`AT_*`).
    pub fn value(&self, kind: u32) -> Option<u64> {
        let words: Vec<u64> = self.0.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect();
        words.as_chunks().0.iter().find(|[key, _]| *key == u64::from(kind)).map(|[_, value]| *value)
    }
}

#[cfg(test)]
impl AuxiliaryVector {
    /// From bytes as the kernel has them.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }
}
