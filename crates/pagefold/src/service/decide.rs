//! Which group a process belongs to, by facts that it did not choose.

use super::ask::MemberLine;
use super::config::GroupConfig;
use super::name;
use super::state::State;
use fold::control::Identity;
use host::{Mapping, PeerProcess, Process};

/// Where a process that connects belongs.
///
/// What it was registered as counts first; otherwise the rules of the groups; two groups that both want it get neither.
///
/// # Errors
/// Nowhere, and why.
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

/// A child of another group's member still maps what its parent had folded there, and would bring it along.
fn check_no_other_pool(peer: &PeerProcess, group: &str) -> Result<(), String> {
    // Whose mappings may not be read is another user's, with whom a supervisor without rights has nothing to do.
    let mappings = Mapping::list(peer.id.pid).unwrap_or_default();
    match mappings.iter().filter_map(guest::pool_group).find(|other| *other != group) {
        Some(other) => Err(format!("process {} maps the pool of group {other}, and cannot join {group}", peer.id.pid)),
        None => Ok(()),
    }
}
