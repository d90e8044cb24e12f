//! Runs a study: all turns in their order, each kept on disk when it is done. Then predictions are judged.

use crate::check::{self, Run};
use crate::data::{Arm, Form, Length, Study};
use crate::dose::Dose;
use crate::ksm::KsmSettings;
use crate::plan::{self, Planned};
use crate::recipes::Recipe;
use crate::record::{Samples, Turn, ksm_settings, timelines};
use crate::result::{HostFacts, Outcome, reported};
use crate::rig::Rig;
use crate::stats;
use crate::store::Store;
use anyhow::{Context, bail};
use cli::exit::{self, Stop};
use cli::{printable, say};
use std::time::{Instant, SystemTime};

/// What a run is asked for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Whether ksmd may merge other programs' memory.
    pub whole_host: bench::WholeHost,
    /// The form.
    pub length: Length,
    /// The arms; empty for all arms of the form.
    pub arms: Vec<String>,
    /// Repetitions of each arm; `None` for those of the form.
    pub reps: Option<u32>,
}

/// A study that is to be run, with its recipe and form.
pub struct Job<'a> {
    /// The study.
    pub study: &'a Study,
    /// Recipe of the study.
    pub recipe: Recipe,
    /// The form.
    pub form: Form,
    /// The request.
    pub wanted: &'a Wanted,
}

impl Job<'_> {
    /// The arms of this run: those that were asked for, or those of the form.
    fn arms(&self) -> Vec<String> {
        let asked = &self.wanted.arms;
        let is_wanted =
            |arm: &Arm| if asked.is_empty() { arm.is_in(self.wanted.length) } else { asked.contains(&arm.name) };
        self.study.arms.iter().filter(|arm| is_wanted(arm)).map(|arm| arm.name.clone()).collect()
    }

    fn reps(&self) -> u32 {
        self.wanted.reps.unwrap_or(self.form.reps)
    }

    fn turns(&self) -> Vec<Planned> {
        plan::turns(&self.arms(), self.reps(), self.form, self.wanted.length)
    }

    /// Seconds that the run will take, as estimated before it.
    pub fn estimate_s(&self) -> f64 {
        self.turns().iter().map(|turn| self.study.turn_seconds(&turn.arm, self.form)).sum()
    }

    /// Name of the study whose turns are taken: this one, or the one that measures the same turns.
    fn turns_of(&self) -> &str {
        self.study.turns_of.as_ref().unwrap_or(&self.study.id)
    }

    /// Name of the directory with its turns.
    pub fn turns_name(&self) -> String {
        format!("{}-{}", self.turns_of(), self.wanted.length.name())
    }

    /// Runs the study. `store` has the turns that an earlier run kept, and gets those of this run.
    ///
    /// # Errors
    /// No study can be run here and now: the run was told to end, or something on the host cannot be set or put back. Turns that were
    /// done are kept.
    pub fn run(&self, store: &Store, host: &HostFacts) -> anyhow::Result<Ended> {
        let mut rig: Option<Rig> = None;
        let taken = self.take(store, &mut |planned| {
            let rig = if let Some(rig) = &mut rig { rig } else { rig.insert(Rig::start(self.wanted.whole_host)?) };
            self.measure(rig, planned)
        })?;
        if let Some(rig) = rig {
            rig.finish()?;
        }
        Ok(self.end(taken, host))
    }

    /// Takes all turns, kept ones and new ones. When the host lacks something for an arm, the arm's later turns are
    /// left out. `measure` is [`Self::measure`], or what a test puts in its place.
    fn take(
        &self,
        store: &Store,
        measure: &mut dyn FnMut(&Planned) -> anyhow::Result<anyhow::Result<Turn>>,
    ) -> anyhow::Result<Taken> {
        let turns = self.turns();
        let mut progress = Progress::new(&self.study.id, self.form.turn_seconds);
        let (mut taken, mut kept) = (Taken::default(), 0);
        for (n, planned) in turns.iter().enumerate() {
            let is_left_out = |planned: &Planned| taken.left_out.iter().any(|(arm, _)| *arm == planned.arm);
            if is_left_out(planned) {
                continue;
            }
            let turn = if let Some(turn) = store.find(planned)? {
                kept += 1;
                turn
            } else {
                let arms = turns[n..].iter().filter(|left| !is_left_out(left)).map(|left| left.arm.as_str());
                progress.say(planned, (n, turns.len()), arms);
                match measure(planned)? {
                    Ok(turn) => store.keep(planned, &turn).map(|()| turn)?,
                    Err(why) if is_lack(&why) => {
                        say!("pagefold: {}: {} is left out: {}", self.study.id, planned.arm, in_words_of(&why));
                        taken.left_out.push((planned.arm.clone(), why));
                        continue;
                    }
                    Err(why) => return Ok(Taken { failed: Some(why), ..taken }),
                }
            };
            progress.took(&planned.arm, turn.seconds);
            taken.seconds += turn.seconds;
            if planned.rep.is_some() {
                taken.turns.push(turn);
            }
        }
        if kept > 0 {
            say!("pagefold: {}: turns that were kept: {kept} of {}", self.study.id, turns.len());
        }
        Ok(taken)
    }

    /// Measures a turn. The outer error ends the whole command, the inner one is an error of this turn only.
    fn measure(&self, rig: &mut Rig, planned: &Planned) -> anyhow::Result<anyhow::Result<Turn>> {
        let begin = Instant::now();
        let measured = (self.recipe)(rig, planned);
        let ksm = KsmSettings::read();
        rig.end_turn()?;
        if let Some(signal) = host::interrupted() {
            bail!("interrupted by signal {signal}: the same command goes on after the last turn that was done");
        }
        let why = || format!("{}, arm {}, repetition {:?}", self.study.id, planned.arm, planned.rep);
        Ok(measured.with_context(why).map(|measured| Turn::new(planned, begin.elapsed().as_secs_f64(), ksm, measured)))
    }

    fn end(&self, taken: Taken, host: &HostFacts) -> Ended {
        match taken {
            Taken { failed: Some(why), .. } => Ended::Failed(why),
            Taken { turns, left_out, .. } if turns.is_empty() && !left_out.is_empty() => Ended::Lacks,
            taken => {
                Ended::Measured { is_whole: taken.left_out.is_empty(), outcome: Box::new(self.outcome(&taken, host)) }
            }
        }
    }

    fn outcome(&self, Taken { turns, left_out, seconds, .. }: &Taken, host: &HostFacts) -> Outcome {
        let samples = Samples::of_turns(turns);
        let date = now();
        let run = Run { date: Some(date.clone()), samples: samples.clone() };
        let of_turn =
            |turn: &Turn| turn.measured.notes.iter().map(|note| format!("{}: {note}", turn.arm)).collect::<Vec<_>>();
        let mut notes: Vec<String> = turns.iter().flat_map(of_turn).collect();
        notes.extend(left_out.iter().map(|(arm, why)| format!("{arm}: left out: {}", in_words_of(why))));
        notes.sort();
        notes.dedup();
        Outcome {
            id: self.study.id.clone(),
            form: self.wanted.length,
            arms: self.arms(),
            reps: Some(self.reps()),
            verdicts: check::judge_runs(self.study, &[run]),
            reported: reported(self.study),
            measured: samples.records(self.study),
            timelines: timelines(turns),
            notes,
            ksm: ksm_settings(turns),
            host: host.clone(),
            seconds: *seconds,
            estimated_seconds: self.estimate_s(),
            date: Some(date.clone()),
            dose: Some(Dose::of(self.study, self.wanted.length)),
            earlier: Vec::new(),
        }
    }
}

/// The present date and time, UTC.
#[expect(clippy::disallowed_methods, reason = "a date for people, and not a time that is measured")]
fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

/// How the run of a study ended.
#[derive(Debug)]
pub enum Ended {
    /// There is a result. It has all arms if none was left out.
    Measured {
        /// The result.
        outcome: Box<Outcome>,
        /// Whether it has all arms.
        is_whole: bool,
    },
    /// The host lacks something for each of the arms.
    Lacks,
    /// A turn could not be measured. The turns before it are kept.
    Failed(anyhow::Error),
}

/// The turns that a run has measured or found.
#[derive(Debug, Default)]
struct Taken {
    turns: Vec<Turn>,
    /// Arms for which the host lacks something, with the reason.
    left_out: Vec<(String, anyhow::Error)>,
    /// Why a turn could not be measured, if one could not.
    failed: Option<anyhow::Error>,
    /// Time of all turns, warm-ups included.
    seconds: f64,
}

/// Whether an error says that the host lacks something.
fn is_lack(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| matches!(cause.downcast_ref(), Some(Stop::HostLacks(_))))
}

/// An error as text that is safe to print on a terminal.
pub fn in_words_of(error: &anyhow::Error) -> String {
    printable(&exit::in_words(error))
}

/// Seconds of the turns that are done, for an estimate of those to come.
struct Progress<'a> {
    study: &'a str,
    /// Time of a turn as planned.
    planned_s: f64,
    /// Arm and time of each turn that is done.
    done: Vec<(String, f64)>,
}

impl<'a> Progress<'a> {
    fn new(study: &'a str, planned_s: f64) -> Self {
        Self { study, planned_s, done: Vec::new() }
    }

    fn took(&mut self, arm: &str, seconds: f64) {
        self.done.push((arm.to_owned(), seconds));
    }

    /// Estimated seconds for a turn: the mean of the arm's turns so far. If there are none, it is the mean of all
    /// turns, and for the first turn the planned time.
    fn of_a_turn(&self, arm: &str) -> f64 {
        let of = |is_meant: &dyn Fn(&str) -> bool| -> Vec<f64> {
            self.done.iter().filter(|(done, _)| is_meant(done)).map(|(_, seconds)| *seconds).collect()
        };
        let of_arm = of(&|done| done == arm);
        let times = if of_arm.is_empty() { of(&|_| true) } else { of_arm };
        if times.is_empty() { self.planned_s } else { stats::mean(&times) }
    }

    /// Prints which turn begins, how many turns are done, and how long the rest will take. `arms` has an arm for this
    /// turn and for each after it.
    fn say<'b>(&self, planned: &Planned, (before, all): (usize, usize), arms: impl Iterator<Item = &'b str>) {
        let rep = planned.rep.map_or_else(|| "warm-up".to_owned(), |rep| format!("repetition {}", rep + 1));
        let left = in_words(arms.map(|arm| self.of_a_turn(arm)).sum());
        say!("pagefold: {}: turn {} of {all}: {}, {rep}; about {left} left", self.study, before + 1, planned.arm);
    }
}

/// A duration as people write it.
pub fn in_words(seconds: f64) -> String {
    if seconds < 90.0 { format!("{seconds:.0} s") } else { format!("{:.1} min", seconds / 60.0) }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::data;
    use crate::record::Measured;
    use anyhow::anyhow;

    /// Runs `run` with a job of the short form of kloster-t8.3, which has the arms `ksm` and `fold`.
    pub fn with_job<T>(reps: u32, run: impl FnOnce(&Job<'_>) -> T) -> T {
        let study = data::all().into_iter().find(|study| study.id == "kloster-t8.3").unwrap();
        let whole_host = bench::WholeHost { yes: false };
        let wanted = Wanted { length: Length::Short, arms: Vec::new(), reps: Some(reps), whole_host };
        let (recipe, form) = (crate::recipes::of(&study.id).unwrap(), study.short.unwrap());
        run(&Job { study: &study, recipe, form, wanted: &wanted })
    }

    /// A turn with one figure and one note.
    pub fn turn(planned: &Planned) -> Turn {
        let mut measured = Measured::default();
        measured.put("merge_us", 2.0);
        measured.note("noted");
        Turn::new(planned, 1.5, None, measured)
    }

    fn lack() -> anyhow::Error {
        anyhow::Error::from(Stop::HostLacks("no such program".into())).context("cannot begin")
    }

    /// The end of a run of two repetitions, and the turns that were measured for it.
    fn end(
        store: &Store,
        answer: &dyn Fn(&Planned) -> anyhow::Result<anyhow::Result<Turn>>,
    ) -> (anyhow::Result<Ended>, String) {
        with_job(2, |job| {
            let mut measured = Vec::new();
            let taken = job.take(store, &mut |planned| {
                measured.push(format!("{}{}", planned.arm, planned.rep.unwrap()));
                answer(planned)
            });
            (taken.map(|taken| job.end(taken, &HostFacts::default())), measured.join(" "))
        })
    }

    #[test]
    fn arm_that_host_lacks_something_for_is_left_out_and_others_go_on() {
        let state = tempfile::tempdir().unwrap();
        let store = Store::open(state.path(), "x", "1").unwrap();
        let (ended, measured) = end(&store, &|p| Ok(if p.arm == "ksm" { Err(lack()) } else { Ok(turn(p)) }));
        let Ok(Ended::Measured { outcome, is_whole: false }) = ended else { panic!("{ended:?}") };
        assert_eq!(measured, "ksm0 fold0 fold1");
        assert_eq!(outcome.notes, ["fold: noted", "ksm: left out: cannot begin: no such program"]);
        assert_eq!((outcome.seconds, outcome.reps, outcome.measured[0].n), (3.0, Some(2), 2));
        let (ended, measured) = end(&store, &|_| Ok(Err(lack())));
        assert!(
            matches!(ended, Ok(Ended::Measured { is_whole: false, .. })) && measured == "ksm0",
            "turns of fold are kept"
        );
    }

    #[test]
    fn study_of_which_host_lacks_all_arms_has_no_result() {
        let state = tempfile::tempdir().unwrap();
        let store = Store::open(state.path(), "x", "1").unwrap();
        let (ended, measured) = end(&store, &|_| Ok(Err(lack())));
        assert!(matches!(ended, Ok(Ended::Lacks)) && measured == "ksm0 fold0", "{ended:?}");
    }

    #[test]
    fn turns_before_an_error_are_kept() {
        let state = tempfile::tempdir().unwrap();
        let store = Store::open(state.path(), "x", "1").unwrap();
        let (ended, measured) = end(&store, &|p| Ok(if p.rep == Some(1) { Err(anyhow!("full")) } else { Ok(turn(p)) }));
        assert!(matches!(&ended, Ok(Ended::Failed(why)) if why.to_string() == "full"), "{ended:?}");
        assert_eq!(measured, "ksm0 fold0 fold1");
        let (ended, measured) = end(&store, &|p| if p.arm == "ksm" { bail!("interrupted") } else { Ok(Ok(turn(p))) });
        assert!(ended.is_err() && measured == "fold1 ksm1", "{measured}");
        let (ended, measured) = end(&store, &|p| Ok(Ok(turn(p))));
        assert!(matches!(ended, Ok(Ended::Measured { is_whole: true, .. })) && measured == "ksm1", "{ended:?}");
    }

    #[test]
    fn estimate_follows_the_turns_of_each_arm_that_are_done() {
        let mut progress = Progress::new("x", 30.0);
        assert_eq!(progress.of_a_turn("a"), 30.0);
        progress.took("a", 10.0);
        progress.took("a", 20.0);
        progress.took("b", 90.0);
        assert_eq!(["a", "b", "c"].map(|arm| progress.of_a_turn(arm)), [15.0, 90.0, 40.0]);
        assert_eq!((in_words(30.0), in_words(150.0)), ("30 s".to_owned(), "2.5 min".to_owned()));
    }
}
