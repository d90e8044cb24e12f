//! Members whose agent is not connected, and the reason as far as their process shows it.

use api::ask::MemberLine;
use api::control::{GroupReport, MemberReport};
use host::{Mapping, Process};

/// File name of the agent's library.
const LIBRARY: &str = "libpagefold.so";
/// State of a member whose agent is not connected.
const NO_AGENT: &str = "no_agent";

/// Gives each member of the group whose agent is not connected a row with the reason.
pub fn add_absent(report: &mut GroupReport, group: &str, members: &[MemberLine]) {
    for member in members.iter().filter(|m| m.group == group) {
        let pid = member.identity.pid;
        if report.members.iter().any(|m| m.pid == pid && m.connected) {
            continue;
        }
        let row = MemberReport { name: member.identity.name.clone(), pid, ..MemberReport::default() };
        let (state, detail) = (NO_AGENT.to_owned(), why_absent(pid));
        match report.members.iter_mut().find(|m| m.pid == pid) {
            Some(known) => (known.state, known.detail) = (state, detail),
            None => report.members.push(MemberReport { state, detail, ..row }),
        }
    }
}

/// The reason why a process has no connected agent.
pub fn why_absent(pid: u32) -> String {
    let Ok(mappings) = Mapping::list(pid) else {
        return "its process has ended, or you may not look at it".to_owned();
    };
    let is_loaded = mappings.iter().any(|m| m.name.trim_end_matches(" (deleted)").ends_with(LIBRARY));
    if is_loaded {
        return "its agent is there, and has yet to connect: see the log of pagefold serve".to_owned();
    }
    let program = Process::read(pid).ok().and_then(|process| process.exe);
    let program = program.map_or_else(String::new, |path| format!(" ({})", path.display()));
    format!(
        "its program{program} runs without {LIBRARY}: it is linked statically or with another C library, has more rights \
         than its caller, or was executed past the C library by the one before (as Go does)"
    )
}
