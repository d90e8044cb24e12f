//! Aligned columns of text for the terminal. Cells come from strangers too (a guest chooses its own name), so
//! characters that would steer a terminal are made visible instead.

use cli::printable;
use std::fmt;

/// The edge of its column that a cell is aligned to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Left, for text.
    Left,
    /// Right, for figures.
    Right,
}

/// Rows under a heading, two spaces between columns, each line ended by a line feed when displayed.
pub struct Table {
    align: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns: heading and alignment. A table whose headings are all empty shows none.
    pub fn new(columns: &[(&str, Align)]) -> Self {
        let heading = columns.iter().map(|(name, _)| (*name).to_owned()).collect();
        Self { align: columns.iter().map(|(_, align)| *align).collect(), rows: vec![heading] }
    }

    /// Adds a row, from left to right; cells that are missing stay empty, cells beyond the last column are dropped.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) -> &mut Self {
        let mut row: Vec<_> = cells.into_iter().take(self.align.len()).map(|cell| printable(&cell.into())).collect();
        row.resize(self.align.len(), String::new());
        self.rows.push(row);
        self
    }

    /// Whether no row was added.
    pub fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<_> = (0..self.align.len()).map(width).collect();
        let headless = usize::from(self.rows[0].iter().all(String::is_empty));
        for row in &self.rows[headless..] {
            let mut line = String::new();
            for ((cell, &width), align) in row.iter().zip(&widths).zip(&self.align) {
                match align {
                    Align::Left => line += &format!("{cell:<width$}  "),
                    Align::Right => line += &format!("{cell:>width$}  "),
                }
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// `name` in at most `max` characters. In a longer name an ellipsis replaces the middle, because both ends tell guests
/// apart.
pub fn shorten(name: &str, max: usize) -> String {
    let chars: Vec<_> = name.chars().collect();
    if chars.len() <= max {
        return name.to_owned();
    }
    let tail = max.saturating_sub(1) / 2;
    let head = max.saturating_sub(1) - tail;
    chars[..head].iter().chain(&['…']).chain(&chars[chars.len() - tail..]).collect()
}

/// `text` broken at blanks into lines of at most `columns` characters, each ended by a line feed. A longer word gets a
/// line of its own.
pub fn wrap(text: &str, columns: usize) -> String {
    let mut lines = String::with_capacity(text.len() + 1);
    let mut used = 0;
    for word in text.split_whitespace() {
        let chars = word.chars().count();
        if used > 0 && used + 1 + chars > columns {
            lines.push('\n');
            used = 0;
        } else if used > 0 {
            lines.push(' ');
            used += 1;
        }
        lines.push_str(word);
        used += chars;
    }
    lines.push('\n');
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_lines_have_no_trailing_blanks() {
        let mut table = Table::new(&[("name", Align::Left), ("rss", Align::Right), ("note", Align::Left)]);
        table.row(["vm1", "12.5", "first"]).row(["a-longer-name", "1,024"]);
        assert_eq!(
            table.to_string(),
            "name             rss  note\n\
             vm1             12.5  first\n\
             a-longer-name  1,024\n"
        );
    }

    #[test]
    fn empty_headings_take_no_line() {
        let mut table = Table::new(&[("", Align::Left), ("", Align::Right)]);
        assert!(table.is_empty());
        table.row(["total", "3"]);
        assert_eq!(table.to_string(), "total  3\n");
    }

    #[test]
    fn a_name_cannot_steer_the_terminal() {
        let mut table = Table::new(&[("name", Align::Left)]);
        table.row(["a\u{1b}[2J\nb\u{9b}1m\u{202e}c"]);
        assert_eq!(table.to_string(), "name\na?[2J?b?1m?c\n");
    }

    #[test]
    fn shortened_names_keep_both_ends() {
        assert_eq!(shorten("vm1", 5), "vm1");
        assert_eq!(shorten("kubernetes-pod-0123", 9), "kube…0123");
        assert_eq!(shorten("kubernetes-pod-0123", 8), "kube…123");
        assert_eq!(shorten("äöüß", 3), "ä…ß");
        assert_eq!(shorten("abc", 1), "…");
        assert_eq!(shorten("abc", 0), "…");
    }

    #[test]
    fn wrapped_lines_keep_within_their_columns() {
        assert_eq!(wrap("one two three", 7), "one two\nthree\n");
        assert_eq!(wrap("unbreakable a", 4), "unbreakable\na\n");
        assert_eq!(wrap("", 4), "\n");
    }
}
