//! Changes of an attached process after which no agent may stay in it: the program has given up rights, or its threads
//! have ended.

use crate::threads;
use rustix::process::Pid;
use std::fs;

/// Fields of a thread's `status` in `/proc` that show its rights.
const RIGHTS: [&str; 7] = ["Uid", "Gid", "Groups", "CapEff", "NoNewPrivs", "Seccomp", "Seccomp_filters"];

/// Whether the program has other rights than the agent's thread, which keeps the rights that the program had when it
/// was attached. If a program has given up rights, an attacker that takes it over must not find them in the agent's
/// thread. `own` are the agent's threads.
pub fn has_other_rights(pid: u32, agent: Pid, own: &[u64]) -> bool {
    // A first thread that has ended is left out: its `status` shows the rights that it had.
    let leader = Pid::from_raw(pid.cast_signed()).filter(|leader| threads::runs_program(pid, *leader));
    let first_of = |all: Vec<Pid>| programs(pid, all, own).next();
    let Some(program) = leader.or_else(|| first_of(threads::list(pid).ok()?)) else { return false };
    let rights = |thread| {
        let status = fs::read_to_string(threads::of(pid, thread, "status")).ok()?;
        let is_right =
            |line: &&str| RIGHTS.iter().any(|field| line.strip_prefix(field).is_some_and(|rest| rest.starts_with(':')));
        Some(status.lines().filter(is_right).map(str::to_owned).collect::<Vec<_>>())
    };
    matches!((rights(program), rights(agent)), (Some(program), Some(agent)) if program != agent)
}

/// Whether all threads of the program's have ended, so that the agent alone keeps the process.
pub fn is_abandoned(pid: u32, own: &[u64]) -> bool {
    threads::list(pid).is_ok_and(|all| programs(pid, all, own).next().is_none())
}

/// Those of the threads in `all` that are the program's (not the agent's, `own`) and have not ended.
fn programs(pid: u32, all: Vec<Pid>, own: &[u64]) -> impl Iterator<Item = Pid> {
    let is_own = |thread: &Pid| own.contains(&thread.as_raw_nonzero().get().cast_unsigned().into());
    all.into_iter().filter(move |thread| !is_own(thread) && threads::runs_program(pid, *thread))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Subject, wait_for};

    /// Each thread changes a right of its own, by a bare system call, and stays.
    const CHANGES: &str = "
def change(number, *arguments):
    assert raw(number, *arguments) == 0
    say(threading.get_native_id())
    time.sleep(1000)
CHANGES
sys.stdin.read()
os._exit(0)
";

    fn changed(change: &str) -> (Subject, Pid) {
        let work = format!("threading.Thread(target=change, args=({change},), daemon=True).start()");
        let subject = Subject::start(&CHANGES.replace("CHANGES", &work));
        let thread = Pid::from_raw(subject.line().parse().expect("a number")).expect("a thread");
        (subject, thread)
    }

    #[test]
    fn each_right_that_program_gives_up_is_noticed() {
        let (subject, thread) = changed("24");
        assert!(!has_other_rights(subject.pid(), thread, &[]), "it has yielded, and nothing else");
        let mut changes = vec!["157, 38, 1, 0, 0, 0"];
        if rustix::process::geteuid().is_root() {
            // `setresuid`, `setresgid`, `setgroups`, `capset`.
            changes.extend(["117, -1, 1000, -1", "119, -1, 1000, -1", "116, 1, struct.pack('i', 7)"]);
            changes.push("126, struct.pack('Ii', 0x20080522, 0), bytes(24)");
        }
        for change in changes {
            let (subject, thread) = changed(change);
            assert!(has_other_rights(subject.pid(), thread, &[]), "{change}");
        }
    }

    #[test]
    fn process_is_abandoned_when_agents_threads_alone_are_left() {
        let (mut subject, thread) = changed("24");
        let number = |thread: Pid| u64::from(thread.as_raw_nonzero().get().cast_unsigned());
        let (pid, own) = (subject.pid(), [number(thread)]);
        assert!(!is_abandoned(pid, &own));
        assert!(is_abandoned(pid, &[own[0], number(subject.leader())]));
        subject.tell_to_end();
        // All threads stay listed until their end is waited for.
        wait_for("it has ended", || is_abandoned(pid, &own));
    }
}
