//! Checks of a plot. Whole pages are compared. Inaccessible pages are tried through system calls, which answer
//! `EFAULT` where a touch would raise a signal.

use crate::content::{PAGE, Random, WORDS};
use crate::plot::{Access, Plot, traits};
use crate::sys::{self, Way};
use crate::tally::{BREAKS, CHECKED, PROBED};
use crate::verdict::Wrong;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Descriptors of the kernel's files about this process. A forked child opens its own.
pub struct Senses {
    pid: usize,
    memory: i32,
    zeros: i32,
    pagemap: i32,
    pipe: [i32; 2],
}

/// A buffer for the bytes of a page.
type Bytes = [AtomicU64; WORDS];

impl Senses {
    /// Opens the descriptors, by direct system calls only.
    pub fn open() -> Self {
        let mut pipe = [-1; 2];
        let arguments = [(&raw mut pipe) as usize, (libc::O_CLOEXEC | libc::O_NONBLOCK) as usize, 0, 0, 0, 0];
        // SAFETY: writes two numbers.
        let _ = unsafe { sys::raw(libc::SYS_pipe2, arguments) };
        Self {
            pid: sys::own_pid(),
            memory: sys::open(c"/proc/self/mem", libc::O_RDWR),
            zeros: sys::open(c"/dev/zero", libc::O_RDONLY),
            pagemap: sys::open(c"/proc/self/pagemap", libc::O_RDONLY),
            pipe,
        }
    }

    /// The kernel's entry of a page in `/proc/self/pagemap`, or 0.
    pub fn entry(&self, plot: &Plot, page: usize) -> u64 {
        let entry = AtomicU64::new(0);
        let arguments = [self.pagemap as usize, (&raw const entry) as usize, 8, plot.address(page) / PAGE * 8, 0, 0];
        // SAFETY: as many bytes as there is room for.
        let _ = unsafe { sys::raw(libc::SYS_pread64, arguments) };
        entry.load(Relaxed)
    }

    /// Checks the whole contents of pages, and their protection.
    pub fn check(&self, plot: &Plot, from: usize, pages: usize, random: &mut Random) -> Result<(), Wrong> {
        for page in from..from + pages {
            let is = &plot.pages[page];
            if is.has(traits::GONE) {
                self.must_not_be_inherited(plot, page)?;
                continue;
            }
            match is.access {
                Access::None => self.check_unreadable(plot, page, random)?,
                Access::Read | Access::Write => plot.compare(page)?,
            }
            if is.access == Access::Read && random.one_in(4) {
                self.must_not_write(plot, page, random)?;
            }
        }
        CHECKED.fetch_add(pages as u64, Relaxed);
        Ok(())
    }

    /// Checks the content of a page that may not be read through `/proc/self/mem`, as a debugger reads it.
    fn check_unreadable(&self, plot: &Plot, page: usize, random: &mut Random) -> Result<(), Wrong> {
        if random.one_in(3) {
            self.must_not_read(plot, page, Access::None.name(), random)?;
        }
        if random.one_in(4) {
            self.must_not_write(plot, page, random)?;
        }
        let bytes: Bytes = [const { AtomicU64::new(0) }; WORDS];
        let arguments = [self.memory as usize, (&raw const bytes) as usize, PAGE, plot.address(page), 0, 0];
        // SAFETY: as many bytes as there is room for.
        let answer = unsafe { sys::raw(libc::SYS_pread64, arguments) };
        if answer == Err(libc::EIO) {
            // This kernel does not let debuggers past protections.
            return Ok(());
        }
        if answer != Ok(PAGE) {
            let found = answer.err().unwrap_or(0);
            return Err(Wrong::Answer { call: "read of /proc/self/mem", page, expected: 0, found });
        }
        plot.pages[page].compare(&bytes).map_err(|differs| plot.differs(page, differs))
    }

    /// Checks a page that this child did not inherit: another mapping may lie there, but not the content that the
    /// parent has there.
    fn must_not_be_inherited(&self, plot: &Plot, page: usize) -> Result<(), Wrong> {
        let bytes: Bytes = [const { AtomicU64::new(0) }; WORDS];
        let arguments = [self.memory as usize, (&raw const bytes) as usize, PAGE, plot.address(page), 0, 0];
        // SAFETY: as many bytes as there is room for.
        let answer = unsafe { sys::raw(libc::SYS_pread64, arguments) };
        PROBED.fetch_add(1, Relaxed);
        if answer == Ok(PAGE) && plot.pages[page].is_telling() && plot.pages[page].compare(&bytes).is_ok() {
            return Err(Wrong::Access { page, by: "a look at it", expected: "not inherited", found: 0 });
        }
        Ok(())
    }

    fn must_not_read(
        &self,
        plot: &Plot,
        page: usize,
        expected: &'static str,
        random: &mut Random,
    ) -> Result<(), Wrong> {
        let way = Way::ALL[random.below(3)];
        let address = plot.address(page) + random.below(WORDS) * 8;
        let (answer, by) = if random.one_in(2) {
            // SAFETY: the kernel reads eight bytes, or finds that it may not.
            (unsafe { sys::call(way, libc::SYS_write, [self.pipe[1] as usize, address, 8, 0, 0, 0]) }, "write(2) of it")
        } else {
            (self.vm_call(way, libc::SYS_process_vm_readv, address), "process_vm_readv")
        };
        must_fault(answer, page, by, expected)
    }

    fn must_not_write(&self, plot: &Plot, page: usize, random: &mut Random) -> Result<(), Wrong> {
        let way = Way::ALL[random.below(3)];
        let address = plot.address(page) + random.below(WORDS) * 8;
        let (answer, by) = if random.one_in(2) {
            // SAFETY: the kernel finds that it may not write these eight bytes; if it does write them, the check
            // fails.
            (unsafe { sys::call(way, libc::SYS_read, [self.zeros as usize, address, 8, 0, 0, 0]) }, "read(2) into it")
        } else {
            (self.vm_call(way, libc::SYS_process_vm_writev, address), "process_vm_writev")
        };
        must_fault(answer, page, by, plot.pages[page].access.name())
    }

    /// Moves eight bytes between this frame and an address of the same process.
    fn vm_call(&self, way: Way, number: libc::c_long, address: usize) -> sys::Answer {
        let mut bytes = 0_u64;
        let here = libc::iovec { iov_base: (&raw mut bytes).cast(), iov_len: 8 };
        let there = libc::iovec { iov_base: address as *mut _, iov_len: 8 };
        let arguments = [self.pid, &raw const here as usize, 1, &raw const there as usize, 1, 0];
        // SAFETY: eight bytes at either end; the far end lies in a plot, whose bytes are otherwise accessed by
        // atomics.
        unsafe { sys::call(way, number, arguments) }
    }

    /// Counts how many of these pages map a file, before they are written: these are folded, and the write breaks them.
    pub fn count_breaks(&self, plot: &Plot, from: usize, pages: usize) {
        let mut entries = [0_u64; crate::plot::MOST];
        let at = plot.address(from) / PAGE * 8;
        let arguments = [self.pagemap as usize, (&raw mut entries) as usize, pages * 8, at, 0, 0];
        // SAFETY: a plot has no more pages than there is room for entries.
        let read = unsafe { sys::raw(libc::SYS_pread64, arguments) }.unwrap_or(0) / 8;
        // Present, and a page of a file (bits 63 and 61).
        let maps_file = |entry: &&u64| **entry >> 63 == 1 && **entry >> 61 & 1 == 1;
        BREAKS.fetch_add(entries[..read].iter().filter(maps_file).count() as u64, Relaxed);
    }

    /// Checks for a few of these pages that no access is possible, independent of their protection.
    pub fn check_guarded(&self, plot: &Plot, from: usize, pages: usize, random: &mut Random) -> Result<(), Wrong> {
        (0..3).try_for_each(|_| self.must_not_read(plot, from + random.below(pages), "guarded", random))
    }

    /// For the report of a fault: the pages of a plot that differ from the model, as read through `/proc/self/mem`. Of
    /// their words, those that are zero and those that are right are only counted.
    pub fn differing(&self, plot: &Plot) -> String {
        let mut text = String::new();
        for page in 0..plot.len() {
            let bytes: Bytes = [const { AtomicU64::new(0) }; WORDS];
            let arguments = [self.memory as usize, (&raw const bytes) as usize, PAGE, plot.address(page), 0, 0];
            // SAFETY: as many bytes as there is room for.
            let answer = unsafe { sys::raw(libc::SYS_pread64, arguments) };
            let entry = self.entry(plot, page);
            if answer != Ok(PAGE) || plot.pages[page].compare(&bytes).is_ok() {
                continue;
            }
            let zeros = bytes.iter().filter(|word| word.load(Relaxed) == 0).count();
            let right = bytes.iter().zip(plot.pages[page].words()).filter(|(a, b)| a.load(Relaxed) == *b).count();
            text += &format!(
                "  page {page}: {zeros} words of {WORDS} are zero, {right} are right; flags {:#x}\n",
                entry >> 55
            );
        }
        text
    }

    /// The descriptor of `/proc/self/mem`.
    pub const fn memory(&self) -> i32 {
        self.memory
    }
}

fn must_fault(answer: sys::Answer, page: usize, by: &'static str, expected: &'static str) -> Result<(), Wrong> {
    PROBED.fetch_add(1, Relaxed);
    match answer {
        Err(libc::EFAULT) => Ok(()),
        other => Err(Wrong::Access { page, by, expected, found: other.err().unwrap_or(0) }),
    }
}
