//! The counters and the state that an agent reports.

use crate::codec::{Malformed, Reader, Result, Writer};
use crate::message::Outcome;

/// Number of buckets of [`Stalls`]. The last one also counts all longer times.
pub const STALL_BUCKETS: usize = 24;
/// Longest [`MemberStats::detail`], in bytes; a longer text is cut.
const DETAIL_BYTES: usize = 256;
/// All numbers in a member's statistics must be less than this: 2^52. No real member has so many pages, mappings or
/// microseconds, and the sum over all members of a group fits into 64 bits.
const BOUND: u64 = 1 << 52;

/// Times for which accesses of the program had to wait because the agent was folding pages, or splitting or collapsing
/// huge pages. They are counted by powers of two. Bucket `n` counts times of at least 2^(n-1) and less than 2^n
/// microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stalls {
    /// Number of stalls of each length.
    pub buckets: [u64; STALL_BUCKETS],
    /// The longest stall.
    pub longest_us: u64,
}

impl Stalls {
    /// Counts a stall.
    pub fn add(&mut self, us: u64) {
        let bucket = u64::BITS.saturating_sub(us.leading_zeros()) as usize;
        let bucket = &mut self.buckets[bucket.min(STALL_BUCKETS - 1)];
        *bucket = bucket.saturating_add(1);
        self.longest_us = self.longest_us.max(us);
    }
}

/// Numbers of pages that were to be folded and were not, by [`Outcome`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Failures([u64; Outcome::ALL.len()]);

impl Failures {
    /// Counts pages with this outcome.
    pub fn add(&mut self, outcome: Outcome, pages: u64) {
        let count = &mut self.0[outcome as usize];
        *count = count.saturating_add(pages);
    }

    /// Number of pages with this outcome.
    pub const fn of(&self, outcome: Outcome) -> u64 {
        self.0[outcome as usize]
    }
}

/// Counters of a member's work; they only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Pages folded.
    pub folds: u64,
    /// Pages that were folded again in place: they lay in a mapping of the pool, and had been written since they were
    /// folded.
    pub refolds: u64,
    /// Folded pages that were written again within about a minute.
    pub short_folds: u64,
    /// Pages that were checked for writes.
    pub pages_scanned: u64,
    /// Pages fingerprinted.
    pub pages_hashed: u64,
    /// Processor time of the agent's threads.
    pub agent_cpu_us: u64,
    /// Pages that were to be folded and were not.
    pub failures: Failures,
}

impl Counters {
    /// Adds another member's counters. Members choose these numbers, so a sum that would overflow stays at the greatest
    /// number.
    pub fn add(&mut self, other: &Self) {
        let mut other = *other;
        for (sum, counter) in self.plain().into_iter().zip(other.plain()) {
            *sum = sum.saturating_add(*counter);
        }
        Outcome::ALL.into_iter().for_each(|outcome| self.failures.add(outcome, other.failures.of(outcome)));
    }

    const fn plain(&mut self) -> [&mut u64; 6] {
        [
            &mut self.folds,
            &mut self.refolds,
            &mut self.short_folds,
            &mut self.pages_scanned,
            &mut self.pages_hashed,
            &mut self.agent_cpu_us,
        ]
    }
}

/// Whether a member folds, and if not, why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum MemberState {
    /// The program has enrolled no memory.
    #[default]
    NothingEnrolled = 0,
    /// The member folds.
    Folding = 1,
    /// The member was told not to fold.
    Off = 2,
    /// The member was told to make everything private, and has done so.
    Unfolded = 3,
    /// The kernel has no `UFFDIO_MOVE`, or does not permit it to this process.
    NoMove = 4,
    /// A file is open through which a driver may write to the member's memory without pinning the pages (`FOLL_PIN`);
    /// the detail names it.
    Unpinned = 5,
    /// The program uses a userfaultfd of its own on the memory, for a migration or a snapshot.
    Yielded = 6,
    /// The member has so many mappings (VMAs) that folding may add no more.
    NoVma = 7,
    // The number 8 is not in use.
    /// The program changed mappings by system calls that the agent does not see; the detail says how.
    LostTrack = 9,
    /// None of the enrolled memory can be folded; the detail says why.
    NotFoldable = 10,
    /// All of the program's memory was to be enrolled, and it has none that can be; the detail says why.
    NothingMapped = 11,
}

impl MemberState {
    /// All states, by their numbers.
    pub const ALL: [Self; 11] = [
        Self::NothingEnrolled,
        Self::Folding,
        Self::Off,
        Self::Unfolded,
        Self::NoMove,
        Self::Unpinned,
        Self::Yielded,
        Self::NoVma,
        Self::LostTrack,
        Self::NotFoldable,
        Self::NothingMapped,
    ];

    /// Its name in JSON.
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
            Self::LostTrack => "lost_track",
            Self::NotFoldable => "not_foldable",
            Self::NothingMapped => "nothing_mapped",
        }
    }
}

/// Counters and state of a member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberStats {
    /// Whether it folds, and if not, why.
    pub state: MemberState,
    /// Details of the state, for people.
    pub detail: String,
    /// Number of pages at the moment that may be folded, resident or not.
    pub enrolled_pages: u64,
    /// Number of pages that map a slot at the moment.
    pub folded_pages: u64,
    /// Number of pages of zeros that were discarded and have not been written since.
    pub zero_pages: u64,
    /// Number of pages in mappings of the pool that were written since they were folded, and so are private.
    pub broken_pages: u64,
    /// Number of mappings (VMAs) of the member's process when they were last counted.
    pub vmas: u64,
    /// Bytes of memory that the agent itself uses at the moment.
    pub agent_bytes: u64,
    /// Counters of its work.
    pub done: Counters,
    /// Times for which accesses of the program had to wait for the agent.
    pub stalls: Stalls,
}

impl MemberStats {
    fn numbers(&mut self) -> impl Iterator<Item = &mut u64> {
        let now = [&mut self.enrolled_pages, &mut self.folded_pages, &mut self.zero_pages, &mut self.broken_pages];
        now.into_iter().chain(self.done.plain()).chain([&mut self.vmas, &mut self.agent_bytes])
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self> {
        let number = r.u8()?;
        let known = MemberState::ALL.into_iter().find(|state| *state as u8 == number);
        let state = known.ok_or(Malformed::OutOfRange("state"))?;
        let mut stats = Self { state, detail: r.text("detail", DETAIL_BYTES)?, ..Self::default() };
        let mut number = || r.u64().and_then(|n| if n < BOUND { Ok(n) } else { Err(Malformed::OutOfRange("number")) });
        for n in stats.numbers() {
            *n = number()?;
        }
        for count in stats.done.failures.0.iter_mut().chain(&mut stats.stalls.buckets) {
            *count = number()?;
        }
        stats.stalls.longest_us = number()?;
        Ok(stats)
    }

    pub(crate) fn encode(&self, w: &mut Writer<'_>) {
        w.u8(self.state as u8);
        w.text(&self.detail, DETAIL_BYTES);
        for number in self.clone().numbers() {
            w.u64(*number);
        }
        self.done.failures.0.iter().chain(&self.stalls.buckets).for_each(|count| w.u64(*count));
        w.u64(self.stalls.longest_us);
    }
}
