//! The fields that docs/formats.md names, for tests that have a command's JSON at hand.

use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;

/// Asserts that docs/formats.md names every field of `value` in a code span. Sections are found by a part of their
/// heading: the command's own, and those that it refers to.
pub fn assert_documented(sections: &[&str], value: &Value) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/formats.md");
    let text = fs::read_to_string(path).expect("docs/formats.md");
    let named = fields_in(&text, sections);
    let mut missing = BTreeSet::new();
    add_missing(value, "", &named, &mut missing);
    assert!(missing.is_empty(), "docs/formats.md does not name these of {sections:?}: {missing:?}");
}

/// Words in code spans of the sections with such headings.
fn fields_in(text: &str, sections: &[&str]) -> BTreeSet<String> {
    let parts: Vec<&str> = text.split("\n## ").skip(1).collect();
    let mut named = BTreeSet::new();
    for wanted in sections {
        let of_heading = |part: &&&str| part.lines().next().is_some_and(|heading| heading.contains(wanted));
        let part = parts.iter().find(of_heading).unwrap_or_else(|| panic!("no section {wanted} in docs/formats.md"));
        for span in part.split('`').skip(1).step_by(2) {
            let words = span.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            named.extend(words.filter(|word| !word.is_empty()).map(str::to_owned));
        }
    }
    named
}

fn add_missing(value: &Value, path: &str, named: &BTreeSet<String>, missing: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let path = format!("{path}.{name}");
                if !named.contains(name) {
                    missing.insert(path.clone());
                }
                add_missing(value, &path, named, missing);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| add_missing(item, &format!("{path}[]"), named, missing)),
        _ => {}
    }
}
