//! `hostile`: an agent that lies.
//!
//! The mode is started as a member (`pagefold run ... torture hostile`). It takes the place of the agent that was
//! loaded into the program, connects as that does, and sends messages that no honest agent sends.
//!
//! It prints what became of its connection, and succeeds in any case: the test looks at the honest members.

use crate::content::Random;
use crate::tally::fail;
use host::{Received, Seqpacket};
use page::{Fingerprint, HostVirt, PoolSlot};
use serde_json::json;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use wire::{FRAME_BYTES, Hello, MemberStats, Outcome, RestedRun, SlotRun, ToAgent, ToWorker, VERSION};

/// Be an agent that lies
#[derive(clap::Args)]
pub struct Args {
    /// Socket that agents connect to
    #[arg(long)]
    socket: PathBuf,
    /// How it lies
    #[arg(long, value_enum)]
    lie: Lie,
    /// Seconds to go on, if the worker allows it
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Go on until standard input closes, too
    #[arg(long)]
    until_hangup: bool,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Lie {
    /// Bytes that are no message
    Garbage,
    /// Frames that are too long
    Oversized,
    /// The front of good frames
    Truncated,
    /// Good frames as fast as possible
    Flood,
    /// Reads no messages
    Deaf,
    /// Fingerprints that are not those of its pages
    Fingerprints,
    /// Says that it holds slots that it was never given
    ForeignSlots,
    /// Gives back slots that it never held
    ForeignReleases,
    /// Answers questions that nobody asked
    Unasked,
    /// Punches holes into the window that the worker sent
    Window,
    /// Numbers about itself that no member has
    Statistics,
    /// Sends nothing at all
    Silent,
    /// Connects and hangs up, over and over
    Knocking,
}

struct Liar {
    socket: Seqpacket,
    frame: Vec<u8>,
    buffer: Vec<u8>,
    fds: Vec<std::os::fd::OwnedFd>,
    random: Random,
    received: Vec<ToAgent>,
    sent: u64,
}

/// Runs the mode.
pub fn run(args: &Args) {
    let began = Instant::now();
    let (end, goes_on) = (began + Duration::from_secs(args.seconds), Arc::new(AtomicBool::new(args.until_hangup)));
    if args.until_hangup {
        let goes_on = Arc::clone(&goes_on);
        std::thread::spawn(move || {
            // An input that cannot be read counts as closed.
            let _ = io::copy(&mut io::stdin(), &mut io::sink());
            goes_on.store(false, Relaxed);
        });
    }
    let is_over = || Instant::now() >= end && !goes_on.load(Relaxed);
    let mut sent = 0;
    let mut connections = 0;
    let mut cut_off = 0;
    while !is_over() {
        let Ok(socket) = Seqpacket::connect_to_service(&args.socket) else { fail("nobody listens") };
        connections += 1;
        let mut liar = Liar {
            socket,
            frame: Vec::new(),
            buffer: vec![0; FRAME_BYTES],
            fds: Vec::new(),
            random: Random::unforeseen(),
            received: Vec::new(),
            sent: 0,
        };
        cut_off += u64::from(liar.live(args.lie, &is_over).is_err());
        sent += liar.sent;
        std::thread::sleep(Duration::from_millis(20));
    }
    let lie = format!("{:?}", args.lie);
    println!("{}", json!({"lie": lie, "connections": connections, "cut_off": cut_off, "frames_sent": sent}));
}

impl Liar {
    /// Lies until `is_over`. `Err` if the worker closes the connection.
    fn live(&mut self, lie: Lie, is_over: &dyn Fn() -> bool) -> io::Result<()> {
        if matches!(lie, Lie::Silent) {
            while !is_over() {
                std::thread::sleep(Duration::from_millis(20));
            }
            return Ok(());
        }
        self.say(&ToWorker::Hello(Hello { version: VERSION, eager: false }))?;
        while !is_over() {
            if !matches!(lie, Lie::Deaf) {
                self.hear()?;
            }
            match lie {
                Lie::Knocking => return Ok(()),
                Lie::Garbage => {
                    let length = 1 + self.random.below(300);
                    let bytes: Vec<u8> = (0..length).map(|_| self.random.next() as u8).collect();
                    self.send(&bytes)?;
                }
                Lie::Oversized => {
                    let length = FRAME_BYTES + 1 + self.random.below(FRAME_BYTES);
                    self.send(&vec![3; length])?;
                }
                Lie::Truncated => {
                    self.rested(64).encode(&mut self.frame);
                    self.frame.truncate(self.random.below(self.frame.len()));
                    self.send(&self.frame.clone())?;
                }
                Lie::Flood | Lie::Deaf | Lie::Fingerprints | Lie::Window => self.pretend(lie)?,
                Lie::ForeignSlots => {
                    let runs = self.slots();
                    self.say(&ToWorker::Held(runs))?;
                }
                Lie::ForeignReleases => {
                    let runs = self.slots();
                    self.say(&ToWorker::Released(runs))?;
                }
                Lie::Unasked => {
                    let id = self.random.below(4) as u32;
                    self.say(&ToWorker::Folded(id, vec![Outcome::Folded; 64]))?;
                    self.say(&ToWorker::Donated(id, vec![true; 64]))?;
                    let epoch = self.random.next() as u32;
                    self.say(&ToWorker::LeaseTaken(epoch))?;
                }
                Lie::Statistics => self.boast()?,
                Lie::Silent => {}
            }
        }
        Ok(())
    }

    /// Reports pages with the fingerprints of other members' contents, or of no content. It claims success for all
    /// that the worker asks for.
    fn pretend(&mut self, lie: Lie) -> io::Result<()> {
        let rested = self.rested(512);
        self.say(&rested)?;
        if matches!(lie, Lie::Window) {
            for fd in &self.fds {
                // Only a window can be punched; errors of other descriptors do not matter.
                let _ = punch_holes(fd);
            }
        }
        for message in std::mem::take(&mut self.received) {
            match message {
                ToAgent::Donate(id, runs) => {
                    let pages: u64 = runs.iter().map(|run| run.pages).sum();
                    self.say(&ToWorker::Donated(id, vec![true; pages as usize]))?;
                }
                ToAgent::Fold(id, runs) => {
                    let pages: usize = runs.iter().map(|run| usize::from(run.pages)).sum();
                    self.say(&ToWorker::Folded(id, vec![Outcome::Folded; pages]))?;
                }
                ToAgent::Lease(epoch) => self.say(&ToWorker::LeaseTaken(epoch))?,
                _ => {}
            }
        }
        if !matches!(lie, Lie::Flood | Lie::Deaf) {
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Reports statistics with the greatest numbers that a member may report, which the worker has no means to check;
    /// and sometimes greater ones.
    fn boast(&mut self) -> io::Result<()> {
        let most = if self.random.one_in(64) { u64::MAX } else { (1 << 52) - 1 };
        let all = MemberStats {
            enrolled_pages: most,
            folded_pages: most,
            zero_pages: most,
            broken_pages: most,
            ..MemberStats::default()
        };
        self.say(&ToWorker::Stats(Box::new(all)))
    }

    fn rested(&mut self, pages: u16) -> ToWorker {
        let start = HostVirt((self.random.next() % (1 << 34)) << 12);
        // Half of the fingerprints are those that honest members report, but this process has no such pages.
        let print = |random: &mut Random| {
            if random.one_in(2) {
                Fingerprint::of(&page_of(random.below(300) as u32))
            } else {
                Fingerprint(random.next() % 4096)
            }
        };
        let prints = (0..pages).map(|_| print(&mut self.random)).collect();
        ToWorker::Rested(vec![RestedRun { start, pages, huge: false }], prints)
    }

    fn slots(&mut self) -> Vec<SlotRun> {
        let run = |random: &mut Random| SlotRun {
            start: HostVirt((random.next() % (1 << 34)) << 12),
            slot: PoolSlot::from_bits(random.below(2000) as u32),
            pages: 1 + random.below(8) as u16,
        };
        (0..32).map(|_| run(&mut self.random)).collect()
    }

    fn say(&mut self, message: &ToWorker) -> io::Result<()> {
        message.encode(&mut self.frame);
        self.send(&self.frame.clone())
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self.socket.send(bytes, &[]) {
            Ok(true) => self.sent += 1,
            // The worker's queue is full; it does not wait for this member.
            Ok(false) => std::thread::sleep(Duration::from_micros(200)),
            // Too long for the kernel: the worker has not seen it.
            Err(e) if e.raw_os_error() == Some(libc::EMSGSIZE) => std::thread::sleep(Duration::from_millis(1)),
            Err(e) => return Err(e),
        }
        Ok(())
    }

    fn hear(&mut self) -> io::Result<()> {
        let mut fds = Vec::new();
        loop {
            match self.socket.receive(&mut self.buffer, &mut fds)? {
                Received::Frame(length) => self.received.extend(ToAgent::decode(&self.buffer[..length])),
                Received::Nothing => return Ok(()),
                Received::Closed => return Err(io::ErrorKind::ConnectionReset.into()),
            }
            self.fds.append(&mut fds);
            self.received.drain(..self.received.len().saturating_sub(64));
        }
    }
}

/// A page as honest members hold it.
fn page_of(class: u32) -> [u8; crate::area::PAGE] {
    let mut page = [0; crate::area::PAGE];
    for (n, bytes) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *bytes = crate::content::word(class, n).to_ne_bytes();
    }
    page
}

fn punch_holes(fd: &std::os::fd::OwnedFd) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: takes numbers.
    let answer = unsafe { libc::fallocate(fd.as_raw_fd(), punch, 0, 1 << 20) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
