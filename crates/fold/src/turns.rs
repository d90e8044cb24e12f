//! Whose messages are heard next: members that say a lot have equal parts of the worker's time, and go after those that
//! say little.
//!
//! ```text
//!   taken    processor time of the worker's thread that a member's messages have taken lately. It is halved every
//!            10 s. If the least of those that speak is more than 250 ms, the excess is subtracted from all times
//!   a turn   hears the members that speak and have taken least (to 64 ms), each for a slice,
//!            and now and then one of the others, which all together have 1/33 of the time
//! ```
//!
//! So a member that sends few messages is handled before one that has sent messages all the time. It waits for one
//! slice and one step of the other at most (`conversation.rs`), until it has taken about as much time as the other, or
//! 250 ms. A new member has taken nothing. A process that connects again while its connection is open keeps the time
//! that it has taken.

use crate::group::Group;
use crate::table::MemberId;
use std::time::{Duration, Instant};

/// Processor time spent on one member's messages before another member's are handled: 250 us. A step that was begun is
/// finished.
pub const SLICE: Duration = Duration::from_micros(250);
/// Members whose times differ by no more than this count as equal: 64 ms. Members that seldom send take less, so one
/// turn hears all of them.
const ALIKE: Duration = Duration::from_millis(64);
/// Most processor time that a member can use before a member that sends messages all the time is treated as its equal:
/// 250 ms.
const AHEAD: Duration = Duration::from_millis(250);
/// Time between two halvings of the processor times that members have taken: 10 s.
const HALF_LIFE: Duration = Duration::from_secs(10);
/// Processor time for members that go first, as a multiple of the time for all other members: 32.
const PRICE: u32 = 32;

/// The members' turns: by them the worker chooses the member whose messages it handles next.
#[derive(Clone, Copy, Debug)]
pub struct Turns {
    /// Processor time spent on members that go first while other members waited, since one of these others was heard
    /// last.
    waited: Duration,
    /// The next of the other members is heard once `waited` has reached this.
    price: Duration,
    /// Which of the other members was heard last.
    last: MemberId,
    halved: Instant,
}

/// The members that are heard in a turn.
#[derive(Debug, PartialEq, Eq)]
pub struct Turn {
    /// Members that have taken least, which go first.
    pub first: Vec<MemberId>,
    /// One of the other members, if its turn has come.
    pub other: Option<MemberId>,
    /// Whether other members wait.
    pub others_wait: bool,
}

impl Turns {
    /// The state before any member was heard.
    pub const fn new(now: Instant) -> Self {
        Self { waited: Duration::ZERO, price: Duration::ZERO, last: MemberId(0), halved: now }
    }
}

impl Group {
    /// Handles messages of the members in `speaking` (those with unread frames) whose turn it is. Returns whether more
    /// messages may wait.
    pub fn hear_in_turn(&mut self, speaking: Vec<MemberId>, buffer: &mut [u8]) -> bool {
        let turn = self.turn(speaking);
        let mut more_waits = turn.others_wait;
        for id in turn.first.iter().chain(&turn.other) {
            let (time, more) = self.hear_for_a_slice(*id, buffer);
            self.took_in_turn(*id, time, &turn);
            more_waits |= more;
        }
        more_waits
    }

    /// Hears a member until it has said all, or for about [`SLICE`]. Returns the processor time that this took, and
    /// whether the member has more to say.
    fn hear_for_a_slice(&mut self, id: MemberId, buffer: &mut [u8]) -> (Duration, bool) {
        let began = host::own_thread_cpu_time();
        loop {
            let more = self.hear(id, buffer, Instant::now());
            let time = host::own_thread_cpu_time().saturating_sub(began);
            if !more || time >= SLICE {
                return (time, more);
            }
        }
    }

    /// Which of the members in `speaking` are heard next.
    pub(crate) fn turn(&mut self, speaking: Vec<MemberId>) -> Turn {
        let least = speaking.iter().map(|id| self.taken(*id)).min().unwrap_or_default();
        let beyond = least.saturating_sub(AHEAD);
        if !beyond.is_zero() {
            self.members.values_mut().for_each(|member| member.taken = member.taken.saturating_sub(beyond));
        }
        let end = least.min(AHEAD).saturating_add(ALIKE);
        let (first, others): (Vec<_>, Vec<_>) = speaking.into_iter().partition(|id| self.taken(*id) <= end);
        Turn { first, other: self.turns.next(&others), others_wait: !others.is_empty() }
    }

    fn taken(&self, id: MemberId) -> Duration {
        self.members.get(&id).map_or(Duration::ZERO, |member| member.taken)
    }

    /// Notes the time that a member's messages have taken in a turn.
    pub(crate) fn took_in_turn(&mut self, id: MemberId, time: Duration, turn: &Turn) {
        self.took(id, time);
        if turn.other == Some(id) {
            let price = time.saturating_mul(PRICE);
            self.turns = Turns { waited: Duration::ZERO, price, last: id, ..self.turns };
        } else if turn.others_wait {
            self.turns.waited = self.turns.waited.saturating_add(time);
        }
    }

    /// Adds to the time that a member's messages have taken.
    pub(crate) fn took(&mut self, id: MemberId, time: Duration) {
        if let Some(member) = self.members.get_mut(&id) {
            member.taken = member.taken.saturating_add(time);
        }
    }

    /// Halves the times that members have taken.
    pub(crate) fn tick_turns(&mut self, now: Instant) {
        if now.saturating_duration_since(self.turns.halved) >= HALF_LIFE {
            self.turns.halved = now;
            self.members.values_mut().for_each(|member| member.taken /= 2);
        }
    }
}

impl Turns {
    /// The next of the other members in the order of their numbers; `None` if the first ones have not used enough time
    /// since, or there are no others.
    fn next(&self, others: &[MemberId]) -> Option<MemberId> {
        let is_time = self.waited >= self.price;
        let next = others.iter().find(|id| **id > self.last).or(others.first());
        next.copied().filter(|_| is_time)
    }
}
