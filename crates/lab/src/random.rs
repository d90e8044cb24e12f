//! Random numbers of 64 bits, so that no two labs and no two requests have the same.

use std::fs::File;
use std::io::{self, Read};

pub(crate) fn number() -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}
