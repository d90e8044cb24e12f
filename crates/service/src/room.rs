//! Promises of memory to groups whose folded pages become private again (unfold).
//!
//! Every folded page, which maps a shared page (slot) of the pool, needs a frame of its own before any slot is free.
//! Unfolding takes a while, and the kernel counts the memory as available until it is used. So the memory is promised
//! to one group: two groups that unfold at once must not count on the same memory.
//!
//! ```text
//!   nothing --- the worker needs room ---> promised --- time is over ---> rests, as long again ---> nothing
//!                                           ^    |
//!                                           +----+  other needs: promised anew
//! ```
//!
//! During the pause ("rests"), which is as long as the promise, the group gets no further promise. So a worker that
//! uses none of the promised memory cannot keep it from other groups for ever.

#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

use api::control::{MemberRoom, Needs};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Shortest time for which memory is promised: 30 s. A promise lasts longer by the time that unfolding takes at
/// [`BYTES_PER_S`].
const LEAST_TIME: Duration = Duration::from_secs(30);
/// Bytes that a group is taken to unfold in a second at least: 100 MiB. The time of a promise is computed with this
/// rate.
const BYTES_PER_S: u64 = 100 << 20;
/// The worker is told a time for the promise that is 5 s shorter than the supervisor's, because messages may be late.
const LATE: Duration = Duration::from_secs(5);
/// Smallest part of the needed memory that is worth a promise, if a part is of use: 16 MiB.
const LEAST_PART: u64 = 16 << 20;

/// The memory of the host, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Memory available to processes.
    pub available: u64,
    /// Memory to be left for other programs.
    pub reserve: u64,
}

impl Memory {
    /// The memory of this host. Without `reserve`, 1/20 of it is left, and 1 GiB at most.
    ///
    /// # Errors
    /// The kernel does not tell how much memory is available.
    pub fn of_host(reserve: Option<u64>) -> Result<Self, String> {
        let available = host::available_bytes().map_err(|e| e.to_string())?;
        Ok(Self { available, reserve: reserve.unwrap_or_else(host::usual_reserve_bytes) })
    }
}

/// A promise of memory to a group.
#[derive(Debug)]
struct Promise {
    bytes: u64,
    began: Instant,
    /// Most bytes that were promised at once since the promise began.
    most: u64,
}

/// The promises of all groups, by the group's name.
#[derive(Debug, Default)]
pub struct Room(BTreeMap<String, Promise>);

impl Room {
    /// Promises a group all memory that an operator's change takes.
    ///
    /// # Errors
    /// Too little is available; the text has the sizes.
    pub fn promise_all(&mut self, group: &str, needed: u64, memory: Memory, now: Instant) -> Result<(), String> {
        if needed > 0 && needed > self.free(group, memory, now) {
            let why = self.refusal(group, needed, memory);
            return Err(format!(
                "{why}: free memory, or end members, and try again (fold off leaves everything as it is)"
            ));
        }
        self.0.insert(group.to_owned(), Promise { bytes: needed, began: now, most: needed });
        Ok(())
    }

    /// Promises the members of a group memory that their worker asks for, or a part of it. Returns the time for which
    /// the worker may use it.
    ///
    /// # Errors
    /// Too little is available; the text has the sizes.
    pub fn promise(
        &mut self,
        group: &str,
        needs: &Needs,
        memory: Memory,
        now: Instant,
    ) -> Result<(Vec<MemberRoom>, Duration), String> {
        let needed = needs.members.iter().fold(0, |sum: u64, room| sum.saturating_add(room.bytes));
        let free = self.free(group, memory, now);
        let least = if needs.whole { needed } else { needed.min(LEAST_PART) };
        if least > free {
            let why = self.refusal(group, needed, memory);
            return Err(format!("{why}: free memory, or end members; it is tried again every few seconds"));
        }
        if needed == 0 {
            self.0.get_mut(group).into_iter().for_each(|promise| promise.bytes = 0);
            return Ok((Vec::new(), Duration::ZERO));
        }
        let bytes = needed.min(free);
        let promise = self.0.entry(group.to_owned()).or_insert(Promise { bytes, began: now, most: bytes });
        if promise.until() <= now + LATE {
            let s = promise.rests_until().saturating_duration_since(now).as_secs();
            return Err(format!("it had its time, and for {s} s others may have the memory; it is tried again"));
        }
        (promise.bytes, promise.most) = (bytes, promise.most.max(bytes));
        let time = promise.until().saturating_duration_since(now).saturating_sub(LATE);
        let mut left = bytes;
        let give = |room: &MemberRoom| {
            let bytes = room.bytes.min(left);
            left = left.saturating_sub(bytes);
            MemberRoom { bytes, ..*room }
        };
        Ok((needs.members.iter().map(give).collect(), time))
    }

    /// Ends a group's promise of which nothing was used.
    pub fn take_back(&mut self, group: &str) {
        self.0.remove(group);
    }

    /// Bytes that can be promised to a group now: available memory without the reserve and without promises to other
    /// groups.
    fn free(&mut self, group: &str, memory: Memory, now: Instant) -> u64 {
        self.0.retain(|_, promise| promise.rests_until() > now);
        self.0.values_mut().filter(|promise| promise.until() <= now).for_each(|promise| promise.bytes = 0);
        memory.available.saturating_sub(memory.reserve).saturating_sub(self.promised_to_others(group))
    }

    fn promised_to_others(&self, group: &str) -> u64 {
        let others = self.0.iter().filter(|(name, _)| *name != group);
        others.fold(0, |sum: u64, (_, promise)| sum.saturating_add(promise.bytes))
    }

    fn refusal(&self, group: &str, needed: u64, memory: Memory) -> String {
        let others = match self.promised_to_others(group) {
            0 => String::new(),
            promised => format!(", {} of them promised to other groups that unfold", cli::bytes(promised)),
        };
        let [needed, reserve, available] = [needed, memory.reserve, memory.available].map(cli::bytes);
        format!("unfolding needs {needed}, and {reserve} are kept in reserve, but {available} are available{others}")
    }
}

impl Promise {
    fn time(&self) -> Duration {
        LEAST_TIME + Duration::from_secs(self.most / BYTES_PER_S)
    }

    fn until(&self) -> Instant {
        self.began + self.time()
    }

    fn rests_until(&self) -> Instant {
        self.began + 2 * self.time()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 1 << 30;

    fn memory(available: u64) -> Memory {
        Memory { available, reserve: G / 2 }
    }

    fn needs(bytes: &[u64], whole: bool) -> Needs {
        let members = bytes.iter().enumerate().map(|(n, bytes)| MemberRoom { pid: n as u32, bytes: *bytes });
        Needs { members: members.collect(), whole }
    }

    #[test]
    fn unfold_without_room_is_refused_with_sizes() {
        let (mut room, now) = (Room::default(), Instant::now());
        assert_eq!(room.promise_all("a", 0, memory(0), now), Ok(()));
        assert_eq!(room.promise_all("a", G, memory(2 * G), now), Ok(()));
        let why = room.promise_all("a", 2 * G, memory(2 * G), now).unwrap_err();
        assert!(why.contains("needs 2.00 GiB, and 512 MiB are kept in reserve, but 2.00 GiB are available:"), "{why}");
    }

    #[test]
    fn groups_that_unfold_at_once_do_not_count_on_the_same_memory() {
        let (mut room, now) = (Room::default(), Instant::now());
        assert_eq!(room.promise_all("a", 2 * G, memory(4 * G), now), Ok(()));
        let why = room.promise_all("b", 2 * G, memory(4 * G), now).unwrap_err();
        assert!(why.contains("2.00 GiB of them promised to other groups"), "{why}");
        let why = room.promise("b", &needs(&[2 * G], true), memory(4 * G), now).unwrap_err();
        assert!(why.contains("2.00 GiB of them promised to other groups"), "{why}");
        assert_eq!(room.promise_all("a", 2 * G, memory(4 * G), now), Ok(()), "its own promise stands");
        let later = now + LEAST_TIME + Duration::from_secs(60);
        assert_eq!(room.promise_all("b", 2 * G, memory(4 * G), later), Ok(()));
    }

    #[test]
    fn part_is_promised_only_where_it_is_of_use() {
        let (mut room, now) = (Room::default(), Instant::now());
        assert!(room.promise("a", &needs(&[G, G], true), memory(2 * G), now).is_err());
        let (members, time) = room.promise("a", &needs(&[G, G], false), memory(2 * G), now).unwrap();
        assert_eq!(members.iter().map(|room| room.bytes).collect::<Vec<_>>(), [G, G / 2]);
        assert_eq!(time, LEAST_TIME + Duration::from_secs(15) - LATE);
        assert!(room.promise("b", &needs(&[LEAST_PART], false), memory(2 * G), now).is_err(), "all is promised");
        assert!(room.promise("b", &needs(&[1], false), memory(2 * G + 1), now).is_ok());
        // Memory that a group does not need any more can be promised to others.
        assert!(room.promise("a", &Needs::default(), memory(2 * G), now).is_ok());
        assert!(room.promise("b", &needs(&[G], true), memory(2 * G), now).is_ok());
    }

    /// A regression test: this fails if a worker can have its promise renewed without a pause.
    #[test]
    fn worker_that_does_not_use_its_room_cannot_keep_it_from_others() {
        let (mut room, begin) = (Room::default(), Instant::now());
        let all = needs(&[G], true);
        let mut others = 0;
        for s in 0..600 {
            let now = begin + Duration::from_secs(s);
            let _ = room.promise("hostile", &all, memory(3 * G / 2), now);
            let _ = room.promise("hostile", &Needs::default(), memory(3 * G / 2), now);
            let _ = room.promise("hostile", &all, memory(3 * G / 2), now);
            others += u64::from(room.promise_all("other", G, memory(3 * G / 2), now).is_ok());
            room.0.remove("other");
        }
        assert!((250..350).contains(&others), "{others} of 600 s");
    }
}
