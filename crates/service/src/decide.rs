//! The choice of a group for a process that connects, by facts that the process did not choose.

use super::group::Group;
use super::state::State;
use api::ask::MemberLine;
use api::control::Identity;
use api::name;
use host::{Mapping, PeerProcess, Process};
use std::collections::BTreeMap;

/// The member that a process is, or becomes.
///
/// Its registration counts first, otherwise the groups' rules. If the rules of two groups fit, it gets neither.
///
/// # Errors
/// It belongs to no group, for this reason.
pub fn member_of(peer: &PeerProcess, state: &State, groups: &BTreeMap<String, Group>) -> Result<MemberLine, String> {
    if let Some(member) = state.find(peer.id) {
        if !member.connected {
            check_no_other_pool(peer, &member.group, groups)?;
        }
        return Ok(member.clone());
    }
    let pid = peer.id.pid;
    // Nothing is read that the process could keep this thread waiting for.
    let process = Process::read_without_arguments(pid).map_err(|e| e.to_string())?;
    if process.stat.start_ticks != peer.id.start_ticks {
        return Err(format!("process {pid} has ended"));
    }
    let fits = |group: &&Group| group.config.processes.iter().any(|rule| rule.fits(peer.uid, &process));
    let mut wanted = groups.values().filter(fits).map(|group| &group.name);
    let group = match (wanted.next(), wanted.next()) {
        (Some(group), None) => group,
        (Some(one), Some(other)) => {
            return Err(format!("rules of two groups fit process {pid}: {one} and {other}"));
        }
        _ => {
            return Err(format!(
                "process {pid} of user {} was not started by `pagefold run`, and no rule fits it",
                peer.uid
            ));
        }
    };
    check_no_other_pool(peer, group, groups)?;
    let identity = Identity { name: name::of_process(process.program(), pid), pid, started: peer.id.start_ticks };
    Ok(MemberLine { group: group.to_owned(), identity, uid: peer.uid, connected: false })
}

/// Refuses a process that maps another pool than its group's. It is the child of a member there, and would bring that
/// group's pages along. The group of another service may have the same name, so the file counts too.
fn check_no_other_pool(peer: &PeerProcess, group: &str, groups: &BTreeMap<String, Group>) -> Result<(), String> {
    // Mappings cannot be read of another user's process, which a supervisor without rights has no member of.
    let mappings = Mapping::list(peer.id.pid).unwrap_or_default();
    let own = groups.get(group);
    for mapping in &mappings {
        let Some(other) = guest::pool_group(mapping) else { continue };
        if other != group {
            return Err(format!("process {} maps the pool of group {other}, and cannot join {group}", peer.id.pid));
        }
        if !own.is_some_and(|own| own.may_have_segment(mapping.device, mapping.inode)) {
            return Err(format!(
                "process {} maps the pool of another service's group {other}, and cannot join {group}",
                peer.id.pid
            ));
        }
    }
    Ok(())
}
