//! Short texts for sizes, and texts from other processes made harmless: no character steers the terminal or moves other
//! characters.

/// Longest text from another process that is shown, in characters. Names are shorter, but reasons may be longer, and
/// are cut off.
pub const MOST_TEXT: usize = 512;

/// Whether letters of this script run from right to left, so that a terminal may reorder what stands beside them.
const fn is_right_to_left(c: char) -> bool {
    matches!(c, '\u{590}'..='\u{8ff}' | '\u{fb1d}'..='\u{fdff}' | '\u{fe70}'..='\u{feff}'
        | '\u{10800}'..='\u{10fff}' | '\u{1e800}'..='\u{1efff}')
}

/// Whether a character takes cells of its own, does not steer the terminal, and changes no character beside it.
fn is_harmless(c: char) -> bool {
    let is_mark = matches!(c, '\u{300}'..='\u{36f}' | '\u{1ab0}'..='\u{1aff}' | '\u{20d0}'..='\u{20ff}');
    c == ' ' || c.is_ascii_graphic() || (!c.is_ascii() && c.is_alphanumeric() && !is_mark && !is_right_to_left(c))
}

/// `text` with every character replaced by `?` that is no letter, no digit, no ASCII sign and no space, and cut off at
/// `most` characters. If it is cut off, its last character is `~`.
pub fn harmless(text: &str, most: usize) -> String {
    let mut chars = text.chars();
    let mut short: String = chars.by_ref().take(most).map(|c| if is_harmless(c) { c } else { '?' }).collect();
    if chars.next().is_some() {
        short.pop();
        short.push('~');
    }
    short
}

/// A size in at most five characters: `0`, `12K`, `3.4M`, `345M`, `1.25G`, `12.5T`.
pub fn size(bytes: u64) -> String {
    const UNITS: [char; 6] = ['K', 'M', 'G', 'T', 'P', 'E'];
    let (mut number, mut unit) = (bytes as f64 / 1024.0, 0);
    if bytes == 0 {
        return "0".to_owned();
    }
    // 1023.5 and more would be rounded to 1024.
    while number >= 1023.5 && unit + 1 < UNITS.len() {
        (number, unit) = (number / 1024.0, unit + 1);
    }
    let decimals = match number {
        _ if unit == 0 => 0,
        n if n >= 99.95 => 0,
        n if n >= 9.995 || unit == 1 => 1,
        _ => 2,
    };
    let number = if unit == 0 { number.ceil() } else { number };
    format!("{number:.decimals$}{}", UNITS[unit])
}

/// A signed size, like [`size`].
pub fn signed(bytes: i64) -> String {
    format!("{}{}", if bytes < 0 { "-" } else { "" }, size(bytes.unsigned_abs()))
}

/// A share of a processor in percent, in at most five characters.
pub fn percent(share: f64) -> String {
    match share {
        n if n > 0.0 && n < 0.05 => "<0.1".to_owned(),
        n if n < 99.95 => format!("{n:.1}"),
        n => format!("{n:.0}"),
    }
}

/// A figure as text, or `-` if it is not known.
pub fn known<T>(figure: Option<T>, words: impl Fn(T) -> String) -> String {
    figure.map_or_else(|| "-".to_owned(), words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short_and_have_three_figures() {
        let cases = [
            (0, "0"),
            (1, "1K"),
            (4096, "4K"),
            (1023 << 10, "1023K"),
            ((1 << 20) - 1, "1.0M"),
            (35 << 20, "35.0M"),
            (345 << 20, "345M"),
            (1280 << 20, "1.25G"),
            (12_800 << 20, "12.5G"),
            (3 << 40, "3.00T"),
            (u64::MAX, "16.0E"),
        ];
        for (bytes, words) in cases {
            assert_eq!(size(bytes), words);
            assert!(size(bytes).len() <= 5);
        }
        assert_eq!((signed(-4096), signed(i64::MIN)), ("-4K".to_owned(), "-8.00E".to_owned()));
        assert_eq!([0.0, 0.01, 3.12, 250.0].map(percent), ["0.0", "<0.1", "3.1", "250"]);
    }

    #[test]
    fn text_of_a_stranger_neither_steers_nor_grows() {
        let hostile = "a\u{1b}[2J\0b\u{202e}c\u{5d0}\u{200b}e\u{301}\u{61c}\u{9b}\nz";
        assert_eq!(harmless(hostile, 100), "a?[2J?b?c??e????z");
        assert_eq!(harmless("Straße-中", 100), "Straße-中");
        let long = harmless(&"x".repeat(4096), 48);
        assert!(long.len() == 48 && long.ends_with("x~"), "{long}");
        assert_eq!(harmless("abc", 3), "abc");
    }
}
