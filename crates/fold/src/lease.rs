//! Leases: how long a slot that a member let go must be kept.
//!
//! A member that says "this page maps its slot no longer" speaks for itself. A child that it forked meanwhile has copies
//! of its mappings, and nobody sees them. So a member also maps a *lease*, an empty file whose mapping children inherit
//! like those of the pool, and from time to time it is told to take another one: a new *era* begins. Who forked from the
//! member in an era maps that era's lease until it ends or executes another program.
//!
//! ```text
//!            era 1: taken        era 2: taken        era 3: offered
//!   lease    |====== 1 ==========|====== 2 ==========|...
//!   released  a b c               d e                          c may be needed by children of era 1,
//!   freed                          ^ when nobody maps 1        e by those of 1 and 2
//! ```
//!
//! A slot that was let go in era n may be mapped by children of n and of every era before. It is free when nobody maps
//! any of those leases. Whether a release belongs to an era is decided by the order of what the member says: its lease
//! of era n + 1 is mapped before it says so, so what was let go before that word and was forked away was so under n.
//!
//! A lease is asked about only when it is its turn: older ones are over, and the member has said that it took another.
//! Asking for it ends it, and one that has not been taken yet would be over from the beginning.
//!
//! **Ghosts.** When a connection ends, the process may well go on, with all it maps. What the member held stays held
//! until all its leases are over: because the process has ended and its children too, or because it has come back, has
//! claimed what it maps, and has taken a new lease in place of the old one. It says what it maps before it lets the
//! old lease go, so once that is seen to be over, what it said is on its way: whoever has not yet said that it took
//! its first lease is waited for. Ghosts of one process are asked in the order in which they came to be, for the same
//! reason as leases are; and they go together, because a connection may have ended before we heard all that was
//! said on it, and then what the process maps is known from an earlier one only.

use host::{Lease, LeaseState};
use page::PoolSlot;
use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

/// So long slots that were let go are collected before another era begins.
const BATCH_TIME: Duration = Duration::from_secs(2);
/// No more eras begin while so many have not ended.
const MOST_ERAS: usize = 8;

/// What a member does that no honest one does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it took a lease of era {0}, which was not offered")]
pub struct NotOffered(pub u32);

#[derive(Debug)]
struct Era {
    number: u32,
    lease: Lease,
    /// Slots that were let go in it, a hold each.
    batch: Vec<PoolSlot>,
    first_release: Option<Instant>,
}

/// The leases of one connection.
#[derive(Debug)]
pub struct Leases {
    /// In order; the last may have been offered only.
    eras: VecDeque<Era>,
    taken: u32,
}

impl Leases {
    /// With one lease, of era 1, which is to be offered.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn new() -> io::Result<Self> {
        let mut leases = Self { eras: VecDeque::new(), taken: 0 };
        leases.begin()?;
        Ok(leases)
    }

    fn begin(&mut self) -> io::Result<()> {
        let number = self.eras.back().map_or(self.taken, |era| era.number) + 1;
        self.eras.push_back(Era { number, lease: Lease::create()?, batch: Vec::new(), first_release: None });
        Ok(())
    }

    /// The lease that is to be offered, or was, and has not been taken.
    pub fn offered(&self) -> Option<(u32, &Lease)> {
        self.eras.back().filter(|era| era.number > self.taken).map(|era| (era.number, &era.lease))
    }

    /// Whether the member maps a lease: before that it may map no slot.
    pub const fn is_taken(&self) -> bool {
        self.taken > 0
    }

    /// The member maps the lease of that era, and no older one.
    ///
    /// # Errors
    /// It was not offered.
    pub fn take(&mut self, era: u32) -> Result<(), NotOffered> {
        match self.offered() {
            Some((offered, _)) if offered == era => {
                self.taken = era;
                Ok(())
            }
            _ => Err(NotOffered(era)),
        }
    }

    /// The member let a slot go. Its hold is ours now.
    pub fn released(&mut self, slot: PoolSlot, now: Instant) {
        // Nothing is let go before the first lease is taken that was not claimed before it: then it is the first era's.
        let current = self.eras.iter_mut().rev().find(|era| era.number <= self.taken.max(1));
        debug_assert!(current.is_some(), "the era that was taken last is there");
        if let Some(era) = current {
            era.batch.push(slot);
            era.first_release.get_or_insert(now);
        }
    }

    /// Begins another era if it is time to; its lease is then [`Self::offered`].
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn rotate(&mut self, now: Instant) -> io::Result<bool> {
        let due = |era: &Era| era.first_release.is_some_and(|first| now.saturating_duration_since(first) >= BATCH_TIME);
        let last = self.eras.back().filter(|era| era.number == self.taken);
        if self.eras.len() >= MOST_ERAS || !last.is_some_and(due) {
            return Ok(false);
        }
        self.begin()?;
        Ok(true)
    }

    /// Slots that nobody maps any more, as far as those go that were let go: their holds may be dropped.
    ///
    /// # Errors
    /// The kernel refused to say, or the member made it impossible to find out.
    pub fn ended(&mut self) -> io::Result<Vec<PoolSlot>> {
        self.ended_before(self.taken)
    }

    fn ended_before(&mut self, number: u32) -> io::Result<Vec<PoolSlot>> {
        let mut slots = Vec::new();
        while let Some(era) = self.eras.front().filter(|era| era.number < number) {
            match era.lease.state()? {
                LeaseState::Held => break,
                // Who spoils a lease deceives itself and its children only.
                LeaseState::Over | LeaseState::Spoilt => {
                    slots.extend(self.eras.pop_front().into_iter().flat_map(|era| era.batch))
                }
            }
        }
        Ok(slots)
    }

    /// Slots that were let go and are still held.
    pub fn limbo(&self) -> usize {
        self.eras.iter().map(|era| era.batch.len()).sum()
    }

    /// Whether anything waits for an era to end.
    pub fn is_waiting(&self) -> bool {
        self.eras.len() > 1 || self.eras.iter().any(|era| !era.batch.is_empty())
    }
}

/// What is left of a member whose connection ended.
#[derive(Debug)]
pub struct Ghost {
    /// Its process.
    pub identity: crate::control::Identity,
    leases: Leases,
    /// Slots that it may map, a hold each; in order.
    slots: Vec<PoolSlot>,
}

impl Ghost {
    /// Of a member that held these slots and had these leases.
    pub fn new(identity: crate::control::Identity, leases: Leases, mut slots: Vec<PoolSlot>) -> Self {
        slots.sort_unstable();
        Self { identity, leases, slots }
    }

    /// Whether its process may map this slot.
    pub fn holds(&self, slot: PoolSlot) -> bool {
        self.slots.binary_search(&slot).is_ok()
    }

    /// Looks whether it is over: nobody holds any of its leases. Adds slots to `slots` that it had let go and that nobody
    /// maps any more.
    ///
    /// # Errors
    /// The kernel refused to say.
    pub fn is_over(&mut self, slots: &mut Vec<PoolSlot>) -> io::Result<bool> {
        slots.append(&mut self.leases.ended_before(u32::MAX)?);
        Ok(self.leases.eras.is_empty())
    }

    /// The slots that its process mapped, if nobody does any more.
    pub fn into_slots(self) -> Vec<PoolSlot> {
        self.slots
    }

    /// Whether both are of one process.
    pub fn is_of(&self, identity: &crate::control::Identity) -> bool {
        (self.identity.pid, self.identity.started) == (identity.pid, identity.started)
    }

    /// Slots that it keeps.
    pub fn limbo(&self) -> usize {
        self.slots.len() + self.leases.limbo()
    }
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
