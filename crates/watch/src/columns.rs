//! The columns of the table for groups, members and processes (its levels): their headings, widths and cells, and which
//! of them fit into the terminal.

use crate::figures::Figures;
use crate::frame::{Group, Member, Process};
use crate::plain::{known, percent, signed, size};
use cli::size::count;
use std::cmp::Ordering;

/// What the rows of the table are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Groups.
    Groups,
    /// Members, each with its forked children.
    Members,
    /// Processes.
    Processes,
}

/// A row of the table: the facts of one group, member or process.
#[derive(Clone, Copy, Debug)]
pub enum Item<'a> {
    /// A group.
    Group(&'a Group),
    /// A member.
    Member(&'a Member),
    /// A process.
    Process(&'a Process),
}

/// The value by which rows are sorted if the user sorts by a column.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// A text, from A to Z.
    Text(&'a str),
    /// A number; `None`, if it is not known, is less than any other.
    Number(Option<f64>),
}

/// A column.
pub struct Column {
    /// The column's heading.
    pub head: &'static str,
    /// The column's meaning, as the help shows it.
    pub what: &'static str,
    /// The column's least width, in cells of the terminal.
    pub least: u16,
    /// How soon the column is left out if the terminal is narrow: the highest number first.
    pub rank: u8,
    /// Makes the text of the column's cell in a row.
    pub cell: fn(Item<'_>) -> String,
    /// The value by which a row is sorted.
    pub value: for<'a> fn(Item<'a>) -> Value<'a>,
}

impl Column {
    /// Whether the column has texts, which are aligned at the left, and not numbers.
    pub fn is_text(&self) -> bool {
        matches!(self.head, "GROUP" | "MEMBER" | "STATE" | "RATE")
    }
}

impl Value<'_> {
    /// The order of two values of one column.
    pub fn order(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Text(one), Self::Text(two)) => one.cmp(two),
            (Self::Number(one), Self::Number(two)) => {
                let number = |number: &Option<f64>| number.unwrap_or(f64::NEG_INFINITY);
                number(one).total_cmp(&number(two))
            }
            (Self::Text(_), Self::Number(_)) => Ordering::Less,
            (Self::Number(_), Self::Text(_)) => Ordering::Greater,
        }
    }
}

impl<'a> Item<'a> {
    /// The row's figures.
    pub const fn figures(self) -> &'a Figures {
        match self {
            Self::Group(one) => &one.figures,
            Self::Member(one) => &one.figures,
            Self::Process(one) => &one.figures,
        }
    }

    /// The directory of the group's service, and the group's name.
    pub fn group(self) -> (&'a str, &'a str) {
        match self {
            Self::Group(one) => (&one.service, &one.group),
            Self::Member(one) => (&one.service, &one.group),
            Self::Process(one) => (&one.service, &one.group),
        }
    }

    /// The name of the row's group, member or process.
    pub fn name(self) -> &'a str {
        match self {
            Self::Group(one) => &one.group,
            Self::Member(one) => &one.member,
            Self::Process(one) => &one.name,
        }
    }

    /// The row's state, and the reason for it, which may be empty.
    pub fn state(self) -> (&'a str, &'a str) {
        match self {
            Self::Group(one) => (one.state, &one.reason),
            Self::Member(one) => (&one.state, &one.reason),
            Self::Process(one) => (&one.state, &one.reason),
        }
    }
}

fn number(figure: Option<u64>) -> Value<'static> {
    Value::Number(figure.map(|figure| figure as f64))
}

/// A figure of a group; `None` for other rows.
fn of_group<T>(item: Item<'_>, figure: impl Fn(&Group) -> Option<T>) -> Option<T> {
    if let Item::Group(group) = item { figure(group) } else { None }
}

/// A figure of a member; `None` for other rows.
fn of_member<T>(item: Item<'_>, figure: impl Fn(&Member) -> Option<T>) -> Option<T> {
    if let Item::Member(member) = item { figure(member) } else { None }
}

/// A figure of a process; `None` for other rows.
fn of_process<T>(item: Item<'_>, figure: impl Fn(&Process) -> Option<T>) -> Option<T> {
    if let Item::Process(process) = item { figure(process) } else { None }
}

/// A column with a size in bytes, which is a field of [`Figures`].
macro_rules! sized {
    ($head:literal, $rank:literal, $field:ident, $what:literal) => {
        Column {
            head: $head,
            what: $what,
            least: 6,
            rank: $rank,
            cell: |item| known(item.figures().$field, size),
            value: |item| number(item.figures().$field),
        }
    };
}

/// A column with a number that only rows of one level have, such as the number of a group's members.
macro_rules! counted {
    ($head:literal, $least:literal, $rank:literal, $of:ident, $figure:expr, $words:expr, $what:literal) => {
        Column {
            head: $head,
            what: $what,
            least: $least,
            rank: $rank,
            cell: |item| known($of(item, $figure), $words),
            value: |item| number($of(item, $figure)),
        }
    };
}

const STATE: Column = Column {
    head: "STATE",
    what: "how it does, and why",
    least: 11,
    rank: 1,
    cell: |item| match item.state() {
        (word, "") => word.replace('_', " "),
        (word, reason) => format!("{}: {reason}", word.replace('_', " ")),
    },
    value: |item| Value::Text(item.state().0),
};
const SAVED: Column = Column {
    head: "SAVED",
    what: "memory that folding saves, net of all costs",
    least: 6,
    rank: 2,
    cell: |item| known(item.figures().saved_bytes, signed),
    value: |item| Value::Number(item.figures().saved_bytes.map(|bytes| bytes as f64)),
};
const UNIQUE: Column = sized!("UNIQUE", 3, anonymous_bytes, "anonymous page frames of its processes");
const PSS: Column = sized!("PSS", 4, proportional_bytes, "unique, and its part of the pool; files are left out");
const BROKEN: Column = Column {
    head: "BROKEN/S",
    what: "folded pages that were written, a second, at least",
    least: 8,
    rank: 5,
    cell: |item| known(item.figures().broken_bytes_per_s, size),
    value: |item| number(item.figures().broken_bytes_per_s),
};
const CPU: Column = Column {
    head: "CPU%",
    what: "processor time of folding, of one processor",
    least: 5,
    rank: 6,
    cell: |item| known(item.figures().cpu_percent, percent),
    value: |item| Value::Number(item.figures().cpu_percent),
};
const FOLDED: Column = sized!("SHARED", 8, folded_bytes, "pages that map a slot of the pool");
const ZERO: Column = sized!("ZERO", 11, zero_bytes, "pages of zeros that were given back");
const WRITTEN: Column = sized!("BROKEN", 12, broken_bytes, "pages that were folded and written since");
const GROUP: Column = Column {
    head: "GROUP",
    what: "the group",
    least: 10,
    rank: 9,
    cell: |item| item.group().1.to_owned(),
    value: |item| Value::Text(item.group().1),
};

static GROUPS: [Column; 14] = [
    Column { least: 16, rank: 0, ..GROUP },
    counted!("GUESTS", 6, 7, of_group, |g| Some(g.members as u64), count, "members, without forked children"),
    SAVED,
    UNIQUE,
    PSS,
    FOLDED,
    ZERO,
    counted!("POOL", 6, 10, of_group, |g| g.pool_bytes, size, "memory of the pool, in use or idle"),
    WRITTEN,
    BROKEN,
    CPU,
    counted!("MORE", 4, 7, of_group, |g| g.fit.as_ref().map(|f| f.more), count, "guests like most of its VMs that fit"),
    Column {
        head: "RATE",
        what: "most pages fingerprinted a second, by its settings",
        least: 12,
        rank: 13,
        cell: |item| known(of_group(item, |group| Some(group.settings.scan_rate_words())), |words| words),
        value: |item| number(of_group(item, |group| group.scanned_pages_per_s)),
    },
    STATE,
];

static MEMBERS: [Column; 13] = [
    Column {
        head: "MEMBER",
        what: "the member, with its forked children",
        least: 14,
        rank: 0,
        cell: |item| item.name().to_owned(),
        value: |item| Value::Text(item.name()),
    },
    GROUP,
    SAVED,
    UNIQUE,
    Column { rank: 4, ..FOLDED },
    counted!(
        "WITH",
        4,
        8,
        of_member,
        |m| Some(m.shares_with as u64),
        count,
        "other members with pages in the same pool"
    ),
    PSS,
    ZERO,
    WRITTEN,
    BROKEN,
    CPU,
    counted!("BALLOON", 7, 7, of_member, |m| m.balloon_bytes, size, "memory that its balloon has taken"),
    STATE,
];

static PROCESSES: [Column; 14] = [
    counted!("PID", 8, 0, of_process, |p| Some(p.pid.into()), |pid: u64| pid.to_string(), "the process"),
    Column {
        head: "MEMBER",
        what: "its name as a member",
        least: 14,
        rank: 0,
        cell: |item| item.name().to_owned(),
        value: |item| Value::Text(item.name()),
    },
    GROUP,
    SAVED,
    UNIQUE,
    Column { rank: 4, ..FOLDED },
    PSS,
    ZERO,
    WRITTEN,
    BROKEN,
    CPU,
    counted!("P99 US", 6, 13, of_process, |p| p.stall_p99_us, count, "time out of reach of 99 pages of 100, in us"),
    counted!("MAPS", 7, 14, of_process, |p| p.vmas, count, "mappings, which the kernel limits"),
    STATE,
];

/// The columns of a level.
pub fn of(level: Level) -> &'static [Column] {
    match level {
        Level::Groups => &GROUPS,
        Level::Members => &MEMBERS,
        Level::Processes => &PROCESSES,
    }
}

/// A column that is shown: its index among the level's columns, and its width in cells.
pub type Shown = (usize, u16);

/// Number of empty cells between two columns in a table of this width.
pub const fn gap(width: u16) -> u16 {
    if width < 100 { 1 } else { 2 }
}

/// Greatest width of the column with names, in cells. Longer names are cut off.
const MOST_NAME: u16 = 48;

/// The columns that fit into `width` cells. Of the cells that are left, the first column of texts gets what the longest
/// name needs (`longest` cells), and the last column gets all others.
pub fn shown(level: Level, width: u16, longest: u16) -> Vec<Shown> {
    let columns = of(level);
    let mut ranked: Vec<usize> = (0..columns.len()).collect();
    ranked.sort_by_key(|number| columns[*number].rank);
    let (mut used, mut chosen) = (0_u16, Vec::new());
    for number in ranked {
        let between = if chosen.is_empty() { 0 } else { gap(width) };
        let wanted = used.saturating_add(between).saturating_add(columns[number].least);
        if wanted > width {
            break;
        }
        used = wanted;
        chosen.push(number);
    }
    chosen.sort_unstable();
    let mut left = width.saturating_sub(used);
    let named = chosen.iter().position(|number| columns[*number].is_text());
    let mut shown: Vec<Shown> = chosen.iter().map(|number| (*number, columns[*number].least)).collect();
    if let Some(named) = named {
        let more = longest.min(MOST_NAME).saturating_sub(shown[named].1).min(left);
        shown[named].1 = shown[named].1.saturating_add(more);
        left = left.saturating_sub(more);
    }
    if let Some(last) = shown.last_mut() {
        last.1 = last.1.saturating_add(left);
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fill_the_width_and_the_weightiest_stay() {
        for level in [Level::Groups, Level::Members, Level::Processes] {
            for width in [1, 20, 80, 99, 100, 160, 400] {
                let shown = shown(level, width, 30);
                let gaps = gap(width) * u16::try_from(shown.len().saturating_sub(1)).unwrap();
                let used = shown.iter().map(|(_, cells)| cells).sum::<u16>() + gaps;
                assert!(used <= width && (shown.is_empty() || used == width), "{level:?} {width}: {shown:?}");
            }
            let heads = |width| -> Vec<&str> {
                shown(level, width, 14).iter().map(|(number, _)| of(level)[*number].head).collect()
            };
            for head in ["SAVED", "UNIQUE", "PSS", "BROKEN/S", "CPU%", "STATE"] {
                assert!(heads(80).contains(&head), "{level:?}: {head} in {:?}", heads(80));
            }
            assert_eq!(heads(200).len(), of(level).len());
        }
    }

    #[test]
    fn unknown_figures_are_the_least() {
        let none = Value::Number(None);
        assert_eq!(none.order(&Value::Number(Some(-1.0))), Ordering::Less);
        assert_eq!(Value::Text("a").order(&Value::Text("b")), Ordering::Less);
    }
}
