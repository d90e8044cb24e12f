//! The text below the table about the row under the cursor.

use crate::columns::Item;
use crate::frame::{Frame, Group, Member, Process};
use crate::plain::{known, size};
use cli::size::count;

/// Most names of members that the text lists.
const MOST_NAMES: usize = 40;
/// Most pids that the text lists.
const MOST_PIDS: usize = 20;

/// The text about a row, in several lines.
pub fn of(item: Item<'_>, frame: &Frame) -> String {
    match item {
        Item::Group(group) => of_group(group),
        Item::Member(member) => of_member(member, frame),
        Item::Process(process) => of_process(process),
    }
}

/// The text of a member's or process's state: its name, the reason, and the remedy on a line of its own.
fn state(word: &str, reason: &str, fix: Option<&str>) -> String {
    let word = word.replace('_', " ");
    let reason = if reason.is_empty() { String::new() } else { format!(": {reason}") };
    let fix = fix.map_or_else(String::new, |fix| format!("\n-> {fix}"));
    format!("{word}{reason}{fix}")
}

fn of_group(group: &Group) -> String {
    let slots = group.slots_by_sharers.map_or_else(String::new, |slots| {
        format!("; slots mapped by 0, 1, 2, 3 to 7, 8 and more pages: {}", slots.map(count).join("; "))
    });
    let pool = format!("pool {} of {}", known(group.pool_bytes, size), known(group.pool_limit_bytes, size));
    let scanned = known(group.scanned_pages_per_s, count);
    let rate = format!("rate {}, {scanned} pages a second lately", group.settings.scan_rate_words());
    let others = match group.not_attached {
        0 => String::new(),
        n => format!("; {n} not attached, see pagefold group show {}", group.group),
    };
    let name = &group.group;
    format!("{name}: {}\n{pool}{slots}\n{rate}{others}; {}", state(group.state, &group.reason, None), group.service)
}

fn listed<T: ToString>(all: &[T], most: usize) -> String {
    let words: Vec<String> = all.iter().take(most).map(ToString::to_string).collect();
    let more = if all.len() > most { format!(" and {} more", all.len() - most) } else { String::new() };
    format!("{}{more}", words.join(", "))
}

/// Names of the other members that have pages in the same pool.
fn sharers<'a>(member: &Member, frame: &'a Frame) -> Vec<&'a str> {
    let same = |other: &&Member| (&other.service, &other.group) == (&member.service, &member.group);
    let shares = |other: &&Member| other.member != member.member && other.figures.folded_bytes.unwrap_or(0) > 0;
    frame.members.iter().filter(same).filter(shares).map(|other| other.member.as_str()).collect()
}

fn of_member(member: &Member, frame: &Frame) -> String {
    let domain = member.domain.as_ref().map_or_else(String::new, |domain| format!(", domain {domain}"));
    let processes = format!("process {}", listed(&member.pids, MOST_PIDS));
    let balloon = match (member.ram_bytes, member.balloon_bytes) {
        (Some(ram), Some(taken)) => format!("; RAM {}, of which its balloon has {}", size(ram), size(taken)),
        _ => String::new(),
    };
    let with = match member.shares_with {
        0 => format!("shares with nobody of {}", member.group),
        _ => format!("in the pool of {} with {}", member.group, listed(&sharers(member, frame), MOST_NAMES)),
    };
    let state = state(&member.state, &member.reason, member.fix.as_deref());
    format!("{}{domain}, {processes}{balloon}\n{state}\n{with}", member.member)
}

fn of_process(process: &Process) -> String {
    let maps = known(process.vmas, count);
    let [p99, longest] = [process.stall_p99_us, process.stall_max_us].map(|time| known(time, count));
    let of = if process.member == process.name { String::new() } else { format!(", forked by {}", process.member) };
    let state = state(&process.state, &process.reason, process.fix.as_deref());
    format!(
        "{} of {}{of}, process {}, merged by {}\n{state}\n{maps} mappings; pages were out of reach for {p99} us (99 of 100), {longest} us at most",
        process.name,
        process.group,
        process.pid,
        process.via.word()
    )
}
