//! Bounds the share of this process's processor time that a caller gets. All callers without rights count as one
//! caller.
//!
//! ```text
//!   a request --> waits for its caller's turn --> is answered --> the caller's next turns: later by 10 times that time
//! ```
//!
//! While a request is being answered, it is taken to cost as much as the caller's last one. So a caller that has used
//! up [`AT_ONCE`] gets a tenth of the time at most, and its answers come later and later. A request that would wait for
//! longer than [`MOST_WAIT`] waits for this time and is refused. Requests of other callers are not delayed.

use crate::access::CallerId;
use rustix::time::{ClockId, clock_gettime};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// Part of this process's time that a caller may take: 1 in 10.
const PART: u32 = 10;
/// Every request counts for 200 us at least, because not all of its work is measured.
const LEAST: Duration = Duration::from_micros(200);
/// A caller has to wait once its share is used up for more than 500 ms ahead: when it has just taken 50 ms of processor
/// time.
const AT_ONCE: Duration = Duration::from_millis(500);
/// Longest wait for a turn: 5 s.
pub const MOST_WAIT: Duration = Duration::from_secs(5);

/// How far all callers have used up their shares. A caller without rights is `None`.
#[derive(Debug, Default)]
pub struct Paces(Mutex<BTreeMap<Option<CallerId>, Pace>>);

/// How far one caller has used up its share.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// The instant until which the caller has used up its share: each request moves it on by [`PART`] times the time
    /// that the request took.
    end: Instant,
    /// The time that the caller's last answer took.
    last: Duration,
}

/// A caller's turn to have a request answered: the wait before it, and the time that the answer is expected to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Time to wait before the request is answered.
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

    /// Counts the time that an answer has taken, in place of the time that was expected.
    pub fn took(&self, caller: Option<&CallerId>, turn: Turn, took: Duration, now: Instant) {
        self.with(caller, now, |pace| {
            pace.last = took.max(LEAST);
            let end = pace.end + pace.last * PART;
            pace.end = end.checked_sub(turn.expected * PART).unwrap_or(end);
        });
    }
}

/// A future that measures the processor time which the polling thread uses in its polls. Polls of other futures in
/// between do not count.
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
        // An answer has taken long. Its time counts, and the next ones are expected to take as long.
        let turn = paces.turn(Some(&one), now).unwrap();
        paces.took(Some(&one), turn, LEAST * 10, now);
        assert_eq!(wait(Some(&one), now), Some(LEAST * PART * 12));
        let turn = paces.turn(Some(&one), now).unwrap();
        assert_eq!(turn.wait, LEAST * PART * 22);
        // If an answer takes less time than was expected, the difference does not count.
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
