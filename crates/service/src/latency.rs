//! Sets the scheduling policy of agents' threads by the setting `latency` of their group. The service sets it from
//! outside, because a member's own filter of system calls (seccomp) may forbid that.
//!
//! An agent starts its threads one after the other, and a thread has the policy of the thread that started it. So the
//! policies of a member are set once a second for some time.

use super::registry::Registry;
use api::control::Latency;
use host::ThreadCpu;
use rustix::process::Pid;
use std::time::{Duration, Instant};

/// Name of the agent's thread that scans and folds.
const FOLDS: &str = "pagefold";
/// Name of the agent's thread that follows memory. It always may preempt others: threads of the member wait for its
/// answers.
const FOLLOWS: &str = "pagefold-follow";
/// Time for which policies are set after a member has joined or the setting has changed: 10 s.
const SET_FOR: Duration = Duration::from_secs(10);

/// Members whose threads' policies are still to be set: group, process, and the end of the time for that.
#[derive(Debug, Default)]
pub struct Unscheduled(Vec<(String, u32, Instant)>);

impl Unscheduled {
    /// Adds a member.
    pub fn add(&mut self, group: &str, pid: u32) {
        self.0.retain(|(_, other, _)| *other != pid);
        self.0.push((group.to_owned(), pid, Instant::now() + SET_FOR));
    }
}

impl Registry {
    /// Has the scheduling policies of all connected members of a group set by the group's setting.
    pub fn reschedule(&mut self, group: &str) {
        for member in self.state.members().iter().filter(|member| member.group == group && member.connected) {
            self.unscheduled.add(group, member.identity.pid);
        }
    }

    /// Sets the policies that are to be set. Called once a second.
    pub fn schedule_agents(&mut self, now: Instant) {
        let mut all = std::mem::take(&mut self.unscheduled.0);
        all.retain(|(group, pid, end)| {
            let latency = self.groups.get(group).map(|group| group.settings().latency);
            latency.is_some_and(|latency| schedule_agent(*pid, latency)) && now < *end
        });
        self.unscheduled.0 = all;
    }
}

/// Sets the scheduling policies of the agent's threads in a member. If the kernel refuses, they stay as they are. Returns
/// whether the process has threads.
fn schedule_agent(pid: u32, latency: Latency) -> bool {
    let threads = ThreadCpu::of_process(pid).unwrap_or_default();
    // A program may give threads of its own these names. That does no harm: the program could set their policies by
    // itself.
    for thread in threads.iter().filter(|thread| thread.tid != pid) {
        let preempts = match thread.name.as_str() {
            FOLDS => latency == Latency::Eager,
            FOLLOWS => true,
            _ => continue,
        };
        let number = i32::try_from(thread.tid).ok().and_then(Pid::from_raw);
        let _ = number.map(|number| act::set_preempting(Some(number), preempts));
    }
    !threads.is_empty()
}
