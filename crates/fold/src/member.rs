//! A member's connection.
//!
//! ```text
//!            Hello of our version            hung up, or cut off
//!   admitted ---------------------> serving ---------------------> departed member (lease.rs)
//!      |                             in flight: 1 donation, 4 requests to fold
//!      +-- anything else, or nothing for 10 s: cut off
//! ```
//!
//! The worker *cuts off* a member that sends messages which no honest agent sends ([`Cut`]). That ends the connection
//! and nothing else. The slots that the member maps stay held by its departed member, and other members do not notice.
//!
//! Frames for a member wait in a bounded queue. The worker asks for nothing more while requests are unanswered, so a
//! member that never reads costs a few frames.

use crate::dispatch::Donation;
use crate::headroom::Headroom;
use crate::lease::{Leases, NotOffered};
use crate::settle::NotBooked;
use crate::table::MemberId;
use crate::transition::Lie;
use act::DonationWindow;
use api::control::Identity;
use host::{Received, Seqpacket};
use page::Fingerprint;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};
use wire::{DONATION_PAGES, FRAME_BYTES, FoldRun, Malformed, MemberStats, Pace, RestedRun, SlotRun, ToAgent, ToWorker};

/// Most requests to fold that a member may have unanswered. It is asked to fold nothing more until it answers one.
pub const FOLDS_IN_FLIGHT: usize = 4;
/// Most frames that may wait for a member that does not read. With more, the member is cut off. Also the most frames
/// that are read of a member's last words.
const MOST_WAITING: usize = 256;
/// Time within which a new member must send `Hello`, or it is cut off: 10 s.
const GREETING_TIME: Duration = Duration::from_secs(10);
/// Time within which a member must read a waiting frame, or it is cut off: 120 s.
const READING_TIME: Duration = Duration::from_secs(120);
/// Time within which a member must answer a request for page contents. Later, the request counts as refused: 10 s.
pub const DONATION_TIME: Duration = Duration::from_secs(10);
/// First and longest wait before a member is asked for a full report: 5 s, 10 min. The wait doubles with each request.
const AGAIN: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(600));

/// Why the worker ends a connection.
#[derive(Debug, thiserror::Error)]
pub enum Cut {
    /// The member has ended, or its agent has closed the connection.
    #[error("ended, or closed its connection")]
    Closed,
    /// Its agent has closed the connection, for this reason.
    #[error("closed its connection: {}", .0.escape_debug())]
    Left(String),
    /// The member sent a frame that is not valid.
    #[error("cut off: {0}")]
    Malformed(#[from] Malformed),
    /// Its agent speaks another version of the protocol.
    #[error("cut off: its agent speaks version {0} of the protocol, this worker {version}", version = wire::VERSION)]
    Version(u16),
    /// Its first frame was not `Hello`, or a later frame was `Hello`.
    #[error("cut off: the first frame, and only that, is a greeting")]
    Greeting,
    /// It did not send `Hello` in time.
    #[error("cut off: it has not said a word")]
    Silent,
    /// It answered a request that the worker did not make.
    #[error("cut off: it answers what it was not asked")]
    NotAsked,
    /// It released a slot that it cannot have.
    #[error("cut off: {0}")]
    Lie(#[from] Lie),
    /// It claims to map slots, and this cannot be booked. The slots that it really maps keep their bytes.
    #[error("cut off: {0}")]
    NotBooked(#[from] NotBooked),
    /// It took a lease that was not offered.
    #[error("cut off: {0}")]
    Lease(#[from] NotOffered),
    /// It did not read its frames in time.
    #[error("cut off: it does not read what it is told")]
    DoesNotRead,
    /// The same process has connected again. The field is the reason for which the earlier connection would have been
    /// ended.
    #[error("{}connected again", .0.as_ref().map_or(String::new(), |word| format!("{word}, and ")))]
    Replaced(Option<Box<Self>>),
    /// Its process was detached.
    #[error("detached")]
    Dismissed,
    /// The connection failed, or the worker has no file descriptors left to serve it.
    #[error("disconnected: {0}")]
    Io(#[from] io::Error),
}

/// A frame that is still to be sent to a member, and a file descriptor that goes with it.
#[derive(Debug)]
struct Waiting {
    frame: Vec<u8>,
    file: Option<Rc<OwnedFd>>,
}

/// A request to a member to show the contents of pages, not answered yet.
#[derive(Debug)]
pub struct Asked {
    /// Its number.
    pub id: u32,
    /// The pages asked for, and their slots.
    pub donation: Donation,
    /// When the worker asked.
    pub since: Instant,
}

/// A part of a member's message that is still to be booked.
#[derive(Clone, Debug)]
pub enum Booking {
    /// These pages were not written for an interval, and have these fingerprints.
    Rested(Vec<RestedRun>, Vec<Fingerprint>),
    /// The member claims that these pages were folded in an earlier connection, and still map these slots.
    Held(SlotRun),
    /// The member maps these slots of a template's file (`home.rs`).
    Home(SlotRun),
    /// The member maps these slots no longer.
    Released(SlotRun),
}

/// When a member is asked for a full report.
#[derive(Debug)]
pub struct Again {
    /// When the next request is sent; `None`: no request is planned.
    pub due: Option<Instant>,
    wait: Duration,
}

impl Again {
    /// Plans a request for a full report after a wait, unless one is planned. The wait doubles each time.
    pub fn later(&mut self, now: Instant) {
        if self.due.is_none() {
            self.due = Some(now + self.wait);
            self.wait = page::doubled(Some(self.wait), AGAIN);
        }
    }

    /// Requests a full report at once, and resets the wait.
    pub const fn now(&mut self, now: Instant) {
        (self.due, self.wait) = (Some(now), AGAIN.0);
    }
}

/// A member's connection, and the worker's records of the member.
#[derive(Debug)]
pub struct Member {
    /// The member's number in the planner ([`crate::plan`]).
    pub id: MemberId,
    /// Its name and process.
    pub identity: Identity,
    /// The uid of the process that connected.
    pub uid: u32,
    socket: Seqpacket,
    waiting: VecDeque<Waiting>,
    /// Time since which the member has not read waiting frames; `None` if none wait.
    stuck_since: Option<Instant>,
    admitted: Instant,
    /// Whether it has sent a `Hello` of our version.
    pub is_serving: bool,
    /// The memory file into which the member copies pages for the worker.
    pub window: DonationWindow,
    /// Its leases.
    pub leases: Leases,
    /// The unanswered request to show pages; `None` if there is none.
    pub asked: Option<Asked>,
    /// Its unanswered requests to fold, each with its number, the oldest first.
    pub folds: VecDeque<(u32, Vec<FoldRun>)>,
    next_request: u32,
    /// Its latest counters and state.
    pub stats: MemberStats,
    /// Resident pages of its process by the kernel, when `stats` came; `u64::MAX` if the kernel did not say.
    pub resident_pages: u64,
    /// Memory that folding may still take below the memory limit of its control group.
    pub headroom: Headroom,
    /// The settings that it was sent last.
    pub told: Option<Pace>,
    /// When it is asked for a full report.
    pub again: Again,
    /// Time until which the worker asks nothing, because the member could not fold for a reason that holds for all of
    /// its pages.
    pub rests_until: Option<Instant>,
    /// Pages that it reported since it connected.
    pub reported: u64,
    /// Processor time that the worker has lately spent on the member's frames: see `turns.rs`.
    pub taken: Duration,
    /// Its reports, claims and releases that are not booked yet. Before they are, no other frame of the member is read.
    pub backlog: VecDeque<Booking>,
}

impl Member {
    /// A member from which no frame has been received yet.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn new(id: MemberId, identity: Identity, uid: u32, socket: Seqpacket, now: Instant) -> io::Result<Self> {
        Ok(Self {
            id,
            identity,
            uid,
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
            resident_pages: 0,
            headroom: Headroom::default(),
            told: None,
            again: Again { due: None, wait: AGAIN.0 },
            rests_until: None,
            reported: 0,
            taken: Duration::ZERO,
            backlog: VecDeque::new(),
        })
    }

    /// Receives the member's next message; `None` if no frame waits in the socket.
    ///
    /// # Errors
    /// The member closed the connection, or sent a frame that is not valid.
    pub fn hear(&self, buffer: &mut [u8]) -> Result<Option<ToWorker>, Cut> {
        match self.socket.receive_bare(buffer)? {
            Received::Frame(bytes) => Ok(Some(ToWorker::decode(&buffer[..bytes])?)),
            Received::Nothing => Ok(None),
            Received::Closed => Err(Cut::Closed),
        }
    }

    /// Reads the frames that still wait in the socket, and returns the reason to end this connection: the member has
    /// closed it, said why it closes it (`Bye`), or sent a malformed frame. `None` if there is no such reason.
    pub fn last_word(&self) -> Option<Cut> {
        let mut buffer = vec![0; FRAME_BYTES];
        for _ in 0..MOST_WAITING {
            match self.hear(&mut buffer) {
                Ok(Some(ToWorker::Bye(why))) => return Some(Cut::Left(why)),
                Ok(Some(_)) => {}
                Ok(None) => return None,
                Err(why) => return Some(why),
            }
        }
        None
    }

    /// Queues a message behind the frames that wait.
    pub fn say(&mut self, message: &ToAgent, file: Option<Rc<OwnedFd>>) {
        let mut frame = Vec::new();
        message.encode(&mut frame);
        self.waiting.push_back(Waiting { frame, file });
    }

    /// Sends waiting frames until the socket takes no more.
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

    /// Whether frames wait because the member has not read earlier ones.
    pub fn is_stuck(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether its time to send `Hello` is over.
    pub fn is_silent(&self, now: Instant) -> bool {
        !self.is_serving && now.saturating_duration_since(self.admitted) > GREETING_TIME
    }

    /// Restarts its time to send `Hello`, because the worker could not hear it before `now`.
    pub const fn wait_from(&mut self, now: Instant) {
        self.admitted = now;
    }

    /// Takes the number for the next request.
    pub const fn request(&mut self) -> u32 {
        self.next_request = self.next_request.wrapping_add(1);
        self.next_request
    }

    /// Whether the worker asks nothing of the member at this moment.
    pub fn rests(&self, now: Instant) -> bool {
        self.rests_until.is_some_and(|until| now < until)
    }
}

impl AsFd for Member {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
