//! Asks many guests at once, so that one that does not answer delays no other.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most guests that are asked at once: 16.
pub(crate) const AT_ONCE: usize = 16;

/// Does `work` for each item, 16 at a time, and returns the results in the items' order.
pub(crate) fn each<T: Send, R: Send>(items: impl Iterator<Item = T> + Send, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let mut items = items.enumerate().peekable();
    let mut threads = 0;
    let (queue, results) = (Mutex::new(&mut items), Mutex::new(Vec::new()));
    let next = || lock(&queue).next();
    let work_on = || {
        while let Some((n, item)) = next() {
            let result = work(item);
            lock(&results).push((n, result));
        }
    };
    // No more threads are started than there are items. A panic in a thread becomes a panic here.
    std::thread::scope(|scope| {
        while threads < AT_ONCE && lock(&queue).peek().is_some() {
            scope.spawn(work_on);
            threads = threads.saturating_add(1);
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(n, _)| *n);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Does `work` for each item as [`each`] does, but by turns: the first item of every owner, then the second of every
/// owner, and so on. For items that were not begun within `time`, the result is `None`. So an owner with many slow
/// guests delays other such owners, and no owner with few guests.
pub(crate) fn each_in_turn<T: Send, R: Send>(
    items: impl Iterator<Item = (u32, T)>,
    time: Duration,
    work: impl Fn(T) -> R + Sync,
) -> Vec<Option<R>> {
    let end = Instant::now() + time;
    let mut turns: HashMap<u32, usize> = HashMap::new();
    let mut queue = Vec::new();
    for (place, (owner, item)) in items.enumerate() {
        let turn = turns.entry(owner).or_default();
        queue.push((*turn, place, item));
        *turn = turn.saturating_add(1);
    }
    queue.sort_by_key(|(turn, place, _)| (*turn, *place));
    let in_time = |(_, place, item)| (place, (Instant::now() < end).then(|| work(item)));
    let mut results = each(queue.into_iter(), in_time);
    results.sort_by_key(|(place, _)| *place);
    results.into_iter().map(|(_, result)| result).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn sixteen_are_asked_at_once_and_results_keep_their_order() {
        let all_there = Barrier::new(AT_ONCE);
        let results = each(0..2 * AT_ONCE, |n| {
            all_there.wait();
            n
        });
        assert_eq!(results, (0..2 * AT_ONCE).collect::<Vec<_>>());
    }

    #[test]
    fn owner_of_many_slow_items_has_his_turns_and_a_time_for_all() {
        let slow = Duration::from_millis(200);
        let items = (0..500).map(|n| (7, Some(n))).chain([(8, None)]);
        let done = each_in_turn(items, 2 * slow, |item: Option<u32>| {
            if item.is_some() {
                std::thread::sleep(slow);
            }
            item
        });
        assert_eq!(done[500], Some(None), "the other owner's was done");
        assert!(done.len() == 501 && done[0].is_some() && done[499].is_none());
    }
}
