//! Finding guests that do nothing, and parking them.

use super::{park_all, text};
use api::name;
use api::place::Place;
use cli::note;
use guest::{Glob, Guest, GuestKind};
use host::ProcessId;
use lend::{NOTES_WITHIN, Parking};
use std::fs;
use std::time::{Duration, Instant};

/// Most processor time that an idle guest uses: 1/20 of one core. Its agent and its VMM use some even if nothing
/// happens inside.
const USED_PART: u32 = 20;
/// Most processor time that an idle guest uses or waits for: 1/2 of one core. On a busy host an agent's short wake-ups
/// wait for a processor many times as long as they run. A guest that works and gets no processor waits all the time.
const WANTED_PART: u32 = 2;
/// Time between two readings of guests' processor times: 1 minute. A guest is idle only if it was idle between all
/// readings.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// Most guests that are parked after one reading: 8. Others wait for the next reading.
const AT_ONCE: usize = 8;
/// Longest time until this command notices an interrupt: 100 ms.
const WAKE_EVERY: Duration = Duration::from_millis(100);

/// Guests that are meant: all, unless some are named.
#[derive(clap::Args)]
pub struct Meant {
    /// Of this group alone; may be given more than once
    #[arg(long, value_name = "GROUP", requires = "idle", value_parser = name::parse_group)]
    group: Vec<String>,
    /// Those alone whose id or name matches; may be given more than once
    #[arg(long, value_name = "GLOB", requires = "idle")]
    only: Vec<Glob>,
    /// Most guests that are parked at a time
    #[arg(long, value_name = "N", requires = "idle")]
    most: Option<usize>,
}

impl Meant {
    /// Whether a guest is a QEMU VM or a program, and matches the options.
    fn means(&self, guest: &Guest) -> bool {
        let of_group = guest.facts.folded_in.as_deref().unwrap_or(&guest.group);
        let is_named = |glob: &Glob| glob.matches(&guest.id) || glob.matches(&guest.name);
        matches!(guest.kind, GuestKind::Qemu | GuestKind::Process)
            && (self.group.is_empty() || self.group.iter().any(|group| group == of_group))
            && (self.only.is_empty() || self.only.iter().any(is_named))
    }

    /// Number of guests that may be parked in addition to `parked` ones.
    pub fn room(&self, parked: usize) -> usize {
        self.most.map_or(usize::MAX, |most| most.saturating_sub(parked))
    }
}

/// The reason for parking an idle guest, for the journal.
pub fn words(idle_s: u64) -> String {
    format!("it was idle for {idle_s} s")
}

/// A guest that may be idle, and its processor times ([`times_of`]) at the last reading.
struct Candidate {
    guest: Guest,
    process: ProcessId,
    times: [Duration; 2],
    /// The time since which the guest has been idle.
    since: Instant,
}

impl Candidate {
    /// A guest with its present processor times; `None` if it has ended or is stopped.
    fn new(guest: Guest, now: Instant) -> Option<Self> {
        let process = ProcessId { pid: *guest.pids.first()?, start_ticks: guest.facts.start_ticks };
        Some(Self { process, times: times_of(&process)?, since: now, guest })
    }

    /// Whether the guest has used, and waited for, little processor time in the `time` since the reading `before`.
    fn is_idle_since(&self, before: &Self, time: Duration) -> bool {
        is_little([0, 1].map(|at| self.times[at].saturating_sub(before.times[at])), time)
    }
}

/// Whether a guest is idle that in `time` has used the processor for `used`, and has used or waited for it for
/// `wanted`.
fn is_little([used, wanted]: [Duration; 2], time: Duration) -> bool {
    used <= time / USED_PART && wanted <= time / WANTED_PART
}

/// Guests with their processor times at the last reading, and the time of this reading.
struct Watch {
    known: Vec<Candidate>,
    at: Instant,
}

impl Watch {
    fn new() -> Self {
        Self { known: Vec::new(), at: Instant::now() }
    }

    /// Reads the processor times of `guests`, and forgets all others.
    fn look(&mut self, guests: impl Iterator<Item = Guest>) {
        let now = Instant::now();
        let time = now - self.at;
        let mut all: Vec<Candidate> = guests.filter_map(|guest| Candidate::new(guest, now)).collect();
        for one in &mut all {
            let before = self.known.iter().find(|before| before.process == one.process);
            if let Some(before) = before.filter(|before| one.is_idle_since(before, time)) {
                one.since = before.since;
            }
        }
        (self.known, self.at) = (all, now);
    }

    /// Guests that have been idle for `time`, the longest idle one first.
    fn idle_for(&self, time: Duration) -> Vec<Guest> {
        let mut idle: Vec<&Candidate> = self.known.iter().filter(|one| self.at - one.since >= time).collect();
        idle.sort_by_key(|one| one.since);
        idle.into_iter().map(|one| one.guest.clone()).collect()
    }

    /// Notes that a guest could not be parked. Its idle time begins anew before the next attempt.
    fn begin_anew(&mut self, guest: &str) {
        let at = self.at;
        self.known.iter_mut().filter(|one| one.guest.id == guest).for_each(|one| one.since = at);
    }
}

/// Sleeps for `time`, or until this process is interrupted.
fn rest(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end && host::interrupted().is_none() {
        std::thread::sleep(WAKE_EVERY.min(end.saturating_duration_since(Instant::now())));
    }
}

/// Watches guests that `meant` selects, for `time`. Returns those that were idle all the time.
pub fn found(
    find: &dyn Fn() -> anyhow::Result<Vec<Guest>>,
    meant: &Meant,
    time: Duration,
) -> anyhow::Result<Vec<Guest>> {
    let mut watch = Watch::new();
    let look = |watch: &mut Watch| {
        watch.look(find()?.into_iter().filter(|guest| meant.means(guest)));
        anyhow::Ok(())
    };
    look(&mut watch)?;
    let end = Instant::now() + time;
    while Instant::now() < end && host::interrupted().is_none() {
        rest(LOOK_EVERY.min(end.saturating_duration_since(Instant::now())));
        look(&mut watch)?;
    }
    Ok(watch.idle_for(time))
}

/// Parks guests that `meant` selects as soon as they have been idle for `time`, until this process is interrupted or
/// its standard input closes.
///
/// # Errors
/// Notes of parked guests cannot be used.
pub fn park_on(
    find: &dyn Fn() -> anyhow::Result<Vec<Guest>>,
    meant: &Meant,
    time: Duration,
    place: &Place,
    patience: Duration,
) -> anyhow::Result<()> {
    let own = ProcessId::of(std::process::id())?;
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        // This process then resumes guests that it is parking, and ends.
        own.terminate();
    });
    let (mut watch, why) = (Watch::new(), words(time.as_secs()));
    while host::interrupted().is_none() {
        let found = find();
        let parking = Parking::lock(place.dir(), NOTES_WITHIN)?;
        let parked: Vec<ProcessId> = parking.list()?.into_iter().map(|parked| parked.process).collect();
        let is_free = |process: ProcessId| !parked.contains(&process) && parking.holder_of(process).is_none();
        let process = |guest: &Guest| guest.pids.first().copied().and_then(|pid| ProcessId::of(pid).ok());
        let is_meant = |guest: &Guest| meant.means(guest) && process(guest).is_some_and(is_free);
        match found {
            Ok(guests) => watch.look(guests.into_iter().filter(is_meant)),
            // The service may be starting again.
            Err(e) => note!("idle guests: {e:#}"),
        }
        drop(parking);
        let mut idle = watch.idle_for(time);
        idle.truncate(meant.room(parked.len()).min(AT_ONCE));
        for done in park_all(place, &idle, patience, &why) {
            match (done.problem, done.memory) {
                (Some(problem), _) => {
                    note!("{problem}");
                    watch.begin_anew(&done.guest);
                }
                (None, Some(memory)) => note!("{}", text(&done.guest, &memory).trim_end().replace('\n', "; ")),
                (None, None) => {}
            }
        }
        rest(LOOK_EVERY.min(time / 2));
    }
    Ok(())
}

/// Two processor times of a process: what it has used, ended threads included, and what its present threads have used
/// or waited for. `None` if the process has ended or is stopped, or the kernel does not tell.
fn times_of(process: &ProcessId) -> Option<[Duration; 2]> {
    let stat = process.stat().filter(|stat| !matches!(stat.state, b'T' | b't'))?;
    let ticks = stat.cpu_ticks.saturating_mul(1000);
    let had = Duration::from_millis(ticks.checked_div(rustix::param::clock_ticks_per_second())?);
    let threads = fs::read_dir(format!("/proc/{}/task", process.pid)).ok()?.flatten();
    // A thread that ends meanwhile is left out.
    let all: Vec<Duration> = threads
        .filter_map(|thread| had_or_waited_for(&fs::read_to_string(thread.path().join("schedstat")).ok()?))
        .collect();
    (!all.is_empty()).then(|| [had, all.into_iter().sum()])
}

/// Sum of the first two figures of a `schedstat`: time on the processor and time in the run queue, in nanoseconds.
fn had_or_waited_for(text: &str) -> Option<Duration> {
    let mut figures = text.split_ascii_whitespace().map(|figure| figure.parse::<u64>().ok());
    let (had, waited) = (figures.next()??, figures.next()??);
    Some(Duration::from_nanos(had.saturating_add(waited)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_is_idle_that_waits_a_little_for_processors_and_not_one_that_never_gets_them() {
        let is_idle = |used, wanted| is_little([used, wanted].map(Duration::from_millis), Duration::from_secs(1));
        assert!(is_idle(50, 50) && is_idle(5, 400), "its agent wakes up now and then");
        assert!(!is_idle(51, 51) && !is_idle(1, 900), "it works, or would");
    }

    #[test]
    fn time_that_others_had_counts_as_wanted() {
        assert_eq!(had_or_waited_for("264 113 1524\n"), Some(Duration::from_nanos(377)));
        assert_eq!(["", "1", "x 1"].map(had_or_waited_for), [None; 3]);
        let own = ProcessId::of(std::process::id()).unwrap();
        assert!(times_of(&own).is_some_and(|[_, wanted]| !wanted.is_zero()));
        assert_eq!(times_of(&ProcessId { start_ticks: 1, ..own }), None);
    }
}
