//! Holds pages that were folded and then written, in every way that a process or the kernel can hold a page, and asks
//! the prover about them.
//!
//! The program reads commands from standard input, and answers each with a line. The pages are private ones inside a
//! private mapping of a memory file. A page's number is its place in that file. Slots are pages of another memory file.
//!
//! Without the path of a prover's socket, the program is a member (`member.rs`).

mod fuse;
mod member;
mod pages;

use act::{Prover, Purpose, Userfault, Watch};
use fuse::SlowFile;
use host::Seqpacket;
use io_uring::IoUring;
use page::{HostVirt, PAGE_BYTES, PageRange};
use pages::{Child, Lent, Pages, asks_as};
use rustix::fs::{MemfdFlags, memfd_create};
use std::error::Error;
use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use wire::prove::{Kind, PROVE_RANGES, Proof};

type Answer = Result<String, Box<dyn Error>>;

/// Number of pages that the program has.
const PAGES: usize = 512;
/// Longest time that an answer may take, also on a busy machine: 20 s.
const TIMEOUT: Duration = Duration::from_secs(20);

struct Program {
    socket: PathBuf,
    prover: Prover,
    keep_out: Userfault,
    pages: Pages,
    lent: Vec<Lent>,
    rings: Vec<IoUring>,
    child: Option<Child>,
    slow: Option<SlowFile>,
    slots: Option<(File, Pages)>,
    others: Vec<Seqpacket>,
    random: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let Some(socket) = std::env::args_os().nth(1).map(PathBuf::from) else { return member::run() };
    let pages = Pages::new(PAGES)?;
    let keep_out = Userfault::open(Purpose::Follow)?;
    keep_out.register(pages.range(0, PAGES), Watch::Writes)?;
    let prover = Prover::connect(&socket)?;
    let mut program = Program {
        socket,
        prover,
        keep_out,
        pages,
        lent: Vec::new(),
        rings: Vec::new(),
        child: None,
        slow: None,
        slots: None,
        others: Vec::new(),
        random: 0x9e37_79b9_7f4a_7c15,
    };
    for line in std::io::stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        println!("{}", program.obey(&words).unwrap_or_else(|e| format!("error: {e}")));
    }
    Ok(())
}

impl Program {
    fn obey(&mut self, words: &[&str]) -> Answer {
        let number = |n: usize| -> Result<usize, Box<dyn Error>> { Ok(words.get(n).ok_or("a number")?.parse()?) };
        match words.first().copied().unwrap_or_default() {
            "protect" => self.protect(true)?,
            "admit" => self.protect(false)?,
            "ask" => return self.ask(&[self.pages.range(number(1)?, number(2)?)]).map(|p| digits(&p)),
            "ask-slots" => return self.ask_slots(number(1)?, number(2)?),
            "lend-slot" => {
                let folded = self.folded()?;
                self.lent.push(folded.lend(&[number(1)?])?);
            }
            "write-slot" => {
                let folded = self.folded()?;
                self.slow()?.begin_write(folded.page(number(1)?))?;
            }
            "take" => _ = self.slow()?.take_write()?,
            "ask-at" => {
                let start = HostVirt(u64::from_str_radix(words.get(1).ok_or("an address")?, 16)?);
                return self.ask(&[PageRange { start, pages: number(2)? as u64 }]).map(|p| digits(&p));
            }
            "address" => return Ok(format!("{:x}", self.pages.range(0, 1).start.0)),
            "until-free" => return self.until_free(number(1)?, number(2)?),
            "write" => self.pages.write(number(1)?, 9),
            "lend" => self.lent.push(self.pages.lend(&[number(1)?])?),
            "register" => self.rings.push(self.pages.register(&[number(1)?])?),
            "read" => self.read_slowly(number(1)?)?,
            "arrive" => self.slow.as_mut().ok_or("nothing is read")?.answer_all()?,
            "fork" => self.child = Some(self.pages.fork()?),
            "release" => {
                self.lent.clear();
                self.rings.clear();
                self.child = None;
            }
            "huge" => return self.huge(),
            "mix" => return self.mix(number(1)?),
            "time" => return self.time(number(1)?, number(2)?, number(3)?),
            "rubbish" => return self.rubbish(),
            "flood" => return self.flood(number(1)?),
            "many" => return self.many(number(1)?),
            "ask-as" => return asks_as(&self.socket, number(1)?).map(|answer| answer.to_owned()),
            other => return Err(format!("no command {other:?}").into()),
        }
        Ok("ok".into())
    }

    fn protect(&self, keep_out: bool) -> Result<(), Box<dyn Error>> {
        Ok(self.keep_out.protect(self.pages.range(0, PAGES), keep_out)?)
    }

    fn ask(&mut self, ranges: &[PageRange]) -> Result<Vec<Proof>, Box<dyn Error>> {
        let pages: u64 = ranges.iter().map(|r| r.pages).sum();
        let mut proofs = vec![Proof::Unknown; usize::try_from(pages)?];
        if let Err(e) = self.prover.ask(ranges, &mut proofs, TIMEOUT) {
            if e.kind() != std::io::ErrorKind::TimedOut {
                self.prover = Prover::connect(&self.socket)?;
            }
            return Err(e.into());
        }
        Ok(proofs)
    }

    /// Asks until the prover calls pages free that this program has just let go. Prints how long that took, in
    /// microseconds, and the number of questions.
    fn until_free(&mut self, first: usize, count: usize) -> Answer {
        let (began, range) = (Instant::now(), self.pages.range(first, count));
        for asked in 1.. {
            let proofs = self.ask(&[range])?;
            if proofs.iter().all(|p| *p == Proof::Free) {
                return Ok(format!("{} {asked}", began.elapsed().as_micros()));
            }
            if began.elapsed() > TIMEOUT {
                return Err(digits(&proofs).into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(String::new())
    }

    fn slow(&mut self) -> Result<&mut SlowFile, Box<dyn Error>> {
        if self.slow.is_none() {
            self.slow = Some(SlowFile::mount()?);
        }
        Ok(self.slow.as_mut().ok_or("no file")?)
    }

    /// Begins a read into a page that bypasses the page cache, from a file whose server answers only on command.
    fn read_slowly(&mut self, page: usize) -> Result<(), Box<dyn Error>> {
        let page = self.pages.page(page);
        self.slow()?.begin_read(page)
    }

    /// The memory file whose pages are the slots, and a mapping of it as a worker has it.
    fn slots(&mut self) -> Result<&(File, Pages), Box<dyn Error>> {
        if self.slots.is_none() {
            let file = File::from(memfd_create("slots", MemfdFlags::CLOEXEC)?);
            let slots = Pages::slots(&file, PAGES)?;
            self.slots = Some((file, slots));
        }
        Ok(self.slots.as_ref().ok_or("no slots")?)
    }

    /// A mapping of the slots as members have it: private and not written.
    fn folded(&mut self) -> Result<Pages, Box<dyn Error>> {
        Ok(Pages::folded(&self.slots()?.0, PAGES)?)
    }

    fn ask_slots(&mut self, first: usize, count: usize) -> Answer {
        let range = self.slots()?.1.range(first, count);
        let (began, mut proofs) = (Instant::now(), vec![Proof::Unknown; count]);
        if !self.prover.send(Kind::Slot, &[range])? {
            return Err("the prover takes no question".into());
        }
        while !self.prover.receive(&mut proofs)? {
            if began.elapsed() > TIMEOUT {
                return Err("no answer".into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(digits(&proofs))
    }

    /// Asks about the small pages that make up a transparent huge page.
    fn huge(&mut self) -> Answer {
        let huge = Pages::huge()?;
        if !huge.is_huge()? {
            return Ok("skipped".into());
        }
        let all = huge.range(0, 512);
        self.keep_out.register(all, Watch::Writes)?;
        self.keep_out.protect(all, true)?;
        let answer = self.ask(&[all]).map(|p| digits(&p));
        self.keep_out.unregister(all)?;
        answer
    }

    fn random(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 33) as usize % below
    }

    /// Holds random pages, asks about all pages, and compares the answers. Prints four numbers: tries, pages held,
    /// held pages called free, other pages called free.
    fn mix(&mut self, tries: usize) -> Answer {
        let (mut asked, mut held_pages, mut wrong, mut free) = (0, 0, 0, 0);
        while asked < tries {
            self.protect(false)?;
            let mut held = [false; PAGES];
            let mut some = |this: &mut Self, most: usize| {
                let count = this.random(most) + 1;
                let chosen: Vec<usize> = (0..count).map(|_| this.random(PAGES)).collect();
                chosen.iter().for_each(|page| held[*page] = true);
                chosen
            };
            let (fixed, lent) = (some(self, 16), some(self, 16));
            let ring = self.pages.register(&fixed)?;
            let _pipe = self.pages.lend(&lent)?;
            self.protect(true)?;
            // The question has 64 ranges, in random order.
            let each = PAGES / PROVE_RANGES;
            let turn = self.random(PROVE_RANGES);
            let first = |n: usize| (n * 37 + turn) % PROVE_RANGES * each;
            let ranges: Vec<PageRange> = (0..PROVE_RANGES).map(|n| self.pages.range(first(n), each)).collect();
            let proofs = self.ask(&ranges)?;
            for (place, proof) in proofs.iter().enumerate() {
                let page = first(place / each) + place % each;
                held_pages += usize::from(held[page]);
                match (proof, held[page]) {
                    (Proof::Free, true) => wrong += 1,
                    (Proof::Free, false) => free += 1,
                    _ => {}
                }
            }
            // If the ring is only dropped, the kernel unpins the buffers some time later.
            ring.submitter().unregister_buffers()?;
            asked += proofs.len();
        }
        Ok(format!("{asked} {held_pages} {wrong} {free}"))
    }

    /// Prints round-trip times in microseconds: median, 99th percentile and longest.
    fn time(&mut self, rounds: usize, pages: usize, ranges: usize) -> Answer {
        self.protect(true)?;
        let each = pages / ranges;
        let ranges: Vec<PageRange> = (0..ranges).map(|n| self.pages.range(n * each, each)).collect();
        let mut proofs = vec![Proof::Unknown; pages];
        let mut times = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            let began = Instant::now();
            self.prover.ask(&ranges, &mut proofs, TIMEOUT)?;
            times.push(began.elapsed());
            std::thread::sleep(Duration::from_micros(200));
        }
        times.sort_unstable();
        let us = |n: usize| times[n].as_nanos() as f64 / 1e3;
        Ok(format!("{:.1} {:.1} {:.1}", us(rounds / 2), us(rounds * 99 / 100), us(rounds - 1)))
    }

    /// Sends malformed questions, each on a connection of its own. Prints the number of connections that the prover
    /// closed.
    fn rubbish(&mut self) -> Answer {
        let mut cut = 0;
        let page = self.pages.range(0, 1).start.0;
        let question =
            |start: u64, pages: u32| [&1_u32.to_le_bytes()[..], &start.to_le_bytes(), &pages.to_le_bytes()].concat();
        let frames = [
            vec![7],
            vec![0; 4],
            vec![0xff; 16],
            vec![1; 5000],
            question(page, 0),
            question(page, 513),
            question(page, u32::MAX),
            question(page + 1, 1),
            question(u64::MAX - 4095, 1),
            [question(page, 1), vec![0]].concat(),
        ];
        let sent = frames.len();
        for frame in frames {
            let socket = Seqpacket::connect_to_service(&self.socket)?;
            socket.send(&frame, &[])?;
            cut += usize::from(hangs_up(&socket));
        }
        Ok(format!("{cut} of {sent}"))
    }

    /// Sends `questions` questions without reading an answer.
    fn flood(&mut self, questions: usize) -> Answer {
        let socket = Seqpacket::connect_to_service(&self.socket)?;
        let range = self.pages.range(0, PAGES);
        let question = [&1_u32.to_le_bytes()[..], &range.start.0.to_le_bytes(), &512_u32.to_le_bytes()].concat();
        let began = Instant::now();
        let mut sent = 0;
        while sent < questions && began.elapsed() < TIMEOUT {
            match socket.send(&question, &[]) {
                Ok(true) => sent += 1,
                Ok(false) => std::thread::sleep(Duration::from_millis(1)),
                Err(_) => return Ok(format!("cut after {sent}")),
            }
        }
        Ok(format!("sent {sent}"))
    }

    /// Opens `count` connections and keeps them. Prints the number of those that are open.
    fn many(&mut self, count: usize) -> Answer {
        act::raise_open_files_limit();
        let began = Instant::now();
        while self.others.len() < count && began.elapsed() < TIMEOUT {
            self.others.extend(self.connect(began));
        }
        // The prover accepts connections in order: once one more is refused or has an answer, all before it were
        // accepted.
        let page = self.pages.range(0, 1).start.0;
        let one_more = self.connect(began).ok_or("no place in the queue")?;
        // An error means that the prover has refused the connection already.
        let _ = one_more.send(&[&1_u32.to_le_bytes()[..], &page.to_le_bytes(), &1_u32.to_le_bytes()].concat(), &[]);
        while matches!(one_more.receive(&mut [0; 600], &mut Vec::new()), Ok(host::Received::Nothing)) {
            if began.elapsed() > 2 * TIMEOUT {
                return Err("no answer".into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let open = self.others.iter().filter(|s| !is_closed(s)).count();
        self.others.clear();
        Ok(open.to_string())
    }

    /// A connection to the prover, once its queue has room. `None` if it has none within the time limit.
    fn connect(&self, began: Instant) -> Option<Seqpacket> {
        while began.elapsed() < TIMEOUT {
            match Seqpacket::connect_to_service(&self.socket) {
                Ok(socket) => return Some(socket),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        None
    }
}

fn is_closed(socket: &Seqpacket) -> bool {
    !matches!(socket.receive(&mut [0; 600], &mut Vec::new()), Ok(host::Received::Nothing | host::Received::Frame(_)))
}

fn hangs_up(socket: &Seqpacket) -> bool {
    (0..10_000).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        is_closed(socket)
    })
}

fn digits(proofs: &[Proof]) -> String {
    proofs.iter().map(|p| (*p as u8).to_string()).collect()
}

const _: () = assert!(PAGES * PAGE_BYTES == 2 << 20);
