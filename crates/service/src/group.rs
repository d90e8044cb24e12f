//! One group of the service: its worker, which is kept running as long as there are members, and the files of the pool,
//! which are kept for the worker's successor.
//!
//! ```text
//!   no worker --(a member connects)--> started --Adopted--> Take + what is kept, Admit ... --> running
//!       ^                                 |                                                      |
//!       |                                 +-- it ends ---------------------+---------------------+
//!       |                                                                  v
//!       +-- no member left ------------------------ waits (backoff.rs) --> started again
//! ```

#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

use super::backoff::Backoff;
use super::config::GroupConfig;
use super::helper::Held;
use super::segments::Segments;
use super::worker::Worker;
use act::CgroupHome;
use api::ask::{PoolLimit, PoolLimitBy, WorkerState};
use api::change::Change;
use api::control::{GroupReport, Identity, Needs, News, Order, Room, SegmentInfo, Settings};
use api::place::Place;
use cli::note;
use host::{ForeignFile, MOST_FDS, ProcessId, ProcessStat, Seqpacket};
use rustix::fd::AsFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Longest time for which a worker may send nothing although it owes an answer: 15 s if a signal has stopped it, 60 s
/// otherwise. Then the worker is killed, and another one takes its place.
const STILL: [Duration; 2] = [Duration::from_secs(15), Duration::from_secs(60)];
/// Most connections of members that are kept while no worker can take them. Further ones are closed.
const MOST_WAITING: usize = 1024;

/// A group.
pub struct Group {
    /// Its name.
    pub name: String,
    /// The group's part of the configuration.
    pub config: GroupConfig,
    /// Whether the configuration still names the group. If not, `config` is its last part.
    pub is_configured: bool,
    /// What was changed of the configured settings while the service ran (`pagefold group set`).
    pub change: Change,
    /// The group's worker.
    pub worker: Option<Worker>,
    /// Most bytes that the pool may have, computed from the memory limits of the members' control groups; `None` if
    /// these do not bound it.
    bound: Option<u64>,
    /// A scan rate in pages a second that replaces the group's own while the host is short of memory, and the time at
    /// which that ends.
    pressed: Option<(u32, Instant)>,
    /// Time since which the group has had no member.
    pub idle_since: Option<Instant>,
    /// The pool's files for a successor.
    pub segments: Segments,
    waiting: Vec<(Identity, Rc<Seqpacket>)>,
    backoff: Backoff,
    /// Number of reports that the group's workers were asked for so far, which is also the number of the latest
    /// request. `answered` is the number of those that have come or never will.
    asked: u64,
    answered: u64,
    /// Time since which the worker has owed an answer, and has sent nothing.
    owes_since: Option<Instant>,
    /// Number of questions that the group's workers were asked ([`Order::Why`]).
    questions: u64,
}

/// A message of a worker, as far as the supervisor has to act on it outside of the group.
pub enum Heard {
    /// The worker reports that it has these members already.
    Members(Vec<Identity>),
    /// The report of this worker.
    Report(ProcessId, Box<GroupReport>),
    /// The worker wants memory for pages that are to become private.
    Needs(Needs),
    /// The answer to the question of this number.
    Because(u64, Vec<u8>),
    /// Nothing that concerns the rest of the service.
    Nothing,
    /// The worker has ended; its control group is left to be removed.
    Ended(Option<CgroupHome>),
}

impl Group {
    /// A group without a worker.
    pub fn new(name: &str, config: GroupConfig, is_configured: bool, change: Change, segments: Segments) -> Self {
        Self {
            name: name.to_owned(),
            config,
            is_configured,
            change,
            worker: None,
            bound: None,
            pressed: None,
            idle_since: None,
            segments,
            waiting: Vec::new(),
            backoff: Backoff::default(),
            asked: 0,
            answered: 0,
            owes_since: None,
            questions: 0,
        }
    }

    /// The settings of the group: those of the configuration, with what was changed on the fly.
    pub fn settings(&self) -> Settings {
        self.change.apply(self.config.settings)
    }

    /// The most memory that the pool may take: the setting, or the members' memory limits if these allow less.
    pub fn pool_limit(&self) -> PoolLimit {
        PoolLimit::of(&self.settings(), self.bound)
    }

    /// The scan rate in pages a second that replaces the group's own for a while; `None`: none does.
    pub fn pressure_scan_rate(&self) -> Option<u32> {
        self.pressed.map(|(pages, _)| pages)
    }

    /// The settings that the worker is told: those of the group, but with the lower of the pool's two limits, and with
    /// the scan rate that replaces the group's own for a while.
    fn ordered(&self) -> Settings {
        let slots = self.pool_limit().bytes >> page::PAGE_SHIFT;
        let (settings, pressed) = (self.settings(), self.pressure_scan_rate());
        let scan_rate = pressed.or(settings.scan_rate);
        Settings { scan_rate, pool_slots: u32::try_from(slots).unwrap_or(u32::MAX).max(1), ..settings }
    }

    /// Replaces the group's scan rate by this number of pages a second until the given time; `None` ends the
    /// replacement.
    pub fn pace(&mut self, pressed: Option<(u32, Instant)>) {
        let before = self.pressure_scan_rate();
        self.pressed = pressed;
        if self.pressure_scan_rate() == before {
            return;
        }
        match pressed {
            Some((pages, _)) => note!("group {}: fingerprints {pages} pages a second under pressure", self.name),
            None => note!("group {}: has its usual pace again", self.name),
        }
        self.order_settings();
    }

    /// Ends the replacement of the scan rate if its time is over.
    pub fn end_pace(&mut self, now: Instant) {
        if self.pressed.is_some_and(|(_, end)| end <= now) {
            self.pace(None);
        }
    }

    /// Bounds the group's pool to this many bytes, by its members' memory limits, and tells the worker. `None`: no
    /// bound.
    pub fn bound_pool(&mut self, bound: Option<u64>) {
        let before = self.pool_limit();
        self.bound = bound;
        let limit = self.pool_limit();
        if limit == before {
            return;
        }
        if limit.by == PoolLimitBy::MembersMemory {
            note!(
                "group {}: the pool is limited to {} by its members' memory limits",
                self.name,
                cli::bytes(limit.bytes)
            );
        }
        self.order_settings();
    }

    fn order_settings(&mut self) {
        let settings = self.ordered();
        if let Some(worker) = self.worker.as_mut().filter(|w| w.heard) {
            worker.send(&Order::Set(settings), vec![]);
        }
    }

    /// State of the group's worker.
    pub fn worker_state(&self) -> WorkerState {
        match &self.worker {
            Some(worker) if worker.heard => WorkerState::Running,
            None if !self.backoff.has_failed() && self.waiting.is_empty() => WorkerState::None,
            _ => WorkerState::Starting,
        }
    }

    /// Whether a file of this device and inode may be a segment of the group's pool. Any file may while a worker runs
    /// that has not named its segments yet.
    pub fn may_have_segment(&self, device: u64, inode: u64) -> bool {
        self.worker.as_ref().is_some_and(|worker| !worker.heard) || self.segments.has_file(device, inode)
    }

    /// Passes a member's socket on to the worker, at once or when there is a worker that can be told. Returns `false`
    /// if too many sockets or orders wait already.
    pub fn admit(&mut self, identity: Identity, socket: Seqpacket) -> bool {
        let socket = Rc::new(socket);
        match &mut self.worker {
            Some(worker) if worker.heard => worker.send(&Order::Admit(identity), vec![socket]),
            _ if self.waiting.len() < MOST_WAITING => {
                self.waiting.push((identity, socket));
                true
            }
            _ => false,
        }
    }

    /// Orders the worker to end the connection of a process that is to be a member no longer. Returns `false` if the
    /// worker cannot be told at the moment.
    pub fn dismiss(&mut self, identity: Identity) -> bool {
        self.waiting.retain(|(waiting, _)| (waiting.pid, waiting.started) != (identity.pid, identity.started));
        match &mut self.worker {
            Some(worker) => worker.heard && worker.send(&Order::Dismiss(identity), vec![]),
            None => true,
        }
    }

    /// Orders the worker to make a member's agent leave its process, which goes on. Returns `false` if there is no
    /// worker that can be told.
    pub fn take_out(&mut self, identity: Identity) -> bool {
        let worker = self.worker.as_mut().filter(|worker| worker.heard);
        worker.is_some_and(|worker| worker.send(&Order::Leave(identity), vec![]))
    }

    /// Time from which on the worker should be started; `None`: it is not needed, or runs.
    pub fn start_at(&self, members: usize, now: Instant) -> Option<Instant> {
        let wanted = !self.waiting.is_empty() || (self.backoff.has_failed() && members > 0);
        (self.worker.is_none() && wanted).then(|| self.backoff.start_at(now))
    }

    /// Starts the worker, as user `uid` if that is given. `no_home` gets the reason why it has no control group of its
    /// own.
    pub fn start(&mut self, program: &Held, place: &Place, uid: Option<u32>, no_home: &mut Option<String>) {
        match Worker::start(program, place, (&self.name, uid), no_home) {
            Ok(worker) => {
                let user = uid.map_or(String::new(), |uid| format!(", user {uid}"));
                note!("group {}: worker started: process {}{user}", self.name, worker.process.pid);
                self.worker = Some(worker);
            }
            Err(e) => self.not_started(&format!("{e:#}")),
        }
    }

    /// Notes why the worker could not be started. The next attempt waits, as after the end of a worker.
    pub fn not_started(&mut self, why: &str) {
        note!("group {}: no worker: {why}", self.name);
        self.backoff.failed(Duration::ZERO, Instant::now());
    }

    /// Changes settings on the fly, and tells the worker.
    pub fn set(&mut self, change: &Change) {
        self.change = self.change.then(change);
        self.order_settings();
    }

    /// Takes over the group's part of another configuration, and with it the changes on the fly that go on, and tells
    /// the worker.
    pub fn configure(&mut self, config: GroupConfig, change: Change) {
        (self.config, self.change, self.is_configured) = (config, change, true);
        self.order_settings();
    }

    /// Asks the worker for a report, and returns its number; `None` where there is no worker to ask.
    pub fn ask_report(&mut self) -> Option<u64> {
        self.worker.as_mut().filter(|w| w.heard)?.send(&Order::Report, vec![]).then_some(())?;
        self.asked = self.asked.saturating_add(1);
        self.owes_since.get_or_insert_with(Instant::now);
        Some(self.asked)
    }

    /// Tells the worker what memory it is promised.
    pub fn give_room(&mut self, room: Room) {
        if let Some(worker) = &mut self.worker {
            worker.send(&Order::Room(room), vec![]);
        }
    }

    /// Asks the worker why pages are not folded, and returns the question's number; `None` where there is no worker. A
    /// worker that has unread orders is not asked, because the question is long, and any user of the group may ask.
    pub fn ask_why(&mut self, pid: u32, pages: Vec<(u64, u16)>) -> Option<u64> {
        let question = self.questions.saturating_add(1);
        let worker = self.worker.as_mut().filter(|w| w.heard && !w.has_waiting())?;
        worker.send(&Order::Why { question, pid, pages }, vec![]).then_some(())?;
        self.questions = question;
        Some(question)
    }

    /// Number of the latest report that has come, or never will because its worker has ended.
    pub const fn answered(&self) -> u64 {
        self.answered
    }

    /// Handles the worker's next message; `None` when there is none.
    pub fn hear(&mut self, buffer: &mut Vec<u8>) -> Option<Heard> {
        let worker = self.worker.as_mut()?;
        let (news, files) = match worker.receive(buffer) {
            Ok(Some(news)) => news,
            Ok(None) => return None,
            Err(e) => return Some(self.lost(&e)),
        };
        self.owes_since = None;
        Some(match news {
            News::Adopted { members, segments, begun } => self.begin(members, segments, begun, files),
            News::Segment(info) => {
                if let Some(file) = files.into_iter().next() {
                    self.segments.insert(info, file);
                }
                Heard::Nothing
            }
            News::Dropped(number) => {
                self.segments.remove(number);
                Heard::Nothing
            }
            News::Report(report) => {
                self.answered = self.answered.saturating_add(1);
                Heard::Report(worker.process, report)
            }
            News::Needs(needs) => Heard::Needs(needs),
            News::Because(question, reasons) => Heard::Because(question, reasons),
            News::Event(text) => {
                note!("group {}: {text}", self.name);
                Heard::Nothing
            }
        })
    }

    fn begin(
        &mut self,
        members: Vec<Identity>,
        segments: Vec<SegmentInfo>,
        begun: bool,
        files: Vec<ForeignFile>,
    ) -> Heard {
        let settings = self.ordered();
        let Some(worker) = &mut self.worker else { return Heard::Nothing };
        let is_first = !std::mem::replace(&mut worker.heard, true);
        if begun && is_first {
            // A worker that an earlier supervisor started names all of its segments.
            self.segments.replace(segments.into_iter().zip(files));
        }
        if begun {
            worker.send(&Order::Set(settings), vec![]);
        } else {
            // One message carries no more than `MOST_FDS` files. A group has more segments only after many of its
            // workers have died.
            let kept = self.segments.iter().rev().take(MOST_FDS);
            let (segments, files) = kept.map(|(info, file)| (*info, Rc::clone(file) as Rc<dyn AsFd>)).unzip();
            worker.send(&Order::Take { settings, segments }, files);
        }
        if begun {
            // The adopted worker is told of all loaded templates, because some may have been loaded before it was
            // connected to this supervisor. It ignores those that it knows already.
            for (_, (info, file)) in self.segments.templates() {
                worker.send(&Order::Load(*info), vec![Rc::clone(file) as Rc<dyn AsFd>]);
            }
        }
        for number in self.segments.unloaded() {
            worker.send(&Order::Unload(number), vec![]);
        }
        for (identity, socket) in self.waiting.drain(..) {
            worker.send(&Order::Admit(identity), vec![socket]);
        }
        Heard::Members(members)
    }

    /// Kills a worker that stands still: one that owes an answer and has sent nothing for the time of [`STILL`].
    /// Another one takes its place. Returns `None` if the worker is in time, or there is none.
    pub fn end_if_still(&mut self, now: Instant) -> Option<Heard> {
        let worker = self.worker.as_ref()?;
        let since = if worker.heard { self.owes_since? } else { worker.since };
        let time = now.saturating_duration_since(since);
        let is_stopped = ProcessStat::read(worker.process.pid).is_ok_and(|stat| stat.state == b'T');
        let why = why_still(time, is_stopped)?;
        Some(self.lost(&std::io::Error::other(format!("it has stood still for {} s: {why}", time.as_secs()))))
    }

    fn lost(&mut self, why: &std::io::Error) -> Heard {
        self.owes_since = None;
        let Some(worker) = self.worker.take() else { return Heard::Nothing };
        let why = match why.kind() {
            std::io::ErrorKind::UnexpectedEof => "has ended".to_owned(),
            _ => format!("is ended: {why}"),
        };
        note!("group {}: the worker, process {}, {why}", self.name, worker.process.pid);
        // The process still runs if only the connection broke.
        worker.process.kill();
        self.backoff.failed(worker.since.elapsed(), Instant::now());
        self.answered = self.asked;
        Heard::Ended(worker.home)
    }

    /// Asks the worker to end, and forgets the segments kept for its successor. Returns the control group that the
    /// worker had, which is left to be removed.
    pub fn end(&mut self, place: &Place) -> Option<CgroupHome> {
        self.segments.clear();
        self.backoff.reset();
        self.owes_since = None;
        self.answered = self.asked;
        let worker = self.worker.take()?;
        note!("group {}: the worker, process {}, is ended", self.name, worker.process.pid);
        worker.end();
        let _ = std::fs::remove_file(place.worker_socket(&self.name));
        worker.home
    }
}

/// Why a worker counts as standing still that has owed an answer for `time`; `None` if it may only be late.
fn why_still(time: Duration, is_stopped: bool) -> Option<&'static str> {
    let (most, why) = if is_stopped { (STILL[0], "a signal has stopped it") } else { (STILL[1], "it answers nothing") };
    (time > most).then_some(why)
}

#[cfg(test)]
mod tests {
    use super::{Identity, MOST_WAITING, why_still};
    use crate::config::Config;
    use crate::registry::Registry;
    use crate::state::State;
    use api::change::{Change, ScanRate};
    use api::place::Place;
    use std::path::Path;
    use std::time::{Duration, Instant};

    #[test]
    fn members_beyond_those_that_may_wait_for_a_worker_are_refused_in_their_own_group() {
        act::raise_open_files_limit();
        let mut registry = Registry::new(Place::at(Path::new("/nonexistent")), Config::default(), State::default());
        let mut admit = |group, pid| {
            let (socket, _) = host::Seqpacket::pair().expect("a pair of sockets");
            registry.group(group).admit(Identity { name: format!("{group}-{pid}"), pid, started: 1 }, socket)
        };
        let admitted = (0..2000).filter(|pid| admit("acme", *pid)).count();
        assert_eq!(admitted, MOST_WAITING);
        assert!(admit("beta", 1), "another group has places of its own");
    }

    #[test]
    fn worker_that_answers_nothing_gets_longer_than_one_that_a_signal_has_stopped() {
        let after = |seconds, is_stopped| why_still(Duration::from_secs(seconds), is_stopped);
        assert_eq!([after(15, true), after(60, false)], [None, None]);
        assert_eq!(after(16, true), Some("a signal has stopped it"));
        assert_eq!(after(61, false), Some("it answers nothing"));
    }

    #[test]
    fn pace_under_pressure_counts_until_its_time_is_over_and_leaves_settings_alone() {
        let mut registry = Registry::new(Place::at(Path::new("/nonexistent")), Config::default(), State::default());
        let group = registry.group("acme");
        group.set(&Change { scan_rate: Some(ScanRate::Pages(100)), ..Change::default() });
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        group.pace(Some((400, later(60))));
        assert_eq!((group.ordered().scan_rate, group.settings().scan_rate), (Some(400), Some(100)));
        group.end_pace(later(59));
        assert_eq!(group.ordered().scan_rate, Some(400));
        // The same rate is set again, and lasts longer.
        group.pace(Some((400, later(90))));
        group.end_pace(later(60));
        assert_eq!(group.ordered().scan_rate, Some(400));
        group.end_pace(later(90));
        assert_eq!((group.ordered().scan_rate, group.pressure_scan_rate()), (Some(100), None));
        group.pace(Some((7, later(60))));
        group.pace(None);
        assert_eq!(group.ordered().scan_rate, Some(100));
    }
}
