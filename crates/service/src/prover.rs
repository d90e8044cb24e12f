//! Keeps the service's prover running: the process that tells members whether anybody else holds their pages. Only
//! root's service has one, and only where the kernel shows the reference counts of page frames.
//!
//! ```text
//!   not root's service, or not wanted --> none
//!   kept running (kept.rs), always on the same socket; killed where it does not answer
//!                  +-- the host lacks something --> none, and no socket: members' connections are refused at once
//! ```

use super::helper;
use super::kept::{Kept, is_missing, spawn};
use anyhow::Context;
use api::place::{Place, own_uid};
use cli::exit;
use cli::note;
use host::{Files, Pagemap, ProcessId, Seqpacket, SeqpacketListener};
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::{Pid, WaitStatus};
use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The prover's program.
const PROGRAM: &str = "pagefold-prove";
/// Time between two questions with which the supervisor checks that the prover answers: 5 s.
const ASK_EVERY: Duration = Duration::from_secs(5);
/// Time for the answer to such a question, after which the prover is killed: 10 s.
const PATIENCE: Duration = Duration::from_secs(10);
/// Message with which the prover is handed a connection.
const HANDED: &[u8] = b"h";
/// Most users, and most members, that the prover is told of. More do not fit into its buffer, and have no places of
/// their own there.
const MOST_TOLD: usize = 15 << 10;

/// Who has places of their own at the prover: users who have members, users that workers run as, and the members'
/// processes.
type Claims = (BTreeSet<u32>, BTreeSet<u32>);

/// The prover.
pub struct Prover {
    /// The socket to which members connect; `None` where there is no prover.
    listener: Option<SeqpacketListener>,
    /// The prover's process, with the socket through which it is told the claims, and the claims that it was last told.
    kept: Kept<(Seqpacket, Claims)>,
    /// The connection by which the supervisor checks that the prover answers, the time of the last question, and
    /// whether that question was answered.
    watch: Option<(act::Prover, Instant, bool)>,
}

impl Prover {
    /// A prover that is not started yet. It is started only if `wanted`.
    ///
    /// # Errors
    /// Its socket cannot be made.
    pub fn new(place: &Place, wanted: bool) -> anyhow::Result<Self> {
        let path = place.prove_socket();
        let mut listener = None;
        if wanted && own_uid() == 0 {
            // The listener refuses files; the prover accepts files only from connections to which it gives a place.
            let made = SeqpacketListener::bind(&path, Files::Refused)?;
            fs::set_permissions(&path, Permissions::from_mode(0o666))
                .with_context(|| format!("cannot set the rights of {}", path.display()))?;
            if let Some(closed) = closed_directory(place.dir()) {
                note!(
                    "users cannot enter {}: their members, and workers, which have users of their own, do not reach the prover, \
                     so that slots that were freed are not used again: chmod o+x {}",
                    closed.display(),
                    closed.display()
                );
            }
            listener = Some(made);
        } else {
            // The socket of an earlier prover is removed, because nobody would answer there.
            let _ = fs::remove_file(path);
        }
        Ok(Self { listener, kept: Kept::new("prover"), watch: None })
    }

    /// Whether this service has a prover.
    pub const fn is_wanted(&self) -> bool {
        self.listener.is_some()
    }

    /// Whether the prover is wanted, and does not run.
    pub fn is_missing(&self) -> bool {
        self.listener.is_some() && self.kept.process().is_none()
    }

    /// Time at which the prover should be started; `None`: it is not wanted, or runs.
    pub fn start_at(&self, now: Instant) -> Option<Instant> {
        self.listener.as_ref().and_then(|_| self.kept.start_at(now))
    }

    /// Starts the prover, as user `uid` if that is given.
    pub fn start(&mut self, uid: Option<u32>) {
        let Some(listener) = &self.listener else { return };
        match started(listener, uid) {
            Ok((process, users)) => {
                note!("prover started: process {}", process.pid);
                self.kept.started(process, (users, Claims::default()));
            }
            // The socket is removed, because a socket that nobody answers would keep members waiting.
            Err(e) if is_missing(&e) => {
                note!("{e:#}; members find out by themselves what is held, which costs them more");
                self.give_up();
            }
            Err(e) => self.kept.not_started(&format!("{e:#}")),
        }
    }

    /// Notes why the prover could not be started.
    pub fn not_started(&mut self, why: &str) {
        self.kept.not_started(why);
    }

    /// Tells the prover which users have members, which users its workers run as, and which processes are members, if
    /// that has changed. They have places of their own at the prover.
    pub fn tell_claims(&mut self, users: BTreeSet<u32>, members: BTreeSet<u32>) {
        let claims = (users, members);
        let Some((socket, told)) = self.kept.line_mut().filter(|(_, told)| *told != claims) else { return };
        let (users, members) = (claims.0.iter().take(MOST_TOLD), claims.1.iter().take(MOST_TOLD));
        let frame: Vec<u8> = users.chain([&u32::MAX]).chain(members).flat_map(|number| number.to_le_bytes()).collect();
        // If the prover does not read at the moment, it is told later.
        if socket.send(&frame, &[]).is_ok_and(|sent| sent) {
            *told = claims;
        }
    }

    /// Hands a connection on to the prover, with the pagemap of the process that connected if the prover cannot open
    /// that by itself. If the prover does not run, the connection is closed.
    pub fn hand_on(&self, connection: Seqpacket, pagemap: Option<&Pagemap>) {
        let connection = OwnedFd::from(connection);
        if let Some((socket, _)) = self.kept.line() {
            let files: Vec<_> = [connection.as_fd()].into_iter().chain(pagemap.map(Pagemap::file)).collect();
            let _ = socket.send(HANDED, &files);
        }
        // Closing the connection on this thread might wait for files in it.
        drop(Seqpacket::from_stranger(connection));
    }

    /// Asks the prover a question from time to time, and kills it if it does not answer, so that it is started again.
    /// Forked children of members wait for its answers. Called once a second.
    pub fn watch(&mut self, now: Instant) {
        let Some(process) = self.kept.process() else { return };
        let Some((prover, asked, answered)) = &mut self.watch else {
            let Ok((ours, theirs)) = Seqpacket::pair() else { return };
            self.hand_on(theirs, None);
            let mut prover = act::Prover::over(ours);
            self.watch = prover.ask_later().is_ok().then_some((prover, now, false));
            return;
        };
        let waited = now.saturating_duration_since(*asked);
        match prover.has_answered() {
            Ok(new) => *answered |= new,
            Err(_) => return self.watch = None,
        }
        if *answered && waited >= ASK_EVERY {
            match prover.ask_later() {
                Ok(()) => (*asked, *answered) = (now, false),
                Err(_) => self.watch = None,
            }
        } else if !*answered && waited >= PATIENCE {
            note!("the prover, process {}, does not answer: it is killed", process.pid);
            process.kill();
            self.watch = None;
        }
    }

    /// Notes that a child of this process has ended, which may be the prover.
    pub fn child_ended(&mut self, pid: Pid, status: WaitStatus) {
        if !self.kept.child_ended(pid, status) {
            return;
        }
        self.watch = None;
        if status.exit_status() == Some(i32::from(exit::Code::HostLacks as u8)) {
            note!(
                "there is no prover on this host: members find out by themselves what is held, which costs them more"
            );
            self.give_up();
        }
    }

    /// Ends the prover for good.
    pub fn end(&mut self) {
        self.kept.end();
        self.give_up();
    }

    fn give_up(&mut self) {
        if let Some(listener) = self.listener.take() {
            let _ = fs::remove_file(listener.path());
        }
    }
}

/// The topmost directory on the path to `dir` that other users may not enter, by its mode; `None` if they may enter all
/// of them.
fn closed_directory(dir: &Path) -> Option<PathBuf> {
    let dir = dir.canonicalize().ok()?;
    let is_closed = |dir: &&Path| fs::metadata(dir).is_ok_and(|meta| meta.permissions().mode() & 0o001 == 0);
    dir.ancestors().filter(is_closed).last().map(Path::to_owned)
}

fn started(listener: &SeqpacketListener, uid: Option<u32>) -> anyhow::Result<(ProcessId, Seqpacket)> {
    let input = listener.as_fd().try_clone_to_owned().context("cannot pass a socket on")?;
    let program = helper::program(PROGRAM).with_context(|| format!("cannot find the prover, {PROGRAM}"))?;
    let (users, theirs) = Seqpacket::pair().context("cannot make a socket")?;
    let mut command = Command::new(&program);
    command.args(["--supervisor", &std::process::id().to_string()]);
    command.stdin(Stdio::from(input)).stdout(Stdio::from(OwnedFd::from(theirs)));
    let started = spawn(&mut command, uid);
    let (process, _) = started.with_context(|| format!("cannot start the prover, {}", program.display()))?;
    Ok((process, users))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_that_users_cannot_enter_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let (home, service) = (dir.path().join("home"), dir.path().join("home/service"));
        fs::create_dir_all(&service).unwrap();
        let set = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        [dir.path(), &home, &service].iter().for_each(|path| set(path, 0o711));
        assert_eq!(closed_directory(&service), None);
        [&home, &service].iter().for_each(|path| set(path, 0o770));
        assert_eq!(closed_directory(&service), Some(home.canonicalize().unwrap()));
    }
}
