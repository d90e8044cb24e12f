//! Rules for words; they stand in CONTRIBUTING.md, section "Words", and one module each implements them.

mod constants;
mod history;
mod report;
mod sentences;
mod terms;
mod test_names;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::text::{Line, Paragraph, Word};
use crate::{files, rust, text};

pub use report::Report;

/// The end of a comment that allows what its line, or the next one, says.
pub const ALLOW: &str = "words: allow";

/// The rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// A word for which the kernel or the field has another one.
    Term,
    /// A sentence of too many words.
    Length,
    /// A sentence that begins with a relative clause.
    Subject,
    /// A constant whose documentation is no noun phrase.
    Constant,
    /// History in a reference text.
    History,
    /// The name of a test that does not say what holds.
    TestName,
}

impl Rule {
    /// Every rule, in the order of CONTRIBUTING.md.
    pub const ALL: [Self; 6] = [Self::Term, Self::Length, Self::Subject, Self::Constant, Self::History, Self::TestName];

    /// The name that is printed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Term => "term",
            Self::Length => "length",
            Self::Subject => "subject",
            Self::Constant => "constant",
            Self::History => "history",
            Self::TestName => "test-name",
        }
    }
}

/// A place at which a rule is broken.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Finding {
    /// The file, relative to the root.
    pub file: String,
    /// The line, from 1 on.
    pub line: usize,
    /// The rule.
    pub rule: Rule,
    /// The words that break it, and a remedy where there is one.
    pub text: String,
    /// The last line of the sentence, at which it can be allowed as well.
    #[serde(skip)]
    last: usize,
}

/// Sorts of prose: what the rules make a difference between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prose {
    /// Markdown that describes the program as it is.
    Reference,
    /// The documentation of a module.
    Module,
    /// Everything else.
    Other,
}

/// Checks everything that lies at or below these paths, or the whole tree.
pub fn check(root: &Path, paths: &[String]) -> Result<Report> {
    let mut report = Report::default();
    let files = selected(sources(root)?, paths)?;
    for file in files {
        let text = files::read(root, &file)?;
        report.findings.extend(check_file(&file, &text).with_context(|| format!("cannot check {file}"))?);
    }
    report.findings.sort();
    Ok(report)
}

/// Directory of the notebook: records of the past, for which no rule is.
const NOTEBOOK: &str = "docs/notebook/";

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
    let mut checker = Checker { file, found: Vec::new() };
    if file.ends_with(".rs") {
        checker.rust(&rust::parse(text)?);
    } else {
        let lines: Vec<Line> = text.lines().zip(1..).map(|(text, number)| Line { number, text: text.into() }).collect();
        checker.prose(&lines, if file == "CHANGELOG.md" { Prose::Other } else { Prose::Reference });
    }
    let mut found = checker.found;
    let lines: Vec<&str> = text.lines().collect();
    found.retain(|finding| !is_allowed(finding, &lines));
    Ok(found)
}

/// Whether one of the finding's lines, or the line before, ends in a comment that allows it.
fn is_allowed(finding: &Finding, lines: &[&str]) -> bool {
    let first = finding.line.saturating_sub(2);
    let ends_so = |line: &&str| line.trim_end().trim_end_matches("-->").trim_end().ends_with(ALLOW);
    lines[first..finding.last.min(lines.len())].iter().any(ends_so)
}

struct Checker<'a> {
    file: &'a str,
    found: Vec<Finding>,
}

impl Checker<'_> {
    fn rust(&mut self, file: &rust::RustFile) {
        for block in rust::blocks(&file.comments) {
            self.prose(&block.lines, if block.kind == rust::Kind::Module { Prose::Module } else { Prose::Other });
        }
        for (name, line, text) in terms::in_names(&file.names) {
            self.add(line, line, Rule::Term, format!("{name}: {text}"));
        }
        for constant in &file.constants {
            let paragraphs = text::paragraphs(&constant.docs);
            let first = paragraphs.first().and_then(|paragraph| text::sentences(&paragraph.words).into_iter().next());
            if let Some(why) = first.and_then(constants::check) {
                self.add_sentence(first.unwrap_or_default(), Rule::Constant, &format!("{}: {why}", constant.name));
            }
        }
        for test in file.functions.iter().filter(|function| function.is_test) {
            if let Some(why) = test_names::check(&test.name) {
                self.add(test.line, test.line, Rule::TestName, format!("{}: {why}", test.name));
            }
        }
    }

    fn prose(&mut self, lines: &[Line], prose: Prose) {
        for paragraph in text::paragraphs(lines) {
            self.paragraph(&paragraph, prose);
        }
    }

    fn paragraph(&mut self, paragraph: &Paragraph, prose: Prose) {
        for sentence in text::sentences(&paragraph.words) {
            for (line, text) in terms::in_sentence(sentence) {
                self.add(line, line, Rule::Term, text);
            }
            if paragraph.place != text::Place::Prose {
                continue;
            }
            if let Some(why) = sentences::length(sentence) {
                self.add_sentence(sentence, Rule::Length, &why);
            }
            if let Some(why) = sentences::subject(sentence) {
                self.add_sentence(sentence, Rule::Subject, &why);
            }
            if let Some((at, why)) = history::check(sentence, prose) {
                self.add_sentence(&sentence[at.saturating_sub(2)..], Rule::History, &why);
            }
        }
    }

    /// Adds a finding with the beginning of its sentence.
    fn add_sentence(&mut self, sentence: &[Word], rule: Rule, why: &str) {
        let shown: Vec<&str> = sentence.iter().take(8).map(|word| word.text.as_str()).collect();
        let more = if sentence.len() > shown.len() { " ..." } else { "" };
        let (first, last) = (sentence.first().map_or(1, |word| word.line), sentence.last().map_or(1, |word| word.line));
        self.add(first, last, rule, format!("{why}: \"{}{more}\"", shown.join(" ")));
    }

    fn add(&mut self, line: usize, last: usize, rule: Rule, text: String) {
        self.found.push(Finding { file: self.file.into(), line, rule, text, last });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(file: &str, text: &str) -> Vec<(usize, Rule)> {
        check_file(file, text).unwrap().into_iter().map(|finding| (finding.line, finding.rule)).collect()
    }

    #[test]
    fn rules_find_their_places_in_rust() {
        let source = "//! Now all is kept.\n\n/// One page of so many.\nconst A: u8 = 1;\n\n// The ghost goes.\n\
                      fn ghosts() {}\n\n#[test]\nfn what_is_kept() {\n    let text = \"What a ghost.\"; // What is this?\n}\n";
        let mut found = found("crates/a/src/lib.rs", source);
        found.sort();
        let expected =
            [(1, Rule::History), (3, Rule::Constant), (6, Rule::Term), (7, Rule::Term), (10, Rule::TestName)];
        assert_eq!(found, expected);
    }

    #[test]
    fn history_is_allowed_in_changes() {
        let text = "Now it is fast.\n";
        assert_eq!(found("docs/a.md", text), [(1, Rule::History)]);
        assert!(found("CHANGELOG.md", text).is_empty());
    }

    #[test]
    fn notebook_is_not_checked() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join(NOTEBOOK)).unwrap();
        for file in ["docs/a.md", "docs/notebook/b.md"] {
            std::fs::write(root.path().join(file), "What a ghost.\n").unwrap();
        }
        assert_eq!(sources(root.path()).unwrap(), ["docs/a.md"]);
    }

    #[test]
    fn markers_allow_their_line_and_the_next() {
        assert!(found("a.rs", "// A ghost. words: allow\n").is_empty());
        assert!(found("a.rs", "// words: allow\nfn ghost() {}\n").is_empty());
        assert!(found("docs/a.md", "A ghost goes. <!-- words: allow -->\n").is_empty());
        assert!(found("a.rs", "// What a sentence\n// over two lines. words: allow\n").is_empty());
        assert_eq!(found("a.rs", "// words: allow\n\nfn ghost() {}\n"), [(3, Rule::Term)]);
    }

    #[test]
    fn paths_select_whole_directories() {
        let files = || ["docs/a.md", "docs2/b.md", "x.md"].map(String::from).to_vec();
        assert_eq!(selected(files(), &["./docs/".into()]).unwrap(), ["docs/a.md"]);
        assert_eq!(selected(files(), &["x.md".into()]).unwrap(), ["x.md"]);
        assert!(selected(files(), &["doc".into()]).is_err());
    }
}
