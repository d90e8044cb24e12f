//! Carries out the worker's requests to fold: private pages first, then pages that were folded and have been broken
//! since. Other tasks have modules of their own: each is an `impl` of [`Folder`], or functions without it.

mod again;
mod collapsing;
mod discards;
mod pages;
mod unfolding;
mod vmas;
mod withdrawing;

pub use pages::{donate, find_broken, orphaned_pages, reclaim};

use crate::collapse::Collapse;
use crate::cpu_time::cpu_time;
use crate::follow::Following;
use crate::patience::Patience;
use crate::pool::Pool;
use crate::refold::{self, Part};
use crate::round::Rounds;
use crate::section::{self, RUN_PAGES, RUN_PARTS, Section, Source, pieces};
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
use vmas::Vmas;
use wire::{FoldRun, MemberStats, Outcome, Target};

/// Upper bound of the bytes by which one request to fold makes the table grow: a chunk for each of its pages.
const NOTES_BYTES: usize = wire::FOLD_PAGES * (4 << 10);
/// Processor time after which the agent's thread yields the processor before it moves pages out: 1 ms, which is less
/// than the kernel's time slice. So the thread is rarely preempted while pages are out, when threads that need them
/// would have to wait.
const TURN: Duration = Duration::from_millis(1);

/// Memory that the worker wants to be folded.
struct Wanted {
    range: PageRange,
    target: Target,
    /// Index of the outcome for its first page.
    at: usize,
}

/// A part of wanted memory in which all pages are private.
struct Found<'a> {
    range: PageRange,
    source: Option<Source<'a>>,
    at: usize,
}

/// What is needed to fold and unfold pages, and the number of mappings that may be used for it.
pub struct Folder {
    section: Section,
    unfold: Unfold,
    reader: SoftReader,
    witness: Witness,
    collapse: Collapse,
    no_refold_until: Option<Instant>,
    patience: Patience,
    turns: Turns,
    /// Pieces that were not tried, because mappings could not be replaced at the moment ([`Folder::hold`]). Their pages
    /// do not count as failed.
    not_held: Vec<PageRange>,
    yields: Yields,
    surveyed: Result<u64, references::Reason>,
    vmas: Vmas,
}

impl Folder {
    /// `most_vmas`: the most mappings that the whole process may have; `None`: half of the kernel's limit.
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
            turns: Turns,
            not_held: Vec::new(),
            yields: Yields::default(),
            surveyed,
            vmas: Vmas::new(most_vmas, Instant::now()),
        })
    }

    /// The section, which folds private pages.
    pub const fn section(&self) -> &Section {
        &self.section
    }

    /// From here on, another follower follows the memory. Nothing may lie in mappings of the pool.
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

    /// The number of the process's mappings, and their limit.
    pub const fn vmas(&self) -> &Vmas {
        &self.vmas
    }

    /// Pages of the range that must not be tried yet because folding them failed (`patience`).
    pub fn waiting(&self, range: PageRange) -> impl Iterator<Item = PageRange> {
        self.patience.waiting(range, Instant::now())
    }

    /// Judges the files that this process has open (`references`).
    pub fn survey(&mut self) {
        // The generation is read before the survey: if a file is opened meanwhile, the result is out of date.
        let generation = references::generation();
        self.surveyed = references::survey().map(|()| generation);
    }

    /// Counts mappings anew if it is time for that, and forgets pages whose failures are long past. Mappings are always
    /// counted before folding stops for lack of them.
    pub fn tidy(&mut self) {
        let now = Instant::now();
        if self.vmas.count_again(now) {
            self.patience.forget_old(now);
        }
    }

    /// Folds pages, and returns the outcome for each of them, in order. Huge pages that `rounds` knows are split first.
    pub fn fold(
        &mut self,
        runs: &[FoldRun],
        pool: &Pool,
        (pagemap, rounds): (&Pagemap, &mut Rounds),
        stats: &mut MemberStats,
    ) -> Vec<Outcome> {
        self.survey();
        // The table's notes of folded pages must find memory: once pages have been moved out, it is too late to fail.
        if !arena::ensure(NOTES_BYTES) {
            stats.done.failures.add(Outcome::NoMemory, runs.iter().map(|run| u64::from(run.pages)).sum());
            return vec![Outcome::NoMemory; runs.iter().map(|run| usize::from(run.pages)).sum()];
        }
        self.begin_to_refold(runs, pagemap);
        let mut all = vec![Outcome::Gone; runs.iter().map(|run| usize::from(run.pages)).sum()];
        let mut again = Vec::new();
        for stretch in stretches(&wanted(runs)) {
            self.fold_stretch(stretch, (pool, pagemap, rounds), stats, (&mut all, &mut again));
        }
        self.fold_again(&again, pagemap, stats, &mut all);
        again.iter().for_each(|part| rounds.were_broken(part.range, &all[part.at..][..part.range.pages as usize]));
        self.section.clear();
        self.turns.rest();
        self.count_failures(runs, &all, pagemap, stats);
        all
    }

    /// Counts the pages that could not be folded. They are not tried again for a while.
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
                    // This is asked with the table's lock held: otherwise the agent's userfaultfd might be registered
                    // just before the program's own.
                    let may_touch = |table: &table::Guard| table.is_foldable(page) && self.section.may_touch(page);
                    if *outcome == Outcome::Busy && may_touch(&table::lock()) {
                        reclaim(pagemap, page);
                    }
                }
            }
        }
    }

    /// Makes sure that mappings may be replaced, for which the program's threads may have to be stopped
    /// ([`crate::world`]). Returns whether that succeeded. The caller holds no lock.
    pub fn hold(&mut self) -> bool {
        let held = self.turns.hold();
        if held == Some(true) {
            // This survey holds for the whole turn: the program opens nothing while its threads are stopped.
            self.survey();
            self.turns.begin();
        }
        held.is_some()
    }

    /// The section, the witness, and the means to stop the program's threads, for restoring memory as it was before the
    /// agent came.
    pub fn parts(&mut self) -> (&Section, &mut Witness, &mut Turns) {
        (&self.section, &mut self.witness, &mut self.turns)
    }

    /// Folds the private pages of neighbouring memory, and sets their outcomes. Broken pages are added to `again`, to
    /// be folded afterwards.
    fn fold_stretch<'a>(
        &mut self,
        stretch: &[Wanted],
        (pool, pagemap, rounds): (&'a Pool, &Pagemap, &mut Rounds),
        stats: &mut MemberStats,
        (all, again): (&mut [Outcome], &mut Vec<Part<'a>>),
    ) {
        let is_held = self.surveyed.is_err() || self.hold();
        let refuse = |all: &mut [Outcome], why: Outcome| {
            stretch.iter().for_each(|wanted| all[wanted.at..][..wanted.range.pages as usize].fill(why));
        };
        let generation = match &self.surveyed {
            _ if !is_held => {
                self.not_held.extend(stretch.iter().map(|wanted| wanted.range));
                return refuse(all, Outcome::Busy);
            }
            Err(_) => return refuse(all, Outcome::Unpinned),
            Ok(generation) => *generation,
        };
        self.yields.yield_if_due();
        let mut table = table::lock();
        if let Some(refused) = refused(generation) {
            return refuse(all, refused);
        }
        // A stretch has few parts: if mappings run short within it, the next one finds that.
        let are_spent = self.vmas.are_spent();
        let mut found = Vec::new();
        for wanted in stretch {
            let source = match wanted.target {
                Target::Zero => None,
                Target::Slot(_) if are_spent => {
                    all[wanted.at..][..wanted.range.pages as usize].fill(Outcome::NoVma);
                    continue;
                }
                Target::Slot(first) => match pool.of(first) {
                    Some(pool) => Some(Source { pool, first }),
                    None => continue,
                },
            };
            add_broken(&table, (wanted.range, source), wanted.at, again);
            self.find(&mut table, (wanted, source), (pagemap, rounds), stats, (all, &mut found));
        }
        for run in found.chunk_by(|one, next| one.range.end() == next.range.start) {
            self.fold_run(&mut table, run, (generation, stats), all);
        }
        drop(table);
        if self.vmas.are_far_from_known() {
            self.tidy();
        }
    }

    /// Finds the parts of wanted memory in which all pages are private. Huge pages are split first. Pages where the
    /// kernel maps its zero page already only need to be counted.
    fn find<'a>(
        &mut self,
        table: &mut table::Guard,
        (wanted, source): (&Wanted, Option<Source<'a>>),
        (pagemap, rounds): (&Pagemap, &mut Rounds),
        stats: &mut MemberStats,
        (all, found): (&mut [Outcome], &mut Vec<Found<'a>>),
    ) {
        for (from, pages) in parts(wanted.range, |page| table.is_foldable(page)) {
            let part = PageRange { start: wanted.range.start.add_pages(from), pages };
            let ends = [part.start, part.start.add_pages(part.pages - 1)];
            for huge in ends.into_iter().filter_map(|at| rounds.split(at)) {
                stats.stalls.add(micros(split(huge)));
            }
            let zeros = if source.is_none() { take_zeros(table, pagemap, part) } else { Vec::new() };
            all[wanted.at + from as usize..][..pages as usize].fill(Outcome::Folded);
            let is_left =
                |page: PageRange| !zeros.iter().any(|zero| zero.start < page.end() && page.start < zero.end());
            for (further, pages) in parts(part, is_left) {
                let from = from + further;
                let range = PageRange { start: wanted.range.start.add_pages(from), pages };
                let source = source.and_then(|s| s.first.add(from as u32).map(|first| Source { first, ..s }));
                found.push(Found { range, source, at: wanted.at + from as usize });
            }
            if source.is_some() {
                self.vmas.note_run();
            }
        }
    }

    /// Folds neighbouring parts as one run.
    fn fold_run(
        &mut self,
        table: &mut table::Guard,
        found: &[Found<'_>],
        (generation, stats): (u64, &mut MemberStats),
        all: &mut [Outcome],
    ) {
        let parts = found.iter().map(|part| section::Part { pages: part.range.pages, source: part.source });
        let parts: Vec<section::Part<'_>> = parts.collect();
        let pages = parts.iter().map(|part| part.pages).sum();
        let run = PageRange { start: found[0].range.start, pages };
        let outcomes = &mut all[found[0].at..][..pages as usize];
        let took = self.section.fold(table, run, &parts, generation, outcomes);
        table.were_folded(run, outcomes);
        stats.stalls.add(micros(took));
    }
}

/// The memory that a request wants to be folded, in pieces that one section can fold.
fn wanted(runs: &[FoldRun]) -> Vec<Wanted> {
    let (mut all, mut at) = (Vec::new(), 0);
    for run in runs {
        let of_run = pieces(run.start, run.pages.into(), run.target);
        let index = |range: PageRange| at + (range.start.page() - run.start.page()) as usize;
        all.extend(of_run.map(|(range, target)| Wanted { range, target, at: index(range) }));
        at += usize::from(run.pages);
    }
    all
}

/// Cuts a list into stretches of neighbours, each no more than one section can fold.
fn stretches(all: &[Wanted]) -> impl Iterator<Item = &[Wanted]> {
    let mut left = all;
    std::iter::from_fn(move || {
        let mut pages = left.first()?.range.pages;
        let goes_on = |pair: &&[Wanted]| {
            pages += pair[1].range.pages;
            pair[0].range.end() == pair[1].range.start && pages <= RUN_PAGES
        };
        let count = 1 + left.windows(2).take(RUN_PARTS - 1).take_while(goes_on).count();
        let (stretch, rest) = left.split_at(count);
        left = rest;
        Some(stretch)
    })
}

/// When the agent's thread last yielded its processor by itself.
#[derive(Default)]
struct Yields {
    /// Processor time of the thread at that moment.
    last: Duration,
}

impl Yields {
    /// Yields the processor, if it is time for that. The caller holds no lock.
    fn yield_if_due(&mut self) {
        let used = cpu_time(ClockId::ThreadCPUTime);
        if used - self.last >= TURN {
            std::thread::yield_now();
            self.last = used;
        }
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

/// The outcome for all pages if something forbids the fold since this thread began to wait for the table's lock; `None`
/// if the fold may go on.
fn refused(generation: u64) -> Option<Outcome> {
    if !world::is_held() {
        // The program's threads were let go while this thread waited.
        return Some(Outcome::Busy);
    }
    // The program has opened a file through which memory may be written without pinning.
    (references::generation() != generation).then_some(Outcome::Unpinned)
}

/// The parts of a piece for which `is_so` holds, as first page and number of pages.
fn parts(piece: PageRange, is_so: impl Fn(PageRange) -> bool) -> Vec<(u64, u64)> {
    if is_so(piece) { vec![(0, piece.pages)] } else { parts_by_page(piece, is_so) }
}

/// As [`parts`], if `is_so` can be asked for single pages only.
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

/// Finds the pages that map the kernel's zero page, notes them as folded, and returns them. The kernel maps it in place
/// of zeros when it splits a huge page.
fn take_zeros(table: &mut table::Table, pagemap: &Pagemap, part: PageRange) -> Vec<PageRange> {
    let zeros = pagemap.zero_ranges(part.start, part.end()).unwrap_or_default();
    zeros.iter().for_each(|zeros| table.set_zeroed(*zeros));
    zeros
}

/// Splits a huge page. Returns how long that took.
fn split(huge: HostVirt) -> Duration {
    let began = Instant::now();
    act::split_huge_page(huge);
    began.elapsed()
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
