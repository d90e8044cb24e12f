//! Clients that keep a web side busy:
//!
//! | clients | each |
//! |---|---|
//! | 1,000 | hold a connection, silent or in the middle of a request |
//! | 2 | have a token, and ask for the metrics over 50 connections as fast as they are answered |
//! | 1 | connects, sends bytes that are no request, and leaves, 500 times a second |

use anyhow::Context;
use std::fs::{self, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Connections that are held.
const HELD: usize = 1000;
/// Tokens of the clients that flood the web side with requests.
const TOKENS: [&str; 2] = ["flood-0-0123456789abcdef0123456789abcdef", "flood-1-0123456789abcdef0123456789abcdef"];
/// Connections of each of these clients.
const FLOODING: usize = 50;
/// Pause of the client that sends garbage: 2 ms.
const PAUSE: Duration = Duration::from_millis(2);
/// Interval at which a client that waits checks whether the bench is over: 1 s.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Bytes that are no HTTP request.
const GARBAGE: [&[u8]; 3] = [b"\0\x01\xff\xfe", b"GET / HTTP/9.9\r\n\r\n", &[b'G'; 20_000]];

/// Writes a file with the clients' tokens, for the key `tokens` of `[api]`.
///
/// # Errors
/// The file cannot be written.
pub fn write_tokens(file: &Path) -> anyhow::Result<()> {
    let token = |(n, token): (usize, &&str)| format!("[[token]]\nname = \"flood-{n}\"\ntoken = \"{token}\"\n");
    let text: String = TOKENS.iter().enumerate().map(token).collect();
    fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    fs::set_permissions(file, Permissions::from_mode(0o600)).with_context(|| format!("cannot close {}", file.display()))
}

/// The clients of the crowd. Dropping this ends them.
pub struct Crowd {
    over: Arc<AtomicBool>,
    answers: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl Crowd {
    /// Starts the clients, at this socket of the web side.
    ///
    /// # Errors
    /// The connections cannot be made.
    pub fn start(socket: &Path) -> anyhow::Result<Self> {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).context("cannot open many files")?;
        let mut crowd = Self { over: Arc::default(), answers: Arc::default(), threads: Vec::new() };
        let mut held = Vec::new();
        for n in 0..HELD {
            let mut stream = UnixStream::connect(socket).context("cannot hold many connections")?;
            // The web side may have closed this connection already, to accept another client.
            let _ = stream.write_all(if n % 2 == 0 { b"" } else { b"GET /v1/groups HT" });
            held.push(stream);
        }
        crowd.spawn(socket, move |socket, over, _| {
            hold(held, socket, over);
        });
        for token in TOKENS {
            crowd.spawn(socket, move |socket, over, answers| flood(socket, token, over, answers));
        }
        crowd.spawn(socket, |socket, over, _| send_garbage(socket, over));
        Ok(crowd)
    }

    fn spawn(&mut self, socket: &Path, work: impl FnOnce(&Path, &AtomicBool, &AtomicU64) + Send + 'static) {
        let (socket, over, answers): (PathBuf, _, _) =
            (socket.to_owned(), Arc::clone(&self.over), Arc::clone(&self.answers));
        self.threads.push(std::thread::spawn(move || work(&socket, &over, &answers)));
    }

    /// Answers that clients with tokens got, refusals included.
    pub fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        // A thread that panicked has ended, too.
        self.threads.drain(..).for_each(|thread| _ = thread.join());
    }
}

/// Holds connections, and opens a new one for each that the web side closes.
fn hold(mut held: Vec<UnixStream>, socket: &Path, over: &AtomicBool) {
    held.iter().for_each(|stream| _ = stream.set_nonblocking(true));
    while !over.load(Ordering::Relaxed) {
        for stream in &mut held {
            let read = stream.read(&mut [0; 64]);
            let is_open = read.is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock);
            if !is_open && let Ok(other) = UnixStream::connect(socket) {
                let _ = other.set_nonblocking(true);
                *stream = other;
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn flood(socket: &Path, token: &str, over: &AtomicBool, answers: &AtomicU64) {
    let connect = || {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(LOOK_EVERY))?;
        stream.set_write_timeout(Some(LOOK_EVERY))?;
        io::Result::Ok(stream)
    };
    let request = format!("GET /metrics HTTP/1.1\r\nHost: pagefold\r\nAuthorization: Bearer {token}\r\n\r\n");
    let mut streams: Vec<UnixStream> = (0..FLOODING).filter_map(|_| connect().ok()).collect();
    let mut buffer = vec![0; 64 << 10];
    while !over.load(Ordering::Relaxed) {
        for stream in &mut streams {
            if stream.write_all(request.as_bytes()).is_err() {
                connect().into_iter().for_each(|other| *stream = other);
            }
        }
        for stream in &mut streams {
            if over.load(Ordering::Relaxed) {
                return;
            }
            match stream.read(&mut buffer) {
                Ok(0) => connect().into_iter().for_each(|other| *stream = other),
                Ok(_) => _ = answers.fetch_add(1, Ordering::Relaxed),
                // A timeout: the answer is read in the next turn of the loop.
                Err(_) => {}
            }
        }
    }
}

fn send_garbage(socket: &Path, over: &AtomicBool) {
    for bytes in GARBAGE.iter().cycle().take_while(|_| !over.load(Ordering::Relaxed)) {
        // The web side may close the connection before all bytes are written.
        let _ = UnixStream::connect(socket).map(|mut stream| stream.write_all(bytes));
        std::thread::sleep(PAUSE);
    }
}
