//! Pages with one owner, who knows what each of them must hold.
//!
//! A page holds a content of the small set, and at its own place in it, if it was written since it was filled, the
//! number of that write:
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
//! What is written after it was folded stays private until its memory is given back, so most pages are discarded before
//! they are filled again.

use crate::area::{Area, PAGE, WORDS};
use crate::content::{Random, ZERO, mark, place, word};
use crate::owners::ok;
use crate::tally::{CHECKED, Mismatch};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

/// What a page must hold.
#[derive(Clone, Copy, Debug)]
struct State {
    class: u32,
    sequence: u32,
}

const ZEROS: State = State { class: ZERO, sequence: 0 };

/// Some pages of an area.
#[derive(Debug)]
pub struct Plot {
    area: Arc<Area>,
    /// Page of the area for each page of the plot.
    pages: Vec<usize>,
    states: Vec<State>,
    /// Contents to choose from.
    classes: usize,
}

impl Plot {
    /// Pages that were never touched.
    pub fn new(area: Arc<Area>, pages: Vec<usize>, classes: usize) -> Self {
        Self { area, states: vec![ZEROS; pages.len()], pages, classes }
    }

    /// A whole new area.
    pub fn whole(pages: usize, classes: usize) -> Self {
        Self::new(Arc::new(Area::mergeable(pages)), (0..pages).collect(), classes)
    }

    pub const fn len(&self) -> usize {
        self.pages.len()
    }

    pub fn area(&self) -> &Area {
        &self.area
    }

    /// The area, if it belongs to this plot alone.
    pub fn area_mut(&mut self) -> &mut Area {
        Arc::get_mut(&mut self.area).expect("an area of one plot")
    }

    /// The area has become longer (what is new holds zeros) or shorter.
    pub fn resized(&mut self) {
        let pages = self.area.pages();
        self.pages = (0..pages).collect();
        self.states.resize(pages, ZEROS);
    }

    /// The page of the area that page `i` is.
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

    /// Checks a page whole.
    pub fn check(&self, i: usize) -> Result<(), Mismatch> {
        (0..WORDS).try_for_each(|n| self.check_word(i, n))
    }

    /// Checks where the writer counts, and a few other words.
    pub fn sample(&self, i: usize, random: &mut Random) -> Result<(), Mismatch> {
        self.check_word(i, place(self.pages[i]))?;
        (0..3).try_for_each(|_| self.check_word(i, random.below(WORDS)))
    }

    pub fn check_all(&self) -> Result<(), Mismatch> {
        (0..self.len()).try_for_each(|i| self.check(i))
    }

    /// Writes at a page's place, when what was written there before has been found.
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

    /// Gives a page another content, without a look at what it held.
    pub fn refill(&mut self, i: usize, class: u32) {
        for n in 0..WORDS {
            self.area.word(self.pages[i], n).store(word(class, n), Relaxed);
        }
        self.states[i] = State { class, sequence: 0 };
    }

    /// Checks a page whole and gives it another content.
    pub fn fill(&mut self, i: usize, random: &mut Random) -> Result<(), Mismatch> {
        self.check(i)?;
        if self.states[i].sequence > 0 {
            CHECKED.fetch_add(1, Relaxed);
        }
        self.refill(i, self.choose(i, random));
        Ok(())
    }

    /// Most contents follow each other as they do elsewhere, so that pages side by side are folded at once.
    fn choose(&self, i: usize, random: &mut Random) -> u32 {
        let n = if random.one_in(16) { random.below(self.classes) } else { self.pages[i] % self.classes };
        n as u32
    }

    /// The same for pages side by side, with memory that is given back first, mostly.
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

    /// One visit to pages side by side: written if they were not, else checked and put to rest.
    pub fn poke(&mut self, i: usize, pages: usize, random: &mut Random) -> Result<(), Mismatch> {
        if self.states[i].sequence > 0 {
            return self.renew(i, pages, random);
        }
        (i..i + pages).try_for_each(|i| {
            self.sample(i, random)?;
            self.write(i)
        })
    }

    /// Whether a page is like its twins and not zero.
    pub fn at_rest(&self, i: usize) -> bool {
        self.states[i].sequence == 0 && self.states[i].class != ZERO
    }

    /// These pages hold zeros now, or so it should be.
    pub fn zeroed(&mut self, i: usize, pages: usize) -> Result<(), Mismatch> {
        self.states[i..i + pages].fill(ZEROS);
        (i..i + pages).try_for_each(|i| self.check(i))
    }

    /// The kernel may take these pages whenever it likes, until they are written.
    pub fn check_free(&self, i: usize) -> Result<(), Mismatch> {
        (0..WORDS).try_for_each(|n| match self.area.word(self.pages[i], n).load(Relaxed) {
            0 => Ok(()),
            found if found == self.expected(i, n) => Ok(()),
            found => Err(self.mismatch(i, n, self.expected(i, n), found)),
        })
    }

    /// What a page must hold, as bytes.
    pub fn bytes(&self, i: usize) -> Vec<u8> {
        let bytes: Vec<u8> = (0..WORDS).flat_map(|n| self.expected(i, n).to_ne_bytes()).collect();
        debug_assert_eq!(bytes.len(), PAGE);
        bytes
    }

    /// The content that a page would get next, as bytes, for somebody else to write there.
    pub fn adopt(&mut self, i: usize, class: u32) {
        self.states[i] = State { class, sequence: 0 };
    }
}
