//! Receives the supervisor's messages (`api::setup`): the first one, with the listening sockets, and later changes.

use anyhow::{Context, bail};
use api::setup::{SETUP_BYTES, Setup, Socket};
use host::{Received, Seqpacket};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;

/// Listening sockets, in the order in which they came.
#[derive(Default)]
pub struct Listeners {
    /// Unix sockets.
    pub unix: Vec<UnixListener>,
    /// TCP sockets.
    pub tcp: Vec<TcpListener>,
}

/// Waits for the supervisor's next message; `None` once the supervisor has ended.
///
/// # Errors
/// The socket cannot be read, or the message is not valid.
pub fn hear(supervisor: &Seqpacket) -> anyhow::Result<Option<(Setup, Listeners)>> {
    let (mut buffer, mut files) = (vec![0; SETUP_BYTES], Vec::new());
    loop {
        match supervisor.receive(&mut buffer, &mut files).context("cannot hear the supervisor")? {
            Received::Closed => return Ok(None),
            Received::Frame(bytes) => {
                let setup: Setup = serde_json::from_slice(&buffer[..bytes]).context("the supervisor's word is none")?;
                let listeners = listeners(&setup.sockets, files)?;
                return Ok(Some((setup, listeners)));
            }
            Received::Nothing => {
                // Whether this was interrupted or not, the loop reads the socket again.
                let _ = poll(&mut [PollFd::new(supervisor, PollFlags::IN)], None);
            }
        }
    }
}

fn listeners(sockets: &[Socket], files: Vec<OwnedFd>) -> anyhow::Result<Listeners> {
    if sockets.len() != files.len() {
        bail!("the supervisor's word has {} files for {} sockets", files.len(), sockets.len());
    }
    let mut listeners = Listeners::default();
    for (socket, file) in sockets.iter().zip(files) {
        match socket {
            Socket::Unix => listeners.unix.push(file.into()),
            Socket::Tcp => listeners.tcp.push(file.into()),
        }
    }
    Ok(listeners)
}
