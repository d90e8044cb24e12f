//! Having the kernel empty each processor's list of fresh pages, where a page counts one reference more.
//!
//! The kernel does so when a list is full, and when somebody seals a memory file against writers while a page of it has more
//! references than it should, because such a list may be why (`memfd_wait_for_pins` in `mm/memfd.c`). A page that has
//! just been written is on such a list. So we make such a file, write to it, seal it and forget it.

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

/// No oftener: each processor with pages in its lists is interrupted.
const EVERY: Duration = Duration::from_millis(100);

/// Empties lists.
pub struct Drain {
    last: Mutex<Option<Instant>>,
}

impl Drain {
    pub const fn new() -> Self {
        Self { last: Mutex::new(None) }
    }

    /// Whether it was done now: not if it was just done, or somebody else is at it.
    pub fn empty_lists(&self) -> bool {
        let mut last = match self.last.try_lock() {
            Ok(last) => last,
            Err(TryLockError::Poisoned(last)) => last.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        if last.is_some_and(|last| last.elapsed() < EVERY) {
            return false;
        }
        *last = Some(Instant::now());
        empty_lists().is_ok()
    }
}

fn empty_lists() -> rustix::io::Result<()> {
    let file = memfd_create("lists", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::io::write(&file, b"1")?;
    fcntl_add_seals(&file, SealFlags::WRITE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::{Held, Pagemap, ReferenceCounts};
    use page::{HostVirt, PAGE_BYTES, PageRange};

    /// How many of these pages of our own have one reference too many.
    fn listed(counts: &mut ReferenceCounts, range: PageRange) -> usize {
        let mut entries = Vec::new();
        Pagemap::open(std::process::id()).unwrap().read(range.start, range.pages, &mut entries).unwrap();
        let frames: Vec<_> = entries.iter().map(|e| e.pfn().unwrap()).collect();
        let mut held = vec![Held::Unknown; frames.len()];
        counts.check(&frames, &mut held).unwrap();
        held.iter().filter(|h| **h == Held::Referenced(1)).count()
    }

    #[test]
    fn fresh_pages_are_off_the_lists_at_once() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: reference counts are shown to root only");
            return;
        }
        let mut counts = ReferenceCounts::open().unwrap();
        let (mut most, mut kept) = ((0, 0), Vec::new());
        // Other tests of this process fill and empty the lists, too.
        for _ in 0..500 {
            if most.0 > 0 && kept.len() > 5 {
                break;
            }
            // Too little for a huge page, and a few pages of it, so that no list is filled by them.
            let mut memory = vec![0_u8; 256 << 10];
            let begin = memory.as_ptr().align_offset(PAGE_BYTES);
            (0..4).for_each(|n| memory[begin + n * PAGE_BYTES] = 1);
            let range = PageRange { start: HostVirt(memory[begin..].as_ptr() as u64), pages: 4 };
            let before = listed(&mut counts, range);
            let began = Instant::now();
            empty_lists().unwrap();
            let took = began.elapsed();
            let after = listed(&mut counts, range);
            most = (most.0.max(before), most.1.max(after));
            eprintln!("{before} of 4 listed, {after} {took:?} later");
            kept.push(memory);
        }
        assert_eq!(most.1, 0, "of {} pages that were listed", most.0);
        if most.0 == 0 {
            eprintln!("skipped: no fresh page was on a list");
        }
    }
}
