//! One line an event on stderr, and never more than a reader can follow: what strangers cause, they can cause often.

use crate::output::say;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines that may come at once.
const BURST: u32 = 60;
/// Then one every so often.
const EVERY: Duration = Duration::from_millis(250);

/// How many lines may still be written.
struct Bucket {
    left: u32,
    since: Option<Instant>,
    suppressed: u64,
}

static BUCKET: Mutex<Bucket> = Mutex::new(Bucket { left: BURST, since: None, suppressed: 0 });

impl Bucket {
    /// Whether a line may be written at `now`, and how many were not since the last one that was.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let since = *self.since.get_or_insert(now);
        let more = u32::try_from(now.duration_since(since).as_millis() / EVERY.as_millis()).unwrap_or(u32::MAX);
        if more > 0 {
            self.left = self.left.saturating_add(more).min(BURST);
            self.since = Some(now);
        }
        if self.left == 0 {
            self.suppressed += 1;
            return None;
        }
        self.left -= 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// Writes a line.
pub fn line(text: &str) {
    let taken = BUCKET.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now());
    if let Some(suppressed) = taken {
        if suppressed > 0 {
            say!("pagefold: {suppressed} further lines were left out");
        }
        say!("pagefold: {}", report::printable(text));
    }
}

/// Writes a line as `format!` makes it.
macro_rules! note {
    ($($words:tt)*) => { $crate::service::log::line(&format!($($words)*)) };
}
pub(crate) use note;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_short_and_said() {
        let begin = Instant::now();
        let mut bucket = Bucket { left: BURST, since: None, suppressed: 0 };
        let written = (0..1000).filter(|_| bucket.take(begin).is_some()).count();
        assert_eq!(written, BURST as usize);
        assert_eq!(bucket.take(begin + EVERY), Some(1000 - u64::from(BURST)));
        assert_eq!(bucket.take(begin + EVERY), None);
        assert_eq!(bucket.take(begin + EVERY * 1000), Some(1));
    }
}
