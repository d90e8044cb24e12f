//! Places for connections, which bound their number. When all places are taken, a new connection gets the place of
//! another one, which is closed:
//!
//! 1. among the connections on which no caller with rights has made a request, the oldest one;
//! 2. if there is none, among those of the caller that has the most connections, the one whose last request is the
//!    longest ago.
//!
//! So connections without a right never keep others out, and no caller keeps another one out.

use crate::access::CallerId;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::Notify;

/// Most connections at a time.
pub const MOST: usize = 1000;

/// All places for connections.
#[derive(Debug)]
pub struct Places {
    most: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    next: u64,
    by_number: BTreeMap<u64, Entry>,
}

#[derive(Debug)]
struct Entry {
    caller: Option<CallerId>,
    /// Serial number of the connection's last request: the lower, the longer the connection has been silent.
    heard: u64,
    lost: Arc<Notify>,
}

/// A connection's place; dropping this value frees the place.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    number: u64,
    lost: Arc<Notify>,
}

impl Places {
    /// Makes `most` places, all of them free.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, taken: Mutex::default() })
    }

    fn with<T>(&self, work: impl FnOnce(&mut Taken) -> T) -> T {
        work(&mut self.taken.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes a place for a new connection, if need be from another one.
    pub fn take(self: &Arc<Self>) -> Place {
        let lost = Arc::new(Notify::new());
        let number = self.with(|taken| {
            if taken.by_number.len() >= self.most
                && let Some(loser) = taken.loser()
                && let Some(entry) = taken.by_number.remove(&loser)
            {
                entry.lost.notify_one();
            }
            let number = taken.number();
            taken.by_number.insert(number, Entry { caller: None, heard: number, lost: Arc::clone(&lost) });
            number
        });
        Place { places: Arc::clone(self), number, lost }
    }
}

impl Taken {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn loser(&self) -> Option<u64> {
        let unknown = self.by_number.iter().find(|(_, entry)| entry.caller.is_none());
        if let Some((number, _)) = unknown {
            return Some(*number);
        }
        let mut counts: BTreeMap<&CallerId, usize> = BTreeMap::new();
        self.by_number
            .values()
            .filter_map(|e| e.caller.as_ref())
            .for_each(|caller| *counts.entry(caller).or_default() += 1);
        let (most, _) = counts.into_iter().max_by_key(|(_, count)| *count)?;
        let of_caller = self.by_number.iter().filter(|(_, entry)| entry.caller.as_ref() == Some(most));
        of_caller.min_by_key(|(_, entry)| entry.heard).map(|(number, _)| *number)
    }
}

impl Place {
    /// Notes a request on the connection, and its caller if the caller has rights.
    pub fn heard(&self, caller: Option<&CallerId>) {
        self.places.with(|taken| {
            let heard = taken.number();
            if let Some(entry) = taken.by_number.get_mut(&self.number) {
                (entry.caller, entry.heard) = (caller.cloned(), heard);
            }
        });
    }

    /// Waits until another connection has been given this place.
    pub async fn is_lost(&self) {
        self.lost.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.with(|taken| taken.by_number.remove(&self.number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn is_lost(place: &Place) -> bool {
        place.is_lost().now_or_never().is_some()
    }

    #[test]
    fn strangers_lose_places_before_callers_do() {
        let places = Places::new(3);
        let (known, first, second) = (places.take(), places.take(), places.take());
        known.heard(Some(&CallerId::User(1)));
        let third = places.take();
        assert!(is_lost(&first) && !is_lost(&known) && !is_lost(&second) && !is_lost(&third));
        // A connection whose last request had no rights counts as one without rights, although an earlier request had
        // some.
        known.heard(None);
        let fourth = places.take();
        assert!(is_lost(&known) && !is_lost(&second) && !is_lost(&fourth));
        drop((second, third));
        let (_fifth, _sixth) = (places.take(), places.take());
        assert!(!is_lost(&fourth), "two places were free");
    }

    #[test]
    fn caller_with_most_connections_loses_the_most_silent_one() {
        let places = Places::new(4);
        let token = CallerId::Token("x".into());
        let own = places.take();
        own.heard(Some(&token));
        let crowd: Vec<_> = (0..3).map(|_| places.take()).collect();
        crowd.iter().for_each(|place| place.heard(Some(&CallerId::User(9))));
        crowd[0].heard(Some(&CallerId::User(9)));
        let new = places.take();
        assert_eq!(crowd.iter().map(is_lost).collect::<Vec<_>>(), [false, true, false]);
        assert!(!is_lost(&own) && !is_lost(&new));
    }
}
