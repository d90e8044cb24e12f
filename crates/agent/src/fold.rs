//! What a worker asks for: pages to be shown, pages to be folded, everything to be unfolded; and finding out which folded
//! pages the member has written since.

use crate::cpu_time::cpu_time;
use crate::follow::{Following, Held};
use crate::maps::Kind;
use crate::patience::Patience;
use crate::pool::Pool;
use crate::refold::{self, Part};
use crate::regain::{self, Regain};
use crate::round::Rounds;
use crate::section::{Section, Source, pieces};
use crate::table;
use crate::unfold::Unfold;
use crate::witness::Witness;
use crate::{arena, doors, references};
use host::{MemberMemory, Pagemap, SoftReader, make_private};
use page::{HostVirt, PageRange, PageSet};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::time::ClockId;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use wire::{FoldRun, MemberStats, Outcome, SlotRun, Target};

/// Mappings are counted anew after so long, and for so small a part of a processor; or when by the most careful account there
/// may be no more to spend.
const COUNT_EVERY: (Duration, u32) = (Duration::from_secs(10), 2000);
/// More than what one message to fold makes the table grow by: a chunk for each of its pages.
const NOTES_BYTES: usize = wire::FOLD_PAGES * (4 << 10);
/// Where no shadow can be cast, that is tried again after so long.
const NO_SHADOW_TIME: Duration = Duration::from_secs(60);
/// Where the prover has much to do, pages are asked about once more, so often for one message.
const LATE_TRIES: usize = 8;
/// After having run for so long, the agent lets others run before pages go out of reach: it would soon lose its processor anyway, and
/// while pages are out, their users would wait for all who run then. It is less than what the kernel gives a thread at a time.
const TURN: Duration = Duration::from_millis(1);
/// Pieces of memory between two looks at how long it has run: 100 us at least.
const PIECES_A_TURN: u32 = 4;
/// Runs that one look at the list of folded pages unfolds before others get their turn.
const UNFOLD_AT_ONCE: usize = 256;

/// What folding and unfolding take, and how many mappings they may use.
pub struct Folder {
    section: Section,
    unfold: Unfold,
    reader: SoftReader,
    witness: Witness,
    regain: Regain,
    no_refold_until: Option<Instant>,
    patience: Patience,
    /// What this thread had run when it let others run last.
    turn_began: Duration,
    asked_turns: u32,
    surveyed: Result<u64, references::Reason>,
    most_vmas: u64,
    vmas: u64,
    runs_since_count: u64,
    count_due: Instant,
}

impl Folder {
    /// With at most so many mappings in the whole process.
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
            regain: Regain::new(Instant::now()),
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

    /// The userfaultfd that pages are moved with.
    pub const fn section(&self) -> &Section {
        &self.section
    }

    /// From here on, memory is followed by another one. Nothing may lie in mappings of the pool.
    pub fn follow_by(&mut self, following: &Arc<Following>) {
        self.section.follow_by(Arc::clone(following));
        self.unfold = Unfold::new(Arc::clone(following));
    }

    /// Why nothing may be folded, if something may write this process's memory without pinning it.
    pub fn unpinned(&self) -> Option<&references::Reason> {
        self.surveyed.as_ref().err()
    }

    /// Mappings, as last counted.
    pub const fn vmas(&self) -> u64 {
        self.vmas
    }

    /// Whether no more mappings may be spent.
    pub const fn is_out_of_vmas(&self) -> bool {
        self.vmas + 2 * self.runs_since_count + 4 >= self.most_vmas
    }

    /// Pages of the range that were tried too short a time ago.
    pub fn waiting(&self, range: PageRange) -> impl Iterator<Item = PageRange> {
        self.patience.waiting(range, Instant::now())
    }

    /// Looks at what this process has open.
    pub fn survey(&mut self) {
        // Counted before: what is opened while we look is looked at next time.
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

    /// Replaces pages, and says what became of each, in order.
    /// Huge pages that are known to `rounds` are split first.
    pub fn fold(
        &mut self,
        runs: &[FoldRun],
        pool: &Pool,
        (pagemap, rounds): (&Pagemap, &mut Rounds),
        stats: &mut MemberStats,
    ) -> Vec<Outcome> {
        self.survey();
        // What is noted of folded pages must find memory, because nothing can be done about it when pages are out.
        if !arena::ensure(NOTES_BYTES) {
            stats.failures.add(Outcome::NoMemory, runs.iter().map(|run| u64::from(run.pages)).sum());
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
                    stats.failures.add(*outcome, 1);
                    self.patience.failed(page, now);
                    let page = PageRange { start: page, pages: 1 };
                    // With the table's lock held, or ours could come before a userfaultfd that the program is just registering.
                    let may_touch = |table: &table::Guard| table.is_foldable(page) && self.section.may_touch(page);
                    if *outcome == Outcome::Busy && may_touch(&table::lock()) {
                        reclaim(pagemap, page);
                    }
                }
            }
        }
        all
    }

    /// Lets others run, if it is time for that. No lock is to be held.
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

    /// Makes ready for those pages of the runs that are broken.
    fn begin_to_refold(&mut self, runs: &[FoldRun], pagemap: &Pagemap) {
        let table = table::lock();
        let ranges = runs.iter().map(|run| PageRange { start: run.start, pages: run.pages.into() });
        let broken: Vec<PageRange> = ranges.flat_map(|range| table.broken_pages(range)).collect();
        if !broken.is_empty() && self.surveyed.is_ok() {
            let called = self.witness.call(&table, pagemap, &broken);
            self.no_refold_until = called.err().map(|_| Instant::now() + NO_SHADOW_TIME);
        }
    }

    /// Folds parts that were seen to be broken.
    fn fold_again(&mut self, parts: &[Part<'_>], pagemap: &Pagemap, stats: &mut MemberStats, all: &mut [Outcome]) {
        let Ok(generation) = self.surveyed else { return };
        let (mut at, mut tries) = (0, LATE_TRIES);
        while at < parts.len() {
            self.take_turns();
            let mut table = table::lock();
            // The program may have done something to it since it was looked at.
            let still = |part: &Part<'_>| table.is_refoldable(part.range);
            let sound = parts[at..].iter().take_while(|part| still(part)).count();
            if sound == 0 {
                at += 1;
                continue;
            }
            let group = &parts[at..at + sound];
            let with = (pagemap, &**self.section.following(), &mut self.reader, &mut self.witness);
            let (done, took) = refold::some(&mut table, with, group, generation, all);
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
                stats.refolds += outcomes.iter().filter(|o| **o == Outcome::Folded).count() as u64;
                self.runs_since_count += 1;
            }
            at += done;
        }
    }

    /// Ends what has served its time. Says how long something else may still be of use.
    pub fn rest(&mut self) -> Option<Duration> {
        self.witness.rest()
    }

    /// Whether broken pages could be folded again when that was last tried.
    pub fn may_refold(&self, now: Instant) -> bool {
        self.no_refold_until.is_none_or(|until| until <= now)
    }

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
                for (from, pages) in parts(piece, |page| table.is_refoldable(page)) {
                    let part = PageRange { start: piece.start.add_pages(from), pages };
                    let source = source.and_then(|s| s.first.add(from as u32).map(|first| Source { first, ..s }));
                    again.push(Part { range: part, source, at: all.len() + from as usize });
                }
                for (from, pages) in parts(piece, |page| table.is_foldable(page)) {
                    let part = PageRange { start: piece.start.add_pages(from), pages };
                    for huge in
                        [part.start, part.start.add_pages(part.pages - 1)].into_iter().filter_map(|at| rounds.split(at))
                    {
                        stats.stalls.add(micros(split(huge)));
                    }
                    let source = source.and_then(|s| s.first.add(from as u32).map(|first| Source { first, ..s }));
                    let zeros = if source.is_none() { take_zeros(&mut table, pagemap, part) } else { Vec::new() };
                    let part_outcomes = &mut outcomes[from as usize..(from + pages) as usize];
                    part_outcomes.fill(Outcome::Folded);
                    for (from, pages) in
                        parts(part, |page| !zeros.iter().any(|zero| zero.start < page.end() && page.start < zero.end()))
                    {
                        let left = PageRange { start: part.start.add_pages(from), pages };
                        let outcomes = &mut part_outcomes[from as usize..(from + pages) as usize];
                        let took = self.section.fold(&mut table, left, source, generation, outcomes);
                        stats.stalls.add(micros(took));
                    }
                    self.runs_since_count += u64::from(source.is_some());
                    if let Some(lost) = doors::lost_heap(part) {
                        // The heap shrank while its last pages were out of it.
                        // SAFETY: it is nobody's: the program gave it back, and what is mapped there is ours.
                        let _ = unsafe { host::unmap(lost) };
                        table.forget(lost);
                    }
                }
            }
        }
        all.extend_from_slice(outcomes);
        if source.is_some() && self.is_out_of_vmas() && self.runs_since_count > self.most_vmas / 16 {
            self.count_due = Instant::now();
            self.tidy();
        }
    }

    /// Unfolds some of what is folded. Returns whether nothing is left.
    ///
    /// # Errors
    /// All was tried, and some could not be unfolded: memory or mappings are short, it is locked, or the program looks after its
    /// faults by itself.
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
        // Zeros that were given back, and pages of pools that nobody knows any more.
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

    /// Makes one piece whole of those in which all but `most` pages are the member's own, and none was written for so many seconds;
    /// if there is one, and it is time.
    ///
    /// # Errors
    /// The kernel refused to look.
    pub fn regain(
        &mut self,
        (pagemap, pool, rounds): (&Pagemap, &Pool, &mut Rounds),
        (most, stayed): (u64, u32),
        stats: &mut MemberStats,
    ) -> host::Result<()> {
        let now = Instant::now();
        if !self.may_refold(now) {
            return Ok(());
        }
        let Some((piece, traits)) = self.regain.next(pagemap, most, now)? else { return Ok(()) };
        let began = Instant::now();
        let is_whole = self.make_whole((pagemap, pool, rounds), (piece, traits), stayed, stats).unwrap_or(false);
        self.regain.done(piece, is_whole, began.elapsed());
        Ok(())
    }

    fn make_whole(
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
        // Without a huge page to be had, there are only mappings to be given back, and nothing that is folded is given up for that.
        let is_of_use = is_huge || table.is_only_broken(piece);
        if table.traits(piece) != Some(traits) || !table.is_at_rest(piece, stayed) || !is_of_use {
            return Ok(false);
        }
        if !self.witness.may_be_called(Instant::now()) {
            return Ok(false);
        }
        regain::make_own(&mut table, piece)?;
        let called = self.witness.call_for(&table, &[piece]);
        self.no_refold_until = called.err().map(|_| Instant::now() + NO_SHADOW_TIME);
        if called != Ok(true) {
            return Ok(false);
        }
        pool.wait_for_locks();
        let began = Instant::now();
        let with = (pagemap, self.section.notes(), &**self.section.following(), &mut self.witness);
        let is_whole = regain::make_whole(&mut table, with, (piece, traits), copy, generation)?;
        stats.stalls.add(micros(began.elapsed()));
        if is_whole && is_huge {
            rounds.know_huge(piece.start);
        }
        Ok(is_whole)
    }

    /// Puts anonymous memory where the program has discarded what was folded, as far as that has lost its page table entries: from
    /// there on, the kernel alone serves it.
    ///
    /// # Errors
    /// The kernel refused to look.
    pub fn settle_discards(&mut self, pagemap: &Pagemap) -> host::Result<()> {
        let following = Arc::clone(self.section.following());
        let discarded: Vec<PageRange> = following.hold().discarded().ranges().collect();
        for (piece, _) in discarded.into_iter().flat_map(|range| pieces(range.start, range.pages, Target::Zero)) {
            let mut table = table::lock();
            // Nobody is given a page of it meanwhile, so what has no entry keeps none.
            let mut held = following.hold();
            for gone in held.discarded().within(piece) {
                settle(&mut table, (&following, &mut held), pagemap, gone)?;
            }
            drop(held);
            let _ = following.watch().wake(piece);
        }
        Ok(())
    }

    /// When there may be something to be made whole.
    pub fn regain_in(&self, now: Instant) -> Duration {
        self.regain.due_in(now)
    }

    /// All has been unfolded: much is to be made whole.
    pub fn hurry_to_regain(&mut self) {
        self.regain.hurry(Instant::now());
    }

    fn unfold_piece(&mut self, pagemap: &Pagemap, pool: &Pool, piece: PageRange, target: Target) -> Result<(), Errno> {
        let Target::Slot(slot) = target else { return Ok(()) };
        let mut table = table::lock();
        // Looked up without the lock: it may not be so any more.
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
            match self.unfold.run(&mut table, pagemap, part, (view, slot), traits) {
                // It was given back, whatever has come there since.
                Err(Errno::STALE) if doors::is_heap(part) => {
                    table.forget(part);
                    continue;
                }
                result => result?,
            }
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
                if following.may_replace(part, traits, Kind::Pool) && doors::map_discarded(part, traits) {
                    table.discard(part);
                    held.forget(part);
                }
            }
        }
    }
    // What is known of other memory is of no use: it was unmapped, or is private.
    pooled.missing(gone).into_iter().for_each(|range| held.forget(range));
    Ok(())
}

/// The parts of a piece that this is true of, as first page and pages.
fn parts(piece: PageRange, is_so: impl Fn(PageRange) -> bool) -> Vec<(u64, u64)> {
    if is_so(piece) { vec![(0, piece.pages)] } else { parts_by_page(piece, is_so) }
}

/// The same, where it can be asked of single pages only.
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

/// Takes pages as folded that map the kernel's zero page, which it has put in the place of zeros when their huge page was split. Returns
/// which they are.
fn take_zeros(table: &mut table::Table, pagemap: &Pagemap, part: PageRange) -> Vec<PageRange> {
    let zeros = pagemap.zero_ranges(part.start, part.end()).unwrap_or_default();
    zeros.iter().for_each(|zeros| table.set_zeroed(*zeros));
    zeros
}

/// Splits a huge page, and says how long that took.
fn split(huge: HostVirt) -> Duration {
    let began = Instant::now();
    host::split_huge_page(huge);
    began.elapsed()
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// A page that was shared with a child which has gone looks shared to the kernel until it is written. Does what a write does,
/// where nobody else maps the page: the kernel takes it as private then, without copying. It can be folded when it has rested
/// again.
pub fn reclaim(pagemap: &Pagemap, range: PageRange) {
    let mut entries = Vec::new();
    let _table = table::lock();
    if pagemap.read(range.start, range.pages, &mut entries).is_ok()
        && entries.iter().all(|e| e.present() && e.exclusive() && !e.file_or_shared())
    {
        // If not, it stays as it is.
        let _ = make_private(range);
    }
}

/// Finds folded pages that the member has written since: they are its own now, and their slots are released. Also pages
/// that were folded as zeros, where writes are not noted.
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

/// Copies pages into the donation window, each to the place it has in the order asked. Says which are there.
pub fn donate(window: &OwnedFd, runs: &[PageRange]) -> Vec<bool> {
    let mut given = Vec::new();
    for run in runs {
        let at = given.len() as u64;
        let written = host::write_pages(window, at, *run);
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
mod tests {
    use super::*;
    use crate::testing::Member;
    use std::sync::atomic::Ordering;

    #[test]
    fn zeros_that_the_kernel_maps_already_are_taken_as_they_are() {
        let member = Member::of(MemberMemory::huge_page(Some(true)).unwrap());
        let (all, pagemap) = (member.0.range(), Pagemap::open(std::process::id()).unwrap());
        for page in 8..16 {
            [0, page::PAGE_BYTES / 8 - 1].iter().for_each(|word| member.word(page, *word).store(0, Ordering::Relaxed));
        }
        if pagemap.huge_ranges(all.start, all.end()).unwrap() != [all] {
            return eprintln!("skipped: no huge page is to be had");
        }
        split(all.start);
        if pagemap.zero_ranges(all.start, all.end()).unwrap().is_empty() {
            return eprintln!("skipped: this kernel leaves zeros where they are");
        }
        let take = |range| take_zeros(&mut table::lock(), &pagemap, range);
        assert_eq!(take(all), [member.run(8, 8)]);
        member.word(9, 0).store(7, Ordering::Relaxed);
        assert_eq!(take(all), [member.run(8, 1), member.run(10, 6)]);
        assert_eq!(take(member.run(9, 1)), []);
        let words = [8, 9, 15, 16].map(|page| member.word(page, 0).load(Ordering::Relaxed));
        assert_eq!(words, [0, 7, 0, 17]);
        let zeroed = table::lock().zeroed_pages(all);
        assert_eq!(zeroed, [member.run(8, 8)], "that one of them was written is found out later");
    }
}
