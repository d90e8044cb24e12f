//! A progress bar on stderr, for people: only on a terminal, only when the work takes longer than a second.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Duration of work up to which no bar is shown.
const QUIET: Duration = Duration::from_secs(1);

/// Progress bar of some work, shown until this is dropped.
pub struct Progress {
    state: Arc<State>,
    painter: Option<JoinHandle<()>>,
}

struct State {
    done: AtomicU64,
    total: AtomicU64,
    over: AtomicBool,
}

impl Progress {
    /// Starts work on `total` items called `what`.
    pub fn start(what: &'static str, total: u64) -> Self {
        let state =
            Arc::new(State { done: AtomicU64::new(0), total: AtomicU64::new(total), over: AtomicBool::new(false) });
        let shown = std::io::stderr().is_terminal();
        let painter = shown.then(|| {
            let state = state.clone();
            std::thread::spawn(move || paint(&state, what))
        });
        Self { state, painter }
    }

    /// Counter of the items that are done, to be raised by those who do the work.
    pub fn done(&self) -> &AtomicU64 {
        &self.state.done
    }

    /// Corrects the number of all items.
    pub fn set_total(&self, total: u64) {
        self.state.total.store(total, Ordering::Relaxed);
    }
}

fn paint(state: &State, what: &str) {
    let begin = Instant::now();
    while begin.elapsed() < QUIET {
        if state.over.load(Ordering::Relaxed) {
            return;
        }
        std::thread::park_timeout(QUIET - begin.elapsed().min(QUIET));
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10));
    let template = format!("{{bar:32}} {{percent:>3}}% {{human_pos}}/{{human_len}} {what}, {{eta}} left");
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style);
    }
    while !state.over.load(Ordering::Relaxed) {
        bar.set_length(state.total.load(Ordering::Relaxed));
        bar.set_position(state.done.load(Ordering::Relaxed));
        std::thread::park_timeout(Duration::from_millis(100));
    }
    bar.finish_and_clear();
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.state.over.store(true, Ordering::Relaxed);
        if let Some(painter) = self.painter.take() {
            painter.thread().unpark();
            // A panic of the painter does not matter to the work.
            let _ = painter.join();
        }
    }
}
