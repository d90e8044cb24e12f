//! The balancer's side of pauses: a holder (`hold.rs`) for one round, and guests that a killed one has left paused.

use crate::hold::{self, Command, Replies, Reply, Target};
use crate::ledger::{Entry, Ledger, Turn};
use anyhow::Context;
use balance::Pause;
use guest::Guest;
use host::ProcessId;
use serde::Serialize;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Instant;

/// A pause that was made, or tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Paused {
    /// The guest, and the reason.
    #[serde(flatten)]
    pub pause: Pause,
    /// Time for which it stood still, in milliseconds; 0 if it was not paused.
    pub paused_ms: u64,
    /// The reason why it was not paused, or not resumed.
    pub problem: Option<String>,
}

/// Guests that are paused in one round. Dropping it resumes them, as does the end of this process.
#[derive(Default)]
pub struct Hold {
    holder: Option<Holder>,
    all: Vec<Held>,
}

/// A guest that was to be paused.
struct Held {
    paused: Paused,
    since: Instant,
    is_paused: bool,
}

/// The process that pauses and resumes.
struct Holder {
    child: Option<Child>,
    /// It ends when this closes.
    commands: Option<ChildStdin>,
    replies: BufReader<ChildStdout>,
}

impl Hold {
    /// Whether no guest is paused.
    pub fn is_empty(&self) -> bool {
        !self.all.iter().any(|held| held.is_paused)
    }

    /// Whether a guest is paused.
    pub(crate) fn has(&self, guest: &str) -> bool {
        self.all.iter().any(|held| held.is_paused && held.paused.pause.guest == guest)
    }

    /// Pauses guests. Ledger and journal have each of them before.
    ///
    /// # Errors
    /// The ledger cannot be written, or the holder cannot be started: nobody is paused then.
    pub fn pause(
        &mut self,
        pauses: &[Pause],
        guests: &[Guest],
        ledger: &mut Ledger,
        turn: &Turn,
    ) -> anyhow::Result<()> {
        let known = |pause: &&Pause| !self.all.iter().any(|held| held.paused.pause.guest == pause.guest);
        let target =
            |pause: &Pause| Some((pause.clone(), target(guests.iter().find(|guest| guest.id == pause.guest)?)?));
        let wanted: Vec<(Pause, Target)> = pauses.iter().filter(known).filter_map(target).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let at_s = host::boot_clock_s();
        for (pause, target) in &wanted {
            ledger.write_down(turn, &Entry::Pause { at_s, pause })?;
            ledger.note_pause(turn, target)?;
        }
        if self.holder.is_none() {
            self.holder = Some(Holder::start()?);
        }
        let since = Instant::now();
        let targets = wanted.iter().map(|(_, target)| target.clone()).collect();
        let replies = self.ask(&Command::Stop(targets));
        for (pause, _) in wanted {
            let reply = replies.iter().find(|reply| reply.guest == pause.guest);
            let problem = reply.map_or_else(|| Some("the holder has ended".into()), |reply| reply.problem.clone());
            // Without a reply it may be paused.
            let is_paused = reply.is_none_or(|reply| reply.is_paused);
            self.all.push(Held { paused: Paused { pause, paused_ms: 0, problem }, since, is_paused });
        }
        Ok(())
    }

    /// Resumes guests, all but those that `keeps` names.
    ///
    /// # Errors
    /// The ledger cannot be written.
    pub fn resume(&mut self, keeps: impl Fn(&str) -> bool, ledger: &mut Ledger, turn: &Turn) -> anyhow::Result<()> {
        let is_due = |held: &&mut Held| held.is_paused && !keeps(&held.paused.pause.guest);
        let guests: Vec<String> =
            self.all.iter_mut().filter(is_due).map(|held| held.paused.pause.guest.clone()).collect();
        if guests.is_empty() {
            return Ok(());
        }
        let replies = self.ask(&Command::Cont(guests));
        for held in self.all.iter_mut().filter(is_due) {
            let guest = held.paused.pause.guest.clone();
            let own_ms = u64::try_from(held.since.elapsed().as_millis()).unwrap_or(u64::MAX);
            let reply = replies.iter().find(|reply| reply.guest == guest).cloned();
            let reply = reply.unwrap_or_else(|| Reply { paused_ms: own_ms, ..resume_alone(&guest, ledger) });
            held.is_paused = false;
            (held.paused.paused_ms, held.paused.problem) = (reply.paused_ms, reply.problem);
            if !reply.is_paused {
                ledger.note_resumed(turn, &guest)?;
            }
            ledger.write_down(turn, &Entry::Resume { at_s: host::boot_clock_s(), paused: &held.paused })?;
        }
        Ok(())
    }

    /// Resumes all guests, and tells for how long each stood still.
    ///
    /// # Errors
    /// The ledger cannot be written.
    pub fn end(mut self, ledger: &mut Ledger, turn: &Turn) -> anyhow::Result<Vec<Paused>> {
        self.resume(|_| false, ledger, turn)?;
        Ok(std::mem::take(&mut self.all).into_iter().map(|held| held.paused).collect())
    }

    /// Replies of the holder; none if it has ended.
    fn ask(&mut self, command: &Command) -> Replies {
        self.holder.as_mut().and_then(|holder| holder.ask(command).ok()).unwrap_or_default()
    }
}

impl Holder {
    fn start() -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find this program to start it again")?;
        let mut child = std::process::Command::new(program)
            .args(["balance", "hold"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Signals of a terminal are meant for the balancer.
            .process_group(0)
            .spawn()
            .context("cannot start the process that resumes guests")?;
        let replies = BufReader::new(child.stdout.take().context("a process without output")?);
        Ok(Self { commands: child.stdin.take(), child: Some(child), replies })
    }

    fn ask(&mut self, command: &Command) -> anyhow::Result<Replies> {
        let commands = self.commands.as_mut().context("its input is closed")?;
        writeln!(commands, "{}", serde_json::to_string(command)?)?;
        let mut line = String::new();
        self.replies.read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.commands = None;
        // It lives on while a guest's QEMU does not answer.
        if let Some(mut child) = self.child.take() {
            std::thread::spawn(move || child.wait());
        }
    }
}

/// Resumes guests that a process has left paused that was killed. To have the turn means that it is gone.
///
/// # Errors
/// The ledger cannot be written.
pub fn resume_left(ledger: &mut Ledger, turn: &Turn) -> anyhow::Result<()> {
    for guest in ledger.left_paused() {
        let reply = resume_alone(&guest, ledger);
        let pause = Pause { guest: guest.clone(), reason: "the process that had paused it is gone".into() };
        let paused = Paused { pause, paused_ms: 0, problem: reply.problem };
        if paused.problem.is_none() {
            ledger.note_resumed(turn, &guest)?;
        }
        ledger.write_down(turn, &Entry::Resume { at_s: host::boot_clock_s(), paused: &paused })?;
    }
    Ok(())
}

/// Resumes a guest without a holder.
fn resume_alone(guest: &str, ledger: &Ledger) -> Reply {
    let resumed = ledger.paused(guest).map_or(Ok(()), |target| hold::resume(target.process, &target.qmp));
    Reply { guest: guest.to_owned(), is_paused: resumed.is_err(), paused_ms: 0, problem: resumed.err() }
}

fn target(guest: &Guest) -> Option<Target> {
    let (pid, qmp) = guest::qmp_place(guest)?;
    Some(Target { guest: guest.id.clone(), process: ProcessId::of(pid).ok()?, qmp })
}
