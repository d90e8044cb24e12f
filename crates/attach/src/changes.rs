//! Changes of a process after which no agent may stay in it.

use crate::threads;
use rustix::process::Pid;
use std::fs;

/// Fields of a thread's `status` that say what it may do.
const RIGHTS: [&str; 7] = ["Uid", "Gid", "Groups", "CapEff", "NoNewPrivs", "Seccomp", "Seccomp_filters"];

/// Whether the program has other rights than the agent's thread, which has those that the program had before. An
/// attacker that takes over a program which has given up rights must not find them in a thread of it.
pub fn has_other_rights(pid: u32, agent: Pid) -> bool {
    let Some(leader) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    let rights = |thread| {
        let status = fs::read_to_string(threads::of(pid, thread, "status")).ok()?;
        let is_right =
            |line: &&str| RIGHTS.iter().any(|field| line.strip_prefix(field).is_some_and(|rest| rest.starts_with(':')));
        Some(status.lines().filter(is_right).map(str::to_owned).collect::<Vec<_>>())
    };
    matches!((rights(leader), rights(agent)), (Some(program), Some(own)) if program != own)
}

/// Whether all threads of the program's have ended, so that the agent alone keeps the process.
pub fn is_abandoned(pid: u32, own: &[u64]) -> bool {
    let is_own = |thread: &Pid| own.contains(&thread.as_raw_nonzero().get().cast_unsigned().into());
    threads::list(pid).is_ok_and(|all| all.iter().all(|thread| is_own(thread) || !threads::runs_program(pid, *thread)))
}
