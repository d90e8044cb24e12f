//! Every number of the policy. [`TODAY`] holds those that the agent uses.

use std::time::Duration;

/// Time that a page must stay unwritten after it was folded, else the fold is short-lived: 60 s.
pub const LIFE: Duration = Duration::from_secs(60);
/// [`LIFE`] in seconds.
pub(crate) const LIFE_SECONDS: u32 = LIFE.as_secs() as u32;

/// Lower bounds of the ages by which folds are counted, in seconds.
pub(crate) const AGES: [u32; 10] = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
/// Number of moments of folds: moment 0, from which nothing is learned, and one for each of the ages
/// (see [`moment`](crate::moment)).
pub const MOMENTS: usize = 1 + AGES.len();
const _: () = assert!(MOMENTS <= 16, "the moment of a page's last fold takes four bits");
/// Number of past quiet intervals whose lengths are remembered.
pub(crate) const REMEMBERED: usize = 8;
/// Number of parts of time ([`Judged::part`]) for which recent folds are kept apart, 80 s in all. After so long, it is
/// known whether a fold was short-lived.
pub(crate) const PARTS: usize = 8;

/// Length of the windows by which the time since a fold is counted, in seconds.
pub(crate) const WINDOW_SECONDS: u32 = 5;
/// Number of windows in which a write makes a fold short-lived: the window of the fold and those of the next minute.
/// The last of them ends 60 to 65 s after the fold.
pub(crate) const YOUNG_WINDOWS: u32 = LIFE_SECONDS / WINDOW_SECONDS + 1;
/// Length of the steps by which the times of writes are kept, in seconds. The steps' numbers begin again after a day
/// and a half: a page that was not written for so long may pass for one that has just been written.
pub(crate) const STEP_SECONDS: u32 = 2;

/// The numbers by which pages are folded.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// See [`Bursts`].
    pub bursts: Bursts,
    /// See [`Quiet`].
    pub quiet: Quiet,
    /// See [`Judged`].
    pub judged: Judged,
    /// See [`Pages`].
    pub pages: Pages,
    /// How often the agent looks at the member while little changes, or after much has changed for long.
    pub seldom: Cadence,
    /// How often it looks in a settled quiet interval, while the time since a page's last write decides whether it is
    /// folded.
    pub busy: Cadence,
    /// How often it looks in a burst, and in the first seconds after one.
    pub busiest: Cadence,
}

/// When a burst begins, goes on and ends.
#[derive(Clone, Copy, Debug)]
pub struct Bursts {
    /// Share of all pages by which a burst is measured, one in this many. A burst goes on while so many pages change in
    /// a minute. It begins when so many have changed in a row.
    pub filled_one_in: f64,
    /// Share of the decayed peak burst size that the changed pages must reach for a burst to begin, one in this many.
    pub peak_one_in: f64,
    /// Half-life of the peak burst size: the largest burst so far counts half as much after this time.
    pub peak_half_life: Duration,
    /// Shortest time over which the rate of changes is measured.
    pub step: Duration,
    /// Number of changed pages in one step that never make a burst, however small the member is.
    pub few_pages: u64,
    /// Length of a burst, after which the agent looks at the member seldom. It may notice the burst's end some seconds
    /// late.
    pub long: Duration,
    /// Length of a burst, after which the burst shows which pages outlive it: those that were not written for 2/3 of
    /// this time.
    pub cyclic: Duration,
    /// Length of a quiet interval, in seconds, below which it may be a gap within a burst.
    pub gap_seconds: u32,
}

/// How long a quiet interval is expected to last, and which pages are folded in it.
#[derive(Clone, Copy, Debug)]
pub struct Quiet {
    /// Seconds without a burst that begin a quiet interval.
    pub begins_after: u32,
    /// Length of the first part of a quiet interval, in seconds, in which pages that the burst left behind are still
    /// being folded.
    pub settled: u32,
    /// Length of a quiet interval, in seconds, from which on every page that has rested for a round is folded.
    pub long: u32,
    /// Seconds without a write after which a page is folded in a quiet interval that is expected to go on.
    pub rested: u32,
    /// Seconds for which a quiet interval must be expected to go on: the minute that a fold has to last, and the rest
    /// of a page before the fold.
    pub soon: u32,
    /// Number of past quiet intervals that must have gone on for as long, while the current one is so short that it may
    /// be a gap within a burst.
    pub seen: usize,
}

/// What is learned from folds, by the age of their pages.
#[derive(Clone, Copy, Debug)]
pub struct Judged {
    /// Tolerated share of short-lived folds, one in this many.
    pub short_one_in: f64,
    /// Half-life of the counts of folds: past folds count half as much after this time.
    pub half_life: Duration,
    /// Length of the parts of time by which recent folds are counted.
    pub part: Duration,
    /// Fewest folds of an age from which it is learned that folds of this age last; fewest short-lived ones from which
    /// it is learned that they do not.
    pub enough: f64,
    /// Highest number of past folds that count in a closed age. Probe pages are few, and must be able to outweigh the
    /// past.
    pub closed: f64,
    /// Highest share of short-lived folds among the past folds that count in a closed age, one in this many: probe
    /// pages must be able to outweigh the past here, too.
    pub closed_short_one_in: f64,
    /// Lowest age, in seconds, that is open while too little is known of its folds. Long past quiet intervals raise it.
    pub old_seconds: u32,
    /// The pages that show what becomes of folds of a closed age.
    pub probes: Probes,
}

/// Which pages are probe pages: pages of a closed age that are folded all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probes {
    /// Share of pieces of memory whose pages are probe pages, for each age: one in this many.
    pub one_in: u64,
    /// Length of a piece, in pages.
    pub piece_pages: u64,
}

/// When a single page is not folded, though pages of its age are.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    /// Seconds without a write after which a page is at rest. Only writes to pages at rest count as changes: they show
    /// that something new has begun.
    pub rest: u32,
    /// Rest that a page needs after one short-lived fold, after two in a row, and after more, in seconds.
    pub left_alone: [u32; 3],
    /// A fold of a page would have lasted for a minute if the page was not written for so many seconds, all of them
    /// within a quiet interval.
    pub lasting: u32,
    /// Seconds since the last write of a chunk, after which its notes may be dropped.
    pub forget: u32,
}

/// How often the agent looks at its member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cadence {
    /// Share of a processor's time that rounds, and the page faults that they cause, may take: one in this many.
    pub rounds: u32,
    /// Shortest time between two rounds.
    pub closest: Duration,
    /// Share of a processor's time that searches for written pages among the folded ones may take: one in this many.
    pub searches: u32,
    /// Seconds after which a newly broken page (a folded one that was written) is looked at again.
    pub broken_first: u32,
    /// Longest time after which a broken page is looked at again, in seconds.
    pub broken_longest: u32,
    /// Whether little changes, so that pages that have rested are worth folding whenever the agent finds them.
    pub is_little: bool,
}

const SELDOM: Cadence = Cadence {
    rounds: 400,
    closest: Duration::from_millis(100),
    searches: 1000,
    broken_first: 2,
    broken_longest: 128,
    is_little: true,
};

/// The numbers that the agent uses.
pub const TODAY: Params = Params {
    bursts: Bursts {
        filled_one_in: 20.0,
        peak_one_in: 4.0,
        peak_half_life: Duration::from_secs(300),
        step: Duration::from_secs(2),
        few_pages: 64,
        long: Duration::from_secs(60),
        cyclic: Duration::from_secs(96),
        gap_seconds: 16,
    },
    quiet: Quiet { begins_after: 4, settled: 16, long: 64, rested: 4, soon: LIFE_SECONDS + 4, seen: 2 },
    judged: Judged {
        short_one_in: 20.0,
        half_life: Duration::from_secs(300),
        part: Duration::from_secs(10),
        enough: 30.0,
        closed: 600.0,
        closed_short_one_in: 10.0,
        old_seconds: 128,
        probes: Probes { one_in: 256, piece_pages: 16 },
    },
    pages: Pages { rest: 12, left_alone: [60, 120, 240], lasting: LIFE_SECONDS + 8, forget: 1024 },
    seldom: SELDOM,
    busy: Cadence { rounds: 100, searches: 200, broken_longest: 4, is_little: false, ..SELDOM },
    busiest: Cadence {
        rounds: 25,
        closest: Duration::from_secs(1),
        searches: 25,
        broken_longest: 2,
        is_little: false,
        ..SELDOM
    },
};
