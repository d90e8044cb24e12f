//! Reference text describes the program as it is: its history belongs into `docs/notebook` and the change log.
//!
//! "Now" and the like are also said of a moment while the program runs ("slots in use, now"). So only those forms are
//! looked for that nearly always tell of the project.

use super::Prose;
use crate::text::Word;

/// Nouns that make the project's history of "earlier".
const VERSIONS: &[&str] = &[
    "version",
    "versions",
    "rule",
    "rules",
    "round",
    "rounds",
    "run",
    "runs",
    "day",
    "days",
    "ones",
    "measurement",
    "measurements",
    "release",
    "releases",
    "design",
    "designs",
    "figure",
    "figures",
    "code",
];
/// Words that make it of "not yet".
const UNDONE: &[&str] = &[
    "supported",
    "implemented",
    "done",
    "built",
    "written",
    "measured",
    "known",
    "possible",
    "covered",
    "tried",
    "handled",
    "tested",
    "decided",
    "available",
];

/// Finds an adverb of the project's history: its place in the sentence, and an explanation.
pub fn check(sentence: &[Word], prose: Prose) -> Option<(usize, String)> {
    if prose == Prose::Other {
        return None;
    }
    let words: Vec<String> = sentence.iter().map(Word::lower).collect();
    (0..words.len()).find_map(|at| {
        let context = Context { sentence, words: &words, at, prose };
        context.adverb().map(|adverb| (at, format!("says \"{adverb}\"")))
    })
}

/// A word among its neighbours.
struct Context<'a> {
    sentence: &'a [Word],
    words: &'a [String],
    at: usize,
    prose: Prose,
}

impl Context<'_> {
    fn adverb(&self) -> Option<&'static str> {
        match (self.word(0), self.word(1)) {
            ("formerly", _) => Some("formerly"),
            ("at", "present") => Some("at present"),
            ("so", "far") if self.is_so_far() => Some("so far"),
            ("not", "yet") if UNDONE.contains(&self.word(2)) => Some("not yet"),
            ("earlier", next) if self.at == 0 || VERSIONS.contains(&next) => Some("earlier"),
            ("now", next) if self.is_now(next) => Some("now"),
            _ => None,
        }
    }

    /// The word that stands so far behind this one, without punctuation; empty if there is none.
    fn word(&self, ahead: isize) -> &str {
        let at = self.at.checked_add_signed(ahead);
        at.and_then(|at| self.words.get(at)).map_or("", String::as_str)
    }

    /// "So far as" is something else, and in a module a run may have had something "so far".
    fn is_so_far(&self) -> bool {
        self.at == 0 || self.prose == Prose::Reference && !["as", "that", "from"].contains(&self.word(2))
    }

    /// At the beginning of a sentence or clause, or in "is now".
    fn is_now(&self, next: &str) -> bool {
        let begins = self.at == 0 || self.sentence[self.at - 1].text.ends_with([';', ':']);
        let is_now = ["is", "are", "has"].contains(&self.word(-1)) && self.word(-2) != "than";
        next != "and" && (begins || is_now && self.prose == Prose::Reference)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::sentences::words;

    fn is_found(text: &str, prose: Prose) -> bool {
        check(&words(text), prose).is_some()
    }

    #[test]
    fn history_is_found_in_reference_text() {
        for text in [
            "Now it is kept by chunks.",
            "Each took a call; now they are taken at once.",
            "The table is now smaller.",
            "On an earlier version it took 2 s.",
            "So far that is: mappings.",
            "What was built so far is fast.",
            "This is not yet supported.",
            "At present there are two.",
            "It was formerly a list.",
        ] {
            assert!(is_found(text, Prose::Reference), "{text}");
            assert!(!is_found(text, Prose::Other), "{text}");
        }
    }

    #[test]
    fn moments_of_a_run_are_no_findings() {
        for text in [
            "They are looked at now and then.",
            "It counts slots in use, now, by `now.guests`.",
            "An earlier client may be waiting.",
            "More was folded than is now.",
            "Pages that are not yet folded stay.",
            "It goes so far as to ask.",
        ] {
            assert!(!is_found(text, Prose::Reference), "{text}");
        }
        assert!(!is_found("A page may not have outlived a burst so far.", Prose::Module));
        assert!(is_found("Now they are kept.", Prose::Module));
    }
}
