//! Memory for pages that become private again, and promises of it.
//!
//! Every page that shares a slot needs a frame of its own before any slot is free. Unfolding takes a while, and
//! the memory is available meanwhile. It is promised: two groups that unfold at once must not count on the same memory.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Least time for which memory is promised: 30 s.
const LEAST_TIME: Duration = Duration::from_secs(30);
/// Bytes that a group unfolds in a second at least, which makes the promise longer: 100 MiB.
const BYTES_PER_S: u64 = 100 << 20;

/// Memory that groups were promised, and until when.
#[derive(Debug, Default)]
pub struct Room(BTreeMap<String, (u64, Instant)>);

impl Room {
    /// Promises a group memory to unfold `needed` bytes. A reserve of 1/20 of the memory, at most 1 GiB, is left for
    /// other programs.
    ///
    /// # Errors
    /// Too little is available; the text has the sizes.
    pub fn promise(&mut self, group: &str, needed: u64, available: u64, ram: u64, now: Instant) -> Result<(), String> {
        self.0.retain(|_, (_, until)| *until > now);
        let others = self.0.iter().filter(|(name, _)| *name != group);
        let promised = others.fold(0, |sum: u64, (_, (bytes, _))| sum.saturating_add(*bytes));
        let reserve = (ram / 20).min(1 << 30);
        if needed > 0 && needed.saturating_add(reserve).saturating_add(promised) > available {
            let [needed, reserve, available] = [needed, reserve, available].map(cli::bytes);
            let others = if promised == 0 {
                String::new()
            } else {
                format!(", {} of them promised to other groups that unfold", cli::bytes(promised))
            };
            return Err(format!(
                "unfolding needs {needed}, and {reserve} are kept in reserve, but {available} are available{others}: free \
                 memory, or end members, and try again (fold off leaves everything as it is)"
            ));
        }
        let time = LEAST_TIME + Duration::from_secs(needed / BYTES_PER_S);
        self.0.insert(group.to_owned(), (needed, now + time));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 1 << 30;

    #[test]
    fn unfold_without_room_is_refused_with_sizes() {
        let (mut room, now) = (Room::default(), Instant::now());
        assert_eq!(room.promise("a", 0, 0, 8 * G, now), Ok(()));
        assert_eq!(room.promise("a", G, 2 * G, 8 * G, now), Ok(()));
        let why = room.promise("a", 2 * G, 2 * G, 10 * G, now).unwrap_err();
        assert!(why.contains("needs 2.00 GiB, and 512 MiB are kept in reserve, but 2.00 GiB are available:"), "{why}");
    }

    #[test]
    fn groups_that_unfold_at_once_do_not_count_on_the_same_memory() {
        let (mut room, now) = (Room::default(), Instant::now());
        assert_eq!(room.promise("a", 2 * G, 4 * G, 8 * G, now), Ok(()));
        let why = room.promise("b", 2 * G, 4 * G, 8 * G, now).unwrap_err();
        assert!(why.contains("2.00 GiB of them promised to other groups"), "{why}");
        assert_eq!(room.promise("a", 2 * G, 4 * G, 8 * G, now), Ok(()), "its own promise stands");
        let later = now + LEAST_TIME + Duration::from_secs(60);
        assert_eq!(room.promise("b", 2 * G, 4 * G, 8 * G, later), Ok(()));
    }
}
