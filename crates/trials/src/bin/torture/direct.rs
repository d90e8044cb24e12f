//! `direct`: reads of a file with known contents into pages that are about to be folded.
//!
//! Some reads bypass the page cache (`O_DIRECT`), so that the device writes the memory. Others use io_uring, with
//! plain memory or with registered buffers.
//!
//! Every page is filled with zeros or with a content that many pages hold. It rests until it is about to be folded,
//! and then becomes the target of a read. If it is folded while the read is under way, the data of the read is lost.

use crate::area::{Area, PAGE, WORDS, folded};
use crate::content::{Random, word};
use crate::owners::ok;
use crate::ring::Ring;
use crate::tally::{FOLDS, STOP, count, fail, lost, report, stopping, wait_for_end_of_input};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Read a checked file into memory that is being folded
#[derive(clap::Args)]
pub struct Args {
    /// Where to make the file: on a filesystem that reads directly
    #[arg(long)]
    dir: PathBuf,
    /// Least number of reads
    #[arg(long, default_value_t = 20_000)]
    reads: usize,
    /// Go on until standard input has ended, too
    #[arg(long)]
    until_input_ends: bool,
    /// Pages of memory
    #[arg(long, default_value_t = 16384)]
    pages: usize,
    /// How long a page rests before it is read into, at most, in milliseconds
    #[arg(long, default_value_t = 2500)]
    rest: u64,
}

/// Number of pages in the file.
const FILE_PAGES: usize = 4096;
/// Number of pages that one read fills.
const READ_PAGES: usize = 4;
/// Number of reads under way at a time.
const DEPTH: usize = 32;
/// Lowest class of the file's contents. Memory is filled with lower ones, so that the two differ.
const FILE_CLASS: u32 = 1 << 20;
/// Number of pages at the end of the memory that are registered with the ring for some time, and then not.
const FIXED_PAGES: usize = 256;

/// Makes the file, and removes its name.
fn make_file(dir: &Path) -> (File, File) {
    let path = dir.join(format!("torture-{}.bin", std::process::id()));
    let mut file = ok("make the file", File::create(&path));
    let bytes: Vec<u8> =
        (0..FILE_PAGES * WORDS).flat_map(|n| word(FILE_CLASS + (n / WORDS) as u32, n % WORDS).to_ne_bytes()).collect();
    ok("write the file", file.write_all(&bytes).and_then(|()| file.sync_all()));
    let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(&path);
    let cached = File::open(&path);
    ok("remove the file", std::fs::remove_file(&path));
    (ok("open the file with O_DIRECT", direct), ok("open the file", cached))
}

/// The way a read is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Pread,
    Preadv,
    Ring,
    RingCached,
    RingFixed,
}

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Self::Pread => "pread",
            Self::Preadv => "preadv",
            Self::Ring => "io_uring",
            Self::RingCached => "io_uring_cached",
            Self::RingFixed => "io_uring_fixed",
        }
    }
}

/// A read: its way, its pages of memory, and its pages of the file.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    pub way: Way,
    pub to: usize,
    pub from: usize,
}

struct Reader {
    area: Area,
    direct: File,
    cached: File,
    ring: Ring,
    random: Random,
    /// Groups of pages that are left alone, each with the end of that time; the earliest comes first.
    resting: BinaryHeap<Reverse<(Instant, usize)>>,
    rest: Duration,
}

/// Runs the mode.
pub fn run(args: &Args) {
    let began = Instant::now();
    let (direct, cached) = make_file(&args.dir);
    let area = Area::mergeable(args.pages.next_multiple_of(FIXED_PAGES) + FIXED_PAGES);
    let groups = area.pages() / READ_PAGES;
    let mut reader = Reader {
        ring: Ring::new(DEPTH as u32),
        area,
        direct,
        cached,
        random: Random::unforeseen(),
        resting: BinaryHeap::new(),
        rest: Duration::from_millis(args.rest),
    };
    (0..groups).for_each(|group| reader.put_to_rest(group));
    if args.until_input_ends {
        std::thread::spawn(|| {
            wait_for_end_of_input();
            STOP.store(true, Relaxed);
        });
    }
    let mut reads = 0;
    let mut fixed = Fixed { registered: false, since: Instant::now() };
    while reads < args.reads || (args.until_input_ends && !stopping()) {
        fixed.turn(&mut reader);
        let due = reader.due(fixed.registered);
        if due.is_empty() {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        reader.read(&due);
        for read in &due {
            reader.verify(read);
            reader.put_to_rest(read.to / READ_PAGES);
            count(read.way.name());
        }
        reads += due.len();
    }
    report("direct", began);
}

/// The part of the memory that is registered with the ring for 1.5 s, and then unregistered for as long. While it is
/// registered, its pages are pinned and cannot be folded.
struct Fixed {
    registered: bool,
    since: Instant,
}

impl Fixed {
    fn turn(&mut self, reader: &mut Reader) {
        if self.since.elapsed() < Duration::from_millis(1500) {
            return;
        }
        self.since = Instant::now();
        let first = reader.area.pages() - FIXED_PAGES;
        if self.registered {
            reader.ring.unregister();
        } else {
            reader.ring.register(reader.area.address(first), FIXED_PAGES * PAGE);
        }
        self.registered = !self.registered;
        count("registrations");
    }
}

impl Reader {
    fn class(&mut self) -> u32 {
        if self.random.one_in(2) { 0 } else { 1 + self.random.below(40) as u32 }
    }

    fn put_to_rest(&mut self, group: usize) {
        let class = self.class();
        if !self.random.one_in(8) && !self.registered(group) {
            // A page that was written in a mapping of the pool is broken. It can be folded like others only after it
            // was discarded.
            let given_back = self.area.advise(group * READ_PAGES, READ_PAGES, libc::MADV_DONTNEED);
            ok("MADV_DONTNEED", given_back);
        }
        for page in group * READ_PAGES..(group + 1) * READ_PAGES {
            (0..WORDS).for_each(|n| self.area.word(page, n).store(word(class, n), Relaxed));
        }
        let rest = self.rest.mul_f64(self.random.below(1000) as f64 / 1000.0);
        self.resting.push(Reverse((Instant::now() + rest, group)));
    }

    /// Whether these pages may be registered with the ring at present. Such pages must not be discarded: the ring would
    /// keep the old frames.
    fn registered(&self, group: usize) -> bool {
        group * READ_PAGES >= self.area.pages() - FIXED_PAGES
    }

    /// Takes groups of pages whose waiting time is over, and chooses a read into each.
    fn due(&mut self, registered: bool) -> Vec<Read> {
        let (mut due, now) = (Vec::new(), Instant::now());
        while due.len() < DEPTH && self.resting.peek().is_some_and(|Reverse((until, _))| *until <= now) {
            let Some(Reverse((_, group))) = self.resting.pop() else { break };
            let to = group * READ_PAGES;
            let is_fixed = self.registered(group);
            let ways = [Way::Pread, Way::Preadv, Way::Ring, Way::Ring, Way::Ring, Way::RingCached];
            let way = if is_fixed && registered { Way::RingFixed } else { ways[self.random.below(ways.len())] };
            due.push(Read { way, to, from: self.random.below(FILE_PAGES - READ_PAGES) });
        }
        due
    }

    /// Makes all reads. Those of the ring are under way at the same time.
    fn read(&mut self, due: &[Read]) {
        for (n, read) in due.iter().enumerate() {
            let address = self.area.address(read.to);
            match read.way {
                Way::Pread | Way::Preadv => {}
                way => {
                    let file = if way == Way::RingCached { &self.cached } else { &self.direct };
                    let fixed = way == Way::RingFixed;
                    self.ring.push(file.as_raw_fd(), address, READ_PAGES * PAGE, (read.from * PAGE) as u64, n, fixed);
                }
            }
        }
        self.ring.submit();
        for read in due {
            let got = match read.way {
                Way::Pread => self.area.pread(read.to, READ_PAGES, &self.direct, read.from),
                Way::Preadv => self.area.preadv(read.to, READ_PAGES, &self.direct, read.from),
                _ => continue,
            };
            if ok(read.way.name(), got) != READ_PAGES * PAGE {
                fail("a short read");
            }
        }
        let wanted = due.iter().filter(|read| !matches!(read.way, Way::Pread | Way::Preadv)).count();
        self.ring.collect(wanted, READ_PAGES * PAGE);
    }

    fn verify(&mut self, read: &Read) {
        for page in 0..READ_PAGES {
            for n in 0..WORDS {
                let expected = word(FILE_CLASS + (read.from + page) as u32, n);
                let found = self.area.word(read.to + page, n).load(Relaxed);
                if expected != found {
                    let address = self.area.address(read.to + page);
                    let page = read.to + page;
                    lost(read.way.name(), &crate::tally::Mismatch { address, page, offset: n * 8, expected, found });
                }
            }
        }
        // Counts folded pages now and then, to show that pages are folded at all.
        if self.random.one_in(64) {
            let folded = folded(&self.area, 0, self.area.pages());
            FOLDS.fetch_max(folded as u64, Relaxed);
        }
    }
}
