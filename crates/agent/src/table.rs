//! The table: the facts about the process's memory ([`Map`]), and the history of its pages, from which it is guessed
//! which folds will last ([`History`]). One lock guards both.
//!
//! The program's threads change the table through the hooks, and the agent's thread changes it in everything that it
//! does. A holder of the lock must not touch memory that may be folded, take a lock of the program's, or panic.

pub use crate::map::{Advice, Home, READ_WRITE, Shut, Traits, everything};

use crate::follow;
use crate::lock::{self, Lock};
use crate::map::Map;
use page::{HostVirt, PageRange};
use policy::{Folds, History, QuietInterval, TODAY, Worth};
use std::ops::{Deref, DerefMut};
use wire::{Outcome, SlotRun, Why};

static TABLE: Lock<Table> = Lock::new(Table::new());

/// Access to the table, with its lock held and all signals blocked. When the lock is released after the program has
/// changed memory that the table knows, the agent's thread is woken if it sleeps for long.
#[derive(Debug)]
pub struct Guard {
    table: lock::Guard<'static, Table>,
    generation: u64,
}

impl Guard {
    fn of(table: lock::Guard<'static, Table>) -> Self {
        Self { generation: table.generation(), table }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.table.generation() != self.generation {
            follow::wake_resting();
        }
    }
}

impl Deref for Guard {
    type Target = Table;

    fn deref(&self) -> &Table {
        &self.table
    }
}

impl DerefMut for Guard {
    fn deref_mut(&mut self) -> &mut Table {
        &mut self.table
    }
}

/// Locks the table of this process.
pub fn lock() -> Guard {
    Guard::of(TABLE.lock())
}

/// As [`lock`], for a thread of the program. Each time that it has waited for `wait`, `give_up` is called; if it
/// returns true, there is no lock, and the answer is `None`.
pub fn lock_unless(wait: std::time::Duration, give_up: impl Fn() -> bool) -> Option<Guard> {
    TABLE.lock_unless(wait, give_up).map(Guard::of)
}

/// Gives a forked child a table of its own, which knows these ranges and nothing about their pages.
///
/// # Safety
/// The calling thread is the only one, and does not hold the lock.
pub(crate) unsafe fn begin_anew(known: &[(PageRange, Traits)]) {
    // SAFETY: by the caller.
    unsafe { TABLE.begin_anew(Table::new()) };
    let mut table = lock();
    for (range, traits) in known.iter().filter(|(_, traits)| traits.home.is_none()) {
        table.know(*range, *traits);
    }
}

/// The map of this process and the history of its pages. Functions that change the map alone are those of [`Map`]; the
/// functions below change the history, too.
#[derive(Debug)]
pub struct Table {
    map: Map,
    history: History,
}

impl Deref for Table {
    type Target = Map;

    fn deref(&self) -> &Map {
        &self.map
    }
}

impl DerefMut for Table {
    fn deref_mut(&mut self) -> &mut Map {
        &mut self.map
    }
}

impl Table {
    const fn new() -> Self {
        Self { map: Map::new(), history: History::new(&TODAY) }
    }

    /// See [`Map::discard`]. Folds of these pages that were made in the last minute count as short-lived, as if the
    /// pages had been written.
    pub fn discard(&mut self, range: PageRange) {
        self.map.discard(range, |key, pages| self.history.ended(key, pages));
    }

    /// See [`Map::relocate`].
    pub fn relocate(&mut self, from: PageRange, to: HostVirt) {
        self.map.relocate(from, to);
        let there = PageRange { start: to, pages: from.pages };
        self.map.folded_pages(there).into_iter().for_each(|range| self.history.moved(range));
        self.map.broken_pages(there).into_iter().for_each(|range| self.history.touched(range));
    }

    /// See [`History::set_time`].
    pub fn set_time(&mut self, now: u32, quiet: Option<QuietInterval>) {
        self.history.set_time(now, quiet);
    }

    /// From here on, pages may be folded even if their last folds were short-lived.
    pub const fn be_eager(&mut self) {
        self.history.be_eager();
    }

    /// See [`History::take_written`]. The table knows of writes from the scans that it is given ([`Table::rest`]), and
    /// of writes to folded pages.
    pub const fn take_written(&mut self) -> u64 {
        self.history.take_written()
    }

    /// See [`History::take_folds`].
    pub const fn take_folds(&mut self) -> Folds {
        self.history.take_folds()
    }

    /// See [`History::folds`].
    pub const fn folds(&self) -> (u64, u64) {
        self.history.folds()
    }

    /// See [`Map::set_folded`].
    pub fn set_folded(&mut self, run: SlotRun) {
        self.map.set_folded(run);
        self.history.folded(PageRange { start: run.start, pages: run.pages.into() });
    }

    /// Notes in the history which pages of a run were folded. The map has them already.
    pub fn were_folded(&mut self, run: PageRange, outcomes: &[Outcome]) {
        let mut at = run.start;
        for alike in outcomes.chunk_by(|one, next| one == next) {
            let range = PageRange { start: at, pages: alike.len() as u64 };
            if alike[0] == Outcome::Folded {
                self.history.folded(range);
            }
            at = range.end();
        }
    }

    /// See [`Map::set_zeroed`].
    pub fn set_zeroed(&mut self, range: PageRange) {
        self.map.set_zeroed(range);
        self.history.folded(range);
    }

    /// See [`Map::set_home`].
    pub fn set_home(&mut self, range: PageRange) {
        self.map.set_home(range);
        self.history.folded(range);
    }

    /// See [`Map::set_broken`].
    pub fn set_broken(&mut self, range: PageRange) {
        let Self { map, history } = self;
        map.set_broken(range, |key, pages| {
            history.ended(key, pages);
            history.written(key, pages);
        });
    }

    /// See [`Map::set_pending`].
    pub fn set_pending(&mut self, range: PageRange) {
        self.map.set_pending(range, |key, pages| self.history.ended(key, pages));
    }

    /// Notes that these pages were written, as their changed contents show. The kernel notes no writes to them.
    pub fn seen_written(&mut self, range: PageRange) {
        self.history.all_written(range);
    }

    /// See [`History::admitted_of`].
    pub fn worth_folding(&self, range: PageRange, worth: Worth) -> Vec<PageRange> {
        self.history.admitted_of(range, worth)
    }

    /// See [`History::is_at_rest`].
    pub fn is_at_rest(&self, range: PageRange, seconds: u32) -> bool {
        self.history.is_at_rest(range, seconds)
    }

    /// Notes what a scan of all enrolled memory has found. Returns pages that have rested, at most `budget`, in order
    /// of address from where the last search ended ([`Map::take_rested`]).
    ///
    /// - Pages in `written` were written since the last scan. From here on they are pending: they wait to be seen
    ///   unwritten.
    /// - Pages that were pending and were not written since the last scan have rested, and are pending no longer.
    /// - Pages in `new` were scanned for the first time. They are pending, too, but do not count as written.
    pub fn rest(&mut self, (written, new): (&[PageRange], &[PageRange]), budget: u64, worth: Worth) -> Vec<PageRange> {
        let Self { map, history } = self;
        for (range, is_new) in written.iter().map(|range| (range, false)).chain(new.iter().map(|range| (range, true))) {
            let scanned = map.scanned(*range, |key, pages| history.ended(key, pages));
            if !is_new {
                scanned.into_iter().for_each(|part| history.all_written(part));
            }
        }
        let rested = map.take_rested(budget, |key, pages| history.admitted(key, pages, worth));
        history.forget_old(|key| map.knows_chunk(key));
        rested
    }

    /// See [`Map::refoldable`]. Pages that are left alone after short-lived folds are not among them.
    pub fn refoldable(&self) -> Vec<PageRange> {
        self.map.refoldable(|key, pages| self.history.not_left_alone(key, pages))
    }

    /// See [`Map::why`].
    pub fn why(&self, range: PageRange, worth: Worth) -> Vec<Why> {
        let history = &self.history;
        self.map.why(range, |key, pages| (history.not_left_alone(key, pages), history.of_worth(key, pages, worth)))
    }
}

#[cfg(test)]
mod tests;
