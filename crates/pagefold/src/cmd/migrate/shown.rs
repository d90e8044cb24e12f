//! A migration on its way, on stderr: a line that is drawn anew on a terminal, and else lines ever further apart.

use cli::say;
use guest::Guest;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lend::Progress;
use std::time::{Duration, Instant};

/// Time to the first line where stderr is no terminal: 5 s. Each further line comes after twice the time.
const FIRST: Duration = Duration::from_secs(5);

/// The display of one migration.
pub struct Shown {
    bar: ProgressBar,
    guest: String,
    within: Duration,
    began: Instant,
    next: Duration,
}

impl Shown {
    /// The display of a migration after which the guest stays here, if it has not arrived within the time `within`.
    pub fn of(guest: &Guest, within: Duration) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(4));
        bar.set_style(ProgressStyle::with_template("{wide_msg}").unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar, guest: cli::printable(&guest.id), within, began: Instant::now(), next: FIRST }
    }

    /// Shows the state of the migration: always on a terminal, else only when the time for the next line has come.
    pub fn see(&mut self, progress: &Progress) {
        if progress.seconds == 0.0 {
            return;
        }
        if !self.bar.is_hidden() {
            self.bar.set_message(self.line(progress));
            self.bar.tick();
        } else if self.began.elapsed() >= self.next {
            self.next *= 2;
            say!("pagefold: {}", self.line(progress));
        }
    }

    fn line(&self, progress: &Progress) -> String {
        let Self { guest, within, .. } = self;
        format!("{guest}, {:.0} s of {} s: {}", progress.seconds, within.as_secs(), progress.in_words())
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
