//! The median.

/// The median: of an even number of values the mean of the middle two, of none NaN.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => sorted[half],
        _ => f64::midpoint(sorted[half - 1], sorted[half]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_even_count_is_mean_of_middle_two() {
        assert_eq!(
            [&[3.0][..], &[5.0, 1.0], &[9.0, 1.0, 4.0], &[1.0, f64::INFINITY]].map(median),
            [3.0, 3.0, 4.0, f64::INFINITY]
        );
        assert!(median(&[]).is_nan());
    }
}
