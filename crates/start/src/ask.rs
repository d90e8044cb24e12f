//! Talks to the helper (`pagefold-identity`) inside a guest, over a serial line that QEMU connects to a socket.

use crate::identities::{Identity, now, uuid};
use crate::machine::IDENTITY;
use anyhow::{Context, bail};
use host::ProcessId;
use identity::{Answer, Clock, LINE_BYTES};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Time after which the request is sent again, with the host's time as it is then: 2 s. It doubles each time, up to 8
/// s. While a guest boots, its helper does not read yet. On a busy host, the clock may be out of bounds when the answer
/// arrives. Requests that are sent faster than a guest makes its repairs would all be answered too late.
const AGAIN: Duration = Duration::from_secs(2);
const AGAIN_MAX: Duration = Duration::from_secs(8);
/// If several requests were sent: longest wait until the helper answers that the clock is right, 2 s.
const CLOCK_AGAIN: Duration = Duration::from_secs(2);
/// Interval between two attempts to connect: 1 ms.
const SOON: Duration = Duration::from_millis(1);
/// Most bytes of an incomplete line that are kept. A longer one is dropped.
const KEPT: usize = 2 * LINE_BYTES;

/// A connection to the helper of one guest.
pub(crate) struct Helper {
    stream: UnixStream,
    heard: Vec<u8>,
    /// Number of requests that were sent and have not been answered.
    open: u32,
}

impl Helper {
    /// Connects to the helper's socket of the machine in `dir`, as soon as its QEMU listens.
    pub(crate) fn connect(dir: &Path, process: &ProcessId, deadline: Instant) -> anyhow::Result<Self> {
        let socket = dir.join(IDENTITY);
        loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => return Ok(Self { stream, heard: Vec::new(), open: 0 }),
                Err(_) if process.is_alive() && Instant::now() < deadline => sleep(SOON),
                Err(e) => return Err(e).with_context(|| format!("cannot connect to {}", socket.display())),
            }
        }
    }

    /// Sends the request to take on an identity.
    pub(crate) fn send(&mut self, identity: &Identity) -> anyhow::Result<()> {
        self.stream.set_write_timeout(Some(AGAIN))?;
        self.open += 1;
        self.stream.write_all(identity.request().line().as_bytes()).context("the guest takes no request")
    }

    /// Waits until the helper answers that the guest has taken on this identity, whose request was sent; the request is
    /// repeated meanwhile. `None` if nobody answers until `deadline`.
    pub(crate) fn confirm(&mut self, identity: &Identity, deadline: Instant) -> anyhow::Result<Option<Answer>> {
        let (mut wrong, mut again) = (None, AGAIN);
        loop {
            let until = (Instant::now() + again).min(deadline);
            while let Some(answer) = self.answer(until)? {
                match identity.request().check(&answer, now()) {
                    Ok(()) => {
                        // Requests that the guest has yet to read have the time at which they were sent.
                        if self.open > 1 {
                            self.set_clock(deadline.min(Instant::now() + CLOCK_AGAIN))?;
                        }
                        return Ok(Some(answer));
                    }
                    // The answer to an earlier request.
                    Err(_) if answer.nonce != identity.nonce => {}
                    Err(why) => {
                        wrong = Some(why);
                        self.open = self.open.saturating_sub(1);
                        if self.open == 0 {
                            break;
                        }
                    }
                }
            }
            if Instant::now() >= deadline {
                return wrong.map_or(Ok(None), |why| bail!("{why}"));
            }
            again = (again * 2).min(AGAIN_MAX);
            // A guest that does not read has no room for the request, which is no reason to stop waiting.
            let _ = self.send(identity);
        }
    }

    /// Has the helper set the clock of a guest that stood still. Returns whether it has answered that it is right.
    pub(crate) fn set_clock(&mut self, deadline: Instant) -> anyhow::Result<bool> {
        let nonce = uuid();
        while Instant::now() < deadline {
            let clock = Clock { nonce: nonce.clone(), time: now() };
            self.stream.set_write_timeout(Some(AGAIN))?;
            // A guest that does not read has no room for the request, which is no reason to stop waiting.
            let _ = self.stream.write_all(clock.line().as_bytes());
            let until = (Instant::now() + AGAIN).min(deadline);
            while let Some(answer) = self.answer(until)? {
                if clock.is_set(&answer, now()) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// The helper's next answer; `None` if there is none until `until`.
    fn answer(&mut self, until: Instant) -> anyhow::Result<Option<Answer>> {
        loop {
            while let Some(end) = self.heard.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.heard.drain(..=end).collect();
                if let Some(answer) = Answer::parse(&String::from_utf8_lossy(&line)) {
                    return Ok(Some(answer));
                }
            }
            if self.heard.len() > KEPT {
                self.heard.clear();
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut chunk = [0; LINE_BYTES];
            match self.stream.read(&mut chunk) {
                Ok(0) => bail!("QEMU has ended"),
                Ok(count) => self.heard.extend(&chunk[..count]),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
                Err(e) => return Err(e).context("the guest's line is broken"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use identity::Request;
    use std::io::{BufRead, BufReader};
    use std::thread;

    /// A host's end, and a helper that answers each request by `answer`, with other lines around it.
    fn talk(answer: impl Fn(Request) -> Answer + Send + 'static) -> Helper {
        let (host, guest) = UnixStream::pair().expect("a socket pair");
        thread::spawn(move || {
            let mut guest_writes = guest.try_clone().expect("duplicate");
            for line in BufReader::new(guest).lines().map_while(Result::ok) {
                if let Some(request) = Request::parse(&line) {
                    let text = format!("[ 0.1] kernel says\n{}rest", answer(request).line());
                    let _ = guest_writes.write_all(text.as_bytes());
                }
            }
        });
        Helper { stream: host, heard: Vec::new(), open: 0 }
    }

    #[test]
    fn clock_of_a_guest_that_stood_still_is_set_or_nobody_knows_how() {
        let talk_clock = |behind: u64| {
            let (host, guest) = UnixStream::pair().expect("a socket pair");
            thread::spawn(move || {
                let mut guest_writes = guest.try_clone().expect("duplicate");
                for line in BufReader::new(guest).lines().map_while(Result::ok) {
                    let Some(clock) = Clock::parse(&line) else { continue };
                    let (text, time) = (String::new, clock.time - Duration::from_secs(behind));
                    let (machine_id, boot_id, hostname, random) = (text(), text(), text(), text());
                    let failed = Vec::new();
                    let answer = Answer { nonce: clock.nonce, machine_id, boot_id, hostname, time, random, failed };
                    let _ = guest_writes.write_all(answer.line().as_bytes());
                }
            });
            let mut helper = Helper { stream: host, heard: Vec::new(), open: 0 };
            helper
                .set_clock(Instant::now() + Duration::from_millis(if behind == 0 { 60_000 } else { 200 }))
                .expect("a line")
        };
        assert_eq!([talk_clock(0), talk_clock(60)], [true, false]);
    }

    /// Seen: a clone's clock was a second behind. The guest made its repairs once more, for a request that had waited.
    #[test]
    fn clock_is_set_once_more_after_requests_that_have_waited() {
        let (host, guest) = UnixStream::pair().expect("a socket pair");
        let hears = thread::spawn(move || {
            let (mut guest_writes, mut requests, mut clocks) = (guest.try_clone().expect("duplicate"), 0, 0);
            for line in BufReader::new(guest).lines().map_while(Result::ok) {
                requests += u32::from(Request::parse(&line).is_some());
                let clock = Clock::parse(&line);
                clocks += u32::from(clock.is_some());
                // The first is answered when the second is there.
                let answer = Request::parse(&line).filter(|_| requests == 2).map(honest);
                let text = String::new;
                let (machine_id, boot_id, hostname, random) = (text(), text(), text(), text());
                let as_set = |clock: Clock| {
                    let (nonce, time, failed) = (clock.nonce, clock.time, Vec::new());
                    Answer { nonce, machine_id, boot_id, hostname, time, random, failed }
                };
                let answer = answer.or_else(|| clock.map(as_set));
                answer.into_iter().for_each(|answer| drop(guest_writes.write_all(answer.line().as_bytes())));
            }
            clocks
        });
        let answer = confirm(Helper { stream: host, heard: Vec::new(), open: 0 }, 20_000).expect("an answer");
        assert!(answer.is_some());
        assert_eq!(hears.join().expect("its end"), 1, "clocks that were set");
    }

    fn honest(request: Request) -> Answer {
        Answer {
            nonce: request.nonce.clone(),
            machine_id: request.machine_id,
            boot_id: request.nonce,
            hostname: request.hostname,
            time: request.time,
            random: "r".into(),
            failed: Vec::new(),
        }
    }

    fn confirm(mut helper: Helper, ms: u64) -> anyhow::Result<Option<Answer>> {
        let identity = Identity::new("web-1", None);
        helper.send(&identity)?;
        helper.confirm(&identity, Instant::now() + Duration::from_millis(ms))
    }

    #[test]
    fn honest_answer_confirms() {
        let answer = confirm(talk(honest), 20_000).expect("an answer").expect("a right one");
        assert_eq!(answer.hostname, "web-1");
    }

    #[test]
    fn answers_of_others_and_wrong_ones_do_not_confirm() {
        let stale = |request| Answer { nonce: "another".into(), ..honest(request) };
        assert!(confirm(talk(stale), 300).expect("nobody answers").is_none());
        let same = |request| Answer { machine_id: "0".repeat(32), ..honest(request) };
        assert!(confirm(talk(same), 300).expect_err("not repaired").to_string().contains("machine-id"));
        let late = |request: Request| Answer { time: request.time - Duration::from_secs(60), ..honest(request) };
        assert!(confirm(talk(late), 300).expect_err("a wrong clock").to_string().contains("clock"));
    }

    #[test]
    fn silence_and_the_end_of_the_guest_are_told_apart() {
        let (host, guest) = UnixStream::pair().expect("a socket pair");
        let silent = Helper { stream: host.try_clone().expect("duplicate"), heard: Vec::new(), open: 0 };
        assert!(confirm(silent, 100).expect("nobody answers").is_none());
        drop(guest);
        assert!(confirm(Helper { stream: host, heard: Vec::new(), open: 0 }, 5000).is_err());
    }
}
