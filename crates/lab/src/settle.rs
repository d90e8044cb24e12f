//! Waits until guests are idle, judged by the processor time that their processes use in each interval.

use crate::family::Family;
use host::ProcessId;
use std::thread;
use std::time::{Duration, Instant};

/// Definition of an idle guest.
#[derive(Clone, Copy, Debug)]
pub struct Idle {
    /// Length of an interval over which CPU use is measured.
    pub interval: Duration,
    /// Largest share of one CPU that an idle guest uses.
    pub share: f64,
    /// Number of consecutive intervals in which no guest may use more.
    pub intervals: u32,
}

impl Default for Idle {
    fn default() -> Self {
        // An idle guest under emulation uses 1% to 3% of a processor for its kernel's timer. A guest that starts
        // services uses whole processors.
        Self { interval: Duration::from_millis(500), share: 0.08, intervals: 3 }
    }
}

/// How the waiting ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settled {
    /// Whether all guests became idle before the time was over.
    pub idle: bool,
    /// Time that the waiting took.
    pub waited: Duration,
    /// Share of one CPU that the busiest guest used in the last interval.
    pub busiest: f64,
}

/// Waits until all guests, each given by its first process, are idle at once, or until `patience` is over.
/// `progress` gets the busiest guest's share of a CPU after each interval.
pub(crate) fn settle(guests: &[ProcessId], idle: Idle, patience: Duration, progress: &dyn Fn(f64)) -> Settled {
    let begin = Instant::now();
    let mut quiet = 0;
    let mut before = (Instant::now(), cpu_ticks(guests));
    let mut busiest = 0.0;
    while quiet < idle.intervals && begin.elapsed() < patience {
        thread::sleep(idle.interval);
        let now = (Instant::now(), cpu_ticks(guests));
        let seconds = (now.0 - before.0).as_secs_f64();
        let used = now.1.iter().zip(&before.1).map(|(now, before)| now.saturating_sub(*before)).max().unwrap_or(0);
        busiest = used as f64 / ticks_per_second() / seconds;
        progress(busiest);
        quiet = if busiest <= idle.share { quiet + 1 } else { 0 };
        before = now;
    }
    Settled { idle: quiet >= idle.intervals, waited: begin.elapsed(), busiest }
}

fn ticks_per_second() -> f64 {
    rustix::param::clock_ticks_per_second() as f64
}

/// Processor time of each guest, over all its processes, in clock ticks. Processes that have ended since the last
/// interval are missing from the sum.
fn cpu_ticks(guests: &[ProcessId]) -> Vec<u64> {
    let now = Family::now();
    guests.iter().map(|guest| now.cpu_ticks(guest)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::process::Command;

    const QUICK: Idle = Idle { interval: Duration::from_millis(100), share: 0.05, intervals: 3 };

    #[test]
    fn sleeping_process_is_idle_and_busy_grandchild_is_not() {
        let mut sleeper = Command::new("sleep").arg("60").spawn().expect("start sleep");
        let quiet = [ProcessId::of(sleeper.id()).expect("alive")];
        let settled = settle(&quiet, QUICK, Duration::from_secs(10), &|_| {});
        assert!(settled.idle && settled.busiest == 0.0, "{settled:?}");

        let script = "sh -c 'while :; do :; done' & wait";
        let mut busy = Command::new("sh").args(["-c", script]).spawn().expect("start a shell");
        let both = [quiet[0], ProcessId::of(busy.id()).expect("alive")];
        // It is busy only while it has a processor, which others may want. A look that saw it busy has not taken it for idle at once.
        let look = || {
            let most = Cell::new(0.0_f64);
            let settled = settle(&both, QUICK, Duration::from_millis(1500), &|share| most.set(most.get().max(share)));
            (settled, most.get())
        };
        let (settled, most) = (0..40).map(|_| look()).find(|(_, most)| *most > 0.05).unwrap_or_else(look);
        let family = Family::now().tree(&both[1]);
        for id in &family {
            assert!(id.kill());
        }
        busy.wait().expect("collect");
        assert!(sleeper.kill().and_then(|()| sleeper.wait()).is_ok());
        assert!(most > 0.05 && (!settled.idle || settled.waited > 4 * QUICK.interval), "{settled:?}, {most}");
        assert_eq!(family.len(), 2);
    }
}
