//! Numbers as text.

/// A number with as many digits as a reader can use.
pub fn figure(value: f64) -> String {
    let digits = match value.abs() {
        0.0 => 0,
        large if large >= 1000.0 => 0,
        large if large >= 100.0 => 1,
        large if large >= 1.0 => 2,
        _ => 3,
    };
    // The sum of no numbers is -0: adding 0 makes it print without a sign.
    let text = format!("{:.digits$}", value + 0.0);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_digits_that_are_of_use() {
        assert_eq!(
            [0.0, 0.123_45, 0.5, 12.345, 123.45, 12_345.6].map(figure),
            ["0", "0.123", "0.5", "12.35", "123.5", "12346"]
        );
        assert_eq!([-2.0, -0.0].map(figure), ["-2", "0"]);
    }
}
