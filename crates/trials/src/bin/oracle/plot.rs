//! A plot: an anonymous private mapping with one owner, and the model of what each of its pages must be.
//!
//! A page holds a content of the small set and, if it was written since it got that, a mark at its own place:
//!
//! ```text
//!   at rest (no mark): equal to all other pages of its class        -- may be folded
//!      | mark: the word at its place becomes a number that nothing else holds
//!      v
//!   marked: like no other page
//!      | fill: a content of the set, over it or after a discard
//!      v
//!   at rest
//! ```
//! All accesses to the bytes are atomic: the kernel may replace a page at any time, so the program never holds a plain
//! reference. Pages that may not be read or written are accessed through system calls only.

use crate::content::{self, PAGE, Random, WORDS, ZERO, mix};
use crate::history::History;
use crate::verdict::Wrong;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

/// The access that the program may have to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Access {
    None,
    Read,
    Write,
}

impl Access {
    pub const fn bits(self) -> usize {
        match self {
            Self::None => libc::PROT_NONE as usize,
            Self::Read => libc::PROT_READ as usize,
            Self::Write => (libc::PROT_READ | libc::PROT_WRITE) as usize,
        }
    }

    pub const fn name(self) -> &'static str {
        ["none", "read", "read-write"][self as usize]
    }
}

/// Other traits of a page, which the program has told the kernel. Pages of different traits lie in different mappings.
pub mod traits {
    pub const LOCKED: u16 = 1;
    pub const ON_FAULT: u16 = 1 << 1;
    pub const DONT_FORK: u16 = 1 << 2;
    pub const WIPE_ON_FORK: u16 = 1 << 3;
    pub const DONT_DUMP: u16 = 1 << 4;
    pub const HUGE: u16 = 1 << 5;
    pub const NO_HUGE: u16 = 1 << 6;
    pub const MERGEABLE: u16 = 1 << 7;
    /// Trait of a page that a child did not inherit.
    pub const GONE: u16 = 1 << 8;
}

/// The model of a page.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    class: u8,
    /// Whether the kernel may drop the page's content (`MADV_FREE`): true until the page is written again.
    free: bool,
    /// Index of the word in which the page gets its mark.
    place: u16,
    /// Value of the mark, or 0 without one.
    mark: u64,
    pub access: Access,
    pub traits: u16,
}

impl Page {
    pub const fn has(&self, traits: u16) -> bool {
        self.traits & traits != 0
    }

    /// Records that the page holds zeros.
    pub const fn zero(&mut self) {
        (self.class, self.free, self.mark) = (ZERO, false, 0);
    }

    /// Records that the kernel may turn the page into zeros.
    pub const fn free(&mut self) {
        self.free = true;
    }

    /// Records that the page got the content of a class.
    pub const fn hold(&mut self, class: u8) {
        (self.class, self.free, self.mark) = (class, false, 0);
    }

    /// Whether the page holds zeros because it was not written since it was mapped or discarded.
    pub const fn is_untouched(&self) -> bool {
        self.class == ZERO && self.mark == 0
    }

    /// Whether the page has a content that no other memory has by chance.
    pub const fn is_telling(&self) -> bool {
        !self.is_untouched() && !self.free
    }

    /// The words that the page should have.
    pub fn words(&self) -> impl Iterator<Item = u64> {
        let word = |(n, word): (usize, &AtomicU64)| {
            if self.mark != 0 && n == usize::from(self.place) { self.mark } else { word.load(Relaxed) }
        };
        content::words(self.class).iter().enumerate().map(word)
    }

    /// Compares all words with the model. The error is the first that differs, with the expected and the found value.
    pub fn compare(&self, found: &[AtomicU64; WORDS]) -> Result<(), (usize, u64, u64)> {
        let mut taken = false;
        for (n, (found, expected)) in found.iter().zip(content::words(self.class)).enumerate() {
            let (mut expected, found) = (expected.load(Relaxed), found.load(Relaxed));
            if found == expected && !taken && (self.mark == 0 || n != usize::from(self.place)) {
                continue;
            }
            if taken {
                expected = 0;
            } else if self.mark != 0 && n == usize::from(self.place) {
                expected = self.mark;
            }
            if found != expected {
                if !self.free || found != 0 {
                    return Err((n, expected, found));
                }
                taken = true;
            }
        }
        Ok(())
    }
}

/// Greatest number of pages in a plot.
pub const MOST: usize = 256;

/// Where a plot's memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Mapping,
    /// Between the first break and the current one.
    Heap,
}

#[derive(Debug)]
pub struct Plot {
    pub kind: Kind,
    pub start: usize,
    pub pages: Vec<Page>,
    /// Whether parts of the plot were mapped anew. The kernel may keep them in mappings of their own, even if their
    /// traits are equal.
    pub pieced: bool,
    /// Class of the usual content of its first page.
    first_class: usize,
    /// The step from which on the plot may be touched again.
    pub rests_until: u64,
    /// Value of [`crate::worker::UNLOCKS`] when the locks of this plot were last updated.
    pub unlocks: u64,
    pub history: History,
}

impl Plot {
    /// The model of newly mapped memory.
    pub fn fresh(kind: Kind, start: usize, pages: usize, random: &mut Random) -> Self {
        let mut plot = Self {
            kind,
            start,
            pages: Vec::with_capacity(MOST),
            pieced: false,
            first_class: random.below(6) * 16,
            rests_until: 0,
            unlocks: 0,
            history: History::default(),
        };
        plot.extend(pages, Access::Write, 0);
        plot
    }

    /// Adds pages that hold zeros.
    pub fn extend(&mut self, pages: usize, access: Access, traits: u16) {
        assert!(self.pages.len() + pages <= MOST, "a plot of {} + {pages} pages", self.pages.len());
        for _ in 0..pages {
            let place = (mix((self.start + self.pages.len()) as u64) % WORDS as u64) as u16;
            self.pages.push(Page { class: ZERO, free: false, place, mark: 0, access, traits });
        }
    }

    pub const fn len(&self) -> usize {
        self.pages.len()
    }

    pub const fn address(&self, page: usize) -> usize {
        self.start + page * PAGE
    }

    /// Address and length in bytes of some pages.
    pub fn range(&self, from: usize, pages: usize) -> (usize, usize) {
        assert!(pages > 0 && from + pages <= self.len(), "{from} + {pages} of {} pages", self.len());
        (self.address(from), pages * PAGE)
    }

    pub fn part(&self, from: usize, pages: usize) -> &[Page] {
        &self.pages[from..from + pages]
    }

    pub fn part_mut(&mut self, from: usize, pages: usize) -> &mut [Page] {
        &mut self.pages[from..from + pages]
    }

    /// Whether the program knows these pages as one mapping: they have the same access and traits, and no part of the
    /// plot was mapped anew.
    pub fn is_one(&self, from: usize, pages: usize) -> bool {
        let first = &self.pages[from];
        let alike = |page: &Page| page.access == first.access && page.traits == first.traits;
        !self.pieced && self.part(from, pages).iter().all(alike)
    }

    /// Number of pages, from `from` on and at most `pages`, that all allow this access.
    pub fn usable(&self, from: usize, pages: usize, access: Access) -> usize {
        self.part(from, pages).iter().take_while(|page| page.access >= access && !page.has(traits::GONE)).count()
    }

    /// The words of a page that may be read.
    pub fn words(&self, page: usize) -> &[AtomicU64; WORDS] {
        assert!(self.pages[page].access >= Access::Read, "page {page}");
        let address = self.address(page);
        // SAFETY: by the model, the page belongs to a mapping of this thread's own, is there, and may be read. Every
        // bit pattern is a number, and the only other reader or writer is the kernel.
        unsafe { &*(address as *const [AtomicU64; WORDS]) }
    }

    /// Checks a page that may be read.
    pub fn compare(&self, page: usize) -> Result<(), Wrong> {
        self.pages[page].compare(self.words(page)).map_err(|differs| self.differs(page, differs))
    }

    pub fn differs(&self, page: usize, (n, expected, found): (usize, u64, u64)) -> Wrong {
        Wrong::Byte { page, offset: n * 8, expected, found }
    }

    /// Marks a page that may be written.
    pub fn mark(&mut self, page: usize, random: &mut Random) {
        let mark = random.next() | 1;
        let place = usize::from(self.pages[page].place);
        self.words(page)[place].store(mark, SeqCst);
        // The write ends the `MADV_FREE` state: from then on the content shows whether the kernel dropped it before.
        let other = (place + 1) % WORDS;
        let taken = self.pages[page].free && self.words(page)[other].load(Relaxed) == 0;
        let page = &mut self.pages[page];
        if taken {
            page.zero();
        }
        (page.mark, page.free) = (mark, false);
    }

    /// Gives a page that may be written another content.
    pub fn fill(&mut self, page: usize, class: u8) {
        for (to, from) in self.words(page).iter().zip(content::words(class)) {
            to.store(from.load(Relaxed), Relaxed);
        }
        self.pages[page].hold(class);
    }

    /// The usual content of a page. Classes follow each other in the same order in all plots, so that pages side by
    /// side are folded at once.
    pub const fn class_of(&self, page: usize) -> u8 {
        ((self.first_class + page) % content::CLASSES) as u8
    }

    /// Chooses the class of a new content for the page, most often its usual one.
    pub const fn choose(&self, page: usize, random: &mut Random) -> u8 {
        if random.one_in(24) { random.below(content::CLASSES) as u8 } else { self.class_of(page) }
    }
}
