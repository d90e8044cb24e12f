//! A process that speaks to a service as the tests say. Each line of its standard input is a command, and it answers
//! each with a line.
//!
//! ```text
//! connect PATH    connects as an agent does, and says Hello; answers `ok` or the error
//! state           whether that connection is `open` or `closed`, and how many frames have come
//! closed          the same, after up to 20 s in which it may be closed
//! ask PATH JSON   sends a question to a control socket as it is; answers with the answer
//! child PATH      has a child of this process connect, and answers as `closed` does there
//! prove PATH      asks a prover about a page; answers `ok` or the error
//! crowd PATH N    opens N connections, and answers how many of them are open when no more are closed
//! become UID      becomes that user
//! attack KIND PATH  attacks a socket until this process ends, see attack.rs
//! drain PATH      reads there what members say, and does nothing with it, until this process ends
//! sink PATH       accepts connections there as slowly as a service does, and closes them, until this process ends
//! ```
//!
//! With files that keep their closers waiting:
//!
//! ```text
//! files KIND      makes such files, `fuse` or `linger`; answers `ok` if closing them waits
//! send PATH N     connects, and sends a frame with N such files; answers `ok` or the error
//! send-here N     sends such a frame over the connection of `connect`
//! ```
//!
//! In the place of a worker:
//!
//! ```text
//! listen PATH     listens there
//! news JSON N     sends the supervisor a message with N such files
//! orders          answers with the names of the orders that it has got
//! ```

mod attack;
mod files;

use files::Files;
use host::{Received, Seqpacket, SeqpacketListener};
use std::io::{BufRead, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time after which a connection that the service should not close counts as kept open: 400 ms.
const WHILE: Duration = Duration::from_millis(400);
/// Time limit for the service to close a connection that it does not accept, or to answer: 20 s.
const LONG: Duration = Duration::from_secs(20);

fn connect(path: &str) -> Result<Seqpacket, String> {
    let socket = Seqpacket::connect(Path::new(path)).map_err(|e| e.to_string())?;
    let mut frame = Vec::new();
    wire::ToWorker::Hello(wire::Hello { version: wire::VERSION, eager: false }).encode(&mut frame);
    // A service that does not accept this process may have closed the socket already.
    let _ = socket.send(&frame, &[]);
    Ok(socket)
}

/// `open` or `closed`: whether the other side has closed the connection by the end of this time. Frames that come
/// meanwhile are counted.
fn state(socket: &Seqpacket, frames: &mut usize, time: Duration) -> &'static str {
    let mut buffer = vec![0; wire::FRAME_BYTES];
    let begin = Instant::now();
    while begin.elapsed() < time {
        match socket.receive(&mut buffer, &mut Vec::new()) {
            Ok(Received::Frame(_)) => *frames += 1,
            Ok(Received::Nothing) => std::thread::sleep(Duration::from_millis(5)),
            _ => return "closed",
        }
    }
    "open"
}

fn ask(path: &str, question: &str) -> Result<String, String> {
    let socket = Seqpacket::connect(Path::new(path)).map_err(|e| e.to_string())?;
    socket.send(question.as_bytes(), &[]).map_err(|e| e.to_string())?;
    let (mut buffer, begin) = (vec![0; 128 << 10], Instant::now());
    loop {
        match socket.receive(&mut buffer, &mut Vec::new()) {
            Ok(Received::Frame(n)) => return Ok(String::from_utf8_lossy(&buffer[..n]).into_owned()),
            Ok(Received::Nothing) if begin.elapsed() > LONG => return Err("no answer".into()),
            Ok(Received::Nothing) => std::thread::sleep(Duration::from_millis(5)),
            Ok(Received::Closed) => return Ok("closed".into()),
            Err(e) => return Err(e.to_string()),
        }
    }
}

fn child(path: &str) -> String {
    let own = std::env::current_exe().expect("a path");
    let mut child = Command::new(own).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start a child");
    writeln!(child.stdin.take().expect("a pipe"), "connect {path}\nclosed").expect("tell the child");
    let said = child.wait_with_output().expect("hear from the child");
    String::from_utf8_lossy(&said.stdout).lines().last().unwrap_or_default().to_owned()
}

/// Opens connections, and says how many of them are open when their number has not changed for a while.
fn crowd(path: &str, count: &str) -> Result<String, String> {
    act::raise_open_files_limit();
    let mut sockets = Vec::new();
    let (count, begin) = (count.parse().map_err(|_| "no number")?, Instant::now());
    while sockets.len() < count && begin.elapsed() < LONG {
        match Seqpacket::connect(Path::new(path)) {
            Ok(socket) => sockets.push(socket),
            // The listener's queue of connections is full: tries again later.
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    // The service accepts connections in order. Once this request is answered or refused, all connections before it
    // were accepted or refused.
    let _ = ask(path, "\"groups\"");
    let is_open = |socket: &&Seqpacket| matches!(socket.receive_bare(&mut [0; 8]), Ok(Received::Nothing));
    let (mut open, mut since, begin) = (count, Instant::now(), Instant::now());
    while since.elapsed() < WHILE && begin.elapsed() < LONG {
        let now = sockets.iter().filter(is_open).count();
        if now != open {
            (open, since) = (now, Instant::now());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // The connections stay open until this process ends.
    sockets.into_iter().for_each(std::mem::forget);
    Ok(open.to_string())
}

fn prove(path: &str) -> Result<String, String> {
    let mut prover = act::Prover::connect(Path::new(path)).map_err(|e| e.to_string())?;
    let page = [page::PageRange { start: page::HostVirt(4096), pages: 1 }];
    let mut proofs = [wire::prove::Proof::Free];
    prover.ask(&page, &mut proofs, Duration::from_secs(20)).map_err(|e| e.to_string())?;
    Ok("ok".into())
}

/// The side of a worker in a connection to a supervisor.
struct FakeWorker {
    listener: SeqpacketListener,
    socket: Option<Seqpacket>,
}

impl FakeWorker {
    fn socket(&mut self) -> Result<&Seqpacket, String> {
        // If several supervisors have connected, the last one counts.
        while let Some(socket) = self.listener.accept().map_err(|e| e.to_string())? {
            self.socket = Some(socket.take_files());
        }
        self.socket.as_ref().ok_or_else(|| "no supervisor has connected".into())
    }

    /// Names of the orders that have come.
    fn orders(&mut self) -> Result<String, String> {
        let (mut buffer, mut files, mut orders) = (vec![0; 128 << 10], Vec::new(), Vec::new());
        while let Ok(Received::Frame(bytes)) = self.socket()?.receive(&mut buffer, &mut files) {
            let order: serde_json::Value = serde_json::from_slice(&buffer[..bytes]).map_err(|e| e.to_string())?;
            let name = order.as_object().and_then(|order| order.keys().next().cloned());
            orders.push(name.unwrap_or_else(|| order.to_string()));
        }
        Ok(format!("{orders:?}"))
    }
}

/// The state on which commands work.
#[derive(Default)]
struct Fake {
    socket: Option<Seqpacket>,
    frames: usize,
    files: Option<Files>,
    sent: Vec<Seqpacket>,
    worker: Option<FakeWorker>,
}

impl Fake {
    fn obey(&mut self, line: &str) -> Result<String, String> {
        let ok = || Ok("ok".to_owned());
        match line.splitn(3, ' ').collect::<Vec<_>>()[..] {
            ["connect", path] => {
                (self.socket, self.frames) = (Some(connect(path)?), 0);
                ok()
            }
            ["state"] => Ok(self.state(WHILE)),
            ["closed"] => Ok(self.state(LONG)),
            ["ask", path, question] => ask(path, question),
            ["child", path] => Ok(child(path)),
            ["prove", path] => prove(path),
            ["drain", path] => attack::drain(path).and_then(|()| ok()),
            ["sink", path] => attack::sink(path).and_then(|()| ok()),
            ["attack", kind, path] => attack::begin(kind, path).and_then(|()| ok()),
            ["crowd", path, count] => crowd(path, count),
            ["become", uid] => act::give_up_rights(uid.parse().ok()).map_err(|e| e.to_string()).and_then(|()| ok()),
            ["files", kind] => {
                let keep_waiting = self.files.insert(Files::new(kind)?).keep_waiting()?;
                if keep_waiting { ok() } else { Err("closing them does not wait".into()) }
            }
            ["listen", path] => {
                let listener = SeqpacketListener::bind(Path::new(path), host::Files::Taken);
                self.worker = Some(FakeWorker { listener: listener.map_err(|e| e.to_string())?, socket: None });
                ok()
            }
            ["orders"] => self.worker.as_mut().ok_or("no worker")?.orders(),
            _ => self.send(line).and_then(|()| ok()),
        }
    }

    fn state(&mut self, time: Duration) -> String {
        match &self.socket {
            Some(socket) => state(socket, &mut self.frames, time).to_owned() + &format!(" {}", self.frames),
            None => "closed".to_owned(),
        }
    }

    /// The commands that send files.
    fn send(&mut self, line: &str) -> Result<(), String> {
        let number = |text: &str| text.parse::<usize>().map_err(|e| e.to_string());
        let files = self.files.as_mut();
        match line.splitn(3, ' ').collect::<Vec<_>>()[..] {
            ["send", path, count] => self.sent.push(files.ok_or("no files")?.send_to(path, number(count)?)?),
            ["send-here", count] => {
                let socket = self.socket.as_ref().ok_or("not connected")?;
                files.ok_or("no files")?.send(socket, b"x", number(count)?)?;
            }
            ["news", json, count] => {
                let socket = self.worker.as_mut().ok_or("no worker")?.socket()?;
                match files {
                    Some(files) => files.send(socket, json.as_bytes(), number(count)?)?,
                    None => _ = socket.send(json.as_bytes(), &[]).map_err(|e| e.to_string())?,
                }
            }
            _ => panic!("not understood: {line}"),
        }
        Ok(())
    }
}

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some(files::SERVE) => return files::serve(false).expect("serve a file system"),
        Some(files::SERVE_SILENTLY) => return files::serve(true).expect("serve a file system"),
        _ => {}
    }
    let mut fake = Fake::default();
    for line in std::io::stdin().lock().lines() {
        let answer = fake.obey(&line.expect("read a line"));
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", answer.unwrap_or_else(|e| e)).and_then(|()| out.flush()).expect("answer");
    }
}
