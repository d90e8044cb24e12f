//! Output of `pagefold group show`: a group's shared pages, savings and costs, and the state of each member.

use crate::savings_table;
use crate::table::{Align, Table, shorten, wrap};
use api::ask::{PoolLimit, PoolLimitBy};
use api::control::{GroupReport, MemberReport, Settings};
use api::member_words::{STATES, STOPPED, failure, remedy};
use api::shown::KSM;
use cli::size::{bytes, count, mib};
use page::pages_to_bytes;

/// Greatest length of a line of text, in characters.
const COLUMNS: usize = 100;
/// Greatest length of a member's name beside figures, in characters.
const NAME_CHARS: usize = 24;

/// The tables for a group. `words` describe its settings; `limit` is the limit of its pool that applies. Each family of
/// forked members has one line, but for `family`, whose members are shown one by one and alone.
pub fn text(
    name: &str,
    words: &str,
    (settings, limit): (&Settings, &PoolLimit),
    report: &GroupReport,
    family: Option<&str>,
) -> String {
    let mut text = wrap(&format!("{name}: {words}"), COLUMNS);
    text += &format!("\nSaved, in KiB; pagefold audit counts the same from page frames\n{}", savings(limit, report));
    if report.savings.saved_bytes() < 0 {
        text += &wrap(savings_table::NEGATIVE, COLUMNS);
    }
    if let Some(why) = &report.waits_for_room {
        text.push('\n');
        text += &wrap(&format!("Waits for room: {}", cli::printable(why)), COLUMNS);
    }
    if report.no_prover {
        text += "\nThe worker does not reach the prover: slots that were freed are not used again. See the service's log.\n";
    }
    text += &format!("\nWork and costs\n{}", figures(report));
    let shown = match family {
        Some(family) => report.members.iter().filter(|m| m.family == family).cloned().collect(),
        None => families(&report.members),
    };
    if !shown.is_empty() {
        text += &format!("\nMembers (pages in MiB, time out of reach in us)\n{}", members(&shown));
        text += &states(name, (settings, (limit, report.slots)), &report.members);
    }
    text
}

/// One row for each family: sums of its members' pages and times, and the longest of their times out of reach.
fn families(members: &[MemberReport]) -> Vec<MemberReport> {
    let mut rows: Vec<MemberReport> = Vec::new();
    for m in members {
        let Some(row) = rows.iter_mut().find(|row| !m.family.is_empty() && row.family == m.family) else {
            rows.push(m.clone());
            continue;
        };
        if m.name == m.family {
            (row.name, row.pid, row.pids) = (m.name.clone(), m.pid, m.pids.clone());
        }
        if m.connected && (m.state == "folding" || !row.connected) {
            (row.state, row.connected) = (m.state.clone(), m.connected);
        }
        // Members report these numbers, and may report any: the sums must not overflow.
        for (sum, more) in [
            (&mut row.enrolled_pages, m.enrolled_pages),
            (&mut row.folded_pages, m.folded_pages),
            (&mut row.zero_pages, m.zero_pages),
            (&mut row.broken_pages, m.broken_pages),
            (&mut row.vmas, m.vmas),
        ] {
            *sum = sum.saturating_add(more);
        }
        row.agent_cpu_s += m.agent_cpu_s;
        row.stall_p50_us = row.stall_p50_us.max(m.stall_p50_us);
        row.stall_p99_us = row.stall_p99_us.max(m.stall_p99_us);
        row.stall_max_us = row.stall_max_us.max(m.stall_max_us);
    }
    rows
}

/// The process of a row, and how many others it stands for.
fn processes(row: &MemberReport) -> String {
    match row.pids.len() {
        0 | 1 => row.pid.to_string(),
        n => format!("{} +{}", row.pid, n - 1),
    }
}

fn savings(limit: &PoolLimit, r: &GroupReport) -> String {
    let pages = |n: u64| bytes(pages_to_bytes(n));
    let idle = if r.idle_slots > 0 { format!("; {} idle", pages(r.idle_slots)) } else { String::new() };
    let by = if limit.by == PoolLimitBy::MembersMemory { " by its members' memory limits" } else { "" };
    let full = if r.no_room.is_some() { "; FULL" } else { "" };
    let notes = [
        "pages of members that map a slot of the pool".into(),
        "given back, and not written since".into(),
        format!("{} in use, of the {} that it may hold{by}{idle}{full}", pages(r.slots), bytes(limit.bytes)),
        format!("worker {}, agents {}", bytes(r.index_bytes), bytes(r.agent_bytes)),
        format!("the kernel's account of {} mappings of members", count(r.vmas)),
    ];
    savings_table::text(&r.savings, notes)
}

fn figures(r: &GroupReport) -> Table {
    let pages = |n: u64| bytes(pages_to_bytes(n));
    let mut table = Table::new(&[("", Align::Left), ("", Align::Right), ("", Align::Left)]);
    let mut row = |what: &str, figure: String, more: String| {
        table.row([what.to_owned(), figure, more]);
    };
    row("broken", pages(r.broken_pages), "written since, and private in place of folded".into());
    let bill = &r.bill;
    let again = [bill.refolds, bill.short_folds].map(count);
    let again = format!("pages; {} of them broken before, {} written again within a minute or so", again[0], again[1]);
    row("folds", count(bill.folds), again);
    let shared: Vec<String> = r.frames.slots_by_sharers.iter().map(|slots| count(*slots)).collect();
    row("slots", count(r.slots), format!("mapped by 0, 1, 2, 3 to 7, 8 and more pages: {}", shared.join(", ")));
    if r.deferred_slots > 0 {
        row("deferred free", pages(r.deferred_slots), "of pool: a process that was a member may still map it".into());
    }
    row(
        "looked at",
        pages(bill.pages_scanned),
        format!("for writes, in all; {} pages fingerprinted", count(bill.pages_hashed)),
    );
    let pass = r.pass_permille.map(|done| format!("a pass of several, {}% done", done / 10));
    let most = r.adaptive_rate.as_ref().map(|now| format!("may be {}", count(now.pages_per_s.into())));
    let notes: Vec<String> = most.into_iter().chain(pass).collect();
    row("scan rate", format!("{} pages/s", count(r.scan_rate)), notes.join("; "));
    if let Some(reason) = r.adaptive_rate.as_ref().map(|now| &now.reason).filter(|reason| !reason.is_empty()) {
        row("", String::new(), format!("since {}", cli::printable(reason)));
    }
    row(
        "processor time",
        format!("{:.1} s", bill.worker_cpu_s + bill.agent_cpu_s),
        format!("workers {:.1} s, agents {:.1} s, in all", bill.worker_cpu_s, bill.agent_cpu_s),
    );
    let mut label = "not folded";
    for (why, pages) in bill.fold_failures.iter().filter(|f| *f.1 > 0) {
        row(label, count(*pages), failure(why).to_owned());
        label = "";
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
        let cells = [shorten(&m.name, NAME_CHARS), processes(m), state].into_iter().chain(pages).chain([
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

/// Explanations and remedies of the states that occur, and the details of members.
fn states(group: &str, (settings, limit): (&Settings, (&PoolLimit, u64)), members: &[MemberReport]) -> String {
    let mut text = String::new();
    for (state, meaning) in STATES {
        if members.iter().any(|m| state_of(m) == state) {
            text += &wrap(&format!("{}: {meaning}.", state.replace('_', " ")), COLUMNS);
            let fix = remedy(state, group, settings, limit);
            // A remedy that members have of their own is printed with each member below.
            let is_common = |m: &MemberReport| state_of(m) == state && (m.fix.is_none() || m.fix == fix);
            let is_shown = members.iter().any(is_common);
            let common = fix.filter(|_| is_shown);
            text += &common.map_or(String::new(), |what| format!("-> {what}\n"));
        }
    }
    if members.iter().any(|m| state_of(m) == GONE) {
        text += &wrap("gone: its agent is not connected; what it holds is held until its process is gone.", COLUMNS);
    }
    for m in members.iter().filter(|m| !m.detail.is_empty()) {
        text += &wrap(&cli::printable(&format!("{}: {}", m.name, m.detail)), COLUMNS);
        let own = m.fix.as_ref().filter(|fix| remedy(&m.state, group, settings, limit).as_ref() != Some(fix));
        text += &own.map_or(String::new(), |fix| format!("-> {fix}\n"));
    }
    if text.is_empty() { text } else { format!("\n{text}") }
}

/// State shown for a member whose agent is not connected any more. It is kept for what its children may still map.
const GONE: &str = "gone";

fn state_of(member: &MemberReport) -> &str {
    if member.connected || ["no_agent", STOPPED, KSM].contains(&member.state.as_str()) { &member.state } else { GONE }
}

#[cfg(test)]
#[path = "group_extreme_tests.rs"]
mod extreme_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use api::control::Bill;
    use page::Savings;

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
        let bill = Bill { fold_failures: failures, ..Bill::default() };
        let (savings, no_room) = (Savings::of(2048, 0, 768, 0, 0), Some("full".to_owned()));
        let waits_for_room = Some("everything is to be unfolded: free memory".to_owned());
        let report = GroupReport {
            members,
            savings,
            no_room,
            waits_for_room,
            bill,
            slots: 700,
            idle_slots: 68,
            ..GroupReport::default()
        };
        let settings = Settings::default();
        let limit = PoolLimit::of(&settings, None);
        let shown = text("acme", "folds", (&settings, &limit), &report, None);
        for words in [
            "acme: folds",
            "= saved       5,120  5.0 MiB",
            "2.7 MiB in use, of the 64.0 GiB that it may hold; 272 KiB idle; FULL",
            "\nWaits for room: everything is to be unfolded: free memory\n",
            "1,234  pages that the kernel would not move: pinned",
            "web",
            "unpinned: something may",
            "-> start it again without what is named",
            "db: opened /mnt/x?[2J",
        ] {
            assert!(shown.contains(words), "{words}\n{shown}");
        }
        let report = GroupReport { savings: Savings::of(0, 0, 1, 0, 0), ..report };
        let limit = PoolLimit::of(&settings, Some(128 << 20));
        let negative = text("acme", "folds", (&settings, &limit), &report, None);
        assert!(negative.contains("of the 128 MiB that it may hold by its members' memory limits"), "{negative}");
        assert!(negative.contains("= saved       -4  -4 KiB\nNegative: folding takes more"), "{negative}");
        assert!(!shown.contains("gone:") && !shown.contains('\u{1b}'), "{shown}");
    }

    #[test]
    fn family_has_one_line_and_can_be_opened() {
        let member = |name: &str, pid, pids: &[u32], folded_pages| MemberReport {
            name: name.into(),
            family: "web".into(),
            pids: pids.to_vec(),
            pid,
            connected: true,
            state: "folding".into(),
            folded_pages,
            ..MemberReport::default()
        };
        let members = vec![member("w-8", 8, &[8], 256), member("web", 7, &[7, 8, 9], 512), member("w-9", 9, &[9], 256)];
        let report = GroupReport { members, ..GroupReport::default() };
        let settings = Settings::default();
        let shown = |family| text("acme", "folds", (&settings, &PoolLimit::of(&settings, None)), &report, family);
        let (sum, open) = (shown(None), shown(Some("web")));
        assert!(sum.contains("7 +2") && sum.contains("4.0") && !sum.contains("w-9"), "{sum}");
        assert!(["w-8", "w-9", "2.0"].iter().all(|words| open.contains(words)), "{open}");
        assert!(!shown(Some("other")).contains("Members"));
    }

    /// A compromised worker may send any number.
    #[test]
    fn numbers_of_a_family_that_have_no_sum_are_shown() {
        for most in [0, 1, 1 << 52, u64::MAX] {
            let member = |name: &str| MemberReport {
                name: name.into(),
                family: "web".into(),
                connected: true,
                enrolled_pages: most,
                folded_pages: most,
                zero_pages: most,
                broken_pages: most,
                vmas: most,
                stall_max_us: most,
                ..MemberReport::default()
            };
            let (slots, frames) = (most, api::control::Frames::default());
            let members = vec![member("web"), member("w-1")];
            let report = GroupReport { members, slots, idle_slots: most, vmas: most, frames, ..GroupReport::default() };
            let settings = Settings::default();
            let shown = text("acme", "folds", (&settings, &PoolLimit::of(&settings, None)), &report, None);
            assert!(shown.contains("web"), "{shown}");
        }
    }
}
