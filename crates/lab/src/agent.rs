//! Runs commands inside a QEMU guest over its second serial port. This is the host's side; `recipes/agent.sh` is the
//! guest's, and describes the protocol. A serial port needs no driver module, so it works with any kernel and early in
//! the boot.
//!
//! QEMU accepts one client at a time; others wait in the socket's queue. The serial line may still hold an answer for
//! which a former client did not wait. So each request has a random number, and the reader skips everything before the
//! answer with that number.

use crate::random;
use std::fmt::Write as _;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest request in bytes: the guest's serial driver buffers this much while the guest is busy.
const REQUEST_MAX: usize = 32 << 10;
/// Most bytes that are read for one request: the answer, and a former answer before it.
const ANSWER_MAX: usize = 16 << 20;
/// Time that an answer may take beyond the time limit of its command: 10 s.
const GRACE: Duration = Duration::from_secs(10);

/// Result of a command inside a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Exit status of the command; 128 plus the signal's number if a signal ended it.
    pub status: u8,
    /// Standard output of the command.
    pub stdout: Vec<u8>,
    /// Standard error of the command.
    pub stderr: Vec<u8>,
}

/// Runs a command and waits for its end, at most `timeout`.
pub(crate) fn exec(socket: &Path, argv: &[&str], timeout: Duration) -> io::Result<Output> {
    let id = format!("{:016x}", random::number()?);
    let seconds = timeout.as_secs().max(1);
    let request = format!("\n{id} {seconds} {}\n", encoded(&quoted(argv)));
    if request.len() > REQUEST_MAX || argv.is_empty() {
        return Err(io::Error::new(ErrorKind::InvalidInput, format!("a command has 1 to {REQUEST_MAX} bytes")));
    }
    let mut port = Port::new(UnixStream::connect(socket)?, Instant::now() + Duration::from_secs(seconds) + GRACE);
    port.stream.set_write_timeout(Some(GRACE))?;
    port.stream.write_all(request.as_bytes())?;
    let header = port.line_after(&format!("\n@{id} "))?;
    let (status, out, err) = parse_header(&header)
        .ok_or_else(|| io::Error::new(ErrorKind::InvalidData, format!("the agent answered {header:?}")))?;
    let stdout = port.exactly(out)?;
    let stderr = port.exactly(err)?;
    let status =
        status.ok_or_else(|| io::Error::new(ErrorKind::TimedOut, format!("the command took more than {seconds} s")))?;
    Ok(Output { status, stdout, stderr })
}

/// Waits until the agent of a guest that was restored from a saved state answers a command. `alive` is as in
/// [`wait_ready`].
pub(crate) fn wait_answer(socket: &Path, deadline: Instant, alive: impl Fn() -> bool) -> io::Result<()> {
    connect(socket, deadline, alive)?;
    exec(socket, &["true"], deadline.saturating_duration_since(Instant::now())).map(drop)
}

/// Waits until the guest's agent reports that it is ready. `alive` tells whether the guest's process still runs: if it
/// does not, this returns an error.
pub(crate) fn wait_ready(socket: &Path, deadline: Instant, alive: impl Fn() -> bool) -> io::Result<()> {
    let stream = connect(socket, deadline, &alive)?;
    Port::new(stream, deadline).line_after("\n@ready").map(drop).map_err(|e| if alive() { e } else { gone() })
}

/// Connects to QEMU's socket, and tries again until QEMU listens.
fn connect(socket: &Path, deadline: Instant, alive: impl Fn() -> bool) -> io::Result<UnixStream> {
    const STEP: Duration = Duration::from_millis(10);
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return Ok(stream),
            Err(_) if !alive() => return Err(gone()),
            Err(e) if Instant::now() > deadline => return Err(e),
            Err(_) => std::thread::sleep(STEP),
        }
    }
}

fn gone() -> io::Error {
    io::Error::new(ErrorKind::UnexpectedEof, "it ended")
}

/// The exit status and the two lengths in the line after the request's number. The status is `None` if the command ran
/// longer than its time limit.
fn parse_header(header: &str) -> Option<(Option<u8>, usize, usize)> {
    let mut words = header.split_ascii_whitespace();
    let status = words.next().filter(|word| *word != "late").map(str::parse).transpose().ok()?;
    let out = words.next()?.parse().ok()?;
    let err = words.next()?.parse().ok()?;
    words.next().is_none().then_some((status, out, err))
}

/// A command line of the shell that consists of exactly these words.
fn quoted(argv: &[&str]) -> String {
    argv.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect::<Vec<_>>().join(" ")
}

/// The text as a single line, from which `printf %b` in the guest makes the text again.
fn encoded(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_./'=:,".contains(&byte) {
            line.push(char::from(byte));
        } else {
            write!(line, "\\0{byte:03o}").expect("writing to a string");
        }
    }
    line
}

/// The host's end of the serial line, with bytes that were read and not used yet.
struct Port {
    stream: UnixStream,
    deadline: Instant,
    buffer: Vec<u8>,
    received: usize,
}

impl Port {
    fn new(stream: UnixStream, deadline: Instant) -> Self {
        Self { stream, deadline, buffer: Vec::new(), received: 0 }
    }

    /// Skips everything up to and including `marker`. Returns the rest of the line.
    fn line_after(&mut self, marker: &str) -> io::Result<String> {
        let mut from = 0;
        let start = loop {
            if let Some(at) = find(&self.buffer[from..], marker.as_bytes()) {
                break from + at + marker.len();
            }
            from = self.buffer.len().saturating_sub(marker.len());
            self.fill()?;
        };
        loop {
            if let Some(at) = find(&self.buffer[start..], b"\n") {
                let line = String::from_utf8_lossy(&self.buffer[start..start + at]).into_owned();
                self.buffer.drain(..=start + at);
                return Ok(line);
            }
            self.fill()?;
        }
    }

    fn exactly(&mut self, bytes: usize) -> io::Result<Vec<u8>> {
        while self.buffer.len() < bytes {
            self.fill()?;
        }
        let rest = self.buffer.split_off(bytes);
        Ok(std::mem::replace(&mut self.buffer, rest))
    }

    fn fill(&mut self) -> io::Result<()> {
        let late = || io::Error::new(ErrorKind::TimedOut, "no answer from inside in time");
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(late());
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut chunk = [0_u8; 64 << 10];
        let count = match self.stream.read(&mut chunk) {
            Ok(0) => return Err(io::Error::new(ErrorKind::UnexpectedEof, "it ended")),
            Ok(count) => count,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return Err(late()),
            Err(e) if e.kind() == ErrorKind::Interrupted => return Ok(()),
            Err(e) => return Err(e),
        };
        self.received += count;
        if self.received > ANSWER_MAX {
            return Err(io::Error::new(ErrorKind::InvalidData, "more output than an agent can send"));
        }
        self.buffer.extend(&chunk[..count]);
        Ok(())
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn port(deadline_ms: u64) -> (UnixStream, Port) {
        let (guest, host) = UnixStream::pair().expect("a socket pair");
        (guest, Port::new(host, Instant::now() + Duration::from_millis(deadline_ms)))
    }

    #[test]
    fn answer_is_found_behind_leftover_of_previous_client() {
        let (mut guest, mut port) = port(5000);
        let writer = thread::spawn(move || {
            for piece in ["rest of an old answer\n@1 0 9 0\n12345\n6", "789\n@", "2 7 3", " 2\na\nb", "xx"] {
                guest.write_all(piece.as_bytes()).expect("write");
                thread::sleep(Duration::from_millis(2));
            }
        });
        let header = port.line_after("\n@2 ").expect("the answer");
        assert_eq!(parse_header(&header), Some((Some(7), 3, 2)));
        assert_eq!(port.exactly(3).expect("output"), b"a\nb");
        assert_eq!(port.exactly(2).expect("errors"), b"xx");
        writer.join().expect("no panic");
    }

    #[test]
    fn silence_flood_and_end_of_guest_are_different_errors() {
        let (guest, mut silent) = port(20);
        assert_eq!(silent.line_after("\n@1 ").expect_err("silence").kind(), ErrorKind::TimedOut);
        drop(guest);
        let (guest, mut ended) = port(5000);
        drop(guest);
        assert_eq!(ended.line_after("\n@1 ").expect_err("the end").kind(), ErrorKind::UnexpectedEof);
        let (mut guest, mut flooded) = port(20_000);
        let writer = thread::spawn(move || while guest.write_all(&[b'x'; 1 << 16]).is_ok() {});
        assert_eq!(flooded.line_after("\n@1 ").expect_err("a flood").kind(), ErrorKind::InvalidData);
        drop(flooded);
        writer.join().expect("no panic");
    }

    #[test]
    fn malformed_headers_are_refused() {
        assert_eq!(parse_header("late 0 1"), Some((None, 0, 1)));
        for bad in ["", "0", "0 1", "0 1 2 3", "256 0 0", "-1 0 0", "0 -1 0", "0 x 0"] {
            assert_eq!(parse_header(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn command_words_pass_two_shells_unchanged() {
        let words = ["a b", "", "it's", "\\n%d$HOME`id`", "gr\u{fc}n\n\ttab", "*"];
        let line = encoded(&quoted(&[&["printf", "<%s>"], &words[..]].concat()));
        let decode = |shell: &str| {
            let run = std::process::Command::new(shell)
                .args(["-c", "sh -c \"$(printf '%b' \"$1\")\"", "sh", &line])
                .output()
                .expect("run a shell");
            String::from_utf8(run.stdout).expect("text")
        };
        let expected: String = words.iter().map(|word| format!("<{word}>")).collect();
        assert_eq!(decode("dash"), expected);
        assert_eq!(decode("bash"), expected);
    }
}
