//! The agent's object file as a memory file that nobody can change. All processes with an attached agent map this file
//! private. So its code is in memory once, also if their mount namespaces and rights differ.

use crate::pool_memory::{Role, check};
use page::PAGE_BYTES;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, memfd_create};
use rustix::io::{pread, write};
use std::io;

/// Name of the file, as `/proc/PID/maps` shows it. Names of pools' files begin with `pagefold-`.
const NAME: &str = "pagefold.agent";
/// Seals of the object: it can be neither written nor made longer or shorter.
pub const SEALS: SealFlags = SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);

/// Makes a sealed file of these bytes. It can be mapped executable, and cannot be executed as a program.
///
/// # Errors
/// Memory or descriptors are short.
pub fn seal_object(bytes: &[u8]) -> io::Result<OwnedFd> {
    let file = memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL)?;
    let mut left = bytes;
    while !left.is_empty() {
        left = &left[write(&file, left)?..];
    }
    fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// Whether a file is sealed, and consists of exactly these bytes.
///
/// # Errors
/// The file cannot be inspected.
pub fn is_sealed_object(file: impl AsFd, bytes: &[u8]) -> io::Result<bool> {
    check(&file, Role::Object)?;
    if usize::try_from(fstat(&file)?.st_size).ok() != Some(bytes.len()) {
        return Ok(false);
    }
    let mut buffer = vec![0; 16 * PAGE_BYTES];
    let mut at = 0;
    while at < bytes.len() {
        let got = pread(&file, &mut buffer[..], at as u64)?;
        if got == 0 || bytes.get(at..at + got) != Some(&buffer[..got]) {
            return Ok(false);
        }
        at += got;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::ftruncate;
    use rustix::io::Errno;

    #[test]
    fn object_cannot_be_changed_and_is_told_from_others() {
        let bytes: Vec<u8> = (0..40 * PAGE_BYTES).map(|at| (at % 251) as u8).collect();
        let file = seal_object(&bytes).unwrap();
        assert!(is_sealed_object(&file, &bytes).unwrap());
        assert_eq!(write(&file, b"x"), Err(Errno::PERM));
        assert_eq!([ftruncate(&file, 1), ftruncate(&file, 1 << 20)], [Err(Errno::PERM); 2]);
        assert!(!is_sealed_object(&file, &bytes[1..]).unwrap());
        let mut other = bytes.clone();
        other[20 * PAGE_BYTES + 1] ^= 1;
        assert!(!is_sealed_object(&file, &other).unwrap());
        // A file that can still be written is no object, even with the right bytes.
        let open = memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        write(&open, &bytes).unwrap();
        assert!(is_sealed_object(&open, &bytes).is_err());
        assert!(is_sealed_object(tempfile::tempfile().unwrap(), &bytes).is_err());
    }
}
