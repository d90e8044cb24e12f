//! What keys do. A key changes the view. If it asks to quit or to change a group, this is returned to the caller.

use crate::frame::Frame;
use crate::view::{GroupKey, Mode, View};
use api::change::Change;
use api::control::Fold;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// Number of rows by which PgUp and PgDn move the cursor.
const PAGE: isize = 10;

/// Keys and their meanings, for the help.
pub const HELP: [(&str, &str); 9] = [
    ("arrows, Home, PgUp", "move; so do k and j"),
    ("Enter, Esc", "members of a group, processes of a member; back"),
    ("Tab", "groups, all members, all processes"),
    ("/", "rows with this text in name, group or state"),
    ("< >, i", "order by another column; turn the order round"),
    ("r", "change the group's scan rate, after a confirmation"),
    ("f", "fold, stop folding or unfold the group, after a confirmation"),
    ("space", "hold the picture, or go on"),
    ("q, Ctrl-C", "quit"),
];

/// What a key asks the caller to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Act {
    /// Leave.
    Quit,
    /// Have a service change settings of a group.
    Change(GroupKey, Change),
}

/// Handles a key. Returns what the caller has to do; `None` if the key only changes the view.
pub fn press(view: &mut View, frame: &Frame, key: KeyEvent) -> Option<Act> {
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return (key.code == KeyCode::Char('c')).then_some(Act::Quit);
    }
    match std::mem::take(&mut view.mode) {
        Mode::Rows => return rows(view, frame, key.code),
        Mode::Help => {}
        Mode::Filter(before) => filter(view, before, key.code),
        Mode::Rate(group, text, _) => rate(view, frame, group, text, key.code),
        Mode::Fold(group, fold) => choose(view, frame, group, fold, key.code),
        Mode::Confirm(group, change, _) if matches!(key.code, KeyCode::Char('y' | 'Y')) => {
            view.said = Some(format!("asked the service to change group {}", group.1));
            return Some(Act::Change(group, change));
        }
        Mode::Confirm(..) => view.said = Some("nothing was changed".to_owned()),
    }
    None
}

fn rows(view: &mut View, frame: &Frame, key: KeyCode) -> Option<Act> {
    view.said = None;
    let all = view.rows(frame);
    match key {
        KeyCode::Char('q') => return Some(Act::Quit),
        KeyCode::Up | KeyCode::Char('k') => view.move_by(&all, -1),
        KeyCode::Down | KeyCode::Char('j') => view.move_by(&all, 1),
        KeyCode::PageUp => view.move_by(&all, -PAGE),
        KeyCode::PageDown => view.move_by(&all, PAGE),
        KeyCode::Home => view.move_by(&all, isize::MIN),
        KeyCode::End => view.move_by(&all, isize::MAX),
        KeyCode::Enter | KeyCode::Right => view.open(frame),
        KeyCode::Esc | KeyCode::Left | KeyCode::Backspace => view.back(),
        KeyCode::Tab => view.next_level(),
        KeyCode::Char('<') => view.order_by_next(-1),
        KeyCode::Char('>') => view.order_by_next(1),
        KeyCode::Char('i') => view.invert(),
        KeyCode::Char('/') => view.mode = Mode::Filter(view.filter.clone()),
        KeyCode::Char('?') => view.mode = Mode::Help,
        KeyCode::Char(' ') => view.paused = !view.paused,
        KeyCode::Char('r') => {
            let group = view.chosen_group(frame)?;
            view.mode = Mode::Rate(group, String::new(), None);
        }
        KeyCode::Char('f') => {
            let group = view.chosen_group(frame)?;
            let now = frame.group(&group.0, &group.1).map_or(Fold::On, |known| known.settings.fold());
            view.mode = Mode::Fold(group, now);
        }
        _ => {}
    }
    None
}

fn filter(view: &mut View, before: String, key: KeyCode) {
    match key {
        KeyCode::Enter => return,
        KeyCode::Esc => {
            view.filter = before;
            return;
        }
        KeyCode::Backspace => _ = view.filter.pop(),
        KeyCode::Char(c) => View::typed(&mut view.filter, c),
        _ => {}
    }
    view.mode = Mode::Filter(before);
}

fn rate(view: &mut View, frame: &Frame, group: GroupKey, mut text: String, key: KeyCode) {
    match key {
        KeyCode::Esc => return view.said = Some("nothing was changed".to_owned()),
        KeyCode::Enter => return view.confirm_rate(frame, group, text.trim()),
        KeyCode::Backspace => _ = text.pop(),
        KeyCode::Char(c) => View::typed(&mut text, c),
        _ => {}
    }
    view.mode = Mode::Rate(group, text, None);
}

/// The choices of [`Mode::Fold`], in the order in which they are shown.
pub const CHOICES: [Fold; 3] = [Fold::On, Fold::Off, Fold::Unfold];

fn choose(view: &mut View, frame: &Frame, group: GroupKey, fold: Fold, key: KeyCode) {
    let at = CHOICES.iter().position(|choice| *choice == fold).unwrap_or(0);
    let next = match key {
        KeyCode::Esc => return view.said = Some("nothing was changed".to_owned()),
        KeyCode::Enter => return view.confirm_fold(frame, group, fold),
        KeyCode::Up | KeyCode::Left => at.saturating_sub(1),
        KeyCode::Down | KeyCode::Right | KeyCode::Tab => (at + 1).min(CHOICES.len() - 1),
        _ => at,
    };
    view.mode = Mode::Fold(group, CHOICES[next]);
}
