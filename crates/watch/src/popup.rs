//! Draws boxes over the picture: help, choices, confirmations.

use crate::columns;
use crate::frame::Frame;
use crate::keys::{CHOICES, HELP};
use crate::view::{Mode, View};
use api::control::Fold;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use ratatui::widgets::{Block, Clear, Paragraph, Widget, Wrap};

/// Widest box, in columns.
const MOST_COLUMNS: u16 = 76;

/// Draws the box of the view's mode, if it has one, with an edge of this style.
pub fn draw(view: &View, frame: &Frame, area: Rect, buffer: &mut Buffer, edge: Style) {
    let (title, words) = match &view.mode {
        Mode::Rows | Mode::Filter(_) => return,
        Mode::Help => ("Help".to_owned(), help(view)),
        Mode::Rate(group, text, why) => (format!("Scan rate of {}", group.1), rate(frame, group, text, why.as_deref())),
        Mode::Fold(group, fold) => (format!("Group {}", group.1), choices(*fold)),
        Mode::Confirm(_, _, words) => ("Confirm".to_owned(), format!("{words}\n\ny: do it    any other key: leave it")),
    };
    let width = area.width.min(MOST_COLUMNS);
    let inner = usize::from(width.saturating_sub(4)).max(1);
    // An estimate of the lines after wrapping, because words that do not fit move to the next line.
    let lines: usize = words.lines().map(|line| 1 + line.chars().count() / inner).sum();
    let height = u16::try_from(lines + 2).unwrap_or(u16::MAX).min(area.height);
    let place = Rect { x: area.x + (area.width - width) / 2, y: area.y + (area.height - height) / 2, width, height };
    Clear.render(place, buffer);
    let frame = Block::bordered().title(format!(" {title} ")).border_style(edge);
    let inside = frame.inner(place);
    frame.render(place, buffer);
    let inside = Rect { x: inside.x + 1, width: inside.width.saturating_sub(2), ..inside };
    let style = Style::new().remove_modifier(Modifier::DIM);
    Paragraph::new(words).style(style).wrap(Wrap { trim: false }).render(inside, buffer);
}

fn help(view: &View) -> String {
    let keys = HELP.iter().map(|(key, what)| format!("{key:<20}{what}"));
    let figures = columns::of(view.level).iter().filter(|column| !column.is_text());
    let columns = figures.map(|column| format!("{:<20}{}", column.head, column.what));
    keys.chain([String::new()]).chain(columns).collect::<Vec<_>>().join("\n")
}

fn rate(frame: &Frame, group: &(String, String), text: &str, why: Option<&str>) -> String {
    let now = frame.group(&group.0, &group.1).map_or_else(String::new, |known| known.settings.scan_rate_words());
    let why = why.map_or_else(String::new, |why| format!("\n{why}"));
    format!(
        "It is {now}. auto, adaptive, adaptive:5%, or pages a second:\n> {text}_{why}\nEnter: go on    Esc: leave it"
    )
}

fn choices(chosen: Fold) -> String {
    let line = |choice: &Fold| {
        let words = match choice {
            Fold::On => "on       fold",
            Fold::Off => "off      fold nothing more, leave what is folded",
            Fold::Unfold => "unfold   make all pages private again",
        };
        format!("{} {words}\n", if *choice == chosen { ">" } else { " " })
    };
    CHOICES.iter().map(line).collect::<String>() + "up down: choose    Enter: go on    Esc: leave it"
}
