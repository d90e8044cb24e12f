//! What an agent says of itself.

use crate::codec::{Malformed, Reader, Result, Writer};
use crate::message::Outcome;

/// Buckets of [`Stalls`]: the last one is open.
pub const STALL_BUCKETS: usize = 24;
/// No text in a frame is longer.
const DETAIL_BYTES: usize = 256;

/// How long the member's pages were out of its reach, by powers of two: bucket `n` counts the times of less than
/// 2^n microseconds that bucket `n - 1` does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stalls {
    /// How many there were of each length.
    pub buckets: [u64; STALL_BUCKETS],
    /// The longest.
    pub longest_us: u64,
}

impl Stalls {
    /// Counts one.
    pub fn add(&mut self, us: u64) {
        let bucket = (u64::BITS - us.leading_zeros()) as usize;
        self.buckets[bucket.min(STALL_BUCKETS - 1)] += 1;
        self.longest_us = self.longest_us.max(us);
    }
}

/// Pages that were to be folded and were not, by what became of them; indexed by [`Outcome`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Failures([u64; Outcome::ALL.len()]);

impl Failures {
    /// Counts pages.
    pub fn add(&mut self, outcome: Outcome, pages: u64) {
        let count = &mut self.0[outcome as usize];
        *count = count.saturating_add(pages);
    }

    /// How many came to that.
    pub const fn of(&self, outcome: Outcome) -> u64 {
        self.0[outcome as usize]
    }
}

/// Whether a member folds, and if not, why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum MemberState {
    /// It has no memory that was asked to be folded, yet.
    #[default]
    NothingEnrolled = 0,
    /// It folds.
    Folding = 1,
    /// It was told not to.
    Off = 2,
    /// It has made everything private again, as it was told.
    Unfolded = 3,
    /// The kernel has no `UFFDIO_MOVE`, or not for this process.
    NoMove = 4,
    /// Something may write its memory that does not pin what it writes; the detail says what.
    Unpinned = 5,
    /// A migration or a snapshot needs the userfaultfd of its memory.
    Yielded = 6,
    /// It has as many mappings as it may spend on folding.
    NoVma = 7,
    /// The agent ran into a bug of its own and keeps still; the detail says which.
    Broken = 8,
    /// The program changed mappings by system calls that the agent does not see; the detail says how.
    LostTrack = 9,
}

impl MemberState {
    const ALL: [Self; 10] = [
        Self::NothingEnrolled,
        Self::Folding,
        Self::Off,
        Self::Unfolded,
        Self::NoMove,
        Self::Unpinned,
        Self::Yielded,
        Self::NoVma,
        Self::Broken,
        Self::LostTrack,
    ];

    /// As it is called in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NothingEnrolled => "nothing_enrolled",
            Self::Folding => "folding",
            Self::Off => "off",
            Self::Unfolded => "unfolded",
            Self::NoMove => "no_move",
            Self::Unpinned => "unpinned",
            Self::Yielded => "yielded",
            Self::NoVma => "no_vma",
            Self::Broken => "broken",
            Self::LostTrack => "lost_track",
        }
    }
}

/// Counters and state of a member. Counters only grow, except where they say "now".
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberStats {
    /// Whether it folds, and if not, why.
    pub state: MemberState,
    /// More of that, for people.
    pub detail: String,
    /// Pages that may be folded, now: resident or not.
    pub enrolled_pages: u64,
    /// Pages that map a slot, now.
    pub folded_pages: u64,
    /// Pages of zeros given back and not written since, now.
    pub zero_pages: u64,
    /// Pages in mappings of the pool that were written since now.
    pub broken_pages: u64,
    /// Pages folded.
    pub folds: u64,
    /// Of those, pages that had been broken in a mapping of the pool.
    pub refolds: u64,
    /// Of those, pages that were written again within a minute or so.
    pub short_folds: u64,
    /// Pages looked at for writes.
    pub pages_scanned: u64,
    /// Pages fingerprinted.
    pub pages_hashed: u64,
    /// Processor time of the agent's thread.
    pub agent_cpu_us: u64,
    /// Mappings of the member, now, as last counted.
    pub vmas: u64,
    /// Bytes that the agent itself uses, now.
    pub agent_bytes: u64,
    /// Pages that were to be folded and were not.
    pub failures: Failures,
    /// How long pages were out of reach.
    pub stalls: Stalls,
}

impl MemberStats {
    fn counters(&mut self) -> [&mut u64; 12] {
        [
            &mut self.enrolled_pages,
            &mut self.folded_pages,
            &mut self.zero_pages,
            &mut self.broken_pages,
            &mut self.folds,
            &mut self.refolds,
            &mut self.short_folds,
            &mut self.pages_scanned,
            &mut self.pages_hashed,
            &mut self.agent_cpu_us,
            &mut self.vmas,
            &mut self.agent_bytes,
        ]
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self> {
        let number = usize::from(r.u8()?);
        let state = MemberState::ALL.get(number).copied().ok_or(Malformed::OutOfRange("state"))?;
        let mut stats = Self { state, detail: r.text("detail", DETAIL_BYTES)?, ..Self::default() };
        for counter in stats.counters() {
            *counter = r.u64()?;
        }
        for count in &mut stats.failures.0 {
            *count = r.u64()?;
        }
        for count in &mut stats.stalls.buckets {
            *count = r.u64()?;
        }
        stats.stalls.longest_us = r.u64()?;
        Ok(stats)
    }

    pub(crate) fn encode(&self, w: &mut Writer<'_>) {
        w.u8(self.state as u8);
        w.text(&self.detail, DETAIL_BYTES);
        for counter in self.clone().counters() {
            w.u64(*counter);
        }
        self.failures.0.iter().chain(&self.stalls.buckets).for_each(|count| w.u64(*count));
        w.u64(self.stalls.longest_us);
    }
}
