//! Comments, names and functions of a Rust file.
//!
//! All of it is taken from tokens and from the gaps between them. So the bodies of macro calls (`proptest!`,
//! `thread_local!`) are seen as well, which a syntax tree would leave as they are.

mod comments;
mod items;

use std::ops::Range;

use anyhow::{Result, anyhow};
use proc_macro2::{Group, TokenStream, TokenTree};

pub use comments::{ALLOW, Comment, Kind, Line, blocks};
pub use items::{Function, is_attribute};

/// The parts of one Rust file that are checked.
#[derive(Default)]
pub struct RustFile {
    /// Every comment, in order.
    pub comments: Vec<Comment>,
    /// Every identifier with its line, in order, keywords included.
    pub names: Vec<(String, usize)>,
    /// Every function with a body.
    pub functions: Vec<Function>,
}

/// Splits a file into tokens.
pub fn tokens(text: &str) -> Result<TokenStream> {
    text.parse().map_err(|error| anyhow!("no Rust: {error}"))
}

/// Finds the comments, names and functions of a file.
pub fn parse(text: &str) -> Result<RustFile> {
    let mut reader = Reader { lines: Lines::new(text), text, file: RustFile::default(), end: 0 };
    reader.level(tokens(text)?);
    reader.gap(text.len());
    Ok(reader.file)
}

/// Line numbers by byte offset.
pub struct Lines(Vec<usize>);

impl Lines {
    /// Indexes the lines of a text.
    pub fn new(text: &str) -> Self {
        Self(std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect())
    }

    /// The line, from 1 on, in which a byte lies.
    pub fn at(&self, offset: usize) -> usize {
        self.0.partition_point(|start| *start <= offset)
    }

    /// The offset at which this byte's line begins.
    pub fn start(&self, offset: usize) -> usize {
        self.0[self.at(offset) - 1]
    }
}

struct Reader<'a> {
    text: &'a str,
    lines: Lines,
    file: RustFile,
    /// The end of the last token.
    end: usize,
}

impl Reader<'_> {
    fn level(&mut self, stream: TokenStream) {
        let tokens: Vec<TokenTree> = stream.into_iter().collect();
        self.file.functions.extend(items::functions(&tokens, &self.lines));
        for token in &tokens {
            self.token(token);
        }
    }

    fn token(&mut self, token: &TokenTree) {
        let range = token.span().byte_range();
        if is_comment(self.text, &range) {
            // A doc comment is several tokens, all with the same place.
            if range.start >= self.end {
                self.gap(range.start);
                self.comment(range);
            }
            return;
        }
        self.gap(range.start);
        match token {
            TokenTree::Group(group) => self.group(group),
            TokenTree::Ident(name) => {
                self.file.names.push((name.to_string().trim_start_matches("r#").into(), self.lines.at(range.start)));
                self.end = range.end;
            }
            _ => self.end = range.end,
        }
    }

    fn group(&mut self, group: &Group) {
        self.end = group.span_open().byte_range().end;
        self.level(group.stream());
        let close = group.span_close().byte_range();
        self.gap(close.start);
        self.end = close.end;
    }

    /// Takes the comments between the last token and the next one.
    fn gap(&mut self, next: usize) {
        let mut at = self.end;
        while at < next {
            let rest = &self.text[at..next];
            let skipped = rest.len() - rest.trim_start().len();
            if skipped > 0 {
                at += skipped;
            } else if let Some(length) = comments::length(rest) {
                self.comment(at..at + length);
                at += length;
            } else {
                break;
            }
        }
    }

    fn comment(&mut self, range: Range<usize>) {
        let before = &self.text[self.lines.start(range.start)..range.start];
        let line = self.lines.at(range.start);
        self.file.comments.push(Comment::new(&self.text[range.clone()], line, before));
        self.end = range.end;
    }
}

/// Whether a token stands for a doc comment.
fn is_comment(text: &str, range: &Range<usize>) -> bool {
    ["//", "/*"].iter().any(|start| text[range.clone()].starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_are_told_from_strings() {
        let file = parse(
            "// one\nfn f() { g(\"// no\", '/', r#\"/* no */\"#); /* two */ } // three\n/// four\nconst A: u8 = 1;",
        )
        .unwrap();
        let texts: Vec<&str> =
            file.comments.iter().flat_map(|comment| &comment.lines).map(|line| line.text.trim()).collect();
        assert_eq!(texts, ["one", "two", "three", "four"]);
    }

    #[test]
    fn lines_count_from_one() {
        let lines = Lines::new("a\nb\n");
        assert_eq!((lines.at(0), lines.at(1), lines.at(2), lines.at(4)), (1, 1, 2, 3));
    }

    #[test]
    fn names_come_with_their_lines() {
        let names = parse("mod a;\nmod r#b;").unwrap().names;
        assert_eq!(names, [("mod".into(), 1), ("a".into(), 1), ("mod".into(), 2), ("b".into(), 2)]);
    }
}
