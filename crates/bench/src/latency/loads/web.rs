//! nginx: each request asks for the same file of 8 KiB.

use super::{Kind, Load, Member};
use crate::latency::client::Client;
use crate::latency::scene::Scene;
use crate::synthetic::filled;
use anyhow::Context;
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;

pub const WEB: Kind = Kind {
    name: "web",
    is_usual: false,
    rate: 1000,
    members: &[Member::Started, Member::Attached],
    // nginx has little memory of its own that could be folded.
    floor: 0,
    needs: &[("nginx", "nginx-light")],
    begin,
};

/// Request for the file.
const REQUEST: &str = "GET /file HTTP/1.1\r\nHost: bench\r\n\r\n";

fn begin(scene: &Scene) -> anyhow::Result<Load> {
    let (dir, socket) = (scene.side.path("web")?, scene.side.path("web.sock")?);
    fs::create_dir(&dir).context("cannot create a directory")?;
    fs::write(format!("{dir}/file"), [filled(1).0, filled(2).0].concat()).context("cannot write a file")?;
    let settings = format!(
        "daemon off; user root; worker_processes 1; pid {dir}/pid; error_log stderr; events {{}}
         http {{ access_log off; keepalive_requests 1000000000; keepalive_timeout 100000;
         server {{ listen unix:{socket}; root {dir}; }} }}"
    );
    let file = format!("{dir}/nginx.conf");
    fs::write(&file, settings).context("cannot write a file")?;
    let answers = || UnixStream::connect(&socket).is_ok();
    let server = scene.start("web", None, &["nginx", "-e", "stderr", "-p", &dir, "-c", &file], answers)?;
    let client = Client::asking(&socket, scene.rate(&WEB), || REQUEST.to_owned(), answer)?;
    Ok(Load { client, pid: server.pid(), _programs: Box::new(server) })
}

/// Reads an answer to its end.
fn answer(reader: &mut BufReader<UnixStream>) -> io::Result<()> {
    let (mut head, mut bytes) = (String::new(), None);
    while !head.ends_with("\r\n\r\n") {
        let begin = head.len();
        if reader.read_line(&mut head)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let length = head[begin..].strip_prefix("Content-Length: ");
        bytes = bytes.or(length.and_then(|length| length.trim_end().parse::<usize>().ok()));
    }
    match bytes {
        Some(bytes) if head.starts_with("HTTP/1.1 200") => reader.read_exact(&mut vec![0; bytes]),
        _ => Err(io::Error::other(format!("nginx answers {head:?}"))),
    }
}
