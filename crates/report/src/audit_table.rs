//! Output of `pagefold audit`: each group by its page frames, and the frames that groups have in common.

use crate::table::{Align, Table, shorten, wrap};
use crate::words::plural;
use cli::size::{bytes, mib};
use page::pages_to_bytes;

/// Greatest length of a line of text, in characters.
const COLUMNS: usize = 100;
/// Greatest length of a group's name beside figures, in characters.
const NAME_CHARS: usize = 24;

/// Findings of an audit.
#[derive(Clone, Debug, Default)]
pub struct Audit {
    /// The groups.
    pub groups: Vec<Group>,
    /// Distinct frames looked at.
    pub frames_checked: u64,
    /// Frames that two groups have in common.
    pub cross_group_frames: u64,
    /// The first of them, in words.
    pub crossings: Vec<String>,
}

/// One group.
#[derive(Clone, Debug, Default)]
pub struct Group {
    /// Its name.
    pub name: String,
    /// Number of members.
    pub members: usize,
    /// Other processes that map its pool.
    pub other_processes: usize,
    /// Figures in pages: distinct frames, frames mapped more than once, places that map the pool, frames of the pool,
    /// broken pages in the pool's mappings.
    pub figures: [u64; 5],
    /// Savings of the group.
    pub saved_bytes: i64,
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
        let saved = if g.saved_bytes < 0 { "-" } else { "" }.to_owned() + &mib(g.saved_bytes.unsigned_abs());
        let cells = [shorten(&g.name, NAME_CHARS)].into_iter().chain(counts);
        table.row(cells.chain(g.figures.map(|n| mib(pages_to_bytes(n)))).chain([saved]));
    }
    let mut text = String::new();
    if !table.is_empty() {
        text += &format!("Groups by their page frames, in MiB\n{table}\n");
    }
    for crossing in &audit.crossings {
        text += &wrap(&cli::printable(crossing), COLUMNS);
    }
    let checked = plural(audit.frames_checked, "frame");
    let saved: i64 = audit.groups.iter().map(|g| g.saved_bytes).sum();
    text += &wrap(
        &match audit.cross_group_frames {
            0 => format!("{checked} checked: no two groups have any in common."),
            n => format!("{checked} checked: groups have {} in COMMON.", plural(n, "frame")),
        },
        COLUMNS,
    );
    text + &format!("Saved: {}.\n", bytes(u64::try_from(saved).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_has_groups_and_common_frames() {
        let group = Group {
            name: "acme\u{1b}".into(),
            members: 2,
            other_processes: 1,
            figures: [1024, 256, 512, 256, 0],
            saved_bytes: 1 << 20,
        };
        let clean = Audit { groups: vec![group.clone()], frames_checked: 1024, ..Audit::default() };
        assert_eq!(
            text(&clean),
            "\
Groups by their page frames, in MiB
group  members  others  frames  shared  folded  pool  broken  saved
acme?        2       1     4.0     1.0     2.0   1.0       0    1.0

1,024 frames checked: no two groups have any in common.
Saved: 1.0 MiB.
"
        );
        let group = Group { saved_bytes: -4096, ..group };
        let crossed =
            Audit { groups: vec![group], cross_group_frames: 1, crossings: vec!["frame 0x7: ...".into()], ..clean };
        let text = text(&crossed);
        assert!(text.contains("frame 0x7") && text.contains("groups have 1 frame in COMMON"), "{text}");
        assert!(text.contains("-<0.1") && text.ends_with("Saved: 0.\n"), "{text}");
    }
}
