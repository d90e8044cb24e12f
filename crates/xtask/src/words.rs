//! Rules for words; they stand in CONTRIBUTING.md, section "Words".
//!
//! Each rule is a list of phrases. The length of a sentence and its first word are no rules: they do not tell whether
//! somebody understands it.

mod names;

use crate::rust::{self, ALLOW, Line};
use crate::{files, formats, markers};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Directory of the notebook: records of the past, which no rule applies to.
const NOTEBOOK: &str = "docs/notebook/";

/// Words in all their forms, each with the term that the kernel or the literature has for the same thing.
const TERMS: &[(&[&str], &str)] = &[
    (&["regain", "regains", "regained", "regaining"], "collapse"),
    (&["door", "doors"], "hook"),
    (&["era", "eras"], "epoch"),
    (&["calm", "calms", "calmer", "calmly"], "quiet interval"),
    (&["breath", "breaths"], "gap"),
    (&["scout", "scouts", "scouting"], "probe page"),
    (&["shadow", "shadows"], "fork probe"),
    (&["ghost", "ghosts"], "departed member"),
    (&["limbo"], "deferred free"),
    (&["twin", "twins"], "duplicate"),
];
/// Phrases that leave open which thing or actor is meant. Words in lower case are found in any case.
const VAGUE: &[&str] = &["whoever", "that which", "such ones"];
/// Phrases about the project's past, which do not belong into reference text: documents, and comments of modules.
const HISTORY: &[&str] = &[
    "formerly",
    "at present",
    "Now",
    "Earlier",
    "So far",
    "not yet done",
    "not yet implemented",
    "not yet known",
    "not yet measured",
    "not yet possible",
    "not yet supported",
];
/// Beginnings of names of tests that do not say what is tested.
const RIDDLES: &[&str] = &["what_", "who_", "whoever_", "whatever_", "that_", "where_", "when_"];

/// A place at which a rule is broken.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Finding {
    /// The file, relative to the root.
    pub file: String,
    /// The line, from 1 on.
    pub line: usize,
    /// The rule's name.
    pub rule: &'static str,
    /// The words that break it, and a remedy where there is one.
    pub text: String,
}

/// Checks everything that lies at or below these paths, or the whole tree. Returns the findings in order.
///
/// # Errors
/// A file cannot be read or is no Rust, or there is nothing at a path.
pub fn check(root: &Path, paths: &[String]) -> Result<Vec<Finding>> {
    let mut found = Vec::new();
    for file in selected(sources(root)?, paths)? {
        let text = files::read(root, &file)?;
        found.extend(check_file(&file, &text).with_context(|| format!("cannot check {file}"))?);
    }
    found.sort();
    Ok(found)
}

/// The findings for programs (JSON), or for people.
///
/// # Errors
/// They cannot be written as JSON.
pub fn told(findings: &[Finding], json: bool) -> Result<String> {
    if json {
        return Ok(serde_json::to_string_pretty(&findings)? + "\n");
    }
    let line = |finding: &Finding| format!("{}:{}: {}: {}\n", finding.file, finding.line, finding.rule, finding.text);
    let lines: String = findings.iter().map(line).collect();
    Ok(match findings.len() {
        0 => "All words are as they should be.\n".into(),
        number => format!("{lines}{number} findings; the rules stand in CONTRIBUTING.md, section \"Words\"\n"),
    })
}

/// Lists the files that the rules are for.
fn sources(root: &Path) -> Result<Vec<String>> {
    let documents = ["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md"];
    let mut all: Vec<String> =
        documents.map(String::from).into_iter().filter(|file| root.join(file).exists()).collect();
    all.extend(files::below(root, "docs", "md")?.into_iter().filter(|file| !file.starts_with(NOTEBOOK)));
    for directory in ["crates", "fuzz"] {
        all.extend(files::below(root, directory, "rs")?);
    }
    Ok(all)
}

fn selected(files: Vec<String>, paths: &[String]) -> Result<Vec<String>> {
    if paths.is_empty() {
        return Ok(files);
    }
    let paths: Vec<&str> = paths.iter().map(|path| path.trim_start_matches("./").trim_end_matches('/')).collect();
    let is_below =
        |file: &str, path: &str| file.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    for path in &paths {
        let is_known = files.iter().any(|file| is_below(file, path));
        ensure!(is_known, "nothing to check at {path}: name files or directories as seen from the root");
    }
    Ok(files.into_iter().filter(|file| paths.iter().any(|path| is_below(file, path))).collect())
}

/// Checks one file.
fn check_file(file: &str, text: &str) -> Result<Vec<Finding>> {
    let mut found = Vec::new();
    if file.ends_with(".rs") {
        let parsed = rust::parse(text)?;
        for block in rust::blocks(&parsed.comments) {
            found.extend(in_prose(&block.lines, block.kind == rust::Kind::Module));
        }
        found.extend(in_names(&parsed.names));
        for test in parsed.functions.iter().filter(|function| function.is_test) {
            let riddle = RIDDLES.iter().find(|riddle| test.name.starts_with(**riddle));
            found.extend(riddle.map(|riddle| (test.line, "test-name", format!("{} begins with {riddle}", test.name))));
        }
    } else {
        found = in_prose(&written_lines(text), file != "CHANGELOG.md");
    }
    let lines: Vec<&str> = text.lines().collect();
    let ends_so = |line: &&str| line.trim_end().trim_end_matches("-->").trim_end().ends_with(ALLOW);
    let is_allowed = |line: usize| lines[line.saturating_sub(2)..line.min(lines.len())].iter().any(ends_so);
    let found = found.into_iter().filter(|(line, ..)| !is_allowed(*line));
    Ok(found.map(|(line, rule, text)| Finding { file: file.into(), line, rule, text }).collect())
}

/// The lines of a document without tables that are made of comments of types: the comments themselves are checked.
fn written_lines(text: &str) -> Vec<Line> {
    let mut is_made = false;
    let mut is_written = |line: &str| {
        is_made = (is_made || markers::begun(line, formats::KIND).is_some()) && !markers::ends(line);
        !is_made
    };
    let lines = text.lines().zip(1..).filter(|(line, _)| is_written(line));
    lines.map(|(text, number)| Line { number, text: text.into() }).collect()
}

/// A line, the name of a rule, and the words that break it.
type Broken = (usize, &'static str, String);

fn in_prose(lines: &[Line], is_reference: bool) -> Vec<Broken> {
    let mut found = Vec::new();
    for line in lines {
        let terms = names::segments(&line.text).into_iter().filter_map(|word| Some((term(&word)?, word)));
        // The script `./x` is the one door to the tree. words: allow
        let terms = terms.filter(|(_, word)| !(word.starts_with("door") && line.text.contains("./x")));
        found.extend(terms.map(|(term, word)| (line.number, "term", format!("say \"{term}\", not \"{word}\""))));
    }
    let words = words(lines);
    for at in 0..words.len() {
        let mut add = |rule, phrases: &[&str]| {
            let phrase = phrases.iter().find(|phrase| begins(&words[at..], phrase));
            found.extend(phrase.map(|phrase| (words[at].0, rule, format!("\"{phrase}\""))));
        };
        add("vague", VAGUE);
        if is_reference {
            add("history", HISTORY);
        }
    }
    found
}

/// The term that takes the place of a word.
fn term(word: &str) -> Option<&'static str> {
    TERMS.iter().find(|(forms, _)| forms.contains(&word)).map(|(_, term)| *term)
}

/// Words without punctuation, with their lines. Code is an empty word.
fn words(lines: &[Line]) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let (mut in_block, mut in_span) = (false, false);
    for line in lines {
        if line.text.trim_start().starts_with("```") {
            in_block = !in_block;
            continue;
        }
        in_span &= !line.text.trim().is_empty();
        for word in line.text.split_whitespace() {
            let is_code = in_block || in_span || word.contains('`');
            in_span ^= word.matches('`').count() % 2 == 1;
            found.push((line.number, if is_code { "" } else { word.trim_matches(|c: char| !c.is_alphanumeric()) }));
        }
    }
    found
}

/// Whether these words begin with a phrase.
fn begins(words: &[(usize, &str)], phrase: &str) -> bool {
    let is_it = |word: &str, wanted: &str| word == wanted || word.to_lowercase() == wanted;
    let wanted: Vec<&str> = phrase.split(' ').collect();
    words.len() >= wanted.len() && words.iter().zip(wanted).all(|((_, word), wanted)| is_it(word, wanted))
}

/// Finds identifiers with terms in them, each at its first use.
fn in_names(names: &[(String, usize)]) -> Vec<Broken> {
    let mut first = BTreeMap::new();
    for (name, line) in names {
        first.entry(name.as_str()).or_insert(*line);
    }
    let broken = |(name, line)| {
        let term = names::segments(name).iter().find_map(|word| term(word))?;
        Some((line, "term", format!("{name}: say \"{term}\"")))
    };
    first.into_iter().filter_map(broken).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(file: &str, text: &str) -> Vec<(usize, &'static str)> {
        let mut found: Vec<_> =
            check_file(file, text).unwrap().into_iter().map(|finding| (finding.line, finding.rule)).collect();
        found.sort_unstable();
        found
    }

    #[test]
    fn rules_find_their_places_in_rust() {
        let source = "//! Now all is kept.\n\n/// One page of so many.\nconst A: u8 = 1;\n\n// The ghost\n// of that\n// which goes.\n\
                      fn ghosts() {}\n\n#[test]\nfn what_is_kept() {\n    let text = \"A ghost.\"; // Now it is kept.\n}\n";
        let expected = [(1, "history"), (6, "term"), (7, "vague"), (9, "term"), (12, "test-name")];
        assert_eq!(found("crates/a/src/lib.rs", source), expected);
    }

    #[test]
    fn history_is_allowed_in_changes() {
        assert_eq!(found("docs/a.md", "Now it is fast. It now is.\n"), [(1, "history")]);
        assert!(found("CHANGELOG.md", "Now it is fast.\n").is_empty());
    }

    #[test]
    fn code_has_terms_only() {
        assert_eq!(found("docs/a.md", "`Now a` ghost\n\n```\nwhoever ghost\n```\n"), [(1, "term"), (4, "term")]);
        assert_eq!(found("docs/a.md", "Whoever `a\nb` waits, whoever.\n"), [(1, "vague"), (2, "vague")]);
        assert!(found("docs/a.md", "`./x` is the one door.\n").is_empty());
        assert_eq!(found("docs/a.md", "One door.\n"), [(1, "term")]);
        assert_eq!(found("docs/a.md", "<!-- type: a -->\nghost\n<!-- end -->\nghost\n"), [(4, "term")]);
    }

    #[test]
    fn notebook_is_not_checked() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join(NOTEBOOK)).unwrap();
        for file in ["docs/a.md", "docs/notebook/b.md"] {
            std::fs::write(root.path().join(file), "A ghost.\n").unwrap();
        }
        assert_eq!(sources(root.path()).unwrap(), ["docs/a.md"]);
    }

    #[test]
    fn markers_allow_their_line_and_the_next() {
        assert!(found("a.rs", "// A ghost. words: allow\n").is_empty());
        assert!(found("a.rs", "// words: allow\nfn ghost() {}\n").is_empty());
        assert!(found("docs/a.md", "A ghost goes. <!-- words: allow -->\n").is_empty());
        assert_eq!(found("a.rs", "// words: allow\n\nfn ghost() {}\n"), [(3, "term")]);
    }

    #[test]
    fn paths_select_whole_directories() {
        let files = || ["docs/a.md", "docs2/b.md", "x.md"].map(String::from).to_vec();
        assert_eq!(selected(files(), &["./docs/".into()]).unwrap(), ["docs/a.md"]);
        assert_eq!(selected(files(), &["x.md".into()]).unwrap(), ["x.md"]);
        assert!(selected(files(), &["doc".into()]).is_err());
    }
}
