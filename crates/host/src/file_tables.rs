//! Tables of open files: which threads share one.

/// One thread of each table of open files, but for the table of `own`. `share` compares the tables of two threads; where it cannot,
/// it says no, and a table is there twice. A thread that has ended is there by itself. Others that had its table may be missing
/// from the list then, and the caller has to make a new one.
pub fn one_of_each_table<T: Copy + PartialEq>(
    threads: impl IntoIterator<Item = T>,
    own: Option<T>,
    share: impl Fn(T, T) -> bool,
) -> Vec<T> {
    let mut found: Vec<T> = Vec::new();
    for thread in threads {
        let is_known = own.iter().chain(&found).any(|known| *known == thread || share(*known, thread));
        found.extend((!is_known).then_some(thread));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_of_each_table_but_ones_own_is_found() {
        let share = |one: u32, other: u32| one % 10 == other % 10 && one != 42;
        let found = |own| one_of_each_table([1, 2, 11, 42, 12, 3], own, share);
        assert_eq!(found(None), [1, 2, 3]);
        assert_eq!(found(Some(21)), [2, 3]);
        assert_eq!(found(Some(42)), [1, 2, 3], "one that cannot be compared is only itself");
    }
}
