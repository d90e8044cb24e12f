//! Places for connections, shared among users, so that no user can take the places of others.
//!
//! ```text
//!   |-- root's --|---------- users with a claim, equal shares ----------|-- all others --|
//! ```
//!
//! Root also gets all places that are free. One person may have many uids. All uids of one line of `/etc/subuid`
//! (subordinate ids) have one share together. Otherwise a person with members of 65,536 uids would leave hardly any
//! place to others. Lines of root are left out, because root gives their uids to containers of different people.
//! Subordinate ids that are not in this file are not known. All users without a claim together have a bound too.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

/// How the places for connections at a socket are shared.
#[derive(Clone, Copy, Debug)]
pub struct Shares {
    /// All places.
    pub most: usize,
    /// Places that only root gets.
    pub roots: usize,
    /// Places of users without a claim: of all together, and of each.
    pub others: (usize, usize),
}

/// Owners of lines in `/etc/subuid` whose users root gives to containers.
const ROOTS: [&str; 4] = ["root", "0", "lxd", "containers"];

/// Users that count as one: the first and the last of each range.
#[derive(Debug, Default)]
struct Ranges(Vec<(u32, u32)>);

impl Ranges {
    /// The ranges of this host's `/etc/subuid`, as they were at the first call.
    fn of_host() -> &'static Self {
        static RANGES: OnceLock<Ranges> = OnceLock::new();
        RANGES.get_or_init(|| Self::of(&std::fs::read_to_string("/etc/subuid").unwrap_or_default()))
    }

    /// The ranges in the text of a subuid file: on each line an owner, the first user, and the number of users.
    fn of(text: &str) -> Self {
        let range = |line: &str| {
            let (_, numbers) = line.trim().split_once(':').filter(|(owner, _)| !ROOTS.contains(owner))?;
            let (first, count) = numbers.split_once(':')?;
            let (first, count) = (first.parse::<u32>().ok()?, count.parse::<u32>().ok()?);
            // A range that contains root is left out.
            (first > 0 && count > 0).then(|| (first, first.saturating_add(count - 1)))
        };
        Self(text.lines().filter_map(range).collect())
    }

    /// The uid as which this one counts.
    fn one(&self, uid: u32) -> u32 {
        self.0.iter().find(|(first, last)| (*first..=*last).contains(&uid)).map_or(uid, |(first, _)| *first)
    }
}

/// The uid as which this one counts: the first of its line of `/etc/subuid`, or itself.
pub fn one_user(uid: u32) -> u32 {
    Ranges::of_host().one(uid)
}

/// At most `most` of these users: the first user of each person comes before the second of anybody. Lowest numbers come
/// first.
pub fn users_in_turn(users: impl Iterator<Item = u32>, most: usize) -> Vec<u32> {
    in_turn_by(Ranges::of_host(), users, most)
}

fn in_turn_by(ranges: &Ranges, users: impl Iterator<Item = u32>, most: usize) -> Vec<u32> {
    let mut counts = BTreeMap::<u32, usize>::new();
    let place = |uid: u32| {
        let count = counts.entry(ranges.one(uid)).or_default();
        *count += 1;
        (*count, uid)
    };
    let mut places: Vec<(usize, u32)> = users.map(place).collect();
    places.sort_unstable();
    places.into_iter().take(most).map(|(_, uid)| uid).collect()
}

impl Shares {
    /// Whether another connection of user `uid` gets a place. `taken` are the users of all connections that have one,
    /// and `claims` are the users with a claim.
    pub fn have_room(&self, uid: u32, claims: &BTreeSet<u32>, taken: impl Iterator<Item = u32> + Clone) -> bool {
        self.have_room_by(Ranges::of_host(), uid, claims, taken)
    }

    fn have_room_by(
        &self,
        ranges: &Ranges,
        uid: u32,
        claims: &BTreeSet<u32>,
        taken: impl Iterator<Item = u32> + Clone,
    ) -> bool {
        let claims = match ranges.0.is_empty() {
            true => Cow::Borrowed(claims),
            false => Cow::Owned(claims.iter().map(|uid| ranges.one(*uid)).collect()),
        };
        let (uid, taken) = (ranges.one(uid), taken.map(|uid| ranges.one(uid)));
        let all = taken.clone().count();
        let own = taken.clone().filter(|user| *user == uid).count();
        if uid == 0 {
            return all < self.most;
        }
        let users = taken.clone().filter(|user| *user != 0).count();
        let others = taken.filter(|user| *user != 0 && !claims.contains(user)).count();
        let claimed = self.most - self.roots - self.others.0;
        let fits = if claims.contains(&uid) {
            own < (claimed / claims.len()).max(1)
        } else {
            own < self.others.1 && others < self.others.0
        };
        fits && all < self.most && users < self.most - self.roots
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: uids of the first line got all places, because their numbers are the lowest.
    #[test]
    fn users_of_one_line_leave_places_to_others() {
        let ranges = Ranges::of("ann:1000:500\nbob:2000:500\nroot:3000:500\n");
        let users = (1000..1500).chain(2000..2003).chain([3000, 3001, 9000]);
        let chosen = in_turn_by(&ranges, users.clone(), 9);
        assert_eq!(chosen, [1000, 2000, 3000, 3001, 9000, 1001, 2001, 1002, 2002]);
        assert_eq!(in_turn_by(&ranges, users, 1000).len(), 506);
    }

    const SHARES: Shares = Shares { most: 100, roots: 10, others: (20, 5) };

    /// Takes places for a user as long as there are any, and says how many those were.
    fn crowd(uid: u32, claims: &BTreeSet<u32>, taken: &mut Vec<u32>) -> usize {
        let before = taken.len();
        while SHARES.have_room(uid, claims, taken.iter().copied()) {
            taken.push(uid);
        }
        taken.len() - before
    }

    #[test]
    fn crowd_of_strangers_leaves_places_of_members_and_root() {
        let claims = BTreeSet::from([7, 8]);
        let mut taken = Vec::new();
        let strangers: usize = (1000..2000).map(|uid| crowd(uid, &claims, &mut taken)).sum();
        assert_eq!((strangers, taken[..5].to_vec(), taken[5]), (20, vec![1000; 5], 1001));
        assert_eq!((crowd(7, &claims, &mut taken), crowd(8, &claims, &mut taken)), (35, 35));
        assert_eq!(crowd(0, &claims, &mut taken), 10);
    }

    /// Regression: a person with members of many uids left a single place to another person.
    #[test]
    fn subordinate_users_have_one_share() {
        let ranges = Ranges::of("mallory:100000:65536\n# none\nroot:300000:65536\ncarol:0:9\nbob:200000:0\n");
        assert_eq!(
            [0, 5, 99_999, 100_000, 165_535, 165_536, 300_001].map(|uid| ranges.one(uid)),
            [0, 5, 99_999, 100_000, 100_000, 165_536, 300_001]
        );
        let claims: BTreeSet<u32> = (100_000..101_000).chain([7]).collect();
        let mut taken: Vec<u32> = Vec::new();
        for uid in (100_000..101_000).chain(std::iter::repeat_n(7, 100)) {
            if SHARES.have_room_by(&ranges, uid, &claims, taken.iter().copied()) {
                taken.push(uid);
            }
        }
        assert_eq!(taken.iter().filter(|uid| **uid == 7).count(), 35, "half of what users with a claim have");
        assert_eq!(taken.len(), 70);
    }

    #[test]
    fn users_who_lose_their_claim_leave_roots_places() {
        let mut taken = Vec::new();
        for uid in 1..10 {
            crowd(uid, &BTreeSet::from([uid]), &mut taken);
        }
        assert_eq!(taken.len(), 90);
        assert_eq!(crowd(0, &BTreeSet::new(), &mut taken), 10);
    }
}
