//! Having the kernel empty each processor's list of fresh pages, where a page counts one reference more.
//!
//! The kernel does so by itself when a list is full, and whenever somebody asks it to drop cached pages of a file and it
//! cannot, because such a list may be why (`generic_fadvise` in `mm/fadvise.c`). It cannot drop a page that is mapped. So we
//! ask it to drop the beginning of our own program, which this process is executing. Nothing is dropped.

use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::num::NonZeroU64;
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

/// No oftener: each processor with pages in its lists is interrupted.
const EVERY: Duration = Duration::from_millis(100);

/// Empties lists.
pub struct Drain {
    program: Option<File>,
    last: Mutex<Option<Instant>>,
}

impl Drain {
    pub fn new() -> Self {
        Self { program: File::open("/proc/self/exe").ok(), last: Mutex::new(None) }
    }

    /// Whether it was done now: not if it was just done, or somebody else is at it.
    pub fn empty_lists(&self) -> bool {
        let Some(program) = &self.program else { return false };
        let mut last = match self.last.try_lock() {
            Ok(last) => last,
            Err(TryLockError::Poisoned(last)) => last.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        if last.is_some_and(|last| last.elapsed() < EVERY) {
            return false;
        }
        *last = Some(Instant::now());
        fadvise(program, 0, NonZeroU64::new(page::PAGE_BYTES as u64), Advice::DontNeed).is_ok()
    }
}
