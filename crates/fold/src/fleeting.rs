//! Contents that did not last: whatever was folded to a slot was written again within a minute of that slot's being filled. They
//! get no slot for a while, longer each time.
//!
//! ```text
//!   nobody maps its slot any more, soon after it was filled       as soon again
//!   shared -------------------------------------------> waits, 1 min .. 16 min -----> waits for twice as long
//!      ^                                                   |
//!      `---------------------------------------------------'  the time is over; after as long again it counts as never having been so
//! ```

use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// What nobody shares any more so many seconds after it was shared was so for nothing.
pub const LIFE: u32 = 60;
/// How long it waits then, in seconds, at first and at most.
const WAIT: (u32, u32) = (60, 960);
/// No more contents are remembered.
const MOST: usize = 1 << 16;

#[derive(Clone, Copy, Debug)]
struct Wait {
    until: u32,
    seconds: u32,
}

impl Wait {
    const fn is_old(self, now: u32) -> bool {
        now >= self.until + self.seconds
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Fleeting {
    waits: HashMap<u64, Wait>,
    /// When those whose time is over were forgotten last.
    cleared: u32,
}

impl Fleeting {
    /// This content did not last.
    pub fn ended(&mut self, content: u64, now: u32) {
        // Before the table grows, room is made; but all of it is not gone through for each content.
        if self.waits.len() >= self.waits.capacity().min(MOST) && now >= self.cleared + WAIT.0 {
            self.waits.retain(|_, wait| !wait.is_old(now));
            self.cleared = now;
        }
        let room = self.waits.len() < MOST;
        match self.waits.entry(content) {
            Entry::Occupied(mut known) => {
                let seconds = if known.get().is_old(now) { WAIT.0 } else { (known.get().seconds * 2).min(WAIT.1) };
                known.insert(Wait { until: now + seconds, seconds });
            }
            Entry::Vacant(place) if room => {
                place.insert(Wait { until: now + WAIT.0, seconds: WAIT.0 });
            }
            Entry::Vacant(_) => {}
        }
    }

    /// Whether it is to wait.
    pub fn waits(&self, content: u64, now: u32) -> bool {
        self.waits.get(&content).is_some_and(|wait| now < wait.until)
    }

    /// Memory that this takes.
    pub fn bytes(&self) -> u64 {
        self.waits.capacity() as u64 * 17
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_last_waits_longer_each_time() {
        let mut fleeting = Fleeting::default();
        let mut now = 100;
        for seconds in [60, 120, 240, 480, 960, 960] {
            assert!(!fleeting.waits(7, now));
            fleeting.ended(7, now);
            assert!(fleeting.waits(7, now) && fleeting.waits(7, now + seconds - 1) && !fleeting.waits(8, now));
            now += seconds;
        }
        // Time heals.
        fleeting.ended(7, now + 960);
        assert!(fleeting.waits(7, now + 960 + 59) && !fleeting.waits(7, now + 960 + 60));
    }

    #[test]
    fn it_does_not_remember_without_bound() {
        let mut fleeting = Fleeting::default();
        (0..2 * MOST as u64).for_each(|content| fleeting.ended(content, 0));
        assert_eq!(fleeting.waits.len(), MOST);
        // Of those whose time is over there may be any number.
        fleeting.ended(u64::MAX, 200);
        assert_eq!(fleeting.waits.len(), 1);
    }

    #[test]
    fn it_takes_memory_for_those_whose_time_is_not_over() {
        let mut fleeting = Fleeting::default();
        // One a second: no more than 120 of them are to be known at a time.
        (0..10_000).for_each(|second| fleeting.ended(u64::from(second), second));
        assert!(fleeting.waits.capacity() < 500, "{}", fleeting.waits.capacity());
    }
}
