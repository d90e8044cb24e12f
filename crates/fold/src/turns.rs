//! Whose messages are heard next: members that say a lot have equal parts of the worker's time, and go after those that say little.
//!
//! ```text
//!   taken    processor time of the worker's thread that a member's messages have taken lately. It is halved every 10 s. Where all
//!            that speak have more than 250 ms, what is more of the least one is taken from all
//!   a turn   hears the members that speak and have taken least (to 64 ms), each for a slice,
//!            and now and then one of the others, which all together have 1/33 of the time
//! ```
//!
//! So a member that folds goes before one that has sent messages all the time. It waits for a slice and a step at most
//! (`conversation.rs`), until it has taken about as much as the other one, or 250 ms. A new member has taken nothing. A
//! process that connects again while its connection is open keeps the time that it has taken.

use crate::group::Group;
use crate::table::MemberId;
use std::time::{Duration, Instant};

/// Processor time for which a member is heard before others have their turn: 250 us. The step that it is in comes to its end.
pub const SLICE: Duration = Duration::from_micros(250);
/// Difference that counts as none: 64 ms. Members at rest have taken less, so that one turn hears all of them.
const ALIKE: Duration = Duration::from_millis(64);
/// Most time by which a member is ahead of one that speaks all the time: 250 ms.
const AHEAD: Duration = Duration::from_millis(250);
/// Time after which the times of members are halved: 10 s.
const HALF_LIFE: Duration = Duration::from_secs(10);
/// Time for members that go first, as a multiple of the time for the others: 32.
const PRICE: u32 = 32;

/// The members' turns: by them the worker chooses the member whose messages it handles next.
#[derive(Clone, Copy, Debug)]
pub struct Turns {
    /// Processor time that members which go first have taken while others waited, since one of the others was last
    /// heard.
    waited: Duration,
    /// Length of `waited` from which on the next of the others is heard.
    price: Duration,
    /// The one of the others that was last heard.
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
    /// Hears members that speak, as far as it is their turn. Returns whether more of what members say may wait.
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

    /// The members that are heard next, of those that speak.
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
    /// The next of these members, if it is time for one.
    fn next(&self, others: &[MemberId]) -> Option<MemberId> {
        let is_time = self.waited >= self.price;
        let next = others.iter().find(|id| **id > self.last).or(others.first());
        next.copied().filter(|_| is_time)
    }
}
