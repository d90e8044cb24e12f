//! Files of one room that name each other by `crate::` and `super::`, tests aside.

use std::collections::BTreeMap;

use anyhow::Result;
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::inside::{test_modules, without_tests};
use crate::graph::Graph;
use crate::rust::{self, is_attribute};

/// Segments of a module's path below the crate; the crate itself has none.
type Module = Vec<String>;

/// The files of a room and their tokens, both without tests.
pub type Streams<'a> = Vec<(&'a str, TokenStream)>;

/// Draws an edge from each file to those whose modules it names. Files are `(path below src, text)`.
pub fn graph(sources: &[(String, String)]) -> Result<(Graph, Streams<'_>)> {
    let mut modules: BTreeMap<&str, Module> =
        sources.iter().map(|(file, _)| (file.as_str(), module_of(file))).collect();
    let (mut streams, mut tests): (Streams<'_>, Vec<Module>) = (Vec::new(), Vec::new());
    for (file, text) in sources {
        let tokens = rust::tokens(text)?;
        renamed(file, tokens.clone(), &mut modules);
        let below = |name: String| -> Module { modules[file.as_str()].iter().cloned().chain([name]).collect() };
        tests.extend(test_modules(&tokens).into_iter().map(below));
        streams.push((file.as_str(), without_tests(tokens)));
    }
    let is_test = |file: &str| tests.iter().any(|test| modules[file].starts_with(test));
    streams.retain(|(file, _)| !is_test(file));
    modules = modules.iter().filter(|(file, _)| !is_test(file)).map(|(file, module)| (*file, module.clone())).collect();
    let files: BTreeMap<&Module, &str> = modules.iter().map(|(file, module)| (module, *file)).collect();
    let mut graph = Graph::new();
    for (file, tokens) in &streams {
        let mut paths = Vec::new();
        level(&tokens.clone().into_iter().collect::<Vec<_>>(), &modules[file], &mut paths);
        let targets =
            paths.iter().filter_map(|path| (0..=path.len()).rev().find_map(|end| files.get(&path[..end].to_vec())));
        let targets = targets.filter(|target| *target != file).map(|target| target.to_string());
        graph.insert(file.to_string(), targets.collect());
    }
    Ok((graph, streams))
}

/// The module that a file holds by its name: `a/b.rs` and `a/b/mod.rs` are `a::b`.
fn module_of(file: &str) -> Module {
    let path = file.strip_suffix(".rs").unwrap_or(file);
    let path = path.strip_suffix("/mod").unwrap_or(path);
    if matches!(path, "lib" | "main") { Vec::new() } else { path.split('/').map(String::from).collect() }
}

/// Takes note of `#[path = "b.rs"] mod a;`, where the attribute's path is seen from this file's directory.
fn renamed(file: &str, tokens: TokenStream, modules: &mut BTreeMap<&str, Module>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let directory = file.rsplit_once('/').map_or(String::new(), |(directory, _)| format!("{directory}/"));
    let mut path = None;
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Group(group) if is_attribute(&tokens, at) => {
                let attribute = group.stream().to_string();
                path = attribute.strip_prefix("path = ").map(|path| path.trim_matches('"').to_string()).or(path);
            }
            TokenTree::Punct(punct) if punct.as_char() == ';' => path = None,
            TokenTree::Ident(word) if word == "mod" => {
                let target = path.take().map(|path| directory.clone() + &path);
                if let (Some(target), Some(TokenTree::Ident(name))) = (target, tokens.get(at + 1)) {
                    let module: Module = modules[file].iter().cloned().chain([name.to_string()]).collect();
                    if let Some(known) = modules.get_mut(target.as_str()) {
                        *known = module;
                    }
                }
            }
            _ => {}
        }
    }
}

/// Collects the paths that are named in a module and in the modules written inside of it.
fn level(tokens: &[TokenTree], module: &[String], paths: &mut Vec<Module>) {
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            TokenTree::Ident(word) if (word == "crate" || word == "super") && is_path(&tokens[at + 1..]) => {
                let base = if word == "crate" { &[] } else { parent(module) };
                at += 1 + path(&tokens[at + 1..], base, paths);
                continue;
            }
            TokenTree::Group(group) => {
                let inside = inline_module(tokens, at, group.delimiter());
                let module: Module = module.iter().cloned().chain(inside).collect();
                level(&group.stream().into_iter().collect::<Vec<_>>(), &module, paths);
            }
            _ => {}
        }
        at += 1;
    }
}

/// The words of a file that begin a path, so that they may name another room.
pub fn words(tokens: TokenStream) -> impl Iterator<Item = String> {
    let mut words = Vec::new();
    begin_paths(&tokens.into_iter().collect::<Vec<_>>(), &mut words);
    words.into_iter()
}

fn begin_paths(tokens: &[TokenTree], words: &mut Vec<String>) {
    let is_colon = |at: usize| matches!(tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == ':');
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Ident(word) if is_path(&tokens[at + 1..]) && (at == 0 || !is_colon(at - 1)) => {
                words.push(word.to_string());
            }
            TokenTree::Group(group) => begin_paths(&group.stream().into_iter().collect::<Vec<_>>(), words),
            _ => {}
        }
    }
}

fn parent(module: &[String]) -> &[String] {
    &module[..module.len().saturating_sub(1)]
}

/// The name of the module whose body is the group at this index; `None` if the group is no module's body.
fn inline_module(tokens: &[TokenTree], at: usize, delimiter: Delimiter) -> Option<String> {
    match tokens.get(at.checked_sub(2)?..at)? {
        [TokenTree::Ident(word), TokenTree::Ident(name)] if word == "mod" && delimiter == Delimiter::Brace => {
            Some(name.to_string())
        }
        _ => None,
    }
}

/// Whether these tokens begin with `::`.
fn is_path(tokens: &[TokenTree]) -> bool {
    let is_colon = |token: &TokenTree| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ':');
    tokens.len() > 2 && tokens[..2].iter().all(is_colon)
}

/// Follows a path from its first `::` on, and each branch of a group. Returns the tokens that it takes.
fn path(tokens: &[TokenTree], base: &[String], paths: &mut Vec<Module>) -> usize {
    let mut module = base.to_vec();
    let mut at = 0;
    while is_path(&tokens[at..]) {
        match &tokens[at + 2] {
            TokenTree::Ident(word) if word == "super" => module = parent(&module).to_vec(),
            TokenTree::Ident(word) => module.push(word.to_string()),
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                let is_comma = |token: &TokenTree| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ',');
                inner.split(is_comma).for_each(|branch| self::branch(branch, &module, paths));
                return at + 3;
            }
            _ => break,
        }
        at += 3;
    }
    paths.push(module);
    at
}

/// One branch of a group: a path without its first `::`.
fn branch(tokens: &[TokenTree], base: &[String], paths: &mut Vec<Module>) {
    let Some(TokenTree::Ident(word)) = tokens.first() else { return };
    let mut module = base.to_vec();
    if word != "self" {
        module.push(word.to_string());
    }
    path(&tokens[1..], &module, paths);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::cycles;

    fn edges(sources: &[(&str, &str)]) -> Vec<(String, Vec<String>)> {
        let sources: Vec<_> = sources.iter().map(|(file, text)| (file.to_string(), text.to_string())).collect();
        let edges = graph(&sources).unwrap().0.into_iter().filter(|(_, targets)| !targets.is_empty());
        edges.map(|(file, targets)| (file, targets.into_iter().collect())).collect()
    }

    #[test]
    fn paths_and_groups_lead_to_files() {
        let sources = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "use crate::{b::{self, C}, d::e::F};\npub(crate) fn f() {}"),
            ("b.rs", "fn f() { vec![crate::a::g()] }"),
            ("d/mod.rs", "pub mod e;"),
            ("d/e.rs", "use super::X; mod tests { use super::*; use super::super::Y; }"),
        ];
        let expected = [("a.rs", vec!["b.rs", "d/e.rs"]), ("b.rs", vec!["a.rs"]), ("d/e.rs", vec!["d/mod.rs"])];
        let expected =
            expected.map(|(file, targets)| (file.to_string(), targets.iter().map(|t| t.to_string()).collect()));
        assert_eq!(edges(&sources), expected);
    }

    #[test]
    fn files_may_hold_modules_by_other_names() {
        let sources =
            [("lib.rs", ""), ("a.rs", "#[path = \"a_parts.rs\"]\nmod parts;"), ("a_parts.rs", "use super::*;")];
        assert_eq!(edges(&sources), [("a_parts.rs".to_string(), vec!["a.rs".to_string()])]);
    }

    #[test]
    fn tests_are_no_files_of_the_graph() {
        let sources = [
            ("lib.rs", ""),
            ("a.rs", "#[cfg(test)]\n#[path = \"a_tests.rs\"]\nmod tests;\n#[cfg(test)]\nmod b { use crate::c::C; }"),
            ("a_tests.rs", "use super::*;"),
            ("c.rs", "use crate::a::A;"),
        ];
        assert_eq!(edges(&sources), [("c.rs".to_string(), vec!["a.rs".to_string()])]);
    }

    #[test]
    fn files_that_name_each_other_are_a_cycle() {
        let sources =
            [("lib.rs", ""), ("a.rs", "use crate::b::B;"), ("b.rs", "use crate::a::A;"), ("c.rs", "use crate::a::A;")];
        let sources = sources.map(|(file, text)| (file.to_string(), text.to_string()));
        assert_eq!(cycles(&graph(&sources).unwrap().0), [["a.rs", "b.rs"]]);
    }
}
