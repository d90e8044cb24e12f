//! Chooses the group of a process that connects, by facts about it that the process cannot choose.
//!
//! ```text
//!   registered by `pagefold run`? ------ yes ----> the group that it was registered for
//!      | no
//!   forked, and no program executed? --- yes ----> the group of the member that forked it, or none
//!      | no
//!   rules of one group fit? ------------ yes ----> that group
//! ```
//!
//! A forked process never joins by a rule. It shares frames with its parent, and with its parent's other children.

use super::group::Group;
use super::state::State;
use api::ask::MemberLine;
use api::control::Identity;
use api::enrol::Via;
use api::name;
use host::{Mapping, PeerProcess, Process, ProcessId, ProcessStat};
use std::collections::BTreeMap;

/// Most members in one family (forked children of a member, their children, and so on): 512, half of the members that a
/// worker serves.
const MOST_CHILDREN: usize = 512;
/// Most generations of parents that are read from `/proc`, from a process up to the member that forked it.
const MOST_GENERATIONS: usize = 8;

/// The member that a process is, or becomes.
///
/// Its registration counts first, then the member that forked it, otherwise the groups' rules. If the rules of two
/// groups fit, the process gets neither.
///
/// # Errors
/// The process belongs to no group, for this reason.
pub fn member_of(peer: &PeerProcess, state: &State, groups: &BTreeMap<String, Group>) -> Result<MemberLine, String> {
    if let Some(member) = state.find(peer.id) {
        if member.family.is_some() && !peer.id.stat().is_some_and(|stat| stat.forked) {
            return Err(format!("process {} was forked by a member, and has executed another program", peer.id.pid));
        }
        if !member.connected {
            check_no_other_pool(peer.id.pid, &member.group, groups)?;
        }
        return Ok(member.clone());
    }
    let pid = peer.id.pid;
    // A stranger may connect all the time. The facts of a process take tens of system calls: they are not read in vain.
    let mut rules = groups.values().flat_map(|group| &group.config.processes);
    if !rules.any(|rule| rule.is_for(peer.uid)) && peer.id.stat().is_some_and(|stat| !stat.forked) {
        return Err(unknown(peer));
    }
    // A process can make readers of its command line wait, so that file of `/proc` is not read.
    let process = Process::read_without_arguments(pid).map_err(|e| e.to_string())?;
    if process.stat.start_ticks != peer.id.start_ticks {
        return Err(format!("process {pid} has ended"));
    }
    let name = name::of_process(process.program(), pid);
    if process.stat.forked {
        let parent = forker(peer.id, |process| state.find(process).cloned()).ok_or_else(|| {
            format!("process {pid} of user {} was forked, and not by a member that still runs its program", peer.uid)
        })?;
        return child_of(&parent, peer, name, state, groups);
    }
    let fits = |group: &&Group| group.config.processes.iter().any(|rule| rule.fits(peer.uid, &process));
    let mut wanted = groups.values().filter(fits).map(|group| &group.name);
    let group = match (wanted.next(), wanted.next()) {
        (Some(group), None) => group,
        (Some(one), Some(other)) => {
            return Err(format!("rules of two groups fit process {pid}: {one} and {other}"));
        }
        _ => return Err(unknown(peer)),
    };
    check_no_other_pool(pid, group, groups)?;
    let identity = Identity { name, pid, started: peer.id.start_ticks };
    Ok(MemberLine {
        group: group.to_owned(),
        identity,
        uid: peer.uid,
        connected: false,
        family: None,
        attached_by: None,
        via: Via::Agent,
        domain: guest::domain_of(&process.cgroups),
    })
}

fn unknown(peer: &PeerProcess) -> String {
    let (pid, uid) = (peer.id.pid, peer.uid);
    format!("process {pid} of user {uid} was not started by `pagefold run`, and no rule fits it")
}

/// The family of a process that is to be attached to a group: the family of the member that forked it; `None` if no
/// member forked it.
///
/// # Errors
/// The process cannot be a member of that group, for this reason.
pub fn family_of(
    process: ProcessId,
    group: &str,
    state: &State,
    groups: &BTreeMap<String, Group>,
) -> Result<Option<String>, String> {
    check_no_other_pool(process.pid, group, groups)?;
    let parent = forker(process, |process| state.find(process).cloned()).filter(|parent| parent.via == Via::Agent);
    match parent {
        Some(parent) if parent.group != group => Err(format!(
            "process {} was forked by a member of group {}, and can join no other",
            process.pid, parent.group
        )),
        Some(parent) => check_siblings(&parent, state).map(Some),
        None => Ok(None),
    }
}

/// The name of the family that a member's forked children belong to: the name of the first member, which nobody forked.
///
/// # Errors
/// The member has too many children that are members.
fn check_siblings(parent: &MemberLine, state: &State) -> Result<String, String> {
    let family = parent.family.clone().unwrap_or_else(|| parent.identity.name.clone());
    let is_sibling = |m: &&MemberLine| m.group == parent.group && m.family.as_ref() == Some(&family);
    if state.members().iter().filter(is_sibling).count() >= MOST_CHILDREN {
        return Err(format!("{MOST_CHILDREN} forked children of member {family} are members already"));
    }
    Ok(family)
}

/// The member that a forked child of a member becomes.
fn child_of(
    parent: &MemberLine,
    peer: &PeerProcess,
    name: String,
    state: &State,
    groups: &BTreeMap<String, Group>,
) -> Result<MemberLine, String> {
    let family = check_siblings(parent, state)?;
    check_no_other_pool(peer.id.pid, &parent.group, groups)?;
    let identity = Identity { name, pid: peer.id.pid, started: peer.id.start_ticks };
    Ok(MemberLine {
        group: parent.group.clone(),
        identity,
        uid: peer.uid,
        connected: false,
        family: Some(family),
        attached_by: None,
        via: Via::Agent,
        domain: None,
    })
}

/// The member that has forked a process, by itself or by forked children in between.
///
/// A process cannot choose its parent, nor whether it counts as forked. When its parent ends, the kernel gives it
/// another parent, which may be a member too (a subreaper, `prctl(2)`). Other programs below this subreaper could then
/// pass for its forked children. So the addresses of stack and program in memory are compared: the kernel drew them at
/// random when the member executed its program, and only forks of that program have the same ones.
fn forker<M>(process: ProcessId, member: impl Fn(ProcessId) -> Option<M>) -> Option<M> {
    let layout = process.stat()?.layout?;
    let is_fork = |stat: &ProcessStat| stat.forked && stat.layout == Some(layout);
    let mut child = process;
    for _ in 0..MOST_GENERATIONS {
        let stat = child.stat().filter(is_fork)?;
        let parent = ProcessId::of(stat.parent).ok()?;
        let parents = parent.stat().filter(|stat| stat.layout == Some(layout))?;
        // The parent's pid is read again after the parent's facts. If it is unchanged, these are facts of the parent,
        // and not of another process with the parent's pid.
        child.stat().filter(|now| now.parent == stat.parent)?;
        if let Some(member) = member(parent) {
            return Some(member);
        }
        if !is_fork(&parents) {
            return None;
        }
        child = parent;
    }
    None
}

/// Refuses a process that maps a file of another group's pool. Such a process was forked by a member of that group, and
/// would bring that group's pages along. A group of another service may have the same name, so the pool's file is
/// compared, too.
fn check_no_other_pool(pid: u32, group: &str, groups: &BTreeMap<String, Group>) -> Result<(), String> {
    // A supervisor without rights cannot read the mappings of another user's process, and has no such member.
    let mappings = match Mapping::list(pid) {
        Err(e) if e.is_denied() => Vec::new(),
        read => read.map_err(|e| format!("the mappings of process {pid} cannot be read: {e}"))?,
    };
    let own = groups.get(group);
    for mapping in &mappings {
        let Some(other) = guest::pool_group(mapping) else { continue };
        if other != group {
            return Err(format!("process {pid} maps the pool of group {other}, and cannot join {group}"));
        }
        if !own.is_some_and(|own| own.may_have_segment(mapping.device, mapping.inode)) {
            return Err(format!(
                "process {pid} maps the pool of another service's group {other}, and cannot join {group}"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, getpid, set_child_subreaper};
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    /// A shell and its descendants. Each waits, and ends with the shell's end of a pipe.
    const FAMILY: &str = "exec 9<> <(:)
        ( echo forked $BASHPID; ( echo grandchild $BASHPID; read -t 60 -u 9 ) & read -t 60 -u 9 ) &
        ( exec bash -c 'echo executed $$; ( echo below $BASHPID; read -t 60 -u 9 ) & read -t 60 -u 9' ) &
        read -t 60 -u 9";

    struct Family(Child, BTreeMap<String, ProcessId>);

    impl Family {
        fn start() -> Self {
            let shell = Command::new("bash").args(["-c", FAMILY]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
            let mut shell = shell.expect("run bash");
            let lines = BufReader::new(shell.stdout.take().expect("a pipe")).lines().take(4);
            let process = |line: String| {
                let (name, pid) = line.split_once(' ').expect("a name and a pid");
                (name.to_owned(), ProcessId::of(pid.parse().expect("a pid")).expect("a process"))
            };
            let all = lines.map(|line| process(line.expect("a line"))).collect();
            Self(shell, all)
        }

        fn is_child_of(&self, name: &str, member: ProcessId) -> bool {
            forker(self.1[name], |process| (process == member).then_some(())).is_some()
        }
    }

    impl Drop for Family {
        fn drop(&mut self) {
            for process in self.1.values() {
                let _ = process.kill();
            }
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn forked_children_are_told_from_executed_programs() {
        let family = Family::start();
        let shell = ProcessId::of(family.0.id()).unwrap();
        let children = ["forked", "grandchild", "executed", "below"].map(|name| family.is_child_of(name, shell));
        assert_eq!(children, [true, true, false, false]);
        assert!(family.is_child_of("below", family.1["executed"]));
        assert!(!family.is_child_of("forked", family.1["executed"]));
        // This process has forked the shell's process, which has executed another program since, so `forked` does not
        // have this process's layout.
        assert!(!family.is_child_of("forked", ProcessId::of(std::process::id()).unwrap()));
        let earlier = ProcessId { start_ticks: shell.start_ticks - 1, ..shell };
        assert!(!family.is_child_of("forked", earlier));
    }

    #[test]
    fn member_has_as_many_children_as_half_of_a_group_and_others_have_their_own() {
        let own = ProcessId::of(std::process::id()).unwrap();
        let [one, other] = ["one", "other"].map(|name| crate::state::member("acme", name, own));
        let child =
            |n: usize| MemberLine { family: Some("one".into()), ..crate::state::member("acme", &n.to_string(), own) };
        let mut children: Vec<_> = (0..MOST_CHILDREN).map(child).collect();
        let of = |parent: &MemberLine, children: &[MemberLine]| check_siblings(parent, &State::of(children.to_vec()));
        assert!(of(&one, &children).is_err_and(|why| why.contains("512 forked children of member one")));
        assert!(of(&children[7], &children).is_err(), "children of children are of the same family");
        assert_eq!(of(&other, &children), Ok("other".to_owned()));
        children.pop();
        assert_eq!(of(&one, &children), Ok("one".to_owned()));
    }

    #[test]
    fn orphan_of_executed_program_is_no_child_of_the_member_that_inherits_it() {
        let family = Family::start();
        let own = ProcessId::of(std::process::id()).unwrap();
        set_child_subreaper(Some(getpid())).unwrap();
        let below = family.1["below"];
        assert!(family.1["executed"].kill());
        let end = Instant::now() + Duration::from_secs(30);
        while below.stat().is_some_and(|stat| stat.parent != own.pid) {
            assert!(Instant::now() < end, "it has no other parent");
            std::thread::sleep(Duration::from_millis(5));
        }
        let stat = below.stat().expect("it lives");
        assert!(stat.forked && stat.parent == own.pid && !family.is_child_of("below", own));
        set_child_subreaper(None::<Pid>).unwrap();
    }
}
