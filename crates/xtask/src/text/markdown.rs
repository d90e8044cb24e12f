//! Markdown into paragraphs of words.

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use super::{Line, Paragraph, Place, Word};

/// Substitute for a blank inside of a code span while words are split.
const BLANK_IN_CODE: char = '\u{a0}';

/// Reads lines as Markdown. Comments are Markdown, too, where they are documentation.
pub fn paragraphs(lines: &[Line]) -> Vec<Paragraph> {
    let mut text = String::new();
    let mut starts = Vec::new();
    for line in lines {
        starts.push((text.len(), line.number));
        text.push_str(line.text.strip_suffix(crate::words::ALLOW).unwrap_or(&line.text));
        text.push('\n');
    }
    let mut reader = Reader { starts, ..Reader::default() };
    for (event, range) in Parser::new_ext(&text, Options::ENABLE_TABLES).into_offset_iter() {
        let line = reader.line_at(range.start);
        reader.event(event, line);
    }
    reader.end_paragraph();
    reader.found
}

#[derive(Default)]
struct Reader {
    /// Where lines begin, and their numbers.
    starts: Vec<(usize, usize)>,
    found: Vec<Paragraph>,
    words: Vec<Word>,
    /// Set while a word may go on.
    in_word: bool,
    place: Option<Place>,
    /// Set from the beginning of a list's item to its first text.
    item_begins: bool,
    in_label: bool,
}

impl Reader {
    fn line_at(&self, offset: usize) -> usize {
        let at = self.starts.partition_point(|(start, _)| *start <= offset);
        self.starts.get(at.saturating_sub(1)).map_or(1, |(_, number)| *number)
    }

    fn event(&mut self, event: Event, line: usize) {
        match event {
            Event::Start(tag) => self.start(&tag),
            Event::End(tag) => self.end(tag),
            Event::Text(text) if self.place == Some(Place::Code) => self.code_block(&text, line),
            Event::Text(text) | Event::InlineHtml(text) if !text.starts_with("<!--") => self.text(&text, line),
            Event::Code(code) => {
                let blank = BLANK_IN_CODE.to_string();
                self.text(&format!("`{}`", code.replace([' ', '\n'], &blank)), line);
            }
            Event::SoftBreak | Event::HardBreak => self.in_word = false,
            Event::Rule => self.end_paragraph(),
            _ => {}
        }
    }

    fn start(&mut self, tag: &Tag) {
        match tag {
            Tag::Strong => self.in_label = self.item_begins && self.words.is_empty(),
            Tag::Emphasis | Tag::Link { .. } | Tag::Image { .. } | Tag::Strikethrough => {}
            _ => self.end_paragraph(),
        }
        match tag {
            Tag::Heading { .. } => self.place = Some(Place::Heading),
            Tag::CodeBlock(_) => self.place = Some(Place::Code),
            Tag::TableCell => self.place = Some(Place::Cell),
            Tag::Item => self.item_begins = true,
            _ => {}
        }
    }

    fn end(&mut self, tag: TagEnd) {
        match tag {
            TagEnd::Strong => self.in_label = false,
            TagEnd::Emphasis | TagEnd::Link | TagEnd::Image | TagEnd::Strikethrough => {}
            _ => {
                self.end_paragraph();
                self.place = None;
            }
        }
    }

    fn text(&mut self, text: &str, line: usize) {
        let mut first = true;
        for piece in text.split([' ', '\t', '\n']) {
            self.in_word &= first;
            first = false;
            if piece.is_empty() {
                continue;
            }
            match self.words.last_mut().filter(|_| self.in_word) {
                Some(word) => word.text.push_str(piece),
                None => self.words.push(Word { line, text: piece.into(), is_label: self.in_label }),
            }
            self.in_word = true;
        }
    }

    /// Each line of a diagram stands for itself. The text may be one line or many.
    fn code_block(&mut self, text: &str, line: usize) {
        for (at, text) in text.lines().enumerate() {
            self.in_word = false;
            self.text(text, line + at);
            self.end_paragraph();
        }
    }

    fn end_paragraph(&mut self) {
        self.in_word = false;
        if self.words.is_empty() {
            return;
        }
        self.item_begins = false;
        self.in_label = false;
        let mut words = std::mem::take(&mut self.words);
        for word in &mut words {
            word.text = word.text.replace(BLANK_IN_CODE, " ");
        }
        self.found.push(Paragraph { place: self.place.unwrap_or(Place::Prose), words });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<(Place, String)> {
        let lines: Vec<Line> =
            text.lines().enumerate().map(|(at, text)| Line { number: at + 1, text: text.into() }).collect();
        let words = |words: &[Word]| words.iter().map(|word| word.text.as_str()).collect::<Vec<_>>().join("|");
        paragraphs(&lines).iter().map(|paragraph| (paragraph.place, words(&paragraph.words))).collect()
    }

    fn places(expected: &[(Place, &str)]) -> Vec<(Place, String)> {
        expected.iter().map(|(place, text)| (*place, text.to_string())).collect()
    }

    #[test]
    fn code_spans_are_one_word_with_what_touches_them() {
        assert_eq!(read("See (`a b`, *x*y) and [c d](e)."), places(&[(Place::Prose, "See|(`a b`,|xy)|and|c|d.")]));
    }

    #[test]
    fn headings_cells_and_diagrams_have_their_place() {
        let text = "# A b\n\nc\nd\n\n| e | f |\n|---|---|\n| g h | `i` |\n\n```text\nj k\n\nl\n```\n\n    m\n";
        let expected = [
            (Place::Heading, "A|b"),
            (Place::Prose, "c|d"),
            (Place::Cell, "e"),
            (Place::Cell, "f"),
            (Place::Cell, "g|h"),
            (Place::Cell, "`i`"),
            (Place::Code, "j|k"),
            (Place::Code, "l"),
            (Place::Code, "m"),
        ];
        assert_eq!(read(text), places(&expected));
    }

    #[test]
    fn labels_of_bullets_are_marked() {
        let lines = [Line { number: 7, text: "- **A b.** c **d**".into() }, Line { number: 9, text: "  e".into() }];
        let found = paragraphs(&lines);
        let words: Vec<_> = found[0].words.iter().map(|word| (word.text.as_str(), word.line, word.is_label)).collect();
        assert_eq!(words, [("A", 7, true), ("b.", 7, true), ("c", 7, false), ("d", 7, false), ("e", 9, false)]);
    }

    #[test]
    fn comments_of_html_are_no_words() {
        assert_eq!(read("a <!-- b --> c\n\n<!-- d -->\n\ne"), places(&[(Place::Prose, "a|c"), (Place::Prose, "e")]));
    }

    #[test]
    fn angle_brackets_in_plain_text_are_kept() {
        assert_eq!(read("a Vec<u8> b"), places(&[(Place::Prose, "a|Vec<u8>|b")]));
    }
}
