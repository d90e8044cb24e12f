//! Contents of pages: one of a few that all processes know. Also random numbers.
//!
//! The contents lie in a shared mapping of a memory file. That is never folded, so a fault of folding cannot change
//! the contents that pages are compared with.

use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub const PAGE: usize = 4096;
pub const WORDS: usize = PAGE / 8;

/// Number of different contents.
pub const CLASSES: usize = 96;
/// The content of all zeros.
pub const ZERO: u8 = 0;

/// Mixes a number (splitmix64).
pub const fn mix(number: u64) -> u64 {
    let mut x = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Word `n` of every page of this class.
const fn word(class: usize, n: usize) -> u64 {
    if class == ZERO as usize { 0 } else { mix((class as u64) << 16 | n as u64) }
}

/// The contents, one page each, in the order of their classes.
struct Contents {
    start: usize,
    file: RawFd,
}

static CONTENTS: OnceLock<Contents> = OnceLock::new();

/// Shared memory of the process and its children, which is never unmapped. A file number of -1 makes it anonymous.
pub fn shared_pages(pages: usize, file: RawFd) -> usize {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | if file < 0 { libc::MAP_ANONYMOUS } else { 0 };
    // SAFETY: a new mapping at a place of the kernel's choice.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, access, flags, file, 0) };
    assert_ne!(start, libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    start as usize
}

/// Makes the contents. Called once, before all other functions here.
pub fn init() {
    // SAFETY: a name that ends with a zero, and flags.
    let file = unsafe { libc::memfd_create(c"contents".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: changes the length of that file.
    let sized = unsafe { libc::ftruncate(file, (CLASSES * PAGE) as libc::off_t) };
    assert_eq!(sized, 0, "a memory file: {}", std::io::Error::last_os_error());
    let start = shared_pages(CLASSES, file);
    let made = CONTENTS.set(Contents { start, file });
    assert!(made.is_ok(), "the contents are made once");
    for class in 0..CLASSES {
        let words = words(class as u8);
        (0..WORDS).for_each(|n| words[n].store(word(class, n), Relaxed));
    }
}

fn contents() -> &'static Contents {
    CONTENTS.get().expect("the contents are made first")
}

/// The words of a class.
pub fn words(class: u8) -> &'static [AtomicU64; WORDS] {
    let address = address(class);
    // SAFETY: a page of a mapping that is never unmapped; all accesses to it are atomic.
    unsafe { &*(address as *const [AtomicU64; WORDS]) }
}

/// The address of a class's page.
pub fn address(class: u8) -> usize {
    assert!(usize::from(class) < CLASSES, "class {class}");
    contents().start + usize::from(class) * PAGE
}

/// The file that holds all contents.
pub fn file() -> RawFd {
    contents().file
}

/// Random numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub const fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    /// The random numbers of one step. They do not depend on the steps before.
    pub const fn of_step(seed: u64, thread: usize, step: u64) -> Self {
        Self::new(mix(mix(seed) ^ (thread as u64) << 48) ^ step)
    }

    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0)
    }

    /// A number less than `bound`.
    pub const fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub const fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}
