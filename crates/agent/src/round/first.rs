//! The first looks at a member, of whose past nothing is known: whether it rests.
//!
//! Without them, a member that has rested for an hour would be taken for one that has just begun to write.

use std::time::{Duration, Instant};

/// Time over which a member is watched: 1 s.
pub const WATCHED: Duration = Duration::from_secs(1);

/// Changes that the first looks have seen.
#[derive(Default)]
pub struct FirstLooks {
    since: Option<Instant>,
    changed: u64,
    is_over: bool,
}

impl FirstLooks {
    /// Begins, or begins anew: there is memory that was not watched.
    pub const fn begin(&mut self, now: Instant) {
        (self.since, self.changed) = (Some(now), 0);
    }

    /// Takes in that so many pages were written since.
    pub const fn saw(&mut self, changed: u64) {
        self.changed += changed;
    }

    /// Whether it was found to rest before.
    pub const fn is_over(&self) -> bool {
        self.is_over
    }

    /// Whether at most `few` pages were written in a second; true at most once. `is_all_seen` says whether memory whose writes
    /// nobody notes was compared.
    pub fn found_rest(&mut self, few: u64, is_all_seen: bool, now: Instant) -> bool {
        let is_watched = self.since.is_some_and(|since| now.saturating_duration_since(since) >= WATCHED);
        let found = !self.is_over && is_watched && is_all_seen && self.changed <= few;
        self.is_over |= found;
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn member_that_writes_little_in_its_first_second_rests() {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let mut looks = FirstLooks::default();
        assert!(!looks.found_rest(64, true, at(5000)), "nothing was watched");
        looks.begin(at(0));
        looks.saw(60);
        assert!(!looks.found_rest(64, true, at(900)) && !looks.found_rest(64, false, at(1000)));
        assert!(looks.found_rest(64, true, at(1000)) && !looks.found_rest(64, true, at(1100)), "once");
        let mut looks = FirstLooks::default();
        looks.begin(at(0));
        looks.saw(65);
        assert!(!looks.found_rest(64, true, at(4000)), "it writes");
        looks.begin(at(5000));
        assert!(!looks.found_rest(64, true, at(5900)) && looks.found_rest(64, true, at(6000)));
    }
}
