//! Making text from strangers safe to print on a terminal.

/// `text` with a `?` for every character that controls a terminal or reorders text.
pub fn printable(text: &str) -> String {
    let steers = |c: char| {
        c.is_control() || matches!(c, '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars().map(|c| if steers(c) { '?' } else { c }).collect()
}
