//! Guests that do nothing.

use guest::{Guest, GuestKind};
use host::ProcessId;
use std::fs;
use std::time::{Duration, Instant};

/// Most processor time that an idle guest has or waits for, as a part of one core: 1/20. Its agent and its VMM take some when nothing
/// happens inside.
const IDLE_PART: u32 = 20;
/// Time between two looks: 1 minute. A guest has to be idle between all of them.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// Longest wait before it is seen that this command was interrupted: 100 ms.
const WAKE_EVERY: Duration = Duration::from_millis(100);

/// A guest that may be idle, and its times at the last look.
struct Candidate {
    guest: Guest,
    process: ProcessId,
    times: [Duration; 2],
}

/// Guests of a group, or of all, that are idle for so long: VMs with QMP, and programs that are members.
pub fn found(
    find: &dyn Fn() -> anyhow::Result<Vec<Guest>>,
    group: Option<&str>,
    time: Duration,
) -> anyhow::Result<Vec<Guest>> {
    let is_meant = |guest: &Guest| {
        let of_group = guest.facts.folded_in.as_deref().unwrap_or(&guest.group);
        matches!(guest.kind, GuestKind::Qemu | GuestKind::Process) && group.is_none_or(|group| group == of_group)
    };
    let candidate = |guest: Guest| {
        let process = ProcessId { pid: *guest.pids.first()?, start_ticks: guest.facts.start_ticks };
        Some(Candidate { process, times: times_of(&process)?, guest })
    };
    let mut all: Vec<Candidate> = find()?.into_iter().filter(is_meant).filter_map(candidate).collect();
    let end = Instant::now() + time;
    while Instant::now() < end && host::interrupted().is_none() {
        let began = Instant::now();
        let look = end.min(began + LOOK_EVERY);
        while Instant::now() < look && host::interrupted().is_none() {
            std::thread::sleep(WAKE_EVERY);
        }
        let most = began.elapsed() / IDLE_PART;
        all.retain_mut(|one| one.is_idle(most));
    }
    Ok(all.into_iter().map(|one| one.guest).collect())
}

impl Candidate {
    /// Whether it has had, and wanted, so much processor time at most since the last look.
    fn is_idle(&mut self, most: Duration) -> bool {
        let Some(times) = times_of(&self.process) else { return false };
        let before = std::mem::replace(&mut self.times, times);
        times.iter().zip(before).all(|(time, before)| time.saturating_sub(before) <= most)
    }
}

/// Processor time of a process, with threads that have ended; and what its threads have had or waited for, since others had it. `None`
/// where it has ended, stands still already, or the kernel does not tell.
fn times_of(process: &ProcessId) -> Option<[Duration; 2]> {
    let stat = process.stat().filter(|stat| !matches!(stat.state, b'T' | b't'))?;
    let ticks = stat.cpu_ticks.saturating_mul(1000);
    let had = Duration::from_millis(ticks.checked_div(rustix::param::clock_ticks_per_second())?);
    let threads = fs::read_dir(format!("/proc/{}/task", process.pid)).ok()?.flatten();
    // Another thread may end at any time.
    let all: Vec<Duration> = threads
        .filter_map(|thread| had_or_waited_for(&fs::read_to_string(thread.path().join("schedstat")).ok()?))
        .collect();
    (!all.is_empty()).then(|| [had, all.into_iter().sum()])
}

/// The first two figures of a `schedstat`.
fn had_or_waited_for(text: &str) -> Option<Duration> {
    let mut figures = text.split_ascii_whitespace().map(|figure| figure.parse::<u64>().ok());
    let (had, waited) = (figures.next()??, figures.next()??);
    Some(Duration::from_nanos(had.saturating_add(waited)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_that_others_had_counts_as_wanted() {
        assert_eq!(had_or_waited_for("264 113 1524\n"), Some(Duration::from_nanos(377)));
        assert_eq!(["", "1", "x 1"].map(had_or_waited_for), [None; 3]);
        let own = ProcessId::of(std::process::id()).unwrap();
        assert!(times_of(&own).is_some_and(|[_, wanted]| !wanted.is_zero()));
        assert_eq!(times_of(&ProcessId { start_ticks: 1, ..own }), None);
    }
}
