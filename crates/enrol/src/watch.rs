//! Keeps for each process when its facts are to be read again.
//!
//! All pids are listed every 2 s, which is cheap. The facts of a process are read when it is new, and again after waits
//! that double, because it may have moved to another control group, or changed its uid. After a failed attempt to
//! attach a process, they are read when the next attempt is due. A pid that the kernel has reused for another process
//! is noticed when the pid is due.

use crate::facts::Facts;
use host::ProcessId;
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

/// First and longest wait after which the facts of a process that is not to be attached are read again: 2 s, 32 s.
const LOOKS: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(32));
/// Time after which a member is looked at again, which may have left its group, and so is one of Pagefold's own
/// processes: 5 minutes.
const RESTS: Duration = Duration::from_secs(300);
/// First and longest wait after a failed attempt to attach a process: 10 s, 10 minutes.
const TRIES: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(600));

/// The processes seen so far, by pid.
#[derive(Debug, Default)]
pub struct Watch {
    seen: HashMap<u32, Seen>,
}

#[derive(Debug)]
struct Seen {
    start_ticks: u64,
    due: Instant,
    wait: Option<Duration>,
    failed: Option<Failed>,
    /// Whether an order to attach the process waits or runs. The process is not looked at meanwhile.
    is_busy: bool,
}

/// A failed attempt to attach a process.
#[derive(Clone, Debug)]
struct Failed {
    why: String,
    wait: Duration,
    again: Instant,
}

impl Watch {
    /// Returns those of all pids of the host whose processes are to be looked at now. Processes that are not in the
    /// list are forgotten.
    pub fn due(&mut self, pids: &[u32], now: Instant) -> Vec<u32> {
        let listed: HashSet<u32> = pids.iter().copied().collect();
        self.seen.retain(|pid, _| listed.contains(pid));
        let is_due = |pid: &u32| self.seen.get(pid).is_none_or(|seen| !seen.is_busy && seen.due <= now);
        pids.iter().copied().filter(is_due).collect()
    }

    /// Makes all processes due, because the rules have changed.
    pub fn look_at_all(&mut self, now: Instant) {
        for seen in self.seen.values_mut() {
            (seen.due, seen.wait) = (now, None);
        }
    }

    /// The reason why the last attempt to attach a process failed, and the seconds until the next one; `None` if it did
    /// not fail.
    pub fn failed(&self, facts: &Facts, now: Instant) -> Option<(String, u64)> {
        let failed = self.seen.get(&facts.pid).filter(|seen| seen.start_ticks == facts.start_ticks)?.failed.as_ref()?;
        Some((failed.why.clone(), seconds_until(failed.again, now)))
    }

    /// Whether the last attempt to attach a process failed, and the wait before the next one is not over.
    pub fn waits(&self, process: ProcessId, now: Instant) -> bool {
        let seen = self.seen.get(&process.pid).filter(|seen| seen.start_ticks == process.start_ticks);
        seen.and_then(|seen| seen.failed.as_ref()).is_some_and(|failed| failed.again > now)
    }

    /// Notes that a process was looked at, and is not to be attached.
    pub fn looked(&mut self, pid: u32, start_ticks: u64, now: Instant) {
        let seen = self.of(pid, start_ticks, now);
        let wait = next(seen.wait, LOOKS);
        (seen.wait, seen.due) = (Some(wait), now + wait);
        if let Some(failed) = seen.failed.as_ref().filter(|failed| failed.again > now) {
            seen.due = failed.again;
        }
    }

    /// Notes that a process is a member or a program of Pagefold's own, and is due after [`RESTS`].
    pub fn rests(&mut self, pid: u32, start_ticks: u64, now: Instant) {
        self.of(pid, start_ticks, now).due = now + RESTS;
    }

    /// Notes that a process is to be looked at again in 2 s.
    pub fn soon(&mut self, pid: u32, start_ticks: u64, now: Instant) {
        self.of(pid, start_ticks, now).due = now;
    }

    /// Notes that the attachment of a process was ordered.
    pub fn busy(&mut self, pid: u32, start_ticks: u64, now: Instant) {
        self.of(pid, start_ticks, now).is_busy = true;
    }

    /// Notes the result of an attempt to attach a process. If it failed, returns the wait before the next attempt.
    pub fn tried(&mut self, pid: u32, start_ticks: u64, failed: Option<String>, now: Instant) -> Option<Duration> {
        let seen = self.of(pid, start_ticks, now);
        seen.is_busy = false;
        let before = seen.failed.take();
        seen.due = now + RESTS;
        let why = failed?;
        let wait = next(before.map(|before| before.wait), TRIES);
        seen.due = now + wait;
        seen.failed = Some(Failed { why, wait, again: now + wait });
        Some(wait)
    }

    fn of(&mut self, pid: u32, start_ticks: u64, now: Instant) -> &mut Seen {
        let new = || Seen { start_ticks, due: now, wait: None, failed: None, is_busy: false };
        let seen = self.seen.entry(pid).or_insert_with(new);
        if seen.start_ticks != start_ticks {
            *seen = new();
        }
        seen
    }
}

fn next(before: Option<Duration>, (first, longest): (Duration, Duration)) -> Duration {
    before.map_or(first, |before| (before * 2).min(longest))
}

fn seconds_until(at: Instant, now: Instant) -> u64 {
    let left = at.saturating_duration_since(now);
    left.as_secs() + u64::from(left.subsec_nanos() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(start_ticks: u64) -> Facts {
        Facts { pid: 7, start_ticks, ..Facts::default() }
    }

    #[test]
    fn process_is_looked_at_at_once_and_then_less_often() {
        let (mut watch, now) = (Watch::default(), Instant::now());
        assert_eq!(watch.due(&[7, 9], now), [7, 9]);
        let mut at = now;
        let mut waits = Vec::new();
        for _ in 0..7 {
            watch.looked(7, 1, at);
            let before = at;
            while watch.due(&[7], at).is_empty() {
                at += Duration::from_secs(1);
            }
            waits.push((at - before).as_secs());
        }
        assert_eq!(waits, [2, 4, 8, 16, 32, 32, 32]);
        watch.looked(7, 1, at);
        assert!(watch.due(&[7], at).is_empty());
        watch.look_at_all(at);
        assert_eq!(watch.due(&[7], at), [7]);
        watch.looked(7, 1, at);
        assert!(watch.due(&[], at).is_empty());
        assert_eq!(watch.due(&[7], at), [7], "it was gone");
    }

    #[test]
    fn attempt_that_failed_is_repeated_after_waits_that_double() {
        let (mut watch, now) = (Watch::default(), Instant::now());
        let mut waits = Vec::new();
        for _ in 0..8 {
            watch.busy(7, 1, now);
            assert!(watch.due(&[7], now + TRIES.1).is_empty(), "it is being attached");
            waits.extend(watch.tried(7, 1, Some("it is traced".into()), now).map(|wait| wait.as_secs()));
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 600, 600]);
        assert_eq!(watch.failed(&facts(1), now), Some(("it is traced".into(), 600)));
        watch.looked(7, 1, now + Duration::from_secs(500));
        assert!(watch.due(&[7], now + Duration::from_secs(599)).is_empty());
        assert_eq!(watch.due(&[7], now + Duration::from_secs(600)), [7]);
        assert_eq!(watch.failed(&facts(2), now), None, "another process has that pid");
        watch.looked(7, 2, now);
        assert_eq!(watch.failed(&facts(1), now), None);
        assert_eq!(watch.tried(7, 2, None, now), None);
    }

    #[test]
    fn process_is_looked_at_often_again_when_rules_have_changed() {
        let (mut watch, now) = (Watch::default(), Instant::now());
        (0..5).for_each(|_| watch.looked(7, 1, now));
        watch.look_at_all(now);
        watch.looked(7, 1, now);
        assert!(watch.due(&[7], now + LOOKS.0 - Duration::from_millis(1)).is_empty());
        assert_eq!(watch.due(&[7], now + LOOKS.0), [7]);
    }

    #[test]
    fn member_rests_and_what_changes_soon_does_not() {
        let (mut watch, now) = (Watch::default(), Instant::now());
        let just_before = now + RESTS - Duration::from_millis(1);
        let attached = |watch: &mut Watch| assert_eq!(watch.tried(7, 1, None, now), None);
        let is_member = |watch: &mut Watch| watch.rests(7, 1, now);
        for note in [&attached as &dyn Fn(&mut Watch), &is_member] {
            watch.soon(7, 1, now);
            note(&mut watch);
            assert!(watch.due(&[7], just_before).is_empty());
            assert_eq!(watch.due(&[7], now + RESTS), [7]);
            watch.soon(7, 1, now);
            assert_eq!(watch.due(&[7], now), [7]);
        }
    }

    #[test]
    fn wait_after_failed_attempt_ends_and_is_of_that_process_alone() {
        let (mut watch, now) = (Watch::default(), Instant::now());
        let process = |start_ticks| ProcessId { pid: 7, start_ticks };
        assert!(!watch.waits(process(1), now));
        watch.tried(7, 1, Some("it is traced".into()), now);
        assert!(watch.waits(process(1), now) && !watch.waits(process(2), now));
        assert!(!watch.waits(process(1), now + TRIES.0));
    }
}
