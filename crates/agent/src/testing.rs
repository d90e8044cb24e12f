//! For tests: memory of this very process that may be folded, a pool to fold it to, and devices that hold its pages.

use crate::follow::Following;
use crate::references;
use crate::section::{Part, Section, Source};
use crate::table::{self, Advice, Traits};
use crate::witness::Witness;
use act::{DonationWindow, MemberMemory, PoolSegment, PoolView, Purpose, Userfault};
use host::Pagemap;
use page::{PAGE_BYTES, PageRange, PoolSlot, pages_to_bytes};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use wire::Outcome;

const SLOTS: u32 = 1024;

/// A pool whose slot `n` holds `content(n)`.
pub fn pool() -> PoolView {
    let window = DonationWindow::create(SLOTS as usize).unwrap();
    for n in 0..u64::from(SLOTS) {
        rustix::io::pwrite(&window, &content(n), n * PAGE_BYTES as u64).unwrap();
    }
    let mut segment = PoolSegment::create("pool", SLOTS).unwrap();
    segment.fill(0..SLOTS, &window, 0).unwrap();
    let file = segment.read_only().unwrap();
    crate::maps::know_pool(&rustix::fs::fstat(&file).unwrap());
    PoolView::new(file, SLOTS).unwrap()
}

pub fn content(n: u64) -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    page[..8].copy_from_slice(&(n + 1).to_ne_bytes());
    page[PAGE_BYTES - 8..].copy_from_slice(&(n * 7 + 1).to_ne_bytes());
    page
}

/// Memory that may be folded, whose page `n` holds `content(n)`.
pub struct Member(pub MemberMemory);

impl Member {
    pub fn new(pages: u64) -> Self {
        Self::of(MemberMemory::new(pages).unwrap())
    }

    pub fn of(memory: MemberMemory) -> Self {
        let this = Self(memory);
        table::lock().ask(this.0.range());
        this.write_content();
        this
    }

    /// The same, which no child gets: then a fork probe may be the witness.
    pub fn not_inherited(self) -> Self {
        act::give_to_children(self.0.range(), false).unwrap();
        table::lock().advise(self.0.range(), |advice| advice.dont_fork = true);
        self
    }

    pub fn write_content(&self) {
        for n in 0..self.0.range().pages {
            content(n).chunks_exact(8).enumerate().for_each(|(i, word)| {
                self.word(n, i).store(u64::from_ne_bytes(word.try_into().unwrap()), Ordering::Relaxed);
            });
        }
    }

    pub fn word(&self, page: u64, word: usize) -> &AtomicU64 {
        assert!(page < self.0.range().pages && word < PAGE_BYTES / 8);
        let at = self.0.range().start.add_pages(page).0 as usize + word * 8;
        // SAFETY: aligned and within the mapping, which lives as long as `self`; everything in it is accessed as
        // atomics.
        unsafe { AtomicU64::from_ptr(at as *mut u64) }
    }

    pub fn run(&self, first: u64, pages: u64) -> PageRange {
        PageRange { start: self.0.range().start.add_pages(first), pages }
    }

    /// How many of the pages are a file's.
    pub fn in_pool(&self) -> usize {
        let range = self.0.range();
        let (mut entries, pagemap) = (Vec::new(), Pagemap::open(std::process::id()).unwrap());
        act::make_present(range).unwrap();
        pagemap.read(range.start, range.pages, &mut entries).unwrap();
        entries.iter().filter(|e| e.present() && e.file_or_shared()).count()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        table::lock().forget(self.0.range());
    }
}

/// Of memory that may be folded.
pub fn traits() -> Traits {
    Traits { asked: true, ..Traits::default() }
}

/// Follows this process, as an agent does.
pub fn following() -> Option<Arc<Following>> {
    table::lock().follow_forks(true);
    match Userfault::open(Purpose::FollowForks).or_else(|_| Userfault::open(Purpose::Follow)) {
        Ok(watch) => Some(Following::start(watch, true, PathBuf::from("/nonexistent")).unwrap()),
        Err(e) => {
            eprintln!("skipped: no userfaultfd that follows memory here: {e}");
            None
        }
    }
}

pub fn section() -> Option<Section> {
    let following = following()?;
    Some(Section::new(following, Some(Userfault::open(Purpose::Note).unwrap())).unwrap())
}

pub fn fold(section: &mut Section, run: PageRange, source: Option<(&PoolView, u32)>) -> Vec<Outcome> {
    let mut outcomes = vec![Outcome::Gone; run.pages as usize];
    let source = source.map(|(pool, first)| Source { pool, first: PoolSlot::new(0, first).unwrap() });
    let part = Part { pages: run.pages, source };
    section.fold(&mut table::lock(), run, &[part], references::generation(), &mut outcomes);
    outcomes
}

/// Discards a page by a system call that no hook sees.
pub fn discard_past_hooks(member: &Member, page: u64) {
    let at = member.run(page, 1).start.0 as usize;
    let arguments = [at, PAGE_BYTES, libc::MADV_DONTNEED as usize, 0, 0, 0];
    // SAFETY: a page of the test's own, which nobody misses.
    assert_eq!(unsafe { crate::raw::call(libc::SYS_madvise, arguments) }, 0);
}

/// Maps fresh anonymous memory in place of the mappings at `place`.
///
/// # Safety
/// No code may need the former content of `place`.
pub unsafe fn map_anonymous_over(place: PageRange) -> Result<(), Errno> {
    let (flags, access) =
        (MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE, ProtFlags::READ | ProtFlags::WRITE);
    let (at, bytes) = (place.start.0 as usize as *mut _, pages_to_bytes(place.pages) as usize);
    // SAFETY: the caller promises that the range may be replaced.
    unsafe { rustix::mm::mmap_anonymous(at, bytes, access, flags) }.map(drop)
}

/// Advice of every kind that is remembered.
pub const ADVICE: Advice =
    Advice { dont_fork: true, dont_dump: true, huge: Some(true), mergeable: false, no_reserve: false };

/// Gives a member's memory this advice, as the program would.
pub fn advise(member: &Member) {
    let range = member.0.range();
    let Advice { dont_fork, dont_dump, huge, .. } = ADVICE;
    act::Inherit { dont_fork, dont_dump, huge }.apply(range).unwrap();
    table::lock().advise(range, |advice| *advice = ADVICE);
}

/// Whether all of this memory is anonymous and has that advice.
pub fn shows_advice(range: PageRange) -> bool {
    let found = crate::maps::mappings(range, true).unwrap();
    found.iter().all(|mapping| mapping.anonymous && mapping.advice == ADVICE)
}

/// Lets time pass without giving the processor away.
pub fn spin(time: Duration) {
    let until = Instant::now() + time;
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

/// Runs one test alone in a process of its own. Returns whether this is that process.
pub fn alone(name: &str) -> bool {
    if std::env::var_os("PAGEFOLD_TEST_ALONE").is_some() {
        return true;
    }
    let exe = std::env::current_exe().unwrap();
    let mut command = Command::new(exe);
    command.args(["--exact", name, "--test-threads=1", "--nocapture"]).env("PAGEFOLD_TEST_ALONE", "1");
    let output = command.output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    text.lines().filter(|line| line.contains("skipped:")).for_each(|line| eprintln!("{line}"));
    assert!(output.status.success() && text.contains("1 passed"), "{}: {text}", output.status);
    false
}

/// Without a prover.
pub fn witness() -> Witness {
    Witness::new(PathBuf::from("/nonexistent"))
}

/// A device that answers late: reads that io_uring has begun into registered buffers, from a pipe that is empty yet.
/// Their data is put into the page frame itself, even if the page table has changed by then.
pub struct LateDevice {
    ring: io_uring::IoUring,
    pipe: (std::io::PipeReader, std::io::PipeWriter),
    pages: u32,
}

impl LateDevice {
    pub fn new() -> Option<Self> {
        let ring = io_uring::IoUring::new(256).inspect_err(|e| eprintln!("skipped: no io_uring here: {e}")).ok()?;
        Some(Self { ring, pipe: std::io::pipe().unwrap(), pages: 0 })
    }

    /// Begins to read into a word of each of these pages.
    pub fn begin(&mut self, member: &Member, pages: &[u64], word: usize) {
        let at = |page: &u64| std::ptr::from_ref(member.word(*page, 0)).cast_mut();
        let buffers: Vec<_> =
            pages.iter().map(|page| libc::iovec { iov_base: at(page).cast(), iov_len: PAGE_BYTES }).collect();
        // SAFETY: the pages outlive the registration, which ends in `finish`.
        unsafe { self.ring.submitter().register_buffers(&buffers) }.unwrap();
        for (n, page) in pages.iter().enumerate() {
            let fd = io_uring::types::Fd(self.pipe.0.as_raw_fd());
            let to = std::ptr::from_ref(member.word(*page, word)).cast_mut().cast();
            let entry = io_uring::opcode::ReadFixed::new(fd, to, 8, n as u16).build();
            // SAFETY: the buffer is registered, and is the test's until the read is done.
            unsafe { self.ring.submission().push(&entry) }.unwrap();
        }
        self.ring.submit().unwrap();
        self.pages = pages.len() as u32;
    }

    /// The device answers, with the same for everybody, and lets the pages go.
    pub fn finish(&mut self, word: u64) {
        for _ in 0..self.pages {
            self.pipe.1.write_all(&word.to_ne_bytes()).unwrap();
        }
        self.ring.submit_and_wait(self.pages as usize).unwrap();
        assert!(self.ring.completion().all(|done| done.result() == 8));
        self.ring.submitter().unregister_buffers().unwrap();
    }
}
