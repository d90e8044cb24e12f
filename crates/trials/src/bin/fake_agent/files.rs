//! Files whose `close` does not return in time. They are sent to a process, which then has to close them.

#[path = "../held_pages/fuse.rs"]
#[expect(dead_code, reason = "another program reads this file system")]
mod fuse;

use host::{MOST_FDS, Seqpacket};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::sockopt::set_socket_linger;
use rustix::process::{Signal, set_parent_process_death_signal};
use std::error::Error;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Argument with which this program serves the FUSE file system.
pub const SERVE: &str = "--serve-file";
/// As `SERVE`, but no request is answered except those that open the file.
pub const SERVE_SILENTLY: &str = "--serve-file-silently";
/// Time for which closing a socket with unsent data waits: 60 s.
const LINGER: Duration = Duration::from_secs(60);

/// Files that are to be sent.
pub enum Files {
    /// A file whose server never answers that it was closed.
    Fuse(OwnedFd),
    /// Sockets with unsent data, which are made when they are sent. Their peers read nothing.
    Linger { peers: Vec<TcpStream> },
}

impl Files {
    pub fn new(kind: &str) -> Result<Self, String> {
        match kind {
            "fuse" => open_unclosable().map(|file| Self::Fuse(file.into())).map_err(|e| e.to_string()),
            "linger" => Ok(Self::Linger { peers: Vec::new() }),
            _ => Err(format!("no kind of file: {kind}")),
        }
    }

    /// Sends a frame with `count` files over a connection. This process keeps no descriptor of the sockets, so the
    /// receiver's `close` is the last one.
    pub fn send(&mut self, socket: &Seqpacket, frame: &[u8], count: usize) -> Result<(), String> {
        let mut made: Vec<OwnedFd> = Vec::new();
        let files: Vec<BorrowedFd<'_>> = match self {
            Self::Fuse(file) => vec![(*file).as_fd(); count],
            Self::Linger { peers } => {
                let both = (0..count).map(|_| lingering().map_err(|e| e.to_string()));
                let (sockets, theirs): (Vec<_>, Vec<_>) = both.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
                peers.extend(theirs);
                made = sockets;
                made.iter().map(AsFd::as_fd).collect()
            }
        };
        assert!(count <= MOST_FDS, "one frame of this program's carries no more");
        let sent = socket.send(frame, &files);
        // If the receiver has closed its descriptor already, the `close` here is the last and waits: it is done in a
        // thread of its own.
        made.into_iter().for_each(|socket| _ = std::thread::spawn(move || drop(socket)));
        match sent {
            Ok(true) => Ok(()),
            Ok(false) => Err("the peer reads nothing".into()),
            Err(e) => Err(e.to_string()),
        }
    }

    /// Whether `close` of such a file keeps the calling thread waiting.
    pub fn keep_waiting(&self) -> Result<bool, String> {
        let (file, _peer) = match self {
            Self::Fuse(file) => (file.try_clone().map_err(|e| e.to_string())?, None),
            Self::Linger { .. } => lingering().map(|(socket, peer)| (socket, Some(peer))).map_err(|e| e.to_string())?,
        };
        let closing = std::thread::spawn(move || drop(file));
        std::thread::sleep(Duration::from_millis(200));
        Ok(!closing.is_finished())
    }

    /// Connects to `path` and sends a frame with files. The connection stays open for as long as the result lives.
    pub fn send_to(&mut self, path: &str, count: usize) -> Result<Seqpacket, String> {
        let socket = Seqpacket::connect(Path::new(path)).map_err(|e| e.to_string())?;
        self.send(&socket, b"x", count)?;
        Ok(socket)
    }
}

/// Serves the FUSE file system with the file, until the process that started this one ends.
///
/// The server has to be a process of its own: a process that waits for an answer of its own cannot be killed. It gives
/// up its privileges, so that it gets the death signal of an unprivileged parent.
pub fn serve(is_silent: bool) -> Result<(), Box<dyn Error>> {
    let mount = fuse::SlowFile::mount()?;
    if is_silent {
        mount.fall_silent();
    } else {
        mount.keep_closers_waiting();
    }
    act::give_up_rights(Some(65_534))?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    println!("mounted");
    loop {
        std::thread::park();
    }
}

/// Opens a file whose closing waits for an answer that never comes.
fn open_unclosable() -> std::io::Result<File> {
    let mut server = Command::new(std::env::current_exe()?).arg(SERVE).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    BufReader::new(server.stdout.take().expect("a pipe")).read_line(&mut line)?;
    File::open(format!("/proc/{}/root/mnt/file", server.id()))
}

/// A socket with data that its peer does not read, and the peer.
fn lingering() -> std::io::Result<(OwnedFd, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut socket = TcpStream::connect(listener.local_addr()?)?;
    let (peer, _) = listener.accept()?;
    socket.set_nonblocking(true)?;
    let data = vec![0; 1 << 20];
    while socket.write(&data).is_ok() {}
    set_socket_linger(&socket, Some(LINGER))?;
    Ok((socket.into(), peer))
}
