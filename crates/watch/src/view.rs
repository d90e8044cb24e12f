//! Which part of the facts is shown, and how: level (groups, members or processes), scope (of which group and member),
//! order, filter, cursor and dialogs.
//!
//! ```text
//!            Enter                Enter
//!   groups ---------> members of ---------> processes of
//!      ^   <--------- a group    <--------- a member           Tab: the same level of all groups
//!            Esc                  Esc
//! ```

use crate::columns::{self, Item, Level, Value};
use crate::frame::Frame;
use api::change::{Change, ScanRate};
use api::control::Fold;

/// Longest text that can be typed, in characters.
const MOST_TYPED: usize = 64;

/// A group: its service's directory, and its name.
pub type GroupKey = (String, String);

/// What typed keys are for.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Mode {
    /// To move, and to begin something.
    #[default]
    Rows,
    /// To type a filter. The filter before, which Esc restores.
    Filter(String),
    /// To type a group's scan rate: the text so far, and why the text that was entered is no scan rate.
    Rate(GroupKey, String, Option<String>),
    /// To choose whether a group folds: the choice so far.
    Fold(GroupKey, Fold),
    /// To confirm or cancel a change of a group, with the question that is shown.
    Confirm(GroupKey, Change, String),
    /// To close the help, which any key does.
    Help,
}

/// What is shown of the facts, and the dialog with the user.
#[derive(Clone, Debug)]
pub struct View {
    /// Whether groups, members or processes are shown.
    pub level: Level,
    /// The group to which members and processes belong; `None`: all.
    pub group: Option<GroupKey>,
    /// The member to which processes belong; `None`: all.
    pub member: Option<String>,
    /// For each level, the column by which rows are sorted, and whether the greatest value comes first.
    pub orders: [(usize, bool); 3],
    /// Text that a row must contain to be shown; empty: every row is shown.
    pub filter: String,
    /// What typed keys are for.
    pub mode: Mode,
    /// A message in the last line: the outcome of a change, or why the services do not answer.
    pub said: Option<String>,
    /// Whether new answers of the services are ignored, so that the picture stays as it is.
    pub paused: bool,
    /// Number of the first row that is shown.
    pub top: usize,
    cursor: usize,
    /// Which row is under the cursor. The cursor follows this row when its place in the table changes.
    under: Option<(GroupKey, String)>,
}

impl Default for View {
    fn default() -> Self {
        // Rows are sorted by savings, the greatest first.
        let saved = |level| columns::of(level).iter().position(|column| column.head == "SAVED").unwrap_or(0);
        let orders = [Level::Groups, Level::Members, Level::Processes].map(|level| (saved(level), true));
        Self {
            level: Level::Groups,
            group: None,
            member: None,
            orders,
            filter: String::new(),
            mode: Mode::Rows,
            said: None,
            paused: false,
            top: 0,
            cursor: 0,
            under: None,
        }
    }
}

fn key_of(item: Item<'_>) -> (GroupKey, String) {
    let ((service, group), name) = (item.group(), item.name());
    let own = if let Item::Process(process) = item { process.pid.to_string() } else { name.to_owned() };
    ((service.to_owned(), group.to_owned()), own)
}

impl View {
    /// A view of all rows of a level.
    pub fn of(level: Level) -> Self {
        Self { level, ..Self::default() }
    }

    /// All rows of the level that belong to the group and the member which are shown.
    pub fn in_scope<'a>(&self, frame: &'a Frame) -> Vec<Item<'a>> {
        let of_group = |item: &Item<'_>| {
            self.group.as_ref().is_none_or(|(service, group)| item.group() == (service.as_str(), group.as_str()))
        };
        let of_member = |item: &Item<'_>| match (&self.member, item) {
            (Some(member), Item::Process(process)) => process.member == *member,
            _ => true,
        };
        match self.level {
            Level::Groups => frame.groups.iter().map(Item::Group).collect(),
            Level::Members => frame.members.iter().map(Item::Member).filter(of_group).collect(),
            Level::Processes => frame.processes.iter().map(Item::Process).filter(of_group).filter(of_member).collect(),
        }
    }

    /// The rows that are shown: those in scope that contain the filter's text, sorted.
    pub fn rows<'a>(&self, frame: &'a Frame) -> Vec<Item<'a>> {
        let wanted = self.filter.to_lowercase();
        let mut rows = self.in_scope(frame);
        rows.retain(|item| has(*item, &wanted));
        let (column, is_down) = self.order();
        let value = columns::of(self.level)[column].value;
        rows.sort_by(|one, two| {
            let order = Value::order(&value(*one), &value(*two));
            if is_down { order.reverse() } else { order }.then_with(|| one.name().cmp(two.name()))
        });
        rows
    }

    /// The column by which the rows are sorted, and whether the greatest value comes first.
    pub const fn order(&self) -> (usize, bool) {
        self.orders[self.level as usize]
    }

    /// Sorts by another column, `by` columns further to the right.
    pub fn order_by_next(&mut self, by: isize) {
        let columns = columns::of(self.level);
        let order = &mut self.orders[self.level as usize];
        let last = columns.len().cast_signed();
        let next = (order.0.cast_signed() + by).rem_euclid(last).cast_unsigned();
        // Texts are sorted from A to Z, numbers from the greatest.
        *order = (next, !columns[next].is_text());
    }

    /// Reverses the order of the rows.
    pub const fn invert(&mut self) {
        let order = &mut self.orders[self.level as usize];
        order.1 = !order.1;
    }

    /// The index of the row under the cursor. The cursor follows its row when the row has moved.
    pub fn cursor(&mut self, rows: &[Item<'_>]) -> usize {
        let is_under = |item: &Item<'_>| self.under.as_ref().is_some_and(|under| key_of(*item) == *under);
        let at = rows.get(self.cursor).filter(|item| is_under(item)).map(|_| self.cursor);
        let found = at.or_else(|| rows.iter().position(is_under));
        self.cursor = found.unwrap_or(self.cursor).min(rows.len().saturating_sub(1));
        self.under = rows.get(self.cursor).map(|item| key_of(*item));
        self.cursor
    }

    /// Moves the cursor down by `by` rows, within the table.
    pub fn move_by(&mut self, rows: &[Item<'_>], by: isize) {
        let last = rows.len().saturating_sub(1);
        self.cursor = self.cursor(rows).saturating_add_signed(by).min(last);
        self.under = rows.get(self.cursor).map(|item| key_of(*item));
    }

    /// The group of the row under the cursor, or the one whose members are shown.
    pub fn chosen_group(&mut self, frame: &Frame) -> Option<GroupKey> {
        let rows = self.rows(frame);
        let at = self.cursor(&rows);
        rows.get(at).map(|item| key_of(*item).0).or_else(|| self.group.clone())
    }

    fn show(&mut self, level: Level, group: Option<GroupKey>, member: Option<String>) {
        (self.level, self.group, self.member) = (level, group, member);
        (self.cursor, self.top, self.under) = (0, 0, None);
        self.filter.clear();
    }

    /// Shows the members of the group under the cursor, or the processes of the member there.
    pub fn open(&mut self, frame: &Frame) {
        let rows = self.rows(frame);
        let at = self.cursor(&rows);
        match rows.get(at) {
            Some(item @ Item::Group(_)) => self.show(Level::Members, Some(key_of(*item).0), None),
            Some(item @ Item::Member(member)) => {
                self.show(Level::Processes, Some(key_of(*item).0), Some(member.member.clone()));
            }
            Some(Item::Process(_)) | None => {}
        }
    }

    /// Clears the filter if there is one. Otherwise goes back to the level before, with the cursor where it was.
    pub fn back(&mut self) {
        if !self.filter.is_empty() {
            self.filter.clear();
            return;
        }
        let (group, member) = (self.group.take(), self.member.take());
        match (self.level, group, member) {
            (Level::Processes, Some(group), Some(member)) => {
                self.show(Level::Members, Some(group.clone()), None);
                self.under = Some((group, member));
            }
            (_, Some(group), _) => {
                self.show(Level::Groups, None, None);
                self.under = Some((group.clone(), group.1));
            }
            _ => self.show(Level::Groups, None, None),
        }
    }

    /// Shows all rows of the next level: groups, members, processes, and groups again.
    pub fn next_level(&mut self) {
        let next = match self.level {
            Level::Groups => Level::Members,
            Level::Members => Level::Processes,
            Level::Processes => Level::Groups,
        };
        self.show(next, None, None);
    }

    /// Appends a typed character to a text, unless the text is too long.
    pub fn typed(text: &mut String, c: char) {
        if !c.is_control() && text.chars().count() < MOST_TYPED {
            text.push(c);
        }
    }

    /// Asks the user to confirm the scan rate that was typed, or shows why it is none.
    pub fn confirm_rate(&mut self, frame: &Frame, group: GroupKey, text: &str) {
        match text.parse::<ScanRate>() {
            Ok(rate) => {
                let before = frame.group(&group.0, &group.1).map(|known| known.settings.scan_rate_words());
                let before = before.unwrap_or_else(|| "unknown".to_owned());
                let words = format!("Set the scan rate of group {} from {before} to {text}.", group.1);
                let change = Change { scan_rate: Some(rate), ..Change::default() };
                self.mode = Mode::Confirm(group, change, words);
            }
            Err(why) => self.mode = Mode::Rate(group, text.to_owned(), Some(why)),
        }
    }

    /// Asks the user to confirm the choice whether a group folds.
    pub fn confirm_fold(&mut self, frame: &Frame, group: GroupKey, fold: Fold) {
        let folded = frame.group(&group.0, &group.1).map(|known| &known.figures);
        let sum = folded.and_then(|f| f.folded_bytes?.checked_add(f.zero_bytes?));
        let needs = sum
            .filter(|bytes| *bytes > 0)
            .map_or_else(String::new, |bytes| format!(" They take up to {} more.", cli::bytes(bytes)));
        let name = &group.1;
        let words = match fold {
            Fold::On => format!("Have group {name} fold."),
            Fold::Off => format!("Have group {name} fold nothing more. What is folded stays so."),
            Fold::Unfold => format!("Have all pages of group {name} made private again.{needs}"),
        };
        let change = Change { fold: Some(fold), ..Change::default() };
        self.mode = Mode::Confirm(group, change, words);
    }
}

/// Whether a row contains a text in one of its names or in its state, or whether the text is its pid. Upper and lower
/// case do not matter; `wanted` is in lower case.
fn has(item: Item<'_>, wanted: &str) -> bool {
    let is_in = |text: &str| text.to_lowercase().contains(wanted);
    let others = match item {
        Item::Group(_) => false,
        Item::Member(member) => member.domain.as_deref().is_some_and(is_in),
        Item::Process(process) => is_in(&process.member) || process.pid.to_string() == wanted,
    };
    wanted.is_empty() || others || is_in(item.name()) || is_in(item.group().1) || is_in(item.state().0)
}
