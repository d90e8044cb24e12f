//! A bound on connections that are accepted at a socket in a time, so that clients that connect all the time cost
//! little.

use std::time::{Duration, Instant};

/// Time for which connections are counted: 50 ms.
const WINDOW: Duration = Duration::from_millis(50);

/// Counts connections, of which each window allows a number.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    most: usize,
    /// The end of the window.
    until: Instant,
    /// Connections that may still be accepted in this window.
    left: usize,
}

impl Pace {
    /// Allows `most` connections in each window.
    pub const fn new(most: usize, now: Instant) -> Self {
        Self { most, until: now, left: most }
    }

    /// Time at which the next connection may be accepted; `None`: at once.
    pub fn due(&self, now: Instant) -> Option<Instant> {
        (self.left == 0 && self.until > now).then_some(self.until)
    }

    /// Counts an accepted connection.
    pub fn count(&mut self, now: Instant) {
        if self.until <= now {
            (self.until, self.left) = (now + WINDOW, self.most);
        }
        self.left = self.left.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_come_in_a_window_than_may() {
        let now = Instant::now();
        let mut pace = Pace::new(3, now);
        let mut take = |at| (0..9).take_while(|_| pace.due(at).is_none().then(|| pace.count(at)).is_some()).count();
        assert_eq!([take(now), take(now), take(now + WINDOW)], [3, 0, 3]);
        assert_eq!(pace.due(now + WINDOW), Some(now + 2 * WINDOW));
    }
}
