//! Confidence intervals of ratios that were measured in several rounds, and verdicts on them.

use serde::Serialize;

/// Quantiles of Student's t for 97.5%, for 1 to 30 degrees of freedom.
const T: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];

/// The 95% confidence interval of the ratio, if the logarithms of ratios are distributed normally. `None` for a single
/// ratio.
pub fn interval(ratios: &[f64]) -> Option<[f64; 2]> {
    let freedom = ratios.len().checked_sub(2)?;
    let n = ratios.len() as f64;
    let mean = ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / n;
    let variance = ratios.iter().map(|ratio| (ratio.ln() - mean).powi(2)).sum::<f64>() / (n - 1.0);
    // For more degrees of freedom than the table has, the last quantile is taken: the interval is 4% too wide at most.
    let half = T[freedom.min(T.len() - 1)] * (variance / n).sqrt();
    Some([(mean - half).exp(), (mean + half).exp()])
}

/// How a ratio stands to its cap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The whole interval is at most the cap.
    Within,
    /// The whole interval is more than the cap.
    Over,
    /// The cap lies in the interval, or there is none.
    Undecided,
}

impl Verdict {
    /// The verdict on an interval.
    pub fn of(interval: Option<[f64; 2]>, cap: f64) -> Self {
        match interval {
            Some([_, high]) if high <= cap => Self::Within,
            Some([low, _]) if low > cap => Self::Over,
            _ => Self::Undecided,
        }
    }

    /// The verdict in a word.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Within => "within",
            Self::Over => "over",
            Self::Undecided => "undecided",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_is_that_of_students_t() {
        // Logarithms -1, 0, 1: mean 0, deviation 1, standard error 1/sqrt(3), t of 2 degrees 4.303.
        let [low, high] = interval(&[(-1_f64).exp(), 1.0, 1_f64.exp()]).unwrap();
        let half = 4.303 / 3_f64.sqrt();
        assert!((low.ln() + half).abs() < 1e-9 && (high.ln() - half).abs() < 1e-9, "{low} {high}");
        assert_eq!(
            interval(&[1.3, 1.3, 1.3, 1.3]).map(|[low, high]| (low * 1e6, high * 1e6).0.round()),
            Some(1_300_000.0)
        );
        assert_eq!(interval(&[1.0]), None);
        assert!(interval(&[1.0; 40]).is_some());
    }

    #[test]
    fn cap_inside_interval_is_undecided() {
        assert_eq!(Verdict::of(Some([0.9, 1.02]), 1.02), Verdict::Within);
        assert_eq!(Verdict::of(Some([1.01, 1.03]), 1.02), Verdict::Undecided);
        assert_eq!(Verdict::of(Some([1.03, 1.04]), 1.02), Verdict::Over);
        assert_eq!(Verdict::of(None, 1.02), Verdict::Undecided);
    }
}
