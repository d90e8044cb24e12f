//! A worker in a thread, a supervisor, and agents (`agent.rs`).
#![allow(dead_code, reason = "each test uses a part of this")]

mod agent;

pub use agent::*;
use api::control::{GroupReport, Identity, MemberRoom, Needs, News, Order, Room, SegmentInfo, Settings};
use host::{Received, Seqpacket, SeqpacketListener};
use page::PAGE_BYTES;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Waits until `done` is true.
pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "waited in vain for: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A worker and its supervisor.
pub struct World {
    dir: tempfile::TempDir,
    socket: Seqpacket,
    pub segments: BTreeMap<u8, (u32, OwnedFd)>,
    pub events: Vec<String>,
    pub dropped: Vec<u8>,
    pub adopted: Option<(Vec<Identity>, Vec<SegmentInfo>, bool)>,
    report: Option<GroupReport>,
    /// Everything that the worker has said that it needs to make pages private.
    pub needs: Vec<Needs>,
    /// Most pages that it is promised at a time; `None`: it gets no answer.
    pub room: Option<u64>,
    /// Time for which they are promised, in seconds.
    pub room_s: u64,
    /// The answer to a question [`Order::Why`], and its number.
    pub because: Option<(u64, Vec<u8>)>,
}

impl World {
    /// A worker that has not been told to begin.
    pub fn idle() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("worker");
        let listener = SeqpacketListener::bind(&path, host::Files::Taken).unwrap();
        let prover = dir.path().join("prover");
        std::thread::spawn(move || fold::run(listener, "test", u32::MAX, prover));
        let socket = Seqpacket::connect(&path).unwrap();
        let mut world = Self {
            dir,
            socket,
            segments: BTreeMap::new(),
            events: Vec::new(),
            dropped: Vec::new(),
            adopted: None,
            report: None,
            because: None,
            needs: Vec::new(),
            room: Some(u64::MAX),
            room_s: 60,
        };
        world.wait_until("adoption", |world| world.adopted.is_some());
        world
    }

    /// A worker that runs a group.
    pub fn new(settings: Settings) -> Self {
        let mut world = Self::idle();
        world.order(&Order::Take { settings, segments: Vec::new() }, &[]);
        world
    }

    /// A worker that takes over another's segments.
    pub fn successor(settings: Settings, segments: &BTreeMap<u8, (u32, OwnedFd)>) -> Self {
        let mut world = Self::idle();
        let infos =
            segments.iter().map(|(number, (slots, _))| SegmentInfo { number: *number, slots: *slots }).collect();
        let files: Vec<BorrowedFd<'_>> = segments.values().map(|(_, file)| file.as_fd()).collect();
        world.order(&Order::Take { settings, segments: infos }, &files);
        world
    }

    /// The socket to which the worker connects as to its prover.
    pub fn prover(&self) -> SeqpacketListener {
        SeqpacketListener::bind(&self.dir.path().join("prover"), host::Files::Refused).unwrap()
    }

    /// Another supervisor connects.
    pub fn reconnect(&mut self) {
        self.socket = Seqpacket::connect(&self.dir.path().join("worker")).unwrap();
        self.adopted = None;
        self.segments.clear();
        self.wait_until("adoption", |world| world.adopted.is_some());
    }

    pub fn order(&mut self, order: &Order, files: &[BorrowedFd<'_>]) {
        let (frame, start) = (serde_json::to_vec(order).unwrap(), Instant::now());
        // On a busy machine, the worker reads them later than we can say them.
        while !self.socket.send(&frame, files).unwrap() {
            assert!(start.elapsed() < PATIENCE, "the worker takes no orders");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn set(&mut self, settings: Settings) {
        self.order(&Order::Set(settings), &[]);
    }

    /// A member's connection before its `Hello`.
    pub fn admit(&mut self, name: &str, pid: u32) -> Agent {
        let (ours, theirs) = Seqpacket::pair().unwrap();
        let identity = Identity { name: name.to_owned(), pid, started: 1 };
        self.order(&Order::Admit(identity), &[theirs.as_fd()]);
        Agent::new(ours)
    }

    /// A member that has a lease and a pace.
    pub fn member(&mut self, name: &str, pid: u32) -> Agent {
        let mut agent = self.admit(name, pid);
        agent.hello();
        agent.wait_until("a welcome", |agent| agent.lease.is_some() && agent.pace.is_some());
        agent
    }

    pub fn listen(&mut self) {
        let (mut buffer, mut files) = (vec![0; 128 << 10], Vec::new());
        while let Ok(Received::Frame(bytes)) = self.socket.receive(&mut buffer, &mut files) {
            match serde_json::from_slice(&buffer[..bytes]).unwrap() {
                News::Adopted { members, segments, begun } => {
                    for (info, file) in segments.iter().zip(files.drain(..)) {
                        self.segments.insert(info.number, (info.slots, file));
                    }
                    match &mut self.adopted {
                        Some((known, ..)) => known.extend(members),
                        None => self.adopted = Some((members, segments, begun)),
                    }
                }
                News::Segment(info) => {
                    self.segments.insert(info.number, (info.slots, files.pop().unwrap()));
                }
                News::Dropped(number) => {
                    self.dropped.push(number);
                    self.segments.remove(&number);
                }
                News::Report(report) => self.report = Some(*report),
                News::Because(question, reasons) => self.because = Some((question, reasons)),
                News::Event(event) => self.events.push(event),
                News::Needs(needs) => self.answer(needs),
            }
        }
    }

    /// Promises room, or refuses it: none, and a part that is of no use.
    fn answer(&mut self, needs: Needs) {
        self.needs.push(needs.clone());
        let needed: u64 = needs.members.iter().map(|room| room.bytes).sum();
        let Some(mut left) = self.room.map(|pages| pages.saturating_mul(PAGE_BYTES as u64)).filter(|_| needed > 0)
        else {
            return;
        };
        let room = if left == 0 || needs.whole && left < needed {
            Room::Refused("the test has no room".to_owned())
        } else {
            let give = |room: &MemberRoom| {
                let bytes = room.bytes.min(left);
                left -= bytes;
                MemberRoom { bytes, ..*room }
            };
            Room::Promised { members: needs.members.iter().map(give).collect(), seconds: self.room_s }
        };
        self.order(&Order::Room(room), &[]);
    }

    pub fn wait_until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            assert!(start.elapsed() < PATIENCE, "waited in vain for: {what}; events: {:#?}", self.events);
            std::thread::sleep(Duration::from_millis(1));
            self.listen();
        }
    }

    pub fn report(&mut self) -> GroupReport {
        self.report = None;
        self.order(&Order::Report, &[]);
        self.wait_until("a report", |world| world.report.is_some());
        self.report.take().unwrap()
    }

    /// Waits for a report for which `done` is true, serving agents meanwhile.
    pub fn wait_for_report(&mut self, what: &str, agents: &mut [&mut Agent], done: impl Fn(&GroupReport) -> bool) {
        let start = Instant::now();
        loop {
            agents.iter_mut().for_each(|agent| agent.serve());
            let report = self.report();
            if done(&report) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "waited in vain for: {what}; {report:#?}; {:#?}", self.events);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn has_event(&self, text: &str) -> bool {
        self.events.iter().any(|event| event.contains(text))
    }
}
