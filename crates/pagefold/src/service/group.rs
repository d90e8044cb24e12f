//! One group of the service: its worker, kept running as long as there are members, and what a successor needs.
//!
//! ```text
//!   no worker --(a member connects)--> started --Adopted--> Take + what is kept, Admit ... --> running
//!       ^                                 |                                                      |
//!       |                                 +-- it ends ---------------------+---------------------+
//!       |                                                                  v
//!       +-- no member left --------------- waits (0.1 s, doubling to 10 s) --> started again
//! ```

use super::ask::WorkerState;
use super::change::Change;
use super::config::GroupConfig;
use super::log::note;
use super::place::Place;
use super::worker::Worker;
use fold::control::{GroupReport, Identity, News, Order, SegmentInfo, Settings};
use host::{CgroupHome, MOST_FDS, Seqpacket};
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A worker that ran for so long was all right.
const ALL_RIGHT_AFTER: Duration = Duration::from_secs(60);
/// Times between a worker's end and the next one's start.
const WAIT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// Members' sockets that may wait for a worker.
const MOST_WAITING: usize = 1024;

/// A group.
pub struct Group {
    /// Its name.
    pub name: String,
    /// What the configuration says of it.
    pub config: GroupConfig,
    /// What was set on the fly.
    pub change: Change,
    /// User for its worker, where it runs as another than the supervisor.
    pub uid: Option<u32>,
    /// Its worker.
    pub worker: Option<Worker>,
    /// Since when it has had no member.
    pub idle_since: Option<Instant>,
    segments: BTreeMap<u8, (SegmentInfo, Rc<OwnedFd>)>,
    waiting: Vec<(Identity, Rc<OwnedFd>)>,
    failures: u32,
    not_before: Option<Instant>,
}

/// What a worker's news means to the rest of the service.
pub enum Heard {
    /// It has members already.
    Members(Vec<Identity>),
    /// How it does.
    Report(Box<GroupReport>),
    /// Nothing.
    Nothing,
    /// It has ended; its control group is left to be removed.
    Ended(Option<CgroupHome>),
}

impl Group {
    /// A group without a worker.
    pub fn new(name: &str, config: GroupConfig, change: Change) -> Self {
        Self {
            name: name.to_owned(),
            config,
            change,
            uid: None,
            worker: None,
            idle_since: None,
            segments: BTreeMap::new(),
            waiting: Vec::new(),
            failures: 0,
            not_before: None,
        }
    }

    /// How it is to be run.
    pub fn settings(&self) -> Settings {
        self.change.apply(self.config.settings)
    }

    /// What its worker is doing.
    pub fn worker_state(&self) -> WorkerState {
        match &self.worker {
            Some(worker) if worker.heard => WorkerState::Running,
            None if self.failures == 0 && self.waiting.is_empty() => WorkerState::None,
            _ => WorkerState::Starting,
        }
    }

    /// Segments kept for a successor.
    pub fn segments(&self) -> usize {
        self.segments.len()
    }

    /// Gives a member's socket to the worker, now or when there is one. `false` when too many wait.
    pub fn admit(&mut self, identity: Identity, socket: Seqpacket) -> bool {
        let socket = Rc::new(OwnedFd::from(socket));
        match &mut self.worker {
            Some(worker) if worker.heard => worker.send(&Order::Admit(identity), vec![socket]),
            _ if self.waiting.len() < MOST_WAITING => {
                self.waiting.push((identity, socket));
                true
            }
            _ => false,
        }
    }

    /// When the worker should be started, if not `now`; `None`: not at all.
    pub fn start_at(&self, members: usize, now: Instant) -> Option<Instant> {
        let wanted = !self.waiting.is_empty() || (self.failures > 0 && members > 0);
        (self.worker.is_none() && wanted).then(|| self.not_before.unwrap_or(now))
    }

    /// Starts the worker.
    pub fn start(&mut self, place: &Place, no_home: &mut Option<String>) {
        match Worker::start(place, &self.name, self.uid, no_home) {
            Ok(worker) => {
                let user = self.uid.map_or(String::new(), |uid| format!(", user {uid}"));
                note!("group {}: worker started: process {}{user}", self.name, worker.process.pid);
                self.worker = Some(worker);
            }
            Err(e) => {
                note!("group {}: {e:#}", self.name);
                self.back_off(Duration::ZERO);
            }
        }
    }

    /// Passes settings on.
    pub fn set(&mut self, change: &Change) {
        self.change = self.change.then(change);
        let settings = self.settings();
        if let Some(worker) = self.worker.as_mut().filter(|w| w.heard) {
            worker.send(&Order::Set(settings), vec![]);
        }
    }

    /// Asks the worker how it does; `false` where there is none to ask.
    pub fn ask_report(&mut self) -> bool {
        self.worker.as_mut().is_some_and(|w| w.heard && w.send(&Order::Report, vec![]))
    }

    /// Takes the next thing that the worker says; `None` when there is nothing more.
    pub fn hear(&mut self, buffer: &mut Vec<u8>) -> Option<Heard> {
        let worker = self.worker.as_mut()?;
        let (news, files) = match worker.receive(buffer) {
            Ok(Some(news)) => news,
            Ok(None) => return None,
            Err(e) => return Some(self.lost(&e)),
        };
        Some(match news {
            News::Adopted { members, segments, begun } => self.begin(members, segments, begun, files),
            News::Segment(info) => {
                if let Some(file) = files.into_iter().next() {
                    self.segments.insert(info.number, (info, Rc::new(file)));
                }
                Heard::Nothing
            }
            News::Dropped(number) => {
                self.segments.remove(&number);
                Heard::Nothing
            }
            News::Report(report) => Heard::Report(report),
            News::Event(text) => {
                note!("group {}: {text}", self.name);
                Heard::Nothing
            }
        })
    }

    fn begin(&mut self, members: Vec<Identity>, segments: Vec<SegmentInfo>, begun: bool, files: Vec<OwnedFd>) -> Heard {
        let settings = self.settings();
        let Some(worker) = &mut self.worker else { return Heard::Nothing };
        worker.heard = true;
        for (info, file) in segments.into_iter().zip(files) {
            self.segments.insert(info.number, (info, Rc::new(file)));
        }
        if begun {
            worker.send(&Order::Set(settings), vec![]);
        } else {
            // One message carries so many files; there are more only after that many workers have died.
            let kept: Vec<_> = self.segments.values().rev().take(MOST_FDS).cloned().collect();
            let (segments, files) = kept.into_iter().unzip();
            worker.send(&Order::Take { settings, segments }, files);
        }
        for (identity, socket) in self.waiting.drain(..) {
            worker.send(&Order::Admit(identity), vec![socket]);
        }
        Heard::Members(members)
    }

    fn lost(&mut self, why: &std::io::Error) -> Heard {
        let Some(worker) = self.worker.take() else { return Heard::Nothing };
        let why = match why.kind() {
            std::io::ErrorKind::UnexpectedEof => "has ended".to_owned(),
            _ => format!("is ended: {why}"),
        };
        note!("group {}: the worker, process {}, {why}", self.name, worker.process.pid);
        // It may still be there, if it was the connection that broke.
        worker.process.kill();
        self.back_off(worker.since.elapsed());
        Heard::Ended(worker.home)
    }

    fn back_off(&mut self, ran: Duration) {
        self.failures = if ran >= ALL_RIGHT_AFTER { 1 } else { self.failures.saturating_add(1) };
        let wait = WAIT.0.saturating_mul(1 << (self.failures - 1).min(10)).min(WAIT.1);
        self.not_before = Some(Instant::now() + wait);
    }

    /// Ends the worker, and forgets what its successor would need.
    pub fn end(&mut self, place: &Place) -> Option<CgroupHome> {
        self.segments.clear();
        (self.failures, self.not_before) = (0, None);
        let worker = self.worker.take()?;
        note!("group {}: the worker, process {}, is ended", self.name, worker.process.pid);
        worker.end();
        let _ = std::fs::remove_file(place.worker_socket(&self.name));
        worker.home
    }
}
