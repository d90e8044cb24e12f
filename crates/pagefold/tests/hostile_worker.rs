//! Members whose worker is compromised. It may end folding; it may not stop or kill the member, or see what the member
//! has not enrolled.

mod common;

use act::{DonationWindow, Lease, PoolSegment};
use common::Afterwards;
use common::service::{Member, cannot_fold, until};
use host::{Mapping, Received, Seqpacket, SeqpacketListener};
use page::{Fingerprint, HostVirt, PageRange, PoolSlot};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use wire::{FoldMode, FoldRun, HugePages, Outcome, Pace, Target, ToAgent, ToWorker, VERSION, ZeroPages};

const SLOTS: u32 = 16;

/// A member, and the worker that the agent takes for its group's.
struct Scene {
    listener: SeqpacketListener,
    member: Member,
    _afterwards: Afterwards,
    _dir: tempfile::TempDir,
}

/// One connection of the agent's.
struct Connection {
    socket: Seqpacket,
    window: OwnedFd,
    files: Files,
    heard: Vec<ToWorker>,
}

fn program(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name(name)
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = SeqpacketListener::bind(&socket, host::Files::Taken).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "LD_PRELOAD=$0 PAGEFOLD_PID=$$ exec $1"]).arg(program("libpagefold.so"));
        command.arg(program("known_pages")).env("PAGEFOLD_SOCKET", &socket).env("PAGEFOLD_EAGER", "1");
        let mut member = Member::spawn(command, "member", dir.path());
        let afterwards = Afterwards::run(&format!("kill -9 {} 2>/dev/null", member.pid()));
        for line in ["alloc pages 64", "fill pages 0 64 1", "dontfork pages", "mergeable pages"] {
            assert_eq!(member.tell(line), "ok");
        }
        Self { listener, member, _afterwards: afterwards, _dir: dir }
    }

    /// The agent's next connection, greeted as a worker does, but for what `lie` puts in the place of its files.
    fn greet(&self, lie: impl FnOnce(&mut Files)) -> Connection {
        let mut socket = None;
        until(60, "the agent connects", || {
            socket = self.listener.accept().unwrap();
            socket.is_some()
        });
        let mut files = Files::honest();
        lie(&mut files);
        let window = files.window.as_fd().try_clone_to_owned().unwrap();
        let own = |file: &OwnedFd| file.try_clone().unwrap();
        let [ours, lease, segment] = [&files.window, &files.lease, &files.segment].map(own);
        let mut connection = Connection { socket: socket.unwrap(), window, files, heard: Vec::new() };
        connection.say(&ToAgent::Welcome(VERSION), Some(&ours));
        connection.say(&ToAgent::Lease(1), Some(&lease));
        connection.say(&ToAgent::Segment(0, SLOTS), Some(&segment));
        connection.say(&ToAgent::Pace(pace()), None);
        connection
    }
}

fn pace() -> Pace {
    let (first, last) = (Fingerprint(0), Fingerprint(u64::MAX));
    let (fold, zero_pages, huge_pages) = (FoldMode::On, ZeroPages::Share, HugePages::Keep);
    Pace { pages_per_s: None, fold, zero_pages, huge_pages, first, last }
}

/// The files that a worker sends.
struct Files {
    window: OwnedFd,
    lease: OwnedFd,
    segment: OwnedFd,
    pool: PoolSegment,
    shown: DonationWindow,
}

impl Files {
    fn honest() -> Self {
        let own = |file: &dyn AsFd| file.as_fd().try_clone_to_owned().unwrap();
        let pool = PoolSegment::create("hostile", SLOTS).unwrap();
        let (shown, lease) = (DonationWindow::create(wire::DONATION_PAGES).unwrap(), Lease::create().unwrap());
        Self { window: own(&shown), lease: own(&lease), segment: pool.read_only().unwrap(), pool, shown }
    }
}

impl Connection {
    /// Whether the agent took it.
    fn say(&mut self, message: &ToAgent, file: Option<&OwnedFd>) -> bool {
        let mut frame = Vec::new();
        message.encode(&mut frame);
        let files: Vec<_> = file.into_iter().map(AsFd::as_fd).collect();
        self.socket.send(&frame, &files).unwrap_or(false)
    }

    /// Takes what has arrived. Returns whether the agent has hung up.
    fn hear(&mut self) -> bool {
        let (mut buffer, mut files) = (vec![0; wire::FRAME_BYTES], Vec::new());
        loop {
            match self.socket.receive(&mut buffer, &mut files) {
                Ok(Received::Frame(bytes)) => self.heard.push(ToWorker::decode(&buffer[..bytes]).unwrap()),
                Ok(Received::Nothing) => return false,
                Ok(Received::Closed) | Err(_) => return true,
            }
        }
    }

    fn ask<T>(&mut self, question: &ToAgent, answer: impl Fn(&ToWorker) -> Option<T>) -> T {
        assert!(self.say(question, None));
        let mut found = None;
        until(60, &format!("an answer to {question:?}"), || {
            assert!(!self.hear(), "the agent has hung up");
            found = self.heard.iter().find_map(&answer);
            found.is_some()
        });
        found.unwrap()
    }

    /// Which of these pages the member shows.
    fn donated(&mut self, id: u32, pages: PageRange) -> Vec<bool> {
        self.ask(&ToAgent::Donate(id, vec![pages]), |message| match message {
            ToWorker::Donated(of, given) if *of == id => Some(given.clone()),
            _ => None,
        })
    }

    /// The outcomes for these pages when they are to be folded.
    fn folded(&mut self, id: u32, start: HostVirt, pages: u16, target: Target) -> Vec<Outcome> {
        self.ask(&ToAgent::Fold(id, vec![FoldRun { start, pages, target }]), |message| match message {
            ToWorker::Folded(of, outcomes) if *of == id => Some(outcomes.clone()),
            _ => None,
        })
    }

    /// Pages that were released.
    fn released(&mut self) -> u64 {
        assert!(!self.hear(), "the agent has hung up");
        let pages = |message: &ToWorker| match message {
            ToWorker::Released(runs) => runs.iter().map(|run| u64::from(run.pages)).sum(),
            _ => 0,
        };
        self.heard.iter().map(pages).sum()
    }

    /// Whether the window shows bytes of anybody.
    fn shows_anything(&self) -> bool {
        let mut bytes = vec![0; 64 << 12];
        rustix::io::pread(&self.window, &mut bytes, 0).unwrap();
        bytes.iter().any(|byte| *byte != 0)
    }
}

fn plain_file(dir: &Path, pages: u32) -> OwnedFd {
    let path = dir.join("plain");
    let file = std::fs::File::options().create(true).truncate(true).read(true).write(true).open(path).unwrap();
    file.set_len(u64::from(pages) << 12).unwrap();
    file.into()
}

fn memory_file(pages: u32, flags: MemfdFlags, seals: SealFlags) -> OwnedFd {
    let file = memfd_create("memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags).unwrap();
    ftruncate(&file, u64::from(pages) << 12).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

/// The agent writes the window with the table locked, and compares pages with a segment: what blocks or fails there
/// blocks or kills the program.
#[test]
fn files_that_are_not_sealed_memory_are_refused() {
    if cannot_fold() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let fixed = SealFlags::SHRINK | SealFlags::GROW;
    let memory = |pages, seals| memory_file(pages, MemfdFlags::empty(), seals);
    let huge = || memory_file(512, MemfdFlags::HUGETLB, fixed | SealFlags::FUTURE_WRITE | SealFlags::SEAL);
    type Lie<'a> = Box<dyn FnOnce(&mut Files) + 'a>;
    let lies: [(&str, Lie<'_>); 7] = [
        ("a segment on a disk", Box::new(|files| files.segment = plain_file(dir.path(), SLOTS))),
        ("a segment that may shrink", Box::new(|files| files.segment = memory(SLOTS, SealFlags::GROW))),
        ("a segment that others may write", Box::new(|files| files.segment = memory(SLOTS, fixed | SealFlags::SEAL))),
        ("a segment of huge pages", Box::new(|files| files.segment = huge())),
        ("a window on a disk", Box::new(|files| files.window = plain_file(dir.path(), 256))),
        ("a window that may grow", Box::new(|files| files.window = memory(256, SealFlags::SHRINK))),
        ("a lease on a disk", Box::new(|files| files.lease = plain_file(dir.path(), 1))),
    ];
    for (what, lie) in lies {
        let mut scene = Scene::new();
        let mut connection = scene.greet(lie);
        until(60, &format!("the agent hangs up on {what}"), || connection.hear());
        assert_eq!(scene.member.tell("read pages 0 64"), "ok", "{what}");
    }
    let scene = Scene::new();
    let mut honest = scene.greet(|_| {});
    let pages = enrolled(&mut honest);
    assert_eq!(honest.donated(1, pages), vec![true; pages.pages as usize]);
    assert!(honest.shows_anything());
}

/// Pages that the agent reports.
fn enrolled(connection: &mut Connection) -> PageRange {
    let mut pages = None;
    until(60, "pages have rested", || {
        assert!(!connection.hear(), "the agent has hung up");
        pages = connection.heard.iter().find_map(|message| match message {
            ToWorker::Rested(runs, _) => {
                runs.first().map(|run| PageRange { start: run.start, pages: run.pages.into() })
            }
            _ => None,
        });
        pages.is_some()
    });
    pages.unwrap()
}

/// A worker may name any page of the member.
#[test]
fn memory_that_was_not_enrolled_is_neither_shown_nor_folded() {
    if cannot_fold() {
        return;
    }
    let mut scene = Scene::new();
    let mut worker = scene.greet(|_| {});
    let pages = enrolled(&mut worker);
    let mappings = || Mapping::read_all(scene.member.pid()).unwrap();
    let before: Vec<_> = mappings().into_iter().filter(|mapping| mapping.has_flag(b"rd")).collect();
    assert!(before.len() > 20);
    let mut id = 0;
    for mapping in &before {
        let all = (mapping.end.0 - mapping.start.0) >> 12;
        let range = PageRange { start: mapping.start, pages: all.min(64) };
        if (range.start..range.end()).contains(&pages.start) {
            continue;
        }
        id += 1;
        assert_eq!(worker.donated(id, range), vec![false; range.pages as usize], "{mapping:?}");
        for target in [Target::Zero, Target::Slot(PoolSlot::new(0, 0).unwrap())] {
            id += 1;
            let outcomes = worker.folded(id, range.start, 1, target);
            assert!(!outcomes.contains(&Outcome::Folded), "{mapping:?}: {outcomes:?}");
        }
    }
    assert!(!worker.shows_anything(), "pages were shown that are not enrolled");
    let mut rest = before.iter().filter(|mapping| !mappings().iter().any(|now| now.start == mapping.start));
    assert!(rest.next().is_none(), "a mapping was replaced");
    assert_eq!(scene.member.tell("read pages 0 64"), "ok");
}

/// Fails with an agent that unfolds everything when it is told to unfold, whatever memory there is.
#[test]
fn no_more_pages_become_private_than_there_is_room_for() {
    if cannot_fold() {
        return;
    }
    let mut scene = Scene::new();
    let mut worker = scene.greet(|_| {});
    let pages = enrolled(&mut worker);
    let pages = PageRange { pages: SLOTS.into(), ..pages };
    assert_eq!(worker.donated(1, pages), vec![true; SLOTS as usize]);
    worker.files.pool.fill(0..SLOTS, &worker.files.shown, 0).unwrap();
    let target = Target::Slot(PoolSlot::new(0, 0).unwrap());
    assert_eq!(worker.folded(2, pages.start, SLOTS as u16, target), vec![Outcome::Folded; SLOTS as usize]);
    assert!(worker.say(&ToAgent::Pace(Pace { fold: FoldMode::Unfold, ..pace() }), None));
    let mut promised = 0;
    for room in [0, 5, 0, 7, 100] {
        assert!(worker.say(&ToAgent::Room(room), None));
        promised = (promised + room).min(SLOTS.into());
        until(60, &format!("{promised} pages are private"), || worker.released() >= promised);
        // Time in which it would unfold more.
        std::thread::sleep(std::time::Duration::from_secs(1));
        assert_eq!(worker.released(), promised, "with room for {room} more");
    }
    assert_eq!(scene.member.tell("read pages 0 64"), "ok");
}
