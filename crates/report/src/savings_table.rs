//! The sum of a group's savings, line by line, so that a reader can add it up. `group show` and `audit` print the same
//! lines, in KiB.

use crate::table::{Align, Table};
use cli::size::{count, signed_bytes};
use page::Savings;

/// Lines of the sum, their signs and names.
const LINES: [&str; 5] = ["+ folded", "+ zero pages", "- pool", "- tables", "- mappings"];

/// Reasons of a negative sum, in words.
pub const NEGATIVE: &str = "Negative: folding takes more memory than it saves at the moment. A segment of the pool goes \
    back to the kernel when none of its slots was in use for 30 s; tables and mappings go with their members.";

/// A signed number of bytes in KiB, with its thousands set apart.
pub fn kib(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{}", count(bytes.unsigned_abs() >> 10))
}

fn terms(s: &Savings) -> [u64; 5] {
    [s.folded_bytes, s.zero_bytes, s.pool_bytes, s.tables_bytes, s.mappings_bytes]
}

/// The sum with a note beside each line.
pub fn text(savings: &Savings, notes: [String; 5]) -> String {
    let mut table = Table::new(&[("", Align::Left), ("", Align::Right), ("", Align::Left)]);
    for ((line, bytes), note) in LINES.iter().zip(terms(savings)).zip(notes) {
        table.row([(*line).to_owned(), kib(bytes.cast_signed()), note]);
    }
    let saved = savings.saved_bytes();
    table.row(["= saved".to_owned(), kib(saved), signed_bytes(saved)]);
    table.to_string()
}

/// The sum by page frames beside the sum by the engine's account, with a note beside each line.
pub fn compared(frames: &Savings, engine: &Savings, notes: [&str; 5]) -> String {
    let right = |name| (name, Align::Right);
    let mut table = Table::new(&[("", Align::Left), right("frames"), right("engine"), ("", Align::Left)]);
    for ((line, (counted, told)), note) in LINES.iter().zip(terms(frames).into_iter().zip(terms(engine))).zip(notes) {
        table.row([(*line).to_owned(), kib(counted.cast_signed()), kib(told.cast_signed()), note.to_owned()]);
    }
    let saved = frames.saved_bytes();
    table.row(["= saved".to_owned(), kib(saved), kib(engine.saved_bytes()), signed_bytes(saved)]);
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_add_up() {
        let savings = Savings::of(1000, 10, 2000, 5000, 0);
        let notes = ["a", "", "", "", ""].map(str::to_owned);
        assert_eq!(
            text(&savings, notes),
            "\
+ folded       4,000  a
+ zero pages      40
- pool         8,000
- tables           8
- mappings         0
= saved       -3,968  -3.9 MiB
"
        );
        let text = compared(&savings, &Savings::default(), ["", "x", "", "", ""]);
        assert!(text.contains("+ zero pages      40       0  x\n"), "{text}");
    }
}
