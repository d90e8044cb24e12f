//! The course of a census, from the first pass to the findings.
//!
//! ```text
//!   scanning threads          this module
//!   PageSample -> Collector --(pass ends)--> sort -> merge -> classes -> tally, runs, round of a watch
//!                    ^                                                          |
//!                    +------ next pass, if the index was bounded <--------------+--> Findings
//! ```

use crate::history::{Round, Stretch};
use crate::index::{Interval, Shard, SortedShard, for_each_class};
use crate::runs::Partners;
use crate::tally::Tally;
use crate::zeros::Zeros;
use crate::{Change, Entry, Findings, GuestFindings, Layout};
use page::{Fingerprint, PageSample};

/// A census under way.
#[derive(Debug)]
pub struct Census {
    layout: Layout,
    tally: Tally,
    partners: Partners,
    round: Option<Round>,
    index_bytes: usize,
    passes: u32,
}

/// The collector of one scanning thread in one pass.
#[derive(Debug)]
pub struct Collector<'a> {
    shard: Shard<'a>,
    layout: &'a Layout,
    zeros: Zeros,
    /// Whether every zero page gets an entry too. A watch follows each page, so it needs them.
    every_page: bool,
}

/// Entries and zero counts of one thread, after its pass has ended.
#[derive(Debug)]
pub struct Collected {
    shard: SortedShard,
    zeros: Zeros,
}

impl Collector<'_> {
    /// Takes a sample if this pass covers its fingerprint.
    pub fn push(&mut self, sample: &PageSample) {
        let counted = sample.fingerprint == Fingerprint::ZERO_PAGE && !sample.mapped_elsewhere && !sample.ksm;
        if counted && !self.every_page {
            self.zeros.push(sample, self.layout);
        } else {
            self.shard.push(Entry::from(sample));
        }
    }

    /// Ends the pass for this thread, when all threads have stopped pushing.
    pub fn finish(self) -> Collected {
        Collected { shard: self.shard.finish(), zeros: self.zeros }
    }
}

impl Census {
    /// Starts a census of `guests`, whose pages lie in the order that `layout` gives. Of each guest, id, name, group
    /// and kind are filled in.
    pub fn new(guests: Vec<GuestFindings>, layout: Layout) -> Self {
        let partners = Partners::new(layout.end());
        Self { tally: Tally::new(guests, &layout), layout, partners, round: None, index_bytes: 0, passes: 0 }
    }

    /// Makes this census one round of a watch: the `number`th, `second` seconds after the watch began. `stretches`
    /// tell the page at each position.
    pub fn watch(&mut self, number: u32, second: u32, mut stretches: Vec<Stretch>) {
        stretches.sort_unstable();
        self.round = Some(Round::begin(number, second, stretches, self.layout.end()));
    }

    /// A collector for one thread of a pass; `most_bytes` bounds its part of the index.
    pub fn collector<'a>(&'a self, interval: &'a Interval, most_bytes: Option<usize>) -> Collector<'a> {
        Collector {
            shard: Shard::new(interval, most_bytes),
            layout: &self.layout,
            zeros: Zeros::default(),
            every_page: self.round.is_some(),
        }
    }

    /// Counts what the threads of one pass collected.
    pub fn pass(&mut self, interval: &Interval, collected: Vec<Collected>) {
        self.pass_seen(interval, collected, &mut |_| {});
    }

    /// The same as `pass`; `see` is also shown every class, that is all entries of one content, frame by frame.
    pub fn pass_seen(&mut self, interval: &Interval, collected: Vec<Collected>, see: &mut dyn FnMut(&[Entry])) {
        let mut zeros = Zeros::default();
        let mut shards = Vec::with_capacity(collected.len());
        for part in collected {
            zeros.add(part.zeros);
            shards.push(part.shard);
        }
        self.index_bytes = self.index_bytes.max(shards.iter().map(SortedShard::peak_bytes).sum());
        self.passes += 1;
        let Self { layout, tally, partners, round, .. } = self;
        let mut zeros = Some(zeros).filter(|z| interval.covers(Fingerprint::ZERO_PAGE.0) && z.iter().next().is_some());
        for_each_class(&shards, |class| {
            see(class);
            let is_zero = class[0].fingerprint() == Fingerprint::ZERO_PAGE;
            let zeros = if is_zero { zeros.take() } else { None };
            let duplicate = tally.class(layout, class, zeros.as_ref());
            if !is_zero {
                partners.class(class);
            }
            if let Some(round) = round {
                round.class(class, duplicate);
            }
        });
        if let Some(zeros) = zeros {
            tally.class(layout, &[], Some(&zeros));
        }
    }

    /// Number of passes counted so far.
    pub const fn passes(&self) -> u32 {
        self.passes
    }

    /// The findings, without those that the scan fills in. Also this round of a watch, with which the next round is
    /// compared.
    pub fn finish(self, before: Option<&Round>) -> (Findings, Option<Round>) {
        let mut findings = self.tally.finish();
        findings.host.index_bytes = self.index_bytes as u64;
        findings.host.passes = self.passes;
        findings.runs = self.partners.finish();
        let mut round = self.round;
        findings.change = round.as_mut().zip(before).map(|(now, then)| -> Change { now.compare(then) });
        (findings, round)
    }
}
