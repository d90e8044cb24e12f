//! Types that are written as JSON: structs and enums with `derive(Serialize)`, their fields, and their documentation.

use crate::rust;
use anyhow::{Context, Result};
use proc_macro2::{Delimiter, Group, TokenTree};
use std::collections::BTreeMap;

/// What an item tells about itself by its attributes.
#[derive(Default)]
struct About {
    docs: Vec<String>,
    serde: BTreeMap<String, String>,
    is_written: bool,
}

/// A field of a struct, or a variant of an enum.
pub struct Part {
    /// Its name as it is written in JSON.
    pub name: String,
    /// Documentation of the field or variant, in one line.
    pub docs: String,
    /// Its type, without blanks, references and lifetimes; empty for a variant without data.
    pub shape: String,
    /// Whether the fields of its type are written in place of it (`serde(flatten)`).
    pub is_flat: bool,
    /// Whether it may be left out (`skip_serializing_if`).
    pub may_lack: bool,
}

/// What a type becomes in JSON.
#[derive(PartialEq, Eq)]
pub enum Kind {
    /// An object with the type's parts.
    Struct,
    /// A string: the name of one of the type's parts.
    Words,
    /// As one of its parts: a newtype and an alias have one part, an untagged enum has several.
    Any,
    /// A string (`serde(into = "String")`).
    Text,
}

/// A type.
pub struct Type {
    /// File of the type.
    pub file: String,
    /// Name of the type.
    pub name: String,
    /// The first paragraph of its documentation, one line.
    pub docs: String,
    /// What the type becomes in JSON.
    pub kind: Kind,
    /// Its fields or variants, without those that are not written.
    pub parts: Vec<Part>,
}

/// Finds the types of a file that can be written.
///
/// # Errors
/// The file is no Rust.
pub fn of_file(file: &str, text: &str) -> Result<Vec<Type>> {
    let tokens: Vec<TokenTree> =
        rust::tokens(text).with_context(|| format!("cannot read {file}"))?.into_iter().collect();
    let (mut found, mut about) = (Vec::new(), About::default());
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Group(group) if rust::is_attribute(&tokens, at) => about.add(text, group),
            TokenTree::Ident(word) if word == "struct" || word == "enum" => {
                if about.is_written {
                    found.extend(item(file, text, &tokens[at..], &about));
                }
                about = About::default();
            }
            TokenTree::Ident(word) if word == "type" => {
                found.extend(alias(file, &tokens[at..]));
                about = About::default();
            }
            TokenTree::Ident(word) if word == "pub" => {}
            TokenTree::Punct(punct) if punct.as_char() == '#' => {}
            TokenTree::Group(group) if group.delimiter() == Delimiter::Parenthesis => {}
            _ => about = About::default(),
        }
    }
    Ok(found)
}

impl About {
    /// Reads one attribute of the item.
    fn add(&mut self, text: &str, attribute: &Group) {
        let tokens: Vec<TokenTree> = attribute.stream().into_iter().collect();
        let Some(TokenTree::Ident(name)) = tokens.first() else { return };
        match (name.to_string().as_str(), tokens.get(1)) {
            // The attribute of a doc comment has the comment itself as its span.
            ("doc", _) => {
                let source = &text[attribute.span().byte_range()];
                self.docs.extend(source.strip_prefix("///").map(|line| line.trim().to_owned()));
            }
            ("derive", Some(TokenTree::Group(list))) => {
                self.is_written |= list.stream().into_iter().any(|t| t.to_string() == "Serialize");
            }
            ("serde", Some(TokenTree::Group(list))) => {
                let words = split(&list.stream().into_iter().collect::<Vec<_>>());
                self.serde.extend(words.iter().map(|word| {
                    let value = word.get(2).map_or(String::new(), |value| value.to_string().trim_matches('"').into());
                    (word[0].to_string(), value)
                }));
            }
            _ => {}
        }
    }

    fn has(&self, word: &str) -> bool {
        self.serde.contains_key(word)
    }

    /// The first paragraph in one line, as a cell of a table. Links are left as code.
    fn text(&self) -> String {
        let lines = self.docs.iter().map(String::as_str);
        let text = lines.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
        without_links(&text).replace("`None`", "`null`").replace('|', "\\|")
    }
}

/// A text with code in place of links to it.
fn without_links(text: &str) -> String {
    let mut parts = text.split("[`");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part.split_once("`]").unwrap_or((part, ""));
        let rest = rest.strip_prefix('(').and_then(|rest| Some(rest.split_once(')')?.1)).unwrap_or(rest);
        out += &format!("`{name}`{rest}");
    }
    out
}

/// The item that begins with these tokens: `struct` or `enum`, a name, what it is generic over, and a body.
fn item(file: &str, text: &str, tokens: &[TokenTree], about: &About) -> Option<Type> {
    let is_enum = tokens[0].to_string() == "enum";
    let body = tokens.iter().take_while(|token| !is_end(token)).find_map(|token| match token {
        TokenTree::Group(group) if group.delimiter() != Delimiter::Bracket => Some(group),
        _ => None,
    })?;
    let is_tuple = body.delimiter() == Delimiter::Parenthesis;
    let rule = about.serde.get("rename_all").map_or("", String::as_str);
    let members: Vec<TokenTree> = body.stream().into_iter().collect();
    let parts =
        split(&members).into_iter().filter_map(|member| part(text, &member, (is_enum, is_tuple), rule)).collect();
    let kind = if about.serde.get("into").is_some_and(|into| into == "String") {
        Kind::Text
    } else if is_tuple || about.has("untagged") {
        Kind::Any
    } else if is_enum {
        Kind::Words
    } else {
        Kind::Struct
    };
    Some(Type { file: file.into(), name: tokens[1].to_string(), docs: about.text(), kind, parts })
}

/// The alias that begins with these tokens, if it is not generic.
fn alias(file: &str, tokens: &[TokenTree]) -> Option<Type> {
    tokens.get(2).filter(|token| matches!(token, TokenTree::Punct(punct) if punct.as_char() == '='))?;
    let meant: Vec<TokenTree> = tokens[3..].iter().take_while(|token| !is_end(token)).cloned().collect();
    let part = Part { name: String::new(), docs: String::new(), shape: plain(&meant), is_flat: false, may_lack: false };
    let (name, docs) = (tokens[1].to_string(), String::new());
    Some(Type { file: file.into(), name, docs, kind: Kind::Any, parts: vec![part] })
}

fn is_end(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == ';')
}

/// A field or variant; `None` if it is not written.
fn part(text: &str, tokens: &[TokenTree], (is_variant, is_tuple): (bool, bool), rule: &str) -> Option<Part> {
    let mut about = About::default();
    let mut rest = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Group(group) if rust::is_attribute(tokens, at) => about.add(text, group),
            TokenTree::Punct(punct) if punct.as_char() == '#' => {}
            TokenTree::Ident(word) if word == "pub" => {}
            // `pub(crate)`
            TokenTree::Group(_) if at > 0 && tokens[at - 1].to_string() == "pub" => {}
            token => rest.push(token.clone()),
        }
    }
    if about.has("skip") || about.has("skip_serializing") {
        return None;
    }
    let name = rest.first()?.to_string();
    let shape = match (is_variant, is_tuple) {
        (false, true) => plain(&rest),
        (false, false) => plain(rest.get(2..)?),
        (true, _) => match rest.get(1) {
            Some(TokenTree::Group(data)) if data.delimiter() == Delimiter::Parenthesis => plain(&tokens_of(data)),
            Some(TokenTree::Group(_)) => "{}".into(),
            _ => String::new(),
        },
    };
    let by_rule = || match (is_variant, rule) {
        (true, rule) => renamed(&name, rule),
        (false, "kebab-case") => name.replace('_', "-"),
        (false, _) => name.trim_start_matches("r#").to_owned(),
    };
    let written = about.serde.get("rename").cloned().unwrap_or_else(by_rule);
    let (is_flat, may_lack) = (about.has("flatten"), about.has("skip_serializing_if"));
    Some(Part { name: written, docs: about.text(), shape, is_flat, may_lack })
}

fn tokens_of(group: &Group) -> Vec<TokenTree> {
    group.stream().into_iter().collect()
}

/// The name of a variant by serde's rule.
fn renamed(name: &str, rule: &str) -> String {
    let joint = match rule {
        "snake_case" => "_",
        "kebab-case" => "-",
        "lowercase" => "",
        _ => return name.into(),
    };
    let mut out = String::new();
    for (at, c) in name.chars().enumerate() {
        if c.is_uppercase() && at > 0 {
            out += joint;
        }
        out.extend(c.to_lowercase());
    }
    out
}

/// A type without blanks, references and lifetimes.
fn plain(tokens: &[TokenTree]) -> String {
    let mut out = String::new();
    let mut tokens = tokens.iter();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(punct) if punct.as_char() == '&' => {}
            // The name of the lifetime follows.
            TokenTree::Punct(punct) if punct.as_char() == '\'' => _ = tokens.next(),
            TokenTree::Group(group) => {
                let (open, close) = if group.delimiter() == Delimiter::Bracket { ("[", "]") } else { ("(", ")") };
                out += &format!("{open}{}{close}", plain(&tokens_of(group)));
            }
            token => out += &token.to_string(),
        }
    }
    out
}

/// Splits at commas that stand in no angle brackets.
fn split(tokens: &[TokenTree]) -> Vec<Vec<TokenTree>> {
    let (mut parts, mut depth) = (vec![Vec::new()], 0);
    for token in tokens {
        if let TokenTree::Punct(punct) = token {
            match punct.as_char() {
                '<' => depth += 1,
                '>' => depth -= 1,
                ',' if depth == 0 => {
                    parts.push(Vec::new());
                    continue;
                }
                _ => {}
            }
        }
        parts.last_mut().expect("it begins with one").push(token.clone());
    }
    parts.retain(|part| !part.is_empty());
    parts
}
