//! Keeps the service's web side running, the program `pagefold-web`, which answers HTTP requests. Only a service whose
//! configuration has `[api]` has one.
//!
//! ```text
//!   no [api] --> none
//!   sockets made --> kept running (kept.rs), always on the same sockets
//! ```
//!
//! The supervisor keeps the listening sockets open, so that nobody is refused while the web side is started again. The
//! web side gets copies of them, and the tokens, by its standard input (`api::setup`). In root's service it runs as a
//! user of its own. `registry.rs` decides which questions this user may ask.

use super::config::Api;
use super::helper;
use super::kept::{Kept, is_missing, spawn};
use anyhow::Context;
use api::place::{Place, own_uid};
use api::setup::{Setup, Socket};
use cli::note;
use host::{ProcessId, Seqpacket};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::process::{Pid, WaitStatus};
use std::fs::{self, Permissions};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The web side's program.
const PROGRAM: &str = "pagefold-web";
/// Time for the web side of a killed supervisor to end and free the address: 2 s.
const PREDECESSOR: Duration = Duration::from_secs(2);

/// The web side.
pub struct Web {
    /// The web side's sockets; none if there is no web side.
    sockets: Vec<(Socket, OwnedFd)>,
    /// The path of the web side's Unix socket.
    path: PathBuf,
    setup: Setup,
    /// The web side's process, with the socket through which it is told its setup.
    kept: Kept<Seqpacket>,
}

/// Listens at an address. The web side of a killed supervisor may hold the address a little longer.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let until = Instant::now() + PREDECESSOR;
    loop {
        match TcpListener::bind(address) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && Instant::now() < until => {
                std::thread::sleep(PREDECESSOR / 100);
            }
            answer => return answer,
        }
    }
}

impl Web {
    /// A web side that is not started yet. It is started only if the configuration has one.
    ///
    /// # Errors
    /// The Unix socket cannot be made.
    pub fn new(place: &Place, config: Option<&Api>) -> anyhow::Result<Self> {
        let setup = Setup { dir: place.dir().to_owned(), control: false, tokens: Vec::new(), sockets: Vec::new() };
        let path = config.and_then(|api| api.socket.clone()).unwrap_or_else(|| place.dir().join("api.sock"));
        let mut web = Self { sockets: Vec::new(), path, setup, kept: Kept::new("web side") };
        let Some(api) = config else { return Ok(web) };
        web.sockets.push((Socket::Unix, unix_socket(&web.path, api.group)?.into()));
        if let Some(address) = api.listen {
            // If this address cannot be had, everything else goes on.
            match listen(address) {
                Ok(listener) => web.sockets.push((Socket::Tcp, listener.into())),
                Err(e) => note!("cannot listen at {address}: {e}; there is no HTTP there"),
            }
        }
        web.set(api);
        Ok(web)
    }

    /// Takes over the tokens and rights of a configuration, and tells the web side.
    pub fn set(&mut self, api: &Api) {
        (self.setup.control, self.setup.tokens) = (api.control, api.tokens.clone());
        self.setup.sockets.clear();
        let Some(word) = self.kept.line() else { return };
        if !word.send(&api::ask::encode(&self.setup), &[]).is_ok_and(|sent| sent) {
            // A web side that does not read its new setup would keep its old rights, so it is killed.
            self.kept.process().iter().for_each(|process| _ = process.kill());
        }
    }

    /// Time at which the web side should be started; `None`: it is not wanted, or runs.
    pub fn start_at(&self, now: Instant) -> Option<Instant> {
        self.kept.start_at(now).filter(|_| !self.sockets.is_empty())
    }

    /// Starts the web side, as user `uid` if that is given.
    pub fn start(&mut self, uid: Option<u32>) {
        match self.started(uid) {
            Ok((process, word)) => {
                let user = uid.map_or(String::new(), |uid| format!(", user {uid}"));
                note!("web side started: process {}{user}, at {}", process.pid, self.path.display());
                self.kept.started(process, word);
            }
            Err(e) if is_missing(&e) => {
                note!("there is no HTTP: {e:#}");
                self.give_up();
            }
            Err(e) => self.kept.not_started(&format!("{e:#}")),
        }
    }

    fn started(&self, uid: Option<u32>) -> anyhow::Result<(ProcessId, Seqpacket)> {
        let program = helper::program(PROGRAM).with_context(|| format!("cannot find {PROGRAM}"))?;
        let (word, theirs) = Seqpacket::pair().context("cannot make a socket")?;
        let setup = Setup { sockets: self.sockets.iter().map(|(kind, _)| *kind).collect(), ..self.setup.clone() };
        let files: Vec<BorrowedFd<'_>> = self.sockets.iter().map(|(_, socket)| socket.as_fd()).collect();
        if !word.send(&api::ask::encode(&setup), &files).context("cannot pass sockets on")? {
            anyhow::bail!("cannot pass sockets on: the message is too long");
        }
        let mut command = Command::new(&program);
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null());
        let started = spawn(&mut command, uid);
        let (process, _) = started.with_context(|| format!("cannot start the web side, {}", program.display()))?;
        Ok((process, word))
    }

    /// Notes why the web side could not be started.
    pub fn not_started(&mut self, why: &str) {
        self.kept.not_started(why);
    }

    /// Notes that a child of this process has ended, which may be the web side.
    pub fn child_ended(&mut self, pid: Pid, status: WaitStatus) {
        self.kept.child_ended(pid, status);
    }

    /// Ends the web side for good.
    pub fn end(&mut self) {
        self.kept.end();
        self.give_up();
    }

    fn give_up(&mut self) {
        if !self.sockets.is_empty() {
            let _ = fs::remove_file(&self.path);
        }
        self.sockets.clear();
    }
}

/// A listening Unix socket to which its owner may connect, and the users of `group` if that is given.
fn unix_socket(path: &Path, group: Option<u32>) -> anyhow::Result<UnixListener> {
    match fs::symlink_metadata(path) {
        Ok(found) if !std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()) => {
            anyhow::bail!("cannot listen at {}: there is a file, which is no socket", path.display());
        }
        Ok(_) => fs::remove_file(path).with_context(|| format!("cannot replace {}", path.display()))?,
        Err(_) => {}
    }
    let listener = UnixListener::bind(path).with_context(|| format!("cannot listen at {}", path.display()))?;
    let set = || {
        if let Some(group) = group.filter(|_| own_uid() == 0) {
            std::os::unix::fs::chown(path, None, Some(group))?;
            return fs::set_permissions(path, Permissions::from_mode(0o660));
        }
        fs::set_permissions(path, Permissions::from_mode(0o600))
    };
    set().with_context(|| format!("cannot set the rights of {}", path.display()))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn socket_is_closed_to_others_and_replaces_no_other_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        drop(unix_socket(&path, None).unwrap());
        assert_eq!(mode(&path), 0o600);
        drop(unix_socket(&path, Some(61_000)).unwrap());
        let expected = if own_uid() == 0 { (0o660, 61_000) } else { (0o600, fs::metadata(&path).unwrap().gid()) };
        assert_eq!((mode(&path), fs::metadata(&path).unwrap().gid()), expected);
        let file = dir.path().join("file");
        fs::write(&file, "precious").unwrap();
        assert!(unix_socket(&file, None).unwrap_err().to_string().contains("no socket"));
        assert_eq!(fs::read(&file).unwrap(), b"precious");
    }

    #[test]
    fn address_of_a_predecessor_is_waited_for() {
        let before = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = before.local_addr().unwrap();
        let ending = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            drop(before);
        });
        assert_eq!(listen(address).unwrap().local_addr().unwrap(), address);
        ending.join().unwrap();
    }
}
