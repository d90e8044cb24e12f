//! The keeper: follows forked children of members, even after their parents have ended. To *follow* a child is to read
//! the events of its userfaultfd and to resolve them ([`act::Follower`]).
//!
//! A child may discard memory that maps its group's pool (`MADV_DONTNEED`). It must read zeros there afterwards, and
//! not the pool's bytes. A child that was forked by a bare system call has no agent that takes care of this. The kernel
//! reports discards through a userfaultfd of the child, which the parent's agent gets at the fork and hands to the
//! keeper. The keeper reads it as long as the child lives, even after the parent and the supervisor have ended.
//!
//! The keeper needs to know nothing else about the child: it maps zeros at once where pages were discarded, and all
//! other pages show the file.
//!
//! The keeper is safe from files and frames that a hostile peer sends:
//!
//! - It treats a file as a userfaultfd only if the kernel says that it is one.
//! - Through a userfaultfd it maps only zeros, and pages of the file that is mapped anyway. It does so in the address
//!   space of the process that opened the userfaultfd, when that process asks for it. A peer that hands over another
//!   process's userfaultfd could do the same itself.
//! - It follows children of members alone, and a bounded number for each user ([`crate::places`]). It tells the member
//!   whether it follows a child before the member relies on that. It accepts no userfaultfd on which nobody has called
//!   `UFFDIO_API`.
//! - A peer may clear `O_NONBLOCK` of a userfaultfd. That blocks the thread of this one connection, until that thread
//!   sets the flag again.
//!
//! **A keeper that is killed** has a successor, its standby ([`act::Standby`]). The standby shares the keeper's table
//! of descriptors at every instant, and a journal of all messages that the keeper has read ([`act::Journal`]). Members'
//! connections stay open, so that members do not notice. The successor follows the children until it can hand them on
//! to a new keeper. It has a standby of its own, too.
//!
//! When the keeper's supervisor has ended, nobody can connect to the keeper any more. It goes on, and hands its
//! children on to the next supervisor's keeper ([`hand_on`]). Children of a living member are handed on by that member.
//! A member does not know of children that its child has forked: the keeper hands these on itself.
//!
//! A member keeps each userfaultfd that it has handed over open, and follows its children by itself when the connection
//! is closed. So the keeper stops reading a userfaultfd before it closes the connection. If the agent in a child has
//! claimed the child's userfaultfd (`lend.rs`), neither of the two reads it. Each userfaultfd takes one of the member's
//! descriptors. When these run short, the member leaves its children to the keeper and its standby alone
//! ([`wire::prove::ALONE`]).
//!
//! At any time, somebody reads a child's userfaultfd, or nobody has it open any more. A child whose userfaultfd is open
//! and never read would hang at its next discard or fork:
//!
//! | the child | its userfaultfd is read by |
//! |---|---|
//! | was sent, and the frame is unread | nobody, until the keeper reads the frame. It does so as long as the connection is open, and answers |
//! | the keeper has a frame of its, and the member does not read answers | the keeper. It reads no further frames before it can answer |
//! | was handed over, and the member has ended before it was answered | the keeper |
//! | was handed over, and the keeper gives its children back | the keeper, until all are at rest. Those that are sent meanwhile are refused at once |
//! | the keeper was killed | its standby, which gives children back to members that live. So it does not matter which of them the journal lacks |
//!
//! Only the keeper ends a connection. The member then follows all children that it had sent through it.

use crate::places::{self, Place};
use act::{About, Follower, Inheritance, Inherited, Journal, Purpose, Told, Userfault};
use cli::note;
use host::{Peer, Received, Seqpacket};
use page::PageSet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};
use wire::prove::{ALONE, ALONE_TOO, KEEP, KEEP_BYTES, Kept as Answer, decode_keep, encode_kept};

/// Time between two checks whether followed children have ended: 1 s.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Time after which the keeper tries again to map zeros, if the kernel has reported a discard and not carried it out
/// yet: 1 ms.
const SETTLE_AFTER: Duration = Duration::from_millis(1);
/// Time between two checks whether the agent in a child has given up its claim: 20 ms.
const CLAIMED_EVERY: Duration = Duration::from_millis(20);
/// Pause after a message could not be read, or while a userfaultfd polls as readable although it has no message: 20 ms.
const SPARED_FOR: Duration = CLAIMED_EVERY;

/// A connection to the keeper of the next supervisor, once this keeper's supervisor has ended.
static SUCCESSOR: Mutex<Option<Seqpacket>> = Mutex::new(None);

/// The journal of followed children, which a successor reads when this keeper was killed.
static JOURNAL: OnceLock<Arc<Journal>> = OnceLock::new();

/// All children that are followed.
static ALL: Mutex<Vec<Weak<Kept>>> = Mutex::new(Vec::new());

/// A child that is followed. Who holds the lock of `follower` may read the child's userfaultfd.
pub struct Kept {
    watch: Arc<Userfault>,
    follower: Mutex<Follower>,
    /// Whether the keeper alone follows this child: a child of the member has forked it, or the member has given it up
    /// ([`wire::prove::ALONE`]).
    is_born: AtomicBool,
    place: Place,
    /// Whether the keeper has stopped following this child, so that the member or another keeper follows it.
    is_given_back: AtomicBool,
    /// Addresses of code and stack of the member that handed this child over ([`host::peer_layout`]). A forked child
    /// has the same ones as its parent.
    layout: Option<(u64, u64)>,
}

impl Kept {
    /// Whether the child has this layout. If so, the child and the process with this layout most likely were forked
    /// from one program.
    pub fn has_layout(&self, layout: Option<(u64, u64)>) -> bool {
        layout.is_some() && self.layout == layout
    }

    fn is_alone(&self) -> bool {
        self.is_born.load(Ordering::SeqCst)
    }

    /// Whether this keeper still follows the child: `false` once the child was given back to its member or handed to
    /// another keeper. Everybody who follows the child later looks for an agent's claim before reading.
    pub fn is_ours(&self) -> bool {
        !self.is_given_back.load(Ordering::SeqCst)
    }

    /// Locks the follower; `None` if another thread holds the lock.
    pub fn try_hold(&self) -> Option<MutexGuard<'_, Follower>> {
        match self.follower.try_lock() {
            Ok(follower) => Some(follower),
            // If a thread panicked while it held the lock, the follower can still be used: its last message was read or
            // was not.
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// All children that are followed at the moment.
pub fn all() -> Vec<Arc<Kept>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner).iter().filter_map(Weak::upgrade).collect()
}

/// Begins a journal of all children.
///
/// # Errors
/// Memory is short.
pub fn begin_journal() -> io::Result<Arc<Journal>> {
    let journal = Journal::new()?;
    Ok(Arc::clone(JOURNAL.get_or_init(|| journal)))
}

/// Follows the children of a keeper that was killed.
pub fn succeed(inheritance: Inheritance) {
    let Inheritance { mut children, sockets } = inheritance;
    let sockets = sockets.into_iter().map(|(number, socket)| (Some(number), Some(Seqpacket::from(socket))));
    let nurseries: Vec<(Option<i32>, Option<Seqpacket>)> = [(None, None)].into_iter().chain(sockets).collect();
    // This process has no supervisor. So the users with a claim are those whose children it has taken over.
    places::claims().users = nurseries.iter().map(|(_, socket)| peer_of(socket.as_ref()).uid).collect();
    for (number, socket) in nurseries {
        let mut nursery = Nursery::new(number, None, peer_of(socket.as_ref()));
        // The member may have handed over children that are not in the journal, and rely on their being followed.
        nursery.gives_back = socket.is_some() && !is_keeper(nursery.peer);
        for Inherited { follower, about } in children.extract_if(.., |child| child.about.socket == number) {
            nursery.layout = Some(about.layout).filter(|layout| *layout != (0, 0));
            nursery.push(follower, about.is_born);
        }
        std::thread::spawn(move || nursery.serve(socket));
    }
}

/// The member that hands children over through this socket. Without a socket, children count as belonging to the user
/// as which keepers run.
fn peer_of(socket: Option<&Seqpacket>) -> Peer {
    let peer = socket.and_then(|socket| socket.peer().ok());
    peer.unwrap_or_else(|| Peer { pid: 0, uid: rustix::process::getuid().as_raw() })
}

/// Whether a peer is another keeper, which does not take children back.
fn is_keeper(peer: Peer) -> bool {
    places::is_keepers(peer.uid) && host::runs_program(peer.pid, "pagefold-prove") != Some(false)
}

/// Whether any child is followed.
pub fn has_children() -> bool {
    !all().is_empty()
}

/// Connects to the next supervisor's keeper, if it listens at `path`; all children are handed on to it then. Called
/// again and again by a keeper whose supervisor has ended.
pub fn hand_on(path: &Path) {
    let mut successor = SUCCESSOR.lock().unwrap_or_else(PoisonError::into_inner);
    let is_there = |socket: &Seqpacket| matches!(socket.receive_bare(&mut [0; 8]), Ok(Received::Nothing));
    if !successor.as_ref().is_some_and(is_there) {
        *successor = Seqpacket::connect_to_service(path).ok();
    }
}

/// Calls `UFFDIO_API` on a member's userfaultfd, with fork events (`UFFD_FEATURE_EVENT_FORK`, which takes
/// `CAP_SYS_PTRACE`).
///
/// # Errors
/// The peer has no claim; the file is no userfaultfd, `UFFDIO_API` was called on it before, or the kernel has no fork
/// events.
pub fn follow_forks(peer: Peer, file: OwnedFd) -> io::Result<()> {
    may(peer)?;
    Userfault::from_fd(file)?.begin(Purpose::FollowForks)
}

/// # Errors
/// The peer has no claim to have its children followed.
fn may(peer: Peer) -> io::Result<()> {
    let why = || io::Error::other(format!("process {} of user {} is no member", peer.pid, peer.uid));
    places::claims().has(peer).then_some(()).ok_or_else(why)
}

/// Whether this frame, which came with a file, asks to follow a child, so that [`serve`] is to handle the connection.
pub fn is_first(frame: &[u8]) -> bool {
    frame == KEEP || decode_keep(frame).is_some()
}

/// Follows the child that a member hands over with this first frame, and all children that it hands over later. Returns
/// when no child is left and the member has closed the connection.
///
/// # Errors
/// The peer has no claim, or the file is no userfaultfd on which somebody has called `UFFDIO_API`.
pub fn serve(socket: Seqpacket, frame: &[u8], first: OwnedFd) -> io::Result<()> {
    let peer = socket.peer()?;
    may(peer)?;
    let mut nursery = Nursery::new(Some(socket.as_fd().as_raw_fd()), host::peer_layout(&socket), peer);
    nursery.take(&socket, frame, Some(first))?;
    nursery.serve(Some(socket));
    Ok(())
}

struct Nursery {
    children: Vec<Arc<Kept>>,
    next_look: Instant,
    /// The member's layout in memory. All children forked from it have the same.
    layout: Option<(u64, u64)>,
    /// The descriptor of the member's socket, under which the journal lists the member's children.
    number: Option<i32>,
    peer: Peer,
    /// Whether children are given back to the member, and no others are taken. The reason: the member has sent an
    /// invalid frame, or an earlier keeper had taken these children.
    gives_back: bool,
    /// An answer that could not be sent yet, because the member has not read earlier ones.
    unsent: Option<Vec<u8>>,
    /// Whether the thread must sleep ([`SPARED_FOR`]) before it polls again: a message could not be read, or a file
    /// polls as readable at all times.
    is_to_spare: bool,
}

impl Nursery {
    fn new(number: Option<i32>, layout: Option<(u64, u64)>, peer: Peer) -> Self {
        let (children, next_look) = (Vec::new(), Instant::now() + LOOK_EVERY);
        Self { children, next_look, layout, number, peer, gives_back: false, unsent: None, is_to_spare: false }
    }

    /// Follows the children until none is left and the member has closed the connection.
    fn serve(mut self, mut socket: Option<Seqpacket>) {
        while socket.is_some() || !self.children.is_empty() {
            self.wait(socket.as_ref());
            if let Some(open) = &socket
                && !self.hear(open)
            {
                // The socket is closed below. Its descriptor may then be used for another file, so the journal must
                // forget it.
                if let (Some(journal), Some(number)) = (JOURNAL.get(), self.number.take()) {
                    journal.forget_socket(number);
                }
                // The userfaultfds of children that the member is to follow are closed already.
                socket = None;
            }
            self.look();
            if self.hand_on(socket.is_some()) {
                break;
            }
        }
        // The follower must have stopped before the socket is closed, because the member begins to read then.
        drop(self);
    }

    /// Carries out the member's requests. Returns whether the member may send more. A member that has sent an invalid
    /// frame gets its children back once all of them are at rest ([`Follower::is_at_rest`]).
    fn hear(&mut self, socket: &Seqpacket) -> bool {
        match self.take_from(socket) {
            Ok(false) => return false,
            Ok(true) => {}
            Err(e) => {
                if !std::mem::replace(&mut self.gives_back, true) {
                    note!("prover: process {} gets its children back: {e}", self.peer.pid);
                }
                self.is_to_spare = true;
            }
        }
        let is_done = self.gives_back && self.are_all_at_rest();
        if is_done {
            self.children.retain(|child| child.is_alone() || child.is_given_back.swap(true, Ordering::SeqCst));
        }
        !is_done
    }

    fn are_all_at_rest(&self) -> bool {
        self.children.iter().all(|child| child.try_hold().is_some_and(|follower| follower.is_at_rest()))
    }

    /// Follows a child whose userfaultfd was handed over, if the child is alive.
    fn add(&mut self, file: OwnedFd) -> io::Result<()> {
        let child = Follower::of_child(Userfault::from_fd(file)?, PageSet::new());
        match child.is_alive() {
            true => self.push(child, false),
            false if child.watch().is_begun() => {}
            false => return Err(io::ErrorKind::InvalidData.into()),
        }
        Ok(())
    }

    /// Begins to follow a child, and notes it in the journal if a place is left. `is_born`: a followed child has forked
    /// it, so that no member knows of it.
    fn push(&mut self, mut child: Follower, is_born: bool) {
        let place = Place::take(self.peer.uid, self.children.len());
        let about = About { socket: self.number, layout: self.layout.unwrap_or_default(), is_born };
        match JOURNAL.get() {
            Some(journal) if place.is_placed => child.keep_journal(journal, about),
            _ => child.leave_journal(),
        }
        let (watch, is_given_back, is_born) = (child.shared_watch(), AtomicBool::new(false), AtomicBool::new(is_born));
        let (follower, layout) = (Mutex::new(child), self.layout);
        let kept = Arc::new(Kept { watch, follower, is_born, place, is_given_back, layout });
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(&kept));
        drop(all);
        self.children.push(kept);
    }

    /// Carries out the request in a frame of the member's.
    ///
    /// # Errors
    /// The frame is no request, or comes with a userfaultfd on which nobody has called `UFFDIO_API`.
    fn take(&mut self, socket: &Seqpacket, frame: &[u8], file: Option<OwnedFd>) -> io::Result<()> {
        let may_have_another = !self.gives_back && places::may_have_another(self.peer.uid);
        match file {
            Some(file) if let Some(number) = decode_keep(frame) => {
                let mut kept = Answer::No;
                if may_have_another {
                    self.add(file)?;
                    kept = self.children.last().map_or(Answer::Yes, |child| child.place.answer(self.children.len()));
                }
                self.answer(socket, &encode_kept(number, kept));
            }
            // A frame without a number comes from another keeper, which relies on the child being followed.
            Some(file) if frame == KEEP && (may_have_another || places::is_keepers(self.peer.uid)) => self.add(file)?,
            None if frame == ALONE => {
                for child in &self.children {
                    child.is_born.store(true, Ordering::SeqCst);
                    child.follower.lock().unwrap_or_else(PoisonError::into_inner).leave_alone();
                }
                self.answer(socket, &ALONE_TOO);
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        Ok(())
    }

    /// Answers the member, or keeps the answer until the member has read earlier ones. A member that has ended needs no
    /// answer.
    fn answer(&mut self, socket: &Seqpacket, frame: &[u8]) {
        self.unsent = matches!(socket.send(frame, &[]), Ok(false)).then(|| frame.to_vec());
    }

    /// Reads and carries out the member's requests. Returns whether the member may send more.
    ///
    /// # Errors
    /// A frame is not valid, as for [`Nursery::take`].
    fn take_from(&mut self, socket: &Seqpacket) -> io::Result<bool> {
        let (mut frame, mut files) = ([0; KEEP_BYTES + 1], Vec::new());
        if let Some(unsent) = self.unsent.take() {
            self.answer(socket, &unsent);
        }
        loop {
            if self.unsent.is_some() {
                return Ok(true);
            }
            match socket.receive(&mut frame, &mut files)? {
                Received::Nothing => return Ok(true),
                Received::Closed => return Ok(false),
                Received::Frame(bytes) => {
                    let file = files.pop();
                    if !files.is_empty() {
                        return Err(io::ErrorKind::InvalidData.into());
                    }
                    self.take(socket, &frame[..bytes], file)?;
                }
            }
        }
    }

    fn wait(&mut self, socket: Option<&Seqpacket>) {
        if std::mem::take(&mut self.is_to_spare) {
            std::thread::sleep(SPARED_FOR);
        }
        let (mut watched, mut time) = (Vec::with_capacity(self.children.len()), LOOK_EVERY);
        for child in &self.children {
            // If another thread holds the lock, it is lending the child's userfaultfd to the agent in the child
            // (`lend.rs`).
            let held = child.try_hold().map(|mut follower| (follower.is_claimed(), !follower.has_work()));
            if let Some((false, _)) = held {
                watched.push(&child.watch);
            }
            time = time.min(match held {
                Some((true, _)) => CLAIMED_EVERY,
                Some((false, true)) => LOOK_EVERY,
                Some((false, false)) | None => SETTLE_AFTER,
            });
        }
        let mut fds: Vec<PollFd<'_>> = watched.iter().map(|watch| PollFd::new(&***watch, PollFlags::IN)).collect();
        let due = if self.unsent.is_some() { PollFlags::OUT } else { PollFlags::IN };
        fds.extend(socket.map(|socket| PollFd::new(socket, due)));
        let waited = poll(&mut fds, Timespec::try_from(time).ok().as_ref());
        for (watch, _) in watched.iter().zip(&fds).filter(|(_, fd)| fd.revents().contains(PollFlags::ERR)) {
            watch.do_not_wait();
            self.is_to_spare = true;
        }
        // `poll` fails if the kernel is short of memory. The children are read all the same, after a pause, because
        // nobody else reads them.
        self.is_to_spare |= waited.is_err_and(|e| e != rustix::io::Errno::INTR);
    }

    /// Hands children without pending discards on to the next keeper, if there is one. Returns `true` if the connection
    /// is to be closed, so that the member takes its children back and hands them on.
    fn hand_on(&mut self, is_connected: bool) -> bool {
        let successor = SUCCESSOR.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(socket) = successor.as_ref() else { return false };
        let has_member = is_connected && !is_keeper(self.peer);
        if has_member && !self.are_all_at_rest() {
            return false;
        }
        self.children.retain(|child| {
            let Some(mut follower) = child.try_hold() else { return true };
            let may = follower.is_at_rest() && !follower.is_claimed() && (child.is_alone() || !has_member);
            let is_taken = may && socket.send(&KEEP, &[child.watch.as_fd()]).is_ok_and(|sent| sent);
            child.is_given_back.fetch_or(is_taken, Ordering::SeqCst);
            !is_taken
        });
        has_member && self.children.iter().all(|child| !child.is_alone())
    }

    /// Handles the events of all children, and forgets children that have ended.
    fn look(&mut self) {
        let is_due = Instant::now() >= self.next_look;
        if is_due {
            self.next_look = Instant::now() + LOOK_EVERY;
        }
        if !places::may_have_another(self.peer.uid) {
            // The next message may report a fork, and no further child of this user may be followed. So nothing is
            // read.
            self.is_to_spare = true;
            return self.forget_ended(is_due);
        }
        let (mut born, mut is_unread) = (Vec::new(), false);
        self.children.retain(|child| {
            let Some(mut child) = child.try_hold() else { return true };
            loop {
                match child.read() {
                    Ok(Told::Touch | Told::Discard | Told::Move(..)) => {}
                    Ok(Told::Birth(next)) => born.push(*next),
                    Ok(Told::Nothing) => break,
                    // The read fails, for example, if no descriptor is left for a child of this child.
                    Err(_) => {
                        is_unread = true;
                        break;
                    }
                }
            }
            child.settle().is_ok()
        });
        self.is_to_spare |= is_unread;
        self.forget_ended(is_due);
        born.into_iter().for_each(|child| self.push(child, true));
    }

    fn forget_ended(&mut self, is_due: bool) {
        if is_due {
            self.children.retain(|child| child.try_hold().is_none_or(|child| child.is_alive()));
        }
    }
}

impl Drop for Nursery {
    fn drop(&mut self) {
        self.children.iter().for_each(|child| child.is_given_back.store(true, Ordering::SeqCst));
    }
}

#[cfg(test)]
#[path = "keep_tests.rs"]
mod tests;
