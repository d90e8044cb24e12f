//! `pagefold-identity DEVICE`: the helper inside a guest. It waits for requests on a serial line or a virtio port; the
//! library describes the lines.
#![forbid(unsafe_code)]

use identity::repair::Machine;
use identity::{Answer, Clock, LINE_BYTES, Request};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::ExitCode;

/// Bytes of one read. A serial line gives few at a time.
const CHUNK: usize = 256;

fn main() -> ExitCode {
    let Some(device) = std::env::args_os().nth(1) else {
        eprintln!("usage: pagefold-identity DEVICE");
        return ExitCode::from(2);
    };
    match serve(Path::new(&device)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("pagefold-identity: {}: {e}", Path::new(&device).display());
            ExitCode::from(1)
        }
    }
}

/// Answers requests until the device ends.
fn serve(device: &Path) -> io::Result<()> {
    let mut port = File::options().read(true).write(true).open(device)?;
    // A virtio port is no terminal.
    let _ = act::make_raw(&port);
    let mut line = Vec::with_capacity(LINE_BYTES);
    let mut chunk = [0; CHUNK];
    let mut repaired = String::new();
    loop {
        let count = port.read(&mut chunk)?;
        if count == 0 {
            return Ok(());
        }
        for byte in &chunk[..count] {
            if *byte != b'\n' {
                // A line that is too long is cut, and is no valid request then.
                line.truncate(LINE_BYTES);
                line.push(*byte);
                continue;
            }
            let answer = std::str::from_utf8(&line).ok().and_then(|text| answer(text.trim(), &mut repaired));
            line.clear();
            if let Some(answer) = answer {
                port.write_all(answer.line().as_bytes())?;
            }
        }
    }
}

/// Does what a line asks for; `None` if it asks for nothing. `repaired` is the nonce of the last request whose repairs
/// are all made. The host sends that again if the answer is late. Then only the time differs, so that only the clock is
/// set: keys stay, and network interfaces are not taken down again.
fn answer(text: &str, repaired: &mut String) -> Option<Answer> {
    let machine = Machine::own();
    let Some(request) = Request::parse(text) else { return Clock::parse(text).map(|clock| machine.set_clock(&clock)) };
    let is_again = *repaired == request.nonce;
    let answer = if is_again {
        machine.set_clock(&Clock { nonce: request.nonce.clone(), time: request.time })
    } else {
        machine.repair(&request)
    };
    *repaired = if answer.failed.is_empty() { request.nonce } else { String::new() };
    Some(answer)
}
