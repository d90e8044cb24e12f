//! Moves a VM to another host, by QEMU's own migration.
//!
//! ```text
//!   source                                              destination: a QEMU with -incoming
//!   running            -- memory, while it runs ------> waits
//!   finish-migrate     -- the rest, standing still ---> reads it, goes on
//!                      <- all is read -----------------
//!   postmigrate, ended                                  running
//! ```
//!
//! **The switch** begins when the source stands still for the rest (`finish-migrate`). These rules keep the guest from
//! running twice:
//!
//! 1. The source waits until the destination confirms that it has read all (`return-path`). Otherwise the source would
//!    count as left as soon as all is sent.
//! 2. Before the switch, a failure leaves the guest at its source, where QEMU has it run on by itself. This process
//!    cancels a migration only after it has paused the guest itself, and has seen it `paused`. A guest that was paused
//!    before the switch does not go on at the destination.
//! 3. After the switch has begun, this process resumes nothing and cancels nothing. QEMU resumes the source if the
//!    destination hangs up without having read all. If neither is heard for long, the link was lost in the switch, and
//!    nobody here can tell which side has the guest. The source's process is stopped then (`SIGSTOP`), before QEMU
//!    gives the connection up and goes on.
//! 4. A source that is `completed` is never resumed. It is ended, or kept as it is.
//! 5. A guest that writes faster than the link carries would be sent for ever, so each migration has a bound
//!    ([`Wanted::within`]). After it, the guest stays, by rule 2. A command that is killed leaves a note, and the next
//!    one follows the migration by it.
//!
//! QEMU serves one client at a time, so this process connects anew for each look. While QEMU sends the rest, it answers
//! nobody.

mod checks;
mod follow;
mod note;
mod progress;
mod settings;

pub use progress::Progress;

use crate::hold::{self, NO_MIGRATION, Target};
use crate::ledger::Turn;
use anyhow::{Context, bail};
use cli::journal::{By, Journal, Line};
use cli::printable;
use guest::qmp::QmpError;
use guest::{Guest, GuestKind, Qmp};
use note::{Note, Told};
use serde::Serialize;
use serde_json::{Value, json};
use settings::Settings;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest time until QEMU's process is gone after it was told to end: 30 s.
const END_WITHIN: Duration = Duration::from_secs(30);
/// Pause between two questions for QEMU's state: 20 ms.
const LOOK: Duration = Duration::from_millis(20);
/// Interval in which QEMU limits the stream's bandwidth, and checks whether the memory that is left fits into the last
/// part: 100 ms.
const LOOKS_EVERY_MS: u64 = 100;
/// Longest duration of a migration if none was asked for: 10 minutes, or four times as long as sending all RAM takes,
/// if that is more.
const USUAL_WITHIN: Duration = Duration::from_secs(600);
const USUAL_TIMES: f64 = 4.0;
/// Bytes of the stream for each page's header, and bytes for a page of zeros (a header and one byte).
const HEADER_BYTES: u64 = 8;
const ZERO_PAGE_BYTES: u64 = 9;

/// How a VM is moved.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The destination, as QEMU names it: `tcp:HOST:PORT` or `unix:PATH`.
    pub to: String,
    /// Highest bandwidth of the stream, in bytes a second; `None`: QEMU's setting.
    pub bandwidth: Option<u64>,
    /// Time without progress after which the migration is cancelled, and the guest stays here.
    pub give_up: Duration,
    /// Time from the beginning after which the migration is cancelled, although memory is being sent.
    pub within: Duration,
}

/// A migration that has come to its end.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Moved {
    /// Time from its begin to its end, in seconds.
    pub seconds: f64,
    /// Time for which the guest stood still, in milliseconds.
    pub downtime_ms: u64,
    /// Bytes that were sent.
    pub sent_bytes: u64,
}

/// A prediction of a migration. Its times are `None` if QEMU limits the stream by nothing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Time from its begin to its end, in seconds.
    pub seconds: Option<f64>,
    /// Time for which the guest stands still, in milliseconds.
    pub downtime_ms: Option<u64>,
}

/// QEMU's limits for a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Bytes a second; `None` where nothing bounds the stream.
    bandwidth: Option<u64>,
    /// Longest time for which the guest may stand still, in milliseconds.
    limit_ms: u64,
}

/// A VM that may be moved.
#[derive(Clone, Debug)]
pub struct Movable {
    target: Target,
}

impl Movable {
    /// A VM of QEMU's, with a QMP socket.
    ///
    /// # Errors
    /// It is another kind of guest, or has no such socket.
    pub fn of(guest: &Guest) -> anyhow::Result<Self> {
        let id = printable(&guest.id);
        if guest.kind != GuestKind::Qemu {
            bail!("{id} is not moved: only QEMU's VMs are");
        }
        let target = Target::of(guest).with_context(|| {
            format!("{id} has no QMP socket: start its QEMU with -qmp unix:PATH,server=on,wait=off")
        })?;
        Ok(Self { target })
    }

    /// Whether the guest has been moved, and its QEMU here was left behind: by a command that was killed, or by
    /// `--keep`. True only if the destination has confirmed that it has read all, so that the guest was not merely
    /// written to a file.
    ///
    /// # Errors
    /// Its QEMU does not answer.
    pub fn has_gone(&self) -> anyhow::Result<bool> {
        let mut qmp = self.qmp()?;
        let is_over = status(&mut qmp)? == "postmigrate" && migration(&mut qmp)?["status"] == "completed";
        Ok(is_over && settings::has(&mut qmp, "return-path")?)
    }

    /// Checks that the guest can be moved.
    ///
    /// # Errors
    /// The reason.
    pub fn check(&self, shared_disks: bool) -> anyhow::Result<()> {
        let mut qmp = self.running()?;
        checks::check(&mut qmp, shared_disks).map_err(|why| self.stays(&why.to_string()))
    }

    /// QEMU's limits for its migration, with the bandwidth `bandwidth` if that is given.
    ///
    /// # Errors
    /// Its QEMU does not answer.
    pub fn pace(&self, bandwidth: Option<u64>) -> anyhow::Result<Pace> {
        let found = self.qmp()?.execute("query-migrate-parameters", json!({}))?;
        let usual = found["max-bandwidth"].as_u64().filter(|bytes| *bytes > 0);
        let limit_ms = found["downtime-limit"].as_u64().context("QEMU tells no downtime-limit")?;
        Ok(Pace { bandwidth: bandwidth.or(usual), limit_ms })
    }

    /// Moves the guest. When this returns without an error, the guest runs at the destination, and its QEMU here stands
    /// still for good. `turn` keeps a balancer from pausing the guest until the migration has begun. `show` is called
    /// while the guest is on its way.
    ///
    /// # Errors
    /// The guest has stayed, and runs as before. Where it does not, the error says so.
    pub fn go(
        &self,
        wanted: &Wanted,
        service: &Path,
        turn: Turn,
        show: &mut dyn FnMut(&Progress),
    ) -> anyhow::Result<Moved> {
        let mut qmp = self.running()?;
        let mut note = Note::take(service, self.target.process).map_err(|why| self.stays(&format!("{why:#}")))?;
        self.write_down(service, "migrate", &wanted.to, Value::Null)?;
        // A command that was killed before its migration began may have changed the settings.
        let left = note.told().map(|told| told.before.clone());
        let set = left.map_or_else(|| Settings::read(&mut qmp), Ok).and_then(|before| {
            note.tell(Told { to: wanted.to.clone(), before: before.clone(), pauses: false })?;
            before.change(&mut qmp, wanted)
        });
        set.map_err(|why| self.stays(&format!("{why:#}")))?;
        let begun = qmp.execute("migrate", json!({"uri": wanted.to}));
        drop((qmp, turn));
        match begun {
            Err(why @ QmpError::Refused { .. }) => {
                let refused = Err(self.stays(&why.to_string()));
                self.over(refused, note, wanted, service)
            }
            // A migration whose answer was lost may be under way.
            _ => self.follow(wanted, service, note, show),
        }
    }

    /// Follows the migration of the guest that a command began which was killed; `None` if there is none.
    ///
    /// # Errors
    /// As for [`Movable::go`], or the guest is on its way to another destination.
    pub fn go_on(
        &self,
        wanted: &Wanted,
        service: &Path,
        show: &mut dyn FnMut(&Progress),
    ) -> anyhow::Result<Option<Moved>> {
        let mut qmp = self.qmp()?;
        let found = migration(&mut qmp)?;
        let is_under_way = found["status"].as_str().is_some_and(|status| !NO_MIGRATION.contains(&status));
        let stands_still = status(&mut qmp)? == "paused";
        drop(qmp);
        if !is_under_way && !stands_still {
            return Ok(None);
        }
        let note = Note::take(service, self.target.process)
            .map_err(|why| anyhow::anyhow!("{} is not moved by this command: {why:#}", self.id()))?;
        let Some(told) = note.told().filter(|told| is_under_way || told.pauses) else { return Ok(None) };
        if told.to != wanted.to {
            bail!(
                "{} is on its way to {}, and the command that began that has ended: name that destination",
                self.id(),
                told.to
            );
        }
        self.follow(wanted, service, note, show).map(Some)
    }

    fn follow(
        &self,
        wanted: &Wanted,
        service: &Path,
        mut note: Note,
        show: &mut dyn FnMut(&Progress),
    ) -> anyhow::Result<Moved> {
        let ended = follow::Follow::of(&self.target, wanted, &mut note).until_end(show);
        self.over(ended, note, wanted, service)
    }

    /// Handles the end of a migration: puts QEMU's settings back if the guest has stayed, and writes the end to the
    /// journal.
    fn over(&self, ended: anyhow::Result<Moved>, note: Note, wanted: &Wanted, service: &Path) -> anyhow::Result<Moved> {
        let problem = ended.as_ref().err().map(|why| format!("{why:#}"));
        match self.running() {
            Ok(mut qmp) => {
                note.told().iter().for_each(|told| told.before.put_back(&mut qmp));
                note.over();
            }
            // On a guest that has gone, the settings are left: they show that it was moved.
            Err(_) if ended.is_ok() => note.over(),
            Err(_) => {}
        }
        if let Err(why) = self.write_down(service, "migrated", &wanted.to, json!({"problem": problem})) {
            cli::say!("pagefold: {why:#}");
        }
        ended
    }

    /// Ends the QEMU process here of a guest that was moved. That frees its page frames.
    ///
    /// # Errors
    /// The guest was not moved, or the process does not end.
    pub fn end(&self) -> anyhow::Result<()> {
        let process = &self.target.process;
        if !process.is_alive() {
            return Ok(());
        }
        if !self.has_gone()? {
            bail!("{} is not ended: it has not been moved", self.id());
        }
        // Its answer may be lost, because QEMU ends.
        let _ = self.qmp()?.execute("quit", json!({}));
        let deadline = Instant::now() + END_WITHIN;
        while process.is_alive() {
            if Instant::now() > deadline {
                bail!("the QEMU that {} has left, process {}, does not end", self.id(), process.pid);
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    fn id(&self) -> String {
        printable(&self.target.guest)
    }

    fn stays(&self, why: &str) -> anyhow::Error {
        anyhow::anyhow!("{} is not moved, and runs as before: {why}", self.id())
    }

    fn qmp(&self) -> anyhow::Result<Qmp> {
        let found = Qmp::of(self.target.process.pid, &self.target.qmp);
        found.with_context(|| format!("the QEMU of {} does not answer", self.id()))
    }

    fn running(&self) -> anyhow::Result<Qmp> {
        hold::running(&self.target).map_err(|why| anyhow::anyhow!("{} is not moved: {why}", self.id()))
    }

    fn write_down(&self, service: &Path, entry: &str, to: &str, more: Value) -> anyhow::Result<()> {
        let mut line = json!({"entry": entry, "guest": self.target.guest, "to": to, "at_s": host::boot_clock_s()});
        if let (Some(line), Value::Object(more)) = (line.as_object_mut(), more) {
            line.extend(more);
        }
        let journal = Journal::of_service(service);
        let written = journal.append(std::iter::once(Line::now(By::this_process(), "balance", line)));
        written.with_context(|| format!("cannot write {}", journal.path().display()))
    }
}

fn status(qmp: &mut Qmp) -> anyhow::Result<String> {
    let answer = qmp.execute("query-status", json!({}))?;
    Ok(answer["status"].as_str().unwrap_or("in no known state").to_owned())
}

fn migration(qmp: &mut Qmp) -> anyhow::Result<Value> {
    Ok(qmp.execute("query-migrate", json!({}))?)
}

impl Pace {
    /// Size of the last part of the memory, for which the guest stands still: as much as can be sent in QEMU's
    /// `downtime-limit`. On average, QEMU notices half an interval late that no more than that is left.
    pub fn last_bytes(&self) -> u64 {
        let ms = self.limit_ms.saturating_sub(LOOKS_EVERY_MS / 2).max(self.limit_ms / 2);
        self.bandwidth.unwrap_or(0).saturating_mul(ms) / 1000
    }

    /// Longest duration of a migration of a guest with `ram_bytes` of RAM, if none was asked for.
    pub fn usual_within(&self, ram_bytes: u64) -> Duration {
        let whole_s = self.bandwidth.map_or(0.0, |bandwidth| ram_bytes as f64 / bandwidth as f64);
        Duration::try_from_secs_f64(whole_s * USUAL_TIMES).unwrap_or(Duration::MAX).max(USUAL_WITHIN)
    }

    /// Predicts a migration of a guest that writes little. Of its RAM of `all_bytes`, `ram_bytes` are in pages that are
    /// not zero. `last_bytes` is the same for the last part, during which the guest stands still.
    pub fn estimate(&self, all_bytes: u64, ram_bytes: u64, last_bytes: u64) -> Estimate {
        let Some(bandwidth) = self.bandwidth else { return Estimate { seconds: None, downtime_ms: None } };
        let pages = |bytes: u64| bytes as f64 / page::PAGE_BYTES as f64;
        let seconds = |bytes: u64, all: u64| {
            let zeros = pages(all.saturating_sub(bytes)) * ZERO_PAGE_BYTES as f64;
            (bytes as f64 + pages(bytes) * HEADER_BYTES as f64 + zeros) / bandwidth as f64
        };
        let downtime_ms = (seconds(last_bytes, self.last_bytes().min(all_bytes)) * 1000.0) as u64;
        Estimate { seconds: Some(seconds(ram_bytes, all_bytes)), downtime_ms: Some(downtime_ms) }
    }
}

#[cfg(test)]
mod tests;
