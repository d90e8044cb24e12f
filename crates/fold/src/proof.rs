//! Proof that nobody reads a free slot, so that it may be filled again.
//!
//! A lease (`lease.rs`) shows that no process maps a slot. It does not show readers that need no mapping: writes with
//! `O_DIRECT`, sends with `MSG_ZEROCOPY`, pipes. They have references to the slot's page frame even if the member has
//! written its page since, or has ended, and they must find the slot's old bytes. KSM never rewrites a frame to which
//! somebody else has a reference, and neither does the worker:
//!
//! ```text
//!   worker                                       prover (crates/prove)
//!     | reads each slot, so that it is mapped        |
//!     | slots, by their addresses in the worker ---> |
//!     |                                              | page table of the worker: which frames
//!     |                                              | references = mappings + 1 (the file)?
//!     | <------------------ free, or it is not       |
//!     | may fill it, or asks again after AGAIN_TIME  |
//! ```
//!
//! The proof holds from then on. No member was asked to map the slot since it was released, and only a process that
//! maps a slot can take a new reference to its frame. (A member that maps or lends slots unasked harms itself: it may
//! see them change.) The file keeps the frame while somebody holds it: it cannot be punched or cut, and the kernel
//! moves no page that is held. So the frame that the prover looked at is the only frame that a reader of the slot can
//! hold.
//!
//! The worker does not wait. It asks about slots some time before it needs them ([`AHEAD`]), the longest extents
//! first. A prover that does not answer is left, and asked again later.

use crate::pool::Pool;
use act::Prover;
use page::PageRange;
use rustix::fd::{AsFd, BorrowedFd};
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use wire::prove::{Kind, PROVE_PAGES, PROVE_RANGES, Proof};

/// The prover is asked about more free slots while fewer than this may be filled: 64 MiB of them.
const AHEAD: u64 = 1 << 14;
/// Time between two questions to the prover: 250 ms. After a question of the largest size, the next one follows at
/// once.
const ASK_TIME: Duration = Duration::from_millis(250);
/// Time before the prover is asked again about slots whose frame had further references: 1 s. The kernel itself holds
/// pages for a moment after they are unmapped.
const AGAIN_TIME: Duration = Duration::from_secs(1);
/// Longest wait for an answer of the prover, after which its connection is closed: 10 s.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// Time between two attempts to connect to the prover: 2 s.
const CONNECT_TIME: Duration = Duration::from_secs(2);
/// Time without a prover after which the group's report says so: 10 s. The supervisor starts a prover that ended again
/// at once.
const LOST_TIME: Duration = Duration::from_secs(10);

/// The slots of an unanswered question.
#[derive(Debug)]
struct Asked {
    segment: u8,
    slots: Vec<Range<u32>>,
    since: Instant,
}

/// The slots that are to be proven, and the connection to the prover.
#[derive(Debug)]
pub struct Proofs {
    /// Path of the prover's socket. If the service has no prover, connecting fails.
    path: PathBuf,
    prover: Option<Prover>,
    asked: Option<Asked>,
    /// The moment of the next question.
    ask_at: Instant,
    /// The moment when the prover is asked again about slots that were held.
    again_at: Instant,
    /// Time of the last connection to the prover.
    connected_at: Instant,
    /// Since when no prover has answered; `None` while one answers.
    lost_since: Option<Instant>,
}

impl Proofs {
    /// No slots are asked about, and the prover is not connected yet.
    pub const fn new(path: PathBuf, now: Instant) -> Self {
        Self { path, prover: None, asked: None, ask_at: now, again_at: now, connected_at: now, lost_since: None }
    }

    /// The prover's socket, if it owes an answer.
    pub fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.prover.as_ref().filter(|_| self.asked.is_some()).map(AsFd::as_fd)
    }

    /// Reads the prover's answer if it has come, and asks the next question if it is time.
    pub fn go_on(&mut self, pool: &mut Pool, now: Instant) {
        if let Some(asked) = self.asked.take() {
            self.asked = self.hear(asked, pool, now);
        }
        pool.has_prover = self.prover.is_some();
        // If the prover had not answered, the connection to it would have been closed by this time.
        if self.prover.is_some() && now.saturating_duration_since(self.connected_at) >= 2 * ANSWER_TIME {
            self.lost_since = None;
        }
        if now >= self.again_at {
            self.again_at = now + AGAIN_TIME;
            pool.ask_again();
        }
        if self.asked.is_none() && now >= self.ask_at && pool.freed() < AHEAD && self.is_connected(now) {
            self.ask(pool, now);
        }
    }

    /// Forgets a segment that is dropped. When the answer to a question about it comes, other memory may lie at its
    /// address.
    pub fn forget(&mut self, segment: u8) {
        self.asked.take_if(|asked| asked.segment == segment);
    }

    /// Whether no prover has answered for a while. Also true in services that have no prover; these ignore it.
    pub fn is_lost(&self, now: Instant) -> bool {
        self.lost_since.is_some_and(|since| now.saturating_duration_since(since) >= LOST_TIME)
    }

    fn is_connected(&mut self, now: Instant) -> bool {
        if self.prover.is_none() {
            self.ask_at = now + CONNECT_TIME;
            self.prover = Prover::connect(&self.path).ok();
            match self.prover {
                Some(_) => self.connected_at = now,
                None => _ = self.lost_since.get_or_insert(now),
            }
        }
        self.prover.is_some()
    }

    fn ask(&mut self, pool: &mut Pool, now: Instant) {
        let Some((segment, slots)) = pool.take_unproven() else {
            self.ask_at = now + ASK_TIME;
            let hung_up = self.prover.as_mut().is_some_and(|prover| prover.has_answered().is_err());
            if hung_up {
                self.prover = None;
                self.lost_since.get_or_insert(now);
            }
            return;
        };
        let places: Vec<PageRange> = slots.iter().filter_map(|slots| pool.place(segment, slots)).collect();
        let pages: u64 = places.iter().map(|place| place.pages).sum();
        let is_full = places.len() == PROVE_RANGES || pages == PROVE_PAGES as u64;
        self.ask_at = if is_full { now } else { now + ASK_TIME };
        let asked = Asked { segment, slots, since: now };
        match self.prover.as_mut().map(|prover| prover.send(Kind::Slot, &places)) {
            Some(Ok(true)) => self.asked = Some(asked),
            _ => self.give_up(&asked, pool, now),
        }
    }

    /// Takes the answer to a question; gives the question back if there is none yet.
    fn hear(&mut self, asked: Asked, pool: &mut Pool, now: Instant) -> Option<Asked> {
        let pages: u32 = asked.slots.iter().map(|slots| slots.end - slots.start).sum();
        let mut proofs = vec![Proof::Unknown; pages as usize];
        match self.prover.as_mut().map(|prover| prover.receive(&mut proofs)) {
            Some(Ok(true)) => {
                for (slot, proof) in asked.slots.into_iter().flatten().zip(proofs) {
                    pool.proven(asked.segment, slot, proof == Proof::Free);
                }
                self.lost_since = None;
                None
            }
            Some(Ok(false)) if now.saturating_duration_since(asked.since) < ANSWER_TIME => Some(asked),
            _ => {
                self.give_up(&asked, pool, now);
                None
            }
        }
    }

    /// Closes the connection to a prover that is gone or does not answer. The slots asked about stay unproven.
    fn give_up(&mut self, asked: &Asked, pool: &mut Pool, now: Instant) {
        self.prover = None;
        self.lost_since.get_or_insert(now);
        self.ask_at = now + CONNECT_TIME;
        for slot in asked.slots.iter().cloned().flatten() {
            pool.proven(asked.segment, slot, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::{Files, SeqpacketListener};

    #[test]
    fn prover_that_is_away_is_lost_after_10_s_and_found_once_it_has_been_there_for_20() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("prove.sock");
        let (began, mut pool) = (Instant::now(), Pool::new("acme", 16));
        let mut proofs = Proofs::new(path.clone(), began);
        let mut is_lost_at = |seconds| {
            let now = began + Duration::from_secs(seconds);
            proofs.go_on(&mut pool, now);
            proofs.is_lost(now)
        };
        assert_eq!([0, 9, 10].map(&mut is_lost_at), [false, false, true]);
        // It keeps the connection, and there is nothing to ask.
        let _prover = SeqpacketListener::bind(&path, Files::Refused).unwrap();
        assert_eq!([12, 31, 32, 60].map(&mut is_lost_at), [true, true, false, false]);
    }
}
