//! Messages that tell the worker of pages that have rested.

use super::RUNS;
use crate::fold::Folder;
use crate::link::Link;
use crate::round::{HIDDEN, Kind, Rested, Rounds};
use page::{Fingerprint, PageRange};
use std::io;
use wire::{Pace, RESTED_PAGES, RestedRun, ToWorker, ZeroPages};

/// Most pages that are fingerprinted before the thread reads the worker's messages again.
const HASH_AT_ONCE: u64 = 2048;

/// Fingerprints some of the pages that have rested, and tells the worker of them. Returns how many pages were read.
pub fn report(rounds: &mut Rounds, folder: &Folder, link: &mut Link, pace: Pace, idle: bool) -> io::Result<u64> {
    let zeros = match pace.zero_pages {
        ZeroPages::Share => true,
        ZeroPages::Ignore => false,
        ZeroPages::WhenIdle => idle,
    };
    let mut report =
        Report { pace, zeros, runs: Vec::new(), fingerprints: Vec::new(), full: Vec::new(), later: Vec::new() };
    let read = rounds.fingerprint(folder.section().notes(), HASH_AT_ONCE, |rested, fingerprints| {
        let waiting: Vec<PageRange> = folder.waiting(rested.range).collect();
        report.add(rested, fingerprints, &waiting);
    });
    report.close();
    rounds.take_back(&report.later);
    for (runs, fingerprints) in report.full {
        link.send(&ToWorker::Rested(runs, fingerprints))?;
    }
    Ok(read)
}

/// The messages that are being put together.
struct Report {
    pace: Pace,
    zeros: bool,
    runs: Vec<RestedRun>,
    fingerprints: Vec<Fingerprint>,
    full: Vec<(Vec<RestedRun>, Vec<Fingerprint>)>,
    /// Single pages of which the worker is told later.
    later: Vec<Rested>,
}

impl Report {
    fn add(&mut self, rested: Rested, fingerprints: &[Fingerprint], waiting: &[PageRange]) {
        let (range, huge) = (rested.range, rested.kind == Kind::Huge);
        if self.fingerprints.len() + fingerprints.len() > RESTED_PAGES || self.runs.len() + fingerprints.len() > RUNS {
            self.close();
        }
        if huge {
            self.runs.push(RestedRun { start: range.start, pages: range.pages as u16, huge });
            let hidden = |f: &Fingerprint| *f == Fingerprint::ZERO_PAGE && !self.zeros;
            self.fingerprints.extend(fingerprints.iter().map(|f| if hidden(f) { HIDDEN } else { *f }));
            return;
        }
        let mut open = false;
        for (n, fingerprint) in fingerprints.iter().enumerate() {
            let start = range.start.add_pages(n as u64);
            let later = waiting.iter().any(|range| range.start == start);
            let zero = *fingerprint == Fingerprint::ZERO_PAGE;
            if later || zero && !self.zeros {
                if later || self.pace.zero_pages == ZeroPages::WhenIdle {
                    self.later.push(Rested { range: PageRange { start, pages: 1 }, ..rested });
                }
                open = false;
                continue;
            }
            if !zero && !(self.pace.first..=self.pace.last).contains(fingerprint) {
                open = false;
                continue;
            }
            match self.runs.last_mut().filter(|_| open) {
                Some(run) => run.pages += 1,
                None => self.runs.push(RestedRun { start, pages: 1, huge }),
            }
            self.fingerprints.push(*fingerprint);
            open = true;
        }
    }

    fn close(&mut self) {
        if !self.runs.is_empty() {
            self.full.push((std::mem::take(&mut self.runs), std::mem::take(&mut self.fingerprints)));
        }
    }
}
