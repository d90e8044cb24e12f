//! Output of `pagefold audit`: each group by its page frames, its savings beside the engine's account, and the frames
//! that groups have in common.

use crate::savings_table;
use crate::table::{Align, Table, shorten, wrap};
use crate::words::plural;
use cli::size::{mib, signed_bytes, signed_mib};
use page::{Savings, pages_to_bytes};

/// Greatest length of a line of text, in characters.
const COLUMNS: usize = 100;
/// Greatest length of a group's name beside figures, in characters.
const NAME_CHARS: usize = 24;

/// Findings of an audit.
#[derive(Clone, Debug, Default)]
pub struct Audit {
    /// The groups.
    pub groups: Vec<Group>,
    /// Savings of all groups whose service was asked.
    pub saved_bytes: i64,
    /// Groups that do not count, because their service was not asked.
    pub others: usize,
    /// Distinct frames looked at.
    pub frames_checked: u64,
    /// Frames that two groups have in common.
    pub cross_group_frames: u64,
    /// The first of these frames, each with two places that map it, in words.
    pub crossings: Vec<String>,
}

/// One group.
#[derive(Clone, Debug, Default)]
pub struct Group {
    /// Name of the group.
    pub name: String,
    /// Number of members.
    pub members: usize,
    /// Processes that are no members and map the group's pool.
    pub other_processes: usize,
    /// Figures in pages: distinct frames, frames mapped more than once, places that map the pool, frames of the pool,
    /// broken pages in the pool's mappings.
    pub figures: [u64; 5],
    /// Savings of the group; zero pages and tables by the engine's account.
    pub savings: Savings,
    /// Savings by the engine's account; `None` where no engine tells.
    pub engine: Option<Savings>,
    /// For each term of [`Savings`], in its order: whether the two differ by more than the time between them explains.
    pub differs: [bool; 5],
}

/// The audit as text.
pub fn text(audit: &Audit) -> String {
    let mut table = Table::new(&[
        ("group", Align::Left),
        ("members", Align::Right),
        ("others", Align::Right),
        ("frames", Align::Right),
        ("shared", Align::Right),
        ("folded", Align::Right),
        ("pool", Align::Right),
        ("broken", Align::Right),
        ("saved", Align::Right),
    ]);
    for g in &audit.groups {
        let counts = [g.members, g.other_processes].map(|n| n.to_string());
        let saved = signed_mib(g.savings.saved_bytes());
        let cells = [shorten(&g.name, NAME_CHARS)].into_iter().chain(counts);
        table.row(cells.chain(g.figures.map(|n| mib(pages_to_bytes(n)))).chain([saved]));
    }
    let mut text = String::new();
    if !table.is_empty() {
        text += &format!("Groups by their page frames, in MiB\n{table}\n");
    }
    for group in &audit.groups {
        text += &sum(group);
    }
    for crossing in &audit.crossings {
        text += &wrap(&cli::printable(crossing), COLUMNS);
    }
    let checked = plural(audit.frames_checked, "frame");
    text += &wrap(
        &match audit.cross_group_frames {
            0 => format!("{checked} checked: no two groups have any in common."),
            n => format!("{checked} checked: groups have {} in COMMON.", plural(n, "frame")),
        },
        COLUMNS,
    );
    let saved = signed_bytes(audit.saved_bytes);
    text + &match audit.others {
        0 => format!("Saved: {saved}.\n"),
        n => format!("Saved: {saved}, without {} of services that were not asked.\n", plural(n as u64, "group")),
    }
}

/// The sum of a group's savings.
fn sum(group: &Group) -> String {
    let name = cli::printable(&group.name);
    let Some(engine) = &group.engine else {
        let notes = ["", "unknown: no engine tells", "", "unknown: no engine tells", ""].map(str::to_owned);
        return format!("Saved in {name}, in KiB\n{}\n", savings_table::text(&group.savings, notes));
    };
    let mut notes = [
        "",
        "the engine's account alone: they are in no page table",
        "",
        "the engine's account alone",
        "agents count them every 10 s",
    ];
    for (note, _) in notes.iter_mut().zip(group.differs).filter(|(_, differs)| *differs) {
        *note = "DIFFERS";
    }
    let sum = savings_table::compared(&group.savings, engine, notes);
    let negative = group.savings.saved_bytes() < 0;
    let why = if negative { wrap(savings_table::NEGATIVE, COLUMNS) } else { String::new() };
    format!("Saved in {name}, in KiB: by page frames, and by the engine's account of a second ago\n{sum}{why}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_has_groups_sums_and_common_frames() {
        let engine = Savings::of(512, 64, 256, 8192, 16);
        let group = Group {
            name: "acme\u{1b}".into(),
            members: 2,
            other_processes: 1,
            figures: [1024, 256, 512, 256, 0],
            savings: Savings::of(512, 64, 260, 8192, 16),
            engine: Some(engine),
            differs: [false, false, true, false, false],
        };
        let saved_bytes = group.savings.saved_bytes();
        let clean = Audit { groups: vec![group.clone()], saved_bytes, frames_checked: 1024, ..Audit::default() };
        assert_eq!(
            text(&clean),
            "\
Groups by their page frames, in MiB
group  members  others  frames  shared  folded  pool  broken  saved
acme?        2       1     4.0     1.0     2.0   1.0       0    1.2

Saved in acme?, in KiB: by page frames, and by the engine's account of a second ago
              frames  engine
+ folded       2,048   2,048
+ zero pages     256     256  the engine's account alone: they are in no page table
- pool         1,040   1,024  DIFFERS
- tables           8       8  the engine's account alone
- mappings         4       4  agents count them every 10 s
= saved        1,252   1,268  1.2 MiB

1,024 frames checked: no two groups have any in common.
Saved: 1.2 MiB.
"
        );
        let group = Group { savings: Savings::of(0, 0, 1, 0, 0), engine: None, ..group };
        let crossed = Audit {
            groups: vec![group],
            saved_bytes: -4096,
            cross_group_frames: 1,
            crossings: vec!["frame 0x7: ...".into()],
            ..clean
        };
        let text = super::text(&crossed);
        assert!(text.contains("frame 0x7") && text.contains("groups have 1 frame in COMMON"), "{text}");
        assert!(text.contains("-<0.1") && text.ends_with("Saved: -4 KiB.\n"), "{text}");
        let text = super::text(&Audit { others: 2, ..crossed });
        assert!(text.ends_with("Saved: -4 KiB, without 2 groups of services that were not asked.\n"), "{text}");
    }
}
