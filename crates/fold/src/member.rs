//! A member's connection.
//!
//! ```text
//!            Hello of our version            hung up, or cut off
//!   admitted ---------------------> serving ---------------------> ghost (lease.rs)
//!      |                             in flight: 1 donation, 4 requests to fold
//!      +-- anything else, or nothing for 10 s: cut off
//! ```
//!
//! A member is *cut off* when it says what no honest agent says ([`Cut`]). That ends the connection and nothing else: what
//! it maps stays held as its ghost's, other members do not notice. What we have to say to it waits in a bounded queue;
//! nothing is asked of it while it has unanswered requests, so a member that never reads costs a few frames.

use crate::control::Identity;
use crate::dispatch::Donation;
use crate::lease::{Leases, NotOffered};
use crate::settle::Lie;
use crate::table::MemberId;
use host::{DonationWindow, Received, Seqpacket};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};
use wire::{DONATION_PAGES, FoldRun, Malformed, MemberStats, Pace, SlotRun, ToAgent, ToWorker};

/// Requests to fold that a member has not answered.
pub const FOLDS_IN_FLIGHT: usize = 4;
/// Frames that may wait for a member to read others.
const MOST_WAITING: usize = 256;
/// So long a member may leave us waiting before the connection ends: for its first word, or to read anything.
const GREETING_TIME: Duration = Duration::from_secs(10);
/// See [`GREETING_TIME`].
const READING_TIME: Duration = Duration::from_secs(120);
/// A member that was asked for pages so long ago does not give them.
pub const DONATION_TIME: Duration = Duration::from_secs(10);
/// At first a member is asked to report everything again after so long, then after twice that, and so on.
const FIRST_AGAIN: Duration = Duration::from_secs(5);
/// But at least so often.
const LAST_AGAIN: Duration = Duration::from_secs(600);

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub enum Cut {
    /// The member hung up.
    #[error("hung up")]
    Closed,
    /// A frame that no agent sends.
    #[error("cut off: {0}")]
    Malformed(#[from] Malformed),
    /// It has another version.
    #[error("cut off: its agent speaks version {0} of the protocol, this worker {version}", version = wire::VERSION)]
    Version(u16),
    /// It did not say `Hello` first, or not once.
    #[error("cut off: the first frame, and only that, is a greeting")]
    Greeting,
    /// It did not say anything.
    #[error("cut off: it has not said a word")]
    Silent,
    /// It answers what it was not asked.
    #[error("cut off: it answers what it was not asked")]
    NotAsked,
    /// It has a slot that it cannot have.
    #[error("cut off: {0}")]
    Lie(#[from] Lie),
    /// It takes a lease that was not offered.
    #[error("cut off: {0}")]
    Lease(#[from] NotOffered),
    /// It does not read.
    #[error("cut off: it does not read what it is told")]
    DoesNotRead,
    /// The same process has connected again.
    #[error("connected again")]
    Replaced,
    /// The connection broke, or we have no means to serve it.
    #[error("disconnected: {0}")]
    Io(#[from] io::Error),
}

/// A frame to be sent, and a file that goes with it.
#[derive(Debug)]
struct Waiting {
    frame: Vec<u8>,
    file: Option<Rc<OwnedFd>>,
}

/// A request for pages that has not been answered.
#[derive(Debug)]
pub struct Asked {
    /// Its number.
    pub id: u32,
    /// What was asked for.
    pub donation: Donation,
    /// When.
    pub since: Instant,
}

/// Something that a member said of slots.
#[derive(Clone, Copy, Debug)]
pub enum Booking {
    /// It maps them since an earlier connection.
    Held(SlotRun),
    /// It maps them no longer.
    Released(SlotRun),
}

/// When a member is to report everything again.
#[derive(Debug)]
pub struct Again {
    /// Then; not at all if `None`.
    pub due: Option<Instant>,
    wait: Duration,
}

impl Again {
    /// In a while, which gets longer each time.
    pub fn later(&mut self, now: Instant) {
        if self.due.is_none() {
            self.due = Some(now + self.wait);
            self.wait = (self.wait * 2).min(LAST_AGAIN);
        }
    }

    /// Now.
    pub const fn now(&mut self, now: Instant) {
        (self.due, self.wait) = (Some(now), FIRST_AGAIN);
    }
}

/// See the module.
#[derive(Debug)]
pub struct Member {
    /// Its number in the plan.
    pub id: MemberId,
    /// Who it is.
    pub identity: Identity,
    socket: Seqpacket,
    waiting: VecDeque<Waiting>,
    /// Since when it has not read what waits.
    stuck_since: Option<Instant>,
    admitted: Instant,
    /// Whether it has greeted.
    pub is_serving: bool,
    /// Where it puts pages.
    pub window: DonationWindow,
    /// Its leases.
    pub leases: Leases,
    /// What it was asked to show.
    pub asked: Option<Asked>,
    /// What it was asked to fold.
    pub folds: VecDeque<(u32, Vec<FoldRun>)>,
    next_request: u32,
    /// What it said of itself last.
    pub stats: MemberStats,
    /// What it was told last about how to go about it.
    pub told: Option<Pace>,
    /// When it is to report everything again.
    pub again: Again,
    /// Until then it is asked nothing: it could not fold for a reason that holds for all of its pages.
    pub rests_until: Option<Instant>,
    /// Pages that it reported since it connected.
    pub reported: u64,
    /// What it said of slots that it has or let go and that is not booked yet. Nothing else is heard before.
    pub backlog: VecDeque<Booking>,
}

impl Member {
    /// A member that has not said anything yet.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn new(id: MemberId, identity: Identity, socket: Seqpacket, now: Instant) -> io::Result<Self> {
        Ok(Self {
            id,
            identity,
            socket,
            waiting: VecDeque::new(),
            stuck_since: None,
            admitted: now,
            is_serving: false,
            window: DonationWindow::create(DONATION_PAGES)?,
            leases: Leases::new()?,
            asked: None,
            folds: VecDeque::new(),
            next_request: 0,
            stats: MemberStats::default(),
            told: None,
            again: Again { due: None, wait: FIRST_AGAIN },
            rests_until: None,
            reported: 0,
            backlog: VecDeque::new(),
        })
    }

    /// The next thing it says, if it has said anything.
    ///
    /// # Errors
    /// The connection is over.
    pub fn hear(&self, buffer: &mut [u8]) -> Result<Option<ToWorker>, Cut> {
        // No message of an agent carries files. Those that come nevertheless are closed here.
        match self.socket.receive(buffer, &mut Vec::new())? {
            Received::Frame(bytes) => Ok(Some(ToWorker::decode(&buffer[..bytes])?)),
            Received::Nothing => Ok(None),
            Received::Closed => Err(Cut::Closed),
        }
    }

    /// Says something, after what waits.
    pub fn say(&mut self, message: &ToAgent, file: Option<Rc<OwnedFd>>) {
        let mut frame = Vec::new();
        message.encode(&mut frame);
        self.waiting.push_back(Waiting { frame, file });
    }

    /// Sends what waits, as far as it is taken.
    ///
    /// # Errors
    /// The member does not read, or has hung up.
    pub fn flush(&mut self, now: Instant) -> Result<(), Cut> {
        while let Some(Waiting { frame, file }) = self.waiting.front() {
            let files = file.as_ref().map(|file| file.as_fd());
            if !self.socket.send(frame, files.as_slice()).map_err(|_| Cut::Closed)? {
                let since = *self.stuck_since.get_or_insert(now);
                let too_long = now.saturating_duration_since(since) > READING_TIME;
                return if too_long || self.waiting.len() > MOST_WAITING { Err(Cut::DoesNotRead) } else { Ok(()) };
            }
            self.stuck_since = None;
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// Whether something waits for it to read.
    pub fn is_stuck(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether it has been silent for too long.
    pub fn is_silent(&self, now: Instant) -> bool {
        !self.is_serving && now.saturating_duration_since(self.admitted) > GREETING_TIME
    }

    /// Gives it the time from now on again to greet: it could not be heard until now.
    pub const fn wait_from(&mut self, now: Instant) {
        self.admitted = now;
    }

    /// The number of the next request.
    pub const fn request(&mut self) -> u32 {
        self.next_request = self.next_request.wrapping_add(1);
        self.next_request
    }

    /// Whether it is to be asked anything now.
    pub fn rests(&self, now: Instant) -> bool {
        self.rests_until.is_some_and(|until| now < until)
    }
}

impl AsFd for Member {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
