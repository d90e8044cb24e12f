//! Functions among the tokens of one level.

use proc_macro2::{Delimiter, Group, TokenTree};

use super::Lines;

/// A function with a body.
#[derive(Debug, PartialEq, Eq)]
pub struct Function {
    /// Name of the function.
    pub name: String,
    /// The line of `fn`.
    pub line: usize,
    /// Lines from `fn` to the closing brace.
    pub lines: usize,
    /// Whether it has the attribute `#[test]`.
    pub is_test: bool,
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

/// Whether an attribute is `#[test]`, or the test attribute of another library: `#[some::test]`.
fn is_test_attribute(group: &Group) -> bool {
    matches!(group.stream().into_iter().last(), Some(TokenTree::Ident(word)) if word == "test")
}

#[cfg(test)]
mod tests {
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
}
