//! The current operation of each thread. The watchdog reads it when a thread makes no step, and the signal handler
//! when a thread touches inaccessible memory.

use crate::history::History;
use crate::ops::OPERATIONS;
use crate::sys::{self, Way};
use crate::verdict::{self, Scene, Wrong};
use std::fmt::Write;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Greatest number of threads that can be watched.
pub const THREADS: usize = 32;

/// What one thread is doing.
pub struct Seat {
    pub tid: AtomicUsize,
    pub steps: AtomicU64,
    operation: AtomicUsize,
    way: AtomicUsize,
    start: AtomicUsize,
    pages: AtomicUsize,
    history: AtomicPtr<History>,
    pub lives: AtomicBool,
}

static SEATS: [Seat; THREADS] = [const { Seat::new() }; THREADS];

/// The seat that belongs to the thread with this number.
pub fn seat(thread: usize) -> &'static Seat {
    &SEATS[thread]
}

impl Seat {
    const fn new() -> Self {
        Self {
            tid: AtomicUsize::new(0),
            steps: AtomicU64::new(0),
            operation: AtomicUsize::new(0),
            way: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            pages: AtomicUsize::new(0),
            history: AtomicPtr::new(null_mut()),
            lives: AtomicBool::new(false),
        }
    }

    /// Records that the thread begins an operation.
    pub fn begins(&self, operation: usize, way: Way, (start, pages): (usize, usize), history: &History) {
        self.operation.store(operation, Relaxed);
        self.way.store(way as usize, Relaxed);
        self.start.store(start, Relaxed);
        self.pages.store(pages, Relaxed);
        self.history.store(std::ptr::from_ref(history).cast_mut(), SeqCst);
    }

    fn says(&self, thread: usize) -> String {
        let way = Way::ALL[self.way.load(Relaxed)].name();
        let name = OPERATIONS[self.operation.load(Relaxed)].name;
        let (steps, start, pages) = (self.steps.load(Relaxed), self.start.load(Relaxed), self.pages.load(Relaxed));
        let tid = self.tid.load(Relaxed);
        let part = |file| std::fs::read_to_string(format!("/proc/self/task/{tid}/{file}")).unwrap_or_default();
        let (wait, call) = (part("wchan"), part("syscall"));
        let call = call.trim();
        format!("thread {thread}: step {steps}: {name} ({way}) on {pages} pages at {start:#x}; {wait} {call}\n")
    }
}

/// The current operations of all threads, as text.
fn all_say() -> String {
    SEATS.iter().enumerate().filter(|(_, seat)| seat.lives.load(SeqCst)).map(|(n, seat)| seat.says(n)).collect()
}

/// Waits until `is_done`. Ends the process if a living thread makes no step for `patience`.
pub fn watch(patience: Duration, is_done: impl Fn() -> bool) {
    let mut seen = [(0_u64, Instant::now()); THREADS];
    while !is_done() {
        sys::rest(Duration::from_millis(20));
        for (seen, seat) in seen.iter_mut().zip(&SEATS) {
            let steps = seat.steps.load(Relaxed);
            if !seat.lives.load(SeqCst) || steps != seen.0 {
                *seen = (steps, Instant::now());
            } else if seen.1.elapsed() > patience {
                verdict::hangs(&format!("HANGS: no step for {patience:?}\n{}", all_say()));
            }
        }
    }
}

/// Installs a signal handler, so that an access to inaccessible memory ends the process with a report.
pub fn install() {
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        // SAFETY: all fields may be zero.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = fault as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER | libc::SA_RESETHAND;
        // SAFETY: the handler has the type that these flags ask for, and does not return.
        unsafe { libc::sigaction(signal, &raw const action, null_mut()) };
    }
}

/// Prints what is known without allocating. Printing more, which follows, may fail in the state that the process is in.
fn say_fault(signal: usize, address: usize, tid: usize) {
    let mut out = verdict::Unbuffered;
    let _ = writeln!(out, "signal {signal} at {address:#018x} in thread {tid}");
    for seat in SEATS.iter().filter(|seat| seat.lives.load(SeqCst)) {
        let (name, way) = (OPERATIONS[seat.operation.load(Relaxed)].name, Way::ALL[seat.way.load(Relaxed)].name());
        let (start, pages) = (seat.start.load(Relaxed), seat.pages.load(Relaxed));
        let (step, tid) = (seat.steps.load(Relaxed), seat.tid.load(Relaxed));
        let _ = writeln!(out, "thread {tid}: step {step}: {name} ({way}) on {pages} pages at {start:#x}");
        // SAFETY: its thread put it there. At worst, it is overwritten meanwhile, and this report is wrong.
        if let Some(history) = unsafe { seat.history.load(SeqCst).as_ref() } {
            let _ = write!(out, "{history}");
        }
    }
    verdict::say_mappings(None);
}

/// Handles the signal of a thread that touched inaccessible memory. The thread is lost anyway, so the handler may call
/// any function.
extern "C" fn fault(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel hands over a structure that lives as long as the handler runs.
    let info = unsafe { &*info };
    // SAFETY: these signals come with an address.
    let address = unsafe { info.si_addr() } as usize;
    let tid = sys::own_tid();
    say_fault(signal as usize, address, tid);
    let found = SEATS.iter().enumerate().find(|(_, seat)| seat.tid.load(Relaxed) == tid);
    let Some((thread, seat)) = found else {
        verdict::fail(&format!(
            "MISMATCH: signal {signal} at {address:#x} in thread {tid} (or a child)\n{}",
            all_say()
        ));
    };
    let (start, pages) = (seat.start.load(Relaxed), seat.pages.load(Relaxed));
    // SAFETY: this thread put it there, and its plot lives while it is in the step.
    let history = unsafe { seat.history.load(SeqCst).as_ref() }.copied().unwrap_or_default();
    let page = address.wrapping_sub(start) / crate::content::PAGE;
    let what = if page < pages { "touching the plot" } else { "touching an address outside of the plot" };
    let wrong = Wrong::Access { page: page.min(pages), by: what, expected: "there", found: signal };
    let who = format!("signal {signal} at {address:#x}, {}", seat.says(thread));
    verdict::lost(who.trim(), &wrong, &Scene { start, pages, history: &history, differing: String::new() });
}
