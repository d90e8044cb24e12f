//! Sentences: their length, and how they begin.

use crate::text::{Word, count};

/// Most words of a sentence.
const MOST_WORDS: usize = 25;
/// Beginnings of relative clauses.
const RELATIVE: &[&str] = &["What", "Who", "Whoever", "Whatever"];

/// A sentence has at most [`MOST_WORDS`] words.
pub fn length(sentence: &[Word]) -> Option<String> {
    let words = count(sentence);
    (words > MOST_WORDS).then(|| format!("{words} words"))
}

/// No sentence but a question begins with a relative clause.
pub fn subject(sentence: &[Word]) -> Option<String> {
    let is_question = sentence.last()?.text.trim_end_matches([')', '"', '*']).ends_with('?');
    let first = sentence.first()?.core();
    (RELATIVE.contains(&first) && !is_question).then(|| format!("begins with \"{first}\""))
}

/// Plain words for the tests of rules, all in the first line.
#[cfg(test)]
pub fn words(text: &str) -> Vec<Word> {
    let line = crate::text::Line { number: 1, text: text.into() };
    crate::text::paragraphs(&[line]).into_iter().flat_map(|paragraph| paragraph.words).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_has_at_most_25_words() {
        let text = |count: usize| vec!["word"; count].join(" ");
        assert_eq!(length(&words(&text(26))).unwrap(), "26 words");
        assert!(length(&words(&text(25))).is_none());
        assert!(length(&words(&(text(24) + " `a b c` -> ..."))).is_none());
        assert!(length(&words(&format!("- **{}** {}", text(9), text(25)))).is_none());
    }

    #[test]
    fn no_sentence_begins_with_a_relative_clause() {
        assert!(subject(&words("What rests is folded.")).is_some());
        assert!(subject(&words("(Whoever asks waits.)")).is_some());
        assert!(subject(&words("What rests?")).is_none());
        assert!(subject(&words("Whatsoever rests, `What` is folded.")).is_none());
        assert!(subject(&words("`What` is folded.")).is_none());
    }
}
