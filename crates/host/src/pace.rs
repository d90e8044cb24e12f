//! How many connections are accepted at a socket in a time, so that those who connect all the time cost little.

use std::time::{Duration, Instant};

/// Time for which connections are counted: 50 ms.
const WINDOW: Duration = Duration::from_millis(50);

/// A number of connections in each window.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    most: usize,
    /// The end of the window.
    until: Instant,
    /// Connections that may come until then.
    left: usize,
}

impl Pace {
    /// So many in 50 ms.
    pub const fn new(most: usize, now: Instant) -> Self {
        Self { most, until: now, left: most }
    }

    /// The moment from which on another one may come; `None`: at once.
    pub fn due(&self, now: Instant) -> Option<Instant> {
        (self.left == 0 && self.until > now).then_some(self.until)
    }

    /// Counts one.
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
