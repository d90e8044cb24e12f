//! Changes of a process after which no agent may stay in it.

use crate::threads;
use rustix::process::Pid;

/// Fields of a thread's `status` that say what it may do.
const RIGHTS: [&str; 4] = ["Uid", "Gid", "Groups", "CapEff"];

/// Whether the program has other rights than the agent's thread, which has those that the program had before. An
/// attacker that takes over a program which has given up rights must not find them in a thread of it.
pub fn has_other_rights(pid: u32, agent: Pid) -> bool {
    let Some(leader) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    let of = |thread, field| threads::status(pid, thread, field);
    RIGHTS.into_iter().any(|field| matches!((of(leader, field), of(agent, field)), (Some(a), Some(b)) if a != b))
}

/// Whether all threads of the program's have ended, so that the agent alone keeps the process.
pub fn is_abandoned(pid: u32, own: &[u64]) -> bool {
    let is_own = |thread: &Pid| own.contains(&thread.as_raw_nonzero().get().cast_unsigned().into());
    threads::list(pid).is_ok_and(|all| all.iter().all(|thread| is_own(thread) || !threads::runs_program(pid, *thread)))
}
