//! What is known of the single pages of a chunk.
//!
//! A fold that is undone within a minute or so ([`WINDOW`], [`YOUNG`]) was for nothing. A page that was folded for nothing is left alone until
//! it has rested for a minute, and for twice as long each time that happens again:
//!
//! ```text
//!            written within a minute                  not written for 1, 2, 4 minutes
//!   folded --------------------------> left alone -----------------------------------> as any other
//!      |                                 ^      |
//!      | written later                   `------'
//!      v                                 written
//!   as if it had never been for nothing
//! ```
//!
//! A page that is written after it could have been folded for a minute ([`LASTS`]) was only folded too late, or could be folded again:
//! that takes one of those times back.

use super::bits::{Bits, CHUNK_PAGES};
use crate::turnover::{ByMoment, LIFE, MOMENTS, REST, Worth, moment};
use page::PoolSlot;

/// When pages were folded is known by windows of so many seconds.
const WINDOW: u32 = 5;
/// A page that is written in the window in which it was folded, or one of those of the next minute, need not have been folded:
/// that is sooner than after 60 to 65 s.
const YOUNG: u32 = LIFE.as_secs() as u32 / WINDOW + 1;
const YOUNG_BITS: usize = (u32::BITS - YOUNG.leading_zeros()) as usize;
/// When pages were written is known in steps of so many seconds, modulo three days: once in a while one that was not written for
/// so long passes for one that has just been.
const STEP: u32 = 4;
/// Steps that are told apart; 0 is never.
const STEPS: u32 = u16::MAX as u32;
/// When a page was written is of no interest any more after so many seconds.
const LONG_AGO: u32 = 1024;
/// For how many seconds a page must rest that was folded for nothing once; twice in a row; more often.
const LEFT_ALONE: [u32; 3] = [60, 120, 240];
/// A page that rests for so many seconds, of which it has been calm for so many, could be folded for a minute.
const LASTS: u32 = LIFE.as_secs() as u32 + 8;

/// The pages of a chunk. Bits of pages that were never asked in are never set.
#[derive(Debug)]
pub struct Chunk {
    /// Written when they were last looked at.
    pub pending: Bits,
    /// Written according to the look that is being taken in; clear between looks.
    pub fresh: Bits,
    /// Folded as zeros, and not seen written since.
    pub zeroed: Bits,
    /// Private pages inside a mapping of the pool.
    pub broken: Bits,
    /// They map `slots`.
    pub mapped: Bits,
    slots: [u32; CHUNK_PAGES as usize],
    /// For how many windows more each need not have been folded if it is written: the lowest bit of that number first.
    young: [Bits; YOUNG_BITS],
    /// The moment when each was folded last, in four bits.
    moments: [u8; CHUNK_PAGES as usize / 2],
    /// When each was seen written last.
    written: [u16; CHUNK_PAGES as usize],
    /// The last time that one was.
    last_written: u32,
    window: u32,
    /// How often in a row each was folded for nothing, up to three times: the lower bit of that number, and the higher.
    in_vain: [Bits; 2],
}

impl Chunk {
    pub fn new() -> Box<Self> {
        let none = Bits::default();
        Box::new(Self {
            pending: none,
            fresh: none,
            zeroed: none,
            broken: none,
            mapped: none,
            slots: [0; CHUNK_PAGES as usize],
            young: [none; YOUNG_BITS],
            moments: [0; CHUNK_PAGES as usize / 2],
            written: [0; CHUNK_PAGES as usize],
            last_written: 0,
            window: 0,
            in_vain: [none; 2],
        })
    }

    /// Those of these pages that are not to be left alone at this second.
    pub fn without_left_alone(&self, pages: Bits, now: u32) -> Bits {
        let [low, high] = self.in_vain;
        let too_soon = low.or(high).and(pages).filter(|page| {
            let times = usize::from(low.has(page)) + 2 * usize::from(high.has(page));
            self.seconds_at_rest(page, now) < LEFT_ALONE[times - 1]
        });
        pages.without(too_soon)
    }

    /// Those that need not have been folded if they are written now.
    fn young(&self) -> Bits {
        self.young.into_iter().fold(Bits::default(), Bits::or)
    }

    /// Forgets of which pages it is long ago that they were folded.
    fn go_on(&mut self, now: u32) {
        let window = now / WINDOW;
        for _ in 0..window.saturating_sub(self.window).min(YOUNG) {
            let mut less = self.young();
            for bit in &mut self.young {
                (*bit, less) = (bit.without(less).or(less.without(*bit)), less.without(*bit));
            }
        }
        self.window = window;
    }

    /// Notes that these pages are written at this second, the last calm having begun at that one. Says how many could have been folded
    /// before, or were never seen written.
    pub fn written_at(&mut self, pages: Bits, (now, last_calm): (u32, u32)) -> u64 {
        let [low, high] = self.in_vain;
        let could_last = |page| self.seconds_at_rest(page, now).min(now.saturating_sub(last_calm)) >= LASTS;
        let forgiven = low.or(high).and(pages).filter(could_last);
        self.in_vain = [low.without(forgiven).or(forgiven.and(high).without(low)), high.without(forgiven.without(low))];
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

    /// Seconds since a page was seen written, or since there is anything to be seen.
    fn seconds_at_rest(&self, page: u64, now: u32) -> u32 {
        let written = self.written.get(page as usize).copied().unwrap_or(0);
        seconds_since(written, now).unwrap_or(now)
    }

    /// Those of these pages that are worth folding; the chunk's first page has this number.
    pub fn worth_folding(&self, pages: Bits, now: u32, (first, worth): (u64, Worth)) -> Bits {
        if worth == Worth::All {
            return pages;
        }
        pages.filter(|page| worth.allows(first + page, self.seconds_at_rest(page, now)))
    }

    /// Whether none of its pages was seen written for so many seconds.
    pub const fn is_at_rest(&self, now: u32, seconds: u32) -> bool {
        self.last_written == 0 || now >= self.last_written + seconds
    }

    /// Notes that these pages were folded at this second, in a calm or not. Says of which moments that is.
    pub fn folded_at(&mut self, pages: Bits, (now, is_calm): (u32, bool)) -> ByMoment {
        self.go_on(now);
        for (n, bit) in self.young.iter_mut().enumerate() {
            *bit = if YOUNG >> n & 1 == 1 { bit.or(pages) } else { bit.without(pages) };
        }
        let mut made = [0; MOMENTS];
        for page in pages.pages() {
            let moment = moment(is_calm, seconds_since(self.written[page as usize], now));
            made[moment] += 1;
            let (two, shift) = (&mut self.moments[page as usize / 2], page % 2 * 4);
            *two = *two & !(0xf << shift) | (moment as u8) << shift;
        }
        made
    }

    /// These pages are folded no longer, because they were written. Says how many of them were folded for nothing, by the
    /// moment of that.
    pub fn ended(&mut self, pages: Bits, now: u32) -> ByMoment {
        self.go_on(now);
        let short = self.young().and(pages);
        self.young = self.young.map(|bit| bit.without(pages));
        let mut by_moment = [0; MOMENTS];
        if now == 0 {
            return by_moment;
        }
        for page in short.pages() {
            by_moment[usize::from(self.moments[page as usize / 2] >> (page % 2 * 4) & 0xf)] += 1;
        }
        let [low, high] = self.in_vain;
        self.in_vain = [
            low.without(pages).or(short.without(low)).or(short.and(high)),
            high.without(pages).or(short.and(low.or(high))),
        ];
        by_moment
    }

    /// Whether nothing is known of any page, nor of the chunk as a whole, at this second.
    pub fn is_empty(&self, now: u32) -> bool {
        self.pending.or(self.fresh).or(self.zeroed).or(self.broken).or(self.mapped).is_empty()
            && (self.last_written == 0 || now >= self.last_written + LONG_AGO)
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

/// A second, as steps count.
const fn step(now: u32) -> u16 {
    (now / STEP % STEPS + 1) as u16
}

/// Seconds since a step; `None`: since never.
const fn seconds_since(written: u16, now: u32) -> Option<u32> {
    match written {
        0 => None,
        _ => Some((step(now) as u32 + STEPS - written as u32) % STEPS * STEP),
    }
}
