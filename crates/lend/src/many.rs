//! Asking many guests at once: one that does not answer delays no other.

/// Most guests that are asked at once: 16.
const AT_ONCE: usize = 16;

/// Does `work` for each item, 16 at a time, and returns the results in the items' order.
pub(crate) fn each<T: Send, R: Send>(items: impl Iterator<Item = T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let mut items = items.fuse();
    let mut results = Vec::new();
    loop {
        let some: Vec<T> = items.by_ref().take(AT_ONCE).collect();
        if some.is_empty() {
            return results;
        }
        std::thread::scope(|scope| {
            let threads: Vec<_> = some.into_iter().map(|item| scope.spawn(|| work(item))).collect();
            // A panic in a thread is a panic here.
            let results_of = |thread: std::thread::ScopedJoinHandle<'_, R>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            results.extend(threads.into_iter().map(results_of));
        });
    }
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
