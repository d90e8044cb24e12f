//! Children, forked by the C library or behind its back, and programs that are executed.

use super::{Done, Outcome, child};
use crate::content::{PAGE, Random, shared_pages};
use crate::history::History;
use crate::plot::Plot;
use crate::sys::{self, Way};
use crate::tally::CHILDREN;
use crate::verdict::Wrong;
use crate::watch::THREADS;
use crate::worker::Worker;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Greatest number of a thread's children at a time.
const MOST: usize = 3;
/// Time after which a child counts as hanging: 20 s. Children live for a few seconds only.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a child reports as wrong, in memory that it shares with its parent.
pub struct Report {
    told: AtomicBool,
    wrong: Wrong,
    start: usize,
    pages: usize,
    history: History,
}

const _: () = assert!(size_of::<Report>() <= PAGE);

static REPORTS: OnceLock<usize> = OnceLock::new();

/// Maps memory for reports. Called once, before there are threads.
pub fn init() {
    REPORTS.get_or_init(|| shared_pages(THREADS * MOST, -1));
}

fn report_of(thread: usize, slot: usize) -> *mut Report {
    let start = REPORTS.get().expect("room for reports is made first");
    (start + (thread * MOST + slot) * PAGE) as *mut Report
}

/// Writes a report. The child that calls this ends afterwards.
pub fn tell(report: *mut Report, wrong: Wrong, plot: &Plot) {
    let (start, pages, history) = (plot.start, plot.len(), plot.history);
    // SAFETY: a page of shared memory that this child alone writes.
    unsafe { report.write(Report { told: AtomicBool::new(false), wrong, start, pages, history }) };
    // SAFETY: as above.
    let told = unsafe { &(*report).told };
    told.store(true, SeqCst);
}

struct Born {
    pid: i32,
    since: Instant,
    raw: bool,
}

/// The children of one thread.
pub struct Children {
    thread: usize,
    living: [Option<Born>; MOST],
    /// A child that failed: its slot, its status, and whether it hangs.
    failed: Option<(usize, i32, bool)>,
}

/// A child's report: name of the child, what is wrong, and address, size and history of its plot.
pub type Account = (String, Wrong, usize, usize, History);

impl Children {
    pub const fn new(thread: usize) -> Self {
        Self { thread, living: [const { None }; MOST], failed: None }
    }

    /// Waits for the children that have ended, without blocking. The error is a child that failed or hangs.
    pub fn collect(&mut self) -> Result<(), Wrong> {
        for slot in 0..MOST {
            let Some(Born { pid, since, raw }) = &self.living[slot] else { continue };
            let (pid, raw) = (*pid, *raw);
            match wait(pid, libc::WNOHANG) {
                None if since.elapsed() < PATIENCE => continue,
                Some(0) => CHILDREN.fetch_add(1, Relaxed),
                ended => {
                    self.failed = Some((slot, pid, raw));
                    return Err(ended.map_or(Wrong::Hangs { pid }, |status| Wrong::Child { pid, status }));
                }
            };
            self.living[slot] = None;
        }
        Ok(())
    }

    pub fn wait_for_all(&mut self) -> Result<(), Wrong> {
        while self.living.iter().any(Option::is_some) {
            self.collect()?;
            sys::rest(Duration::from_millis(5));
        }
        Ok(())
    }

    /// The report of the child that failed. If it has written none: `wrong`, and what the kernel shows of the child.
    /// `None` if no child failed.
    pub fn account(&self, wrong: &Wrong) -> Option<Account> {
        let (slot, pid, raw) = self.failed?;
        let way = if raw { "forked by a system call" } else { "forked by the C library" };
        let report = report_of(self.thread, slot);
        // SAFETY: a page of shared memory, zero at first; the child has ended or hangs.
        let told = unsafe { &(*report).told }.load(SeqCst);
        if told {
            // SAFETY: `told` is set after the report was written completely.
            let Report { wrong, start, pages, history, .. } = unsafe { report.read() };
            return Some((format!("in child {pid}, {way}"), wrong, start, pages, history));
        }
        let part = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let who = format!("child {pid}, {way}, {} {}", part("wchan"), part("syscall").trim());
        Some((who, *wrong, 0, 0, History::default()))
    }
}

/// The exit status of a child; `None` if it has not ended.
fn wait(pid: i32, options: i32) -> Option<i32> {
    let mut status = 0_i32;
    let arguments = [pid as usize, (&raw mut status) as usize, options as usize, 0, 0, 0];
    loop {
        // SAFETY: writes one number.
        match unsafe { sys::raw(libc::SYS_wait4, arguments) } {
            Ok(0) => return None,
            Err(libc::EINTR) => {}
            Err(error) => return Some(-error),
            Ok(_) => return Some(status),
        }
    }
}

/// Forks a child that checks all plots of this thread.
pub fn fork(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    worker.children.collect()?;
    let Some(slot) = worker.children.living.iter().position(Option::is_none) else { return Ok(Done::NotNow) };
    for at in 0..worker.plots.len() {
        worker.notice_unlocks(at);
        worker.note(at, "fork", way, (0, 0), 0);
    }
    let mut random = Random::new(worker.random.next());
    let life = match random.below(12) {
        0..4 => Duration::ZERO,
        4..9 => Duration::from_millis(random.next() % 200),
        _ => Duration::from_millis(2000 + random.next() % 4000),
    };
    let report = report_of(worker.thread, slot);
    // SAFETY: the page belongs to this slot, whose last child has ended.
    unsafe { &(*report).told }.store(false, SeqCst);
    let by_clone = way != Way::Libc && random.one_in(2);
    let answer = if by_clone {
        // SAFETY: the child has a copy of everything, like a child of fork.
        unsafe { sys::call(way, libc::SYS_clone, [libc::SIGCHLD as usize, 0, 0, 0, 0, 0]) }
    } else {
        // SAFETY: the child uses its own memory and system calls, and ends.
        unsafe { sys::call(way, libc::SYS_fork, [0; 6]) }
    };
    match answer {
        Ok(0) => child::live(&mut worker.plots, &worker.plan.selection, random, life, report),
        Ok(pid) => {
            let born = Born { pid: pid as i32, since: Instant::now(), raw: way != Way::Libc };
            worker.children.living[slot] = Some(born);
            Ok(Done::Yes)
        }
        Err(error) => super::judge("fork", at, Err(error), 0, &[libc::ENOMEM, libc::EAGAIN]),
    }
}

/// Executes a program by `posix_spawn`, or by `vfork` from instructions of this program.
pub fn spawn(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    worker.note(at, "spawn", way, (0, 0), 0);
    let status = if way == Way::Libc {
        let status = std::process::Command::new("/bin/true").stdin(std::process::Stdio::null()).status();
        status.map_or(-1, |status| i32::from(!status.success()))
    } else {
        let words = [c"true".as_ptr(), std::ptr::null()];
        // SAFETY: a path and a list of words that ends with a null pointer.
        match unsafe { sys::vfork_exec(c"/bin/true".as_ptr(), words.as_ptr()) } {
            Ok(pid) => wait(pid as i32, 0).unwrap_or(0),
            Err(libc::EAGAIN | libc::ENOMEM) => return Ok(Done::Refused(libc::EAGAIN)),
            Err(error) => -error,
        }
    };
    if status == 0 { Ok(Done::Yes) } else { Err(Wrong::Child { pid: 0, status }) }
}
