//! Places for connections, shared among users, so that no user can take those of others.
//!
//! ```text
//!   |-- root's --|---------- users with a claim, equal shares ----------|-- all others --|
//! ```
//!
//! Root also gets whatever is free. One person may have many users (subordinate ids), so all users without a claim
//! together have a bound too.

use std::collections::BTreeSet;

/// The places of a socket.
#[derive(Clone, Copy, Debug)]
pub struct Shares {
    /// All places.
    pub most: usize,
    /// Places that only root gets.
    pub roots: usize,
    /// Places of users without a claim: of all together, and of each.
    pub others: (usize, usize),
}

impl Shares {
    /// Whether another connection of user `uid` gets a place. `taken` are the users of all connections that have one, and
    /// `claims` are the users with a claim.
    pub fn have_room(&self, uid: u32, claims: &BTreeSet<u32>, taken: impl Iterator<Item = u32> + Clone) -> bool {
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
