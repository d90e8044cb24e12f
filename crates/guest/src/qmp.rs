//! QEMU's machine protocol (QMP), for a client that sends a command and waits for the answer. Each message is a JSON
//! object on a line, sent over a unix socket. Events that arrive in between are dropped. See
//! `docs/interop/qmp-spec.rst` of QEMU.

use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest answer that is read: 4 MiB. The longest known one, to `query-qmp-schema`, has about 0.2 MB.
const LINE_MAX: usize = 4 << 20;

/// Time within which a guest's QEMU must answer: 500 ms. It may be serving another client meanwhile.
const PATIENCE: Duration = Duration::from_millis(500);

/// Most messages that are skipped before the greeting: answers and events that QEMU still had for an earlier client.
const MOST_OF_OTHERS: usize = 64;

/// Number of the next command.
static NUMBER: AtomicU64 = AtomicU64::new(0);

/// A reason why QEMU did not answer.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The socket failed, or the peer's lines are not QMP.
    #[error("cannot talk QMP over {}: {cause}", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// The failure.
        cause: io::Error,
    },
    /// Another process than the guest's answers at the socket.
    #[error("{} is the socket of process {peer}, not of this guest, which is process {pid}", path.display())]
    Foreign {
        /// The socket.
        path: PathBuf,
        /// The process that listens there.
        peer: u32,
        /// The guest's process.
        pid: u32,
    },
    /// QEMU refused a command.
    #[error("QEMU refuses {command}: {reason}")]
    Refused {
        /// The command.
        command: String,
        /// The reason that QEMU gives.
        reason: String,
    },
}

/// A connection to one QEMU.
#[derive(Debug)]
pub struct Qmp {
    path: PathBuf,
    reader: BufReader<UnixStream>,
    timeout: Duration,
}

impl QmpError {
    /// Whether the path does not lead to this guest's QMP socket. False if its socket does not answer in time, or QEMU
    /// refuses the command.
    pub fn is_wrong_socket(&self) -> bool {
        let waits = |cause: &io::Error| matches!(cause.kind(), ErrorKind::TimedOut | ErrorKind::UnexpectedEof);
        match self {
            Self::Socket { cause, .. } => !waits(cause),
            Self::Foreign { .. } => true,
            Self::Refused { .. } => false,
        }
    }
}

impl Qmp {
    /// Connects to the socket of the QEMU that is process `pid`, as [`Qmp::connect`] does, with 500 ms for each answer.
    ///
    /// # Errors
    /// As for [`Qmp::connect`], or another process listens there.
    pub fn of(pid: u32, path: &Path) -> Result<Self, QmpError> {
        let failed = |cause| QmpError::Socket { path: path.into(), cause };
        let stream = host::connect_within(path, PATIENCE).map_err(failed)?;
        let peer = host::Peer::of(&stream).map_err(failed)?.pid;
        if peer != pid {
            return Err(QmpError::Foreign { path: path.into(), peer, pid });
        }
        Self::greet(path, stream, PATIENCE)
    }

    /// Connects, reads the greeting and leaves negotiation mode. Connecting, the greeting and each command may take
    /// `timeout` each.
    ///
    /// # Errors
    /// No process listens, QEMU serves another client for longer than `timeout`, or the listener is not QEMU.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, QmpError> {
        let stream =
            host::connect_within(path, timeout).map_err(|cause| QmpError::Socket { path: path.into(), cause })?;
        Self::greet(path, stream, timeout)
    }

    fn greet(path: &Path, stream: UnixStream, timeout: Duration) -> Result<Self, QmpError> {
        let mut qmp = Self { path: path.into(), reader: BufReader::new(stream), timeout };
        let deadline = Instant::now() + timeout;
        // QEMU may first send answers to an earlier client that was killed.
        let is_of_another = |message: &Value| ["return", "error", "event"].iter().any(|key| message.get(key).is_some());
        for _ in 0..MOST_OF_OTHERS {
            let message = qmp.message(deadline).map_err(|e| qmp.broken(e))?;
            if message.get("QMP").is_some() {
                qmp.execute("qmp_capabilities", json!({}))?;
                return Ok(qmp);
            }
            if !is_of_another(&message) {
                break;
            }
        }
        Err(qmp.broken(invalid("no QMP greeting")))
    }

    /// Runs one command and returns its result; `arguments` is an object.
    ///
    /// # Errors
    /// QEMU refuses the command, is gone, or does not answer in time. After any error but a refusal the connection
    /// cannot be used any more.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let deadline = Instant::now() + self.timeout;
        let id = json!(format!("pagefold-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed)));
        let request = json!({"execute": command, "arguments": arguments, "id": id});
        self.send(&request).map_err(|e| self.broken(e))?;
        loop {
            let mut answer = self.message(deadline).map_err(|e| self.broken(e))?;
            if answer.get("id").is_some_and(|its| *its != id) {
                continue;
            }
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
            if let Some(error) = answer.get("error") {
                let reason = error.get("desc").and_then(Value::as_str).unwrap_or("no reason given").to_owned();
                return Err(QmpError::Refused { command: command.into(), reason });
            }
        }
    }

    fn send(&mut self, request: &Value) -> io::Result<()> {
        let mut stream = self.reader.get_ref();
        stream.set_write_timeout(Some(self.timeout))?;
        stream.write_all(format!("{request}\n").as_bytes())
    }

    /// The next message, which must be a JSON object on a line of its own.
    fn message(&mut self, deadline: Instant) -> io::Result<Value> {
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::new(ErrorKind::TimedOut, "no answer in time"));
            }
            self.reader.get_ref().set_read_timeout(Some(left))?;
            let room = LINE_MAX.saturating_sub(line.len());
            if room == 0 {
                return Err(invalid("a line without end"));
            }
            // The deadline is checked before each read, so that a peer that sends single bytes gets no more time than
            // others.
            match self.reader.fill_buf() {
                Ok([]) => return Err(io::Error::new(ErrorKind::UnexpectedEof, "QEMU hung up")),
                Ok(bytes) => {
                    let end = bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |at| at + 1);
                    let taken = end.min(room);
                    line.extend_from_slice(&bytes[..taken]);
                    self.reader.consume(taken);
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
                Err(e) => return Err(e),
            }
        }
        serde_json::from_slice(&line).map_err(|e| invalid(&e.to_string()))
    }

    fn broken(&self, cause: io::Error) -> QmpError {
        QmpError::Socket { path: self.path.clone(), cause }
    }
}

fn invalid(problem: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, problem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread;

    /// Patience with a peer that is silent.
    const SOON: Duration = Duration::from_millis(300);
    /// Patience with a peer that answers, on a machine that may be busy.
    const LATE: Duration = Duration::from_secs(20);
    const GREETING: &str = "{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n";

    /// The answer to the command `stop` from a peer that sends `lines`. The peer sends the first line at once, and
    /// one more after each line that it receives. After the last it stays silent.
    fn asked(lines: &'static [&'static str], patience: Duration) -> Result<Value, QmpError> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).expect("listen");
        let peer = thread::spawn(move || {
            let (stream, _) = listener.accept().expect("a client");
            let mut heard = BufReader::new(stream.try_clone().expect("duplicate")).lines();
            let mut stream = stream;
            for line in lines {
                // The client may have closed the connection.
                let _ = stream.write_all(line.as_bytes());
                if !matches!(heard.next(), Some(Ok(_))) {
                    return;
                }
            }
            heard.for_each(drop);
        });
        let answer = Qmp::connect(&path, patience).and_then(|mut qmp| qmp.execute("stop", json!({})));
        peer.join().expect("no panic");
        answer
    }

    #[test]
    fn events_are_skipped_and_refusals_reported() {
        let lines = &[GREETING, "{\"return\": {}}\n", "{\"event\": \"STOP\"}\n{\"return\": {\"a\": 1}}\n"];
        let answer = asked(lines, LATE);
        assert_eq!(answer.expect("an answer"), json!({"a": 1}));
        // Of clients that were killed.
        let lines = &[
            "{\"return\": {\"b\": 2}}\n{\"QMP\": {}}\n",
            "{\"return\": {\"b\": 2}, \"id\": \"other-1\"}\n{\"return\": {}}\n",
            "{\"error\": {\"desc\": \"b\"}, \"id\": \"other-2\"}\n{\"return\": {\"a\": 1}}\n",
        ];
        assert_eq!(asked(lines, LATE).expect("an answer"), json!({"a": 1}));
        let lines = &[GREETING, "{\"return\": {}}\n", "{\"error\": {\"class\": \"x\", \"desc\": \"no\"}}\n"];
        let refused = asked(lines, LATE);
        assert_eq!(refused.expect_err("a refusal").to_string(), "QEMU refuses stop: no");
    }

    #[test]
    fn silent_malformed_or_foreign_peer_is_error() {
        for lines in [&[GREETING] as &[&str], &[""], &["{}\n"], &["SSH-2.0\n"], &[GREETING, "{\"return\": \n"]] {
            assert!(matches!(asked(lines, SOON), Err(QmpError::Socket { .. })), "{lines:?}");
        }
    }

    #[test]
    fn socket_of_another_process_is_refused() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("qmp");
        let _listener = UnixListener::bind(&path).expect("listen");
        let own = std::process::id();
        let foreign = Qmp::of(1, &path).expect_err("this process listens");
        assert!(matches!(foreign, QmpError::Foreign { peer, pid: 1, .. } if peer == own), "{foreign}");
        let silent = Qmp::of(own, &path).expect_err("nobody answers");
        assert!(!silent.is_wrong_socket() && foreign.is_wrong_socket(), "{silent}");
        let nowhere = Qmp::of(own, Path::new("/nonexistent")).expect_err("no socket");
        assert!(nowhere.is_wrong_socket(), "{nowhere}");
    }

    #[test]
    fn line_without_end_is_cut_off() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).expect("listen");
        let peer = thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            while stream.write_all(&[b' '; 1 << 16]).is_ok() {}
        });
        let error = Qmp::connect(&path, LATE).expect_err("no greeting").to_string();
        assert!(error.contains("a line without end"), "{error}");
        peer.join().expect("no panic");
    }

    /// The peer goes on for longer than any patience.
    #[test]
    fn events_or_half_lines_without_end_do_not_prolong_the_wait() {
        for crumb in ["{\"event\": \"STOP\"}\n", " "] {
            let dir = tempfile::tempdir().expect("a temporary directory");
            let path = dir.path().join("qmp");
            let listener = UnixListener::bind(&path).expect("listen");
            let peer = thread::spawn(move || {
                let (mut stream, _) = listener.accept().expect("a client");
                stream.write_all(format!("{GREETING}{{\"return\": {{}}}}\n").as_bytes()).expect("it listens");
                let began = Instant::now();
                while began.elapsed() < 2 * LATE && stream.write_all(crumb.as_bytes()).is_ok() {
                    thread::sleep(SOON / 10);
                }
            });
            let mut qmp = Qmp::connect(&path, LATE).expect("a greeting");
            qmp.timeout = SOON;
            let began = Instant::now();
            let error = qmp.execute("stop", json!({})).expect_err("no answer");
            assert!(began.elapsed() < 5 * SOON && !error.is_wrong_socket(), "{error} after {:?}", began.elapsed());
            drop(qmp);
            peer.join().expect("no panic");
        }
    }
}
