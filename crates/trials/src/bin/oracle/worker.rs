//! A thread and its plots. In each step it checks a plot, makes one operation on it, and checks it again.
//!
//! The operation follows from the seed, the thread, the number of the step, and the model. The model is the same in
//! every run, as long as the kernel answers alike.

use crate::content::{PAGE, Random};
use crate::history::Event;
use crate::ops::{self, Done, OPERATIONS, Operation, Outcome};
use crate::plot::{Access, Kind, Plot, traits};
use crate::select::Selection;
use crate::senses::Senses;
use crate::sys::{self, Way};
use crate::verdict::{Scene, Wrong, lost};
use crate::watch::{self, Seat};
use crate::{ops::brk::Break, ops::fork::Children, ops::ring::Ring, tally};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

/// Each step holds this lock shared. An operation that changes the plots of all threads holds it alone.
static TURN: RwLock<()> = RwLock::new(());
/// Number of times that a thread has unlocked all memory of the process.
pub static UNLOCKS: AtomicU64 = AtomicU64::new(0);

/// Most steps of its thread for which a plot is left alone after an operation.
const LONGEST_REST: usize = 200;
/// Most steps for which a quiet plot is left alone: long enough for its broken pages to be folded again.
const LONGEST_OF_QUIET: usize = 5000;
/// One in this many plots is quiet.
const QUIET: usize = 4;

/// The settings that all threads share.
#[derive(Debug)]
pub struct Plan {
    pub seed: u64,
    /// Steps of each thread.
    pub steps: u64,
    /// Time over which the steps are spread; `None` to make them without pauses.
    pub time: Option<Duration>,
    pub plots: usize,
    pub most_pages: usize,
    pub selection: Selection,
    /// The userfaultfd that the program has opened for itself.
    pub userfaults: Option<i32>,
}

pub struct Worker<'a> {
    pub plan: &'a Plan,
    pub thread: usize,
    pub step: u64,
    pub random: Random,
    pub plots: Vec<Plot>,
    pub senses: Senses,
    pub children: Children,
    pub ring: Option<Ring>,
    pub heap: Option<Break>,
    seat: &'static Seat,
    /// Indices of the operations that this thread may make, with cumulative weights.
    menu: Vec<(usize, usize)>,
}

impl<'a> Worker<'a> {
    pub fn new(plan: &'a Plan, thread: usize) -> Self {
        let mut worker = Self {
            plan,
            thread,
            step: 0,
            random: Random::of_step(plan.seed, thread, u64::MAX),
            plots: Vec::with_capacity(plan.plots + 1),
            senses: Senses::open(),
            children: Children::new(thread),
            ring: None,
            heap: None,
            seat: watch::seat(thread),
            menu: menu(plan, thread),
        };
        worker.ring = worker.has("ring_dontneed").then(Ring::new).flatten();
        for _ in 0..plan.plots {
            let plot = worker.new_plot(Way::Libc);
            worker.plots.extend(plot);
        }
        if worker.has("brk") {
            worker.heap = Break::new();
            worker.plots.extend(Break::plot(worker.heap.as_ref(), &mut worker.random));
        }
        worker
    }

    fn has(&self, name: &str) -> bool {
        self.menu.iter().any(|(n, _)| OPERATIONS[*n].name == name)
    }

    /// Makes all steps of the thread, checks all its plots, and waits for its children.
    pub fn live(mut self) {
        self.seat.tid.store(sys::own_tid(), Relaxed);
        self.seat.lives.store(true, SeqCst);
        let began = Instant::now();
        for step in 0..self.plan.steps {
            self.step = step;
            self.random = Random::of_step(self.plan.seed, self.thread, step);
            self.make_step();
            self.seat.steps.store(step + 1, Relaxed);
            if let Some(time) = self.plan.time {
                let due = began + time.mul_f64((step + 1) as f64 / self.plan.steps as f64);
                sys::rest(due.saturating_duration_since(Instant::now()));
            }
        }
        for at in 0..self.plots.len() {
            let checked = self.check(at, 0, self.plots[at].len());
            self.must(at, checked);
        }
        let ended = self.children.wait_for_all();
        self.must(0, ended);
        if let Some(heap) = self.heap.take() {
            heap.give_back(&self.plots);
        }
        self.seat.lives.store(false, SeqCst);
    }

    fn make_step(&mut self) {
        let mut chosen = self.choose();
        let at = self.pick(&OPERATIONS[chosen]);
        if at.is_multiple_of(QUIET) && self.plots[at].kind == Kind::Mapping && self.random.one_in(2) {
            chosen = ops::REFILL;
        }
        let operation = &OPERATIONS[chosen];
        let ways: Vec<Way> = Way::ALL.into_iter().filter(|way| self.plan.selection.allows(chosen, *way)).collect();
        let way = ways[self.random.below(ways.len())];
        let turn = (!operation.alone).then(|| TURN.read().unwrap_or_else(PoisonError::into_inner));
        let alone = operation.alone.then(|| TURN.write().unwrap_or_else(PoisonError::into_inner));
        self.notice_unlocks(at);
        let plot = &self.plots[at];
        self.seat.begins(chosen, way, (plot.start, plot.len()), &plot.history);
        let outcome = self.act(at, operation, way);
        match self.must(at, outcome) {
            Done::Yes => tally::count_done(chosen, way),
            Done::Refused(error) => {
                tally::count_refused(chosen);
                self.plots[at].history.ended(error);
            }
            Done::NotNow => {}
        }
        drop((turn, alone));
        self.plots[at].rests_until = self.step + self.rest(at) as u64;
        let ended = if self.random.one_in(8) { self.children.collect() } else { Ok(()) };
        self.must(at, ended);
    }

    /// Number of steps for which the plot is left alone after this step.
    fn rest(&mut self, at: usize) -> usize {
        match at {
            _ if at.is_multiple_of(QUIET) => self.random.below(LONGEST_OF_QUIET),
            _ if self.random.one_in(2) => self.random.below(8),
            _ => self.random.below(LONGEST_REST),
        }
    }

    fn act(&mut self, at: usize, operation: &Operation, way: Way) -> Outcome {
        self.check_some(at)?;
        let done = (operation.act)(self, at, way)?;
        if !matches!(done, Done::NotNow) {
            self.check_some(at)?;
        }
        Ok(done)
    }

    fn choose(&mut self) -> usize {
        let total = self.menu.last().map_or(0, |(_, sum)| *sum);
        let at = self.random.below(total);
        self.menu[self.menu.partition_point(|(_, sum)| *sum <= at)].0
    }

    /// Picks a plot that is not left alone at present, or else the one whose time ends first.
    fn pick(&mut self, operation: &Operation) -> usize {
        if operation.name == "brk" {
            return self.plots.iter().position(|plot| plot.kind == Kind::Heap).unwrap_or(0);
        }
        let from = self.random.below(self.plots.len());
        let order = || (from..self.plots.len()).chain(0..from);
        order()
            .find(|at| self.plots[*at].rests_until <= self.step)
            .or_else(|| order().min_by_key(|at| self.plots[*at].rests_until))
            .unwrap_or(from)
    }

    /// Updates the model if another thread has unlocked all memory, and with it this plot.
    pub fn notice_unlocks(&mut self, at: usize) {
        let unlocks = UNLOCKS.load(SeqCst);
        let plot = &mut self.plots[at];
        if std::mem::replace(&mut plot.unlocks, unlocks) != unlocks {
            plot.pages.iter_mut().for_each(|page| page.traits &= !(traits::LOCKED | traits::ON_FAULT));
        }
    }

    /// Checks a few pages of a plot, in some steps all of them.
    pub fn check_some(&mut self, at: usize) -> Result<(), Wrong> {
        let pages = self.plots[at].len();
        if pages <= 8 || self.random.one_in(10) {
            return self.check(at, 0, pages);
        }
        let count = 1 + self.random.below(8);
        let from = self.random.below(pages - count + 1);
        self.check(at, from, count)
    }

    pub fn check(&mut self, at: usize, from: usize, pages: usize) -> Result<(), Wrong> {
        self.senses.check(&self.plots[at], from, pages, &mut self.random)
    }

    /// Picks neighbouring pages of a plot, most often few: the first page and their number.
    pub fn part(&mut self, at: usize) -> (usize, usize) {
        let pages = self.plots[at].len();
        if self.random.one_in(5) {
            return (0, pages);
        }
        let from = self.random.below(pages);
        let left = pages - from;
        let most = if self.random.one_in(3) { left } else { left.min(16) };
        (from, 1 + self.random.below(most))
    }

    /// Records the operation that comes next.
    pub fn note(&mut self, at: usize, name: &'static str, way: Way, (from, pages): (usize, usize), detail: usize) {
        let event = Event { step: self.step, name, way: way.name(), from, pages, detail, error: 0 };
        self.plots[at].history.add(event);
    }

    /// Maps memory for a new plot. Writes its first page, and in most cases all pages. `None` if the kernel refuses the
    /// mapping.
    pub fn new_plot(&mut self, way: Way) -> Option<Plot> {
        let most = if self.random.one_in(4) { self.plan.most_pages } else { self.plan.most_pages.min(48) };
        let pages = 1 + self.random.below(most);
        let flags = if self.random.one_in(8) { libc::MAP_POPULATE } else { 0 };
        let start = ops::map(way, 0, pages, Access::Write, flags).ok()?;
        let mut plot = Plot::fresh(Kind::Mapping, start, pages, &mut self.random);
        plot.unlocks = UNLOCKS.load(SeqCst);
        plot.history.add(Event { step: self.step, name: "mmap", way: way.name(), pages, ..Event::default() });
        // An anonymous mapping that was never written has no `anon_vma`, which would keep the kernel from merging it
        // with its neighbours.
        plot.mark(0, &mut self.random);
        if !self.random.one_in(4) {
            for page in 0..pages {
                let class = plot.choose(page, &mut self.random);
                plot.fill(page, class);
            }
        }
        Some(plot)
    }

    /// Unmaps the `unmapped` parts of a plot, and puts another plot in its place.
    pub fn replace(&mut self, at: usize, unmapped: &[(usize, usize)], way: Way) {
        for (from, pages) in unmapped.iter().filter(|(_, pages)| *pages > 0) {
            let (start, bytes) = self.plots[at].range(*from, *pages);
            // SAFETY: this thread's own memory, which it gives up.
            if unsafe { sys::call(way, libc::SYS_munmap, [start, bytes, 0, 0, 0, 0]) }.is_err() {
                // The mapping stays, but no plot lies in it any more.
                tally::GIVEN_UP.fetch_add(1, Relaxed);
            }
        }
        match self.new_plot(way) {
            Some(plot) => self.plots[at] = plot,
            None => crate::verdict::fail("mmap of a few pages is refused"),
        }
    }

    /// Gives up a whole plot whose mappings are no longer known.
    pub fn give_up(&mut self, at: usize) {
        tally::GIVEN_UP.fetch_add(1, Relaxed);
        let pages = self.plots[at].len();
        if self.plots[at].kind == Kind::Mapping {
            self.replace(at, &[(0, pages)], Way::Libc);
        }
    }

    fn must<T>(&self, at: usize, result: Result<T, Wrong>) -> T {
        result.unwrap_or_else(|wrong| self.lost(at, &wrong))
    }

    fn lost(&self, at: usize, wrong: &Wrong) -> ! {
        let who = format!("thread {} in step {}", self.thread, self.step);
        if let Some((who, wrong, start, pages, history)) = self.children.account(wrong) {
            lost(&who, &wrong, &Scene { start, pages, history: &history, differing: String::new() });
        }
        let Plot { start, ref history, .. } = self.plots[at];
        let differing = self.senses.differing(&self.plots[at]);
        lost(&who, wrong, &Scene { start, pages: self.plots[at].len(), history, differing });
    }
}

/// The operations that this thread may make, with cumulative weights.
fn menu(plan: &Plan, thread: usize) -> Vec<(usize, usize)> {
    let mut sum = 0;
    let mut menu = Vec::new();
    for (n, operation) in OPERATIONS.iter().enumerate() {
        let elsewhere = operation.name == "brk" && thread != 0 || operation.name == "uffd" && plan.userfaults.is_none();
        if plan.selection.has(n) && !elsewhere {
            sum += operation.weight;
            menu.push((n, sum));
        }
    }
    menu
}

/// Size in bytes of `pages` pages.
pub const fn bytes(pages: usize) -> usize {
    pages * PAGE
}
