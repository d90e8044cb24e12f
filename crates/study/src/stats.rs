//! Statistics of small samples: Student's intervals, the size of a sample that would decide, and the area under a ROC
//! curve. Nothing is read or written here.

/// Quantiles of Student's distribution for two-sided 95%, by degrees of freedom from 1 to 30.
const T95: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];
/// Quantiles for more degrees of freedom: from which number on, and the quantile. They are rounded up, so that no
/// interval is too narrow.
const T95_BEYOND: [(usize, f64); 3] = [(31, 2.042), (41, 2.021), (121, 1.980)];

/// Quantile of Student's distribution for a two-sided interval of 95%, with this many degrees of freedom.
pub fn t95(degrees: usize) -> f64 {
    match degrees {
        0 => f64::INFINITY,
        1..=30 => T95[degrees - 1],
        more => T95_BEYOND.iter().rev().find(|(from, _)| more >= *from).map_or(T95[29], |(_, t)| *t),
    }
}

/// The mean of a sample; NaN if it is empty.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The standard deviation of a sample; 0 for fewer than two values.
pub fn deviation(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let mean = mean(values);
    (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (values.len() - 1) as f64).sqrt()
}

/// Half the width of the 95% interval of the mean; `None` for fewer than two values.
pub fn half_width(values: &[f64]) -> Option<f64> {
    (values.len() > 1).then(|| half_width_of(deviation(values), values.len()))
}

fn half_width_of(deviation: f64, n: usize) -> f64 {
    if deviation == 0.0 { 0.0 } else { t95(n.saturating_sub(1)) * deviation / (n as f64).sqrt() }
}

/// The least size, from 2 to `most`, of a sample with this deviation whose interval is narrower than `gap` on each side
/// of the mean. `None` if even `most` values are too few.
pub fn n_that_decides(deviation: f64, gap: f64, most: usize) -> Option<usize> {
    (2..=most).find(|n| half_width_of(deviation, *n) < gap)
}

/// The share of pairs in which the positive is larger than the negative, ties counting half. That is the area under the
/// curve of true against false positives (Hanley and McNeil 1982). `None` if one of the two is empty.
pub fn area_under_curve(positives: &[f64], negatives: &[f64]) -> Option<f64> {
    let mut all: Vec<(f64, bool)> = positives.iter().map(|v| (*v, true)).collect();
    all.extend(negatives.iter().map(|v| (*v, false)));
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut rank_sum = 0.0;
    let mut before = 0;
    for tied in all.chunk_by(|a, b| a.0 == b.0) {
        let rank = before as f64 + (tied.len() as f64 + 1.0) / 2.0;
        rank_sum += rank * tied.iter().filter(|(_, positive)| *positive).count() as f64;
        before += tied.len();
    }
    let (p, n) = (positives.len() as f64, negatives.len() as f64);
    (p * n > 0.0).then(|| (rank_sum - p * (p + 1.0) / 2.0) / (p * n))
}

/// Intercept and slope of the line with the least sum of squares. `None` if all points have the same x.
pub fn line(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let n = points.len() as f64;
    let (mean_x, mean_y) = (points.iter().map(|p| p.0).sum::<f64>() / n, points.iter().map(|p| p.1).sum::<f64>() / n);
    let xx: f64 = points.iter().map(|p| (p.0 - mean_x).powi(2)).sum();
    let xy: f64 = points.iter().map(|p| (p.0 - mean_x) * (p.1 - mean_y)).sum();
    (xx > 0.0).then(|| (mean_y - xy / xx * mean_x, xy / xx))
}

/// The squared correlation of two series, which is the share of variance that a straight line explains. `None` where one
/// of them does not vary.
pub fn r_squared(points: &[(f64, f64)]) -> Option<f64> {
    let n = points.len() as f64;
    let (mean_x, mean_y) = (points.iter().map(|p| p.0).sum::<f64>() / n, points.iter().map(|p| p.1).sum::<f64>() / n);
    let sum = |of: &dyn Fn(f64, f64) -> f64| points.iter().map(|p| of(p.0 - mean_x, p.1 - mean_y)).sum::<f64>();
    let (xx, yy, xy) = (sum(&|x, _| x * x), sum(&|_, y| y * y), sum(&|x, y| x * y));
    (xx > 0.0 && yy > 0.0).then(|| xy * xy / (xx * yy))
}

/// The value below which this share of the values lies; `None` if there are no values.
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    Some(sorted[((last as f64 * share).round() as usize).min(last)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_is_the_textbook_one() {
        let values = [10.0, 12.0, 14.0];
        assert_eq!((mean(&values), deviation(&values)), (12.0, 2.0));
        assert!((half_width(&values).unwrap() - 4.303 * 2.0 / 3f64.sqrt()).abs() < 1e-9);
        assert_eq!((half_width(&[1.0]), half_width(&[3.0, 3.0])), (None, Some(0.0)));
        assert_eq!([1, 4, 30, 31, 40, 41, 5000].map(t95), [12.706, 2.776, 2.042, 2.042, 2.042, 2.021, 1.980]);
        assert!(t95(0).is_infinite());
    }

    #[test]
    fn more_values_decide_narrower_gaps() {
        assert_eq!(n_that_decides(2.0, 4.97, 100), Some(3));
        assert_eq!(n_that_decides(2.0, 4.96, 100), Some(4));
        assert_eq!(n_that_decides(0.0, 0.1, 100), Some(2));
        assert_eq!(n_that_decides(2.0, 0.0, 100), None);
        let n = n_that_decides(1.0, 0.5, 1000).unwrap();
        assert!(half_width_of(1.0, n) < 0.5 && half_width_of(1.0, n - 1) >= 0.5);
    }

    #[test]
    fn area_counts_pairs_and_halves_ties() {
        assert_eq!(area_under_curve(&[3.0, 4.0], &[1.0, 2.0]), Some(1.0));
        assert_eq!(area_under_curve(&[1.0], &[2.0, 0.0]), Some(0.5));
        assert_eq!(area_under_curve(&[1.0, 1.0], &[1.0]), Some(0.5));
        assert_eq!(area_under_curve(&[1.0, 5.0], &[2.0, 3.0, 4.0]), Some(0.5));
        assert_eq!(area_under_curve(&[], &[1.0]), None);
    }

    #[test]
    fn straight_line_explains_all() {
        assert_eq!(line(&[(1.0, 3.0), (2.0, 5.0), (3.0, 7.0)]), Some((1.0, 2.0)));
        assert_eq!(line(&[(1.0, 3.0), (1.0, 5.0)]), None);
        assert_eq!(r_squared(&[(1.0, 3.0), (2.0, 5.0), (3.0, 7.0)]), Some(1.0));
        assert_eq!(r_squared(&[(1.0, 3.0), (2.0, 3.0)]), None);
        assert!(r_squared(&[(1.0, 1.0), (2.0, 9.0), (3.0, 2.0)]).unwrap() < 0.1);
        assert_eq!(quantile(&[5.0, 1.0, 3.0], 0.5), Some(3.0));
        assert_eq!(quantile(&[], 0.5), None);
    }
}
