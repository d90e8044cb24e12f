//! Does what a worker asks for: shows pages, folds pages, unfolds everything. It also finds the folded pages that the
//! member has written since.

use crate::collapse::{self, Collapse};
use crate::cpu_time::cpu_time;
use crate::follow::{Following, Held};
use crate::maps::Kind;
use crate::patience::Patience;
use crate::pool::Pool;
use crate::refold::{self, Part};
use crate::round::Rounds;
use crate::section::{Section, Source, pieces};
use crate::table;
use crate::unfold::Unfold;
use crate::witness::Witness;
use crate::{arena, hooks, references};
use act::{MemberMemory, SoftReader, make_private};
use host::Pagemap;
use page::{HostVirt, PageRange, PageSet};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::time::ClockId;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use wire::{FoldRun, MemberStats, Outcome, SlotRun, Target};

/// Shortest time between two counts of the mappings, and their share of a processor: 10 s, 1/2000. Mappings are also
/// counted when the most careful account leaves none to spend.
const COUNT_EVERY: (Duration, u32) = (Duration::from_secs(10), 2000);
/// Upper bound of the bytes by which one message to fold makes the table grow: a chunk for each of its pages.
const NOTES_BYTES: usize = wire::FOLD_PAGES * (4 << 10);
/// Time after which a fork probe is tried again where none could be cast: 60 s.
const NO_PROBE_TIME: Duration = Duration::from_secs(60);
/// Number of repeated questions for one message to a prover that is late.
const LATE_TRIES: usize = 8;
/// Processor time after which the agent yields before it moves pages: 1 ms, which is less than the kernel's time
/// slice. So preemption rarely happens while pages are out of reach. Their users would wait for all threads that run
/// then.
const TURN: Duration = Duration::from_millis(1);
/// Pieces of memory between two looks at that processor time: 100 us of work at least.
const PIECES_A_TURN: u32 = 4;
/// Runs that are unfolded before the agent looks at other work.
const UNFOLD_AT_ONCE: usize = 256;

/// The means of folding and unfolding, and the mappings that they may use.
pub struct Folder {
    section: Section,
    unfold: Unfold,
    reader: SoftReader,
    witness: Witness,
    collapse: Collapse,
    no_refold_until: Option<Instant>,
    patience: Patience,
    /// Processor time of this thread when it last yielded.
    turn_began: Duration,
    asked_turns: u32,
    surveyed: Result<u64, references::Reason>,
    most_vmas: u64,
    vmas: u64,
    runs_since_count: u64,
    count_due: Instant,
}

impl Folder {
    /// `most_vmas`: the most mappings that the whole process may have.
    ///
    /// # Errors
    /// Memory or descriptors are short.
    pub fn new(section: Section, most_vmas: u64, prover: PathBuf) -> io::Result<Self> {
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
            turn_began: Duration::ZERO,
            asked_turns: 0,
            surveyed,
            most_vmas,
            vmas: count_vmas(),
            runs_since_count: 0,
            count_due: Instant::now(),
        })
    }

    /// The section that pages are folded by.
    pub const fn section(&self) -> &Section {
        &self.section
    }

    /// From here on, memory is followed by another follower. Nothing may lie in mappings of the pool.
    pub fn follow_by(&mut self, following: &Arc<Following>) {
        self.section.follow_by(Arc::clone(following));
        self.unfold = Unfold::new(Arc::clone(following));
    }

    /// Why nothing may be folded: something may write this process's memory without pinning it. `None` if nothing may.
    pub fn unpinned(&self) -> Option<&references::Reason> {
        self.surveyed.as_ref().err()
    }

    /// Mappings at the last count.
    pub const fn vmas(&self) -> u64 {
        self.vmas
    }

    /// Whether no more mappings may be spent, by the most careful account since the last count.
    pub const fn is_out_of_vmas(&self) -> bool {
        self.vmas + 2 * self.runs_since_count + 4 >= self.most_vmas
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

    /// Counts mappings anew, and forgets pages that failed long ago.
    pub fn tidy(&mut self) {
        let now = Instant::now();
        if now >= self.count_due {
            (self.vmas, self.runs_since_count) = (count_vmas(), 0);
            let (pause, share) = COUNT_EVERY;
            self.count_due = now + pause.max(now.elapsed() * share);
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
        self.section.clear();
        let now = Instant::now();
        let mut outcomes = all.iter();
        for page in runs.iter().flat_map(|run| (0..u64::from(run.pages)).map(|n| run.start.add_pages(n))) {
            match outcomes.next() {
                None | Some(Outcome::Folded) => {}
                Some(outcome) => {
                    stats.done.failures.add(*outcome, 1);
                    self.patience.failed(page, now);
                    let page = PageRange { start: page, pages: 1 };
                    // With the table's lock held: else ours might be registered before the one that the program is just
                    // registering.
                    let may_touch = |table: &table::Guard| table.is_foldable(page) && self.section.may_touch(page);
                    if *outcome == Outcome::Busy && may_touch(&table::lock()) {
                        reclaim(pagemap, page);
                    }
                }
            }
        }
        all
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

    /// Calls a witness for those pages of the runs that are broken.
    fn begin_to_refold(&mut self, runs: &[FoldRun], pagemap: &Pagemap) {
        let table = table::lock();
        let ranges = runs.iter().map(|run| PageRange { start: run.start, pages: run.pages.into() });
        let broken: Vec<PageRange> = ranges.flat_map(|range| table.broken_pages(range)).collect();
        if !broken.is_empty() && self.surveyed.is_ok() {
            let called = self.witness.call(&table, pagemap, &broken);
            self.no_refold_until = called.err().map(|_| Instant::now() + NO_PROBE_TIME);
        }
    }

    /// Folds parts again that were seen to be broken.
    fn fold_again(&mut self, parts: &[Part<'_>], pagemap: &Pagemap, stats: &mut MemberStats, all: &mut [Outcome]) {
        let Ok(generation) = self.surveyed else { return };
        let (mut at, mut tries) = (0, LATE_TRIES);
        while at < parts.len() {
            self.take_turns();
            let mut table = table::lock();
            // The program may have changed the part since the table was last looked at.
            let is_current = references::generation() == generation;
            let still = |part: &Part<'_>| is_current && table.is_refoldable(part.range);
            let sound = parts[at..].iter().take_while(|part| still(part)).count();
            if sound == 0 {
                at += 1;
                continue;
            }
            let group = &parts[at..at + sound];
            let with = (pagemap, &**self.section.following(), &mut self.reader, &mut self.witness);
            let (done, took) = refold::fold_group(&mut table, with, group, generation, all);
            stats.stalls.add(micros(took));
            if self.witness.is_late() {
                // Nothing of the group was folded.
                drop(table);
                if tries > 0 && self.witness.catch_up() {
                    tries -= 1;
                } else {
                    at += done;
                }
                continue;
            }
            for part in &group[..done] {
                let outcomes = &all[part.at..part.at + part.range.pages as usize];
                stats.done.refolds += outcomes.iter().filter(|o| **o == Outcome::Folded).count() as u64;
                self.runs_since_count += 1;
            }
            at += done;
        }
    }

    /// Ends a fork probe whose time is over. Says how long another one may stay.
    pub fn rest(&mut self) -> Option<Duration> {
        self.witness.rest()
    }

    /// Whether broken pages may be folded again: no fork probe has failed lately.
    pub fn may_refold(&self, now: Instant) -> bool {
        self.no_refold_until.is_none_or(|until| until <= now)
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
        match (source, &self.surveyed) {
            (None, _) => {}
            (_, Err(_)) => outcomes.fill(Outcome::Unpinned),
            (Some(Some(_)), _) if self.is_out_of_vmas() => outcomes.fill(Outcome::NoVma),
            (Some(source), &Ok(generation)) => {
                self.take_turns();
                let mut table = table::lock();
                if references::generation() != generation {
                    // Something was opened that may not even be able to wait for pages.
                    outcomes.fill(Outcome::Unpinned);
                    all.extend_from_slice(outcomes);
                    return;
                }
                for (from, pages) in parts(piece, |page| table.is_refoldable(page)) {
                    let part = PageRange { start: piece.start.add_pages(from), pages };
                    let source = source.and_then(|s| s.first.add(from as u32).map(|first| Source { first, ..s }));
                    again.push(Part { range: part, source, at: all.len() + from as usize });
                }
                for (from, pages) in parts(piece, |page| table.is_foldable(page)) {
                    let part = PageRange { start: piece.start.add_pages(from), pages };
                    let source = source.and_then(|s| s.first.add(from as u32).map(|first| Source { first, ..s }));
                    let outcomes = &mut outcomes[from as usize..(from + pages) as usize];
                    self.fold_part(&mut table, (part, source), (pagemap, rounds), (generation, stats), outcomes);
                }
            }
        }
        all.extend_from_slice(outcomes);
        if source.is_some() && self.is_out_of_vmas() && self.runs_since_count > self.most_vmas / 16 {
            self.count_due = Instant::now();
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

    /// Unfolds some of the folded pages. Returns whether none is left.
    ///
    /// # Errors
    /// Some pages could not be unfolded, though all were tried. Memory or mappings are short, the pages are locked,
    /// or the program looks after their faults by itself.
    pub fn unfold(&mut self, pagemap: &Pagemap, pool: &Pool) -> Result<bool, Errno> {
        let (mut done, mut failed) = (0, Ok(()));
        let runs = table::lock().all_slot_runs();
        for run in &runs {
            for (piece, target) in pieces(run.start, run.pages.into(), Target::Slot(run.slot)) {
                match self.unfold_piece(pagemap, pool, piece, target) {
                    Ok(()) => done += 1,
                    Err(Errno::NOMEM) => return Err(Errno::NOMEM),
                    Err(e) => failed = Err(e),
                }
            }
            if done >= UNFOLD_AT_ONCE {
                return Ok(false);
            }
        }
        failed?;
        let (pooled, zeroed) = {
            let table = table::lock();
            (table.pooled_pages(table::everything()), table.zeroed_pages(table::everything()))
        };
        // Pages that were folded as zeros, and pages of pools that the worker no longer knows.
        for range in pooled.into_iter().chain(zeroed) {
            let mut table = table::lock();
            let writable = table.known(range).into_iter().filter(|(_, traits)| traits.may_be_written());
            for (range, _) in writable.collect::<Vec<_>>() {
                if table.pooled_pages(range).is_empty() && !self.section.may_touch(range) {
                    continue;
                }
                make_private(range)?;
                table.set_pending(range);
            }
        }
        Ok(table::lock().counts().folded == 0)
    }

    /// Collapses one piece, if there is one and it is time. All but `most` of its pages are the member's own, and
    /// none was written for `stayed` seconds.
    ///
    /// # Errors
    /// The kernel refused to look.
    pub fn collapse(
        &mut self,
        (pagemap, pool, rounds): (&Pagemap, &Pool, &mut Rounds),
        (most, stayed): (u64, u32),
        stats: &mut MemberStats,
    ) -> host::Result<()> {
        let now = Instant::now();
        if !self.may_refold(now) {
            return Ok(());
        }
        let Some((piece, traits)) = self.collapse.next(pagemap, most, now)? else { return Ok(()) };
        let began = Instant::now();
        let collapsed = self.collapse_piece((pagemap, pool, rounds), (piece, traits), stayed, stats);
        self.collapse.done(piece, collapsed.unwrap_or(false), began.elapsed());
        Ok(())
    }

    /// Says whether the piece has been collapsed.
    fn collapse_piece(
        &mut self,
        (pagemap, pool, rounds): (&Pagemap, &Pool, &mut Rounds),
        (piece, traits): (PageRange, table::Traits),
        stayed: u32,
        stats: &mut MemberStats,
    ) -> Result<bool, Errno> {
        self.survey();
        let Ok(generation) = self.surveyed else { return Ok(false) };
        let copy = MemberMemory::huge_page(traits.advice.huge)?;
        let huge = pagemap.huge_ranges(copy.range().start, copy.range().end());
        let is_huge = huge.is_ok_and(|ranges| ranges == [copy.range()]);
        let mut table = table::lock();
        // Without a huge page, a collapse only gives back mappings. No folded page is given up for that.
        let is_of_use = is_huge || table.is_only_broken(piece);
        let is_current = references::generation() == generation;
        if table.traits(piece) != Some(traits) || !table.is_at_rest(piece, stayed) || !is_of_use || !is_current {
            return Ok(false);
        }
        if !self.witness.may_be_called(Instant::now()) {
            return Ok(false);
        }
        collapse::make_own(&mut table, piece)?;
        let called = self.witness.call_for(&table, &[piece]);
        self.no_refold_until = called.err().map(|_| Instant::now() + NO_PROBE_TIME);
        if called != Ok(true) {
            return Ok(false);
        }
        pool.wait_for_locks();
        let began = Instant::now();
        let with = (pagemap, self.section.notes(), &**self.section.following(), &mut self.witness);
        let is_collapsed = collapse::collapse_piece(&mut table, with, (piece, traits), copy, generation)?;
        stats.stalls.add(micros(began.elapsed()));
        if is_collapsed && is_huge {
            rounds.know_huge(piece.start);
        }
        Ok(is_collapsed)
    }

    /// Puts anonymous memory where the program has discarded folded pages, as far as these have lost their page table
    /// entries. From there on, the kernel alone serves it.
    ///
    /// # Errors
    /// The kernel refused to look.
    pub fn settle_discards(&mut self, pagemap: &Pagemap) -> host::Result<()> {
        let following = Arc::clone(self.section.following());
        let discarded: Vec<PageRange> = following.hold().all_discarded().ranges().collect();
        for (piece, _) in discarded.into_iter().flat_map(|range| pieces(range.start, range.pages, Target::Zero)) {
            let mut table = table::lock();
            // Held, so that nobody is given a page of it meanwhile: a page without an entry keeps none.
            let mut held = following.hold();
            for gone in held.all_discarded().within(piece) {
                settle(&mut table, (&following, &mut held), pagemap, gone)?;
            }
            drop(held);
            let _ = following.watch().wake(piece);
        }
        Ok(())
    }

    /// The time until there may be something to collapse.
    pub fn collapse_in(&self, now: Instant) -> Duration {
        self.collapse.due_in(now)
    }

    /// All has been unfolded: much is to be collapsed.
    pub fn hurry_to_collapse(&mut self) {
        self.collapse.hurry(Instant::now());
    }

    fn unfold_piece(&mut self, pagemap: &Pagemap, pool: &Pool, piece: PageRange, target: Target) -> Result<(), Errno> {
        let Target::Slot(slot) = target else { return Ok(()) };
        let mut table = table::lock();
        // The caller looked it up without the lock: it may have changed since.
        let run = SlotRun { start: piece.start, slot, pages: piece.pages as u16 };
        if table.slot_runs(piece) != [run] {
            return Ok(());
        }
        for (part, traits) in table.known(piece) {
            let Some(slot) = slot.add((part.start.page() - piece.start.page()) as u32) else { continue };
            if traits.shut != 0 {
                return Err(Errno::BUSY);
            }
            let view = pool.of(slot).ok_or(Errno::NODEV)?;
            self.unfold.run(&mut table, pagemap, part, (view, slot), traits)?;
            let private = parts(part, |page| table.is_foldable(page));
            let range = |(from, pages)| PageRange { start: part.start.add_pages(from), pages };
            self.section.watch_again(&private.into_iter().map(range).collect::<Vec<_>>());
        }
        Ok(())
    }
}

/// See [`Folder::settle_discards`].
fn settle(
    table: &mut table::Table,
    (following, held): (&Following, &mut Held<'_>),
    pagemap: &Pagemap,
    gone: PageRange,
) -> host::Result<()> {
    let mut entries = Vec::new();
    pagemap.read(gone.start, gone.pages, &mut entries)?;
    let is_absent = |page: PageRange| {
        let entry = &entries[(page.start.page() - gone.start.page()) as usize];
        !entry.present() && !entry.swapped()
    };
    let mut pooled = PageSet::new();
    table.pooled_pages(gone).into_iter().for_each(|range| pooled.insert(range));
    for (from, pages) in parts_by_page(gone, is_absent) {
        let absent = PageRange { start: gone.start.add_pages(from), pages };
        for range in pooled.within(absent) {
            for (part, traits) in table.known(range) {
                if following.may_replace(part, traits, Kind::Pool) && hooks::map_discarded(part, traits) {
                    table.discard(part);
                    held.forget(part);
                }
            }
        }
    }
    // Nothing needs to be remembered of other memory: it was unmapped, or is private.
    pooled.missing(gone).into_iter().for_each(|range| held.forget(range));
    Ok(())
}

/// The parts of a piece for which this is true, as first page and number of pages.
fn parts(piece: PageRange, is_so: impl Fn(PageRange) -> bool) -> Vec<(u64, u64)> {
    if is_so(piece) { vec![(0, piece.pages)] } else { parts_by_page(piece, is_so) }
}

/// The same, where only single pages can be asked about.
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

/// Takes those pages as folded that map the kernel's zero page, and returns them. The kernel has put it in the place
/// of zeros when their huge page was split.
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

/// Makes pages private that the kernel still takes for shared: a child that shared them is gone, and they were not
/// written since. This does to them what a write does, if nobody else maps them. The kernel does not copy them then.
/// They can be folded when they have rested again.
pub fn reclaim(pagemap: &Pagemap, range: PageRange) {
    let mut entries = Vec::new();
    let _table = table::lock();
    if pagemap.read(range.start, range.pages, &mut entries).is_ok()
        && entries.iter().all(|e| e.present() && e.exclusive() && !e.file_or_shared())
    {
        // If it fails, they stay as they are.
        let _ = make_private(range);
    }
}

/// Finds folded pages that the member has written since: they have become its own, and their slots are released. Where
/// writes are not noted, it also finds pages that were folded as zeros.
///
/// # Errors
/// The kernel refused to look.
pub fn find_broken(pagemap: &Pagemap) -> host::Result<()> {
    for span in crate::round::spans() {
        let private = pagemap.private_ranges(span.start, span.end())?;
        let mut table = table::lock();
        for range in private {
            for run in table.slot_runs(range) {
                table.set_broken(PageRange { start: run.start, pages: run.pages.into() });
            }
            for zeroed in table.zeroed_pages(range) {
                table.set_pending(zeroed);
            }
        }
    }
    Ok(())
}

/// Copies pages into the donation window, in the order asked. Says which of them are there.
pub fn donate(section: &Section, window: &OwnedFd, runs: &[PageRange]) -> Vec<bool> {
    let mut given = Vec::new();
    for run in runs {
        let at = given.len() as u64;
        // Held, so that the pages still are what the table says when they are read.
        let table = table::lock();
        let may = |range| table.is_refoldable(range) || table.is_foldable(range) && section.may_touch(range);
        let page = |n| PageRange { start: run.start.add_pages(n), pages: 1 };
        let open = if may(*run) { run.pages } else { (0..run.pages).take_while(|n| may(page(*n))).count() as u64 };
        let written = act::write_pages(window, at, PageRange { pages: open, ..*run });
        given.extend((0..run.pages).map(|n| n < written));
    }
    given
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
    std::fs::File::open("/proc/self/maps").and_then(lines).unwrap_or(0)
}

#[cfg(test)]
mod tests;
