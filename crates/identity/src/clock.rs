//! The host's line for a guest that was paused: only its clock is set.

use crate::answer::Answer;
use crate::request::{CLOCK, time};
use crate::words::Words;
use crate::{ASKS_CLOCK, VERSION};
use std::time::Duration;

/// The host's wall clock, for a guest that was paused. A helper that does not know this line does not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clock {
    /// UUID of this request, which the answer must bear.
    pub nonce: String,
    /// Time since 1970 as the host has it when it sends the line.
    pub time: Duration,
}

impl Clock {
    /// The line, with an empty one in front of it.
    pub fn line(&self) -> String {
        let (seconds, nanos) = (self.time.as_secs(), self.time.subsec_nanos());
        format!("\n{ASKS_CLOCK} {VERSION} nonce={} time={seconds}.{nanos:09}\n", self.nonce)
    }

    /// Reads a line; `None` if it is no such request.
    pub fn parse(line: &str) -> Option<Self> {
        let words = Words::behind(ASKS_CLOCK, line)?;
        Some(Self { nonce: words.get("nonce")?.to_owned(), time: time(words.get("time")?)? })
    }

    /// Whether an answer that has arrived just now, at the host's time `now`, says that the clock is right.
    pub fn is_set(&self, answer: &Answer, now: Duration) -> bool {
        answer.nonce == self.nonce && answer.failed.is_empty() && now.abs_diff(answer.time) <= CLOCK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_read_as_it_was_written_and_is_no_other_request() {
        let clock = Clock { nonce: "1d0c1f6e".into(), time: Duration::new(1_800_000_000, 42) };
        let line = clock.line();
        assert!(line.starts_with('\n') && line.ends_with('\n'));
        assert_eq!(Clock::parse(line.trim()), Some(clock));
        assert_eq!((crate::Request::parse(line.trim()), Clock::parse("pagefold-clock 1 nonce=x")), (None, None));
    }

    #[test]
    fn answer_is_believed_with_its_nonce_and_the_right_time() {
        let clock = Clock { nonce: "n".into(), time: Duration::from_secs(100) };
        let answer = |nonce: &str, seconds, failed: &[&str]| Answer {
            nonce: nonce.into(),
            machine_id: String::new(),
            boot_id: String::new(),
            hostname: String::new(),
            time: Duration::from_secs(seconds),
            random: String::new(),
            failed: failed.iter().map(|text| (*text).to_owned()).collect(),
        };
        let is_set = |answer| clock.is_set(&answer, Duration::from_millis(100_300));
        assert!(is_set(answer("n", 100, &[])));
        assert!(
            !is_set(answer("m", 100, &[])) && !is_set(answer("n", 99, &[])) && !is_set(answer("n", 100, &["clock:x"]))
        );
    }
}
