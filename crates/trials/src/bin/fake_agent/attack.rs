//! Attacks on a socket. Each runs in a thread of its own until the process ends.
//!
//! | kind | is |
//! |---|---|
//! | `junk` | bytes that are no message, in frames of all lengths |
//! | `knock` | connections that are closed at once |
//! | `stare` | connections that say nothing |
//! | `ask` | questions whose answers are not read |
//! | `prove` | pages to be proven, as fast as answers come |
//! | `hello` | beginnings of members that are none |
//! | `spin` | nothing: it takes a processor as an attack does, which is what an attack is compared with |

use host::{Files, Pace, Received, Seqpacket, SeqpacketListener};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Most connections that an attacking thread has open at the same time.
const MOST_OPEN: usize = 64;
/// Number of frames that an attack sends over one connection.
const FRAMES: usize = 256;
/// Pause after a socket has taken nothing: 1 ms.
const FULL: Duration = Duration::from_millis(1);

/// Most connections that a sink accepts in 50 ms: as many as the service accepts at sockets that everybody may use.
const SINK_PACE: usize = 4;

/// Listens at a path, and closes each connection that it accepts, until this process ends. It takes the place of a
/// service, to find out what an attack itself costs.
pub fn sink(path: &str) -> Result<(), String> {
    let listener = SeqpacketListener::bind(Path::new(path), Files::Refused).map_err(|e| e.to_string())?;
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o666)).map_err(|e| e.to_string())?;
    thread::spawn(move || {
        let mut pace = Pace::new(SINK_PACE, Instant::now());
        loop {
            let now = Instant::now();
            if pace.due(now).is_none() && matches!(listener.accept(), Ok(Some(_))) {
                pace.count(now);
            } else {
                thread::sleep(pace.due(now).map_or(FULL, |due| due.saturating_duration_since(now)));
            }
        }
    });
    Ok(())
}

/// Listens at a path in the place of a worker, until this process ends. It reads the members' messages, one of each in
/// turn, and does nothing with them. It closes connections over which something comes that is no message.
pub fn drain(path: &str) -> Result<(), String> {
    let listener = SeqpacketListener::bind(Path::new(path), Files::Refused).map_err(|e| e.to_string())?;
    thread::spawn(move || {
        let (mut open, mut buffer): (Vec<Seqpacket>, _) = (Vec::new(), vec![0; wire::FRAME_BYTES]);
        loop {
            let before = open.len();
            open.extend(listener.accept().ok().flatten());
            let mut is_idle = open.len() == before;
            open.retain(|socket| match socket.receive_bare(&mut buffer) {
                Ok(Received::Frame(bytes)) => {
                    is_idle = false;
                    wire::ToWorker::decode(&buffer[..bytes]).is_ok()
                }
                Ok(Received::Nothing) => true,
                Ok(Received::Closed) | Err(_) => false,
            });
            if is_idle {
                thread::sleep(FULL);
            }
        }
    });
    Ok(())
}

/// Begins an attack of this kind on the socket at this path. It goes on until this process ends.
pub fn begin(kind: &str, path: &str) -> Result<(), String> {
    if !["junk", "knock", "stare", "ask", "prove", "hello", "spin"].contains(&kind) {
        return Err(format!("no kind of attack: {kind}"));
    }
    let (kind, path) = (kind.to_owned(), path.to_owned());
    thread::spawn(move || go_on(&kind, &path));
    Ok(())
}

fn go_on(kind: &str, path: &str) {
    let (mut open, mut random) = (Vec::new(), 1_u64);
    loop {
        if kind == "spin" {
            std::hint::black_box(next(&mut random));
            continue;
        }
        if kind == "prove" {
            let _ = crate::prove(path);
        }
        let Ok(socket) = Seqpacket::connect(Path::new(path)) else {
            // The socket takes streams, or its queue is full: sends the bytes over a stream.
            let _ = UnixStream::connect(path).and_then(|mut stream| stream.write_all(&bytes(&mut random)));
            thread::sleep(FULL);
            continue;
        };
        let frames = if ["knock", "stare"].contains(&kind) { 0 } else { FRAMES };
        for _ in 0..frames {
            if !matches!(socket.send(&frame(kind, &mut random), &[]), Ok(true)) {
                break;
            }
        }
        if kind != "knock" {
            open.push(socket);
            open.drain(..open.len().saturating_sub(MOST_OPEN));
        }
    }
}

/// The next frame that an attack of this kind sends.
fn frame(kind: &str, random: &mut u64) -> Vec<u8> {
    let mut frame = Vec::new();
    match kind {
        "ask" => {
            frame.extend_from_slice([&b"\"members\""[..], b"\"groups\"", b"\"troubles\""][(next(random) % 3) as usize])
        }
        "hello" => wire::ToWorker::Hello(wire::Hello { version: wire::VERSION, eager: true }).encode(&mut frame),
        _ => frame = bytes(random),
    }
    frame
}

fn bytes(random: &mut u64) -> Vec<u8> {
    let length = 1 + next(random) as usize % (wire::FRAME_BYTES / 8);
    (0..length).map(|_| next(random) as u8).collect()
}

/// A random number by a linear congruence, of which the high half is good enough.
const fn next(random: &mut u64) -> u64 {
    *random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
    *random >> 32
}
