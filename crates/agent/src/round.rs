//! A round: which pages were written since the last one, which of the others are to be fingerprinted, and when to look
//! again.
//!
//! ```text
//!            written                      not written in a whole round
//!   page -------------> pending, watched ------------------------------> rested: fingerprinted, reported
//!    ^                     |   ^                                             |
//!    |                     `---' written again                               | written
//!    `-----------------------------------------------------------------------'
//! ```
//!
//! Where the kernel notes writes (`WP_ASYNC`), a round costs what was written, not what is there. A page that is noted
//! costs its writer one fault, about as much as it costs us to look at it, so rounds come the further apart the more is
//! written: together they may take a four-hundredth of a processor; a hundredth where it depends on the moment what is folded; and a
//! twenty-fifth in the first minute in which much is written, and for some seconds after it, when what was is folded. Where the kernel
//! cannot, all small pages are fingerprinted each round, and one that has the fingerprint of the last round has rested.
//!
//! Pages that were broken inside a mapping of the pool are not watched either: that would take another change of each mapping.
//! They are fingerprinted now and then, have rested when that stays the same, and are looked at the more seldom the less they rest,
//! but every few seconds where much has begun to be written, and for some seconds after it.
//!
//! Huge pages are not watched, because a watched huge page is split by the first write. They are fingerprinted whole, and
//! again after a time that doubles while they stay as they are; that some of their pages have changed is seen by that.
//!
//! Which of the pages that rest are worth folding depends on when much was written last ([`Turnover`]).

mod broken;
mod huge;
mod ranges;

use crate::cpu_time::cpu_time;
use crate::table;
use crate::turnover::{Calm, Change, Turnover, Worth};
use broken::{AGAIN, BrokenPageList};
use host::{HUGE_PAGES, Pagemap, SoftReader, Userfault, Watch};
use huge::HugePageList;
use page::{Fingerprint, HostVirt, PageRange};
use ranges::{between, common, gaps, overlapping};
use rustix::time::ClockId;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::time::{Duration, Instant};

/// What a round and the faults it causes may take of a processor, one part in so many, and how close they come at most: where little
/// changes or much does for long, where pages are to be folded soon after they were written, and where many are.
const QUIET: (u32, Duration) = (400, CLOSEST);
const BUSY: (u32, Duration) = (100, CLOSEST);
const BUSIEST: (u32, Duration) = (25, Duration::from_secs(1));
const CLOSEST: Duration = Duration::from_millis(100);
/// They come no further apart, whatever that takes.
const FURTHEST: Duration = Duration::from_secs(10);
/// What a round may take while pages are being folded.
const HURRIED_SHARE: u32 = 10;
/// What it costs to note a page again, and its writer to write it.
const NOTE_COST: Duration = Duration::from_micros(1);
/// What it costs to fold a page.
const FOLD_COST: Duration = Duration::from_micros(4);
/// Stands for a page of a huge page that is not to be folded.
pub const HIDDEN: Fingerprint = Fingerprint(0);
/// Pages that are read at once, and that one of the program's threads may have to wait for.
const AT_ONCE_PAGES: u64 = 64;
/// Pages that are looked at for writes with the table's lock held: 16 MiB, some 0.2 ms.
const LOOK_PAGES: u64 = 4096;
/// Ranges that are looked up one by one.
const FEW: usize = 32;
/// What pages are that have rested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Small private pages.
    Small,
    /// One huge page.
    Huge,
    /// Private pages in a mapping of the pool.
    Broken,
}

/// Pages that have rested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rested {
    /// Where.
    pub range: PageRange,
    /// What they are.
    pub kind: Kind,
}

/// See the module's story.
pub struct Rounds {
    notes_writes: bool,
    next: Instant,
    last: Instant,
    cost: Duration,
    huge: HugePageList,
    turnover: Turnover,
    /// Nobody asks whether it will last.
    eager: bool,
    broken: BrokenPageList,
    began: Instant,
    /// Fingerprints of the last round, where writes are not noted.
    seen: BTreeMap<u64, u64>,
    rested: VecDeque<Rested>,
    /// Where the last search that came to the end of its budget ended, where writes are not noted.
    from: HostVirt,
    generation: u64,
    armed: Instant,
    reader: SoftReader,
}

impl Rounds {
    /// Before the first round.
    ///
    /// # Errors
    /// Memory or descriptors are short.
    pub fn new(notes_writes: bool, eager: bool) -> io::Result<Self> {
        let now = Instant::now();
        Ok(Self {
            notes_writes,
            next: now,
            last: now,
            cost: Duration::ZERO,
            huge: HugePageList::default(),
            turnover: Turnover::new(now),
            eager,
            broken: BrokenPageList::default(),
            began: now,
            seen: BTreeMap::new(),
            rested: VecDeque::new(),
            from: HostVirt(0),
            generation: u64::MAX,
            armed: now,
            reader: SoftReader::new(AT_ONCE_PAGES)?,
        })
    }

    /// How long until the next round.
    pub fn due_in(&self, now: Instant) -> Duration {
        if self.rested.is_empty() { self.next.saturating_duration_since(now) } else { Duration::ZERO }
    }

    /// Looks at all that was asked in. `rate` bounds what may rest; `huge` says whether huge pages are wanted. Returns how many
    /// pages it looked at.
    ///
    /// # Errors
    /// The kernel refused to look.
    pub fn look(
        &mut self,
        pagemap: &Pagemap,
        notes: Option<&Userfault>,
        rate: Option<u32>,
        huge: bool,
    ) -> host::Result<u64> {
        let now = Instant::now();
        if !self.rested.is_empty() || now < self.next {
            return Ok(0);
        }
        let (elapsed, before) = (now - self.last, cpu_time(ClockId::ThreadCPUTime));
        let budget = rate.map_or(u64::MAX, |rate| (f64::from(rate) * elapsed.as_secs_f64()) as u64 + 1);
        self.last = now;
        let spans = spans();
        let armed = notes.map_or(Ok(false), |notes| self.arm(pagemap, notes, &spans, now))?;
        let (mut written, mut pages) = (Vec::new(), 0);
        for span in &spans {
            pages += span.pages;
            written.append(&mut if self.notes_writes {
                take_written(pagemap, *span)?
            } else {
                pagemap.small_ranges(span.start, span.end())?
            });
        }
        let (written, new) = self.tell_new(written, armed);
        let split = if huge { self.look_at_huge(pagemap, &spans, budget, now)? } else { 0 };
        let (changed, folds) = {
            let mut table = table::lock();
            (table.take_written(), table.take_folds())
        };
        self.turnover.add(changed, pages, now);
        self.turnover.judge(&folds, now);
        let worth = self.worth(now);
        let rested = if self.notes_writes {
            table::lock().rest((&written, &new), budget, worth)
        } else {
            self.within(&foldable(&written), budget)
        };
        self.keep_present(pagemap, &spans, &rested)?;
        let noted: u64 = written.iter().map(|range| range.pages).sum();
        let noted = noted.saturating_sub(split);
        let cost = cpu_time(ClockId::ThreadCPUTime).saturating_sub(before)
            + NOTE_COST * u32::try_from(noted).unwrap_or(u32::MAX);
        self.cost = cost;
        let pace = if self.eager { BUSY } else { pace(self.change(now)) };
        self.next = now + apart(cost, pace);
        Ok(pages)
    }

    /// So many pages were folded: what that leaves behind is looked at sooner, if looking is the lesser part of the work.
    pub fn hurry(&mut self, folded: usize) {
        if FOLD_COST * u32::try_from(folded).unwrap_or(u32::MAX) < self.cost {
            return;
        }
        self.next = self.next.min(self.last + (self.cost * HURRIED_SHARE).max(CLOSEST));
    }

    /// Begins to watch what is not watched yet: memory that was asked in, opened or made private since. Says whether there
    /// was any.
    fn arm(&mut self, pagemap: &Pagemap, notes: &Userfault, spans: &[PageRange], now: Instant) -> host::Result<bool> {
        let generation = table::lock().generation();
        if generation == self.generation && now < self.armed {
            return Ok(false);
        }
        (self.generation, self.armed) = (generation, now + Duration::from_secs(5));
        let mut unwatched = Vec::new();
        for span in spans {
            unwatched.append(&mut pagemap.unwatched_ranges(span.start, span.end())?);
        }
        if unwatched.is_empty() {
            return Ok(false);
        }
        let table = table::lock();
        let mut open = Vec::new();
        table.foldable(&mut open);
        for range in overlapping(&open, &unwatched) {
            // What cannot be registered is not ours to fold; the section finds that out by itself.
            let _ = notes.register(range, Watch::Writes);
        }
        Ok(true)
    }

    /// Which pages are worth folding.
    fn worth(&self, now: Instant) -> Worth {
        if self.eager { Worth::All } else { self.turnover.worth(now) }
    }

    /// Whether little changes.
    pub fn calm(&self, now: Instant) -> Option<Calm> {
        self.turnover.calm(now)
    }

    /// How much there is to see.
    pub fn change(&self, now: Instant) -> Change {
        if self.eager { Change::Little } else { self.turnover.change(now) }
    }

    /// Tells what was written from what is only new to us: it has just begun to be watched, or was part of a huge page.
    fn tell_new(&mut self, found: Vec<PageRange>, armed: bool) -> (Vec<PageRange>, Vec<PageRange>) {
        let split = self.huge.take_split();
        match (armed, self.notes_writes) {
            (true, _) => return (Vec::new(), found),
            (_, false) => return (found, Vec::new()),
            _ => {}
        }
        (common(&found, &gaps(&split, table::everything().end())), common(&found, &split))
    }

    /// At most so many of these pages, from where the last search ended.
    fn within(&mut self, ranges: &[PageRange], mut budget: u64) -> Vec<PageRange> {
        let behind = common(ranges, &[between(self.from, table::everything().end())]);
        let before = common(ranges, &[between(HostVirt(0), self.from)]);
        let mut found = Vec::new();
        for range in behind.into_iter().chain(before) {
            let pages = range.pages.min(budget);
            if pages == 0 {
                break;
            }
            budget -= pages;
            self.from = range.start.add_pages(pages);
            found.push(PageRange { pages, ..range });
        }
        found
    }

    /// Keeps of what has rested what is there; to read the rest would bring it back from swap.
    fn keep_present(&mut self, pagemap: &Pagemap, spans: &[PageRange], rested: &[PageRange]) -> host::Result<()> {
        // They come in the order of a search that begins anywhere.
        let mut rested = rested.to_vec();
        rested.sort_unstable_by_key(|range| range.start);
        // Few are asked for one by one; of many, it is cheaper to look at all.
        let mut present = Vec::new();
        for range in if rested.len() > FEW { spans } else { &rested[..] } {
            present.append(&mut pagemap.small_ranges(range.start, range.end())?);
        }
        let there = common(&present, &rested);
        self.rested.extend(there.into_iter().map(|range| Rested { range, kind: Kind::Small }));
        Ok(())
    }

    /// Returns how many pages are no longer parts of huge pages.
    fn look_at_huge(&mut self, pagemap: &Pagemap, spans: &[PageRange], budget: u64, now: Instant) -> host::Result<u64> {
        let mut there = Vec::new();
        for span in spans {
            there.append(&mut pagemap.huge_ranges(span.start, span.end())?);
        }
        let look = self.huge.look(&there, budget, now);
        self.rested.extend(look.due.into_iter().map(|range| Rested { range, kind: Kind::Huge }));
        Ok(look.split)
    }

    /// Fingerprints the next of what has rested, at most about `most` pages; calls `each` with every piece of consecutive
    /// pages and their fingerprints. Returns how many pages were read.
    pub fn fingerprint(&mut self, most: u64, mut each: impl FnMut(Rested, &[Fingerprint])) -> u64 {
        let (mut read, mut fingerprints) = (0, Vec::with_capacity(HUGE_PAGES as usize));
        while read < most
            && let Some(mut next) = self.rested.pop_front()
        {
            if next.kind != Kind::Huge && next.range.pages > HUGE_PAGES {
                let behind =
                    PageRange { start: next.range.start.add_pages(HUGE_PAGES), pages: next.range.pages - HUGE_PAGES };
                self.rested.push_front(Rested { range: behind, ..next });
                next.range.pages = HUGE_PAGES;
            }
            fingerprints.clear();
            read_pages(next, &mut self.reader, &mut fingerprints);
            let done = fingerprints.len() as u64;
            read += done.max(1);
            if done < next.range.pages {
                if next.kind == Kind::Huge {
                    continue;
                }
                // The page behind may not be folded any more; those further on may.
                let behind =
                    PageRange { start: next.range.start.add_pages(done + 1), pages: next.range.pages - done - 1 };
                if behind.pages > 0 {
                    self.rested.push_front(Rested { range: behind, ..next });
                }
                next.range.pages = done;
            }
            if done > 0 {
                self.sort_out(next, &fingerprints, &mut each);
            }
        }
        read
    }

    /// These pages have rested, and nothing came of it: they are to be reported again.
    pub fn take_back(&mut self, pages: &[Rested]) {
        let mut table = table::lock();
        for Rested { range, kind } in pages {
            match kind {
                Kind::Broken => self.broken.tell_again(*range),
                _ if self.notes_writes => table.set_pending(*range),
                _ => {
                    for page in range.start.page()..range.end().page() {
                        self.seen.remove(&page);
                    }
                }
            }
        }
    }

    fn sort_out(
        &mut self,
        rested: Rested,
        fingerprints: &[Fingerprint],
        each: &mut impl FnMut(Rested, &[Fingerprint]),
    ) {
        if rested.kind == Kind::Broken {
            let now = Instant::now();
            let (now, wait, worth) = (self.seconds(now), self.first_wait(), self.worth(now));
            let (tell, written) = self.broken.have_rested(rested.range.start, fingerprints, now, (wait, worth));
            let mut table = table::lock();
            written.into_iter().for_each(|range| table.seen_written(range));
            drop(table);
            let mut at = 0;
            for run in tell.chunk_by(|one, next| one == next) {
                if run[0] {
                    let range = PageRange { start: rested.range.start.add_pages(at as u64), pages: run.len() as u64 };
                    each(Rested { range, ..rested }, &fingerprints[at..at + run.len()]);
                }
                at += run.len();
            }
        } else if rested.kind == Kind::Huge {
            self.seen_huge(rested, fingerprints, each);
        } else if self.notes_writes {
            each(rested, fingerprints);
        } else {
            for (n, fingerprint) in fingerprints.iter().enumerate() {
                let start = rested.range.start.add_pages(n as u64);
                // What was reported is remembered as such (its complement), and not reported again until it changes.
                let known = self.seen.insert(start.page(), fingerprint.0);
                if known == Some(fingerprint.0) {
                    self.seen.insert(start.page(), !fingerprint.0);
                    each(Rested { range: PageRange { start, pages: 1 }, kind: Kind::Small }, &fingerprints[n..=n]);
                } else if known == Some(!fingerprint.0) {
                    self.seen.insert(start.page(), !fingerprint.0);
                }
            }
        }
    }

    /// Has a huge page's pages rested that have stayed as they are.
    fn seen_huge(
        &mut self,
        rested: Rested,
        fingerprints: &[Fingerprint],
        each: &mut impl FnMut(Rested, &[Fingerprint]),
    ) {
        let worth = self.worth(Instant::now());
        let seen = self.huge.seen(rested.range.start, fingerprints, worth == Worth::All);
        let open = {
            let mut table = table::lock();
            seen.changed.iter().for_each(|range| table.seen_written(*range));
            table.worth_folding(rested.range, worth)
        };
        // What has just come to be may change the next moment; nobody can know yet.
        if open.is_empty() || seen.was_new && !self.eager {
            return;
        }
        let mut shown = [HIDDEN; HUGE_PAGES as usize];
        for range in open {
            let first = (range.start.page() - rested.range.start.page()) as usize;
            let pages = first..first + range.pages as usize;
            shown[pages.clone()].copy_from_slice(&fingerprints[pages]);
        }
        each(rested, &shown);
    }

    /// Where the huge page begins that a page is part of, as far as was seen; it is to be split now.
    pub fn split(&mut self, page: HostVirt) -> Option<HostVirt> {
        self.huge.split(page)
    }

    fn seconds(&self, now: Instant) -> u32 {
        u32::try_from((now - self.began).as_secs()).unwrap_or(u32::MAX)
    }

    /// A huge page has come to be whose contents are not new.
    pub fn know_huge(&mut self, start: HostVirt) {
        self.huge.know(start);
    }

    /// Looks which pages are broken, and has those fingerprinted whose time has come. Returns how many these are.
    pub fn look_at_broken(&mut self, now: Instant) -> u32 {
        let ranges = table::lock().refoldable();
        let due = self.broken.look(&ranges, self.seconds(now), (self.first_wait(), self.change(now)));
        let pages = due.iter().map(|range| range.pages).sum::<u64>();
        self.rested.extend(due.into_iter().map(|range| Rested { range, kind: Kind::Broken }));
        u32::try_from(pages).unwrap_or(u32::MAX)
    }

    /// When a page that is newly broken is looked at again, in seconds.
    const fn first_wait(&self) -> u32 {
        if self.eager { 0 } else { AGAIN.0 }
    }

    /// Everything is to be reported again.
    pub fn again(&mut self, pagemap: &Pagemap) -> host::Result<()> {
        self.huge.forget();
        self.seen.clear();
        self.broken.tell_again(table::everything());
        for span in spans() {
            let present = pagemap.small_ranges(span.start, span.end())?;
            let mut table = table::lock();
            present.into_iter().for_each(|range| table.set_pending(range));
        }
        Ok(())
    }
}

const fn pace(change: Change) -> (u32, Duration) {
    match change {
        Change::Little | Change::MuchForLong => QUIET,
        Change::Some => BUSY,
        Change::Much => BUSIEST,
    }
}

/// How far rounds that cost so much come apart.
fn apart(cost: Duration, (share, closest): (u32, Duration)) -> Duration {
    (cost * share).clamp(closest, FURTHEST)
}

/// What was asked in, in stretches.
pub fn spans() -> Vec<PageRange> {
    let known = table::lock().known(table::everything());
    let mut spans: Vec<PageRange> = Vec::new();
    for (range, _) in known.into_iter().filter(|(_, traits)| traits.asked) {
        match spans.last_mut() {
            Some(last) if last.end() == range.start => last.pages += range.pages,
            _ => spans.push(range),
        }
    }
    spans
}

/// Takes what was written since it was last asked. Where the program has a userfaultfd of its own, that is its to ask, and taking it
/// would take it away: so the table's lock is held, without which it cannot register one.
fn take_written(pagemap: &Pagemap, span: PageRange) -> host::Result<Vec<PageRange>> {
    let (mut written, mut at) = (Vec::new(), 0);
    while at < span.pages {
        let piece = PageRange { start: span.start.add_pages(at), pages: LOOK_PAGES.min(span.pages - at) };
        let table = table::lock();
        for (part, _) in table.known(piece).into_iter().filter(|(_, traits)| traits.asked && !traits.is_yielded()) {
            written.append(&mut pagemap.take_written(part.start, part.end())?);
        }
        at += piece.pages;
    }
    Ok(written)
}

/// Of these ranges, what may be folded.
fn foldable(ranges: &[PageRange]) -> Vec<PageRange> {
    let mut open = Vec::new();
    table::lock().foldable(&mut open);
    common(&open, ranges)
}

/// Reads pages up to the first that may not be folded or is not there any more, and appends their fingerprints.
fn read_pages(rested: Rested, reader: &mut SoftReader, fingerprints: &mut Vec<Fingerprint>) {
    let range = rested.range;
    let may = |table: &table::Guard, range| match rested.kind {
        Kind::Broken => table.is_refoldable(range),
        Kind::Small | Kind::Huge => table.is_foldable(range),
    };
    let mut done = 0;
    while done < range.pages {
        let piece = PageRange { start: range.start.add_pages(done), pages: (range.pages - done).min(AT_ONCE_PAGES) };
        // Held, so that the pages are what they are thought to be.
        let table = table::lock();
        let page = |n| PageRange { start: piece.start.add_pages(n), pages: 1 };
        let open = if may(&table, piece) {
            piece.pages
        } else {
            (0..piece.pages).take_while(|n| may(&table, page(*n))).count() as u64
        };
        let read = reader.read(PageRange { pages: open, ..piece });
        drop(table);
        fingerprints.extend((0..read).map(|n| Fingerprint::of(reader.page(n))));
        if (read as u64) < piece.pages {
            return;
        }
        done += piece.pages;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::{MemberMemory, Purpose};

    fn ranges(list: &[(u64, u64)]) -> Vec<PageRange> {
        list.iter().map(|&(page, pages)| PageRange { start: HostVirt(page << 12), pages }).collect()
    }

    #[test]
    fn dear_rounds_come_seldom_also_while_much_changes() {
        let seconds = |cost: u64| {
            [Change::Much, Change::Some, Change::Little, Change::MuchForLong]
                .map(|change| apart(Duration::from_millis(cost), pace(change)).as_secs_f32())
        };
        assert_eq!(seconds(0), [1.0, 0.1, 0.1, 0.1]);
        assert_eq!(seconds(20), [1.0, 2.0, 8.0, 8.0]);
        assert_eq!(seconds(200), [5.0, 10.0, 10.0, 10.0]);
    }

    /// Fresh pages, each with its own content, asked in.
    fn written(pages: u64) -> MemberMemory {
        let memory = MemberMemory::new(pages).unwrap();
        table::lock().ask(memory.range());
        (0..pages).for_each(|n| write(&memory, n, n + 1));
        memory
    }

    fn write(memory: &MemberMemory, page: u64, word: u64) {
        let at = memory.range().start.add_pages(page).0 as usize as *mut u64;
        // SAFETY: aligned and within the mapping, which lives as long as `memory`.
        unsafe { at.write_volatile(word) };
    }

    /// The pages that one round reports, of this memory.
    fn round(rounds: &mut Rounds, guard: &Userfault, memory: &MemberMemory, rate: Option<u32>) -> Vec<u64> {
        let pagemap = Pagemap::open(std::process::id()).unwrap();
        while !rounds.due_in(Instant::now()).is_zero() {
            std::thread::sleep(Duration::from_millis(5));
        }
        rounds.look(&pagemap, rounds.notes_writes.then_some(guard), rate, false).unwrap();
        let (mut found, all) = (Vec::new(), memory.range());
        while rounds.due_in(Instant::now()).is_zero() {
            rounds.fingerprint(u64::MAX, |rested, fingerprints| {
                assert_eq!(rested.range.pages, fingerprints.len() as u64);
                let pages = (0..rested.range.pages).map(|n| rested.range.start.add_pages(n));
                found.extend(
                    pages.filter(|at| (all.start..all.end()).contains(at)).map(|at| at.page() - all.start.page()),
                );
            });
            if rounds.rested.is_empty() {
                break;
            }
        }
        found.sort_unstable();
        found
    }

    #[test]
    fn pages_that_were_not_written_for_a_round_are_reported_once() {
        let Ok(guard) = Userfault::open(Purpose::Note) else { return eprintln!("skipped: no userfaultfd") };
        table::lock().follow_forks(true);
        for notes_writes in [true, false] {
            let memory = written(8);
            // What other tests of this process write makes it busy.
            let mut rounds = Rounds::new(notes_writes, true).unwrap();
            assert_eq!(round(&mut rounds, &guard, &memory, None), []);
            write(&memory, 5, 50);
            assert_eq!(round(&mut rounds, &guard, &memory, None), [0, 1, 2, 3, 4, 6, 7]);
            assert_eq!(round(&mut rounds, &guard, &memory, None), [5]);
            assert_eq!(round(&mut rounds, &guard, &memory, None), []);
            write(&memory, 0, 10);
            assert_eq!(round(&mut rounds, &guard, &memory, None), []);
            assert_eq!(round(&mut rounds, &guard, &memory, None), [0]);
            // What could not be made use of is reported until it can be.
            let range = PageRange { start: memory.range().start.add_pages(3), pages: 2 };
            for _ in 0..2 {
                rounds.take_back(&[Rested { range, kind: Kind::Small }]);
                let twice = [(); 2].map(|()| round(&mut rounds, &guard, &memory, None));
                assert_eq!(twice.concat(), [3, 4], "{notes_writes}");
            }
            table::lock().forget(memory.range());
        }
    }

    #[test]
    fn a_budget_goes_round() {
        let mut rounds = Rounds::new(false, false).unwrap();
        let all = ranges(&[(0, 10), (20, 4)]);
        let mut seen = BTreeMap::<u64, u32>::new();
        for _ in 0..6 {
            let part = rounds.within(&all, 7);
            assert_eq!(part.iter().map(|range| range.pages).sum::<u64>(), 7);
            part.iter()
                .flat_map(|r| r.start.page()..r.end().page())
                .for_each(|page| *seen.entry(page).or_default() += 1);
        }
        assert_eq!(seen.len(), 14);
        assert!(seen.values().all(|times| *times == 3), "{seen:?}");
    }
}
