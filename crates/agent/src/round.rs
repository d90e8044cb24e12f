//! A round finds the pages that were written since the last round, and those of the others that are to be
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
//! pages. Each note also costs the page's writer a fault, about as much as it costs us to look at the page. So the
//! more is written, the further apart the rounds come. Rounds and faults together may take a share of a processor
//! that the policy says ([`Cadence`]).
//!
//! While little changes, the time between two rounds grows with the time since more did ([`REST_SHARE`]). Hardly a program
//! writes nothing at all: a member rests while few of its pages change between two rounds ([`FEW_CHANGE`]).
//!
//! Where the kernel cannot note writes, all small pages are fingerprinted in each round. A page whose fingerprint is
//! that of the last round has rested.
//!
//! Pages that were broken inside a mapping of the pool are not watched: that would take another change of each
//! mapping. They are fingerprinted now and then, and have rested when the fingerprint stays the same
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

/// Longest time between two rounds, even if the rounds then take more than their share of a processor: 10 s.
const FURTHEST: Duration = Duration::from_secs(10);
/// Shortest time between two rounds, as a part of the time since anything changed: 1/8.
const REST_SHARE: u32 = 8;
/// Pages that may change between two rounds while the member rests, as a share of its pages, and bounds: 1/64, 64 to 1024.
const FEW_CHANGE: (u64, u64, u64) = (64, 64, 1024);
/// Share of a processor for rounds while pages are being folded: 1/40.
const HURRIED_SHARE: u32 = 40;
/// Cost of noting a page again, for us and for its writer: 1 us.
const NOTE_COST: Duration = Duration::from_micros(1);
/// Cost of folding a page: 4 us.
const FOLD_COST: Duration = Duration::from_micros(4);
/// Stand-in for the fingerprint of a page that is not to be folded, in a huge page.
pub const HIDDEN: Fingerprint = Fingerprint(0);
/// Most ranges that are looked up one by one.
const FEW: usize = 32;

/// The kinds of pages that rest.
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
    /// Their kind.
    pub kind: Kind,
}

/// The rounds of this member: the pages to look at, and the time of the next round.
pub struct Rounds {
    notes_writes: bool,
    clock: Clock,
    watching: Watching,
    policy: Policy,
    /// Whether to fold pages without asking whether the folds will last.
    eager: bool,
    /// Whether to leave pages alone that another process maps, too.
    leaves_shared: bool,
    huge: HugePageList,
    broken: BrokenPageList,
    allowed: Allowed,
    compared: Compared,
    rested: VecDeque<Rested>,
    reader: SoftReader,
}

/// The times of rounds.
struct Clock {
    began: Instant,
    next: Instant,
    last: Instant,
    /// Cost of the last round.
    cost: Duration,
    /// When something was last seen to change.
    last_change: Instant,
    /// Whether no round was made yet.
    is_first: bool,
}

/// How far the memory that the table knows is watched.
struct Watching {
    /// The table's generation when unwatched memory was last looked for.
    generation: u64,
    /// The table's generation when changes were last noticed.
    noticed: u64,
    /// When unwatched memory is looked for even if the table has not changed.
    armed: Instant,
}

/// Pages that may be fingerprinted.
struct Allowed {
    /// Small pages, broken ones among them.
    small: Allowance,
    /// Parts of huge pages.
    huge: Allowance,
}

/// The last fingerprints of pages; only used where the kernel does not note writes.
struct Compared {
    /// Fingerprints of the last round, by page number.
    seen: BTreeMap<u64, u64>,
    /// End of the last search that used up its budget.
    from: HostVirt,
}

impl Rounds {
    /// Before the first round.
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

    /// Leaves pages alone from here on that another process maps, too. In a forked child, most are its parent's. They
    /// cannot be folded, and would be fingerprinted in every child, and tried again and again.
    pub const fn leave_shared(&mut self) {
        self.leaves_shared = true;
    }

    /// How long until the next round.
    pub fn due_in(&self, now: Instant) -> Duration {
        if self.rested.is_empty() { self.clock.next.saturating_duration_since(now) } else { Duration::ZERO }
    }

    /// Looks at all enrolled memory, if a round is due. `rate` is the most pages that may be fingerprinted in a second;
    /// `huge` says whether huge pages are looked at. Returns how many pages it looked at.
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
        // The next round finds memory that comes to be known after this.
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
        // Huge pages are looked at again and again. Changes in them are known once they are fingerprinted.
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
        // Pages that exist when watching begins are reported with the second round.
        let is_first = std::mem::take(&mut self.clock.is_first);
        self.clock.next = now + if is_first { apart.min(self.soon()) } else { apart };
    }

    /// Pages that may change from one round to the next while a member of `pages` pages rests.
    fn may_change(&self, pages: u64) -> u64 {
        let (share, least, most) = FEW_CHANGE;
        if self.eager { 0 } else { (pages / share).clamp(least, most) }
    }

    /// Records that the program has run for `age` and is idle.
    pub fn begin_quiet(&mut self, age: Duration, now: Instant) {
        self.policy.observe(Event::Idle { age }, now);
    }

    /// The time between two rounds while something changes.
    fn apart(&self, now: Instant) -> Duration {
        apart(self.clock.cost, self.policy.cadence(now))
    }

    /// Ends a rest if the program has done something to known memory since the last round.
    pub fn notice_changes(&mut self, now: Instant) {
        self.watching.noticed = table::lock().generation();
        if self.watching.noticed != self.watching.generation {
            self.end_rest(now);
        }
    }

    /// The least time between two rounds, by the time for which nothing has changed.
    pub fn rest_in(&self, now: Instant) -> Duration {
        rest(now - self.clock.last_change)
    }

    /// Whether the program has done nothing to known memory since changes were last noticed.
    pub fn has_noticed_all(&self) -> bool {
        table::lock().generation() == self.watching.noticed
    }

    fn end_rest(&mut self, now: Instant) {
        self.clock.last_change = now;
        self.clock.next = self.clock.next.min(self.clock.last + self.apart(now));
    }

    /// Brings the next round forward because `folded` pages were folded, if rounds cost less than folding.
    pub fn hurry(&mut self, folded: usize) {
        if FOLD_COST * u32::try_from(folded).unwrap_or(u32::MAX) < self.clock.cost {
            return;
        }
        self.clock.next = self.clock.next.min(self.clock.last + self.soon());
    }

    /// The shortest time between two rounds that cost as much as the last one.
    fn soon(&self) -> Duration {
        (self.clock.cost * HURRIED_SHARE).max(TODAY.seldom.closest)
    }

    /// Asks the kernel about memory that was known at a generation of the table, once all of it is watched. Also returns whether some
    /// was not watched before.
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

    /// Begins to watch memory that is not watched yet: it was enrolled, opened or made private since the last time.
    /// Returns whether there was any.
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
            // Memory that cannot be registered may not be folded; the section finds that out by itself. Each round
            // finds that memory again, as it finds broken pages, and does not count it as a change.
            is_any |= notes.register(range, Watch::Writes).is_ok();
        }
        is_any
    }

    /// The quiet interval; `None` in a burst.
    pub fn quiet(&self, now: Instant) -> Option<QuietInterval> {
        self.policy.quiet(now)
    }

    /// How often to look at the member.
    pub fn cadence(&self, now: Instant) -> Cadence {
        self.policy.cadence(now)
    }

    /// Separates pages that were written from pages that are new to the agent. New pages have just begun to be watched,
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

    /// At most `budget` of these pages, from where the last search ended.
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

    /// Keeps those pages that are present of the ones that have rested. To read the others would bring them back from
    /// swap.
    fn keep_present(&mut self, pagemap: &Pagemap, spans: &[PageRange], rested: &[PageRange]) -> host::Result<()> {
        // They come in the order of a search that begins anywhere.
        let mut rested = rested.to_vec();
        rested.sort_unstable_by_key(|range| range.start);
        // Few are asked for one by one; of many, it is cheaper to look at all.
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

    /// Returns how many pages are no longer parts of huge pages.
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

    /// Takes a range as one that has rested.
    #[cfg(test)]
    pub fn rest(&mut self, range: PageRange) {
        self.rested.push_back(Rested { range, kind: Kind::Small });
    }

    /// Fingerprints the next pages that have rested, at most about `most`; calls `each` with every piece of
    /// consecutive pages and their fingerprints. Returns how many pages were read.
    /// `notes` is the userfaultfd that notes writes.
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

    /// Makes pages that have rested be reported later. Folding them failed a moment ago, or they hold zeros that wait
    /// until the member is idle.
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
                // Of a page that was reported, the complement of the fingerprint is remembered. It is not reported
                // again until it changes.
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

    /// Reports those pages of a huge page that are worth folding.
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
        // A huge page that has just come to be may change the next moment.
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

    /// The start of the huge page that a page is part of, if such a huge page is known. The caller splits it.
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

    /// Pages that may be fingerprinted now, but for huge ones.
    fn small_left(&mut self, rate: Option<u32>, now: Instant) -> u64 {
        let rate = rate.map(|rate| if self.huge.is_empty() { rate } else { rate - huge_part(rate) });
        self.allowed.small.left(rate, now)
    }

    /// Finds the broken pages, and queues those to be fingerprinted that are due, as far as `rate` allows. Returns
    /// their number.
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

    /// Records the outcomes for broken pages that were to be folded again.
    pub fn were_broken(&mut self, range: PageRange, outcomes: &[Outcome]) {
        for (page, outcome) in (0..).zip(outcomes) {
            // The worker asks again for busy pages.
            if *outcome != Outcome::Busy {
                self.broken.forget(PageRange { start: range.start.add_pages(page), pages: 1 });
            }
        }
    }

    /// Makes all pages that rest be reported again.
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

/// The part of a rate that is for huge pages, where there are some.
const fn huge_part(rate: u32) -> u32 {
    rate / 2
}

fn pages_of(ranges: &[PageRange]) -> u64 {
    ranges.iter().map(|range| range.pages).sum()
}

/// The time between two rounds, for a round of this cost.
fn apart(cost: Duration, cadence: Cadence) -> Duration {
    (cost * cadence.rounds).clamp(cadence.closest, FURTHEST)
}

/// The least time between two rounds, when nothing was seen to change for this time.
fn rest(unchanged: Duration) -> Duration {
    (unchanged / REST_SHARE).min(FURTHEST)
}

/// Enrolled memory, in order; neighbouring parts are joined. Memory with homes is left out, because only its broken
/// pages are looked at.
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
