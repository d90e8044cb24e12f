//! The helper's answer: a line that says what the guest is after the repairs.

use crate::request::time;
use crate::words::Words;
use crate::{ANSWERS, VERSION};
use std::time::Duration;

/// The helper's account of what the guest is when all repairs are done, read back from the guest's kernel and files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The nonce of the request.
    pub nonce: String,
    /// Content of `/etc/machine-id`.
    pub machine_id: String,
    /// Content of `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
    /// The kernel's name for the machine.
    pub hostname: String,
    /// Wall clock.
    pub time: Duration,
    /// A number that the kernel's generator drew after its repair (`/proc/sys/kernel/random/uuid`).
    pub random: String,
    /// Repairs that failed, each with its reason.
    pub failed: Vec<String>,
}

impl Answer {
    /// The answer as text. A newline in front of it ends what was written to the device before.
    pub fn line(&self) -> String {
        let ascii = |text: &str| text.replace(|c: char| !c.is_ascii(), "?");
        let plain = |text: &str| ascii(text).split_ascii_whitespace().collect::<Vec<_>>().join("-");
        let mut line = format!("\n{ANSWERS} {VERSION}");
        let mut word = |name: &str, value: &str| line.push_str(&format!(" {name}={}", plain(value)));
        word("nonce", &self.nonce);
        word("machine-id", &self.machine_id);
        word("boot-id", &self.boot_id);
        word("hostname", &self.hostname);
        word("time", &format!("{}.{:09}", self.time.as_secs(), self.time.subsec_nanos()));
        word("random", &self.random);
        self.failed.iter().for_each(|failed| word("failed", failed));
        line.truncate(crate::LINE_BYTES - 1);
        line.push('\n');
        line
    }

    /// Reads a line; `None` if it is no answer of a helper.
    pub fn parse(line: &str) -> Option<Self> {
        let words = Words::behind(ANSWERS, line.trim())?;
        let text = |name: &str| words.get(name).map(str::to_owned);
        Some(Self {
            nonce: text("nonce")?,
            machine_id: text("machine-id")?,
            boot_id: text("boot-id")?,
            hostname: text("hostname")?,
            time: time(words.get("time")?)?,
            random: text("random")?,
            failed: words.all("failed").map(str::to_owned).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_read_as_it_was_written() {
        let answer = Answer {
            nonce: "n".into(),
            machine_id: "m".into(),
            boot_id: "b".into(),
            hostname: "h".into(),
            time: Duration::new(7, 5),
            random: "r".into(),
            failed: vec!["clock:not-permitted".into(), "ssh:no".into()],
        };
        assert_eq!(Answer::parse(&answer.line()), Some(answer));
        for bad in ["", "@pagefold-identity 1", "@pagefold-identity 1 nonce", "pagefold-identity 1 nonce=x"] {
            assert_eq!(Answer::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn reasons_are_one_word_each_and_bounded() {
        let answer = Answer {
            nonce: "n".into(),
            machine_id: "a\nb  c".into(),
            boot_id: String::new(),
            hostname: String::new(),
            time: Duration::ZERO,
            random: String::new(),
            failed: vec!["é".repeat(10), "x".repeat(2000)],
        };
        let line = answer.line();
        assert!(line.len() <= crate::LINE_BYTES);
        assert_eq!(Answer::parse(&line).map(|answer| answer.machine_id), Some("a-b-c".into()));
    }
}
