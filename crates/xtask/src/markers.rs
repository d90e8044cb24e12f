//! The places of generated tables in a document: between `<!-- KIND: NAME -->` and `<!-- end -->`, a line each.

use anyhow::{Context, Result, bail};

const BEGIN: &str = "<!-- ";
const BEGIN_CLOSES: &str = " -->";
const END: &str = "<!-- end -->";

/// The name of the table of this kind that begins with this line.
pub fn begun<'a>(line: &'a str, kind: &str) -> Option<&'a str> {
    line.strip_prefix(BEGIN)?.strip_prefix(kind)?.strip_prefix(": ")?.strip_suffix(BEGIN_CLOSES)
}

/// Whether a table ends with this line.
pub fn ends(line: &str) -> bool {
    line == END
}

/// A document with its tables made anew.
pub struct Filled {
    /// All lines of the document.
    pub text: String,
    /// Names of tables that were different before.
    pub stale: Vec<String>,
}

/// Puts the content that belongs to each name between its markers, for tables of one kind.
///
/// # Errors
/// A table has no end, or no content.
pub fn fill(document: &str, kind: &str, mut content: impl FnMut(&str) -> Result<String>) -> Result<Filled> {
    let mut filled = Filled { text: String::new(), stale: Vec::new() };
    let mut lines = document.lines();
    while let Some(line) = lines.next() {
        filled.text += line;
        filled.text.push('\n');
        let Some(name) = begun(line, kind) else { continue };
        let mut before = String::new();
        loop {
            match lines.next() {
                Some(line) if ends(line) => break,
                Some(line) if begun(line, kind).is_none() => before = before + line + "\n",
                _ => bail!("the table {name} has no line {END}"),
            }
        }
        let after = format!("\n{}\n", content(name).with_context(|| format!("no table {name}"))?);
        if before != after {
            filled.stale.push(name.to_string());
        }
        filled.text += &after;
        filled.text += END;
        filled.text.push('\n');
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_around_tables_stays() {
        let document = "a\n<!-- figures: x -->\nold\n<!-- end -->\nb\n<!-- figures: y -->\n\nnew y\n<!-- end -->\n";
        let filled = fill(document, "figures", |name| Ok(format!("new {name}"))).unwrap();
        assert_eq!(filled.stale, ["x"]);
        assert_eq!(filled.text, document.replace("old", "\nnew x"));
        assert!(fill(&filled.text, "figures", |name| Ok(format!("new {name}"))).unwrap().stale.is_empty());
    }

    #[test]
    fn a_table_without_end_is_an_error() {
        for document in ["<!-- figures: x -->\n", "<!-- figures: x -->\n<!-- figures: y -->\n<!-- end -->\n"] {
            assert!(fill(document, "figures", |_| Ok(String::new())).is_err());
        }
    }
}
