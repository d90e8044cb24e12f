//! Text for HTML, and the small pieces that every section uses.

use crate::table::Align;
use cli::printable;
use cli::size::count;
use std::fmt::{self, Write as _};
use std::io::{self, Write};

/// A string that displays as HTML text, with any content, inside elements and inside quoted attributes. Characters that
/// steer terminals or reorder text become `?`.
pub struct Text<'a>(pub &'a str);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in printable(self.0).chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // These are not characters of XML; HTML parsers replace them, too.
                '\u{fffe}' | '\u{ffff}' => f.write_char('\u{fffd}')?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// Greatest length of a name in a table, in characters; page maps show names in full.
pub const NAME_CHARS: usize = 28;
/// Number of guests or groups that are shown at once where each takes much space; the rest is folded away.
const SHOWN: usize = 24;

/// Writes `items` with `write`. Those after the first `SHOWN` are folded away, under a line that tells how many
/// `what` they are.
pub fn folding<T>(
    out: &mut dyn Write,
    items: &[T],
    what: &str,
    mut write: impl FnMut(&mut dyn Write, &[T]) -> io::Result<()>,
) -> io::Result<()> {
    let (shown, folded) = items.split_at(items.len().min(SHOWN));
    write(out, shown)?;
    if !folded.is_empty() {
        writeln!(out, "<details><summary>{} {}</summary>", count(folded.len() as u64), Text(what))?;
        write(out, folded)?;
        writeln!(out, "</details>")?;
    }
    Ok(())
}

/// Writes the key of a picture: colour class and meaning.
pub fn legend<'a>(out: &mut dyn Write, keys: impl IntoIterator<Item = (&'a str, &'a str)>) -> io::Result<()> {
    write!(out, "<ul class=\"legend\">")?;
    for (class, meaning) in keys {
        write!(
            out,
            "<li><svg viewBox=\"0 0 12 12\" aria-hidden=\"true\"><rect class=\"{class}\" width=\"12\" \
             height=\"12\"/></svg>{}</li>",
            Text(meaning)
        )?;
    }
    writeln!(out, "</ul>")
}

/// Writes a table: columns by heading and alignment, and rows that begin with a name. A table that is too wide scrolls
/// on its own, by keyboard too; `label` names it.
pub fn table(
    out: &mut dyn Write,
    label: &str,
    columns: &[(&str, Align)],
    rows: impl IntoIterator<Item = Vec<String>>,
) -> io::Result<()> {
    let label = Text(label);
    write!(
        out,
        "<div class=\"wide\" role=\"region\" tabindex=\"0\" aria-label=\"{label}\"><table><caption \
         class=\"unseen\">{label}</caption><thead><tr>"
    )?;
    for (heading, align) in columns {
        write!(out, "<th scope=\"col\"{}>{}</th>", class_of(*align), Text(heading))?;
    }
    writeln!(out, "</tr></thead><tbody>")?;
    for row in rows {
        write!(out, "<tr>")?;
        for (n, (cell, (_, align))) in row.iter().zip(columns).enumerate() {
            let (open, close) = if n == 0 { ("th scope=\"row\"", "th") } else { ("td", "td") };
            write!(out, "<{open}{}>{}</{close}>", class_of(*align), Text(cell))?;
        }
        writeln!(out, "</tr>")?;
    }
    writeln!(out, "</tbody></table></div>")
}

const fn class_of(align: Align) -> &'static str {
    match align {
        Align::Left => " class=\"text\"",
        Align::Right => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_name_stays_text() {
        let hostile = "<script>alert('x')</script>\" onload=\"y&\u{0}\u{202e}\u{ffff}";
        let shown = Text(hostile).to_string();
        assert_eq!(shown, "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&quot; onload=&quot;y&amp;??\u{fffd}");
    }
}
