//! Has the kernel empty the lists of new pages that it keeps for each processor (folio batches). A page on such a list
//! has one more reference.
//!
//! The kernel empties a list when it is full, which may take for ever on a processor whose program takes no new pages.
//! It also empties the lists of all processors when it is asked to make a huge page (`madvise_collapse` in
//! `mm/khugepaged.c`). So the prover asks for one in a range that is too small for it, and nothing else happens.
//!
//! Sealing a memory file empties the caller's own list first (`memfd_tag_pins` in `mm/memfd.c`). The lists of other
//! processors are emptied only if the thread has moved to another processor since it wrote to the file.

use act::HUGE_PAGES;
use page::PAGE_BYTES;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rustix::thread::disable_transparent_huge_pages;
use std::ptr::{NonNull, null_mut};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

/// Least time between two times that the lists are emptied: 100 ms, because each processor with pages in its lists is
/// interrupted.
const EVERY: Duration = Duration::from_millis(100);
/// Size of a huge page, in bytes.
const HUGE_BYTES: usize = HUGE_PAGES as usize * PAGE_BYTES;

/// Empties the lists, at most once in [`EVERY`].
pub struct Drain {
    room: Room,
    last: Mutex<Option<Instant>>,
}

impl Drain {
    /// Makes the memory for requests of huge pages, and lets this process have huge pages from here on.
    ///
    /// # Errors
    /// Memory is short.
    pub fn new() -> rustix::io::Result<Self> {
        // The process may have inherited `PR_SET_THP_DISABLE` from the program that started the service. With it, the
        // kernel refuses to look for a huge page.
        let _ = disable_transparent_huge_pages(false);
        Ok(Self { room: Room::new()?, last: Mutex::new(None) })
    }

    /// Empties the lists. `false` if they were emptied less than [`EVERY`] ago, another thread is doing it, or the
    /// kernel refused.
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
        // On a kernel without huge pages, at least this processor's list is emptied.
        self.room.ask_for_huge_page().or_else(|_| seal_file()).is_ok()
    }
}

/// Empties this processor's list by sealing a memory file, as described at the head of this module.
fn seal_file() -> rustix::io::Result<()> {
    let file = memfd_create("lists", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::io::write(&file, b"1")?;
    fcntl_add_seals(&file, SealFlags::WRITE)
}

/// Memory that is large enough for a huge page. One small page of it is present: without any, the kernel would refuse
/// at once, and empty no list.
struct Room(NonNull<u8>);

impl Room {
    const BYTES: usize = 2 * HUGE_BYTES + PAGE_BYTES;

    fn new() -> rustix::io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { mmap_anonymous(null_mut(), Self::BYTES, access, MapFlags::PRIVATE) }?;
        let room = Self(NonNull::new(start.cast()).ok_or(Errno::NOMEM)?);
        // The first or the last page, whichever is outside of every whole huge page of the mapping.
        let page = if room.first_huge() == 0 { 2 * HUGE_BYTES } else { 0 };
        // SAFETY: within the mapping, to which there are no references.
        unsafe { room.0.as_ptr().wrapping_add(page).write_volatile(1) };
        Ok(room)
    }

    /// Offset of the first address in the memory that is aligned for a huge page.
    fn first_huge(&self) -> usize {
        self.0.as_ptr().align_offset(HUGE_BYTES)
    }

    /// Asks for a huge page in a range of one small page.
    fn ask_for_huge_page(&self) -> rustix::io::Result<()> {
        let place = self.0.as_ptr().wrapping_add(self.first_huge());
        // SAFETY: the page is within the mapping, which lives as long as `self`. The advice changes no content.
        match unsafe { libc::madvise(place.cast(), PAGE_BYTES, libc::MADV_COLLAPSE) } {
            0 => Ok(()),
            _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
        }
    }
}

// SAFETY: the mapping belongs to the process, not to a thread, and nothing in it is read or written after `new`.
unsafe impl Send for Room {}
// SAFETY: as above.
unsafe impl Sync for Room {}

impl Drop for Room {
    fn drop(&mut self) {
        // SAFETY: exactly the range mapped in `new`; nothing refers to it.
        let unmapped = unsafe { munmap(self.0.as_ptr().cast(), Self::BYTES) };
        debug_assert!(unmapped.is_ok(), "unmapping a mapping of our own: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Held, ReferenceCounts};
    use host::Pagemap;
    use page::{HostVirt, PageRange};
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    /// How many of these pages of this process have one reference too many.
    fn listed(counts: &mut ReferenceCounts, range: PageRange) -> usize {
        let mut entries = Vec::new();
        Pagemap::open(std::process::id()).unwrap().read(range.start, range.pages, &mut entries).unwrap();
        let frames: Vec<_> = entries.iter().map(|e| e.pfn().unwrap()).collect();
        let mut held = vec![Held::Unknown; frames.len()];
        counts.check(wire::prove::Kind::Private, &frames, &mut held).unwrap();
        held.iter().filter(|h| **h == Held::Referenced(1)).count()
    }

    /// Has this thread run on one processor alone.
    fn stay_on(processor: usize) {
        let mut one = CpuSet::new();
        one.set(processor);
        sched_setaffinity(None, &one).unwrap();
    }

    /// Memory with four pages that a processor has just written. It is too small for a huge page, and four pages fill
    /// no list.
    fn fresh_pages(processor: usize) -> (Vec<u8>, PageRange) {
        stay_on(processor);
        let mut memory = vec![0_u8; 256 << 10];
        let begin = memory.as_ptr().align_offset(PAGE_BYTES);
        (0..4).for_each(|n| memory[begin + n * PAGE_BYTES] = 1);
        let range = PageRange { start: HostVirt(memory[begin..].as_ptr() as u64), pages: 4 };
        (memory, range)
    }

    /// The most of four fresh pages that were on a list before `empty_lists`, and after it. The lists are emptied on
    /// the processor that wrote the pages, or (`is_apart`) on another one.
    fn most_listed(is_apart: bool, empty_lists: impl Fn() -> rustix::io::Result<()>) -> (usize, usize) {
        let mut counts = ReferenceCounts::open().unwrap();
        let allowed = sched_getaffinity(None).unwrap();
        let processors: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
        let (mut most, mut kept) = ((0, 0), Vec::new());
        // Other tests of this process also fill and empty the lists.
        for n in 0..500 {
            if most.0 > 0 && kept.len() > 5 {
                break;
            }
            let (memory, range) = fresh_pages(processors[n % processors.len()]);
            stay_on(processors[(n + usize::from(is_apart)) % processors.len()]);
            let before = listed(&mut counts, range);
            let began = Instant::now();
            empty_lists().unwrap();
            let took = began.elapsed();
            let after = listed(&mut counts, range);
            most = (most.0.max(before), most.1.max(after));
            eprintln!("{before} of 4 listed, {after} {took:?} later");
            kept.push(memory);
        }
        if most.0 == 0 {
            eprintln!("skipped: no fresh page was on a list");
        }
        most
    }

    /// Regression: pages stayed on a processor's list as long as its program took no new pages.
    #[test]
    fn emptied_lists_of_all_processors_hold_no_fresh_pages() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: reference counts are shown to root only");
            return;
        }
        // The service may have been started with huge pages disabled.
        disable_transparent_huge_pages(true).unwrap();
        let drain = Drain::new().unwrap();
        let most = most_listed(true, || drain.room.ask_for_huge_page());
        assert_eq!(most.1, 0, "of {} pages that were listed", most.0);
    }

    #[test]
    fn sealed_file_empties_the_list_of_its_own_processor() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: reference counts are shown to root only");
            return;
        }
        let most = most_listed(false, seal_file);
        assert_eq!(most.1, 0, "of {} pages that were listed", most.0);
    }
}
