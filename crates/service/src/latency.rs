//! How agents' threads are scheduled, by the `latency` of their group. The service sets that from outside: filters of
//! system calls may forbid it to the member itself.

use super::registry::Registry;
use api::control::Latency;
use host::ThreadCpu;
use rustix::process::Pid;

/// Name of the agent's thread that scans and folds. The thread that follows memory has another name, and is left alone: it
/// answers threads of the member that wait for it.
const THREAD: &str = "pagefold";

impl Registry {
    /// Has the agents of a group's members be scheduled by its settings.
    pub fn schedule_agents(&mut self, group: &str) {
        let latency = self.group(group).settings().latency;
        let members = self.state.members().iter().filter(|member| member.group == group && member.connected);
        members.for_each(|member| schedule_agent(member.identity.pid, latency));
    }
}

/// Has a member's agent be scheduled in this way. An agent of which the kernel refuses that works as it did.
pub fn schedule_agent(pid: u32, latency: Latency) {
    let threads = ThreadCpu::of_process(pid).unwrap_or_default();
    // A program may give a thread of its own that name. It could set that thread's policy, too.
    for thread in threads.into_iter().filter(|thread| thread.name == THREAD && thread.tid != pid) {
        let number = i32::try_from(thread.tid).ok().and_then(Pid::from_raw);
        let _ = number.map(|number| act::set_preempting(Some(number), latency == Latency::Eager));
    }
}
