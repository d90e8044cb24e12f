//! A program with known pages, for the tests. It carries out commands from standard input, one a line, and answers
//! each with `ok`. It ends when its input closes.
//!
//! ```text
//! alloc NAME PAGES           private memory, untouched, small pages
//! huge NAME PAGES            private memory in transparent huge pages
//! shared NAME PAGES          shared anonymous memory
//! file NAME PATH             a file, mapped privately
//! fill NAME FROM PAGES SEED  every page another content, the same for the same seed
//! same NAME FROM PAGES SEED  every page the same content
//! zero NAME FROM PAGES       writes zeros
//! read NAME FROM PAGES       reads a byte of each page
//! write NAME FROM PAGES      writes a byte of each page that is there already; answers with the 99th percentile of the
//!                            times, in nanoseconds
//! check NAME FROM PAGES SEED asserts that pages are as `fill` has written them
//! zeros NAME FROM PAGES      asserts that pages hold zeros
//! none NAME                  PROT_NONE
//! drop NAME FROM PAGES       discards pages
//! mergeable NAME             advises KSM to merge
//! dontfork NAME              keeps pages from children
//! pageout NAME               asks the kernel to swap pages out
//! uffd NAME                  faults are served by a thread that fills and discards pages all the time, and
//!                            answers nobody who waits
//! fork                       a child with the same pages, which lives as long; answers with its pid
//! exec                       executes another program, which lives as long
//! ```

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::ptr::null_mut;

const PAGE: usize = 4096;
const HUGE: usize = 2 << 20;

struct Area {
    start: *mut u8,
    pages: usize,
}

impl Area {
    fn map(pages: usize, flags: libc::c_int, fd: libc::c_int, protection: libc::c_int) -> Self {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { libc::mmap(null_mut(), pages * PAGE, protection, flags, fd, 0) };
        assert_ne!(start, libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
        Self { start: start.cast(), pages }
    }

    fn page(&mut self, n: usize) -> &mut [u8; PAGE] {
        assert!(n < self.pages);
        // SAFETY: within a mapping that is never unmapped, to which only this area refers, and it is borrowed.
        unsafe { &mut *self.start.wrapping_add(n * PAGE).cast() }
    }

    fn advise(&self, from: usize, pages: usize, advice: libc::c_int) {
        assert!(from + pages <= self.pages);
        // SAFETY: a range of this mapping, whose contents nothing refers to.
        let answer = unsafe { libc::madvise(self.start.wrapping_add(from * PAGE).cast(), pages * PAGE, advice) };
        assert_eq!(answer, 0, "madvise {advice}: {}", std::io::Error::last_os_error());
    }
}

fn fill(page: &mut [u8; PAGE], seed: u64) {
    let mut x = (seed << 1 | 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for word in page.as_chunks_mut::<8>().0 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        *word = x.to_ne_bytes();
    }
}

fn create(kind: &str, argument: &str) -> Area {
    const PRIVATE: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
    let pages = || argument.parse().expect("a number of pages");
    match kind {
        "alloc" => {
            let area = Area::map(pages(), PRIVATE, -1, READ_WRITE);
            area.advise(0, area.pages, libc::MADV_NOHUGEPAGE);
            area
        }
        "huge" => {
            let wide = Area::map(pages() + HUGE / PAGE, PRIVATE, -1, READ_WRITE);
            let start = (wide.start as usize).next_multiple_of(HUGE) as *mut u8;
            let area = Area { start, pages: pages() };
            area.advise(0, area.pages, libc::MADV_HUGEPAGE);
            area
        }
        "shared" => Area::map(pages(), libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, READ_WRITE),
        "file" => {
            let file = std::fs::File::open(argument).expect("open the file");
            let bytes = file.metadata().expect("stat the file").len() as usize;
            Area::map(bytes.div_ceil(PAGE), libc::MAP_PRIVATE, file.as_raw_fd(), READ_WRITE)
        }
        _ => panic!("no such kind of memory: {kind}"),
    }
}

/// Numbers of userfaultfd's ioctls: `_IOWR(0xAA, 0x3F, struct uffdio_api)`, `_IOWR(0xAA, 0x00, struct
/// uffdio_register)`, `_IOWR(0xAA, 0x03, struct uffdio_copy)`.
const UFFDIO_API: libc::Ioctl = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00;
const UFFDIO_COPY: libc::Ioctl = 0xc028_aa03;

/// Calls `ioctl` with a structure of 64-bit words.
fn uffd_ioctl<const N: usize>(fd: libc::c_int, request: libc::Ioctl, mut words: [u64; N]) -> libc::c_int {
    // SAFETY: each request is made with as many words as its structure has; the kernel checks the addresses in it.
    unsafe { libc::ioctl(fd, request, words.as_mut_ptr()) }
}

/// Starts two threads that run until the program ends. One copies pages in without waking the threads that wait for
/// them; the other discards the pages again.
fn serve_faults_badly(area: &Area) {
    const DONTWAKE: u64 = 1;
    const MISSING: u64 = 1;
    // SAFETY: takes flags and returns a descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) } as libc::c_int;
    let (start, bytes) = (area.start as u64, (area.pages * PAGE) as u64);
    assert_eq!(uffd_ioctl(fd, UFFDIO_API, [0xaa, 0, 0]), 0, "userfaultfd: {}", std::io::Error::last_os_error());
    assert_eq!(uffd_ioctl(fd, UFFDIO_REGISTER, [start, bytes, MISSING, 0]), 0);
    let pages = area.pages;
    std::thread::spawn(move || {
        let content = Box::new([7_u64; PAGE / 8 * 2]);
        let from = (content.as_ptr() as u64).next_multiple_of(PAGE as u64);
        for n in (0..pages as u64).cycle() {
            // The call fails if the page is there already.
            let _ = uffd_ioctl(fd, UFFDIO_COPY, [start + n * PAGE as u64, from, PAGE as u64, DONTWAKE, 0]);
        }
    });
    let area = Area { start: area.start, pages };
    let discard = Discard(area);
    std::thread::spawn(move || discard.forever());
}

/// An area whose pages another thread may discard.
struct Discard(Area);

// SAFETY: only its address is used, and only for advice.
unsafe impl Send for Discard {}

impl Discard {
    fn forever(self) {
        for n in (0..self.0.pages / 64).cycle() {
            self.0.advise(n * 64, 64, libc::MADV_DONTNEED);
        }
    }
}

fn fork() -> String {
    let parent = std::process::id();
    // SAFETY: this program has one thread, so the child is as whole as its parent.
    match unsafe { libc::fork() } {
        0 => wait_for_the_end_of(parent),
        child => child.to_string(),
    }
}

fn wait_for_the_end_of(parent: u32) -> ! {
    // SAFETY: sets an attribute of this process and touches no memory.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // The parent may have ended before the call to `prctl`.
    while std::os::unix::process::parent_id() == parent {
        // SAFETY: waits for a signal and touches no memory.
        unsafe { libc::pause() };
    }
    std::process::exit(0)
}

/// Writes a byte of each page, and returns the 99th percentile of the times in nanoseconds.
fn write(area: &mut Area, pages: std::ops::Range<usize>) -> u128 {
    let mut times: Vec<u128> = pages
        .map(|n| {
            let page = std::hint::black_box(area.page(n));
            let began = std::time::Instant::now();
            page[8] = std::hint::black_box(page[8]);
            began.elapsed().as_nanos()
        })
        .collect();
    times.sort_unstable();
    times[times.len() * 99 / 100]
}

fn check(page: &[u8; PAGE], seed: u64) {
    let mut wanted = [0; PAGE];
    fill(&mut wanted, seed);
    assert!(*page == wanted, "a page with seed {seed} has other content");
}

fn obey(areas: &mut HashMap<String, Area>, words: &[&str]) -> String {
    let number = |n: usize| words[n].parse::<usize>().expect("a number");
    match words {
        ["alloc" | "huge" | "shared" | "file", name, argument] => {
            areas.insert((*name).to_owned(), create(words[0], argument));
        }
        ["fork"] => return fork(),
        ["exec"] => panic!("exec: {}", std::process::Command::new("cat").exec()),
        [verb, name, ..] => {
            let area = areas.get_mut(*name).expect("an area of that name");
            let range = || number(2)..number(2) + number(3);
            match *verb {
                "fill" => range().for_each(|n| fill(area.page(n), (number(4) + n - number(2)) as u64)),
                "same" => range().for_each(|n| fill(area.page(n), number(4) as u64)),
                "zero" => range().for_each(|n| {
                    let page = std::hint::black_box(area.page(n));
                    page.fill(0);
                }),
                "read" => range().for_each(|n| _ = std::hint::black_box(area.page(n)[0])),
                "write" => return write(area, range()).to_string(),
                "check" => range().for_each(|n| check(area.page(n), (number(4) + n - number(2)) as u64)),
                "zeros" => assert!(range().all(|n| *area.page(n) == [0; PAGE]), "a page holds something"),
                "drop" => area.advise(number(2), number(3), libc::MADV_DONTNEED),
                "uffd" => serve_faults_badly(area),
                "mergeable" => area.advise(0, area.pages, libc::MADV_MERGEABLE),
                "dontfork" => area.advise(0, area.pages, libc::MADV_DONTFORK),
                "pageout" => area.advise(0, area.pages, libc::MADV_PAGEOUT),
                "none" => {
                    // SAFETY: the whole of this mapping, to which no reference is held.
                    let answer = unsafe { libc::mprotect(area.start.cast(), area.pages * PAGE, libc::PROT_NONE) };
                    assert_eq!(answer, 0, "mprotect: {}", std::io::Error::last_os_error());
                }
                _ => panic!("no such verb: {verb}"),
            }
        }
        _ => panic!("not understood: {words:?}"),
    }
    "ok".to_owned()
}

fn main() {
    let mut areas = HashMap::new();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("read a line");
        let words: Vec<_> = line.split(' ').collect();
        let answer = obey(&mut areas, &words);
        let mut out = std::io::stdout().lock();
        writeln!(out, "{answer}").and_then(|()| out.flush()).expect("answer");
    }
}
