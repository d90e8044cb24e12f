//! Sharing an amount out by weights, where each share has a cap.

/// Shares of `amount` in proportion to weights; `weighted` has the weight and the cap of each share. What a share
/// cannot take because of its cap goes to the others. Rounding loses less than a byte a share.
pub(crate) fn share_out(amount: u64, weighted: &[(u64, u64)]) -> Vec<u64> {
    let mut shares = vec![0; weighted.len()];
    let mut open: Vec<usize> = (0..weighted.len()).filter(|n| weighted[*n].0 > 0 && weighted[*n].1 > 0).collect();
    let mut left = amount;
    while left > 0 && !open.is_empty() {
        let total: u128 = open.iter().map(|n| u128::from(weighted[*n].0)).fold(0, u128::saturating_add);
        let fair = |n: usize| {
            u64::try_from(u128::from(left).saturating_mul(weighted[n].0.into()).checked_div(total).unwrap_or(0))
                .unwrap_or(left)
        };
        let full: Vec<usize> = open.iter().copied().filter(|n| fair(*n) >= weighted[*n].1).collect();
        if full.is_empty() {
            open.iter().for_each(|n| shares[*n] = fair(*n));
            break;
        }
        for n in &full {
            shares[*n] = weighted[*n].1;
        }
        left = full.iter().map(|n| shares[*n]).fold(left, u64::saturating_sub);
        open.retain(|n| !full.contains(n));
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::share_out;

    #[test]
    fn shares_are_in_proportion_up_to_their_caps() {
        assert_eq!(share_out(90, &[(1, 100), (2, 100)]), [30, 60]);
        assert_eq!(share_out(90, &[(1, 10), (1, 100), (0, 100)]), [10, 80, 0]);
        assert_eq!(share_out(900, &[(1, 10), (7, 20)]), [10, 20]);
        assert_eq!(share_out(0, &[(1, 10)]), [0]);
        assert_eq!(share_out(u64::MAX, &[(u64::MAX, u64::MAX), (u64::MAX, u64::MAX)]), [u64::MAX / 2; 2]);
    }
}
