//! Counts of events, and the two ways to end the process.

use crate::area;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A byte that is not what it must be.
#[derive(Clone, Copy, Debug)]
pub struct Mismatch {
    pub address: usize,
    pub page: usize,
    pub offset: usize,
    pub expected: u64,
    pub found: u64,
}

/// Number of writes that were found in memory when their page was checked.
pub static CHECKED: AtomicU64 = AtomicU64::new(0);
/// Number of pages that were seen to map a file, after they were private.
pub static FOLDS: AtomicU64 = AtomicU64::new(0);
/// Whether the threads are to end.
pub static STOP: AtomicBool = AtomicBool::new(false);
static DONE: Mutex<BTreeMap<&str, u64>> = Mutex::new(BTreeMap::new());

/// Counts an event.
pub fn count(what: &'static str) {
    *DONE.lock().unwrap_or_else(PoisonError::into_inner).entry(what).or_default() += 1;
}

/// How often an event happened.
pub fn counted(what: &str) -> u64 {
    DONE.lock().unwrap_or_else(PoisonError::into_inner).get(what).copied().unwrap_or(0)
}

/// Ends the process if the result is a fault.
pub fn must(who: &str, result: Result<(), Mismatch>) {
    if let Err(wrong) = result {
        lost(who, &wrong);
    }
}

/// Ends a process that found a wrong byte.
pub fn lost(who: &str, wrong: &Mismatch) -> ! {
    let Mismatch { address, page, offset, expected, found } = *wrong;
    fail(&format!("LOST {who}: page {page} at {address:#x}, offset {offset}: expected {expected:#x}, found {found:#x}"))
}

/// Ends a process in which something else went wrong.
pub fn fail(text: &str) -> ! {
    // The lock of standard error may be held by a thread of the parent that a forked child does not have: the line is
    // written without the lock.
    let line = format!("torture {}: {text}\n", std::process::id());
    let _ = std::mem::ManuallyDrop::new(stderr()).write_all(line.as_bytes());
    area::exit_now(1)
}

fn stderr() -> std::fs::File {
    use std::os::fd::AsFd;
    std::fs::File::from(std::io::stderr().as_fd().try_clone_to_owned().expect("a descriptor"))
}

/// Prints the counts.
pub fn report(mode: &str, began: Instant) {
    let done = DONE.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let line = json!({
        "mode": mode,
        "checked_writes": CHECKED.load(Relaxed),
        "folds_seen": FOLDS.load(Relaxed),
        "seconds": began.elapsed().as_secs_f64(),
        "done": done,
    });
    println!("{line}");
}

/// The duration of the run.
#[derive(clap::Args, Clone, Debug)]
pub struct Until {
    /// Least number of seconds
    #[arg(long, default_value_t = 0)]
    pub seconds: u64,
    /// Least number of checked writes
    #[arg(long, default_value_t = 0)]
    pub writes: u64,
    /// Go on until standard input has ended, too
    #[arg(long)]
    pub until_input_ends: bool,
}

impl Until {
    /// Waits for the end of the run as its settings say, then tells all threads to end.
    pub fn wait(&self) {
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(self.seconds) || CHECKED.load(Relaxed) < self.writes {
            std::thread::sleep(Duration::from_millis(20));
        }
        if self.until_input_ends {
            wait_for_end_of_input();
        }
        STOP.store(true, Relaxed);
    }
}

/// Waits until standard input has ended.
pub fn wait_for_end_of_input() {
    // An input that cannot be read has ended.
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}

/// Whether the threads are to end.
pub fn stopping() -> bool {
    STOP.load(Relaxed)
}
