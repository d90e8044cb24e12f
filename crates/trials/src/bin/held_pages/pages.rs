//! The program's pages, and the ways to hold them.

use act::Prover;
use host::Pagemap;
use io_uring::IoUring;
use page::{HostVirt, PAGE_BYTES, PageRange};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_parent_process_death_signal, waitpid};
use std::error::Error;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::null_mut;
use std::time::Duration;
use wire::prove::Proof;

/// Pages of one mapping, which is unmapped when this is dropped.
pub struct Pages {
    start: *mut u8,
    count: usize,
    mapped: (*mut u8, usize),
}

/// References to pages that a pipe holds until this is dropped.
pub struct Lent {
    _reader: io::PipeReader,
    _writer: io::PipeWriter,
}

/// A child process that shares the pages until this is dropped.
pub struct Child(libc::pid_t);

fn check(answer: libc::c_int) -> io::Result<libc::c_int> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

impl Pages {
    /// Maps private pages inside a private mapping of a memory file that holds other bytes.
    pub fn new(count: usize) -> io::Result<Self> {
        let file = File::from(memfd_create("pool", MemfdFlags::CLOEXEC)?);
        file.set_len((count * PAGE_BYTES) as u64)?;
        let pages = Self::map(count, count, libc::MAP_PRIVATE, file.as_raw_fd(), libc::MADV_NOHUGEPAGE)?;
        (0..count).for_each(|page| pages.write(page, 3));
        Ok(pages)
    }

    /// Maps memory that may be one huge page.
    pub fn huge() -> io::Result<Self> {
        let mut pages = Self::map(512, 1024, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, libc::MADV_HUGEPAGE)?;
        pages.start = pages.start.wrapping_add(pages.start.align_offset(2 << 20));
        (0..512).for_each(|page| pages.write(page, 3));
        Ok(pages)
    }

    /// Maps memory that may be folded: it is advised as mergeable.
    pub fn foldable(count: usize) -> io::Result<Self> {
        let pages = Self::map(count, count, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, libc::MADV_NOHUGEPAGE)?;
        // SAFETY: the mapping just made; the advice changes no content.
        check(unsafe { libc::madvise(pages.start.cast(), pages.mapped.1, libc::MADV_MERGEABLE) })?;
        Ok(pages)
    }

    /// Maps pages of a memory file, as a worker does.
    pub fn slots(file: &File, count: usize) -> io::Result<Self> {
        file.set_len((count * PAGE_BYTES) as u64)?;
        let pages = Self::map(count, count, libc::MAP_SHARED, file.as_raw_fd(), libc::MADV_NOHUGEPAGE)?;
        (0..count).for_each(|page| pages.write(page, 3));
        Ok(pages)
    }

    /// Maps pages of a memory file, as a member does.
    pub fn folded(file: &File, count: usize) -> io::Result<Self> {
        Self::map(count, count, libc::MAP_PRIVATE, file.as_raw_fd(), libc::MADV_NOHUGEPAGE)
    }

    fn map(
        count: usize,
        mapped: usize,
        flags: libc::c_int,
        file: libc::c_int,
        advice: libc::c_int,
    ) -> io::Result<Self> {
        let (bytes, rights) = (mapped * PAGE_BYTES, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { libc::mmap(null_mut(), bytes, rights, flags, file, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping just made; the advice changes no content. Kernels without huge pages refuse.
        unsafe { libc::madvise(start, bytes, advice) };
        Ok(Self { start: start.cast(), count, mapped: (start.cast(), bytes) })
    }

    pub fn page(&self, page: usize) -> *mut u8 {
        assert!(page < self.count);
        self.start.wrapping_add(page * PAGE_BYTES)
    }

    pub fn range(&self, first: usize, count: usize) -> PageRange {
        assert!(first + count <= self.count);
        PageRange { start: HostVirt(self.page(first) as u64), pages: count as u64 }
    }

    pub fn write(&self, page: usize, byte: u8) {
        // SAFETY: within the mapping, which lives as long as `self`; no reference to what it holds is ever made.
        unsafe { self.page(page).write_volatile(byte) }
    }

    /// Writes a whole page.
    pub fn fill(&self, page: usize, bytes: &[u8; PAGE_BYTES]) {
        // SAFETY: within the mapping, which lives as long as `self`; no reference to what it holds is ever made.
        unsafe { self.page(page).cast::<[u8; PAGE_BYTES]>().write_volatile(*bytes) }
    }

    pub fn is_huge(&self) -> Result<bool, Box<dyn Error>> {
        let range = self.range(0, 512);
        Ok(!Pagemap::open(std::process::id())?.huge_ranges(range.start, range.end())?.is_empty())
    }

    /// Puts references to pages into a pipe (`vmsplice`).
    pub fn lend(&self, pages: &[usize]) -> io::Result<Lent> {
        let (reader, writer) = io::pipe()?;
        for page in pages {
            let lent = libc::iovec { iov_base: self.page(*page).cast(), iov_len: PAGE_BYTES };
            // SAFETY: the kernel reads one iovec, which outlives the call; nobody reads the page from the pipe.
            let n = unsafe { libc::vmsplice(writer.as_raw_fd(), &raw const lent, 1, libc::SPLICE_F_NONBLOCK) };
            if usize::try_from(n) != Ok(PAGE_BYTES) {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(Lent { _reader: reader, _writer: writer })
    }

    /// Registers pages as buffers of an io_uring, which pins them as long as the ring lives.
    pub fn register(&self, pages: &[usize]) -> io::Result<IoUring> {
        let ring = IoUring::new(8)?;
        let buffers: Vec<libc::iovec> =
            pages.iter().map(|p| libc::iovec { iov_base: self.page(*p).cast(), iov_len: PAGE_BYTES }).collect();
        // SAFETY: the buffers are pages of a mapping that the program keeps; nothing is ever read into them.
        unsafe { ring.submitter().register_buffers(&buffers) }?;
        Ok(ring)
    }

    /// Forks a child, which shares all pages.
    pub fn fork(&self) -> io::Result<Child> {
        // SAFETY: the child only sleeps and is killed; it allocates nothing and touches no lock.
        match check(unsafe { libc::fork() })? {
            0 => {
                let _ = set_parent_process_death_signal(Some(Signal::KILL));
                loop {
                    // SAFETY: only sleeps.
                    unsafe { libc::pause() };
                }
            }
            pid => Ok(Child(pid)),
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: exactly what was mapped; nothing refers to it.
        unsafe { libc::munmap(self.mapped.0.cast(), self.mapped.1) };
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let pid = Pid::from_raw(self.0);
        let _ = pid.map(|pid| kill_process(pid, Signal::KILL));
        let _ = waitpid(pid, WaitOptions::empty());
    }
}

/// Changes this process's user, so that the kernel no longer lets other processes read its memory. Then connects to the
/// prover and asks.
pub fn asks_as(socket: &Path, uid: usize) -> Result<&'static str, Box<dyn Error>> {
    let uid = libc::uid_t::try_from(uid)?;
    // SAFETY: gives up rights of the whole process.
    check(unsafe { libc::setuid(uid) })?;
    let mut prover = Prover::connect(socket)?;
    let range = PageRange { start: HostVirt(1 << 20), pages: 1 };
    match prover.ask(&[range], &mut [Proof::Unknown], Duration::from_secs(20)) {
        Ok(()) => Ok("answered"),
        Err(e) if e.kind() == io::ErrorKind::TimedOut => Ok("silent"),
        Err(_) => Ok("hung up"),
    }
}
