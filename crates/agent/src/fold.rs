//! Carries out a worker's request to fold: private pages first, then pages that were folded and have been broken since.
//! Other tasks have modules of their own, each an `impl` of [`Folder`] or functions without a [`Folder`].

mod again;
mod collapsing;
mod discards;
mod pages;
mod unfolding;
mod withdrawing;

pub use pages::{donate, find_broken, orphaned_pages, reclaim};

use crate::collapse::Collapse;
use crate::cpu_time::cpu_time;
use crate::follow::Following;
use crate::patience::Patience;
use crate::pool::Pool;
use crate::refold::{self, Part};
use crate::round::Rounds;
use crate::section::{Section, Source, pieces};
use crate::table;
use crate::unfold::Unfold;
use crate::witness::Witness;
use crate::world::Turns;
use crate::{arena, references, world};
use act::SoftReader;
use host::Pagemap;
use page::{HostVirt, PageRange};
use rustix::time::ClockId;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use wire::{FoldRun, MemberStats, Outcome, Target};

/// Shortest time between two counts of the mappings, and their share of a processor: 10 s, 1/2000. Mappings are also
/// counted when an upper bound of those made since leaves none to spend.
const COUNT_EVERY: (Duration, u32) = (Duration::from_secs(10), 2000);
/// Time between two counts in a process in which nothing was folded since the last one: 60 s.
const RECOUNT: Duration = Duration::from_secs(60);
/// Upper bound of the bytes by which one message to fold makes the table grow: a chunk for each of its pages.
const NOTES_BYTES: usize = wire::FOLD_PAGES * (4 << 10);
/// Processor time after which the agent yields before it moves pages: 1 ms, which is less than the kernel's time
/// slice. So preemption rarely happens while pages are out of reach. Their users would wait for all threads that run
/// then.
const TURN: Duration = Duration::from_millis(1);
/// Pieces of memory between two looks at that processor time: 100 us of work at least.
const PIECES_A_TURN: u32 = 4;

/// The means of folding and unfolding, and the mappings that they may use.
pub struct Folder {
    section: Section,
    unfold: Unfold,
    reader: SoftReader,
    witness: Witness,
    collapse: Collapse,
    no_refold_until: Option<Instant>,
    patience: Patience,
    turns: Turns,
    /// Pieces that were not tried, because mappings could not be replaced at the moment. Their pages do not count as
    /// failed.
    not_held: Vec<PageRange>,
    /// Processor time of this thread when it last yielded.
    turn_began: Duration,
    asked_turns: u32,
    surveyed: Result<u64, references::Reason>,
    /// The most mappings that the whole process may have, and whether that follows the kernel's limit.
    most_vmas: (u64, bool),
    vmas: u64,
    runs_since_count: u64,
    count_due: Instant,
    recount: Instant,
}

impl Folder {
    /// `most_vmas`: the most mappings that the whole process may have, if that is not to follow the kernel's limit.
    ///
    /// # Errors
    /// Memory or descriptors are short.
    pub fn new(section: Section, most_vmas: Option<u64>, prover: PathBuf) -> io::Result<Self> {
        let (patience, surveyed) = (Patience::default(), Ok(0));
        let unfold = Unfold::new(Arc::clone(section.following()));
        Ok(Self {
            section,
            unfold,
            reader: SoftReader::new(refold::GROUP_PAGES)?,
            witness: Witness::new(prover),
            collapse: Collapse::new(Instant::now()),
            no_refold_until: None,
            patience,
            turns: Turns::new(),
            not_held: Vec::new(),
            turn_began: Duration::ZERO,
            asked_turns: 0,
            surveyed,
            most_vmas: (most_vmas.unwrap_or_else(half_of_all_vmas), most_vmas.is_none()),
            vmas: count_vmas(),
            runs_since_count: 0,
            count_due: Instant::now(),
            recount: Instant::now(),
        })
    }

    /// The section that pages are folded by.
    pub const fn section(&self) -> &Section {
        &self.section
    }

    /// From here on, memory is followed by another follower. Nothing may lie in mappings of the pool.
    pub fn follow_by(&mut self, following: &Arc<Following>) {
        let homes = self.section.following().hold().homes().to_vec();
        homes.into_iter().for_each(|(range, content)| following.hold().set_home(range, content));
        self.section.follow_by(Arc::clone(following));
        self.unfold = Unfold::new(Arc::clone(following));
    }

    /// The reason why nothing may be folded: an open file through which memory may be written without a pin. `None` if
    /// folding is safe.
    pub fn unpinned(&self) -> Option<&references::Reason> {
        self.surveyed.as_ref().err()
    }

    /// Mappings at the last count.
    pub const fn vmas(&self) -> u64 {
        self.vmas
    }

    /// Number of mappings from which on folding adds no more.
    pub const fn most_vmas(&self) -> u64 {
        self.most_vmas.0
    }

    /// Whether no more mappings may be spent: by the last count, and an upper bound of those that were made since.
    pub const fn is_out_of_vmas(&self) -> bool {
        self.vmas + 2 * self.runs_since_count + 4 >= self.most_vmas.0
    }

    /// Pages of the range that are left alone because folding them failed (`patience`).
    pub fn waiting(&self, range: PageRange) -> impl Iterator<Item = PageRange> {
        self.patience.waiting(range, Instant::now())
    }

    /// Looks at the files that this process has open (`references`).
    pub fn survey(&mut self) {
        // Counted before the look: a file that is opened meanwhile makes the answer out of date.
        let generation = references::generation();
        self.surveyed = references::survey().map(|()| generation);
    }

    /// Counts mappings anew, reads the kernel's limit again, and forgets pages that failed long ago. Folding never
    /// stops by the upper bound alone: mappings are counted first.
    pub fn tidy(&mut self) {
        let now = Instant::now();
        if now >= self.count_due || self.runs_since_count > 0 && self.is_out_of_vmas() {
            let before = cpu_time(ClockId::ThreadCPUTime);
            if self.runs_since_count > 0 || self.is_out_of_vmas() || now >= self.recount {
                (self.vmas, self.runs_since_count) = (count_vmas(), 0);
                self.recount = now + RECOUNT;
            }
            if self.most_vmas.1 {
                self.most_vmas.0 = half_of_all_vmas();
            }
            let (pause, share) = COUNT_EVERY;
            self.count_due = now + pause.max((cpu_time(ClockId::ThreadCPUTime) - before) * share);
            self.patience.forget_old(now);
        }
    }

    /// Replaces pages, and says what became of each, in order. Huge pages that are known to `rounds` are split first.
    pub fn fold(
        &mut self,
        runs: &[FoldRun],
        pool: &Pool,
        (pagemap, rounds): (&Pagemap, &mut Rounds),
        stats: &mut MemberStats,
    ) -> Vec<Outcome> {
        self.survey();
        // The table's notes of folded pages must find memory: while pages are out, it is too late to fail.
        if !arena::ensure(NOTES_BYTES) {
            stats.done.failures.add(Outcome::NoMemory, runs.iter().map(|run| u64::from(run.pages)).sum());
            return vec![Outcome::NoMemory; runs.iter().map(|run| usize::from(run.pages)).sum()];
        }
        self.begin_to_refold(runs, pagemap);
        let mut all = Vec::with_capacity(runs.iter().map(|run| usize::from(run.pages)).sum());
        let mut again = Vec::new();
        for run in runs {
            let before = all.len();
            for (piece, target) in pieces(run.start, run.pages.into(), run.target) {
                self.fold_piece(piece, target, (pool, pagemap, rounds), stats, (&mut all, &mut again));
            }
            all.resize(before + usize::from(run.pages), Outcome::Gone);
        }
        self.fold_again(&again, pagemap, stats, &mut all);
        again.iter().for_each(|part| rounds.were_broken(part.range, &all[part.at..][..part.range.pages as usize]));
        self.section.clear();
        self.turns.rest();
        self.count_failures(runs, &all, pagemap, stats);
        all
    }

    /// Counts the pages that could not be folded, and has them left alone for a while.
    fn count_failures(&mut self, runs: &[FoldRun], all: &[Outcome], pagemap: &Pagemap, stats: &mut MemberStats) {
        let now = Instant::now();
        let not_held = std::mem::take(&mut self.not_held);
        let mut outcomes = all.iter();
        for page in runs.iter().flat_map(|run| (0..u64::from(run.pages)).map(|n| run.start.add_pages(n))) {
            match outcomes.next() {
                None | Some(Outcome::Folded) => {}
                Some(outcome) => {
                    stats.done.failures.add(*outcome, 1);
                    if not_held.iter().any(|range| range.start <= page && page < range.end()) {
                        continue;
                    }
                    self.patience.failed(page, now);
                    let page = PageRange { start: page, pages: 1 };
                    // Asked with the table's lock held: else the agent's userfaultfd might be registered just before
                    // the program's own.
                    let may_touch = |table: &table::Guard| table.is_foldable(page) && self.section.may_touch(page);
                    if *outcome == Outcome::Busy && may_touch(&table::lock()) {
                        reclaim(pagemap, page);
                    }
                }
            }
        }
    }

    /// Makes sure that mappings may be replaced ([`crate::world`]). Says whether that succeeded. The caller holds no lock.
    pub fn hold(&mut self) -> bool {
        let held = self.turns.hold();
        if held == Some(true) {
            // Nothing is opened while the program's threads are stopped.
            self.survey();
            self.turns.begin();
        }
        held.is_some()
    }

    /// The section, the witness and the turns, for restoring memory as it was before the agent came.
    #[cfg(any(test, not(target_env = "gnu")))]
    pub fn parts(&mut self) -> (&Section, &mut Witness, &mut Turns) {
        (&self.section, &mut self.witness, &mut self.turns)
    }

    /// Yields the processor, if it is time for that. The caller holds no lock.
    fn take_turns(&mut self) {
        // To ask is a system call.
        self.asked_turns = self.asked_turns.wrapping_add(1);
        if !self.asked_turns.is_multiple_of(PIECES_A_TURN) {
            return;
        }
        let used = cpu_time(ClockId::ThreadCPUTime);
        if used - self.turn_began >= TURN {
            std::thread::yield_now();
            self.turn_began = used;
        }
    }

    /// Folds the private pages of a piece, and adds the outcomes to `all`. The broken ones are added to `again`, to
    /// be folded later.
    fn fold_piece<'a>(
        &mut self,
        piece: PageRange,
        target: Target,
        (pool, pagemap, rounds): (&'a Pool, &Pagemap, &mut Rounds),
        stats: &mut MemberStats,
        (all, again): (&mut Vec<Outcome>, &mut Vec<Part<'a>>),
    ) {
        let mut outcomes = [Outcome::Gone; crate::section::RUN_PAGES as usize];
        let outcomes = &mut outcomes[..piece.pages as usize];
        let source = match target {
            Target::Zero => Some(None),
            Target::Slot(first) => pool.of(first).map(|pool| Some(Source { pool, first })),
        };
        let is_held = source.is_none() || self.surveyed.is_err() || self.hold();
        match (source, &self.surveyed) {
            (None, _) => {}
            _ if !is_held => {
                outcomes.fill(Outcome::Busy);
                self.not_held.push(piece);
            }
            (_, Err(_)) => outcomes.fill(Outcome::Unpinned),
            (Some(Some(_)), _) if self.is_out_of_vmas() => outcomes.fill(Outcome::NoVma),
            (Some(source), &Ok(generation)) => {
                self.take_turns();
                let mut table = table::lock();
                if let Some(refused) = refused(generation) {
                    return all.extend(outcomes.iter().map(|_| refused));
                }
                add_broken(&table, (piece, source), all.len(), again);
                for (from, pages) in parts(piece, |page| table.is_foldable(page)) {
                    let part = PageRange { start: piece.start.add_pages(from), pages };
                    let source = source.and_then(|s| s.first.add(from as u32).map(|first| Source { first, ..s }));
                    let outcomes = &mut outcomes[from as usize..(from + pages) as usize];
                    self.fold_part(&mut table, (part, source), (pagemap, rounds), (generation, stats), outcomes);
                }
            }
        }
        all.extend_from_slice(outcomes);
        if source.is_some() && self.is_out_of_vmas() && self.runs_since_count > self.most_vmas.0 / 16 {
            self.tidy();
        }
    }

    /// Folds a part of a piece that is private throughout. Huge pages are split first. Zeros that the kernel maps
    /// already only need to be counted; the section folds the other pages.
    fn fold_part(
        &mut self,
        table: &mut table::Guard,
        (part, source): (PageRange, Option<Source<'_>>),
        (pagemap, rounds): (&Pagemap, &mut Rounds),
        (generation, stats): (u64, &mut MemberStats),
        outcomes: &mut [Outcome],
    ) {
        for huge in [part.start, part.start.add_pages(part.pages - 1)].into_iter().filter_map(|at| rounds.split(at)) {
            stats.stalls.add(micros(split(huge)));
        }
        let zeros = if source.is_none() { take_zeros(table, pagemap, part) } else { Vec::new() };
        outcomes.fill(Outcome::Folded);
        let is_left = |page: PageRange| !zeros.iter().any(|zero| zero.start < page.end() && page.start < zero.end());
        for (from, pages) in parts(part, is_left) {
            let left = PageRange { start: part.start.add_pages(from), pages };
            let outcomes = &mut outcomes[from as usize..(from + pages) as usize];
            let took = self.section.fold(table, left, source, generation, outcomes);
            stats.stalls.add(micros(took));
        }
        self.runs_since_count += u64::from(source.is_some());
    }
}

/// Adds the broken pages of a piece to `again`. `at` is the index of the outcome of the piece's first page. A part lies
/// either in the program's own mapping or in mappings of the pool.
fn add_broken<'a>(
    table: &table::Table,
    (piece, source): (PageRange, Option<Source<'a>>),
    at: usize,
    again: &mut Vec<Part<'a>>,
) {
    for is_placed in [false, true] {
        let is_so = |page| table.is_refoldable(page) && table.placement(page) == Some(is_placed);
        for (from, pages) in parts(piece, is_so) {
            let part = PageRange { start: piece.start.add_pages(from), pages };
            let source = source.and_then(|s| s.first.add(from as u32).map(|first| Source { first, ..s }));
            again.push(Part { range: part, source, at: at + from as usize });
        }
    }
}

/// The outcome of all pages if folding was forbidden while this thread waited for the table; `None` if it may go on.
fn refused(generation: u64) -> Option<Outcome> {
    if !world::is_held() {
        // The program's threads were let go during this long wait, so the fold is not made.
        return Some(Outcome::Busy);
    }
    // The program has opened a file by which memory may be written without a pin.
    (references::generation() != generation).then_some(Outcome::Unpinned)
}

/// The parts of a piece for which `is_so` holds, as first page and number of pages.
fn parts(piece: PageRange, is_so: impl Fn(PageRange) -> bool) -> Vec<(u64, u64)> {
    if is_so(piece) { vec![(0, piece.pages)] } else { parts_by_page(piece, is_so) }
}

/// As [`parts`], if `is_so` takes single pages only.
fn parts_by_page(piece: PageRange, is_so: impl Fn(PageRange) -> bool) -> Vec<(u64, u64)> {
    let mut found: Vec<(u64, u64)> = Vec::new();
    for at in (0..piece.pages).filter(|at| is_so(PageRange { start: piece.start.add_pages(*at), pages: 1 })) {
        match found.last_mut() {
            Some((from, pages)) if *from + *pages == at => *pages += 1,
            _ => found.push((at, 1)),
        }
    }
    found
}

/// Notes as folded those pages that map the kernel's zero page, and returns them. The kernel has mapped it in place of
/// zeros when their huge page was split.
fn take_zeros(table: &mut table::Table, pagemap: &Pagemap, part: PageRange) -> Vec<PageRange> {
    let zeros = pagemap.zero_ranges(part.start, part.end()).unwrap_or_default();
    zeros.iter().for_each(|zeros| table.set_zeroed(*zeros));
    zeros
}

/// Splits a huge page, and says how long that took.
fn split(huge: HostVirt) -> Duration {
    let began = Instant::now();
    act::split_huge_page(huge);
    began.elapsed()
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Half of the mappings that the kernel allows: the other half stays the program's own.
fn half_of_all_vmas() -> u64 {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    limit.and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(65530) / 2
}

/// Counts this process's mappings.
fn count_vmas() -> u64 {
    let lines = |file: std::fs::File| -> std::io::Result<u64> {
        let (mut buffer, mut lines) = (vec![0; 64 << 10], 0);
        loop {
            match std::io::Read::read(&mut &file, &mut buffer)? {
                0 => return Ok(lines),
                n => lines += buffer[..n].iter().filter(|byte| **byte == b'\n').count() as u64,
            }
        }
    };
    std::fs::File::open("/proc/thread-self/maps").and_then(lines).unwrap_or(0)
}

#[cfg(test)]
mod tests;
