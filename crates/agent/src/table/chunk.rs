//! The table's knowledge of single pages, kept by chunks.
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
//! A page may have rested for so long that a fold would have lasted a minute ([`LASTING_SECONDS`]). A write after that
//! rest takes one short-lived fold back: the page was only folded too late, or could be folded again.

use super::bits::{Bits, CHUNK_PAGES};
use crate::turnover::{ByMoment, LIFE, MOMENTS, REST, Worth, moment};
use page::PoolSlot;

/// Resolution of the time of a fold, in seconds.
const WINDOW_SECONDS: u32 = 5;
/// Windows in which a write makes a fold short-lived: the fold's own, and those of the next minute; that ends after 60
/// to 65 s.
const YOUNG_WINDOWS: u32 = LIFE.as_secs() as u32 / WINDOW_SECONDS + 1;
/// Bits of a number of windows.
const YOUNG_BITS: usize = (u32::BITS - YOUNG_WINDOWS.leading_zeros()) as usize;
/// Resolution of the time of a write, in seconds. Times are kept modulo a day and a half. So once in a while, a page that was
/// not written for so long passes for one that has just been.
const STEP_SECONDS: u32 = 2;
/// Number of steps that are told apart; 0 stands for never.
const STEPS: u32 = u16::MAX as u32;
/// Time after which it is of no interest when a page was written, in seconds.
const FORGET_SECONDS: u32 = 1024;
/// Rest that a page needs after one short-lived fold, after two in a row, and after more, in seconds.
const LEFT_ALONE_SECONDS: [u32; 3] = [60, 120, 240];
/// Rest of a page, within a quiet interval of the same length, after which it could have been folded for a minute, in
/// seconds.
const LASTING_SECONDS: u32 = LIFE.as_secs() as u32 + 8;

/// The pages of a chunk. Bits of pages that were never enrolled are never set.
#[derive(Debug)]
pub struct Chunk {
    /// Pages that were written when they were last scanned.
    pub pending: Bits,
    /// Pages that were written according to the scan that is being taken in; clear between scans.
    pub fresh: Bits,
    /// Pages that were folded as zeros, and were not seen written since.
    pub zeroed: Bits,
    /// Private pages inside a mapping of the pool.
    pub broken: Bits,
    /// Pages that map `slots`.
    pub mapped: Bits,
    /// Pages at home (see [`AtHome`]); `None` if the chunk has none.
    at_home: Option<Box<AtHome>>,
    slots: [u32; CHUNK_PAGES as usize],
    /// Number of windows for which a write still makes a page's fold short-lived, in binary: the lowest bits first.
    young: [Bits; YOUNG_BITS],
    /// The moment of each page's last fold, in four bits.
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

/// Pages with homes. Few members have any.
#[derive(Clone, Copy, Debug, Default)]
pub struct AtHome {
    /// Pages over which a mapping of other slots was placed.
    pub placed: Bits,
    /// Pages that the worker counts as being away from their homes.
    pub told_away: Bits,
}

impl Chunk {
    /// See [`AtHome::placed`].
    pub fn placed(&self) -> Bits {
        self.at_home.as_ref().map_or(Bits::default(), |at_home| at_home.placed)
    }

    /// See [`AtHome::told_away`].
    pub fn told_away(&self) -> Bits {
        self.at_home.as_ref().map_or(Bits::default(), |at_home| at_home.told_away)
    }

    /// Changes what is known of pages with homes.
    pub fn change_at_home(&mut self, change: impl FnOnce(&mut AtHome)) {
        let mut at_home = self.at_home.as_deref().copied().unwrap_or_default();
        change(&mut at_home);
        if at_home.placed.or(at_home.told_away).is_empty() {
            self.at_home = None;
        } else {
            **self.at_home.get_or_insert_default() = at_home;
        }
    }

    pub fn new() -> Box<Self> {
        let none = Bits::default();
        Box::new(Self {
            pending: none,
            fresh: none,
            zeroed: none,
            broken: none,
            mapped: none,
            at_home: None,
            slots: [0; CHUNK_PAGES as usize],
            young: [none; YOUNG_BITS],
            moments: [0; CHUNK_PAGES as usize / 2],
            written: [0; CHUNK_PAGES as usize],
            last_written: 0,
            window: 0,
            short_lived: [none; 2],
        })
    }

    /// The pages among these that are not to be left alone at this second.
    pub fn without_left_alone(&self, pages: Bits, now: u32) -> Bits {
        let [low, high] = self.short_lived;
        let too_soon = low.or(high).and(pages).filter(|page| {
            let times = usize::from(low.has(page)) + 2 * usize::from(high.has(page));
            self.seconds_at_rest(page, now) < LEFT_ALONE_SECONDS[times - 1]
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
    pub fn written_at(&mut self, pages: Bits, (now, last_quiet): (u32, u32)) -> u64 {
        let [low, high] = self.short_lived;
        let could_last = |page| self.seconds_at_rest(page, now).min(now.saturating_sub(last_quiet)) >= LASTING_SECONDS;
        let forgiven = low.or(high).and(pages).filter(could_last);
        self.short_lived =
            [low.without(forgiven).or(forgiven.and(high).without(low)), high.without(forgiven.without(low))];
        let mut rested = 0;
        for (first, count) in pages.runs() {
            for written in self.written.iter_mut().skip(first as usize).take(count as usize) {
                rested += u64::from(seconds_since(*written, now).is_none_or(|seconds| seconds >= REST));
                *written = step(now);
            }
        }
        self.last_written = now;
        rested
    }

    /// Seconds since a page was seen written. For a page that never was, seconds since the table's time began.
    fn seconds_at_rest(&self, page: u64, now: u32) -> u32 {
        let written = self.written.get(page as usize).copied().unwrap_or(0);
        seconds_since(written, now).unwrap_or(now)
    }

    /// The pages among these that are worth folding; `first` is the number of the chunk's first page.
    pub fn worth_folding(&self, pages: Bits, now: u32, (first, worth): (u64, Worth)) -> Bits {
        if worth == Worth::All {
            return pages;
        }
        pages.filter(|page| worth.allows(first + page, self.seconds_at_rest(page, now)))
    }

    /// Whether no page of the chunk was seen written for this many seconds.
    pub const fn is_at_rest(&self, now: u32, seconds: u32) -> bool {
        self.last_written == 0 || now >= self.last_written + seconds
    }

    /// Notes that these pages were folded at this second, and whether that was in a quiet interval. Returns their
    /// number by moment.
    pub fn folded_at(&mut self, pages: Bits, (now, is_quiet): (u32, bool)) -> ByMoment {
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

    /// Notes that these pages were written or discarded, which ends their folds. Returns how many of the folds were short-lived, by
    /// the moment at which they were made.
    pub fn ended(&mut self, pages: Bits, now: u32) -> ByMoment {
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

    /// Whether nothing is known at this second, neither of any page nor of the chunk as a whole.
    pub fn is_empty(&self, now: u32) -> bool {
        self.pending.or(self.fresh).or(self.zeroed).or(self.broken).or(self.mapped).is_empty()
            && self.placed().or(self.told_away()).is_empty()
            && (self.last_written == 0 || now >= self.last_written + FORGET_SECONDS)
    }

    /// Pages that lie in mappings of the pool, private or not.
    pub fn pooled(&self) -> Bits {
        self.mapped.or(self.broken)
    }

    /// The slot that `page` maps.
    pub fn slot(&self, page: u64) -> Option<PoolSlot> {
        let bits = *self.slots.get(page as usize)?;
        self.mapped.has(page).then_some(PoolSlot::from_bits(bits))
    }

    /// Notes that the pages from `first` on map the slots from `slot` on.
    pub fn map(&mut self, first: u64, count: u64, slot: PoolSlot) {
        let pages = Bits::span(first, count);
        self.mapped = self.mapped.or(pages);
        for (next, place) in self.slots.iter_mut().skip(first as usize).take(count as usize).enumerate() {
            *place = slot.bits().wrapping_add(next as u32);
        }
    }

    /// Runs of consecutive pages in `within` that map consecutive slots: first page, count, slot.
    pub fn slot_runs(&self, within: Bits) -> impl Iterator<Item = (u64, u64, PoolSlot)> {
        self.mapped.and(within).runs().flat_map(|(first, count)| self.cut(first, count))
    }

    /// Cuts a run of mapped pages where the slots are not consecutive.
    fn cut(&self, first: u64, count: u64) -> impl Iterator<Item = (u64, u64, PoolSlot)> {
        let mut at = first;
        let end = first + count;
        std::iter::from_fn(move || {
            let start = self.slot(at).filter(|_| at < end)?;
            let first = at;
            at += 1;
            while at < end && self.slot(at) == start.add((at - first) as u32) {
                at += 1;
            }
            Some((first, at - first, start))
        })
    }
}

/// The step in which a second lies.
const fn step(now: u32) -> u16 {
    (now / STEP_SECONDS % STEPS + 1) as u16
}

/// Seconds since a step; `None` for never.
const fn seconds_since(written: u16, now: u32) -> Option<u32> {
    match written {
        0 => None,
        _ => Some((step(now) as u32 + STEPS - written as u32) % STEPS * STEP_SECONDS),
    }
}
