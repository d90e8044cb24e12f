//! Asking many guests at once: one that does not answer delays no other.

use std::sync::{Mutex, MutexGuard, PoisonError};

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
    // Threads are started only as far as there is work. A panic in one is a panic here.
    std::thread::scope(|scope| {
        while threads < AT_ONCE && lock(&queue).peek().is_some() {
            scope.spawn(work_on);
            threads += 1;
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(n, _)| *n);
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
}
