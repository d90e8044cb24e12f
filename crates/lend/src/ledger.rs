//! State of balancing that outlives a command: sizes that guests were told to have, reservations, pauses. Each action
//! is in the service's journal before it is taken, and its outcome after it.
//!
//! ```text
//!   DIR/balance.json      targets by guest, and guests that are paused
//!   DIR/promises.json     reservations, which have a lock of their own: `api::promise`
//!   DIR/balance.lock      held by the one process that may change anything, for a round: [`Turn`]
//! ```
//!
//! QEMU does not tell the size that a balloon was told to have. So it is noted here: otherwise a driver that is still
//! on its way to that size could not be told from one that has arrived.
//!
//! A service and commands share a ledger. Plans of two processes at once could lend the same memory twice, so only the
//! process that holds the lock ([`Turn`]) changes anything. The kernel releases the lock of a process that is killed.

use crate::carry_out::Outcome;
use crate::hold::Target;
use crate::pause::Paused;
use crate::reclaim::Reclaimed;
use crate::rules::Rules;
use anyhow::{Context, bail};
use api::promise::Promises;
use balance::{PaceChange, Pause, Proposal, Proposals, Refusal, Reservation, Rung, RungEvent, Step};
use cli::journal::{By, Journal, Line};
use guest::Guest;
use host::ProcessId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time after which a noted rung of the pressure ladder lapses, unless it is noted again, in seconds: 1 minute.
const RUNG_FOR_S: u64 = 60;
/// Shortest time from the beginning of a guest's pause to its next one, in seconds: 1 minute.
const PAUSED_EVERY_S: u64 = 60;
/// Largest `balance.json` that is read, in bytes: 4 MiB.
const MOST_BYTES: u64 = 4 << 20;
/// Longest wait for the lock that another process holds for its round: 60 s. A round takes half of that at most.
const TURN_WITHIN: Duration = Duration::from_secs(60);
/// Longest wait for the lock of the promises, which others hold for a moment only: 10 s.
const PROMISES_WITHIN: Duration = Duration::from_secs(10);
/// Pause between two attempts to get that lock: 50 ms.
const PAUSE: Duration = Duration::from_millis(50);

/// An action of balancing, as a line of the journal.
#[derive(Debug, Serialize)]
#[serde(tag = "entry", rename_all = "snake_case")]
pub enum Entry<'a> {
    /// A step that is about to be made.
    Intent {
        /// When, in seconds since the host started.
        at_s: u64,
        /// The step.
        #[serde(flatten)]
        step: &'a Step,
    },
    /// A step that a guest is told again.
    Reminder {
        /// When, in seconds since the host started.
        at_s: u64,
        /// The step.
        #[serde(flatten)]
        step: &'a Step,
    },
    /// The end of a step.
    Outcome(&'a Outcome),
    /// A reservation that was refused.
    Refusal(&'a Refusal),
    /// A step on the pressure ladder.
    Rung {
        /// When, in seconds since the host started.
        at_s: u64,
        /// The step.
        #[serde(flatten)]
        event: &'a RungEvent,
    },
    /// Page cache that control groups have given back.
    Reclaim {
        /// When, in seconds since the host started.
        at_s: u64,
        /// The page cache.
        #[serde(flatten)]
        reclaimed: &'a Reclaimed,
    },
    /// Another pace of a group.
    Pace {
        /// When, in seconds since the host started.
        at_s: u64,
        /// The pace.
        #[serde(flatten)]
        paced: &'a Paced,
    },
    /// A guest that should go to another host.
    Proposal {
        /// When, in seconds since the host started.
        at_s: u64,
        /// The proposal.
        #[serde(flatten)]
        proposed: &'a Proposed,
    },
    /// A guest that is about to be paused.
    Pause {
        /// When, in seconds since the host started.
        at_s: u64,
        /// The guest.
        #[serde(flatten)]
        pause: &'a Pause,
    },
    /// A guest that was resumed.
    Resume {
        /// When, in seconds since the host started.
        at_s: u64,
        /// The guest.
        #[serde(flatten)]
        paused: &'a Paused,
    },
}

/// Another pace of a group, as the service took it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Paced {
    /// The pace.
    #[serde(flatten)]
    pub change: PaceChange,
    /// The reason why the service has not taken it.
    pub problem: Option<String>,
}

/// A guest that should go to another host, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Proposed {
    /// The proposal.
    #[serde(flatten)]
    pub proposal: Proposal,
    /// The destination to which it is moved without anybody's doing; `None` if no rule has one.
    pub to: Option<String>,
    /// The command that moves it. Owners of guests choose names, so it has the guest's pid.
    pub command: String,
}

impl Proposed {
    /// A proposal for a guest, with the destination that a rule has for it.
    pub fn of(proposal: Proposal, guest: &Guest, to: Option<&str>) -> Self {
        let pid = guest.pids.first().copied().unwrap_or(0);
        let command = format!("pagefold migrate {pid} --to {}", to.unwrap_or("tcp:HOST:PORT"));
        Self { proposal, to: to.map(str::to_owned), command }
    }
}

/// The right to change the ledger and balloons, which one process at a time has: the locked file `balance.lock`.
/// Dropping it releases the lock.
#[derive(Debug)]
pub struct Turn {
    _lock: File,
}

/// A guest that was paused.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct PausedGuest {
    target: Target,
    /// When, in seconds since the host started.
    at_s: u64,
    is_resumed: bool,
}

impl PausedGuest {
    /// Whether nobody has resumed the guest yet, and it has not ended.
    fn is_left(&self) -> bool {
        !self.is_resumed && self.target.process.is_alive()
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Kept {
    /// Boot id of the host: processes and times of the ledger belong to this boot alone.
    boot: String,
    /// By guest: its process, the start of that process in clock ticks, and the size that the guest was told to have.
    targets: BTreeMap<String, (u32, u64, u64)>,
    /// By guest: its process, and the last size told to it that its balloon has reached.
    arrived: BTreeMap<String, (u32, u64)>,
    /// Rung of the pressure ladder, and the time at which that note lapses, in seconds since the host started.
    rung: (Rung, u64),
    /// Guests that were proposed for another host.
    proposals: Proposals,
    /// Pauses by guest: those of the last minute, and those after which nobody has resumed the guest yet.
    paused: BTreeMap<String, PausedGuest>,
    /// Rules of the process that balances continuously, and that process.
    rules: Option<(ProcessId, Rules)>,
}

/// The ledger of one directory.
#[derive(Debug)]
pub struct Ledger {
    dir: PathBuf,
    kept: Kept,
}

impl Ledger {
    /// Opens the ledger of a directory. The directory is made only when something is written.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn open(dir: &Path) -> anyhow::Result<Self> {
        Ok(Self { dir: dir.to_owned(), kept: read(dir)? })
    }

    /// The directory of the service.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Waits for the lock [`Turn`], for a minute at most, and reads the ledger again.
    ///
    /// # Errors
    /// The lock or the ledger cannot be used, or another process holds the lock for longer.
    pub fn take_turn(&mut self) -> anyhow::Result<Turn> {
        self.take_turn_within(TURN_WITHIN)
    }

    fn take_turn_within(&mut self, patience: Duration) -> anyhow::Result<Turn> {
        self.make_dir()?;
        let path = self.dir.join("balance.lock");
        let cannot = || format!("cannot lock {}", path.display());
        let Some(lock) = host::lock_file(&path, patience, PAUSE).with_context(cannot)? else {
            bail!(
                "another process has been balancing these guests for {} s: it holds {}",
                patience.as_secs(),
                path.display()
            );
        };
        self.kept = read(&self.dir)?;
        Ok(Turn { _lock: lock })
    }

    /// The size that a guest was told to have; `None` if it was told none, or has been started again since.
    pub fn target_bytes(&self, guest: &Guest) -> Option<u64> {
        let (pid, started, target) = self.kept.targets.get(&guest.id)?;
        let process = ProcessId { pid: *pid, start_ticks: *started };
        (guest.pids.first() == Some(pid) && process.is_alive()).then_some(*target)
    }

    /// Notes the sizes that guests are told to have, before the guests are told. Sizes of guests that have ended are
    /// forgotten.
    ///
    /// # Errors
    /// The ledger cannot be written.
    pub fn note_targets<'a>(
        &mut self,
        _: &Turn,
        targets: impl Iterator<Item = (&'a Guest, u64)>,
    ) -> anyhow::Result<()> {
        self.kept
            .targets
            .retain(|_, (pid, start_ticks, _)| ProcessId { pid: *pid, start_ticks: *start_ticks }.is_alive());
        for (guest, size_bytes) in targets {
            let pid = guest.pids.first().copied().context("a guest without a process")?;
            if let Ok(process) = ProcessId::of(pid) {
                self.kept.targets.insert(guest.id.clone(), (pid, process.start_ticks, size_bytes));
            }
        }
        self.save()
    }

    /// Whether a guest has ever reached the size that it was last told to have.
    pub fn has_arrived(&self, guest: &Guest) -> bool {
        let arrived = self.kept.arrived.get(&guest.id);
        self.target_bytes(guest).is_some_and(|target| {
            arrived.is_some_and(|(pid, reached)| guest.pids.first() == Some(pid) && *reached == target)
        })
    }

    /// Notes guests that have reached the size that they were told to have.
    ///
    /// # Errors
    /// The ledger cannot be written.
    pub fn note_arrived<'a>(&mut self, _: &Turn, guests: impl Iterator<Item = &'a Guest>) -> anyhow::Result<()> {
        let before = self.kept.arrived.clone();
        self.kept.arrived.retain(|id, _| self.kept.targets.contains_key(id));
        for guest in guests {
            if let (Some(pid), Some(target)) = (guest.pids.first(), self.target_bytes(guest)) {
                self.kept.arrived.insert(guest.id.clone(), (*pid, target));
            }
        }
        if self.kept.arrived == before { Ok(()) } else { self.save() }
    }

    /// Whether a guest may be paused again: its last pause began a minute ago or longer, and is over.
    pub fn has_run(&self, guest: &str) -> bool {
        let is_over = |paused: &PausedGuest| {
            paused.at_s.saturating_add(PAUSED_EVERY_S) <= host::boot_clock_s() && !paused.is_left()
        };
        self.kept.paused.get(guest).is_none_or(is_over)
    }

    /// Notes that guests are about to be paused.
    pub(crate) fn note_pauses<'a>(
        &mut self,
        _: &Turn,
        targets: impl Iterator<Item = &'a Target>,
    ) -> anyhow::Result<()> {
        let at_s = host::boot_clock_s();
        let counts = |paused: &PausedGuest| !paused.is_resumed || paused.at_s.saturating_add(PAUSED_EVERY_S) > at_s;
        self.kept.paused.retain(|_, paused| paused.target.process.is_alive() && counts(paused));
        for target in targets {
            let paused = PausedGuest { target: target.clone(), at_s, is_resumed: false };
            self.kept.paused.insert(target.guest.clone(), paused);
        }
        self.save()
    }

    /// Notes that guests were resumed.
    pub(crate) fn note_resumed(&mut self, _: &Turn, guests: &[String]) -> anyhow::Result<()> {
        for guest in guests {
            if let Some(paused) = self.kept.paused.get_mut(guest) {
                paused.is_resumed = true;
            }
        }
        self.save()
    }

    /// The paused guest with this id, as it was noted.
    pub(crate) fn paused(&self, guest: &str) -> Option<&Target> {
        self.kept.paused.get(guest).map(|paused| &paused.target)
    }

    /// Guests that were paused, and that nobody has resumed.
    pub(crate) fn left_paused(&self) -> Vec<String> {
        self.kept.paused.iter().filter(|(_, paused)| paused.is_left()).map(|(guest, _)| guest.clone()).collect()
    }

    /// The rung of the pressure ladder, as noted by the process that watches it; `Idle` if the note is older than a
    /// minute.
    pub fn rung(&self) -> Rung {
        let (rung, until_s) = self.kept.rung;
        if until_s > host::boot_clock_s() { rung } else { Rung::Idle }
    }

    /// Notes the place on the pressure ladder.
    ///
    /// # Errors
    /// The ledger cannot be written.
    pub fn note_rung(&mut self, _: &Turn, rung: Rung) -> anyhow::Result<()> {
        if (rung, self.rung()) == (Rung::Idle, Rung::Idle) {
            return Ok(());
        }
        self.kept.rung = (rung, host::boot_clock_s().saturating_add(RUNG_FOR_S));
        self.save()
    }

    /// The proposals to move a guest to another host, by all processes that share this ledger.
    pub const fn proposals(&self) -> &Proposals {
        &self.kept.proposals
    }

    /// Notes a proposal.
    ///
    /// # Errors
    /// The ledger cannot be written.
    pub fn note_proposals(&mut self, _: &Turn, proposals: Proposals) -> anyhow::Result<()> {
        self.kept.proposals = proposals;
        self.save()
    }

    /// Rules of the process that balances continuously; `None` if no such process runs.
    pub fn rules(&self) -> Option<&Rules> {
        self.kept.rules.as_ref().filter(|(process, _)| process.is_alive()).map(|(_, rules)| rules)
    }

    /// Notes that this process balances continuously, by these rules: commands without rules of their own go by them.
    ///
    /// # Errors
    /// The ledger cannot be written.
    pub fn note_rules(&mut self, _: &Turn, rules: &Rules) -> anyhow::Result<()> {
        if self.rules() == Some(rules) {
            return Ok(());
        }
        self.kept.rules = Some((ProcessId::of(std::process::id())?, rules.clone()));
        self.save()
    }

    /// The promises (reservations) of this directory, locked: nobody else reads or changes them until the value is
    /// dropped.
    ///
    /// # Errors
    /// They cannot be read, or another process holds their lock for longer than 10 s.
    pub fn promises(&self) -> anyhow::Result<Promises> {
        Promises::lock(&self.dir, PROMISES_WITHIN)
    }

    /// Reservations of guests that have not started.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn reserved(&self, has_started: impl Fn(&str) -> bool) -> anyhow::Result<Vec<Reservation>> {
        api::promise::reservations(&self.dir, host::boot_clock_ms(), has_started)
    }

    /// Adds a line to the journal.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn write_down(&self, turn: &Turn, entry: Entry) -> anyhow::Result<()> {
        self.write_all_down(turn, std::iter::once(entry))
    }

    /// Adds lines to the journal, all at once.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn write_all_down<'a>(&self, _: &Turn, entries: impl Iterator<Item = Entry<'a>>) -> anyhow::Result<()> {
        let (journal, by) = (Journal::of_service(&self.dir), By::this_process());
        let written = journal.append(entries.map(|entry| Line::now(by.clone(), "balance", entry)));
        written.with_context(|| format!("cannot write {}", journal.path().display()))
    }

    fn make_dir(&self) -> anyhow::Result<()> {
        fs::create_dir_all(&self.dir).with_context(|| format!("cannot make {}", self.dir.display()))
    }

    fn save(&self) -> anyhow::Result<()> {
        let file = cli::OutputFile::create(&self.dir.join("balance.json"))?;
        file.handle()?.write_all(&serde_json::to_vec(&self.kept)?)?;
        file.commit()
    }
}

fn read(dir: &Path) -> anyhow::Result<Kept> {
    let path = dir.join("balance.json");
    let boot = host::boot_id()?;
    if !path.exists() {
        return Ok(Kept { boot, ..Kept::default() });
    }
    let bytes = host::read_plain_file(&path, MOST_BYTES)?;
    let hint = || format!("{} is damaged: remove it, and set balloons anew", path.display());
    let kept: Kept = serde_json::from_slice(&bytes).with_context(hint)?;
    Ok(if kept.boot == boot { kept } else { Kept { boot, ..Kept::default() } })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own_guest() -> Guest {
        let survey = guest::Survey::take().unwrap();
        let own = std::process::id();
        survey.guests(&[own], &[]).into_iter().find(|guest| guest.pids.contains(&own)).expect("this process is a guest")
    }

    #[test]
    fn targets_outlive_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let mut own = own_guest();
        own.pids = vec![std::process::id()];
        let mut ledger = Ledger::open(dir.path()).unwrap();
        assert_eq!(ledger.target_bytes(&own), None);
        let turn = ledger.take_turn().unwrap();
        ledger.note_targets(&turn, std::iter::once((&own, 7))).unwrap();
        let ledger = Ledger::open(dir.path()).unwrap();
        assert_eq!(ledger.target_bytes(&own), Some(7));
        let other = Guest { pids: vec![1], ..own };
        assert_eq!(ledger.target_bytes(&other), None, "another process by the same name");
    }

    #[test]
    fn rules_are_those_of_a_living_process() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(dir.path()).unwrap();
        let turn = ledger.take_turn().unwrap();
        let rules = Rules {
            guaranteed: vec![("acme-*".parse().unwrap(), 7)],
            floor_bytes: Some(9),
            within: None,
            owners: vec![107],
            moves: vec![("acme-1".parse().unwrap(), "tcp:h:1".into())],
        };
        ledger.note_rules(&turn, &rules).unwrap();
        let mut other = Ledger::open(dir.path()).unwrap();
        assert_eq!(other.rules(), Some(&rules));
        other.kept.rules = Some((ProcessId { pid: u32::MAX >> 1, start_ticks: 1 }, rules));
        assert_eq!(other.rules(), None);
    }

    /// A new balancer waits before its next proposal for as long as the one before it would have.
    #[test]
    fn proposals_outlive_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(dir.path()).unwrap();
        let turn = ledger.take_turn().unwrap();
        let host = balance::HostFacts { floor_bytes: 9, total_bytes: 9, rung: Rung::Advise, ..Default::default() };
        let guest = balance::GuestFacts { id: "a".into(), resident_bytes: 5, ..Default::default() };
        let facts = balance::Facts { host, guests: vec![guest], ..Default::default() };
        let mut proposals = ledger.proposals().clone();
        assert!(proposals.see(7, &facts, &|_| true).is_some());
        ledger.note_proposals(&turn, proposals).unwrap();
        let mut proposals = Ledger::open(dir.path()).unwrap().proposals().clone();
        assert_eq!(proposals.see(7 + 899, &facts, &|_| true), None);
        assert_eq!(proposals.see(7 + 900, &facts, &|_| true).unwrap().first_s, 7);
    }

    #[test]
    fn ledger_of_an_earlier_start_of_the_host_counts_for_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(dir.path()).unwrap();
        let turn = ledger.take_turn().unwrap();
        ledger.note_rung(&turn, Rung::Refuse).unwrap();
        ledger.kept.boot = "00000000-0000-0000-0000-000000000000".into();
        ledger.save().unwrap();
        let ledger = Ledger::open(dir.path()).unwrap();
        assert_eq!((ledger.rung(), ledger.kept.boot), (Rung::Idle, host::boot_id().unwrap()));
    }

    #[test]
    fn damaged_ledger_is_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("balance.json"), "{").unwrap();
        assert!(Ledger::open(dir.path()).unwrap_err().to_string().contains("balance.json is damaged"));
    }

    #[test]
    fn turn_is_one_process_alone_and_sees_all_that_others_wrote() {
        let dir = tempfile::tempdir().unwrap();
        let (mut one, mut other) = (Ledger::open(dir.path()).unwrap(), Ledger::open(dir.path()).unwrap());
        let turn = one.take_turn().unwrap();
        let refused = other.take_turn_within(PAUSE).unwrap_err().to_string();
        assert!(refused.contains("another process has been balancing"), "{refused}");
        one.note_pauses(&turn, std::iter::once(&target("first"))).unwrap();
        drop(turn);
        let turn = other.take_turn_within(PAUSE).unwrap();
        other.note_pauses(&turn, std::iter::once(&target("second"))).unwrap();
        assert_eq!(Ledger::open(dir.path()).unwrap().left_paused(), ["first", "second"]);
    }

    /// Others read the ledger while it is written, and a process may be killed meanwhile.
    #[test]
    fn ledger_is_whole_at_any_instant() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(dir.path()).unwrap();
        let turn = ledger.take_turn().unwrap();
        ledger.note_rung(&turn, Rung::Refuse).unwrap();
        let path = dir.path().join("balance.json");
        let (before, mut opened) = (fs::read_to_string(&path).unwrap(), File::open(&path).unwrap());
        ledger.note_rung(&turn, Rung::Withdraw).unwrap();
        let mut seen = String::new();
        std::io::Read::read_to_string(&mut opened, &mut seen).unwrap();
        assert_eq!(seen, before, "the old one is replaced, not written to");
        assert_ne!(fs::read_to_string(&path).unwrap(), before);
    }

    #[test]
    fn ledger_that_is_too_long_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let text = format!("{}{}", "{}", " ".repeat(4 << 20));
        fs::write(dir.path().join("balance.json"), text).unwrap();
        assert!(Ledger::open(dir.path()).is_err());
    }

    #[test]
    fn rung_lapses() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(dir.path()).unwrap();
        let turn = ledger.take_turn().unwrap();
        ledger.note_rung(&turn, Rung::Refuse).unwrap();
        let now_s = host::boot_clock_s();
        assert!(
            ledger.rung() == Rung::Refuse && ledger.kept.rung.1.abs_diff(now_s + 60) <= 5,
            "{:?}",
            ledger.kept.rung
        );
        ledger.kept.rung.1 = now_s;
        assert_eq!(ledger.rung(), Rung::Idle);
    }

    #[test]
    fn target_of_an_earlier_process_of_the_same_pid_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let own = Guest { pids: vec![std::process::id()], ..own_guest() };
        let mut ledger = Ledger::open(dir.path()).unwrap();
        ledger.kept.targets.insert(own.id.clone(), (std::process::id(), 1, 7));
        assert_eq!(ledger.target_bytes(&own), None);
    }

    fn target(guest: &str) -> Target {
        let process = ProcessId::of(std::process::id()).unwrap();
        Target { guest: guest.into(), process, qmp: "/nonexistent".into() }
    }

    #[test]
    fn guest_is_paused_once_a_minute_and_not_while_it_still_is() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(dir.path()).unwrap();
        let turn = ledger.take_turn().unwrap();
        assert!(ledger.has_run("a"), "it never was");
        ledger.note_pauses(&turn, std::iter::once(&target("a"))).unwrap();
        ledger.note_resumed(&turn, &["a".to_owned()]).unwrap();
        assert!(!Ledger::open(dir.path()).unwrap().has_run("a"));
        let mut an_hour_later = |is_resumed, start_ticks| {
            let paused = ledger.kept.paused.get_mut("a").unwrap();
            (paused.is_resumed, paused.at_s, paused.target.process.start_ticks) = (is_resumed, 0, start_ticks);
            ledger.has_run("a")
        };
        let own = target("a").process.start_ticks;
        assert_eq!([an_hour_later(true, own), an_hour_later(false, own)], [true, false]);
        assert!(an_hour_later(false, 1), "its process has ended");
    }

    #[test]
    fn guest_that_nobody_has_resumed_is_never_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(dir.path()).unwrap();
        let turn = ledger.take_turn().unwrap();
        ["left", "resumed"]
            .iter()
            .for_each(|guest| ledger.note_pauses(&turn, std::iter::once(&target(guest))).unwrap());
        ledger.note_resumed(&turn, &["resumed".to_owned()]).unwrap();
        ledger.kept.paused.values_mut().for_each(|paused| paused.at_s = 0);
        ledger.note_pauses(&turn, std::iter::once(&target("next"))).unwrap();
        let ledger = Ledger::open(dir.path()).unwrap();
        assert_eq!(ledger.left_paused(), ["left", "next"]);
        assert_eq!(ledger.kept.paused.keys().collect::<Vec<_>>(), ["left", "next"]);
    }
}
