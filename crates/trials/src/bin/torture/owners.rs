//! `memory`: threads that own stripes of one area.
//!
//! A run of pages that is folded at once thus has several owners, and each writes and checks its own pages all the
//! time. Besides, there are areas that come and go (`chaos`) and children (`children`).
//!
//! Each page is visited about once in three seconds (`--visits`). That is long enough for it to be folded in between, and
//! short enough for some visits to fall into folds. To meet folds more often, an owner *hunts*. It looks in the page
//! tables for pages that have just been folded, and writes those behind them, which come next.

use crate::area::{Area, KEPT_FROM_CHILDREN, Pagemap, pipe};
use crate::chaos;
use crate::children::Children;
use crate::content::Random;
use crate::plot::Plot;
use crate::tally::{FOLDS, Mismatch, Until, count, fail, must, report, stopping};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Number of neighbouring pages with one owner.
const STRIPE: usize = 32;
/// Longest time for which an owner writes pages ahead of a fold that goes on.
const CHASE: Duration = Duration::from_millis(4);
/// Number of pages behind a fold's last page that are checked for being folded.
const CHASED: usize = 128;
/// Number of pages that are written together in a burst of writes.
const BURST: usize = STRIPE;
/// Number of parts of a plot, of which bursts of writes go to one at a time.
const HOT: usize = 16;

/// Have pages written and checked in every way that a program can
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    until: Until,
    /// Pages of the area that stays
    #[arg(long, default_value_t = 12288)]
    pages: usize,
    /// Threads that own it
    #[arg(long, default_value_t = 3)]
    threads: usize,
    /// Threads with areas that come and go
    #[arg(long, default_value_t = 1)]
    chaos: usize,
    /// Different contents
    #[arg(long, default_value_t = 300)]
    classes: usize,
    /// Visits a second to each page
    #[arg(long, default_value_t = 0.3)]
    visits: f64,
    /// Fork no children
    #[arg(long)]
    no_children: bool,
    /// Fork no children, and advise that children inherit nothing
    #[arg(long)]
    dont_fork: bool,
}

impl Args {
    const fn has_children(&self) -> bool {
        !self.no_children && !self.dont_fork
    }
}

/// Runs the mode.
pub fn run(args: &Args) {
    let began = Instant::now();
    KEPT_FROM_CHILDREN.store(args.dont_fork, Relaxed);
    let pages = args.pages.next_multiple_of(STRIPE);
    let area = Arc::new(Area::mergeable(pages));
    std::thread::scope(|scope| {
        for thread in 0..args.threads {
            let mine = (0..pages).filter(|page| page / STRIPE % args.threads == thread).collect();
            let plot = Plot::new(Arc::clone(&area), mine, args.classes);
            scope.spawn(move || Owner::new(plot, args).live());
        }
        for _ in 0..args.chaos {
            scope.spawn(|| chaos::live(args.classes, args.has_children()));
        }
        args.until.wait();
    });
    report("memory", began);
}

/// An event that is due at a given rate.
struct Beat {
    period: Duration,
    next: Instant,
}

impl Beat {
    fn new(a_second: f64) -> Self {
        let period = Duration::from_secs_f64(1.0 / a_second);
        Self { period, next: Instant::now() + period }
    }

    /// Number of times that the event has become due since the last call. If many were missed, only some are made up
    /// for.
    fn due(&mut self, now: Instant) -> u32 {
        let mut due = 0;
        while self.next <= now && due < 64 {
            self.next += self.period;
            due += 1;
        }
        self.next = self.next.max(now);
        due
    }
}

struct Owner {
    plot: Plot,
    random: Random,
    children: Option<Children>,
    pagemap: Pagemap,
    folded: Vec<bool>,
    pipe: (File, File),
    visits: f64,
    born: Instant,
}

impl Owner {
    fn new(plot: Plot, args: &Args) -> Self {
        Self {
            folded: vec![false; plot.len()],
            plot,
            random: Random::unforeseen(),
            children: args.has_children().then(Children::default),
            pagemap: Pagemap::open(),
            pipe: pipe(),
            visits: args.visits,
            born: Instant::now(),
        }
    }

    fn live(mut self) {
        must("while it was filled", self.plot.fill_all(&mut self.random));
        let mut visits = Beat::new(self.visits * self.plot.len() as f64 / (STRIPE / 2) as f64);
        let [mut hunts, mut seldom, mut births] = [Beat::new(150.0), Beat::new(60.0), Beat::new(0.12)];
        while !stopping() {
            let now = Instant::now();
            for _ in 0..visits.due(now) {
                let (i, pages) = self.part();
                must("visited", self.plot.poke(i, pages, &mut self.random));
            }
            // One hunt at a time: otherwise a slow machine would have no time for other work.
            if hunts.due(now) > 0 {
                must("hunted", self.hunt());
            }
            for _ in 0..seldom.due(now) {
                must("after something seldom", self.something_seldom());
            }
            if births.due(now) > 0
                && let Some(children) = &mut self.children
            {
                children.born(&mut self.plot, &mut self.random);
            }
            must("in a burst", self.burst());
            // Leaves the processor to other threads and processes, among them those that fold.
            std::thread::sleep(Duration::from_micros(700));
        }
        must("at the end", self.plot.check_all());
        if let Some(children) = &mut self.children {
            children.wait_for_all();
        }
    }

    /// Writes a few stripes many times. For half a second all bursts go to the same part of the plot, which is then
    /// left alone.
    fn burst(&mut self) -> Result<(), Mismatch> {
        let bursts = self.plot.len() / BURST;
        let hot = (self.born.elapsed().as_millis() / 500) as usize * 7 % HOT;
        let start = (hot * bursts / HOT + self.random.below(bursts / HOT)) * BURST;
        for _ in 0..32 {
            (start..start + BURST).try_for_each(|i| self.plot.write(i))?;
        }
        self.plot.renew(start, BURST, &mut self.random)
    }

    /// Picks neighbouring pages of one stripe.
    fn part(&mut self) -> (usize, usize) {
        let stripe = self.random.below(self.plot.len() / STRIPE) * STRIPE;
        let from = self.random.below(STRIPE);
        (stripe + from, 1 + self.random.below(STRIPE - from))
    }

    /// Finds own pages that were folded since the last hunt, and writes some of them.
    fn hunt(&mut self) -> Result<(), Mismatch> {
        let private: Vec<bool> = self.pagemap.look(self.plot.area(), 0, self.plot.area().pages()).collect();
        let mut newest = None;
        for i in 0..self.plot.len() {
            let folded = !private[self.plot.page(i)] && self.plot.at_rest(i);
            if std::mem::replace(&mut self.folded[i], folded) || !folded {
                continue;
            }
            FOLDS.fetch_add(1, Relaxed);
            newest = Some(self.plot.page(i));
            if self.random.one_in(8) {
                count("writes_into_folds");
                self.plot.write(i)?;
            }
        }
        newest.map_or(Ok(()), |page| self.chase(page))
    }

    /// Follows a fold that goes on behind page `last`: writes own pages that are about to be folded, until the fold
    /// stops.
    fn chase(&mut self, mut last: usize) -> Result<(), Mismatch> {
        let (began, mut seen) = (Instant::now(), Instant::now());
        // Limited, because there is other work.
        while seen.elapsed() < Duration::from_micros(500) && began.elapsed() < CHASE {
            let ahead = CHASED.min(self.plot.area().pages() - last);
            let private: Vec<bool> = self.pagemap.look(self.plot.area(), last, ahead).collect();
            let next = last + private.iter().rposition(|is_private| !is_private).unwrap_or(0);
            if next != last {
                (last, seen) = (next, Instant::now());
            }
            let (first, end) = (self.plot.position(last + 1), self.plot.position(last + CHASED / 2));
            let own = first + self.random.below((end - first).max(1));
            if own < end && self.plot.at_rest(own) {
                count("writes_ahead_of_folds");
                self.plot.write(own)?;
            }
        }
        Ok(())
    }

    /// Makes an operation other than a write, on a part of one stripe.
    fn something_seldom(&mut self) -> Result<(), Mismatch> {
        let (i, pages) = self.part();
        let pages = pages.min(8);
        let page = self.plot.page(i);
        match self.random.below(6) {
            0 | 1 => self.discard(i, pages),
            2 => self.let_go(i, pages),
            3 => {
                count("read_only");
                ok("mprotect", self.plot.area().protect(page, pages, libc::PROT_READ));
                let checked = (i..i + pages).try_for_each(|i| self.plot.check(i));
                ok("mprotect", self.plot.area().unprotect(page, pages));
                checked
            }
            4 => {
                count("inaccessible");
                ok("mprotect", self.plot.area().protect(page, pages, libc::PROT_NONE));
                std::thread::sleep(Duration::from_micros(self.random.next() % 2000));
                ok("mprotect", self.plot.area().unprotect(page, pages));
                (i..i + pages).try_for_each(|i| self.plot.check(i))
            }
            _ => self.through_a_pipe(i),
        }
    }

    fn discard(&mut self, i: usize, pages: usize) -> Result<(), Mismatch> {
        count("discards");
        ok("MADV_DONTNEED", self.plot.area().advise(self.plot.page(i), pages, libc::MADV_DONTNEED));
        self.plot.zeroed(i, pages)?;
        if self.random.one_in(2) {
            (i..i + pages).try_for_each(|i| self.plot.fill(i, &mut self.random))?;
        }
        Ok(())
    }

    /// Advises `MADV_FREE`: the kernel may drop the contents of these pages until they are written.
    fn let_go(&mut self, i: usize, pages: usize) -> Result<(), Mismatch> {
        count("frees");
        ok("MADV_FREE", self.plot.area().advise(self.plot.page(i), pages, libc::MADV_FREE));
        for i in i..i + pages {
            self.plot.check_free(i)?;
            let class = self.random.below(100) as u32;
            self.plot.refill(i, class);
            self.plot.check(i)?;
        }
        Ok(())
    }

    /// Has the kernel read a page into a pipe, and write it from there.
    fn through_a_pipe(&mut self, i: usize) -> Result<(), Mismatch> {
        count("pipes");
        let page = self.plot.page(i);
        let bytes = self.plot.bytes(i);
        let area = self.plot.area();
        let written = area.write_to(page, bytes.len(), &self.pipe.1);
        if written.as_ref().ok() != Some(&bytes.len()) {
            fail(&format!("write(2) of a page: {written:?}"));
        }
        let mut got = vec![0; bytes.len()];
        std::io::Read::read_exact(&mut &self.pipe.0, &mut got).expect("read a pipe");
        if let Some(at) = (0..bytes.len()).find(|&at| bytes[at] != got[at]) {
            let (expected, found) = (u64::from(bytes[at]), u64::from(got[at]));
            return Err(Mismatch { address: area.address(page), page, offset: at, expected, found });
        }
        let class = self.random.below(100) as u32;
        self.plot.adopt(i, class);
        std::io::Write::write_all(&mut &self.pipe.1, &self.plot.bytes(i)).expect("write a pipe");
        let read = self.plot.area().read_from(page, bytes.len(), &self.pipe.0);
        if read.as_ref().ok() != Some(&bytes.len()) {
            fail(&format!("read(2) into a page: {read:?}"));
        }
        self.plot.check(i)
    }
}

/// The value of a call that would succeed without folding. An error counts as a fault.
pub fn ok<T>(what: &str, result: std::io::Result<T>) -> T {
    result.unwrap_or_else(|e| fail(&format!("{what}: {e}")))
}
