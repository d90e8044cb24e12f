//! Functions and constants among the tokens of one level.

use proc_macro2::{Delimiter, Group, TokenTree};

use super::{Lines, is_comment};
use crate::text::Line;

/// A function with a body.
#[derive(Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// The line of `fn`.
    pub line: usize,
    /// Lines from `fn` to the closing brace.
    pub lines: usize,
    /// Whether it has the attribute `#[test]`.
    pub is_test: bool,
}

/// A constant or static item with a doc comment.
#[derive(Debug, PartialEq, Eq)]
pub struct Constant {
    /// Its name.
    pub name: String,
    /// Its doc comment.
    pub docs: Vec<Line>,
}

/// Finds the functions of this level; those inside of its groups are found with their own level.
pub fn functions(tokens: &[TokenTree], lines: &Lines) -> Vec<Function> {
    let mut found = Vec::new();
    let mut is_test = false;
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Group(group) if is_attribute(tokens, at) => is_test |= is_test_attribute(group),
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => is_test = false,
            TokenTree::Punct(punct) if punct.as_char() == ';' => is_test = false,
            TokenTree::Ident(word) if word == "fn" => {
                if let (Some(TokenTree::Ident(name)), Some(body)) = (tokens.get(at + 1), body(&tokens[at..])) {
                    let line = lines.at(word.span().byte_range().start);
                    let end = lines.at(body.span_close().byte_range().start);
                    found.push(Function { name: name.to_string(), line, lines: end - line + 1, is_test });
                }
            }
            _ => {}
        }
    }
    found
}

/// The body of the function that these tokens begin with. A declaration has none.
fn body(tokens: &[TokenTree]) -> Option<&Group> {
    tokens.iter().find_map(|token| match token {
        TokenTree::Punct(punct) if punct.as_char() == ';' => Some(None),
        TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => Some(Some(group)),
        _ => None,
    })?
}

/// Whether this token is the `[...]` of an attribute of the item that follows.
pub fn is_attribute(tokens: &[TokenTree], at: usize) -> bool {
    let is_hash = |token: &TokenTree| matches!(token, TokenTree::Punct(punct) if punct.as_char() == '#');
    let is_bracket = matches!(&tokens[at], TokenTree::Group(group) if group.delimiter() == Delimiter::Bracket);
    is_bracket && at > 0 && is_hash(&tokens[at - 1])
}

/// `#[test]`, or the like by another name: `#[some::test]`.
fn is_test_attribute(group: &Group) -> bool {
    matches!(group.stream().into_iter().last(), Some(TokenTree::Ident(word)) if word == "test")
}

/// Finds the constants of this level that have a doc comment.
pub fn constants(tokens: &[TokenTree], text: &str, lines: &Lines) -> Vec<Constant> {
    let mut found = Vec::new();
    let mut docs: Vec<Line> = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let range = token.span().byte_range();
        if is_comment(text, &range) {
            let comment = super::Comment::new(&text[range.clone()], lines.at(range.start), "");
            // Each doc comment is several tokens: the last one brings it.
            if matches!(token, TokenTree::Group(_)) && comment.kind == super::Kind::Item {
                docs.extend(comment.lines);
            }
        } else if let Some(name) = constant_name(tokens, at) {
            if !docs.is_empty() {
                found.push(Constant { name, docs: std::mem::take(&mut docs) });
            }
        } else if !may_precede_constant(tokens, at) {
            docs.clear();
        }
    }
    found
}

/// The name of the constant whose `const` or `static` this token is.
fn constant_name(tokens: &[TokenTree], at: usize) -> Option<String> {
    let word = |at: usize| match tokens.get(at) {
        Some(TokenTree::Ident(word)) => Some(word.to_string()),
        _ => None,
    };
    word(at).filter(|word| word == "const" || word == "static")?;
    match word(at + 1)?.as_str() {
        "fn" | "unsafe" | "extern" | "async" => None,
        "mut" | "ref" => word(at + 2),
        name => Some(name.into()),
    }
}

/// Whether this token may stand between a doc comment and `const`: an attribute or a visibility.
fn may_precede_constant(tokens: &[TokenTree], at: usize) -> bool {
    match &tokens[at] {
        TokenTree::Punct(punct) => punct.as_char() == '#',
        TokenTree::Ident(word) => word == "pub",
        TokenTree::Group(group) => {
            let is_visibility = group.delimiter() == Delimiter::Parenthesis
                && matches!(tokens.get(at.wrapping_sub(1)), Some(TokenTree::Ident(word)) if word == "pub");
            is_visibility || is_attribute(tokens, at)
        }
        TokenTree::Literal(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rust::parse;

    #[test]
    fn functions_are_measured_from_fn_to_brace() {
        let source =
            "#[inline]\npub fn a(\n    b: u8,\n) -> u8 {\n    fn c() {\n    }\n    b\n}\ntrait T { fn d(); }\n";
        let found: Vec<_> = parse(source).unwrap().functions.into_iter().map(|f| (f.name, f.line, f.lines)).collect();
        assert_eq!(found, [("a".to_string(), 2, 7), ("c".to_string(), 5, 2)]);
    }

    #[test]
    fn tests_are_known_by_their_attribute_in_macros_too() {
        let source =
            "#[cfg(test)] mod tests { #[test] #[ignore] fn a() {} fn b() {} proptest! { #[test] fn c(x in 0..1) {} } }";
        let found: Vec<_> = parse(source).unwrap().functions.into_iter().map(|f| (f.name, f.is_test)).collect();
        assert_eq!(found, [("a".to_string(), true), ("b".to_string(), false), ("c".to_string(), true)]);
    }

    #[test]
    fn constants_come_with_their_docs() {
        let source = "/// a\n/// b\n#[allow(x)]\npub(crate) const A: u8 = 1;\nconst B: u8 = 2;\n/// c\nconst fn f() {}\n\
                      thread_local! { /// d\n static C: u8 = 3; }\nimpl S { /// e\n pub const D: u8 = 4; }";
        let docs =
            |constant: &Constant| constant.docs.iter().map(|line| line.text.clone()).collect::<Vec<_>>().join(" ");
        let found: Vec<_> = parse(source).unwrap().constants.iter().map(|c| (c.name.clone(), docs(c))).collect();
        let expected = [("A", "a b"), ("C", "d"), ("D", "e")];
        assert_eq!(found, expected.map(|(name, docs)| (name.to_string(), docs.to_string())));
    }
}
