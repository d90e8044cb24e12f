//! Records figures: those of each moment are written to the file at once (as a tick). When the window of 16 minutes is
//! over, its ticks are replaced by blocks.

use crate::block::Moment;
use crate::salvage::salvage;
use crate::sample::Sampled;
use crate::store::{Later, Note, Owner, Store, is_damage};
use crate::window::{SAMPLES, STEP_S, WINDOW_S, Window, start_of};
use anyhow::Context;
use cli::exit::in_words;
use cli::note;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// Most windows that are kept in memory while the file cannot be written, besides the present one. The figures of older
/// ones are lost.
const MOST_WAITING: usize = 1;
/// Most series that are recorded. Their windows in memory take up to 32 MiB. Further ones are left out.
const MOST_SERIES: usize = 20_000;
/// If more time lies between two moments, the clock is taken to have jumped: 10 minutes.
const JUMP_S: i64 = 600;

/// Writes figures to a file.
pub struct Recorder {
    path: PathBuf,
    most_bytes: u64,
    store: Option<Store>,
    /// Numbers of groups and members that were recorded lately. The file may have others.
    owners: HashMap<(String, String), i64>,
    /// The number of the next owner; `None` until the file was read.
    next_owner: Option<i64>,
    /// Owners that the file does not have yet.
    new: Vec<Owner>,
    window: Option<Window>,
    waiting: Vec<Window>,
    notes: Vec<Note>,
    last_at: i64,
    /// Number of moments since the clock last jumped or was set back.
    steady: usize,
    /// Whether the file was found to be damaged, so that it is to be set aside.
    is_damaged: bool,
    /// The reason why the last moment could not be written; `None` if it was.
    failure: Option<String>,
    is_to_tidy: bool,
    has_left_out: bool,
}

impl Recorder {
    /// Opens the file, or makes it, and goes on with what an earlier process has left in it. It may grow to
    /// `most_bytes`. If the file cannot be used at the moment, that is tried again at each moment.
    ///
    /// # Errors
    /// A later version wrote the file.
    pub fn open(path: &Path, most_bytes: u64, now: i64) -> anyhow::Result<Self> {
        let mut recorder = Self {
            path: path.to_owned(),
            most_bytes,
            store: None,
            owners: HashMap::new(),
            next_owner: None,
            new: Vec::new(),
            window: None,
            waiting: Vec::new(),
            notes: Vec::new(),
            last_at: i64::MIN,
            steady: 0,
            is_damaged: false,
            failure: None,
            is_to_tidy: true,
            has_left_out: false,
        };
        match recorder.reopen(now) {
            Err(e) if e.is::<Later>() => return Err(e.context(format!("{} is left as it is", path.display()))),
            Err(e) => recorder.failed(&e),
            Ok(()) => {}
        }
        Ok(recorder)
    }

    /// Whether the last moment was written.
    pub const fn is_written(&self) -> bool {
        self.failure.is_none()
    }

    fn reopen(&mut self, now: i64) -> anyhow::Result<()> {
        let loaded = match self.failure.as_deref().filter(|_| self.is_damaged) {
            Some(why) => Err(why.to_owned()),
            None => match Store::open(&self.path, self.most_bytes).and_then(|store| Ok((store.left()?, store))) {
                Err(e) if is_damage(&e) => Err(in_words(&e)),
                loaded => Ok(loaded?),
            },
        };
        let ((left, damaged), store) = match loaded {
            Ok(loaded) => loaded,
            Err(why) => {
                let store = salvage(&self.path, self.most_bytes, now, &why)?;
                self.is_damaged = false;
                // The new file may lack owners that this process knows.
                let known = self.owners.iter();
                let known = known.map(|((group, member), id)| (*id, group.clone(), member.clone()));
                self.new = known.map(|(id, group, member)| Owner { id, group, member }).collect();
                (store.left()?, store)
            }
        };
        if self.next_owner.is_none() {
            self.next_owner = Some(store.next_owner()?);
            self.last_at = store.last_at()?.unwrap_or(i64::MIN);
            self.waiting = left;
            self.window = self.waiting.pop_if(|last| last.start == start_of(now));
            if damaged > 0 {
                self.notes.push((now, format!("{damaged} moments could not be read")));
            }
        }
        self.store = Some(store);
        Ok(())
    }

    fn failed(&mut self, error: &anyhow::Error) {
        let why = in_words(error);
        // The next attempts, every ten seconds, will probably fail in the same way, and are not logged.
        if self.failure.is_none() {
            note!("cannot write {}: {}; it is tried again", self.path.display(), cli::printable(&why));
        }
        self.failure = Some(why);
        if is_damage(error) {
            (self.store, self.is_damaged) = (None, true);
        }
        // On a full disk, SQLite has rolled back the transaction.
        self.store.iter().for_each(Store::use_log_again);
    }

    /// Records the figures of a moment; `at` is in seconds since 1970.
    pub fn take(&mut self, at: i64, sampled: &Sampled) {
        let at = at.div_euclid(STEP_S) * STEP_S;
        self.look_at_clock(at);
        if self.window.as_ref().is_some_and(|window| window.start != start_of(at)) {
            self.waiting.extend(self.window.take());
            self.is_to_tidy = true;
        }
        while self.waiting.len() > MOST_WAITING && self.failure.is_some() {
            let start = self.waiting.remove(0).start;
            let why = self.failure.clone().unwrap_or_default();
            self.notes
                .push((start, format!("figures of {WINDOW_S} s were lost: the file could not be written: {why}")));
        }
        if self.store.is_none()
            && let Err(e) = self.reopen(at)
        {
            self.failed(&e);
        }
        let moment = self.numbered(at, sampled);
        self.window.get_or_insert_with(|| Window::of(at)).add(at, &moment);
        match self.write(at, &moment) {
            Ok(()) => self.recovered(at),
            Err(e) => self.failed(&e),
        }
    }

    fn look_at_clock(&mut self, at: i64) {
        let passed = at.saturating_sub(self.last_at);
        if passed < 0 {
            let text =
                format!("the clock was set back by {} s: of what is recorded twice, the later is shown", -passed);
            self.notes.push((at, text));
        }
        self.steady = if (0..=JUMP_S).contains(&passed) { self.steady + 1 } else { 0 };
        self.last_at = at;
    }

    fn recovered(&mut self, at: i64) {
        if let Some(why) = self.failure.take() {
            note!("{} is written again", self.path.display());
            let text =
                format!("the file could not be written for a time: {why}; what was not kept meanwhile is missing");
            self.notes.push((at, text));
        }
    }

    fn write(&mut self, at: i64, moment: &Moment) -> anyhow::Result<()> {
        let store = self.store.as_mut().context("it is not open")?;
        store.keep(at, moment, &self.new, &self.waiting, &self.notes)?;
        self.new.clear();
        self.waiting.clear();
        self.notes.clear();
        // An eighth of the file is kept free, so that the blocks of the next windows fit.
        store.make_room(self.most_bytes / 8 * 7, at)?;
        if self.is_to_tidy && (self.steady < SAMPLES || store.roll_up(at)?) {
            let in_use: HashSet<i64> = self.window.iter().flat_map(Window::owners).collect();
            store.forget_owners(&in_use)?;
            self.owners.retain(|_, id| in_use.contains(id));
            self.is_to_tidy = false;
        }
        Ok(())
    }

    /// Gives each owner its number, and returns the figures in ascending order of the numbers.
    fn numbered(&mut self, at: i64, sampled: &Sampled) -> Moment {
        let (mut series, mut moment) = (0, Moment::new());
        for (group, member, values) in sampled {
            series += values.len();
            if series > MOST_SERIES {
                if !std::mem::replace(&mut self.has_left_out, true) {
                    self.notes.push((at, format!("series behind the first {MOST_SERIES} are not kept")));
                }
                break;
            }
            // An owner that is new while the file cannot be read has no number yet.
            if let Some(id) = self.number(group, member) {
                moment.push((id, values.clone()));
            }
        }
        moment.sort_unstable_by_key(|(id, _)| *id);
        moment
    }

    fn number(&mut self, group: &str, member: &str) -> Option<i64> {
        let key = (group.to_owned(), member.to_owned());
        if let Some(id) = self.owners.get(&key) {
            return Some(*id);
        }
        let id = match self.store.as_ref()?.owner(group, member).ok()? {
            Some(id) => id,
            None => {
                let id = self.next_owner?;
                self.next_owner = Some(id + 1);
                self.new.push(Owner { id, group: group.to_owned(), member: member.to_owned() });
                id
            }
        };
        self.owners.insert(key, id);
        Some(id)
    }
}
