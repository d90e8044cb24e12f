//! The median.

/// Of an even number of values, halfway between the two in the middle; of none, not a number.
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
    fn half_of_the_values_are_less() {
        assert_eq!(
            [&[3.0][..], &[5.0, 1.0], &[9.0, 1.0, 4.0], &[1.0, f64::INFINITY]].map(median),
            [3.0, 3.0, 4.0, f64::INFINITY]
        );
        assert!(median(&[]).is_nan());
    }
}
