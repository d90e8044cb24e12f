//! Words for which the kernel or the field has another one.

use std::collections::BTreeMap;

use crate::text::{Word, segments};

/// A word that is not used, in all of its forms, and the field's own.
struct Term {
    forms: &'static [&'static str],
    instead: &'static str,
}

/// Terms that are not used.
const TERMS: &[Term] = &[
    Term { forms: &["regain", "regains", "regained", "regaining"], instead: "collapse" },
    Term { forms: &["door", "doors"], instead: "hook" },
    Term { forms: &["era", "eras"], instead: "epoch" },
    Term { forms: &["calm", "calms", "calmer", "calmly"], instead: "quiet interval" },
    Term { forms: &["breath", "breaths"], instead: "gap" },
    Term { forms: &["scout", "scouts", "scouting"], instead: "probe page" },
    Term { forms: &["shadow", "shadows"], instead: "fork probe" },
    Term { forms: &["ghost", "ghosts"], instead: "departed member" },
    Term { forms: &["limbo"], instead: "deferred free" },
    Term { forms: &["twin", "twins"], instead: "duplicate" },
];

/// Finds such words in a sentence: `(line, text)`, each word once a line.
pub fn in_sentence(sentence: &[Word]) -> Vec<(usize, String)> {
    let is_of_script = sentence.iter().any(|word| is_script(word.text.as_str()));
    let mut found = Vec::new();
    for word in sentence {
        for segment in segments(&word.text) {
            if let Some(text) = explain(&segment).filter(|_| !(is_of_script && segment.starts_with("door"))) {
                found.push((word.line, text));
            }
        }
    }
    found.dedup();
    found
}

/// Finds identifiers with such words in them: `(identifier, line of its first use, text)`.
pub fn in_names(names: &[(String, usize)]) -> Vec<(&str, usize, String)> {
    let mut first = BTreeMap::new();
    let mut uses: BTreeMap<&str, usize> = BTreeMap::new();
    for (name, line) in names {
        first.entry(name.as_str()).or_insert(*line);
        *uses.entry(name).or_default() += 1;
    }
    let explain_name = |name: &str| segments(name).iter().find_map(|segment| explain(segment));
    let finding =
        |(name, line)| explain_name(name).map(|text| (name, line, format!("{text}; occurrences here: {}", uses[name])));
    first.into_iter().filter_map(finding).collect()
}

/// Whether this word is the script `x`, about which one may say that it has doors.
fn is_script(word: &str) -> bool {
    let code = word.split('`').nth(1);
    let name = code.unwrap_or_else(|| word.trim_end_matches(|c: char| !c.is_alphanumeric()));
    name == "./x" || name.starts_with("./x ") || code == Some("x")
}

fn explain(segment: &str) -> Option<String> {
    let term = TERMS.iter().find(|term| term.forms.contains(&segment))?;
    Some(format!("say \"{}\", not \"{segment}\"", term.instead))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::sentences::words;

    #[test]
    fn whole_words_in_prose_are_found() {
        let found = in_sentence(&words("The calm of `CALM_SECONDS` calmly passed `regain.rs`."));
        let expected = ["calm", "calm", "calmly", "regain"];
        assert_eq!(found.len(), expected.len() - 1, "{found:?}");
        assert!(found[0].1.ends_with("not \"calm\"") && found[2].1.contains("collapse"));
        assert!(in_sentence(&words("An operation outdoors is becalmed and breathes.")).is_empty());
    }

    #[test]
    fn the_script_is_excepted() {
        assert!(in_sentence(&words("`./x` is the one door:")).is_empty());
        assert!(in_sentence(&words("Outside: `x` (the one door: `./x demo`).")).is_empty());
        assert!(in_sentence(&words("The doors of (`./x`).")).is_empty());
        assert_eq!(in_sentence(&words("The doors of x see it.")).len(), 1);
        assert_eq!(in_sentence(&words("`x` has a twin.")).len(), 1);
    }

    #[test]
    fn identifiers_are_found_once_with_their_uses() {
        let names =
            [("is_calm", 3), ("a", 4), ("is_calm", 5), ("Limbo", 6)].map(|(name, line)| (name.to_string(), line));
        let found = in_names(&names);
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].0, found[0].1), ("Limbo", 6));
        assert_eq!((found[1].0, found[1].1), ("is_calm", 3));
        assert!(found[1].2.ends_with("here: 2"));
    }
}
