//! Replays what a program wrote through a policy, and counts what folding by it would have saved and cost.
//!
//! A [`Trace`] is a list of readings ("looks"). Each names the pages that were written since the one before. All pages
//! can be folded: which of them have a duplicate is not up to the policy.

use super::trace::Trace;
use ::policy::{Event, History, LIFE, Params, Policy};
use page::{Bits, CHUNK_PAGES, HostVirt, PAGE_SHIFT, PageRange, chunks};
use std::time::{Duration, Instant};

/// Seconds for which a fold must last; a shorter one counts as short-lived.
pub const LIFE_SECONDS: u32 = LIFE.as_secs() as u32;
/// Processor time, in us, of folding a page, of the kernel's copy when it is written again, and of noting a write. They are
/// estimates for the agent and the program together: a replay measures no time.
const COSTS_US: [u64; 3] = [4, 3, 1];

/// The outcome of a replay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// Page seconds folded, as a share of those that a policy could have had which knows the future. That one folds a page
    /// at the first look after its last write, if the fold lasts.
    pub merged_of_possible: f64,
    /// Page seconds folded, as a share of all.
    pub folded_share: f64,
    /// Share of folds that were short-lived.
    pub short_share: f64,
    /// Processor seconds of folds, of copies at their ends, and of noted writes.
    pub cpu_s: f64,
    /// Number of folds.
    pub folds: u64,
}

/// A rule that says which pages are folded.
pub trait Rule {
    /// Begins a look at this second.
    fn begin(&mut self, second: u32);
    /// These pages of a chunk were written since the look before. If they were `folded`, their folds end.
    fn written(&mut self, key: u64, written: Bits, folded: Bits);
    /// Chooses the pages to fold from those of a chunk that were not written since the look before.
    fn admit(&mut self, key: u64, rested: Bits) -> Bits;
    /// Tells the rule that these pages of a chunk were folded.
    fn folded(&mut self, key: u64, pages: Bits);
    /// Ends a look; `pages` is their number in the trace.
    fn end(&mut self, pages: u64);
}

/// The policy of the agent, as members have it, with what it learns from earlier folds.
#[derive(Debug)]
pub struct Today {
    policy: Policy,
    history: History,
    start: Instant,
    now: Instant,
}

impl Today {
    /// The policy of a member in which nothing was written so far.
    pub fn new(params: &'static Params) -> Self {
        let start = Instant::now();
        Self { policy: Policy::new(params, false, start), history: History::new(params), start, now: start }
    }
}

impl Rule for Today {
    fn begin(&mut self, second: u32) {
        self.now = self.start + Duration::from_secs(second.into());
        self.history.set_time(second, self.policy.quiet(self.now));
    }

    fn written(&mut self, key: u64, written: Bits, folded: Bits) {
        self.history.ended(key, folded);
        self.history.written(key, written);
    }

    fn admit(&mut self, key: u64, rested: Bits) -> Bits {
        self.history.admitted(key, rested, self.policy.admit(self.now))
    }

    fn folded(&mut self, key: u64, pages: Bits) {
        for (first, pages) in pages.runs() {
            let start = HostVirt((key * CHUNK_PAGES + first) << PAGE_SHIFT);
            self.history.folded(PageRange { start, pages });
        }
    }

    fn end(&mut self, pages: u64) {
        let (changed, folds) = (self.history.take_written(), self.history.take_folds());
        self.policy.observe(Event::Round { changed, pages, folds }, self.now);
    }
}

/// Replays a trace. Looks before second `from` are not counted.
pub fn replay(trace: &Trace, rule: &mut impl Rule, from: u32) -> Score {
    replay_on(vec![Bits::default(); trace.pages.div_ceil(CHUNK_PAGES) as usize], trace, rule, from)
}

/// Replays a trace in which the pages `folded` are folded when it begins.
fn replay_on(mut folded: Vec<Bits>, trace: &Trace, rule: &mut impl Rule, from: u32) -> Score {
    let all: Vec<Bits> = chunks(range((0, trace.pages))).map(|(_, pages)| pages).collect();
    let mut account = Account::new(trace, from);
    (0..).zip(&folded).for_each(|(key, folded)| account.folded(key, *folded));
    for (n, looked) in (1..).zip(&trace.written) {
        account.second = n * trace.look_seconds;
        rule.begin(account.second);
        let mut written = vec![Bits::default(); all.len()];
        for (key, pages) in looked.iter().flat_map(|run| chunks(range(*run))) {
            written[key as usize] = written[key as usize].or(pages);
        }
        for (at, written) in written.into_iter().enumerate() {
            let key = at as u64;
            let ended = folded[at].and(written);
            rule.written(key, written, ended);
            account.written(key, written);
            folded[at] = folded[at].without(written);
            let rested = all[at].without(folded[at]).without(written);
            let fold = rule.admit(key, rested).and(rested);
            rule.folded(key, fold);
            account.folded(key, fold);
            folded[at] = folded[at].or(fold);
        }
        rule.end(trace.pages);
        account.look(folded.iter().map(|pages| pages.count()).sum());
    }
    account.finish()
}

fn range((first, pages): (u64, u64)) -> PageRange {
    PageRange { start: HostVirt(first << PAGE_SHIFT), pages }
}

/// State of a page in a replay.
#[derive(Clone, Copy, Default)]
struct Page {
    /// Second of its last write.
    written: u32,
    /// Second at which it was folded, if it is.
    folded: Option<u32>,
}

/// What a replay counts.
struct Account {
    pages: Vec<Page>,
    look_seconds: u32,
    from: u32,
    second: u32,
    /// Number of folds, and of those that were short-lived.
    folds: (u64, u64),
    writes: u64,
    /// Number of writes to folded pages, for which the kernel copies a page.
    copies: u64,
    /// Sums over all looks: of the folded pages, and of all pages.
    looks: (u64, u64),
    /// Sums over the times for which pages were not written, if longer than a fold must last: seconds for which they
    /// were folded, and seconds for which they could have been.
    merged: (u64, u64),
}

impl Account {
    fn new(trace: &Trace, from: u32) -> Self {
        let pages = vec![Page::default(); trace.pages as usize];
        let (none, look_seconds) = ((0, 0), trace.look_seconds);
        Self { pages, look_seconds, from, second: 0, folds: none, writes: 0, copies: 0, looks: none, merged: none }
    }

    fn counts(&self) -> bool {
        self.second >= self.from
    }

    fn written(&mut self, key: u64, pages: Bits) {
        for page in pages.pages().map(|page| (key * CHUNK_PAGES + page) as usize) {
            let known = std::mem::replace(&mut self.pages[page], Page { written: self.second, folded: None });
            self.rest(known);
            if self.counts() {
                self.writes += 1;
                self.copies += u64::from(known.folded.is_some());
                self.folds.1 += u64::from(known.folded.is_some_and(|folded| self.second - folded < LIFE_SECONDS));
            }
        }
    }

    fn folded(&mut self, key: u64, pages: Bits) {
        for page in pages.pages() {
            self.pages[(key * CHUNK_PAGES + page) as usize].folded = Some(self.second);
        }
        self.folds.0 += if self.counts() { pages.count() } else { 0 };
    }

    /// Adds the number of pages that are folded at the end of a look.
    fn look(&mut self, folded: u64) {
        if self.counts() {
            self.looks = (self.looks.0 + folded, self.looks.1 + self.pages.len() as u64);
        }
    }

    /// Counts the time since a page's last write, which ends now.
    fn rest(&mut self, page: Page) {
        let begin = page.written + self.look_seconds;
        if self.second >= begin + LIFE_SECONDS {
            let since = |begin: u32| u64::from(self.second.saturating_sub(begin.max(self.from)));
            self.merged.1 += since(begin);
            self.merged.0 += page.folded.map_or(0, since);
        }
    }

    fn finish(mut self) -> Score {
        std::mem::take(&mut self.pages).into_iter().for_each(|page| self.rest(page));
        let share = |(part, all): (u64, u64)| if all == 0 { 0.0 } else { part as f64 / all as f64 };
        let [fold, copy, note] = COSTS_US;
        let cost_us = self.folds.0 * fold + self.copies * copy + self.writes * note;
        Score {
            merged_of_possible: share(self.merged),
            folded_share: share(self.looks),
            short_share: share((self.folds.1, self.folds.0)),
            cpu_s: cost_us as f64 / 1e6,
            folds: self.folds.0,
        }
    }
}

#[cfg(test)]
#[path = "replay_tests.rs"]
mod tests;
