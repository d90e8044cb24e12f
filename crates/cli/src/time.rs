//! Times as people type them.

/// Parses a length of time such as `60s`, `10m`, `1h` or `60` (seconds), and returns its seconds.
///
/// # Errors
/// The text is no length of time, or the time is longer than `most_s`.
pub fn parse_seconds(text: &str, most_s: u64) -> Result<u64, String> {
    let units = [('h', 3600), ('m', 60), ('s', 1)];
    let (number, each) =
        units.iter().find_map(|(unit, each)| Some((text.strip_suffix(*unit)?, *each))).unwrap_or((text, 1));
    let seconds = number.parse::<u64>().ok().and_then(|number| number.checked_mul(each));
    let seconds = seconds.filter(|seconds| *seconds <= most_s);
    seconds.ok_or_else(|| format!("{text:?} is no time up to {most_s}s: write 60s or 5m"))
}

#[cfg(test)]
mod tests {
    use super::parse_seconds;

    #[test]
    fn times_have_a_unit_or_are_seconds() {
        let seconds = ["2h", "3", "5m", "7s"].map(|text| parse_seconds(text, 7200));
        assert_eq!(seconds, [Ok(7200), Ok(3), Ok(300), Ok(7)]);
        for text in ["", "h", "-1", "1d", "3h", "18446744073709551615h", "1.5m"] {
            assert!(parse_seconds(text, 7200).is_err(), "{text}");
        }
    }
}
