//! What is known of the single pages of a chunk.
//!
//! A fold that is undone within a minute ([`WINDOW`], [`YOUNG`]) was for nothing. Where many pages of a chunk were folded for nothing, the chunk
//! is left alone for a while, twice as long each time:
//!
//! ```text
//!            many short lives                          as many again
//!   folded -------------------> left alone, 4 s .. 128 s -----------> left alone for twice as long
//!      ^                              |
//!      `------------------------------'  the time is over; after LONG_PEACE it counts as never having been so
//! ```

use super::bits::{Bits, CHUNK_PAGES};
use crate::turnover::{ByMoment, MOMENTS, REST, Worth, moment};
use page::PoolSlot;

/// When pages were folded is known by windows of so many seconds.
const WINDOW: u32 = 15;
/// A page that is written in the window in which it was folded, or one of the next four, need not have been folded: that is
/// sooner than after 60 to 75 s.
const YOUNG: usize = 5;
/// When pages were written is known in steps of so many seconds, modulo three days: once in a while one that was not written for
/// so long passes for one that has just been.
const STEP: u32 = 4;
/// Steps that are told apart; 0 is never.
const STEPS: u32 = u16::MAX as u32;
/// When a page was written is of no interest any more after so many seconds.
const LONG_AGO: u32 = 1024;
/// So many pages of a chunk at a time, and half of what was folded there lately, are a sign that it is worked in.
const MANY: u64 = 8;
/// How long a chunk is left alone for the first time, in seconds, and how often that is doubled at most.
const LEFT_ALONE: (u32, u32) = (4, 5);
/// A chunk that gave no reason to be left alone for so many seconds begins anew.
const LONG_PEACE: u32 = 300;

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
    /// Folded in this window, and in the ones before.
    young: [Bits; YOUNG],
    /// The moment when each was folded last, in four bits.
    moments: [u8; CHUNK_PAGES as usize / 2],
    /// When each was seen written last.
    written: [u16; CHUNK_PAGES as usize],
    /// The last time that one was.
    last_written: u32,
    window: u32,
    /// The chunk is left alone until then, in seconds.
    alone_until: u32,
    doubled: u32,
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
            young: [none; YOUNG],
            moments: [0; CHUNK_PAGES as usize / 2],
            written: [0; CHUNK_PAGES as usize],
            last_written: 0,
            window: 0,
            alone_until: 0,
            doubled: 0,
        })
    }

    /// Whether its pages are to be left as they are at this second.
    pub const fn is_left_alone(&self, now: u32) -> bool {
        now < self.alone_until
    }

    /// Forgets of which pages it is long ago that they were folded.
    fn go_on(&mut self, now: u32) {
        let window = now / WINDOW;
        for _ in 0..window.saturating_sub(self.window).min(YOUNG as u32) {
            self.young.rotate_right(1);
            self.young[0] = Bits::default();
        }
        self.window = window;
    }

    /// Notes that these pages are written at this second. Says how many could have been folded before, or were never seen written.
    pub fn written_at(&mut self, pages: Bits, now: u32) -> u64 {
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
        let may = |page: &u64| worth.allows(first + page, self.seconds_at_rest(*page, now));
        let pages = pages.runs().flat_map(|(first, count)| (first..first + count).filter(may));
        pages.fold(Bits::default(), |bits, page| bits.or(Bits::span(page, 1)))
    }

    /// Whether none of its pages was seen written for so many seconds.
    pub const fn is_at_rest(&self, now: u32, seconds: u32) -> bool {
        self.last_written == 0 || now >= self.last_written + seconds
    }

    /// Notes that these pages were folded at this second, after so long a calm. Says of which moments that is.
    pub fn folded_at(&mut self, pages: Bits, (now, calm): (u32, Option<u32>)) -> ByMoment {
        self.go_on(now);
        self.young[0] = self.young[0].or(pages);
        let mut made = [0; MOMENTS];
        for page in pages.runs().flat_map(|(first, count)| first..first + count) {
            let moment = moment(calm, seconds_since(self.written[page as usize], now));
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
        let young = self.young.iter().fold(Bits::default(), |all, young| all.or(*young)).count();
        let mut short = Bits::default();
        for young in &mut self.young {
            short = short.or(young.and(pages));
            *young = young.without(pages);
        }
        let mut by_moment = [0; MOMENTS];
        if now == 0 {
            return by_moment;
        }
        for page in short.runs().flat_map(|(first, count)| first..first + count) {
            by_moment[usize::from(self.moments[page as usize / 2] >> (page % 2 * 4) & 0xf)] += 1;
        }
        if short.count() >= MANY.max(young / 2) {
            let (shortest, most) = LEFT_ALONE;
            let again = self.alone_until > 0 && now < self.alone_until + LONG_PEACE;
            self.doubled = if again { (self.doubled + 1).min(most) } else { 0 };
            self.alone_until = now + (shortest << self.doubled);
        }
        by_moment
    }

    /// Whether nothing is known of any page, nor of the chunk as a whole, at this second.
    pub fn is_empty(&self, now: u32) -> bool {
        self.pending.or(self.fresh).or(self.zeroed).or(self.broken).or(self.mapped).is_empty()
            && (self.alone_until == 0 || now >= self.alone_until + LONG_PEACE)
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
