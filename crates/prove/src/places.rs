//! Places for followed children (`keep.rs`): how many each user may have, and what happens to children for which no
//! place is left.
//!
//! ```text
//!   a child of a member, or of a followed child
//!     | a place of its user's share is free -----------> is followed, and so by a successor (`act::Journal`)
//!     |   few are left ---------------------------------> the same; the member makes its folded memory private, and
//!     |                                                     folds nothing for a while: children that it forks later
//!     |                                                     inherit no mapping of the pool, and need no follower
//!     | none is free -----------------------------------> is followed, and not by a successor; the member is told
//!     | 4096 of its user have no place either ----------> is left to its parent, if that is a member; if it is a
//!                                                         followed child, no events of it and its siblings are
//!                                                         read until others have ended
//! ```
//!
//! Children of a process are followed only if the process is a member, or its user has a member. So users and processes
//! outside of all groups take no places.

use host::{Peer, Shares};
use rustix::process::getuid;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use wire::prove::Kept;

/// Places for followed children: 8192 for all users together, of which 1024 are kept for root. Users without members
/// have none.
const ALL: Shares = Shares { most: 8192, roots: 1024, others: (0, 0) };
/// Most places for children of one member.
const OF_MEMBER: usize = 1024;
/// Most children of one user that are followed without a place (and not by a successor). Further ones are not followed.
const WITHOUT: usize = 4096;
/// Part of a user's or member's places that is taken when the member is told that few are left: 3/4.
const FEW: (usize, usize) = (3, 4);
/// Most processes that are checked when a process's ancestors are searched for a member, the process itself among them.
const MOST_ANCESTORS: usize = 16;
/// In a frame from the supervisor, the number that separates uids from pids.
const THEN_PROCESSES: u32 = u32::MAX;

/// Users and processes whose children may get places.
#[derive(Debug)]
pub struct Claims {
    /// Users who have members, and users as which workers run.
    pub users: BTreeSet<u32>,
    members: BTreeSet<u32>,
}

impl Claims {
    /// No user and no process has a claim.
    pub const fn none() -> Self {
        Self { users: BTreeSet::new(), members: BTreeSet::new() }
    }

    /// The claims in a frame from the supervisor.
    pub fn of(frame: &[u8]) -> Self {
        let numbers: Vec<u32> = frame.as_chunks().0.iter().map(|number| u32::from_le_bytes(*number)).collect();
        let mut parts = numbers.split(|number| *number == THEN_PROCESSES).map(|part| part.iter().copied().collect());
        Self { users: parts.next().unwrap_or_default(), members: parts.next().unwrap_or_default() }
    }

    /// Whether children of this process are followed. An earlier keeper, which hands its children on to this one, has
    /// the same user as this process. A forked child of a member may have another user, and may ask before it is a
    /// member itself.
    pub fn has(&self, peer: Peer) -> bool {
        let is_users = peer.uid == 0 || is_keepers(peer.uid) || self.users.contains(&peer.uid);
        is_users || ancestors(peer.pid).any(|pid| self.members.contains(&pid))
    }
}

/// This process, its parent, the parent's parent and so on: [`MOST_ANCESTORS`] at most.
fn ancestors(pid: u32) -> impl Iterator<Item = u32> {
    let parent = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, which may have any characters, ends at the last `)`. Behind it are the state and the parent's pid.
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok().filter(|parent| *parent != 0)
    };
    std::iter::successors(Some(pid), parent).take(MOST_ANCESTORS)
}

/// Whether this is the user as which this keeper, and so other keepers of the service, run.
pub fn is_keepers(uid: u32) -> bool {
    uid == getuid().as_raw()
}

static CLAIMS: Mutex<Claims> = Mutex::new(Claims::none());

/// Number of followed children of each user: with a place, and without one.
static TAKEN: Mutex<BTreeMap<u32, [usize; 2]>> = Mutex::new(BTreeMap::new());

/// The claims that the supervisor has told last.
pub fn claims() -> MutexGuard<'static, Claims> {
    CLAIMS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn taken() -> MutexGuard<'static, BTreeMap<u32, [usize; 2]>> {
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A child that is followed. Its place is free again when this is dropped.
#[derive(Debug)]
pub struct Place {
    uid: u32,
    /// Whether the child has a place, so that a successor follows it, too.
    pub is_placed: bool,
}

impl Place {
    /// Takes a place for a child of user `uid`, if one is free. `of_family` children of the same member have one
    /// already.
    pub fn take(uid: u32, of_family: usize) -> Self {
        // Children that an earlier keeper has handed on, and children whose parents have ended, count as root's.
        let uid = if is_keepers(uid) { 0 } else { uid };
        let (users, mut taken) = (users_and(uid), taken());
        let is_placed = of_family < OF_MEMBER && has_room(uid, &users, &taken, 0);
        taken.entry(uid).or_default()[usize::from(!is_placed)] += 1;
        Self { uid, is_placed }
    }

    /// The answer to the member that handed this child over. `of_family` children of the member are followed.
    pub fn answer(&self, of_family: usize) -> Kept {
        let (users, taken) = (users_and(self.uid), taken());
        let own = taken.get(&self.uid).map_or(0, |[placed, _]| *placed);
        // Few places are left once the user has taken 3/4 of its share. If it has taken less, another third of what it
        // has taken still fits.
        let is_plenty = has_room(self.uid, &users, &taken, own * (FEW.1 - FEW.0) / FEW.0);
        let is_full = !self.is_placed || !is_plenty || of_family * FEW.1 >= OF_MEMBER * FEW.0;
        if is_full { Kept::Last } else { Kept::Yes }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = taken();
        if let Some(own) = taken.get_mut(&self.uid) {
            own[usize::from(!self.is_placed)] -= 1;
        }
        taken.retain(|_, own| *own != [0, 0]);
    }
}

/// Users with a claim, and this user, which may have none: a member may have changed its uid since it became a member.
fn users_and(uid: u32) -> BTreeSet<u32> {
    let mut users = claims().users.clone();
    users.insert(uid);
    users
}

/// Whether another child of this user may be followed, with a place or without.
pub fn may_have_another(uid: u32) -> bool {
    taken().get(&uid).is_none_or(|[_, without]| *without < WITHOUT)
}

/// Whether a place would still be left for this user if it took `many` more places now.
fn has_room(uid: u32, users: &BTreeSet<u32>, taken: &BTreeMap<u32, [usize; 2]>, many: usize) -> bool {
    let all = taken.iter().flat_map(|(user, [placed, _])| std::iter::repeat_n(*user, *placed));
    ALL.have_room(uid, users, all.chain(std::iter::repeat_n(uid, many)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes places for a user until none is left. Returns how many it got, and how many of them before few were left.
    fn fill(uid: u32, places: &mut Vec<Place>) -> (usize, usize) {
        let (mut placed, mut plenty) = (0, 0);
        for own in 0..ALL.most {
            let place = Place::take(uid, own);
            let answer = place.answer(own + 1);
            let is_placed = place.is_placed;
            places.push(place);
            if !is_placed {
                assert_eq!(answer, Kept::Last);
                break;
            }
            placed += 1;
            plenty += usize::from(answer == Kept::Yes);
        }
        (placed, plenty)
    }

    /// Children beyond 1,024 of a member, and 8,192 in all, were once dropped without a word, also where one user's
    /// processes had filled all places.
    #[test]
    fn user_fills_own_share_and_is_told_before() {
        claims().users = BTreeSet::from([7, 8]);
        let mut places = Vec::new();
        assert_eq!(fill(7, &mut places), (OF_MEMBER, OF_MEMBER * 3 / 4 - 1), "one member");
        while fill(7, &mut places).0 > 0 {}
        assert_eq!(taken()[&7][0], (8192 - 1024) / 2, "all members of one user");
        assert_eq!(fill(8, &mut places), (OF_MEMBER, OF_MEMBER * 3 / 4 - 1), "another user's");
        assert_eq!(fill(0, &mut places).0, OF_MEMBER, "root's");
        while may_have_another(7) {
            places.push(Place::take(7, 0));
        }
        assert!(may_have_another(8));
        assert_eq!(taken()[&7][1], WITHOUT);
        drop(places);
        assert!(taken().is_empty());
    }

    #[test]
    fn claims_are_those_of_users_and_of_members() {
        let frame: Vec<u8> = [7, 8, THEN_PROCESSES, 4711].iter().flat_map(|number| number.to_le_bytes()).collect();
        let claims = Claims::of(&frame);
        let has = |pid, uid| claims.has(Peer { pid, uid });
        assert_eq!([has(1, 7), has(4711, 33), has(1, 33), has(7, 33), has(1, 0)], [true, true, false, false, true]);
        // As an earlier supervisor tells.
        assert!(
            Claims::of(&[9, 0, 0, 0]).has(Peer { pid: 1, uid: 9 }) && !Claims::of(&[]).has(Peer { pid: 9, uid: 9 })
        );
    }
}
