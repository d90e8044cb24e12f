//! The choice of a group for a process that connects, by facts that the process did not choose.

use super::config::GroupConfig;
use super::state::State;
use api::ask::MemberLine;
use api::control::Identity;
use api::name;
use host::{Mapping, PeerProcess, Process};

/// The member that a process is, or becomes.
///
/// Its registration counts first, otherwise the groups' rules. If the rules of two groups fit, it gets neither.
///
/// # Errors
/// It belongs to no group, for this reason.
pub fn member_of<'a>(
    peer: &PeerProcess,
    state: &State,
    groups: impl Iterator<Item = (&'a str, &'a GroupConfig)>,
) -> Result<MemberLine, String> {
    if let Some(member) = state.find(peer.id) {
        if !member.connected {
            check_no_other_pool(peer, &member.group)?;
        }
        return Ok(member.clone());
    }
    let pid = peer.id.pid;
    let process = Process::read(pid).map_err(|e| e.to_string())?;
    if process.stat.start_ticks != peer.id.start_ticks {
        return Err(format!("process {pid} has ended"));
    }
    let mut wanted = groups.filter(|(_, config)| config.processes.iter().any(|rule| rule.fits(peer.uid, &process)));
    let group = match (wanted.next(), wanted.next()) {
        (Some((group, _)), None) => group,
        (Some((one, _)), Some((other, _))) => {
            return Err(format!("rules of two groups fit process {pid}: {one} and {other}"));
        }
        _ => {
            return Err(format!(
                "process {pid} of user {} was not started by `pagefold run`, and no rule fits it",
                peer.uid
            ));
        }
    };
    check_no_other_pool(peer, group)?;
    let identity = Identity { name: name::of_process(process.program(), pid), pid, started: peer.id.start_ticks };
    Ok(MemberLine { group: group.to_owned(), identity, uid: peer.uid, connected: false })
}

/// Refuses a process that maps the pool of another group. It is the child of a member there, and would bring that
/// group's pages along.
fn check_no_other_pool(peer: &PeerProcess, group: &str) -> Result<(), String> {
    // Mappings cannot be read of another user's process, which a supervisor without rights has no member of.
    let mappings = Mapping::list(peer.id.pid).unwrap_or_default();
    match mappings.iter().filter_map(guest::pool_group).find(|other| *other != group) {
        Some(other) => Err(format!("process {} maps the pool of group {other}, and cannot join {group}", peer.id.pid)),
        None => Ok(()),
    }
}
