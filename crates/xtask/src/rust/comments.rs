//! Comments, and the blocks of prose that they form.

/// End of a comment on whose line, and on the line after it, `./x words` allows any phrase.
pub const ALLOW: &str = "words: allow";

/// One line of a file, or of a comment without its markers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Its number in the file, from 1 on.
    pub number: usize,
    /// Text of the line.
    pub text: String,
}

/// Ways in which a comment can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `//` or `/*`: for readers of the code.
    Plain,
    /// `///` or `/**`: documents the item that follows.
    Item,
    /// `//!` or `/*!`: documents the module that it stands in.
    Module,
}

/// One comment: a line, or everything between `/*` and `*/`.
pub struct Comment {
    /// Whom the comment is for.
    pub kind: Kind,
    /// Lines of the comment, without markers.
    pub lines: Vec<Line>,
    /// Number of bytes before it in its line; `None` if there is code among them.
    column: Option<usize>,
}

impl Comment {
    /// Reads a comment with its markers, which begins in this line behind `before`.
    pub fn new(source: &str, line: usize, before: &str) -> Self {
        let (kind, body) = body(source);
        let lines =
            body.lines().enumerate().map(|(at, text)| Line { number: line + at, text: clean(source, text) }).collect();
        Self { kind, lines, column: before.trim().is_empty().then_some(before.len()) }
    }

    fn is_marker(&self) -> bool {
        self.lines.iter().all(|line| line.text.trim() == ALLOW)
    }
}

/// Splits a comment into its kind and its text.
fn body(source: &str) -> (Kind, &str) {
    let text = source.trim_end_matches("*/");
    let markers =
        [("//!", Kind::Module), ("/*!", Kind::Module), ("////", Kind::Plain), ("///", Kind::Item), ("/**", Kind::Item)];
    for (marker, kind) in markers {
        if let Some(text) = text.strip_prefix(marker) {
            return (kind, text);
        }
    }
    (Kind::Plain, &text[2..])
}

/// Takes the blank behind `//`, and the asterisks at the left of a long comment.
fn clean(source: &str, text: &str) -> String {
    let text = if source.starts_with("/*") { text.trim_start().trim_start_matches('*') } else { text };
    text.strip_prefix(' ').unwrap_or(text).into()
}

/// The length of the comment that a text begins with, if it does.
pub fn length(text: &str) -> Option<usize> {
    if text.starts_with("//") {
        return Some(text.find('\n').unwrap_or(text.len()));
    }
    if !text.starts_with("/*") {
        return None;
    }
    let (mut depth, mut at) = (0, 0);
    loop {
        let rest = &text[at..];
        if rest.starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with("*/") {
            depth -= 1;
            at += 2;
        } else {
            at += rest.chars().next()?.len_utf8();
        }
        if depth == 0 {
            return Some(at);
        }
    }
}

/// Comments of one kind in consecutive lines: one piece of prose.
pub struct Block {
    /// Whom the comments are for.
    pub kind: Kind,
    /// Lines of all comments.
    pub lines: Vec<Line>,
}

/// Joins comments that follow each other line by line at one column. A comment behind code is a block by itself, and a
/// comment that is only the marker [`ALLOW`] is left out.
pub fn blocks(comments: &[Comment]) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut last: Option<(Kind, Option<usize>, usize)> = None;
    for comment in comments {
        let Some(first) = comment.lines.first() else { continue };
        let end = first.number + comment.lines.len();
        let follows = comment.column.is_some() && last == Some((comment.kind, comment.column, first.number));
        if comment.is_marker() {
            // A comment that is only this marker does not end the block around it.
            last = last.map(|(kind, column, next)| (kind, column, if next == first.number { end } else { next }));
            continue;
        }
        match blocks.last_mut().filter(|_| follows) {
            Some(block) => block.lines.extend(comment.lines.iter().cloned()),
            None => blocks.push(Block { kind: comment.kind, lines: comment.lines.clone() }),
        }
        last = Some((comment.kind, comment.column, end));
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rust::parse;

    fn texts(source: &str) -> Vec<(Kind, String)> {
        let text = |block: &Block| block.lines.iter().map(|line| line.text.as_str()).collect::<Vec<_>>().join("|");
        blocks(&parse(source).unwrap().comments).iter().map(|block| (block.kind, text(block))).collect()
    }

    #[test]
    fn lines_of_one_kind_are_one_block() {
        let source = "//! a\n//! b\n\n// c\n// d\n/// e\n/// f\nstruct S; // g\n// h\n";
        let expected =
            [(Kind::Module, "a|b"), (Kind::Plain, "c|d"), (Kind::Item, "e|f"), (Kind::Plain, "g"), (Kind::Plain, "h")];
        assert_eq!(texts(source), expected.map(|(kind, text)| (kind, text.to_string())));
    }

    #[test]
    fn a_marker_does_not_split_a_block() {
        assert_eq!(texts("/// a\n// words: allow\n/// b\nstruct S;"), [(Kind::Item, "a|b".to_string())]);
    }

    #[test]
    fn long_comments_nest() {
        assert_eq!(length("/* a /* b */ c */ d"), Some(17));
        assert_eq!(length("/**/ d"), Some(4));
        assert_eq!(length("x"), None);
        assert_eq!(texts("/* a\n * b\n */ struct S;")[0].1, "a|b|");
    }
}
