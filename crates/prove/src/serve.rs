//! Accepts connections of members, and serves each in a thread of its own.

use crate::ReferenceCounts;
use crate::connection::{self, Shared};
use crate::keep;
use crate::places::{self, Claims};
use act::{Inheritance, Journal, Standby};
use anyhow::Context;
use cli::note;
use host::{Pace, Pagemap, Peer, Received, Seqpacket, SeqpacketListener, Shares};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::BTreeSet;
use std::ffi::CString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Places for connections: 2048 in all, of which 256 are kept for root. A member takes two, one of them for the
/// children that it forks. Users without members have 256 together, and 32 each: these are for forked children of
/// members that have changed their user.
const PLACES: Shares = Shares { most: 2048, roots: 256, others: (256, 32) };
/// Most connections that are accepted in 50 ms.
const PACE: usize = 4;
/// Pause after a failure to accept a connection, and between two checks for followed children: 200 ms.
const PAUSE: Duration = Duration::from_millis(200);
/// Longest time between two checks whether the standby lives: 1 s.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Longest frame from the supervisor, which lists users and members, in bytes.
const USERS_BYTES: usize = 128 << 10;
/// Stack of a connection's thread, in bytes: its calls are not deep.
const STACK_BYTES: usize = 128 << 10;

/// Everything that a prover gets from its supervisor.
pub struct Serving<'a> {
    /// The socket to which members connect.
    pub listener: SeqpacketListener,
    /// A pidfd of the supervisor.
    pub supervisor: &'a OwnedFd,
    /// Through it, the supervisor says who has a claim to places, by numbers of 4 bytes each, little-endian. They are
    /// the users with members, `u32::MAX`, and the members' process ids. A frame that carries a file hands on the
    /// connection of a member that cannot connect by itself. A second file is that member's pagemap.
    pub users: Seqpacket,
}

/// Serves until the supervisor has ended and no followed child is left.
///
/// # Errors
/// The kernel refuses to wait, or memory is short.
pub fn serve(with: Serving<'_>, counts: ReferenceCounts) -> anyhow::Result<()> {
    let path = with.listener.address();
    let mut successor = Successor::begin(path.clone())?;
    accept_all(&with, counts, &mut successor)?;
    drop(with);
    wait_for_children(path.as_deref(), &mut successor);
    Ok(())
}

/// Goes on with the children of a keeper that was killed, until none is left. `journal` is the descriptor of its
/// journal's file, and `socket` the path at which its supervisor has members connect to the keeper.
///
/// # Errors
/// There is no journal, or memory is short.
pub fn succeed(journal: i32, socket: PathBuf) -> anyhow::Result<()> {
    let inheritance = Inheritance::take(journal)?;
    note!("the prover was killed; process {} follows its {} children", std::process::id(), inheritance.children.len());
    let mut successor = Successor::begin(Some(socket.clone()))?;
    keep::succeed(inheritance);
    wait_for_children(Some(&socket), &mut successor);
    Ok(())
}

fn wait_for_children(path: Option<&Path>, successor: &mut Successor) {
    while keep::has_children() {
        std::thread::sleep(PAUSE);
        path.inspect(|path| keep::hand_on(path));
        successor.look();
    }
}

/// A standby of this process. It is started again if it is killed.
struct Successor {
    journal: Arc<Journal>,
    arguments: Vec<CString>,
    standby: Option<Standby>,
}

impl Successor {
    /// `socket` is the place where the supervisor listens.
    fn begin(socket: Option<PathBuf>) -> anyhow::Result<Self> {
        let journal = keep::begin_journal().context("cannot begin a journal")?;
        let words = ["pagefold-prove", "--successor", &journal.number().to_string(), "--socket"].map(CString::new);
        let mut arguments = words.into_iter().collect::<Result<Vec<_>, _>>()?;
        arguments.push(CString::new(socket.unwrap_or_default().into_os_string().into_vec())?);
        let mut this = Self { journal, arguments, standby: None };
        this.look();
        Ok(this)
    }

    /// Starts a standby if there is none, or if the last one was killed.
    fn look(&mut self) {
        if self.standby.take_if(|standby| standby.has_ended()).is_some() {
            note!("the prover's standby was killed");
        }
        if self.standby.is_none() {
            let started = Standby::start(&self.journal, &self.arguments);
            self.standby = started.inspect_err(|e| note!("prover: cannot start a standby: {e}")).ok();
        }
    }
}

/// Accepts connections until the supervisor has ended.
fn accept_all(with: &Serving<'_>, counts: ReferenceCounts, successor: &mut Successor) -> anyhow::Result<()> {
    let shared = Arc::new(Shared::new(counts)?);
    let (mut places, mut members, mut buffer) = (Vec::<Place>::new(), BTreeSet::new(), vec![0; USERS_BYTES]);
    let (mut files, mut pace) = (Vec::new(), Pace::new(PACE, Instant::now()));
    loop {
        let due = pace.due(Instant::now());
        let listener = due.is_none().then(|| with.listener.as_fd());
        let standby = successor.standby.as_ref().map(AsFd::as_fd);
        let watched = [with.supervisor.as_fd(), with.users.as_fd()].into_iter().chain(listener).chain(standby);
        let mut fds: Vec<PollFd<'_>> = watched.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let pause = due.and_then(|due| Timespec::try_from(due.saturating_duration_since(Instant::now())).ok());
        match poll(&mut fds, Some(&pause.unwrap_or(LOOK_EVERY))) {
            // A pidfd becomes readable when its process ends.
            Ok(_) if !fds[0].revents().is_empty() => return Ok(()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        successor.look();
        while let Ok(Received::Frame(bytes)) = with.users.receive(&mut buffer, &mut files) {
            if files.is_empty() {
                let claims = Claims::of(&buffer[..bytes]);
                members.clone_from(&claims.users);
                *places::claims() = claims;
            }
            let mut handed = files.drain(..);
            if let Some(connection) = handed.next() {
                let pagemap = handed.next().map(Pagemap::handed);
                give_place(Seqpacket::from_stranger(connection), pagemap, &members, &mut places, &shared);
            }
        }
        if pace.due(Instant::now()).is_some() {
            continue;
        }
        match with.listener.accept() {
            Ok(Some(socket)) => {
                pace.count(Instant::now());
                give_place(socket, None, &members, &mut places, &shared);
            }
            Ok(None) => {}
            Err(e) => {
                note!("prover: {e}");
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// Serves a connection in a thread of its own, if the peer has a claim and its user may have another connection.
/// Otherwise closes it.
fn give_place(
    socket: Seqpacket,
    pagemap: Option<Pagemap>,
    members: &BTreeSet<u32>,
    places: &mut Vec<Place>,
    shared: &Arc<Shared>,
) {
    let Ok(peer @ Peer { uid, .. }) = socket.peer() else { return };
    if !places::claims().has(peer) {
        return;
    }
    places.retain(|place| Arc::strong_count(&place.taken) > 1);
    if !PLACES.have_room(uid, members, places.iter().map(|place| place.uid)) {
        return note!("prover: user {uid} has too many connections");
    }
    let (shared, taken) = (Arc::clone(shared), Arc::new(()));
    places.push(Place { uid, taken: Arc::clone(&taken) });
    let thread = std::thread::Builder::new().name("connection".into()).stack_size(STACK_BYTES);
    let started = thread.spawn(move || {
        // The files of this connection are closed on this thread, which keeps the connection's place for as long as
        // closing them may take.
        if let Err(e) = connection::serve(socket.take_files(), pagemap, &shared) {
            note!("prover: a connection is ended: {e}");
        }
        drop(taken);
    });
    if let Err(e) = started {
        note!("prover: cannot start a thread: {e}");
        std::thread::sleep(PAUSE);
    }
}

/// A connection's place. It is free again when the connection's thread drops its clone of `taken`.
struct Place {
    uid: u32,
    taken: Arc<()>,
}
