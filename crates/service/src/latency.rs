//! Sets the scheduling policy of agents' threads by the setting `latency` of their group. The service sets it from
//! outside, because a member's own filter of system calls (seccomp) may forbid that.

use super::registry::Registry;
use api::control::Latency;
use host::ThreadCpu;
use rustix::process::Pid;

/// Name of the agent's thread that scans and folds. The thread that follows memory has another name, and is left alone: it
/// answers threads of the member that wait for it.
const THREAD: &str = "pagefold";

impl Registry {
    /// Sets the scheduling policy of the agents of all connected members of a group.
    pub fn schedule_agents(&mut self, group: &str) {
        let latency = self.group(group).settings().latency;
        let members = self.state.members().iter().filter(|member| member.group == group && member.connected);
        members.for_each(|member| schedule_agent(member.identity.pid, latency));
    }
}

/// Sets the scheduling policy of the agent in a member: with `Eager`, its thread preempts others when it wakes. If the
/// kernel refuses, the policy stays as it is.
pub fn schedule_agent(pid: u32, latency: Latency) {
    let threads = ThreadCpu::of_process(pid).unwrap_or_default();
    // A program may give a thread of its own that name. That does no harm: the program could set the thread's policy by
    // itself.
    for thread in threads.into_iter().filter(|thread| thread.name == THREAD && thread.tid != pid) {
        let number = i32::try_from(thread.tid).ok().and_then(Pid::from_raw);
        let _ = number.map(|number| act::set_preempting(Some(number), latency == Latency::Eager));
    }
}
