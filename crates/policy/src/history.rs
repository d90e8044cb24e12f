//! The history of a member's pages: when each page was last written, and what became of its folds. These notes may be
//! wrong, which costs only time: a page is folded only after a comparison of its bytes.
//!
//! A fold that is undone within about a minute ([`WINDOW_SECONDS`], [`YOUNG_WINDOWS`]) is *short-lived*. After a
//! short-lived fold, the page is left alone until it has rested for a minute. The time doubles with each further
//! short-lived fold in a row:
//!
//! ```text
//!    written or discarded within a minute             not written for 1, 2, 4 minutes
//!   folded --------------------------> left alone -----------------------------------> as any other
//!      |                                 ^      |
//!      | written later                   `------'
//!      v                                 written
//!   as if it had never had a short-lived fold
//! ```
//!
//! A page may have rested for so long that a fold would have lasted a minute ([`Pages::lasting`]). A write after that
//! rest takes one short-lived fold back: the page was only folded too late, or could be folded again.

use crate::params::{MOMENTS, Pages, Params, STEP_SECONDS, WINDOW_SECONDS, YOUNG_WINDOWS};
use crate::turnover::{ByMoment, Folds, QuietInterval, Worth, add, moment};
use page::{Bits, CHUNK_PAGES, HostVirt, PAGE_SHIFT, PageRange, chunks};
use std::collections::BTreeMap;

/// Number of bits that [`Notes::young`] needs for each page: enough for a count up to [`YOUNG_WINDOWS`].
const YOUNG_BITS: usize = (u32::BITS - YOUNG_WINDOWS.leading_zeros()) as usize;
/// Number of steps ([`STEP_SECONDS`]) after which their numbers begin again at 1. The number 0 stands for "never".
const STEPS: u32 = u16::MAX as u32;

/// Bytes that the history takes for each chunk ([`CHUNK_PAGES`] pages) of which it knows anything.
pub const NOTES_BYTES: usize = size_of::<Notes>();

/// The history of a member's pages.
#[derive(Debug)]
pub struct History {
    params: &'static Params,
    chunks: BTreeMap<u64, Box<Notes>>,
    /// Seconds since an arbitrary moment; 0 until [`History::set_time`] is called. At 0, no fold counts as short-lived.
    now: u32,
    /// Whether the member is in a quiet interval that is expected to go on.
    is_quiet: bool,
    /// Second at which the last quiet interval began, by the same clock as `now`.
    last_quiet: u32,
    /// Whether every page may be folded at any time, however many short-lived folds it had.
    is_eager: bool,
    /// Pages that were ever folded, and the short-lived folds among them.
    total: (u64, u64),
    /// Pages folded, and short-lived folds, by moment ([`moment`]), since the last call of [`History::take_folds`].
    lately: Folds,
    /// Pages that were written after they had been at rest, since the last call of [`History::take_written`].
    written: u64,
}

impl History {
    /// A history of which nothing is known.
    pub const fn new(params: &'static Params) -> Self {
        Self {
            params,
            chunks: BTreeMap::new(),
            now: 0,
            is_quiet: false,
            last_quiet: 0,
            is_eager: false,
            total: (0, 0),
            lately: Folds::NONE,
            written: 0,
        }
    }

    /// Sets the time, in seconds from an arbitrary moment on, beginning with 1, and the quiet interval that the member
    /// is in; `None` while it is in a burst.
    pub fn set_time(&mut self, now: u32, quiet: Option<QuietInterval>) {
        (self.now, self.is_quiet) = (now, quiet.is_some_and(|quiet| quiet.goes_on));
        if let Some(quiet) = quiet {
            self.last_quiet = now.saturating_sub(quiet.seconds);
        }
    }

    /// From here on, pages may be folded even if their last folds were short-lived.
    pub const fn be_eager(&mut self) {
        self.is_eager = true;
    }

    /// Pages that were written after they had been at rest, since the last call.
    pub const fn take_written(&mut self) -> u64 {
        std::mem::replace(&mut self.written, 0)
    }

    /// Pages that were folded since the last call, and folds that have turned out to be short-lived since then.
    pub const fn take_folds(&mut self) -> Folds {
        std::mem::replace(&mut self.lately, Folds::NONE)
    }

    /// Pages that were ever folded, and the short-lived folds among them.
    pub const fn folds(&self) -> (u64, u64) {
        self.total
    }

    /// Notes that these pages were folded.
    pub fn folded(&mut self, range: PageRange) {
        let Self { chunks: notes, now, is_quiet, lately, .. } = self;
        for (key, pages) in chunks(range) {
            let notes = notes.entry(key).or_insert_with(Notes::new);
            add(&mut lately.made, notes.folded_at(pages, (*now, *is_quiet)));
        }
        self.total.0 += range.pages;
    }

    /// Notes that folded pages were moved to this range. It does not count as a new fold of them.
    pub fn moved(&mut self, range: PageRange) {
        let (total, lately) = (self.total, self.lately);
        self.folded(range);
        (self.total, self.lately) = (total, lately);
    }

    /// Notes that the folds of these pages of a chunk have ended, because the pages were written or discarded.
    pub fn ended(&mut self, key: u64, pages: Bits) {
        let Some(notes) = self.chunks.get_mut(&key) else { return };
        let short = notes.ended(pages, self.now);
        self.total.1 += short.iter().sum::<u64>();
        add(&mut self.lately.short, short);
    }

    /// Notes that these pages of a chunk were written by now.
    pub fn written(&mut self, key: u64, pages: Bits) {
        let notes = self.chunks.entry(key).or_insert_with(Notes::new);
        self.written += notes.written_at(pages, (self.now, self.last_quiet), &self.params.pages);
    }

    /// Notes that all pages of this range were written by now.
    pub fn all_written(&mut self, range: PageRange) {
        chunks(range).for_each(|(key, pages)| self.written(key, pages));
    }

    /// Notes that some pages in each of these chunks were written, without saying which.
    pub fn touched(&mut self, range: PageRange) {
        chunks(range).for_each(|(key, _)| self.written(key, Bits::default()));
    }

    /// Those of these pages that are not left alone after short-lived folds.
    pub fn not_left_alone(&self, key: u64, pages: Bits) -> Bits {
        match self.chunks.get(&key) {
            Some(notes) if !self.is_eager => notes.without_left_alone(pages, self.now, &self.params.pages),
            _ => pages,
        }
    }

    /// Those of these pages that `worth` allows to be folded. Whether they are left alone after short-lived folds is
    /// not asked.
    pub fn of_worth(&self, key: u64, pages: Bits, worth: Worth) -> Bits {
        if worth == Worth::All {
            return pages;
        }
        let (notes, first) = (self.chunks.get(&key), key * CHUNK_PAGES);
        let seconds = |page| notes.map_or(self.now, |notes| notes.seconds_at_rest(page, self.now));
        pages.filter(|page| worth.allows(first + page, seconds(page)))
    }

    /// Those of these pages of a chunk that may be folded: allowed by `worth`, and not left alone after short-lived
    /// folds.
    pub fn admitted(&self, key: u64, pages: Bits, worth: Worth) -> Bits {
        self.of_worth(key, self.not_left_alone(key, pages), worth)
    }

    /// The pages of a range that may be folded, as [`History::admitted`] tells, as ordered ranges.
    pub fn admitted_of(&self, range: PageRange, worth: Worth) -> Vec<PageRange> {
        let mut found: Vec<PageRange> = Vec::new();
        for (key, pages) in chunks(range) {
            for (page, pages) in self.admitted(key, pages, worth).runs() {
                let start = HostVirt((key * CHUNK_PAGES + page) << PAGE_SHIFT);
                match found.last_mut().filter(|last| last.end() == start) {
                    Some(last) => last.pages += pages,
                    None => found.push(PageRange { start, pages }),
                }
            }
        }
        found
    }

    /// Whether no write was seen for this many seconds in any of the chunks that the range touches.
    pub fn is_at_rest(&self, range: PageRange, seconds: u32) -> bool {
        let is_at_rest = |notes: &Notes| notes.last_written == 0 || self.now >= notes.last_written + seconds;
        chunks(range).all(|(key, _)| self.chunks.get(&key).is_none_or(|notes| is_at_rest(notes)))
    }

    /// Forgets chunks that were last written long ago ([`Pages::forget`]), but for those that are still `of_use`.
    pub fn forget_old(&mut self, of_use: impl Fn(u64) -> bool) {
        let (now, forget) = (self.now, self.params.pages.forget);
        let is_old = |notes: &Notes| notes.last_written == 0 || now >= notes.last_written + forget;
        self.chunks.retain(|key, notes| !is_old(notes) || of_use(*key));
    }

    /// Number of chunks for which there are notes.
    pub fn known_chunks(&self) -> usize {
        self.chunks.len()
    }
}

/// What is noted about the pages of one chunk.
#[derive(Debug)]
struct Notes {
    /// For each page, the number of windows ([`WINDOW_SECONDS`]) in which a write still makes its fold short-lived. The
    /// numbers are in binary: the first element has the lowest bit of each.
    young: [Bits; YOUNG_BITS],
    /// The moment of each page's last fold, in four bits: two pages in a byte.
    moments: [u8; CHUNK_PAGES as usize / 2],
    /// The step in which each page was last seen written; 0 for never.
    written: [u16; CHUNK_PAGES as usize],
    /// The second at which any page was last seen written; 0 for never.
    last_written: u32,
    /// The window up to which `young` has been counted down.
    window: u32,
    /// Short-lived folds of each page in a row, up to three: the lower bit of that number, and the higher.
    short_lived: [Bits; 2],
}

impl Notes {
    fn new() -> Box<Self> {
        let none = Bits::default();
        Box::new(Self {
            young: [none; YOUNG_BITS],
            moments: [0; CHUNK_PAGES as usize / 2],
            written: [0; CHUNK_PAGES as usize],
            last_written: 0,
            window: 0,
            short_lived: [none; 2],
        })
    }

    /// Those of these pages that are not left alone at this second after short-lived folds.
    fn without_left_alone(&self, pages: Bits, now: u32, params: &Pages) -> Bits {
        let [low, high] = self.short_lived;
        let too_soon = low.or(high).and(pages).filter(|page| {
            let times = usize::from(low.has(page)) + 2 * usize::from(high.has(page));
            self.seconds_at_rest(page, now) < params.left_alone[times - 1]
        });
        pages.without(too_soon)
    }

    /// Pages whose fold would be short-lived if they were written at once.
    fn young(&self) -> Bits {
        self.young.into_iter().fold(Bits::default(), Bits::or)
    }

    /// Counts `young` down by the windows that have passed.
    fn count_down(&mut self, now: u32) {
        let window = now / WINDOW_SECONDS;
        for _ in 0..window.saturating_sub(self.window).min(YOUNG_WINDOWS) {
            let mut less = self.young();
            for bit in &mut self.young {
                (*bit, less) = (bit.without(less).or(less.without(*bit)), less.without(*bit));
            }
        }
        self.window = window;
    }

    /// Notes that these pages are written at this second; the last quiet interval began at `last_quiet`. Returns how
    /// many of them had rested, or were never seen written.
    fn written_at(&mut self, pages: Bits, (now, last_quiet): (u32, u32), params: &Pages) -> u64 {
        let [low, high] = self.short_lived;
        let could_last = |page| self.seconds_at_rest(page, now).min(now.saturating_sub(last_quiet)) >= params.lasting;
        let forgiven = low.or(high).and(pages).filter(could_last);
        self.short_lived =
            [low.without(forgiven).or(forgiven.and(high).without(low)), high.without(forgiven.without(low))];
        let mut rested = 0;
        for (first, count) in pages.runs() {
            for written in self.written.iter_mut().skip(first as usize).take(count as usize) {
                rested += u64::from(seconds_since(*written, now).is_none_or(|seconds| seconds >= params.rest));
                *written = step(now);
            }
        }
        self.last_written = now;
        rested
    }

    /// Seconds since a page was last seen written. For a page that never was, seconds since the history's time began.
    fn seconds_at_rest(&self, page: u64, now: u32) -> u32 {
        let written = self.written.get(page as usize).copied().unwrap_or(0);
        seconds_since(written, now).unwrap_or(now)
    }

    /// Notes that these pages were folded at this second, and whether that was in a quiet interval. Returns their
    /// number by moment.
    fn folded_at(&mut self, pages: Bits, (now, is_quiet): (u32, bool)) -> ByMoment {
        self.count_down(now);
        for (n, bit) in self.young.iter_mut().enumerate() {
            *bit = if YOUNG_WINDOWS >> n & 1 == 1 { bit.or(pages) } else { bit.without(pages) };
        }
        let mut made = [0; MOMENTS];
        for page in pages.pages() {
            let moment = moment(is_quiet, seconds_since(self.written[page as usize], now));
            made[moment] += 1;
            let (two, shift) = (&mut self.moments[page as usize / 2], page % 2 * 4);
            *two = *two & !(0xf << shift) | (moment as u8) << shift;
        }
        made
    }

    /// Notes that these pages were written or discarded, which ends their folds. Returns how many of the folds were
    /// short-lived, by the moment at which they were made.
    fn ended(&mut self, pages: Bits, now: u32) -> ByMoment {
        self.count_down(now);
        let short = self.young().and(pages);
        self.young = self.young.map(|bit| bit.without(pages));
        let mut by_moment = [0; MOMENTS];
        if now == 0 {
            return by_moment;
        }
        for page in short.pages() {
            by_moment[usize::from(self.moments[page as usize / 2] >> (page % 2 * 4) & 0xf)] += 1;
        }
        let [low, high] = self.short_lived;
        self.short_lived = [
            low.without(pages).or(short.without(low)).or(short.and(high)),
            high.without(pages).or(short.and(low.or(high))),
        ];
        by_moment
    }
}

/// The number of the step ([`STEP_SECONDS`]) in which this second lies.
const fn step(now: u32) -> u16 {
    (now / STEP_SECONDS % STEPS + 1) as u16
}

/// Seconds since the step in which a page was last written; `None` if the page was never seen written.
const fn seconds_since(written: u16, now: u32) -> Option<u32> {
    match written {
        0 => None,
        _ => Some((step(now) as u32 + STEPS - written as u32) % STEPS * STEP_SECONDS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fold_is_short_lived_if_written_within_a_minute() {
        let short = |(from, to)| {
            let (mut notes, page) = (Notes::new(), Bits::span(3, 1));
            notes.folded_at(page, (from, true));
            notes.ended(Bits::span(0, 9), to).iter().sum::<u64>()
        };
        assert_eq!([(100, 100), (104, 163), (100, 164)].map(short), [1; 3]);
        assert_eq!([(104, 165), (100, 165), (100, 100_000)].map(short), [0; 3]);
    }

    #[test]
    fn page_that_was_moved_is_no_new_fold() {
        let mut history = History::new(&crate::TODAY);
        let range = PageRange { start: HostVirt(0), pages: 700 };
        history.set_time(5, None);
        history.folded(range);
        history.moved(PageRange { start: HostVirt(1 << 30), ..range });
        assert_eq!((history.folds(), history.take_folds().made.iter().sum::<u64>()), ((700, 0), 700));
        history.ended((1 << 18) / CHUNK_PAGES, Bits::span(0, 2));
        assert_eq!(history.folds(), (700, 2), "it is as young there as any");
    }
}
