//! The places of tables in a document: between `<!-- figures: NAME -->` and `<!-- end -->`, a line each.

use anyhow::{Context, Result, bail};

const BEGIN: &str = "<!-- figures: ";
const BEGIN_CLOSES: &str = " -->";
const END: &str = "<!-- end -->";

/// A document with its tables made anew.
pub struct Filled {
    /// All of it.
    pub text: String,
    /// Names of tables that were different before.
    pub stale: Vec<String>,
}

/// Puts the content that belongs to each name between its markers.
pub fn fill(document: &str, mut content: impl FnMut(&str) -> Result<String>) -> Result<Filled> {
    let mut filled = Filled { text: String::new(), stale: Vec::new() };
    let mut lines = document.lines();
    while let Some(line) = lines.next() {
        filled.text += line;
        filled.text.push('\n');
        let Some(name) = line.strip_prefix(BEGIN).and_then(|rest| rest.strip_suffix(BEGIN_CLOSES)) else { continue };
        let mut before = String::new();
        loop {
            match lines.next() {
                Some(END) => break,
                Some(line) if !line.starts_with(BEGIN) => before = before + line + "\n",
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
        let filled = fill(document, |name| Ok(format!("new {name}"))).unwrap();
        assert_eq!(filled.stale, ["x"]);
        assert_eq!(filled.text, document.replace("old", "\nnew x"));
        assert!(fill(&filled.text, |name| Ok(format!("new {name}"))).unwrap().stale.is_empty());
    }

    #[test]
    fn a_table_without_end_is_an_error() {
        for document in ["<!-- figures: x -->\n", "<!-- figures: x -->\n<!-- figures: y -->\n<!-- end -->\n"] {
            assert!(fill(document, |_| Ok(String::new())).is_err());
        }
    }
}
