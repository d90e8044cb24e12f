//! Has the kernel empty each processor's list of fresh pages. A page on such a list has one more reference.
//!
//! The kernel empties a list when it is full. It also empties all lists when a process seals a memory file against
//! writers, and a page of the file has too many references. A list may be the reason for these (`memfd_wait_for_pins`
//! in
//! `mm/memfd.c`). A page that has just been written is on a list. So the prover makes a memory file, writes to it,
//! seals it and closes it.

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

/// Least time between two emptyings: 100 ms, because each processor with pages in its lists is interrupted.
const EVERY: Duration = Duration::from_millis(100);

/// Empties the lists, at most once in [`EVERY`].
pub struct Drain {
    last: Mutex<Option<Instant>>,
}

impl Drain {
    pub const fn new() -> Self {
        Self { last: Mutex::new(None) }
    }

    /// Empties the lists. `false` if that was just done, or another thread is doing it.
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
    use crate::{Held, ReferenceCounts};
    use host::Pagemap;
    use page::{HostVirt, PAGE_BYTES, PageRange};

    /// Number of these pages of our own that have one reference too many.
    fn listed(counts: &mut ReferenceCounts, range: PageRange) -> usize {
        let mut entries = Vec::new();
        Pagemap::open(std::process::id()).unwrap().read(range.start, range.pages, &mut entries).unwrap();
        let frames: Vec<_> = entries.iter().map(|e| e.pfn().unwrap()).collect();
        let mut held = vec![Held::Unknown; frames.len()];
        counts.check(wire::prove::Kind::Private, &frames, &mut held).unwrap();
        held.iter().filter(|h| **h == Held::Referenced(1)).count()
    }

    #[test]
    fn emptied_lists_hold_no_fresh_pages() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: reference counts are shown to root only");
            return;
        }
        let mut counts = ReferenceCounts::open().unwrap();
        let (mut most, mut kept) = ((0, 0), Vec::new());
        // Other tests of this process also fill and empty the lists.
        for _ in 0..500 {
            if most.0 > 0 && kept.len() > 5 {
                break;
            }
            // The memory is too small for a huge page, and four pages fill no list.
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
