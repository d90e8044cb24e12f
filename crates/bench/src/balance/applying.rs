//! A running `pagefold balance apply --every`, and the states of balloon drivers that it reports after each round.

use crate::guardian::Guardian;
use anyhow::{Context, bail};
use host::ProcessId;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Last reported state of each guest's balloon driver, and the moment at which that state was first reported.
type States = BTreeMap<String, (String, Instant)>;

/// The process of `pagefold balance apply`. Dropping it kills it, as a crash would.
pub struct Applying {
    child: Child,
    states: Arc<Mutex<States>>,
    rounds: Arc<AtomicUsize>,
}

impl Applying {
    /// Starts a command that writes a JSON object to standard output for each round.
    ///
    /// # Errors
    /// The command cannot be started.
    pub fn start(mut command: Command, guardian: &mut Guardian) -> anyhow::Result<Self> {
        let mut child = command.stdout(Stdio::piped()).spawn().context("cannot run pagefold balance apply")?;
        guardian.keep_process(ProcessId::of(child.id())?)?;
        let lines = BufReader::new(child.stdout.take().context("a process without output")?).lines();
        let states = Arc::new(Mutex::new(States::new()));
        let told = Arc::clone(&states);
        let rounds = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&rounds);
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let round: Value = serde_json::from_str(&line).unwrap_or_default();
                counted.fetch_add(1, Ordering::Relaxed);
                take(&mut told.lock().unwrap_or_else(PoisonError::into_inner), &round);
            }
        });
        Ok(Self { child, states, rounds })
    }

    /// Number of rounds that the process has reported.
    pub fn rounds(&self) -> usize {
        self.rounds.load(Ordering::Relaxed)
    }

    /// Waits until the last reported state of a guest's balloon driver is this one. `gone` stands for a guest that is
    /// reported no more. Returns the moment when the state was first reported.
    ///
    /// # Errors
    /// The state is another one when the time is over, or the process has ended.
    pub fn wait_for(&mut self, guest: &str, state: &str, within: Duration) -> anyhow::Result<Instant> {
        let end = Instant::now() + within;
        loop {
            let told = self.states.lock().unwrap_or_else(PoisonError::into_inner).get(guest).cloned();
            match told {
                Some((is, at)) if is == state => return Ok(at),
                told if Instant::now() > end => {
                    bail!("{guest} is {:?} and not {state} after {} s", told.map(|told| told.0), within.as_secs())
                }
                _ => {}
            }
            self.check()?;
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Checks that the process still runs.
    ///
    /// # Errors
    /// The process has ended.
    pub fn check(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("pagefold balance apply has ended: {status}"),
            None => Ok(()),
        }
    }

    /// Numbers of open files and of threads of the process.
    ///
    /// # Errors
    /// The process has ended.
    pub fn held(&self) -> anyhow::Result<(usize, usize)> {
        let count =
            |what| Ok::<_, std::io::Error>(std::fs::read_dir(format!("/proc/{}/{what}", self.child.id()))?.count());
        Ok((count("fd")?, count("task")?))
    }
}

/// Notes the driver states in the report of a round. A guest that the report leaves out becomes `gone`.
fn take(states: &mut States, round: &Value) {
    let Some(drivers) = round["drivers"].as_object() else { return };
    let gone: Vec<String> = states.keys().filter(|guest| !drivers.contains_key(*guest)).cloned().collect();
    let told = drivers.iter().map(|(guest, state)| (guest.clone(), state.as_str().unwrap_or_default().to_owned()));
    for (guest, state) in told.chain(gone.into_iter().map(|guest| (guest, "gone".to_owned()))) {
        if states.get(&guest).is_none_or(|(before, _)| *before != state) {
            states.insert(guest, (state, Instant::now()));
        }
    }
}

impl Drop for Applying {
    fn drop(&mut self) {
        // Fails only if it has ended already; waiting then reaps it all the same.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
