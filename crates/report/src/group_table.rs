//! Output of `pagefold group show`: a group's shared pages, savings and costs, and the state of each member.

use crate::table::{Align, Table, shorten, wrap};
use api::control::{GroupReport, MemberReport};
use cli::size::{bytes, count, mib};
use page::pages_to_bytes;

/// Greatest length of a line of text, in characters.
const COLUMNS: usize = 100;
/// Greatest length of a member's name beside figures, in characters.
const NAME_CHARS: usize = 24;

/// The tables for a group; `words` describe its settings.
pub fn text(name: &str, words: &str, report: &GroupReport) -> String {
    let mut text = wrap(&format!("{name}: {words}"), COLUMNS);
    text += &figures(report).to_string();
    if !report.members.is_empty() {
        text += &format!("\nMembers (pages in MiB, time out of reach in us)\n{}", members(&report.members));
        text += &states(&report.members);
    }
    text
}

fn figures(r: &GroupReport) -> Table {
    let pages = |n: u64| bytes(pages_to_bytes(n));
    let mut table = Table::new(&[("", Align::Left), ("", Align::Right), ("", Align::Left)]);
    let mut row = |what: &str, figure: String, more: String| {
        table.row([what.to_owned(), figure, more]);
    };
    row("saved", bytes(r.saved_bytes), "by the engine's account; pagefold audit counts frames".into());
    row("folded", pages(r.sharing_pages), format!("onto {} of pool", pages(r.slots)));
    row("zero pages given back", pages(r.zero_pages), String::new());
    row("broken", pages(r.broken_pages), "written since, and private in place of folded".into());
    row(
        "folds",
        count(r.folds),
        format!(
            "pages; {} of them broken before, {} written again within a minute or so",
            count(r.refolds),
            count(r.short_folds)
        ),
    );
    if r.deferred_slots > 0 {
        row("deferred free", pages(r.deferred_slots), "of pool: a process that was a member may still map it".into());
    }
    row("scanned", pages(r.pages_scanned), format!("{} pages fingerprinted", count(r.pages_hashed)));
    let pass = r.pass_permille.map_or(String::new(), |done| format!("a pass of several, {}% done", done / 10));
    row("scan rate", format!("{} pages/s", count(r.scan_rate)), pass);
    row(
        "processor time",
        format!("{:.1} s", r.worker_cpu_s + r.agent_cpu_s),
        format!("worker {:.1} s, agents {:.1} s", r.worker_cpu_s, r.agent_cpu_s),
    );
    row("tables", bytes(r.index_bytes + r.agent_bytes), format!("{} mappings", count(r.vmas)));
    let failures: Vec<_> =
        r.fold_failures.iter().filter(|f| *f.1 > 0).map(|(why, n)| format!("{} {why}", count(*n))).collect();
    if !failures.is_empty() {
        row("not folded", String::new(), failures.join(", "));
    }
    table
}

fn members(members: &[MemberReport]) -> Table {
    let mut table = Table::new(&[
        ("member", Align::Left),
        ("process", Align::Right),
        ("state", Align::Left),
        ("enrolled", Align::Right),
        ("folded", Align::Right),
        ("zero", Align::Right),
        ("broken", Align::Right),
        ("agent", Align::Right),
        ("mappings", Align::Right),
        ("p50", Align::Right),
        ("p99", Align::Right),
        ("longest", Align::Right),
    ]);
    for m in members {
        let pages = [m.enrolled_pages, m.folded_pages, m.zero_pages, m.broken_pages].map(|n| mib(pages_to_bytes(n)));
        let state = state_of(m).replace('_', " ");
        let cells = [shorten(&m.name, NAME_CHARS), m.pid.to_string(), state].into_iter().chain(pages).chain([
            format!("{:.1} s", m.agent_cpu_s),
            count(m.vmas),
            count(m.stall_p50_us),
            count(m.stall_p99_us),
            count(m.stall_max_us),
        ]);
        table.row(cells);
    }
    table
}

/// Explanations of the states that occur, and the details of members that do not fold.
fn states(members: &[MemberReport]) -> String {
    let mut text = String::new();
    for (state, meaning) in STATES {
        if members.iter().any(|m| state_of(m) == state) {
            text += &wrap(&format!("{}: {meaning}.", state.replace('_', " ")), COLUMNS);
        }
    }
    if members.iter().any(|m| state_of(m) == GONE) {
        text += &wrap("gone: its agent is not connected; what it holds is held until its process is gone.", COLUMNS);
    }
    for m in members.iter().filter(|m| !m.detail.is_empty()) {
        text += &wrap(&cli::printable(&format!("{}: {}", m.name, m.detail)), COLUMNS);
    }
    if text.is_empty() { text } else { format!("\n{text}") }
}

/// State of a member that is kept for what its children may still map.
const GONE: &str = "gone";

fn state_of(member: &MemberReport) -> &str {
    if member.connected || member.state == "no_agent" { &member.state } else { GONE }
}

/// States of members, with their explanations.
const STATES: [(&str, &str); 11] = [
    ("no_agent", "nothing of it is folded, as no agent of it is connected; what it holds already stays folded"),
    ("nothing_enrolled", "it has no memory yet that it advised to be merged (or --all-anonymous would take)"),
    ("folding", "it folds"),
    ("off", "it was told not to fold"),
    ("unfolded", "it has made all its pages private again, as it was told"),
    ("no_move", "this kernel has no UFFDIO_MOVE, or not for this process"),
    ("unpinned", "something may write its memory that does not pin what it writes, so nothing is folded"),
    ("yielded", "a migration or a snapshot needs the userfaultfd of its memory"),
    ("lost_track", "it changes mappings by system calls of its own, past the C library"),
    ("no_vma", "it has as many mappings as it may spend on folding (vm.max_map_count)"),
    ("broken", "its agent ran into a bug of its own and keeps still: please report it"),
];

/// The explanation of a member's state.
pub fn meaning(state: &str) -> &'static str {
    STATES.iter().find(|s| s.0 == state).map_or("a state that this version does not know", |s| s.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_has_members_that_fold_and_others() {
        let member = |name: &str, state: &str, detail: &str| MemberReport {
            name: name.into(),
            pid: 7,
            connected: true,
            state: state.into(),
            detail: detail.into(),
            enrolled_pages: 256,
            ..MemberReport::default()
        };
        let members =
            vec![member("web", "folding", ""), member("db", "unpinned", "opened /mnt/x\u{1b}[2J with O_DIRECT")];
        let failures = [("busy".to_owned(), 1234), ("gone".to_owned(), 0)].into();
        let report = GroupReport { members, saved_bytes: 5 << 20, fold_failures: failures, ..GroupReport::default() };
        let text = text("acme", "folds", &report);
        for words in
            ["acme: folds", "saved", "5.0 MiB", "1,234 busy", "web", "unpinned: something may", "db: opened /mnt/x?[2J"]
        {
            assert!(text.contains(words), "{words}\n{text}");
        }
        assert!(!text.contains("gone"), "{text}");
        assert!(!text.contains('\u{1b}'));
    }

    #[test]
    fn every_state_is_explained() {
        assert_eq!(meaning("folding"), "it folds");
        assert!(meaning("x").contains("does not know"));
    }
}
