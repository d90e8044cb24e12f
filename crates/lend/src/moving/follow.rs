//! Follows a migration to its end, by the rules in [`super`].

use super::note::Note;
use super::{LOOK, Moved, Progress, Wanted, migration, status};
use crate::hold::Target;
use anyhow::{Context, anyhow, bail};
use guest::Qmp;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Multiple of [`Wanted::give_up`] without an answer after which a guest counts as lost in the switch: 10, by default 5
/// minutes. The kernel gives a TCP connection up after 15.
const LOST_AFTER: u32 = 10;
/// Longest wait until a guest whose migration has failed or was cancelled runs again: 30 s.
const RESUME_WITHIN: Duration = Duration::from_secs(30);
/// Longest time from `migrate_cancel` to the end of the migration: 60 s.
const CANCEL_WITHIN: Duration = Duration::from_secs(60);
/// Reason for which a guest stays if the command that moved it was killed while it cancelled the migration.
const KILLED: &str = "the command that moved it was killed while it cancelled";
/// States of QEMU (`query-status`) after the switch has begun.
const IN_SWITCH: [&str; 2] = ["finish-migrate", "postmigrate"];

/// A migration that is under way.
pub(super) struct Follow<'a> {
    target: &'a Target,
    wanted: &'a Wanted,
    note: &'a mut Note,
    /// The figures of the migration that showed progress last, and the time of that.
    sign: Value,
    since: Instant,
    /// When this process began to follow the migration.
    began: Instant,
    /// The migration's state at the last look.
    progress: Progress,
    /// Whether this process, or one that was killed, has paused the guest, so as to cancel.
    is_paused_by_us: bool,
    /// When QEMU was told to cancel.
    cancelled: Option<Instant>,
}

/// Where the guest is when its migration has ended: at the destination, or here for a reason.
enum End {
    There(Moved),
    Here(String),
}

impl<'a> Follow<'a> {
    pub(super) fn of(target: &'a Target, wanted: &'a Wanted, note: &'a mut Note) -> Self {
        let (now, progress, cancelled) = (Instant::now(), Progress::default(), None);
        let is_paused_by_us = note.told().is_some_and(|told| told.pauses);
        Self { target, wanted, note, sign: Value::Null, since: now, began: now, progress, is_paused_by_us, cancelled }
    }

    /// Waits for the end of the migration. `show` is called after each look.
    pub(super) fn until_end(mut self, show: &mut dyn FnMut(&Progress)) -> anyhow::Result<Moved> {
        let guest = cli::printable(&self.target.guest);
        let mut why_not = self.is_paused_by_us.then(|| KILLED.to_owned());
        loop {
            std::thread::sleep(LOOK);
            if !self.target.process.is_alive() {
                bail!("{guest} has ended while it was moved: its QEMU is gone. Look for it at the destination");
            }
            // While it sends the rest, QEMU does not answer.
            if let Some(end) = self.look().unwrap_or_default() {
                return self.judge(end, why_not);
            }
            show(&self.progress);
            let Some(reason) = self.reason_to_stay() else { continue };
            self.have_it_stay(&guest, why_not.get_or_insert(reason))?;
        }
    }

    /// Cancels the migration. An error if it does not end, or if QEMU does not answer for too long: it then says where
    /// the guest may be.
    fn have_it_stay(&mut self, guest: &str, reason: &str) -> anyhow::Result<()> {
        match self.cancel() {
            Ok(()) if self.cancelled.get_or_insert_with(Instant::now).elapsed() > CANCEL_WITHIN => bail!(
                "{guest} stands still here, and its QEMU does not end the migration in {} s: {reason}. The same command tries again",
                CANCEL_WITHIN.as_secs()
            ),
            Err(_) if self.since.elapsed() > self.wanted.give_up.saturating_mul(LOST_AFTER) => {
                Err(self.lost(guest, reason))
            }
            _ => Ok(()),
        }
    }

    /// The result of a migration that has ended. `why_not` is the reason for which this process tried to cancel it, if
    /// it did.
    fn judge(&self, end: End, why_not: Option<String>) -> anyhow::Result<Moved> {
        let guest = cli::printable(&self.target.guest);
        match end {
            End::There(_) if self.is_paused_by_us => bail!(
                "{guest} is at its destination, where it may stand still: this command was to cancel just then. If it is paused there, have \
                 it go on by that QEMU's QMP: cont. Its QEMU here must not go on; the same command ends it"
            ),
            End::There(moved) => Ok(moved),
            End::Here(reason) => {
                let reason = why_not.unwrap_or(reason);
                self.until_it_runs().with_context(|| format!("{guest} is not moved, and may stand still: {reason}"))?;
                bail!("{guest} is not moved, and runs as before: {reason}")
            }
        }
    }

    /// The end of the migration, if it has come.
    fn look(&mut self) -> anyhow::Result<Option<End>> {
        let mut qmp = self.qmp()?;
        let found = migration(&mut qmp)?;
        let ram = &found["ram"];
        let sign = json!([found["status"], ram["transferred"], ram["remaining"], ram["dirty-sync-count"]]);
        if sign != self.sign {
            (self.sign, self.since) = (sign, Instant::now());
        }
        self.progress = Progress::of(&found);
        match found["status"].as_str().unwrap_or_default() {
            "completed" => Ok(Some(End::There(moved(&found)))),
            "failed" | "cancelled" | "none" | "" => {
                let reason =
                    found["error-desc"].as_str().unwrap_or("the destination has hung up, or cannot be reached");
                Ok(Some(End::Here(cli::printable(reason))))
            }
            _ => Ok(None),
        }
    }

    /// The reason to cancel the migration now; `None` if there is none.
    fn reason_to_stay(&self) -> Option<String> {
        if host::interrupted().is_some() {
            return Some("this command was interrupted".to_owned());
        }
        if self.is_paused_by_us {
            return Some(KILLED.to_owned());
        }
        let silent = self.since.elapsed();
        if silent > self.wanted.give_up {
            return Some(format!("nothing was sent for {} s", silent.as_secs()));
        }
        // If another process began the migration, its time counts from that beginning, as QEMU tells it.
        let taken = self.began.elapsed().max(Duration::from_secs_f64(self.progress.seconds));
        (taken > self.wanted.within).then(|| self.progress.too_late(taken))
    }

    /// Cancels the migration, unless the switch has begun. The next look sees the end.
    fn cancel(&mut self) -> anyhow::Result<()> {
        let mut qmp = self.qmp()?;
        if status(&mut qmp)? == "running" {
            self.note.tell_pause()?;
            // QEMU may stop the guest, and its answer be lost.
            self.is_paused_by_us = true;
            qmp.execute("stop", json!({}))?;
        }
        let state = status(&mut qmp)?;
        anyhow::ensure!(!IN_SWITCH.contains(&state.as_str()), "the switch has begun");
        qmp.execute("migrate_cancel", json!({}))?;
        Ok(())
    }

    /// Waits until a guest that has stayed runs. If this process has paused the guest, it is resumed: the destination
    /// has not got it.
    fn until_it_runs(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + RESUME_WITHIN;
        loop {
            let tried = self.qmp().and_then(|mut qmp| {
                if self.is_paused_by_us && status(&mut qmp)? != "running" {
                    qmp.execute("cont", json!({}))?;
                }
                status(&mut qmp)
            });
            match tried {
                Ok(status) if status == "running" => return Ok(()),
                tried if Instant::now() > deadline => {
                    return Err(tried.map_or_else(|why| why, |status| anyhow!("it is {status}")));
                }
                _ => std::thread::sleep(LOOK),
            }
        }
    }

    /// Handles a migration in whose switch neither side answers: the source is stopped, so that it cannot go on.
    fn lost(&self, guest: &str, reason: &str) -> anyhow::Error {
        let (pid, to) = (self.target.process.pid, &self.wanted.to);
        if !self.target.process.stand_still() {
            return anyhow!("{guest} may be here or at {to}: {reason}, and process {pid} takes no signal of ours");
        }
        anyhow!(
            "{guest} may be here or at {to}: {reason}, after its last part was sent. Process {pid} is stopped, so that it does not run twice. \
             If it runs there, or when the link is back: kill -CONT {pid}, and the same command ends it. If that QEMU has ended, kill -CONT \
             {pid} has it go on here"
        )
    }

    fn qmp(&self) -> anyhow::Result<Qmp> {
        Ok(Qmp::of(self.target.process.pid, &self.target.qmp)?)
    }
}

fn moved(found: &Value) -> Moved {
    let ram = &found["ram"];
    Moved {
        seconds: found["total-time"].as_f64().unwrap_or_default() / 1000.0,
        downtime_ms: found["downtime"].as_u64().unwrap_or_default(),
        sent_bytes: ram["transferred"].as_u64().unwrap_or_default(),
    }
}
