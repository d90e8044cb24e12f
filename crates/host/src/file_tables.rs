//! Tables of open files: which threads share one.

/// One thread for each table of open files that these threads use, but for the table that thread `own` uses. `share`
/// says whether two threads share one table. If it cannot tell, it says no, and two threads of one table are in the
/// result. A thread that ends meanwhile may be in the result in place of others that share its table. The caller has to
/// list the threads again then.
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
