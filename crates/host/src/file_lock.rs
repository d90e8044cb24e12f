//! Locks of files, by which processes take turns.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Opens a file and locks it, with a `pause` between two attempts. A file that does not exist is created for this user
/// alone. The lock ends when the file is closed. `None`: another process has held the lock for longer than `patience`.
///
/// # Errors
/// The file cannot be opened or locked.
pub fn lock_file(path: &Path, patience: Duration, pause: Duration) -> io::Result<Option<File>> {
    let file = File::options().create(true).append(true).mode(0o600).open(path)?;
    let end = Instant::now() + patience;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if Instant::now() >= end => return Ok(None),
            Err(TryLockError::WouldBlock) => std::thread::sleep(pause),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_has_the_lock_and_the_next_one_waits_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let lock = |patience| lock_file(&path, patience, Duration::from_millis(1));
        let first = lock(Duration::ZERO).unwrap().expect("nobody has it");
        assert!(lock(Duration::from_millis(5)).unwrap().is_none());
        std::thread::scope(|scope| {
            let next = scope.spawn(|| lock(Duration::from_secs(60)));
            std::thread::sleep(Duration::from_millis(5));
            drop(first);
            assert!(next.join().unwrap().unwrap().is_some());
        });
        assert!(lock_file(&dir.path().join("none/lock"), Duration::ZERO, Duration::ZERO).is_err());
    }
}
