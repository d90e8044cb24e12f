//! The documentation of a constant is a noun phrase, with its unit.

use crate::text::Word;

/// First words that begin no noun phrase.
const BEGINNINGS: &[&str] = &[
    "adds", "after", "and", "as", "at", "behind", "between", "but", "called", "for", "from", "given", "held", "how",
    "however", "if", "in", "it", "kept", "looks", "not", "of", "one", "opened", "see", "so", "stands", "that", "then",
    "there", "they", "to", "what", "whatever", "when", "where", "while", "who", "whoever", "why",
];
/// Beginnings of more than one word.
const LONGER_BEGINNINGS: &[&str] = &["... ", "this is ", "set if ", "set in ", "set to "];
/// Phrases that leave the value to be guessed.
const RIDDLES: &[&str] = &[
    "so long",
    "so many",
    "so much",
    "so often",
    "so few",
    "so small a",
    "this part of",
    "this many",
    "this long",
    "this much",
];
/// Verbs that make a clause of the words before them, unless a subordinate clause has begun.
const VERBS: &[&str] =
    &["is", "are", "was", "were", "has", "have", "had", "may", "can", "could", "must", "does", "do", "will"];
/// Words that begin a subordinate clause.
const SUBORDINATE: &[&str] = &[
    "that", "which", "who", "whose", "whom", "where", "when", "what", "if", "as", "because", "since", "before",
    "after", "until", "while", "than", "how", "however", "whether", "why", "unless",
];
/// Words that begin one as well where they follow a noun: "mappings a process may have".
const CONTACT: &[&str] = &["a", "an", "the", "there", "it", "they", "we"];
/// Words that are no noun, so that what follows them belongs to them.
const PREPOSITIONS: &[&str] = &[
    "about", "among", "and", "around", "at", "beside", "by", "for", "from", "in", "inside", "into", "of", "on", "or",
    "over", "to", "with",
];

/// Says why the first sentence of a constant's documentation is no noun phrase.
pub fn check(sentence: &[Word]) -> Option<String> {
    let words: Vec<String> = sentence.iter().map(|word| word.text.to_lowercase()).collect();
    let text = words.join(" ");
    let first = sentence.first()?.lower();
    if BEGINNINGS.contains(&first.as_str()) || LONGER_BEGINNINGS.iter().any(|beginning| text.starts_with(beginning)) {
        return Some("does not begin as a noun phrase".into());
    }
    let plain: Vec<String> = sentence.iter().map(Word::lower).collect();
    let plain = format!(" {} ", plain.join(" "));
    if let Some(riddle) = RIDDLES.iter().find(|riddle| plain.contains(&format!(" {riddle} "))) {
        return Some(format!("\"{riddle}\" leaves the value to be guessed"));
    }
    verb(sentence).map(|verb| format!("is a sentence (\"{verb}\")"))
}

/// The verb of a main clause, as far as that can be told. Everything behind a colon explains, and may be a sentence.
fn verb(sentence: &[Word]) -> Option<String> {
    let mut previous = String::new();
    for word in sentence {
        let lower = word.lower();
        let is_contact =
            CONTACT.contains(&lower.as_str()) && !previous.is_empty() && !PREPOSITIONS.contains(&previous.as_str());
        if is_contact || SUBORDINATE.contains(&lower.as_str()) {
            return None;
        }
        if VERBS.contains(&lower.as_str()) && previous != "to" {
            return Some(lower);
        }
        if word.text.ends_with([':', ';']) {
            return None;
        }
        previous = lower;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::sentences::words;

    #[test]
    fn clauses_are_found() {
        for text in [
            "One page of so many may be.",
            "How often members are looked after.",
            "What is put back, in this order.",
            "... of so many steps.",
            "Set if all memory is asked in.",
            "A member that could not fold is left alone for so long.",
            "No frame is longer.",
            "Slot `n` of the test's pool is full of byte `n`.",
            "A service has this long to answer.",
        ] {
            assert!(check(&words(text)).is_some(), "{text}");
        }
    }

    #[test]
    fn noun_phrases_are_no_findings() {
        for text in [
            "Tolerated share of short-lived folds: 1 in 20.",
            "Pages that are out of reach at the same time.",
            "Stacks that are believed: 16 KiB, 32 with sanitisers.",
            "Time after which a child hangs: none lives for longer than some seconds.",
            "Longest answer that is read; the longest known has a megabyte.",
            "Set of pages.",
            "Asked pages, so that few wait.",
            "`CAP_SYS_PTRACE`",
            "Mappings a process may have.",
            "Pages seen to have become a file's.",
            "Thisness of this part.",
        ] {
            assert!(check(&words(text)).is_none(), "{text}: {:?}", check(&words(text)));
        }
    }
}
