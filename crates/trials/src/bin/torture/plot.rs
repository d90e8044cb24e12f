//! Pages with one owner, who knows the content that each of them must hold.
//!
//! A page holds a content of the small set. If it was written since it was filled, it also holds the number of that
//! write, at a place of its own:
//!
//! ```text
//!   at rest (sequence 0): equal to all other pages of its class      -- may be folded
//!      | write: the word at its place becomes mark(page, sequence)
//!      v
//!   written (sequence n): like no other page                         -- a fold that missed the write shows here
//!      | fill: checked whole, then another content
//!      v
//!   at rest
//! ```
//! A folded page that is written stays private until its memory is given back, so most pages are discarded before they
//! are filled again.

use crate::area::{Area, PAGE, WORDS};
use crate::content::{Random, ZERO, mark, place, word};
use crate::owners::ok;
use crate::tally::{CHECKED, Mismatch};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

/// The content that a page must hold.
#[derive(Clone, Copy, Debug)]
struct State {
    class: u32,
    sequence: u32,
}

const ZEROS: State = State { class: ZERO, sequence: 0 };

/// Some pages of an area, with what each must hold.
#[derive(Debug)]
pub struct Plot {
    area: Arc<Area>,
    /// Index in the area of each page of the plot.
    pages: Vec<usize>,
    states: Vec<State>,
    /// Number of contents to choose from.
    classes: usize,
}

impl Plot {
    /// A plot of pages that were never touched.
    pub fn new(area: Arc<Area>, pages: Vec<usize>, classes: usize) -> Self {
        Self { area, states: vec![ZEROS; pages.len()], pages, classes }
    }

    /// A plot that is the whole of a new area.
    pub fn whole(pages: usize, classes: usize) -> Self {
        Self::new(Arc::new(Area::mergeable(pages)), (0..pages).collect(), classes)
    }

    pub const fn len(&self) -> usize {
        self.pages.len()
    }

    pub fn area(&self) -> &Area {
        &self.area
    }

    /// The area, which must belong to this plot alone.
    pub fn area_mut(&mut self) -> &mut Area {
        Arc::get_mut(&mut self.area).expect("an area of one plot")
    }

    /// Adapts the plot to an area that was resized: it is shorter, or longer by pages of zeros.
    pub fn resized(&mut self) {
        let pages = self.area.pages();
        self.pages = (0..pages).collect();
        self.states.resize(pages, ZEROS);
    }

    /// The index in the area of page `i`.
    pub fn page(&self, i: usize) -> usize {
        self.pages[i]
    }

    /// The first page of the plot that is not before this page of the area.
    pub fn position(&self, page: usize) -> usize {
        self.pages.partition_point(|p| *p < page)
    }

    fn expected(&self, i: usize, n: usize) -> u64 {
        let State { class, sequence } = self.states[i];
        let page = self.pages[i];
        if sequence > 0 && n == place(page) { mark(page, sequence) } else { word(class, n) }
    }

    fn check_word(&self, i: usize, n: usize) -> Result<(), Mismatch> {
        let found = self.area.word(self.pages[i], n).load(Relaxed);
        let expected = self.expected(i, n);
        if found == expected { Ok(()) } else { Err(self.mismatch(i, n, expected, found)) }
    }

    fn mismatch(&self, i: usize, n: usize, expected: u64, found: u64) -> Mismatch {
        Mismatch { address: self.area.address(self.pages[i]), page: self.pages[i], offset: n * 8, expected, found }
    }

    /// Checks a whole page.
    pub fn check(&self, i: usize) -> Result<(), Mismatch> {
        (0..WORDS).try_for_each(|n| self.check_word(i, n))
    }

    /// Checks the word in which the writer counts, and a few others.
    pub fn sample(&self, i: usize, random: &mut Random) -> Result<(), Mismatch> {
        self.check_word(i, place(self.pages[i]))?;
        (0..3).try_for_each(|_| self.check_word(i, random.below(WORDS)))
    }

    pub fn check_all(&self) -> Result<(), Mismatch> {
        (0..self.len()).try_for_each(|i| self.check(i))
    }

    /// Checks the word in which the writer counts, and writes the next number there.
    pub fn write(&mut self, i: usize) -> Result<(), Mismatch> {
        let page = self.pages[i];
        self.check_word(i, place(page))?;
        if self.states[i].sequence > 0 {
            CHECKED.fetch_add(1, Relaxed);
        }
        self.states[i].sequence += 1;
        self.area.word(page, place(page)).store(mark(page, self.states[i].sequence), SeqCst);
        Ok(())
    }

    /// Gives a page another content without checking it.
    pub fn refill(&mut self, i: usize, class: u32) {
        for n in 0..WORDS {
            self.area.word(self.pages[i], n).store(word(class, n), Relaxed);
        }
        self.states[i] = State { class, sequence: 0 };
    }

    /// Checks a whole page and gives it another content.
    pub fn fill(&mut self, i: usize, random: &mut Random) -> Result<(), Mismatch> {
        self.check(i)?;
        if self.states[i].sequence > 0 {
            CHECKED.fetch_add(1, Relaxed);
        }
        self.refill(i, self.choose(i, random));
        Ok(())
    }

    /// A content for a page. Most follow each other in the same order in all areas, so that pages side by side are
    /// folded at once.
    fn choose(&self, i: usize, random: &mut Random) -> u32 {
        let n = if random.one_in(16) { random.below(self.classes) } else { self.pages[i] % self.classes };
        n as u32
    }

    /// Gives neighbouring pages other contents, after checking them. In most cases they are discarded first.
    pub fn renew(&mut self, i: usize, pages: usize, random: &mut Random) -> Result<(), Mismatch> {
        if !random.one_in(4) {
            for i in i..i + pages {
                self.check(i)?;
                if self.states[i].sequence > 0 {
                    CHECKED.fetch_add(1, Relaxed);
                }
            }
            ok("MADV_DONTNEED", self.area.advise(self.pages[i], pages, libc::MADV_DONTNEED));
            self.zeroed(i, pages)?;
        }
        (i..i + pages).try_for_each(|i| self.fill(i, random))
    }

    pub fn fill_all(&mut self, random: &mut Random) -> Result<(), Mismatch> {
        (0..self.len()).try_for_each(|i| self.fill(i, random))
    }

    /// One visit to neighbouring pages: those without a mark are written; others are checked and filled with a content
    /// that has duplicates.
    pub fn poke(&mut self, i: usize, pages: usize, random: &mut Random) -> Result<(), Mismatch> {
        if self.states[i].sequence > 0 {
            return self.renew(i, pages, random);
        }
        (i..i + pages).try_for_each(|i| {
            self.sample(i, random)?;
            self.write(i)
        })
    }

    /// Whether a page has the content of its class, without a mark, and is not zero.
    pub fn at_rest(&self, i: usize) -> bool {
        self.states[i].sequence == 0 && self.states[i].class != ZERO
    }

    /// Records that these pages hold zeros, and checks that they do.
    pub fn zeroed(&mut self, i: usize, pages: usize) -> Result<(), Mismatch> {
        self.states[i..i + pages].fill(ZEROS);
        (i..i + pages).try_for_each(|i| self.check(i))
    }

    /// Checks a page that was advised `MADV_FREE`: it holds its content, or zeros.
    pub fn check_free(&self, i: usize) -> Result<(), Mismatch> {
        (0..WORDS).try_for_each(|n| match self.area.word(self.pages[i], n).load(Relaxed) {
            0 => Ok(()),
            found if found == self.expected(i, n) => Ok(()),
            found => Err(self.mismatch(i, n, self.expected(i, n), found)),
        })
    }

    /// The bytes that a page must hold.
    pub fn bytes(&self, i: usize) -> Vec<u8> {
        let bytes: Vec<u8> = (0..WORDS).flat_map(|n| self.expected(i, n).to_ne_bytes()).collect();
        debug_assert_eq!(bytes.len(), PAGE);
        bytes
    }

    /// Records that the kernel or another thread has filled the page with the content of a class.
    pub fn adopt(&mut self, i: usize, class: u32) {
        self.states[i] = State { class, sequence: 0 };
    }
}
