//! The log of a service on stderr, one line for each event. The rate of lines is limited, because strangers can cause
//! events as often as they like.

use crate::{printable, say};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Most lines of the log that are written in one burst; further ones are left out.
const BURST: u32 = 60;
/// Time in which the right to write one more line is gained: 250 ms.
const EVERY: Duration = Duration::from_millis(250);

/// A token bucket: the number of lines that may still be written.
struct Bucket {
    left: u32,
    since: Option<Instant>,
    suppressed: u64,
}

static BUCKET: Mutex<Bucket> = Mutex::new(Bucket { left: BURST, since: None, suppressed: 0 });

impl Bucket {
    /// Takes the right to write one line at `now`. Returns the number of lines left out since the last one that was
    /// written; `None` if the line must be left out.
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

/// Writes a line to the log, unless too many were written of late.
pub fn line(text: &str) {
    let taken = BUCKET.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now());
    if let Some(suppressed) = taken {
        if suppressed > 0 {
            say!("pagefold: {suppressed} further lines were left out");
        }
        say!("pagefold: {}", printable(text));
    }
}

/// Writes a line to the log, formatted as by `format!`.
#[macro_export]
macro_rules! note {
    ($($words:tt)*) => { $crate::log::line(&format!($($words)*)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flood_of_lines_is_cut_short_and_counted() {
        let begin = Instant::now();
        let mut bucket = Bucket { left: BURST, since: None, suppressed: 0 };
        let written = (0..1000).filter(|_| bucket.take(begin).is_some()).count();
        assert_eq!(written, BURST as usize);
        assert_eq!(bucket.take(begin + EVERY), Some(1000 - u64::from(BURST)));
        assert_eq!(bucket.take(begin + EVERY), None);
        assert_eq!(bucket.take(begin + EVERY * 1000), Some(1));
    }
}
