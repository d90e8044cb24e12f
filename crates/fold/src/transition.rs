//! The states of a page, the events that change them, and the holds of slots that change with them (`segment.rs` says
//! what a hold is). Only this module adds and removes holds.
//!
//! ```text
//!   plan            member                          holder of the slot
//!   Want, Donate                                    the page, from here on
//!   AskBytes                                        the donation, too
//!   AskFold         Folded                          the page, as before
//!                   Released                        the member's leases, in place of the page
//!                   Held, Home                      the page, from here on
//!                   Left (its connection ended)     the departed member, in place of the page
//!   Drop            NotFolded                       nobody
//! ```
//!
//! Donations, leases and departed members give their holds back ([`Planner::give_back`]). So the number of a slot's
//! holds is the number of pages, donations, leases and departed members that have one.

use crate::plan::Planner;
use crate::pool::Pool;
use crate::segment::SlotState;
use crate::table::{Mark, MemberId, PageRef, State};
use page::{HostVirt, PoolSlot};
use wire::Target;

/// Something that happens to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The planner decides to fold the page to this target.
    Want(Target),
    /// The planner decides to fold the page to this slot, which the page's own bytes are to fill.
    Donate(PoolSlot),
    /// Its member is asked for its bytes.
    AskBytes,
    /// Its member is asked to fold it.
    AskFold,
    /// The planner drops its plan to fold the page.
    Drop,
    /// The member answers that it was folded.
    Folded,
    /// The member answers that it was not folded.
    NotFolded,
    /// The member says that the page maps this slot no longer.
    Released(PoolSlot),
    /// The member says that the page maps this slot since an earlier connection.
    Held(PoolSlot),
    /// The member says that the page again shows the template's page at its place, this slot.
    Home(PoolSlot),
    /// The member's connection has ended.
    Left,
}

/// A member's message that cannot be true.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Lie {
    /// A release of a slot that the member was never given.
    #[error("it lets go slot {1} at {0}, which it never had there")]
    Released(HostVirt, PoolSlot),
    /// A claim of a slot that the member cannot have.
    #[error("it claims slot {1} at {0}, which it cannot have there")]
    Held(HostVirt, PoolSlot),
    /// An answer that no request asked for.
    #[error("it answers for {0}, which it was not asked about")]
    Answered(HostVirt),
}

/// What the caller of a transition must take over.
#[derive(Debug, Default)]
#[must_use]
pub struct Effects {
    /// A hold of this slot, which the caller has from now on and must give back in the end ([`Planner::give_back`]).
    pub hold: Option<PoolSlot>,
}

impl State {
    const fn is_sent(self) -> bool {
        matches!(self, Self::Sent(_) | Self::Early(_))
    }

    const fn is_mapped(self) -> bool {
        matches!(self, Self::Mapped(_) | Self::Home(_))
    }

    /// The state after an event, and whether the page gives its hold to the caller; `None`: this event cannot happen to
    /// a page in this state. `home` is the page's home.
    fn after(self, event: Event, home: Option<PoolSlot>) -> Option<(Self, bool)> {
        let planned = matches!(self, Self::Idle | Self::Wanted(_) | Self::Donor(_));
        Some(match (self, event) {
            (Self::Idle, Event::Want(target)) => (Self::Wanted(target), false),
            (Self::Idle, Event::Donate(slot)) => (Self::Donor(slot), false),
            (Self::Donor(slot), Event::AskBytes) => (Self::Wanted(Target::Slot(slot)), true),
            (Self::Wanted(target), Event::AskFold) => (Self::Sent(target), false),
            (Self::Wanted(_) | Self::Donor(_), Event::Drop) => (Self::Idle, false),
            (Self::Sent(Target::Slot(slot)), Event::Folded) if home == Some(slot) => (Self::Home(slot), false),
            (Self::Sent(Target::Slot(slot)), Event::Folded) => (Self::Mapped(slot), false),
            (Self::Sent(Target::Zero), Event::Folded) => (Self::Idle, false),
            (Self::Early(_), Event::Folded) => (Self::Idle, true),
            (Self::Sent(_) | Self::Early(_), Event::NotFolded) => (Self::Idle, false),
            (Self::Mapped(had) | Self::Home(had), Event::Released(slot)) if had == slot => (Self::Idle, true),
            (Self::Sent(Target::Slot(asked)), Event::Released(slot)) if asked == slot => (Self::Early(slot), false),
            (Self::Early(had), Event::Released(slot)) if had == slot => return None,
            // The page no longer showed its home before this release, because the member was asked to fold it to a
            // slot. Nothing changes.
            (_, Event::Released(slot)) if home == Some(slot) => (self, false),
            (_, Event::Held(slot)) if planned => (Self::Mapped(slot), false),
            (_, Event::Home(slot)) if planned => (Self::Home(slot), false),
            (_, Event::Left) => (Self::Idle, true),
            _ => return None,
        })
    }
}

impl Planner {
    /// The state of a page.
    pub(crate) fn state(&self, page: PageRef) -> State {
        match self.table.state(page) {
            State::Idle if !self.table.is(page, Mark::Away) => self.home(page).map_or(State::Idle, State::Home),
            state => state,
        }
    }

    /// Changes a page's state, and the counts that go with it.
    ///
    /// # Errors
    /// The event cannot happen to a page in this state. Nothing is changed.
    pub fn transition(&mut self, page: PageRef, event: Event) -> Result<Effects, Lie> {
        let (before, address) = (self.state(page), self.table.address(page));
        let (after, gives) = before.after(event, self.home(page)).ok_or(match event {
            Event::Released(slot) => Lie::Released(address, slot),
            Event::Held(slot) => Lie::Held(address, slot),
            _ => Lie::Answered(address),
        })?;
        self.table.set_state(page, after);
        if matches!(after, State::Home(_)) {
            self.table.clear(page, Mark::Away);
        } else if matches!(before, State::Home(_)) {
            self.table.mark(page, Mark::Away);
        }
        Ok(Effects { hold: self.count(self.table.member(page), before, after, gives) })
    }

    /// Like [`Self::transition`], for events that cannot fail: the planner's own, and answers to its requests. Returns
    /// the hold that the caller takes over.
    pub(crate) fn advance(&mut self, page: PageRef, event: Event) -> Option<PoolSlot> {
        let effects = self.transition(page, event);
        debug_assert!(effects.is_ok(), "{event:?} of a page that is {:?}", self.state(page));
        effects.unwrap_or_default().hold
    }

    /// Counts that a page which is not in the table shows its home, this slot.
    pub(crate) fn came_home(&mut self, member: MemberId, slot: PoolSlot) {
        self.count(member, State::Idle, State::Home(slot), false);
    }

    /// Counts that a page shows its home no longer, because its member's connection has ended. Returns the hold.
    pub(crate) fn left_home(&mut self, member: MemberId, slot: PoolSlot) -> Option<PoolSlot> {
        self.count(member, State::Home(slot), State::Idle, true)
    }

    /// Counts a page of a member that changes its state: the hold of its slot, the slot's references, and the member's
    /// pages. If the page `gives` its hold to the caller, this hold is returned, and a slot of the new state gets
    /// another one.
    fn count(&mut self, member: MemberId, before: State, after: State, gives: bool) -> Option<PoolSlot> {
        // An empty slot of a template has no page frame, so pages that show it have no hold of it.
        let held = |pool: &Pool, state: State| {
            state.slot().filter(|slot| !matches!(state, State::Home(_)) || pool.state(*slot) == SlotState::Live)
        };
        let (old, new) = (held(&self.pool, before), held(&self.pool, after));
        let changes = gives || old != new;
        if let Some(slot) = new.filter(|_| changes) {
            self.pool.hold(slot);
        }
        if let Some(slot) = new.filter(|_| after.is_sent() || after.is_mapped()) {
            self.pool.show(slot);
        }
        let (unmapped, mapped) = (old.filter(|_| before.is_mapped()), new.filter(|_| after.is_mapped()));
        unmapped.into_iter().for_each(|slot| self.pool.unrefer(slot));
        mapped.into_iter().for_each(|slot| self.pool.refer(slot));
        let place = self.place(member);
        place.mapped = place.mapped + u64::from(mapped.is_some()) - u64::from(unmapped.is_some());
        place.sent = place.sent + u64::from(after.is_sent()) - u64::from(before.is_sent());
        if gives {
            return old;
        }
        self.give_back(old.filter(|_| changes));
        None
    }

    /// Drops a hold of each of these slots. A slot of this worker's own segments that loses its last hold leaves the
    /// index.
    pub fn give_back(&mut self, slots: impl IntoIterator<Item = PoolSlot>) {
        for slot in slots {
            if self.pool.holds(slot) == 1 && !self.pool.is_inherited(slot) {
                self.unindex(slot);
                if self.pool.state(slot) == SlotState::Pending {
                    drop(self.take_waiters(slot));
                }
            }
            self.pool.unhold(slot);
        }
    }
}
