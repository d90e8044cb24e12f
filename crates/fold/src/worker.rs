//! The worker process: one loop that waits for its supervisor, its members and the clock.
//!
//! ```text
//!   waiting ---- Take ----> serving ----------------------------------------> over
//!      |                      |  ^                                             ^
//!      | no supervisor        |  | a new supervisor connects                   | no supervisor, no member,
//!      v for 10 s             v  | and is told what there is                   | no former member for 30 s
//!     over                  without a supervisor ------------------------------+
//! ```
//!
//! The supervisor's end changes nothing for members. The worker waits for nobody in particular: every socket is
//! non-blocking, and each turn of the loop reads a few frames (`turns.rs`).
//!
//! Each turn of the loop polls all members. Hundreds of members send many messages a second even if none of them folds.
//! So while nothing is under way, and all messages were heard, the worker pauses between two turns, and lets messages
//! collect ([`pause_after`]).

use crate::group::{Group, Message};
use crate::table::MemberId;
use crate::tick::TICK;
use api::control::{CONTROL_BYTES, News, Order};
use host::{Received, Seqpacket, SeqpacketListener};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use wire::FRAME_BYTES;

/// A worker that has never got the supervisor's order to begin (`Take`) ends after this time without a supervisor: 10
/// s.
const UNBEGUN_TIME: Duration = Duration::from_secs(10);
/// Time without supervisor, members and departed members after which a worker ends: 30 s.
const IDLE_TIME: Duration = Duration::from_secs(30);
/// Length of the pause after a turn in which nothing was under way, as a multiple of the processor time of that turn:
/// 200. The pause is [`TICK`] at most.
const PAUSE_TURNS: u32 = 200;
/// After a turn of less processor time than this, there is no pause: 250 us. With few members, a sleep would cost as
/// much as it saves.
const SHORT_TURN: Duration = Duration::from_micros(250);

/// Why a worker cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `poll` failed.
    #[error("cannot wait for the supervisor and members: {0}")]
    Wait(#[source] io::Error),
}

/// Result of a worker's life.
pub type Result<T> = std::result::Result<T, Error>;

/// The connection to the supervisor.
struct Supervisor {
    socket: Seqpacket,
    waiting: VecDeque<Message>,
}

struct Worker {
    listener: SeqpacketListener,
    supervisor_uid: u32,
    supervisor: Option<Supervisor>,
    group: Group,
    /// Since when there has been no supervisor, no member and no departed member.
    unused_since: Instant,
    /// Pause before the next turn, in which members' messages collect.
    pause: Duration,
    buffer: Vec<u8>,
}

/// Runs a group's worker until nobody needs it. Supervisors, which may be root or have the uid `supervisor_uid`,
/// connect to `listener`. `prover` is the socket of the service's prover.
///
/// # Errors
/// `poll` failed.
pub fn run(listener: SeqpacketListener, group: &str, supervisor_uid: u32, prover: PathBuf) -> Result<()> {
    raise_file_limit();
    let mut worker = Worker::new(listener, Group::new(group, prover, Instant::now()), supervisor_uid);
    while !worker.is_over(Instant::now()) {
        worker.turn()?;
        std::thread::sleep(worker.pause);
    }
    Ok(())
}

/// Raises the limit of open files to the most that this process may have: a member takes about four.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    // If that fails, fewer members are served, and an event says why.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

/// Time after which a worker without supervisor, members and departed members ends.
const fn patience(begun: bool) -> Duration {
    if begun { IDLE_TIME } else { UNBEGUN_TIME }
}

/// The pause after a turn that took `turn` of processor time, while nothing is under way.
fn pause_after(turn: Duration) -> Duration {
    if turn > SHORT_TURN { (turn * PAUSE_TURNS).min(TICK) } else { Duration::ZERO }
}

impl Worker {
    fn new(listener: SeqpacketListener, group: Group, supervisor_uid: u32) -> Self {
        Self {
            listener,
            supervisor_uid,
            supervisor: None,
            group,
            unused_since: Instant::now(),
            pause: Duration::ZERO,
            buffer: vec![0; CONTROL_BYTES],
        }
    }

    fn is_over(&mut self, now: Instant) -> bool {
        if self.supervisor.is_some() || !self.group.is_idle() {
            self.unused_since = now;
        }
        now.saturating_duration_since(self.unused_since) > patience(self.group.begun)
    }

    fn turn(&mut self) -> Result<()> {
        let before = host::own_thread_cpu_time();
        let (listener, supervisor, members) = self.wait()?;
        if supervisor {
            self.hear_supervisor();
        }
        if listener {
            self.accept();
        }
        if !self.group.inheritance.is_done() {
            if let Err(e) = self.group.inheritance.go_on(&mut self.group.planner) {
                self.group.tell(News::Event(format!("cannot read a slot of an earlier worker: {e}")), Vec::new());
            }
            let now = Instant::now();
            self.group.members.values_mut().for_each(|member| member.wait_from(now));
        }
        let more_waits = self.group.hear_in_turn(members, &mut self.buffer[..FRAME_BYTES]);
        let now = Instant::now();
        self.group.tick(now);
        self.group.proofs.go_on(&mut self.group.planner.pool, now);
        self.group.speak(now);
        self.tell_supervisor();
        let took = host::own_thread_cpu_time().saturating_sub(before);
        let is_at_rest = !more_waits && self.until_due(Instant::now()) > TICK;
        self.pause = if is_at_rest { pause_after(took) } else { Duration::ZERO };
        Ok(())
    }

    /// How long the next turn may wait for messages: no time while bookings wait, otherwise until timed work may be
    /// due.
    fn until_due(&self, now: Instant) -> Duration {
        let is_busy =
            !self.group.inheritance.is_done() || self.group.members.values().any(|member| !member.backlog.is_empty());
        if is_busy { Duration::ZERO } else { self.group.until_tick(now) }
    }

    /// Waits for the listener, the supervisor, members or the clock. Returns whether the listener and the supervisor
    /// have something to be read, and which members have.
    fn wait(&self) -> Result<(bool, bool, Vec<MemberId>)> {
        let inherits = !self.group.inheritance.is_done();
        let mut fds = vec![PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN)];
        let interest = |is_waiting| if is_waiting { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        if let Some(supervisor) = &self.supervisor {
            fds.push(PollFd::from_borrowed_fd(supervisor.socket.as_fd(), interest(!supervisor.waiting.is_empty())));
        }
        let first = fds.len();
        // Members claim slots that an earlier worker filled. These claims cannot be checked before all of those slots
        // are fingerprinted, so members are not heard meanwhile.
        let members = self.group.members.values().filter(|_| !inherits);
        fds.extend(members.map(|member| PollFd::from_borrowed_fd(member.as_fd(), interest(member.is_stuck()))));
        fds.extend(self.group.proofs.socket().map(|prover| PollFd::from_borrowed_fd(prover, PollFlags::IN)));
        let until = self.until_due(Instant::now());
        let time = Timespec::try_from(until).unwrap_or_default();
        match poll(&mut fds, Some(&time)) {
            Ok(_) => {}
            Err(Errno::INTR | Errno::AGAIN | Errno::NOMEM) => return Ok((false, false, Vec::new())),
            Err(e) => return Err(Error::Wait(e.into())),
        }
        let speaks = |fd: &PollFd<'_>| fd.revents().intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR);
        let supervisor = self.supervisor.is_some() && speaks(&fds[1]);
        let members = self.group.members.iter().zip(&fds[first..]);
        let members = members.filter(|((_, member), fd)| speaks(fd) || !member.backlog.is_empty());
        Ok((speaks(&fds[0]), supervisor, members.map(|((id, _), _)| *id).collect()))
    }

    fn accept(&mut self) {
        let socket = match self.listener.accept() {
            Ok(Some(socket)) => socket,
            Ok(None) => return,
            Err(e) => return self.group.tell(News::Event(e.to_string()), Vec::new()),
        };
        let may = socket.peer().is_ok_and(|peer| peer.uid == 0 || peer.uid == self.supervisor_uid);
        if may {
            self.supervisor = Some(Supervisor { socket, waiting: self.group.adopted(Instant::now()).into() });
        }
    }

    fn hear_supervisor(&mut self) {
        let mut files: Vec<OwnedFd> = Vec::new();
        while let Some(supervisor) = &self.supervisor {
            match supervisor.socket.receive(&mut self.buffer, &mut files) {
                Ok(Received::Frame(bytes)) => match serde_json::from_slice::<Order>(&self.buffer[..bytes]) {
                    Ok(order) => self.group.obey(order, std::mem::take(&mut files), Instant::now()),
                    Err(e) => self.group.tell(News::Event(format!("an order that makes no sense: {e}")), Vec::new()),
                },
                Ok(Received::Nothing) => return,
                Ok(Received::Closed) | Err(_) => self.supervisor = None,
            }
        }
    }

    fn tell_supervisor(&mut self) {
        let Some(supervisor) = &mut self.supervisor else { return };
        supervisor.waiting.append(&mut self.group.take_news());
        while let Some((news, files)) = supervisor.waiting.front() {
            let files: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
            let sent =
                serde_json::to_vec(news).map_err(io::Error::from).and_then(|f| supervisor.socket.send(&f, &files));
            match sent {
                Ok(true) => drop(supervisor.waiting.pop_front()),
                Ok(false) => return,
                Err(_) => {
                    self.supervisor = None;
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "turns_tests.rs"]
mod turns_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_turns_are_followed_by_pauses_and_no_pause_is_longer_than_a_tick() {
        let pauses = [0, 250, 500, 1250, 1_000_000].map(|us| pause_after(Duration::from_micros(us)).as_millis());
        assert_eq!(pauses, [0, 0, 100, 250, 250]);
    }
}
