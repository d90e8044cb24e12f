//! Prose: Markdown into paragraphs of words, paragraphs into sentences, identifiers into the words they are made of.

mod markdown;
mod names;
mod sentences;

pub use markdown::paragraphs;
pub use names::segments;
pub use sentences::{count, sentences};

/// One line of a file, or of a comment without its markers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Its number in the file, from 1 on.
    pub number: usize,
    /// Its text.
    pub text: String,
}

/// Places where words can stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A paragraph, or an item of a list.
    Prose,
    /// A heading.
    Heading,
    /// A cell of a table.
    Cell,
    /// A line of a diagram or of other preformatted text.
    Code,
}

/// A word with its punctuation. A code span is one word, backticks and blanks included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word {
    /// The line in which it begins.
    pub line: usize,
    /// Its text.
    pub text: String,
    /// Whether it is part of a bullet's bold label.
    pub is_label: bool,
}

impl Word {
    /// The word without punctuation around it. A code span keeps its backticks.
    pub fn core(&self) -> &str {
        self.text.trim_matches(|c: char| !c.is_alphanumeric() && c != '`')
    }

    /// The word without punctuation, in lower case.
    pub fn lower(&self) -> String {
        self.core().to_lowercase()
    }
}

/// Words that belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paragraph {
    /// Where they stand.
    pub place: Place,
    /// The words, at least one.
    pub words: Vec<Word>,
}
