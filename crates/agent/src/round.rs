//! A round finds the pages that were written since the last round, and those of the other pages that are to be
//! fingerprinted. It also decides when the next round is due.
//!
//! ```text
//!            written                      not written in a whole round
//!   page -------------> pending, watched ------------------------------> rested: fingerprinted, reported
//!    ^                     |   ^                                             |
//!    |                     `---' written again                               | written
//!    `-----------------------------------------------------------------------'
//! ```
//!
//! Where the kernel notes writes (`WP_ASYNC`), the cost of a round depends on the pages that were written, not on all
//! pages. But each note costs the page's writer a fault, which takes about as long as it takes the agent to examine the
//! page. So the more is written, the longer is the time between two rounds. The policy says which share of a
//! processor's time rounds and faults may take together ([`Cadence`]).
//!
//! While little changes, the time between two rounds grows with the time since more changed ([`REST_SHARE`]). Hardly
//! any program writes nothing at all: a member counts as at rest while few of its pages change between two rounds
//! ([`FEW_CHANGE`]).
//!
//! Where the kernel cannot note writes, all small pages are fingerprinted in each round. A page whose fingerprint is
//! that of the last round has rested.
//!
//! Broken pages, which lie in mappings of the pool, are not watched: each mapping would have to be registered in
//! another way. They are fingerprinted now and then, and have rested when their fingerprints stay the same
//! (`round/broken.rs`).
//!
//! Huge pages are not watched, because the first write splits a watched huge page. They are fingerprinted as a whole,
//! which also shows whether some of their pages have changed (`round/huge.rs`).
//!
//! The policy decides which of the pages that rest are worth folding ([`Policy::admit`]).

mod allowance;
mod broken;
mod huge;
mod looks;
mod ranges;
mod why;

use crate::cpu_time::cpu_time;
use crate::table;
use act::{HUGE_PAGES, SoftReader, Userfault, Watch};
use allowance::Allowance;
use broken::BrokenPageList;
use host::{Pagemap, Survey};
use huge::HugePageList;
pub use looks::scan;
use looks::{AT_ONCE_PAGES, by_sharing, foldable, read_pages, survey, take_written};
use page::{Fingerprint, HostVirt, PAGE_SHIFT, PageRange};
use policy::{Cadence, Event, Policy, QuietInterval, TODAY, Worth};
use ranges::{between, common, gaps, overlapping};
use rustix::time::ClockId;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::time::{Duration, Instant};
use wire::Outcome;

/// Longest time between two rounds, even if rounds then take more than their share of a processor's time: 10 s.
const FURTHEST: Duration = Duration::from_secs(10);
/// Share of the time since the member last changed that must pass between two rounds: 1/8.
const REST_SHARE: u32 = 8;
/// Most pages that may change between two rounds of a member at rest: 1/64 of its pages, but at least 64 and at most
/// 1024.
const FEW_CHANGE: (u64, u64, u64) = (64, 64, 1024);
/// Share of a processor's time that rounds may take while pages are being folded: 1/40.
const HURRIED_SHARE: u32 = 40;
/// Processor time that it takes to note a write of a page again, for the agent and for the writer: 1 us.
const NOTE_COST: Duration = Duration::from_micros(1);
/// Processor time that it takes to fold a page: 4 us.
const FOLD_COST: Duration = Duration::from_micros(4);
/// Stands for the fingerprint of a page of a huge page that is not to be folded.
pub const HIDDEN: Fingerprint = Fingerprint(0);
/// Most ranges of pages for which the page table is read range by range, and not for all memory.
const FEW: usize = 32;

/// Kinds of pages that have rested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Small private pages.
    Small,
    /// One huge page.
    Huge,
    /// Private pages in mappings of the pool.
    Broken,
}

/// Pages that have rested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rested {
    /// Their addresses.
    pub range: PageRange,
    /// Their kind.
    pub kind: Kind,
}

/// The rounds of this member: which pages are examined, and when the next round is due.
pub struct Rounds {
    notes_writes: bool,
    clock: Clock,
    watching: Watching,
    policy: Policy,
    /// Whether pages are folded without asking whether the folds will last.
    eager: bool,
    /// Whether pages that another process maps, too, are left out.
    leaves_shared: bool,
    huge: HugePageList,
    broken: BrokenPageList,
    allowed: Allowed,
    compared: Compared,
    rested: VecDeque<Rested>,
    reader: SoftReader,
}

/// When rounds are made.
struct Clock {
    began: Instant,
    next: Instant,
    last: Instant,
    /// Processor time that the last round took, for the agent and for writers.
    cost: Duration,
    /// When more than a few pages were last seen to change.
    last_change: Instant,
    /// Whether no round was made yet.
    is_first: bool,
}

/// Which memory that the table knows is watched: registered, so that the kernel notes writes.
struct Watching {
    /// The table's generation when unwatched memory was last looked for.
    generation: u64,
    /// The table's generation when [`Rounds::notice_changes`] was last called.
    noticed: u64,
    /// When unwatched memory is looked for again, even if the table has not changed.
    armed: Instant,
}

/// Numbers of pages that may be fingerprinted.
struct Allowed {
    /// Number of small pages, including broken ones.
    small: Allowance,
    /// Number of small pages that are parts of huge pages.
    huge: Allowance,
}

/// The last fingerprints of pages; only used where the kernel does not note writes.
struct Compared {
    /// Fingerprints of the last round, by page number.
    seen: BTreeMap<u64, u64>,
    /// Where the last search ended because it had used up its budget.
    from: HostVirt,
}

impl Rounds {
    /// The state before the first round.
    ///
    /// # Errors
    /// Memory or descriptors are short.
    pub fn new(notes_writes: bool, eager: bool) -> io::Result<Self> {
        let now = Instant::now();
        let cost = Duration::ZERO;
        Ok(Self {
            notes_writes,
            clock: Clock { began: now, next: now, last: now, cost, last_change: now, is_first: true },
            watching: Watching { generation: u64::MAX, noticed: u64::MAX, armed: now },
            policy: Policy::new(&TODAY, eager, now),
            eager,
            leaves_shared: false,
            huge: HugePageList::default(),
            broken: BrokenPageList::default(),
            allowed: Allowed { small: Allowance::new(now), huge: Allowance::new(now) },
            compared: Compared { seen: BTreeMap::new(), from: HostVirt(0) },
            rested: VecDeque::new(),
            reader: SoftReader::new(AT_ONCE_PAGES)?,
        })
    }

    /// From here on, pages that another process maps, too, are left out. In a forked child, these are most pages,
    /// shared with its parent. They cannot be folded, but would be fingerprinted in every child, and tried again and
    /// again.
    pub const fn leave_shared(&mut self) {
        self.leaves_shared = true;
    }

    /// The time until the next round.
    pub fn due_in(&self, now: Instant) -> Duration {
        if self.rested.is_empty() { self.clock.next.saturating_duration_since(now) } else { Duration::ZERO }
    }

    /// Makes a round over all enrolled memory, if one is due. `rate`: the most pages that may be fingerprinted in a
    /// second. `huge`: whether huge pages are examined. Returns the number of enrolled pages, or 0 if no round was due.
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
        if !self.rested.is_empty() || now < self.clock.next {
            return Ok(0);
        }
        let before = cpu_time(ClockId::ThreadCPUTime);
        self.clock.last = now;
        // Memory that becomes known after this is found by the next round.
        let generation = table::lock().generation();
        let spans = spans();
        let (armed, found) = self.survey(pagemap, notes, (generation, &spans), now)?;
        let pages = table::lock().counts().enrolled;
        let written = if self.notes_writes {
            take_written(pagemap, &found.written)?
        } else {
            scan(pagemap, &spans, Pagemap::small_ranges)?
        };
        let (written, new) = self.tell_new(written, armed);
        let (changed, folds) = {
            let mut table = table::lock();
            (table.take_written(), table.take_folds())
        };
        self.policy.observe(Event::Round { changed, pages, folds }, now);
        let split = if huge { self.look_at_huge(pagemap, found.huge, rate, now)? } else { 0 };
        let (worth, budget) = (self.policy.admit(now), self.small_left(rate, now));
        let rested = if self.notes_writes {
            table::lock().rest((&written, &new), budget, worth)
        } else {
            self.within(&foldable(&written), budget)
        };
        self.keep_present(pagemap, &spans, &rested)?;
        let noted: u64 = written.iter().map(|range| range.pages).sum();
        let noted = noted.saturating_sub(split);
        self.clock.cost = cpu_time(ClockId::ThreadCPUTime).saturating_sub(before)
            + NOTE_COST * u32::try_from(noted).unwrap_or(u32::MAX);
        // Huge pages do not count: they are examined again and again, and changes in them are known only once they are
        // fingerprinted.
        let small = self.rested.iter().filter(|rested| rested.kind != Kind::Huge);
        let rested: u64 = small.map(|rested| rested.range.pages).sum();
        self.plan(armed || changed.max(noted) + rested > self.may_change(pages), now);
        Ok(pages)
    }

    /// Sets the time of the next round.
    fn plan(&mut self, has_changed: bool, now: Instant) {
        if has_changed {
            self.clock.last_change = now;
        }
        let apart = self.apart(now).max(rest(now - self.clock.last_change));
        // Pages that exist when watching begins can be reported at the second round, so it comes soon.
        let is_first = std::mem::take(&mut self.clock.is_first);
        self.clock.next = now + if is_first { apart.min(self.soon()) } else { apart };
    }

    /// Most pages that may change from one round to the next in a member of `pages` pages that counts as at rest.
    fn may_change(&self, pages: u64) -> u64 {
        let (share, least, most) = FEW_CHANGE;
        if self.eager { 0 } else { (pages / share).clamp(least, most) }
    }

    /// Tells the policy that the program started `age` ago and is idle now.
    pub fn begin_quiet(&mut self, age: Duration, now: Instant) {
        self.policy.observe(Event::Idle { age }, now);
    }

    /// The time between two rounds while pages change.
    fn apart(&self, now: Instant) -> Duration {
        apart(self.clock.cost, self.policy.cadence(now))
    }

    /// If the program has changed known memory since unwatched memory was last looked for, the next round comes sooner.
    pub fn notice_changes(&mut self, now: Instant) {
        self.watching.noticed = table::lock().generation();
        if self.watching.noticed != self.watching.generation {
            self.end_rest(now);
        }
    }

    /// The shortest time between two rounds, by the time since the member last changed.
    pub fn rest_in(&self, now: Instant) -> Duration {
        rest(now - self.clock.last_change)
    }

    /// Whether the program has changed no known memory since [`Rounds::notice_changes`] was last called.
    pub fn has_noticed_all(&self) -> bool {
        table::lock().generation() == self.watching.noticed
    }

    fn end_rest(&mut self, now: Instant) {
        self.clock.last_change = now;
        self.clock.next = self.clock.next.min(self.clock.last + self.apart(now));
    }

    /// Makes the next round come sooner because `folded` pages were folded, if rounds cost less time than folding did.
    pub fn hurry(&mut self, folded: usize) {
        if FOLD_COST * u32::try_from(folded).unwrap_or(u32::MAX) < self.clock.cost {
            return;
        }
        self.clock.next = self.clock.next.min(self.clock.last + self.soon());
    }

    /// The shortest time between two rounds while pages are being folded.
    fn soon(&self) -> Duration {
        (self.clock.cost * HURRIED_SHARE).max(TODAY.seldom.closest)
    }

    /// Asks the kernel which memory is unwatched, written or huge, after all memory that the table knew at `generation`
    /// has come to be watched. Also returns whether some of it was not watched before.
    fn survey(
        &mut self,
        pagemap: &Pagemap,
        notes: Option<&Userfault>,
        (generation, spans): (u64, &[PageRange]),
        now: Instant,
    ) -> host::Result<(bool, Survey)> {
        let found = survey(pagemap, spans)?;
        let armed = notes.is_some_and(|notes| self.arm(notes, generation, &found.unwatched, now));
        Ok((armed, if armed { survey(pagemap, spans)? } else { found }))
    }

    /// Begins to watch memory that is not watched yet, because it was enrolled, became foldable or became private since
    /// the last time. Returns whether there was any.
    fn arm(&mut self, notes: &Userfault, generation: u64, unwatched: &[PageRange], now: Instant) -> bool {
        if generation == self.watching.generation && now < self.watching.armed {
            return false;
        }
        (self.watching.generation, self.watching.armed) = (generation, now + Duration::from_secs(5));
        if unwatched.is_empty() {
            return false;
        }
        let table = table::lock();
        let (mut open, mut is_any) = (Vec::new(), false);
        table.foldable(&mut open);
        for range in overlapping(&open, unwatched) {
            // Memory that cannot be registered cannot be folded, as the section finds out by itself. Each round finds
            // such memory again, and also broken pages, and does not count them as a change.
            is_any |= notes.register(range, Watch::Writes).is_ok();
        }
        is_any
    }

    /// The quiet interval that the member is in; `None` in a burst.
    pub fn quiet(&self, now: Instant) -> Option<QuietInterval> {
        self.policy.quiet(now)
    }

    /// How often the agent looks at the member's memory at this time.
    pub fn cadence(&self, now: Instant) -> Cadence {
        self.policy.cadence(now)
    }

    /// Separates pages that were written from pages that are new to the agent: those that are watched only from now on,
    /// or were parts of huge pages.
    fn tell_new(&mut self, found: Vec<PageRange>, armed: bool) -> (Vec<PageRange>, Vec<PageRange>) {
        let split = self.huge.take_split();
        match (armed, self.notes_writes) {
            (true, _) => return (Vec::new(), found),
            (_, false) => return (found, Vec::new()),
            _ => {}
        }
        (common(&found, &gaps(&split, table::everything().end())), common(&found, &split))
    }

    /// At most `budget` of these pages, beginning where the last search ended.
    fn within(&mut self, ranges: &[PageRange], mut budget: u64) -> Vec<PageRange> {
        let behind = common(ranges, &[between(self.compared.from, table::everything().end())]);
        let before = common(ranges, &[between(HostVirt(0), self.compared.from)]);
        let mut found = Vec::new();
        for range in behind.into_iter().chain(before) {
            let pages = range.pages.min(budget);
            if pages == 0 {
                break;
            }
            budget -= pages;
            self.compared.from = range.start.add_pages(pages);
            found.push(PageRange { pages, ..range });
        }
        found
    }

    /// Queues those of the rested pages that are present to be fingerprinted. Reading the others would bring them back
    /// from swap.
    fn keep_present(&mut self, pagemap: &Pagemap, spans: &[PageRange], rested: &[PageRange]) -> host::Result<()> {
        // The ranges are in the order of a search that may have begun anywhere.
        let mut rested = rested.to_vec();
        rested.sort_unstable_by_key(|range| range.start);
        // Few ranges are asked for one by one; for many, it takes less time to ask for all memory.
        let present = scan(pagemap, if rested.len() > FEW { spans } else { &rested[..] }, Pagemap::small_ranges)?;
        let mut there = common(&present, &rested);
        if self.leaves_shared {
            let (own, shared) = by_sharing(pagemap, &there)?;
            let mut table = table::lock();
            shared.into_iter().for_each(|range| table.set_pending(range));
            there = own;
        }
        self.allowed.small.spend(pages_of(&there));
        self.rested.extend(there.into_iter().map(|range| Rested { range, kind: Kind::Small }));
        Ok(())
    }

    /// Queues huge pages that are due to be fingerprinted. Returns how many pages are no longer parts of huge pages.
    fn look_at_huge(
        &mut self,
        pagemap: &Pagemap,
        mut there: Vec<PageRange>,
        rate: Option<u32>,
        now: Instant,
    ) -> host::Result<u64> {
        if self.leaves_shared {
            let own = by_sharing(pagemap, &there)?.0;
            let whole = |range: PageRange| {
                let [first, end] =
                    [range.start.page().next_multiple_of(HUGE_PAGES), range.end().page() & !(HUGE_PAGES - 1)];
                (first < end).then(|| between(HostVirt(first << PAGE_SHIFT), HostVirt(end << PAGE_SHIFT)))
            };
            there = own.into_iter().filter_map(whole).collect();
        }
        let budget = self.allowed.huge.left(rate.map(huge_part), now);
        let in_burst = matches!(self.policy.admit(now), Worth::Ages(..));
        let look = self.huge.look(&there, budget, in_burst, now);
        self.allowed.huge.spend(pages_of(&look.due));
        self.rested.extend(look.due.into_iter().map(|range| Rested { range, kind: Kind::Huge }));
        Ok(look.split)
    }

    /// Queues a range to be fingerprinted, as if it had rested.
    #[cfg(test)]
    pub fn rest(&mut self, range: PageRange) {
        self.rested.push_back(Rested { range, kind: Kind::Small });
    }

    /// Fingerprints the next pages that have rested, about `most` of them. Calls `each` with every piece of consecutive
    /// pages and their fingerprints. Returns how many pages were read. `notes` is the userfaultfd that notes writes.
    pub fn fingerprint(
        &mut self,
        notes: Option<&Userfault>,
        most: u64,
        mut each: impl FnMut(Rested, &[Fingerprint]),
    ) -> u64 {
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
            read_pages(next, notes, &mut self.reader, &mut fingerprints);
            let done = fingerprints.len() as u64;
            read += done.max(1);
            if done < next.range.pages {
                if next.kind == Kind::Huge {
                    continue;
                }
                // The next page cannot be folded any more; pages behind it may.
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

    /// Has these rested pages reported later: folding them has just failed, or they hold zeros and the member is not
    /// idle.
    pub fn take_back(&mut self, pages: &[Rested]) {
        let mut table = table::lock();
        for Rested { range, kind } in pages {
            match kind {
                Kind::Broken => self.broken.tell_again(*range),
                _ if self.notes_writes => table.set_pending(*range),
                _ => {
                    for page in range.start.page()..range.end().page() {
                        self.compared.seen.remove(&page);
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
            let (second, wait, worth) =
                (self.seconds(now), self.policy.cadence(now).broken_first, self.policy.admit(now));
            let (tell, written) = self.broken.have_rested(rested.range.start, fingerprints, second, (wait, worth));
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
                // For a page that was reported, the complement of the fingerprint is remembered. The page is not
                // reported again until its content changes.
                let known = self.compared.seen.insert(start.page(), fingerprint.0);
                if known == Some(fingerprint.0) {
                    self.compared.seen.insert(start.page(), !fingerprint.0);
                    each(Rested { range: PageRange { start, pages: 1 }, kind: Kind::Small }, &fingerprints[n..=n]);
                } else if known == Some(!fingerprint.0) {
                    self.compared.seen.insert(start.page(), !fingerprint.0);
                }
            }
        }
    }

    /// Reports the pages of a huge page that are worth folding.
    fn seen_huge(
        &mut self,
        rested: Rested,
        fingerprints: &[Fingerprint],
        each: &mut impl FnMut(Rested, &[Fingerprint]),
    ) {
        let worth = self.policy.admit(Instant::now());
        let seen = self.huge.seen(rested.range.start, fingerprints, worth);
        let open = {
            let mut table = table::lock();
            seen.changed.iter().for_each(|range| table.seen_written(*range));
            table.worth_folding(rested.range, worth)
        };
        // A huge page that has just appeared may change the next moment.
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

    /// The start of the huge page that this page is part of, if the list has it; it is removed from the list. The
    /// caller splits it.
    pub fn split(&mut self, page: HostVirt) -> Option<HostVirt> {
        self.huge.split(page)
    }

    fn seconds(&self, now: Instant) -> u32 {
        u32::try_from((now - self.clock.began).as_secs()).unwrap_or(u32::MAX)
    }

    /// Records a huge page that a collapse has made, so that its contents do not count as new.
    pub fn know_huge(&mut self, start: HostVirt) {
        self.huge.know(start);
    }

    /// Number of pages that may be fingerprinted now, not counting huge pages.
    fn small_left(&mut self, rate: Option<u32>, now: Instant) -> u64 {
        let rate = rate.map(|rate| if self.huge.is_empty() { rate } else { rate - huge_part(rate) });
        self.allowed.small.left(rate, now)
    }

    /// Finds the broken pages, and queues those that are due to be fingerprinted, as far as `rate` allows. Returns the
    /// number of pages queued.
    pub fn look_at_broken(&mut self, rate: Option<u32>, now: Instant) -> u32 {
        let ranges = table::lock().refoldable();
        // The other half of the budget is for pages that were not folded before.
        let budget = self.small_left(rate, now).div_ceil(2);
        let due = self.broken.look(&ranges, self.seconds(now), budget, self.policy.cadence(now));
        let pages = pages_of(&due);
        self.allowed.small.spend(pages);
        self.rested.extend(due.into_iter().map(|range| Rested { range, kind: Kind::Broken }));
        u32::try_from(pages).unwrap_or(u32::MAX)
    }

    /// Takes note of the outcomes for broken pages that were to be folded again.
    pub fn were_broken(&mut self, range: PageRange, outcomes: &[Outcome]) {
        for (page, outcome) in (0..).zip(outcomes) {
            // The worker asks again for busy pages.
            if *outcome != Outcome::Busy {
                self.broken.forget(PageRange { start: range.start.add_pages(page), pages: 1 });
            }
        }
    }

    /// Has all pages that rest reported again, because a new worker knows none of them.
    pub fn again(&mut self, pagemap: &Pagemap) -> host::Result<()> {
        self.end_rest(Instant::now());
        self.huge.forget();
        self.compared.seen.clear();
        self.broken.tell_again(table::everything());
        for span in spans() {
            let present = pagemap.small_ranges(span.start, span.end())?;
            let mut table = table::lock();
            present.into_iter().for_each(|range| table.set_pending(range));
        }
        Ok(())
    }
}

/// The part of a rate that is for huge pages, if there are any.
const fn huge_part(rate: u32) -> u32 {
    rate / 2
}

fn pages_of(ranges: &[PageRange]) -> u64 {
    ranges.iter().map(|range| range.pages).sum()
}

/// The time between two rounds that cost so much processor time.
fn apart(cost: Duration, cadence: Cadence) -> Duration {
    (cost * cadence.rounds).clamp(cadence.closest, FURTHEST)
}

/// The shortest time between two rounds of a member that has not changed for this time.
fn rest(unchanged: Duration) -> Duration {
    (unchanged / REST_SHARE).min(FURTHEST)
}

/// Enrolled memory, in order; neighbouring parts are joined. Memory with homes is left out, because only its broken
/// pages are examined.
pub fn spans() -> Vec<PageRange> {
    let known = table::lock().known(table::everything());
    let mut spans: Vec<PageRange> = Vec::new();
    for (range, _) in known.into_iter().filter(|(_, traits)| traits.asked && traits.home.is_none()) {
        match spans.last_mut() {
            Some(last) if last.end() == range.start => last.pages += range.pages,
            _ => spans.push(range),
        }
    }
    spans
}

#[cfg(test)]
mod tests;
