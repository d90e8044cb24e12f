//! Short-lived contents: all pages that mapped the slot were written again within a minute after the slot was filled.
//! Such a content gets no slot for a while, longer each time.
//!
//! ```text
//!           nobody maps its slot any more                   the same happens again
//!           within a minute after it was filled
//!   shared -------------------------------------> waits, 1 min .. 16 min -----> waits twice as long
//!      ^                                             |
//!      `------------ the wait is over ---------------'  after as long again without that, the content is forgotten
//! ```

use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// If nobody maps a slot any more within this time after it was filled, its content was short-lived, in seconds.
pub const LIFE: u32 = 60;
/// First and longest time for which a short-lived content gets no slot, in seconds.
const WAIT: (u32, u32) = (60, 960);
/// Most short-lived contents that are remembered: 65,536. Further ones are not noted.
const MOST: usize = 1 << 16;

#[derive(Clone, Copy, Debug)]
struct Wait {
    until: u32,
    seconds: u32,
}

impl Wait {
    /// Whether the content has not been short-lived again for as long after the wait as the wait took. It then counts
    /// as new.
    const fn is_old(self, now: u32) -> bool {
        now >= self.until + self.seconds
    }
}

/// The short-lived contents of a group, and how long each of them gets no slot.
#[derive(Debug, Default)]
pub struct Fleeting {
    waits: HashMap<u64, Wait>,
    /// Second of the last removal of old waits.
    cleared: u32,
}

impl Fleeting {
    /// Notes that a content was short-lived.
    pub fn ended(&mut self, content: u64, now: u32) {
        // Old waits are removed before the table grows, and not for each content.
        if self.waits.len() >= self.waits.capacity().min(MOST) && now >= self.cleared + WAIT.0 {
            self.waits.retain(|_, wait| !wait.is_old(now));
            self.cleared = now;
        }
        let room = self.waits.len() < MOST;
        match self.waits.entry(content) {
            Entry::Occupied(mut known) => {
                let last = known.get();
                let seconds = page::doubled((!last.is_old(now)).then_some(last.seconds), WAIT);
                known.insert(Wait { until: now + seconds, seconds });
            }
            Entry::Vacant(place) if room => {
                place.insert(Wait { until: now + WAIT.0, seconds: WAIT.0 });
            }
            Entry::Vacant(_) => {}
        }
    }

    /// Whether a content is to get no slot for the moment.
    pub fn waits(&self, content: u64, now: u32) -> bool {
        self.waits.get(&content).is_some_and(|wait| now < wait.until)
    }

    /// Bytes of memory that the remembered contents take.
    pub fn bytes(&self) -> u64 {
        self.waits.capacity() as u64 * 17
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_doubles_each_time_content_is_short_lived() {
        let mut fleeting = Fleeting::default();
        let mut now = 100;
        for seconds in [60, 120, 240, 480, 960, 960] {
            assert!(!fleeting.waits(7, now));
            fleeting.ended(7, now);
            assert!(fleeting.waits(7, now) && fleeting.waits(7, now + seconds - 1) && !fleeting.waits(8, now));
            now += seconds;
        }
        // After as long again, it begins with the first wait.
        fleeting.ended(7, now + 960);
        assert!(fleeting.waits(7, now + 960 + 59) && !fleeting.waits(7, now + 960 + 60));
    }

    #[test]
    fn remembered_contents_are_bounded() {
        let mut fleeting = Fleeting::default();
        (0..2 * MOST as u64).for_each(|content| fleeting.ended(content, 0));
        assert_eq!(fleeting.waits.len(), MOST);
        // Old waits make room.
        fleeting.ended(u64::MAX, 200);
        assert_eq!(fleeting.waits.len(), 1);
    }

    #[test]
    fn old_waits_take_no_memory() {
        let mut fleeting = Fleeting::default();
        // One a second: 120 of them at a time are not old.
        (0..10_000).for_each(|second| fleeting.ended(u64::from(second), second));
        assert!(fleeting.waits.capacity() < 500, "{}", fleeting.waits.capacity());
    }
}
