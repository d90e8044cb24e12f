//! Carries out a plan, in two phases.
//!
//! ```text
//!   shrink: each guest is told its size -- until all have it, 10 s at most -->
//!   grow:   each guest is told its size; if a guest that had to shrink has not, only guests below their guarantee are
//! ```
//!
//! Paused guests are resumed when the floor (memory that is never lent) is available again, or when the first phase is
//! over. Paused guests that have to shrink are resumed earlier, as far as the available memory allows. A phase ends
//! early if the host falls below its floor during it: the next round has to gather new facts.

use crate::balloon::Balloon;
use crate::ledger::{Entry, Ledger, Turn};
use crate::many;
use crate::pause::Hold;
use balance::{Facts, Params, Step};
use guest::Guest;
use serde::Serialize;
use std::time::{Duration, Instant};

/// Pause between two questions for the sizes of guests whose balloons are on their way: 200 ms.
const PAUSE: Duration = Duration::from_millis(200);
/// Distance from the target size at which a step counts as complete, as a part of the step: 1/16.
const NEAR: u64 = 16;

/// Problem of a step whose guest is gone.
const ENDED: &str = "it has ended";

/// A step that was made, or tried.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// The step.
    #[serde(flatten)]
    pub step: Step,
    /// Whether the guest was told.
    pub is_told: bool,
    /// When, in seconds since the host started.
    pub at_s: u64,
    /// The guest's size when the wait was over; `None` if it does not answer.
    pub actual_bytes: Option<u64>,
    /// Change of the host's available memory from before the phase to its end, over all steps of the phase.
    pub host_freed_bytes: i64,
    /// Seconds until the size was reached; `None` if it was not.
    pub landed_s: Option<f64>,
    /// The reason why the step was not made, or is not complete.
    pub problem: Option<String>,
}

/// A step of the phase that is under way.
struct Going<'a> {
    step: &'a Step,
    guest: Option<&'a Guest>,
    actual_bytes: Option<u64>,
    landed_s: Option<f64>,
    is_told: bool,
    problem: Option<String>,
}

/// What is needed to carry out a plan.
pub struct Means<'a> {
    /// All guests.
    pub guests: &'a [Guest],
    /// The ledger, which gets targets and the journal.
    pub ledger: &'a mut Ledger,
    /// The right to change anything.
    pub turn: &'a Turn,
    /// Constants.
    pub params: &'a Params,
    /// Guests that are paused.
    pub hold: &'a mut Hold,
    /// The facts of which the plan was made.
    pub facts: &'a Facts,
    /// Tells how much memory is available at the moment.
    pub available: &'a dyn Fn() -> u64,
}

/// Carries out the two phases of a plan. The journal has each step before the guest is told, and its outcome.
///
/// # Errors
/// The ledger cannot be written: nothing further is done.
pub fn carry_out((frees, grows): (&[Step], &[Step]), means: &mut Means) -> anyhow::Result<Vec<Outcome>> {
    let mut outcomes = means.phase(&frees.iter().collect::<Vec<_>>())?;
    means.hold.resume(|_| false, means.ledger, means.turn)?;
    let is_late = |outcome: &Outcome| {
        outcome.landed_s.is_none() && guest_of(means.guests, &outcome.step).is_some_and(|guest| !has_ended(guest))
    };
    let late = outcomes.iter().any(is_late) || (!grows.is_empty() && !means.is_relieved());
    // Growth up to a guarantee is made even if another guest has not shrunk.
    let (made, left): (Vec<&Step>, Vec<&Step>) = grows.iter().partition(|step| !late || step.is_owed);
    for step in left {
        let outcome = not_made(
            step,
            "a guest that had to shrink has not, or the host is short of memory: only guarantees are kept",
        );
        means.ledger.write_down(means.turn, Entry::Outcome(&outcome))?;
        outcomes.push(outcome);
    }
    outcomes.extend(means.phase(&made)?);
    Ok(outcomes)
}

fn not_made(step: &Step, why: &str) -> Outcome {
    Outcome {
        step: step.clone(),
        is_told: false,
        at_s: host::boot_clock_s(),
        actual_bytes: None,
        host_freed_bytes: 0,
        landed_s: None,
        problem: Some(why.into()),
    }
}

impl Means<'_> {
    /// Tells guests a size again, without waiting for the outcome: a driver that was not running before may act on it.
    ///
    /// # Errors
    /// The ledger cannot be written.
    pub fn remind(&mut self, steps: &[Step]) -> anyhow::Result<()> {
        let at_s = host::boot_clock_s();
        let guests = self.guests;
        self.ledger.write_all_down(self.turn, steps.iter().map(|step| Entry::Reminder { at_s, step }))?;
        let told = |step: &Step| Some((guest_of(guests, step)?, step.to_bytes));
        self.ledger.note_targets(self.turn, steps.iter().filter_map(told))?;
        // A failure is ignored: a driver that does not do as told is flagged already.
        many::each(steps.iter(), |step| guest_of(guests, step).map(|guest| tell(guest, step.to_bytes)));
        Ok(())
    }

    /// Whether the host's available memory is above the floor again.
    fn is_relieved(&self) -> bool {
        (self.available)() >= self.facts.host.floor_bytes
    }

    /// Resumes guests that have to shrink, as far as the available memory allows.
    fn resume_covered(&mut self, going: &[Going]) -> anyhow::Result<()> {
        let open = going.iter().filter(|one| one.is_open()).map(|one| one.step.guest.as_str());
        let (held, running): (Vec<&str>, Vec<&str>) = open.partition(|guest| self.hold.has(guest));
        let next = balance::resumable(self.facts, &held, &running, (self.available)());
        self.hold.resume(|guest| !next.contains(&guest), self.ledger, self.turn)
    }

    fn phase(&mut self, steps: &[&Step]) -> anyhow::Result<Vec<Outcome>> {
        let available = || i64::try_from(host::available_bytes().unwrap_or(0)).unwrap_or(0);
        let (began, before, at_s) = (Instant::now(), available(), host::boot_clock_s());
        if steps.is_empty() {
            return Ok(Vec::new());
        }
        let (guests, was_relieved) = (self.guests, self.is_relieved());
        self.ledger.write_all_down(self.turn, steps.iter().map(|step| Entry::Intent { at_s, step }))?;
        let told = |step: &&Step| Some((guest_of(guests, step)?, step.to_bytes));
        self.ledger.note_targets(self.turn, steps.iter().filter_map(told))?;
        let mut going = many::each(steps.iter(), |step| Going::tell(step, guests));
        self.resume_covered(&going)?;
        while going.iter().any(Going::is_open) && began.elapsed() < self.params.withdrawal {
            std::thread::sleep(PAUSE);
            many::each(going.iter_mut().filter(|one| one.is_open()), |one| one.look(began));
            let is_relieved = self.is_relieved();
            if is_relieved {
                self.hold.resume(|_| false, self.ledger, self.turn)?;
            } else {
                self.resume_covered(&going)?;
            }
            if was_relieved && !is_relieved {
                break;
            }
        }
        let host_freed_bytes = available().saturating_sub(before);
        let waited = began.elapsed();
        let outcomes: Vec<Outcome> = going.into_iter().map(|one| one.end(at_s, host_freed_bytes, waited)).collect();
        self.ledger.write_all_down(self.turn, outcomes.iter().map(Entry::Outcome))?;
        Ok(outcomes)
    }
}

fn guest_of<'a>(guests: &'a [Guest], step: &Step) -> Option<&'a Guest> {
    guests.iter().find(|guest| guest.id == step.guest)
}

/// Whether a guest's process has ended, even if its parent has not collected it.
fn has_ended(guest: &Guest) -> bool {
    let is_alive = |pid: &u32| host::ProcessId::of(*pid).is_ok_and(|process| process.is_alive());
    !guest.pids.first().is_some_and(is_alive)
}

fn tell(guest: &Guest, size_bytes: u64) -> anyhow::Result<()> {
    match Balloon::open(guest)? {
        Some(mut balloon) => balloon.set(size_bytes),
        None => anyhow::bail!("{} has no balloon", guest.id),
    }
}

impl<'a> Going<'a> {
    fn tell(step: &'a Step, guests: &'a [Guest]) -> Self {
        let guest = guest_of(guests, step);
        let told = guest.map_or_else(|| Err(anyhow::anyhow!(ENDED)), |guest| tell(guest, step.to_bytes));
        let is_told = told.is_ok();
        let problem = told.err().map(|error| cli::exit::in_words(&error));
        Self { step, guest, actual_bytes: None, landed_s: None, is_told, problem }
    }

    fn is_open(&self) -> bool {
        self.landed_s.is_none() && self.problem.is_none()
    }

    /// Reads the guest's size, and notes when the target is reached.
    fn look(&mut self, began: Instant) {
        let Some(guest) = self.guest else { return };
        let size = Balloon::open(guest).ok().flatten().and_then(|mut balloon| balloon.size_bytes().ok());
        self.actual_bytes = size.or(self.actual_bytes);
        if size.is_none() && has_ended(guest) {
            self.problem = Some(ENDED.into());
        }
        let way = self.step.from_bytes.abs_diff(self.step.to_bytes);
        if size.is_some_and(|size| size.abs_diff(self.step.to_bytes) <= way / NEAR) {
            self.landed_s = Some(began.elapsed().as_secs_f64());
        }
    }

    /// The outcome when the wait is over.
    fn end(self, at_s: u64, host_freed_bytes: i64, waited: Duration) -> Outcome {
        let late = self.is_open().then(|| format!("its balloon has not done it in {} s", waited.as_secs()));
        Outcome {
            step: self.step.clone(),
            is_told: self.is_told,
            at_s,
            actual_bytes: self.actual_bytes,
            host_freed_bytes,
            landed_s: self.landed_s,
            problem: self.problem.or(late),
        }
    }
}

#[cfg(test)]
#[path = "carry_out_tests.rs"]
mod tests;
