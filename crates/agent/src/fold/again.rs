//! Folding broken pages again ([`refold`]), with a witness for the pages of each request.

use super::{Folder, micros};
use crate::refold::{self, Part};
use crate::{references, table};
use host::Pagemap;
use page::PageRange;
use std::time::{Duration, Instant};
use wire::{FoldRun, MemberStats, Outcome};

/// Time after which a fork probe is tried again after one could not be forked: 60 s.
pub(super) const NO_PROBE_TIME: Duration = Duration::from_secs(60);
/// Most repeated attempts for one request, if the prover is late or gone.
const TRIES: usize = 8;

impl Folder {
    /// Calls a witness for the broken pages of these runs.
    pub(super) fn begin_to_refold(&mut self, runs: &[FoldRun], pagemap: &Pagemap) {
        let table = table::lock();
        let ranges = runs.iter().map(|run| PageRange { start: run.start, pages: run.pages.into() });
        let broken: Vec<PageRange> = ranges.flat_map(|range| table.broken_pages(range)).collect();
        if !broken.is_empty() && self.surveyed.is_ok() {
            self.call_witness(&table, &broken, pagemap);
        }
    }

    /// Calls a witness for these broken pages. Returns whether one can be asked.
    fn call_witness(&mut self, table: &table::Guard, broken: &[PageRange], pagemap: &Pagemap) -> bool {
        if broken.iter().all(|range| refold::shows_file(pagemap, *range)) {
            return self.witness.is_at_hand();
        }
        let called = self.witness.call(table, pagemap, broken);
        self.no_refold_until = called.err().map(|_| Instant::now() + NO_PROBE_TIME);
        self.witness.is_at_hand()
    }

    /// After the witness gave no answer: waits for a prover that is late, or calls another witness. Returns whether it
    /// makes sense to ask again. The caller keeps no writer out, and does not hold the table's lock.
    fn may_ask_again(&mut self, parts: &[Part<'_>], pagemap: &Pagemap) -> bool {
        self.witness.catch_up() || {
            let broken: Vec<PageRange> = parts.iter().map(|part| part.range).collect();
            self.call_witness(&table::lock(), &broken, pagemap)
        }
    }

    /// Folds these broken parts again.
    pub(super) fn fold_again(
        &mut self,
        parts: &[Part<'_>],
        pagemap: &Pagemap,
        stats: &mut MemberStats,
        all: &mut [Outcome],
    ) {
        let Ok(generation) = self.surveyed else { return };
        let (mut at, mut tries) = (0, TRIES);
        while at < parts.len() {
            self.yields.yield_if_due();
            if !self.hold() {
                parts[at..].iter().for_each(|part| all[part.at..][..part.range.pages as usize].fill(Outcome::Busy));
                return;
            }
            let mut table = table::lock();
            // The program may have changed a part since the table was last read.
            let is_current = references::generation() == generation;
            let still = |part: &Part<'_>| {
                is_current && table.is_refoldable(part.range) && table.placement(part.range).is_some()
            };
            let sound = parts[at..].iter().take_while(|part| still(part)).count();
            if sound == 0 {
                at += 1;
                continue;
            }
            let group = &parts[at..at + sound];
            let with = (pagemap, &**self.section.following(), &mut self.reader, &mut self.witness);
            let (done, took) = refold::fold_group(&mut table, with, group, generation, all);
            stats.stalls.add(micros(took));
            if self.witness.is_late() || !self.witness.is_at_hand() {
                // Pages of the group that need a witness were not folded. They are tried again here, because the worker
                // would ask for them only after a long time.
                drop(table);
                self.turns.rest();
                if tries > 0 && self.may_ask_again(&parts[at..], pagemap) {
                    tries -= 1;
                    continue;
                }
                tries = 0;
            }
            for part in &group[..done] {
                let outcomes = &all[part.at..part.at + part.range.pages as usize];
                stats.done.refolds += outcomes.iter().filter(|o| **o == Outcome::Folded).count() as u64;
                self.vmas.note_run();
            }
            at += done;
        }
    }

    /// Ends a fork probe whose time is over. Returns how long another one may stay; `None` if there is none.
    pub fn rest(&mut self) -> Option<Duration> {
        self.witness.rest()
    }

    /// Whether broken pages may be folded again: no fork probe has failed lately.
    pub fn may_refold(&self, now: Instant) -> bool {
        self.no_refold_until.is_none_or(|until| until <= now)
    }
}
