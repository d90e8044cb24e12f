//! Runs a study: all turns in their order, each kept on disk when it is done, then the verdicts.

use crate::check;
use crate::data::{Arm, Form, Length, Study};
use crate::plan::{self, Planned};
use crate::recipes::Recipe;
use crate::record::{Samples, Turn, timelines};
use crate::result::{HostFacts, Outcome, reported};
use crate::rig::Rig;
use crate::store::Store;
use anyhow::bail;
use cli::say;
use std::path::Path;
use std::time::Instant;

/// A request for a run.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The form.
    pub length: Length,
    /// The arms; none for all of the form's.
    pub arms: Vec<String>,
    /// Repetitions, in place of the form's.
    pub reps: Option<u32>,
}

/// A study with its recipe and its form.
pub struct Job<'a> {
    /// The study.
    pub study: &'a Study,
    /// Its recipe.
    pub recipe: Recipe,
    /// The form.
    pub form: Form,
    /// The request.
    pub wanted: &'a Wanted,
}

impl Job<'_> {
    /// The arms of this run: those that are asked for, or else those of its form.
    fn arms(&self) -> Vec<String> {
        let asked = &self.wanted.arms;
        let is_wanted =
            |arm: &Arm| if asked.is_empty() { arm.is_in(self.wanted.length) } else { asked.contains(&arm.name) };
        self.study.arms.iter().filter(|arm| is_wanted(arm)).map(|arm| arm.name.clone()).collect()
    }

    fn turns(&self) -> Vec<Planned> {
        plan::turns(&self.arms(), self.wanted.reps.unwrap_or(self.form.reps), self.form, self.wanted.length)
    }

    /// The run's time as estimated before it.
    pub fn estimate_s(&self) -> f64 {
        self.turns().len() as f64 * self.form.turn_seconds
    }

    /// The study whose turns it takes.
    pub fn turns_of(&self) -> &str {
        self.study.turns_of.as_ref().unwrap_or(&self.study.id)
    }

    /// Runs it. `state` holds the turns of runs that were cut off. With `keeps`, it holds this run's at the end, too:
    /// another job is to take them.
    ///
    /// # Errors
    /// A turn cannot be measured. Those before it are kept.
    pub fn run(&self, state: &Path, identity: &str, keeps: bool) -> anyhow::Result<Outcome> {
        let id = &self.study.id;
        let store = Store::open(state, &format!("{}-{}", self.turns_of(), self.wanted.length.name()), identity)?;
        let turns = self.turns();
        let mut rig: Option<Rig> = None;
        let mut progress = Progress::new(self.form.turn_seconds);
        let mut done: Vec<Turn> = Vec::new();
        for (n, planned) in turns.iter().enumerate() {
            let turn = match store.find(planned)? {
                Some(turn) => turn,
                None => {
                    progress.say(id, planned, n, turns.len());
                    let rig = if let Some(rig) = &mut rig { rig } else { rig.insert(Rig::start()?) };
                    let turn = self.measure(rig, planned)?;
                    store.keep(planned, &turn)?;
                    turn
                }
            };
            progress.took(turn.seconds);
            if planned.rep.is_some() {
                done.push(turn);
            }
        }
        if let Some(rig) = rig {
            rig.finish()?;
        }
        if !keeps {
            store.clear()?;
        }
        Ok(self.outcome(&done, progress.seconds))
    }

    fn measure(&self, rig: &mut Rig, planned: &Planned) -> anyhow::Result<Turn> {
        let begin = Instant::now();
        let measured = (self.recipe)(rig, planned);
        rig.end_turn()?;
        if let Some(signal) = host::interrupted() {
            bail!("interrupted by signal {signal}: the same command goes on after the last turn that was done");
        }
        let why = || format!("{}, arm {}, repetition {:?}", self.study.id, planned.arm, planned.rep);
        let measured = measured.map_err(|e| e.context(why()))?;
        Ok(Turn {
            arm: planned.arm.clone(),
            rep: planned.rep.unwrap_or(0),
            seconds: begin.elapsed().as_secs_f64(),
            measured,
        })
    }

    fn outcome(&self, turns: &[Turn], seconds: f64) -> Outcome {
        let samples = Samples::of_turns(turns);
        let mut notes: Vec<String> = turns.iter().flat_map(|turn| turn.measured.notes.clone()).collect();
        notes.sort();
        notes.dedup();
        Outcome {
            id: self.study.id.clone(),
            form: self.wanted.length,
            verdicts: check::judge_all(self.study, &samples),
            reported: reported(self.study),
            measured: samples.records(self.study),
            timelines: timelines(turns),
            notes,
            host: HostFacts::read(),
            seconds,
            estimated_seconds: self.estimate_s(),
        }
    }
}

/// The time of the turns that are done, and the estimate of those to come.
struct Progress {
    seconds: f64,
    turns: u32,
    first_guess: f64,
}

impl Progress {
    fn new(first_guess: f64) -> Self {
        Self { seconds: 0.0, turns: 0, first_guess }
    }

    fn took(&mut self, seconds: f64) {
        self.seconds += seconds;
        self.turns += 1;
    }

    /// The mean time of a turn.
    fn of_a_turn(&self) -> f64 {
        if self.turns == 0 { self.first_guess } else { self.seconds / f64::from(self.turns) }
    }

    fn say(&self, id: &str, planned: &Planned, done: usize, of: usize) {
        let rep = planned.rep.map_or_else(|| "warm-up".to_owned(), |rep| format!("repetition {}", rep + 1));
        let left = self.of_a_turn() * (of - done) as f64;
        say!("pagefold: {id}: turn {} of {of}: {}, {rep}; about {} left", done + 1, planned.arm, in_words(left));
    }
}

/// A time as people read it.
pub fn in_words(seconds: f64) -> String {
    if seconds < 90.0 { format!("{seconds:.0} s") } else { format!("{:.1} min", seconds / 60.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimate_follows_the_turns_that_are_done() {
        let mut progress = Progress::new(30.0);
        assert_eq!(progress.of_a_turn(), 30.0);
        progress.took(10.0);
        progress.took(20.0);
        assert_eq!((progress.of_a_turn(), progress.seconds), (15.0, 30.0));
        assert_eq!((in_words(30.0), in_words(150.0)), ("30 s".to_owned(), "2.5 min".to_owned()));
    }
}
