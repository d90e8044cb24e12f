//! Draws the picture into a buffer of cells: lines above the table, the table, details of the row under the cursor, and
//! a line with keys.

use crate::columns::{self, Column, Item, Level, Shown};
use crate::details;
use crate::frame::{Frame, Group};
use crate::plain::{known, percent, signed, size};
use crate::popup;
use crate::view::{Mode, View};
use api::member_words::FOLDING;
use cli::size::{bytes, plural};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Span;
use ratatui::widgets::{Paragraph, Widget, Wrap};

/// Number of lines below the table about the row under the cursor.
const DETAIL_LINES: u16 = 4;
/// Least height of a picture that has details of the row under the cursor, in lines.
const LEAST_WITH_DETAILS: u16 = 16;
/// The last line, if there is no message in it.
const KEYS: &str = "Enter open  Esc back  Tab level  / filter  <> order  r rate  f fold  ? help  q";

/// The styles of a picture. Without colour, it has only bold, dim and reversed letters.
#[derive(Clone, Copy, Debug)]
pub struct Paint {
    /// Whether colours may be used.
    pub colour: bool,
}

impl Paint {
    /// A style with letters of this colour, if colours may be used.
    fn letters(self, colour: Color) -> Style {
        if self.colour { Style::new().fg(colour) } else { Style::new() }
    }

    fn cell(self, column: &Column, item: Item<'_>) -> Style {
        let figures = item.figures();
        match column.head {
            "STATE" if item.state().0 == FOLDING => self.letters(Color::Green),
            "STATE" => self.letters(Color::Yellow),
            "SAVED" if figures.saved_bytes.is_some_and(|saved| saved < 0) => self.letters(Color::Red),
            "BROKEN/S" if figures.broken_bytes_per_s.is_some_and(|broken| broken > 0) => self.letters(Color::Yellow),
            _ => Style::new(),
        }
    }
}

/// Draws a line of text, which is cut off at the right edge of the area.
fn put(buffer: &mut Buffer, area: Rect, y: u16, text: &str, style: Style) {
    if y < area.bottom() {
        buffer.set_stringn(area.x, y, text, usize::from(area.width), style);
    }
}

/// Draws the whole picture.
pub fn picture(frame: &Frame, view: &mut View, area: Rect, buffer: &mut Buffer, paint: Paint) {
    if area.is_empty() {
        return;
    }
    let rows = view.rows(frame);
    let cursor = view.cursor(&rows);
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let mut y = area.y;
    for (line, style) in head(frame, rows.get(cursor).copied(), area.width, paint) {
        put(buffer, area, y, &line, style);
        y = y.saturating_add(1);
    }
    put(buffer, area, y, &place(view, frame, rows.len()), bold);
    y = y.saturating_add(1);
    let keys = area.bottom().saturating_sub(1);
    let details = if area.height >= LEAST_WITH_DETAILS { DETAIL_LINES } else { 0 };
    let table = Rect { y, height: keys.saturating_sub(y).saturating_sub(details), ..area };
    draw_table(view, &rows, cursor, table, buffer, paint);
    let below = Rect { y: table.bottom(), height: details, ..area };
    if let Some(item) = rows.get(cursor) {
        let words = details::of(*item, frame);
        Paragraph::new(words).wrap(Wrap { trim: true }).render(below, buffer);
    }
    last_line(view, Rect { y: keys, height: 1, ..area }, buffer);
    popup::draw(view, frame, area, buffer, paint.letters(Color::Cyan));
}

fn last_line(view: &View, area: Rect, buffer: &mut Buffer) {
    let (words, style) = match (&view.mode, &view.said) {
        (Mode::Filter(_), _) => (format!("/{}_  Enter keeps it, Esc does not", view.filter), Modifier::BOLD),
        (_, Some(said)) => (said.clone(), Modifier::BOLD),
        (_, None) => (KEYS.to_owned(), Modifier::DIM),
    };
    put(buffer, area, area.y, &words, Style::new().add_modifier(style));
}

/// The lines above the table: how many more guests fit, with the time of day; sums over all groups; and troubles of
/// services, if there are any.
fn head(frame: &Frame, at: Option<Item<'_>>, width: u16, paint: Paint) -> Vec<(String, Style)> {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let clock = clock(frame);
    let most = usize::from(width).saturating_sub(clock.len() + 1);
    let figure = fitting(&figure(frame, at), most);
    let mut lines = vec![(format!("{figure:<most$} {clock}"), bold)];
    lines.push((fitting(&totals(frame), usize::from(width)), Style::new()));
    let red = paint.letters(Color::Red).add_modifier(Modifier::BOLD);
    if let Some(first) = frame.troubles.first() {
        let more = frame.troubles.len() - 1;
        let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
        lines.push((format!("Trouble{more}: {first}"), red));
    }
    lines
}

/// The first of several wordings, of which the longest comes first, that has at most `most` characters. If all are
/// longer, it is the last one.
fn fitting(wordings: &[String], most: usize) -> String {
    let last = wordings.last().cloned().unwrap_or_default();
    wordings.iter().find(|words| words.chars().count() <= most).cloned().unwrap_or(last)
}

/// The time of day at which the frame's facts were read, in UTC.
fn clock(frame: &Frame) -> String {
    let of_day = frame.unix_s % 86_400;
    format!("{:02}:{:02}:{:02} UTC", of_day / 3600, of_day / 60 % 60, of_day % 60)
}

/// Two wordings of how many more guests fit that are like those of the group of the row under the cursor, or else of
/// the first group for which this is known.
fn figure(frame: &Frame, at: Option<Item<'_>>) -> [String; 2] {
    let own = at.and_then(|item| frame.group(item.group().0, item.group().1));
    let fitted = |group: &&Group| group.fit.is_some();
    let group = own.filter(fitted).or_else(|| frame.groups.iter().find(fitted));
    let Some((group, fit)) = group.and_then(|group| Some((group, group.fit.as_ref()?))) else {
        return [
            "How many more fit is not known: memory is not balanced here, or you do not see all groups".to_owned(),
            "How many more fit is not known".to_owned(),
        ];
    };
    let (more, name, policy) = (fit.more, &group.group, fit.policy.name());
    let [like, storm, reserve] = [fit.like_bytes, fit.storm_bytes, fit.reserve_bytes].map(bytes);
    let short = [fit.like_bytes, fit.storm_bytes, fit.reserve_bytes].map(size);
    [
        format!(
            "{more} more guests like {name}'s ({like}) fit ({policy}); a full break storm needs {storm}, the reserve is {reserve}"
        ),
        format!("{more} more like {name}'s ({}) fit; full storm {}, reserve {}", short[0], short[1], short[2]),
    ]
}

/// Two wordings of the sums over all groups.
fn totals(frame: &Frame) -> [String; 2] {
    let figures = || frame.groups.iter().map(|group| &group.figures);
    let saved = figures().filter_map(|f| f.saved_bytes).reduce(i64::saturating_add);
    let broken = figures().filter_map(|f| f.broken_bytes_per_s).reduce(u64::saturating_add);
    let cpu = figures().filter_map(|f| f.cpu_percent).reduce(|sum, one| sum + one);
    let guests: usize = frame.groups.iter().map(|group| group.members).sum();
    let processes: usize = frame.groups.iter().map(|group| group.processes).sum();
    let [groups, guests, processes] = [(frame.groups.len(), "group"), (guests, "member"), (processes, "process")]
        .map(|(number, what)| plural(number as u64, what));
    let silent = frame.groups.iter().filter(|group| group.state == "unknown").count();
    let silent = if silent > 0 { format!("; {silent} did not answer") } else { String::new() };
    let [saved, broken, cpu] = [known(saved, signed), known(broken, size), known(cpu, percent)];
    [
        format!(
            "{saved} saved net by {groups}, {guests}, {processes}{silent}; folding takes {cpu}% of a processor, {broken} broken a second"
        ),
        format!("{saved} saved by {groups}, {guests}{silent}; folding {cpu}% CPU, {broken}/s broken"),
    ]
}

/// The line that says which rows the table shows, by which column they are sorted, and the filter.
fn place(view: &View, frame: &Frame, shown: usize) -> String {
    let words = match view.level {
        Level::Groups => "Groups",
        Level::Members => "Members",
        Level::Processes => "Processes",
    };
    let all = view.in_scope(frame).len();
    let number = if view.filter.is_empty() { all.to_string() } else { format!("{shown} of {all}") };
    let of = view.member.as_ref().or(view.group.as_ref().map(|(_, name)| name));
    let of = of.map_or_else(String::new, |name| format!(" of {name}"));
    let (column, is_down) = view.order();
    let head = columns::of(view.level)[column].head;
    let filter = if view.filter.is_empty() { String::new() } else { format!(", with \"{}\"", view.filter) };
    let held = if view.paused { ", HELD" } else { "" };
    format!("{words}{of}: {number}, by {head} {}{filter}{held}", if is_down { "down" } else { "up" })
}

/// Length of the longest name among these rows, in bytes, which are at least as many as its cells.
fn longest(rows: &[Item<'_>]) -> u16 {
    rows.iter().map(|item| item.name().len()).max().unwrap_or(0).try_into().unwrap_or(u16::MAX)
}

fn draw_table(view: &mut View, rows: &[Item<'_>], cursor: usize, area: Rect, buffer: &mut Buffer, paint: Paint) {
    if area.is_empty() {
        return;
    }
    let lines = usize::from(area.height.saturating_sub(1));
    let last = rows.len().saturating_sub(lines);
    let least = (cursor + 1).saturating_sub(lines);
    view.top = view.top.clamp(least, cursor.max(least)).min(last.max(least));
    let visible: Vec<Item<'_>> = rows.iter().skip(view.top).take(lines).copied().collect();
    let shown = columns::shown(view.level, area.width, longest(rows));
    heading(view.level, &shown, Some(view.order().0), area, buffer);
    for ((number, item), y) in visible.iter().enumerate().zip(area.y.saturating_add(1)..area.bottom()) {
        row(view.level, &shown, *item, Rect { y, height: 1, ..area }, buffer, paint);
        if view.top + number == cursor {
            let chosen = Style::new().add_modifier(Modifier::REVERSED);
            buffer.set_style(Rect { y, height: 1, ..area }, chosen);
        }
    }
}

/// The cells of a line of the table: each column's index, the column, and the area of its cell.
fn cells(level: Level, shown: &[Shown], area: Rect) -> impl Iterator<Item = (usize, &'static Column, Rect)> {
    let (gap, mut x) = (columns::gap(area.width), area.x);
    shown.iter().map(move |(number, width)| {
        let cell = Rect { x, width: *width, ..area };
        x = x.saturating_add(*width).saturating_add(gap);
        (*number, &columns::of(level)[*number], cell)
    })
}

fn cell(column: &Column, text: &str, area: Rect, buffer: &mut Buffer, style: Style) {
    let spare = area.width.saturating_sub(u16::try_from(Span::raw(text).width()).unwrap_or(u16::MAX));
    let x = if column.is_text() { area.x } else { area.x.saturating_add(spare) };
    put(buffer, Rect { x, width: area.right().saturating_sub(x), ..area }, area.y, text, style);
}

fn heading(level: Level, shown: &[Shown], order: Option<usize>, area: Rect, buffer: &mut Buffer) {
    for (number, column, place) in cells(level, shown, Rect { height: 1, ..area }) {
        let chosen = if order == Some(number) { Modifier::UNDERLINED } else { Modifier::BOLD };
        cell(column, column.head, place, buffer, Style::new().add_modifier(Modifier::BOLD | chosen));
    }
}

fn row(level: Level, shown: &[Shown], item: Item<'_>, area: Rect, buffer: &mut Buffer, paint: Paint) {
    for (_, column, place) in cells(level, shown, area) {
        cell(column, &(column.cell)(item), place, buffer, paint.cell(column, item));
    }
}

/// The picture as plain text for an output that is no terminal, with a line for each group and each member.
pub fn text(frame: &Frame, width: u16) -> String {
    let paint = Paint { colour: false };
    let mut text: String =
        head(frame, None, width, paint).iter().map(|(line, _)| format!("{}\n", line.trim_end())).collect();
    for level in [Level::Groups, Level::Members] {
        let view = View::of(level);
        let (rows, area) = (view.rows(frame), Rect::new(0, 0, width, 1));
        let shown = columns::shown(level, width, longest(&rows));
        let mut line = |draw: &dyn Fn(&mut Buffer)| {
            let mut buffer = Buffer::empty(area);
            draw(&mut buffer);
            text += &lines(&buffer);
        };
        line(&|_| ());
        line(&|buffer| heading(level, &shown, None, area, buffer));
        rows.iter().for_each(|item| line(&|buffer| row(level, &shown, *item, area, buffer, paint)));
    }
    text
}

/// The text of a buffer, without blanks at the ends of lines.
pub fn lines(buffer: &Buffer) -> String {
    let mut text = String::new();
    for y in buffer.area.top()..buffer.area.bottom() {
        let (mut line, mut x) = (String::new(), buffer.area.left());
        while let Some(cell) = buffer.cell((x, y)) {
            line += cell.symbol();
            // A wide character covers the next cell.
            let width = Span::raw(cell.symbol()).width().max(1);
            x = x.saturating_add(u16::try_from(width).unwrap_or(1));
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}
