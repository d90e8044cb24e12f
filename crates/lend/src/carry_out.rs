//! Carrying a plan out, in two phases.
//!
//! ```text
//!   shrink: each guest is told its size -- until all have it, 10 s at most -->
//!   grow:   each guest is told its size; none, if a guest that had to shrink has not
//! ```

use crate::balloon::Balloon;
use crate::ledger::Ledger;
use balance::{Params, Step};
use guest::Guest;
use serde::Serialize;
use std::time::{Duration, Instant};

/// Pause between two looks at balloons that are on their way: 200 ms.
const PAUSE: Duration = Duration::from_millis(200);
/// Tolerated distance from a target, as a part of the way: 1/16.
const NEAR: u64 = 16;

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

/// One phase's step on its way.
struct Going<'a> {
    step: &'a Step,
    guest: Option<&'a Guest>,
    actual_bytes: Option<u64>,
    landed_s: Option<f64>,
    problem: Option<String>,
}

/// Carries out the two phases of a plan. Every outcome is in the journal.
///
/// # Errors
/// The ledger cannot be written: nothing further is done.
pub fn carry_out(
    (frees, grows): (&[Step], &[Step]),
    guests: &[Guest],
    ledger: &mut Ledger,
    params: &Params,
) -> anyhow::Result<Vec<Outcome>> {
    let mut outcomes = phase(frees, guests, ledger, params)?;
    let late = outcomes.iter().any(|outcome| outcome.landed_s.is_none());
    if late {
        let because = "a guest that had to shrink has not: nothing grows in this round";
        outcomes.extend(grows.iter().map(|step| not_made(step, because)));
    } else {
        outcomes.extend(phase(grows, guests, ledger, params)?);
    }
    outcomes.iter().try_for_each(|outcome| ledger.write_down(outcome))?;
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

fn phase(steps: &[Step], guests: &[Guest], ledger: &mut Ledger, params: &Params) -> anyhow::Result<Vec<Outcome>> {
    let available = || i64::try_from(host::available_bytes().unwrap_or(0)).unwrap_or(0);
    let (began, before, at_s) = (Instant::now(), available(), host::boot_clock_s());
    let mut going = Vec::new();
    for step in steps {
        let guest = guests.iter().find(|guest| guest.id == step.guest);
        let mut one = Going { step, guest, actual_bytes: None, landed_s: None, problem: None };
        match guest {
            Some(guest) => {
                ledger.note_target(guest, step.to_bytes)?;
                one.problem = tell(guest, step.to_bytes).err().map(|error| cli::exit::in_words(&error));
            }
            None => one.problem = Some("it has ended".into()),
        }
        going.push(one);
    }
    while going.iter().any(Going::is_open) && began.elapsed() < params.withdrawal {
        std::thread::sleep(PAUSE);
        going.iter_mut().filter(|one| one.is_open()).for_each(|one| one.look(began));
    }
    let host_freed_bytes = available() - before;
    let outcome = |one: Going| {
        let is_told = one.problem.is_none();
        let late = one.is_open().then(|| "its balloon has not done it in 10 s".to_owned());
        let Going { step, actual_bytes, landed_s, problem, .. } = one;
        Outcome {
            step: step.clone(),
            is_told,
            at_s,
            actual_bytes,
            host_freed_bytes,
            landed_s,
            problem: problem.or(late),
        }
    };
    Ok(going.into_iter().map(outcome).collect())
}

fn tell(guest: &Guest, size_bytes: u64) -> anyhow::Result<()> {
    match Balloon::open(guest)? {
        Some(mut balloon) => balloon.set(size_bytes),
        None => anyhow::bail!("{} has no balloon", guest.id),
    }
}

impl Going<'_> {
    fn is_open(&self) -> bool {
        self.landed_s.is_none() && self.problem.is_none()
    }

    /// Looks whether the guest has its size.
    fn look(&mut self, began: Instant) {
        let Some(guest) = self.guest else { return };
        let size = Balloon::open(guest).ok().flatten().and_then(|mut balloon| balloon.size_bytes().ok());
        self.actual_bytes = size.or(self.actual_bytes);
        let way = self.step.from_bytes.abs_diff(self.step.to_bytes);
        if size.is_some_and(|size| size.abs_diff(self.step.to_bytes) <= way / NEAR) {
            self.landed_s = Some(began.elapsed().as_secs_f64());
        }
    }
}
