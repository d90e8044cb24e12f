//! A process that speaks to a service as the tests say. Each line of its standard input is a command, and it answers
//! each with a line.
//!
//! ```text
//! connect PATH    connects as an agent does, and says Hello; answers `ok` or the error
//! state           whether that connection is `open` or `closed`, and how many frames have come
//! ask PATH JSON   sends a question to a control socket as it is; answers with the answer
//! child PATH      has a child of this process connect, and answers with its state a while later
//! ```

use host::{Received, Seqpacket};
use std::io::{BufRead, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for the service to close a connection that it does not accept.
const WHILE: Duration = Duration::from_millis(400);

fn connect(path: &str) -> Result<Seqpacket, String> {
    let socket = Seqpacket::connect(Path::new(path)).map_err(|e| e.to_string())?;
    let mut frame = Vec::new();
    wire::ToWorker::Hello(wire::Hello { version: wire::VERSION, eager: false }).encode(&mut frame);
    // A service that does not accept this process may have closed the socket already.
    let _ = socket.send(&frame, &[]);
    Ok(socket)
}

fn state(socket: &Seqpacket, frames: &mut usize) -> &'static str {
    let mut buffer = vec![0; wire::FRAME_BYTES];
    let begin = Instant::now();
    while begin.elapsed() < WHILE {
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
    let mut buffer = vec![0; 128 << 10];
    loop {
        match socket.receive(&mut buffer, &mut Vec::new()) {
            Ok(Received::Frame(n)) => return Ok(String::from_utf8_lossy(&buffer[..n]).into_owned()),
            Ok(Received::Nothing) => std::thread::sleep(Duration::from_millis(5)),
            Ok(Received::Closed) => return Ok("closed".into()),
            Err(e) => return Err(e.to_string()),
        }
    }
}

fn child(path: &str) -> String {
    let own = std::env::current_exe().expect("a path");
    let mut child = Command::new(own).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start a child");
    writeln!(child.stdin.take().expect("a pipe"), "connect {path}\nstate").expect("tell the child");
    let said = child.wait_with_output().expect("hear from the child");
    String::from_utf8_lossy(&said.stdout).lines().last().unwrap_or_default().to_owned()
}

fn main() {
    let mut socket = None;
    let mut frames = 0;
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("read a line");
        let answer = match line.splitn(3, ' ').collect::<Vec<_>>()[..] {
            ["connect", path] => connect(path).map(|connected| {
                socket = Some(connected);
                frames = 0;
                "ok".to_owned()
            }),
            ["state"] => Ok(match &socket {
                Some(socket) => state(socket, &mut frames).to_owned() + &format!(" {frames}"),
                None => "closed".to_owned(),
            }),
            ["ask", path, question] => ask(path, question),
            ["child", path] => Ok(child(path)),
            _ => panic!("not understood: {line}"),
        };
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", answer.unwrap_or_else(|e| e)).and_then(|()| out.flush()).expect("answer");
    }
}
