//! The share of this process's time that a caller gets. Callers without a right are one caller.
//!
//! ```text
//!   a request --> waits for its caller's turn --> is answered --> the turn after the next is as much later as that took, tenfold
//! ```
//!
//! While a request is being answered, it counts as much as the caller's last one. So one caller takes a tenth of the
//! time at most, once it has used up [`AT_ONCE`]. Answers to it come later and later. A request that would wait for too
//! long waits for [`MOST_WAIT`], and is refused. Others do not wait for it.

use crate::access::CallerId;
use rustix::time::{ClockId, clock_gettime};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// Part of this process's time that a caller may take: 1 in 10.
const PART: u32 = 10;
/// Least time that a request counts, because not all of its work is measured: 200 us.
const LEAST: Duration = Duration::from_micros(200);
/// Time that a caller may use up before it has to wait, times [`PART`]: 500 ms.
const AT_ONCE: Duration = Duration::from_millis(500);
/// Longest wait for a turn: 5 s.
pub const MOST_WAIT: Duration = Duration::from_secs(5);

/// The turns of all callers.
#[derive(Debug, Default)]
pub struct Paces(Mutex<BTreeMap<Option<CallerId>, Pace>>);

/// The turns of one caller.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// The instant until which the caller has used up its share: each request moves it on by [`PART`] times the time it
    /// took.
    end: Instant,
    /// The time that the caller's last answer took.
    last: Duration,
}

/// A turn: the wait before it, and the time that it counts for until the answer's own time is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Time until the turn.
    pub wait: Duration,
    expected: Duration,
}

impl Paces {
    fn with<T>(&self, caller: Option<&CallerId>, now: Instant, work: impl FnOnce(&mut Pace) -> T) -> T {
        let mut paces = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        paces.retain(|of, pace| pace.end > now || of.as_ref() == caller);
        let pace = paces.entry(caller.cloned()).or_insert(Pace { end: now, last: LEAST });
        pace.end = pace.end.max(now);
        work(pace)
    }

    /// The next turn of a caller; `None` if the wait would be longer than [`MOST_WAIT`].
    pub fn turn(&self, caller: Option<&CallerId>, now: Instant) -> Option<Turn> {
        self.with(caller, now, |pace| {
            let wait = pace.end.saturating_duration_since(now + AT_ONCE);
            (wait <= MOST_WAIT).then(|| {
                pace.end += pace.last * PART;
                Turn { wait, expected: pace.last }
            })
        })
    }

    /// Notes the time that the answer of a turn took, in place of the expected time.
    pub fn took(&self, caller: Option<&CallerId>, turn: Turn, took: Duration, now: Instant) {
        self.with(caller, now, |pace| {
            pace.last = took.max(LEAST);
            let end = pace.end + pace.last * PART;
            pace.end = end.checked_sub(turn.expected * PART).unwrap_or(end);
        });
    }
}

/// A future, and the processor time that this thread has used in its polls. Other requests' polls in between do not
/// count.
pub struct Timed<F> {
    work: Pin<Box<F>>,
    took: Duration,
}

impl<F> Timed<F> {
    /// Measures this work.
    pub fn new(work: F) -> Self {
        Self { work: Box::pin(work), took: Duration::ZERO }
    }
}

impl<F: Future> Future for Timed<F> {
    type Output = (F::Output, Duration);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let before = thread_time();
        let polled = self.work.as_mut().poll(context);
        self.took += thread_time().saturating_sub(before);
        polled.map(|output| (output, self.took))
    }
}

/// The processor time that this thread has used.
fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caller_waits_for_what_it_has_taken_and_others_do_not() {
        let (paces, now) = (Paces::default(), Instant::now());
        let (one, other) = (CallerId::User(1), CallerId::User(2));
        let wait = |caller, now| paces.turn(caller, now).map(|turn| turn.wait);
        let at_once = AT_ONCE.as_micros() / (LEAST * PART).as_micros();
        for n in 0..=at_once {
            assert_eq!(wait(Some(&one), now), Some(Duration::ZERO), "request {n}");
        }
        assert_eq!(wait(Some(&one), now), Some(LEAST * PART));
        assert_eq!((wait(Some(&other), now), wait(None, now)), (Some(Duration::ZERO), Some(Duration::ZERO)));
        // One answer took long: it counts, and the next are expected to take as long.
        let turn = paces.turn(Some(&one), now).unwrap();
        paces.took(Some(&one), turn, LEAST * 10, now);
        assert_eq!(wait(Some(&one), now), Some(LEAST * PART * 12));
        let turn = paces.turn(Some(&one), now).unwrap();
        assert_eq!(turn.wait, LEAST * PART * 22);
        // Time that was expected and not taken is given back.
        paces.took(Some(&one), turn, LEAST, now);
        assert_eq!(wait(Some(&one), now), Some(LEAST * PART * 23));
        let turn = paces.turn(Some(&one), now).unwrap();
        paces.took(Some(&one), turn, Duration::from_secs(1), now);
        assert_eq!((wait(Some(&one), now), wait(Some(&one), now)), (None, None), "too long, and no longer");
        let later = now + Duration::from_secs(20);
        assert_eq!(wait(Some(&one), later), Some(Duration::ZERO), "it has waited long enough");
        assert_eq!(paces.0.lock().unwrap().len(), 1, "callers that owe nothing are forgotten");
    }

    #[tokio::test]
    async fn waiting_is_no_work() {
        let idle = Timed::new(tokio::time::sleep(Duration::from_millis(100)));
        assert!(idle.await.1 < Duration::from_millis(50));
        let preempted = Timed::new(async { std::thread::sleep(Duration::from_millis(100)) });
        assert!(preempted.await.1 < Duration::from_millis(50));
        let busy = Timed::new(async {
            let end = thread_time() + Duration::from_millis(20);
            while thread_time() < end {}
        });
        assert!(busy.await.1 >= Duration::from_millis(20));
    }
}
