//! An agent whose member's pages are vectors of bytes.
#![allow(dead_code, reason = "each test uses a part of this")]

use act::HeldLease;
use host::{Received, Seqpacket};
use page::{Fingerprint, HostVirt, PAGE_BYTES, PageRange, PoolSlot};
use rustix::fd::OwnedFd;
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};
use wire::{
    DONATION_PAGES, FRAME_BYTES, FoldMode, FoldRun, Hello, MemberState, MemberStats, Outcome, Pace, RestedRun, SlotRun,
    Target, ToAgent, ToWorker, VERSION, Why,
};

/// Longest wait of a test for anything: 60 s.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A page's bytes, all different for different seeds; zeros for 0.
pub fn content(seed: u64) -> Vec<u8> {
    (0..PAGE_BYTES as u64 / 8)
        .flat_map(|n| if seed == 0 { 0 } else { seed.wrapping_mul(n + 1) }.to_le_bytes())
        .collect()
}

/// An agent and its member's memory.
pub struct Agent {
    pub socket: Seqpacket,
    /// Contents of pages by number.
    pub pages: BTreeMap<u64, u64>,
    pub mapped: BTreeMap<u64, PoolSlot>,
    pub zeroed: u64,
    pub segments: HashMap<u8, (u32, OwnedFd)>,
    pub window: Option<OwnedFd>,
    pub lease: Option<HeldLease>,
    /// Old leases that are kept mapped, as forked children would.
    pub kept_leases: Option<Vec<HeldLease>>,
    pub pace: Option<Pace>,
    /// Pages that it may make private.
    pub room: u64,
    /// Pages that it has made private.
    pub unfolded: u64,
    pub again: u32,
    /// All runs that it was asked to fold.
    pub folds: Vec<FoldRun>,
    pub donated: u64,
    pub closed: bool,
    /// The contents that it donates for given contents: a liar donates others.
    pub shows: fn(u64) -> u64,
    /// Whether it answers requests for donations.
    pub answers: bool,
    /// Fingerprints and bytes of contents, kept because they cost time to make.
    bytes: HashMap<u64, (Fingerprint, Vec<u8>)>,
}

impl Agent {
    pub fn new(socket: Seqpacket) -> Self {
        Self {
            socket,
            pages: BTreeMap::new(),
            mapped: BTreeMap::new(),
            zeroed: 0,
            segments: HashMap::new(),
            window: None,
            lease: None,
            kept_leases: None,
            pace: None,
            room: 0,
            unfolded: 0,
            again: 0,
            folds: Vec::new(),
            donated: 0,
            closed: false,
            shows: |content| content,
            answers: true,
            bytes: HashMap::new(),
        }
    }

    pub fn hello(&mut self) {
        self.say(&ToWorker::Hello(Hello { version: VERSION, eager: true }));
    }

    /// Sends a message; waits if the worker is busy.
    pub fn say(&mut self, message: &ToWorker) {
        let mut frame = Vec::new();
        message.encode(&mut frame);
        self.say_bytes(&frame);
    }

    pub fn say_bytes(&mut self, frame: &[u8]) {
        let start = Instant::now();
        loop {
            match self.socket.send(frame, &[]) {
                Ok(true) => return,
                Ok(false) => assert!(start.elapsed() < PATIENCE, "the worker does not read"),
                Err(_) => {
                    self.closed = true;
                    return;
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn known(&mut self, seed: u64) -> &(Fingerprint, Vec<u8>) {
        self.bytes.entry(seed).or_insert_with(|| {
            let bytes = content(seed);
            (Fingerprint::of(&bytes), bytes)
        })
    }

    /// Writes these contents into pages from `first` on, and reports them at rest.
    pub fn rest(&mut self, first: u64, contents: impl IntoIterator<Item = u64>) {
        let contents: Vec<u64> = contents.into_iter().collect();
        for (n, content) in contents.iter().enumerate() {
            self.pages.insert(first + n as u64, *content);
        }
        self.report(first, &contents, false);
    }

    /// Reports pages at rest.
    pub fn report(&mut self, first: u64, contents: &[u64], huge: bool) {
        for (n, piece) in contents.chunks(512).enumerate() {
            let fingerprints = piece.iter().map(|content| self.known(*content).0).collect();
            let start = HostVirt((first + 512 * n as u64) << 12);
            let run = RestedRun { start, pages: piece.len() as u16, huge };
            self.say(&ToWorker::Rested(vec![run], fingerprints));
        }
    }

    /// The member writes pages.
    pub fn write(&mut self, first: u64, contents: impl IntoIterator<Item = u64>) {
        let mut runs = Vec::new();
        for (page, content) in (first..).zip(contents) {
            self.pages.insert(page, content);
            if let Some(slot) = self.mapped.remove(&page) {
                runs.push(SlotRun { start: HostVirt(page << 12), slot, pages: 1 });
            }
        }
        if !runs.is_empty() {
            self.say(&ToWorker::Released(runs));
        }
    }

    pub fn held(&self) -> Vec<SlotRun> {
        self.mapped.iter().map(|(page, slot)| SlotRun { start: HostVirt(page << 12), slot: *slot, pages: 1 }).collect()
    }

    pub fn stats(&mut self, state: MemberState) {
        let stats = MemberStats { state, enrolled_pages: self.pages.len() as u64, ..MemberStats::default() };
        self.say(&ToWorker::Stats(Box::new(stats)));
    }

    /// The bytes of a slot, through the file that can only be read.
    pub fn slot(&self, slot: PoolSlot) -> Vec<u8> {
        let mut bytes = vec![0; PAGE_BYTES];
        let (slots, file) = &self.segments[&slot.segment()];
        assert!(slot.index() < *slots);
        let read = rustix::io::pread(file, &mut bytes, u64::from(slot.index()) << 12).unwrap();
        assert_eq!(read, PAGE_BYTES);
        bytes
    }

    /// Checks that every mapped page's slot holds the bytes that the member wrote.
    pub fn check(&self) {
        for (page, slot) in &self.mapped {
            assert_eq!(self.slot(*slot), content(self.pages[page]), "page {page} maps slot {slot}");
        }
    }

    fn fold(&mut self, runs: &[FoldRun]) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for run in runs {
            for n in 0..run.pages {
                let page = run.start.page() + u64::from(n);
                let Some(seed) = self.pages.get(&page).copied() else {
                    outcomes.push(Outcome::Gone);
                    continue;
                };
                assert!(!self.mapped.contains_key(&page), "page {page} is folded already");
                outcomes.push(match run.target {
                    Target::Zero if seed == 0 => {
                        self.zeroed += 1;
                        self.pages.remove(&page);
                        Outcome::Folded
                    }
                    Target::Slot(slot) if self.slot(slot.add(n.into()).unwrap()) == self.known(seed).1 => {
                        self.mapped.insert(page, slot.add(n.into()).unwrap());
                        Outcome::Folded
                    }
                    _ => Outcome::Changed,
                });
            }
            self.folds.push(*run);
        }
        outcomes
    }

    fn donate(&mut self, pages: impl Iterator<Item = u64>) -> Vec<bool> {
        let mut given = Vec::new();
        for (at, page) in pages.enumerate() {
            let seed = self.pages.get(&page).copied().map(self.shows);
            if let Some(seed) = seed {
                let bytes = self.known(seed).1.clone();
                let window = self.window.as_ref().unwrap();
                assert!(at < DONATION_PAGES);
                assert_eq!(rustix::io::pwrite(window, &bytes, (at as u64) << 12), Ok(PAGE_BYTES));
                self.donated += 1;
            }
            given.push(seed.is_some());
        }
        given
    }

    /// Does everything that the worker has asked.
    pub fn serve(&mut self) {
        while let Some((message, files)) = self.hear() {
            self.obey(message, files);
        }
    }

    /// The worker's next message.
    pub fn hear(&mut self) -> Option<(ToAgent, Vec<OwnedFd>)> {
        let (mut buffer, mut files) = (vec![0; FRAME_BYTES], Vec::new());
        match self.socket.receive(&mut buffer, &mut files) {
            Ok(Received::Frame(bytes)) => Some((ToAgent::decode(&buffer[..bytes]).unwrap(), files)),
            Ok(Received::Nothing) => None,
            Ok(Received::Closed) | Err(_) => {
                self.closed = true;
                None
            }
        }
    }

    /// A reason for each page: those that it has were reported.
    fn why(&self, ranges: &[PageRange]) -> Vec<Why> {
        let pages = ranges.iter().flat_map(|r| (0..r.pages).map(|n| r.start.page() + n));
        pages.map(|page| if self.pages.contains_key(&page) { Why::Other } else { Why::Young }).collect()
    }

    fn report_again(&mut self) {
        self.again += 1;
        let pages: Vec<(u64, u64)> = self.pages.iter().map(|(page, content)| (*page, *content)).collect();
        for (page, content) in pages {
            if !self.mapped.contains_key(&page) {
                self.report(page, &[content], false);
            }
        }
    }

    pub fn obey(&mut self, message: ToAgent, mut files: Vec<OwnedFd>) {
        match message {
            ToAgent::Welcome(_) => self.window = files.pop(),
            ToAgent::Segment(number, slots) => {
                self.segments.insert(number, (slots, files.pop().unwrap()));
            }
            ToAgent::Lease(epoch) => {
                let before = self.lease.replace(HeldLease::hold(files.pop().unwrap()).unwrap());
                if let Some(kept) = &mut self.kept_leases {
                    kept.extend(before);
                }
                self.say(&ToWorker::LeaseTaken(epoch));
            }
            ToAgent::Pace(pace) => {
                self.pace = Some(pace);
                if pace.fold != FoldMode::Unfold {
                    self.room = 0;
                }
            }
            ToAgent::Room(pages) => {
                assert_eq!(self.pace.map(|pace| pace.fold), Some(FoldMode::Unfold), "room for nothing");
                self.room = pages;
                let pages = self.mapped.keys().take(usize::try_from(pages).unwrap_or(usize::MAX));
                let pages: Vec<(u64, u64)> = pages.map(|page| (*page, self.pages[page])).collect();
                self.room -= pages.len() as u64;
                self.unfolded += pages.len() as u64;
                pages.into_iter().for_each(|(page, content)| self.write(page, [content]));
            }
            ToAgent::Donate(id, ranges) => {
                if self.answers {
                    let pages = ranges.iter().flat_map(|r| (0..r.pages).map(|n| r.start.page() + n));
                    let given = self.donate(pages.collect::<Vec<_>>().into_iter());
                    self.say(&ToWorker::Donated(id, given));
                }
            }
            ToAgent::Fold(id, runs) => {
                let outcomes = self.fold(&runs);
                self.say(&ToWorker::Folded(id, outcomes));
            }
            ToAgent::Why(id, ranges) => {
                self.say(&ToWorker::Because(id, self.why(&ranges)));
            }
            ToAgent::Again => self.report_again(),
            // These members are no programs, which alone are asked to.
            ToAgent::Leave => {}
        }
    }

    pub fn wait_until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            assert!(start.elapsed() < PATIENCE, "waited in vain for: {what}");
            std::thread::sleep(Duration::from_millis(1));
            self.serve();
        }
    }
}

/// Serves agents until `done` is true.
pub fn serve_until(what: &str, agents: &mut [&mut Agent], done: impl Fn(&[&mut Agent]) -> bool) {
    let start = Instant::now();
    while !done(agents) {
        assert!(start.elapsed() < PATIENCE, "waited in vain for: {what}");
        std::thread::sleep(Duration::from_millis(1));
        agents.iter_mut().for_each(|agent| agent.serve());
    }
}
