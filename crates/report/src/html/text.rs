//! Text for HTML, and the small pieces that every section uses.

use crate::table::printable;
use std::fmt::{self, Write as _};
use std::io::{self, Write};

/// A string that displays as HTML text: whatever it holds, it stays text, inside elements and inside
/// quoted attributes. Characters that steer terminals or reorder text become `?`.
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
                // Not characters of XML; HTML parsers replace them too.
                '\u{fffe}' | '\u{ffff}' => f.write_char('\u{fffd}')?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
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

/// Writes a table: headings, and rows of one name and figures. It scrolls by itself where it is too wide,
/// with the keyboard too; `label` names it.
pub fn table(
    out: &mut dyn Write,
    label: &str,
    headings: &[&str],
    rows: impl IntoIterator<Item = Vec<String>>,
) -> io::Result<()> {
    let label = Text(label);
    write!(
        out,
        "<div class=\"wide\" role=\"region\" tabindex=\"0\" aria-label=\"{label}\"><table><caption \
         class=\"unseen\">{label}</caption><thead><tr>"
    )?;
    for heading in headings {
        write!(out, "<th scope=\"col\">{}</th>", Text(heading))?;
    }
    writeln!(out, "</tr></thead><tbody>")?;
    for row in rows {
        let mut cells = row.iter();
        if let Some(name) = cells.next() {
            write!(out, "<tr><th scope=\"row\">{}</th>", Text(name))?;
        }
        for cell in cells {
            write!(out, "<td>{}</td>", Text(cell))?;
        }
        writeln!(out, "</tr>")?;
    }
    writeln!(out, "</tbody></table></div>")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_a_name_holds_it_stays_text() {
        let hostile = "<script>alert('x')</script>\" onload=\"y&\u{0}\u{202e}\u{ffff}";
        let shown = Text(hostile).to_string();
        assert_eq!(shown, "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&quot; onload=&quot;y&amp;??\u{fffd}");
    }
}
