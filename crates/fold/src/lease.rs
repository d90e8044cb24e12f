//! Leases: how long a slot that a member released must be kept.
//!
//! When a member releases a slot, only its own page no longer maps the slot. A child that it forked before has copies
//! of its mappings, which the worker does not see. So a member also maps a *lease*, an empty file whose mapping
//! children inherit like those of the pool. From time to time the worker offers another lease, and a new *epoch* begins
//! when the member takes it. A child forked in an epoch maps that epoch's lease until it ends or executes another
//! program.
//!
//! ```text
//!            epoch 1: taken        epoch 2: taken        epoch 3: offered
//!   lease    |====== 1 ==========|====== 2 ==========|...
//!   released  a b c               d e                          c may be needed by children of epoch 1,
//!   freed                          ^ when nobody maps 1        e by those of 1 and 2
//! ```
//!
//! A slot that was released in epoch n may be mapped by children of n and of every epoch before. It is free when nobody
//! maps any of those leases.
//!
//! The order of the member's messages decides which epoch a release belongs to. The member says
//! `LeaseTaken` directly after it has exchanged its lease, and sends no release in between. So a child that inherited a
//! slot released before that message holds an older lease.
//!
//! The worker asks about a lease only in its turn: older ones are over, and the member has said that it took a newer
//! one. A question to the kernel about a lease that nobody maps ends the lease for good: nobody can map it afterwards.
//! So a lease that was offered and not taken yet must not be asked about.
//!
//! # Departed members
//!
//! When a connection ends, the process may go on with all that it maps. Its slots stay held by a *departed member*
//! until all leases of that connection are over, for one of two reasons:
//!
//! - the process and its children have ended, or
//! - the process has connected again, has claimed its slots, and has taken a new lease in place of the old one.
//!
//! The process claims its slots before it lets the old lease go. So when the worker sees the old lease end, the claim
//! may still be under way. The worker therefore waits while a connection of that process has not taken its first lease.
//!
//! Departed members of one process are asked in the order in which they departed, for the same reason as leases are.
//! They are also forgotten together. A connection may have ended before the worker heard all of its claims: then only
//! an older departed member knows what the process maps.

use act::{Lease, LeaseState};
use page::PoolSlot;
use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

/// Time from an epoch's first release to the offer of the next lease: 2 s.
const BATCH_TIME: Duration = Duration::from_secs(2);
/// Most epochs of one connection that have not ended. No other epoch begins then.
const MOST_EPOCHS: usize = 8;

/// The member took a lease that the worker had not offered; no honest one does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it took a lease of epoch {0}, which was not offered")]
pub struct NotOffered(pub u32);

#[derive(Debug)]
struct Epoch {
    number: u32,
    lease: Lease,
    /// Slots that were released in this epoch, a hold each.
    batch: Vec<PoolSlot>,
    first_release: Option<Instant>,
}

/// The leases of one connection.
#[derive(Debug)]
pub struct Leases {
    /// Epochs in order. The lease of the last one may be offered and not taken yet.
    epochs: VecDeque<Epoch>,
    taken: u32,
}

impl Leases {
    /// Begins with epoch 1, whose lease is to be offered.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn new() -> io::Result<Self> {
        let mut leases = Self { epochs: VecDeque::new(), taken: 0 };
        leases.begin()?;
        Ok(leases)
    }

    /// Leases that are all over.
    #[cfg(test)]
    pub const fn none() -> Self {
        Self { epochs: VecDeque::new(), taken: 0 }
    }

    fn begin(&mut self) -> io::Result<()> {
        let number = self.epochs.back().map_or(self.taken, |epoch| epoch.number) + 1;
        self.epochs.push_back(Epoch { number, lease: Lease::create()?, batch: Vec::new(), first_release: None });
        Ok(())
    }

    /// The newest lease and its epoch; `None` if the member has taken this lease.
    pub fn offered(&self) -> Option<(u32, &Lease)> {
        self.epochs.back().filter(|epoch| epoch.number > self.taken).map(|epoch| (epoch.number, &epoch.lease))
    }

    /// Whether the member has taken a lease: before that it may map no slot.
    pub const fn is_taken(&self) -> bool {
        self.taken > 0
    }

    /// Notes that the member maps the lease of this epoch, and no older one.
    ///
    /// # Errors
    /// This lease was not offered.
    pub fn take(&mut self, epoch: u32) -> Result<(), NotOffered> {
        match self.offered() {
            Some((offered, _)) if offered == epoch => {
                self.taken = epoch;
                Ok(())
            }
            _ => Err(NotOffered(epoch)),
        }
    }

    /// Takes over the hold of a slot that the member released, until the epoch's lease is over.
    pub fn released(&mut self, slot: PoolSlot, now: Instant) {
        // A slot claimed before the first lease may be released before it, too; such a release counts to epoch 1.
        let current = self.epochs.iter_mut().rev().find(|epoch| epoch.number <= self.taken.max(1));
        debug_assert!(current.is_some(), "the epoch that was taken last is there");
        if let Some(epoch) = current {
            epoch.batch.push(slot);
            epoch.first_release.get_or_insert(now);
        }
    }

    /// Begins another epoch if the current one's first release was [`BATCH_TIME`] ago; its lease is then
    /// [`Self::offered`]. Returns whether an epoch has begun.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn rotate(&mut self, now: Instant) -> io::Result<bool> {
        let due =
            |epoch: &Epoch| epoch.first_release.is_some_and(|first| now.saturating_duration_since(first) >= BATCH_TIME);
        let last = self.epochs.back().filter(|epoch| epoch.number == self.taken);
        if self.epochs.len() >= MOST_EPOCHS || !last.is_some_and(due) {
            return Ok(false);
        }
        self.begin()?;
        Ok(true)
    }

    /// The released slots that nobody maps any more; the caller drops their holds.
    ///
    /// # Errors
    /// The kernel refused to say whether a lease is over.
    pub fn ended(&mut self) -> io::Result<Vec<PoolSlot>> {
        self.ended_before(self.taken)
    }

    fn ended_before(&mut self, number: u32) -> io::Result<Vec<PoolSlot>> {
        let mut slots = Vec::new();
        while let Some(epoch) = self.epochs.front().filter(|epoch| epoch.number < number) {
            match epoch.lease.state()? {
                LeaseState::Held => break,
                // A member that spoils a lease harms itself and its children only.
                LeaseState::Over | LeaseState::Spoilt => {
                    slots.extend(self.epochs.pop_front().into_iter().flat_map(|epoch| epoch.batch))
                }
            }
        }
        Ok(slots)
    }

    /// Number of slots that were released and are still held.
    pub fn deferred(&self) -> usize {
        self.epochs.iter().map(|epoch| epoch.batch.len()).sum()
    }

    /// The slots that were released and are still held.
    #[cfg(test)]
    pub fn slots(&self) -> impl Iterator<Item = PoolSlot> {
        self.epochs.iter().flat_map(|epoch| epoch.batch.iter().copied())
    }

    /// Whether a released slot, or a later epoch, waits for an epoch to end.
    pub fn is_waiting(&self) -> bool {
        self.epochs.len() > 1 || self.epochs.iter().any(|epoch| !epoch.batch.is_empty())
    }
}

/// The leases and slots of a member whose connection ended.
#[derive(Debug)]
pub struct DepartedMember {
    /// Its process.
    pub identity: api::control::Identity,
    /// The uid of the process that had connected.
    pub uid: u32,
    leases: Leases,
    /// Slots that the process may map, in order. The departed member has a hold of each.
    slots: Vec<PoolSlot>,
}

impl DepartedMember {
    /// A departed member with these slots and leases.
    pub fn new(identity: api::control::Identity, uid: u32, leases: Leases, mut slots: Vec<PoolSlot>) -> Self {
        slots.sort_unstable();
        Self { identity, uid, leases, slots }
    }

    /// Whether its process may map this slot.
    pub fn holds(&self, slot: PoolSlot) -> bool {
        self.slots.binary_search(&slot).is_ok()
    }

    /// Whether nobody maps any of its leases. Adds its released slots that nobody maps any more to `slots`.
    ///
    /// # Errors
    /// The kernel refused to say whether a lease is over.
    pub fn is_over(&mut self, slots: &mut Vec<PoolSlot>) -> io::Result<bool> {
        slots.append(&mut self.leases.ended_before(u32::MAX)?);
        Ok(self.leases.epochs.is_empty())
    }

    /// The slots that its process mapped. For a departed member that [is over](Self::is_over).
    pub fn into_slots(self) -> Vec<PoolSlot> {
        self.slots
    }

    /// Whether this departed member and `identity` are one process.
    pub fn is_of(&self, identity: &api::control::Identity) -> bool {
        (self.identity.pid, self.identity.started) == (identity.pid, identity.started)
    }

    /// The slots that it keeps held.
    #[cfg(test)]
    pub fn slots(&self) -> impl Iterator<Item = PoolSlot> {
        self.slots.iter().copied().chain(self.leases.slots())
    }

    /// Number of slots that it keeps held.
    pub fn deferred(&self) -> usize {
        self.slots.len() + self.leases.deferred()
    }
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
