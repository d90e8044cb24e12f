//! Where sentences end, and how long they are.

use super::Word;

/// Abbreviations whose full stop ends no sentence.
const ABBREVIATIONS: &[&str] = &["e.g.", "i.e.", "cf.", "vs.", "approx.", "al.", "fig.", "incl.", "resp."];

/// Splits the words of a paragraph into sentences.
pub fn sentences(words: &[Word]) -> Vec<&[Word]> {
    let mut found = Vec::new();
    let mut start = 0;
    for at in 0..words.len() {
        if words.get(at + 1).is_none_or(|next| ends(&words[at].text, &next.text)) {
            found.push(&words[start..=at]);
            start = at + 1;
        }
    }
    found
}

/// Whether a sentence ends with this word, if it is followed by that one.
fn ends(word: &str, next: &str) -> bool {
    let word = word.trim_end_matches([')', ']', '"', '\'', '”', '’', '*']);
    let opening = |c: char| matches!(c, '(' | '[' | '"' | '\'' | '“' | '*');
    word.ends_with(['.', '!', '?', '…'])
        && word.chars().any(char::is_alphanumeric)
        && !ABBREVIATIONS.contains(&word.trim_start_matches(opening).to_lowercase().as_str())
        && !next.trim_start_matches(opening).starts_with(char::is_lowercase)
}

/// Counts the words of a sentence. Bold labels of bullets, dashes, arrows and the like count nothing.
pub fn count(sentence: &[Word]) -> usize {
    sentence.iter().filter(|word| !word.is_label && word.text.chars().any(char::is_alphanumeric)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(text: &str) -> Vec<String> {
        let word = |text: &str| Word { line: 1, text: text.into(), is_label: false };
        let words: Vec<Word> = text.split(' ').map(word).collect();
        let join = |sentence: &[Word]| sentence.iter().map(|word| word.text.as_str()).collect::<Vec<_>>().join(" ");
        sentences(&words).into_iter().map(join).collect()
    }

    #[test]
    fn sentences_end_with_their_marks() {
        assert_eq!(
            split("One. Two! Three? (Four.) \"Five.\" Six"),
            ["One.", "Two!", "Three?", "(Four.)", "\"Five.\"", "Six"]
        );
        assert_eq!(split("A page. `madvise` frees it."), ["A page.", "`madvise` frees it."]);
    }

    #[test]
    fn abbreviations_end_nothing() {
        assert_eq!(split("Pages, e.g. Those of a file, i.e. `a`.").len(), 1);
        assert_eq!(split("By Agarwal et al. 2015.").len(), 1);
    }

    #[test]
    fn numbers_and_paths_end_nothing() {
        assert_eq!(split("Linux 6.12 has it, as `a.rs` and a.rs say.").len(), 1);
        assert_eq!(split("Since Linux 6.7. Before, not."), ["Since Linux 6.7.", "Before, not."]);
    }

    #[test]
    fn an_ellipsis_ends_a_sentence_before_a_capital_only() {
        assert_eq!(split("It waits... and goes on.").len(), 1);
        assert_eq!(split("Lease ... Segment").len(), 1);
        assert_eq!(split("It waits... Then it goes on.").len(), 2);
    }

    #[test]
    fn punctuation_alone_counts_nothing() {
        let word = |text: &str| Word { line: 1, text: text.into(), is_label: false };
        let label = Word { line: 1, text: "Label:".into(), is_label: true };
        assert_eq!(count(&[label, word("a"), word("->"), word("`b c`,"), word("4")]), 3);
    }
}
