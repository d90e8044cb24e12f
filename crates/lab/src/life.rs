//! Marks that tell a lab's processes from others, and ways to end processes for certain.
//!
//! Every process that a lab starts bears a mark in its environment: the lab's random number and the guest's name. The
//! kernel shows it in `/proc/PID/environ`. So the lab finds a process even if its starter was killed before it could
//! save the pid, and takes no other process for it.

use host::ProcessId;
use std::fs::File;
use std::io::{self, Read};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

const VARIABLE: &str = "PAGEFOLD_LAB";
/// Bytes of an environment that are searched: 2 MiB, the kernel's default bound of arguments and environment together.
const ENVIRONMENT_MAX: usize = 2 << 20;
/// Interval between two checks whether processes have ended: 10 ms.
const STEP: Duration = Duration::from_millis(10);

/// The mark of all processes of a lab, or of one guest: a text in their environment.
#[derive(Clone, Debug)]
pub(crate) struct Mark(String);

impl Mark {
    pub(crate) fn of_guest(token: &str, guest: &str) -> Self {
        Self(format!("{token}/{guest}/"))
    }

    pub(crate) fn of_lab(token: &str) -> Self {
        Self(format!("{token}/"))
    }

    /// Adds the mark to the environment of the process that this command will start. Descendants inherit it.
    pub(crate) fn put_on<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env(VARIABLE, &self.0)
    }

    /// All living processes that bear this mark.
    pub(crate) fn bearers(&self) -> Vec<ProcessId> {
        const LOOKS: usize = 5;
        /// Most attempts to read the environment of a process while the kernel loads its program. That takes little
        /// time, but on a busy host the process may wait long for a processor in the middle of it.
        const LOOKS_WHILE_LOADING: usize = 1000;
        let pids = host::pids().unwrap_or_default().into_iter();
        // The identity is taken before the environment is read. If another process gets the pid in between, the
        // identity is still that of the ended process, and no other process is taken for it.
        let mut unclear: Vec<ProcessId> = pids.filter_map(|pid| ProcessId::of(pid).ok()).collect();
        let mut found = Vec::new();
        for look in 0..LOOKS_WHILE_LOADING {
            unclear.retain(|id| {
                let borne = self.is_borne_by(id);
                found.extend((borne == Some(true)).then_some(*id));
                borne.is_none() && (look < LOOKS || id.stat().is_some_and(|stat| stat.loading))
            });
            if unclear.is_empty() {
                break;
            }
            thread::sleep(STEP);
        }
        found
    }

    /// Whether a process bears this mark. `None` if it has no environment at present, as while the kernel loads its
    /// program.
    fn is_borne_by(&self, id: &ProcessId) -> Option<bool> {
        let Ok(environment) = environment(id.pid) else { return Some(false) };
        if environment.is_empty() && id.stat().is_some_and(|stat| !stat.kernel_thread) {
            return None;
        }
        let wanted = format!("{VARIABLE}={}", self.0);
        Some(environment.split(|byte| *byte == 0).any(|variable| variable.starts_with(wanted.as_bytes())))
    }
}

/// Reads a process's environment by one call: between two calls, the process could execute another program.
fn environment(pid: u32) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; ENVIRONMENT_MAX];
    let count = File::open(format!("/proc/{pid}/environ"))?.read(&mut buffer)?;
    buffer.truncate(count);
    Ok(buffer)
}

/// Waiting times of [`end`]: before processes are asked to end (`SIGTERM`), and from then until they are killed
/// (`SIGKILL`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    pub(crate) before_asking: Duration,
    pub(crate) before_forcing: Duration,
}

/// Ends processes, some of which may be about to end already. Returns those that still live 10 s after `SIGKILL`.
pub(crate) fn end(processes: &[ProcessId], patience: Patience) -> Vec<ProcessId> {
    const AFTER_FORCING: Duration = Duration::from_secs(10);
    let mut left = still_alive(processes.to_vec(), patience.before_asking);
    for id in &left {
        id.terminate();
    }
    left = still_alive(left, patience.before_forcing);
    for id in &left {
        id.kill();
    }
    left = still_alive(left, AFTER_FORCING);
    for id in processes {
        id.collect();
    }
    left
}

/// Waits until the processes have ended, at most for `time`. Returns those that have not.
fn still_alive(mut processes: Vec<ProcessId>, time: Duration) -> Vec<ProcessId> {
    let deadline = Instant::now() + time;
    loop {
        processes.retain(ProcessId::is_alive);
        if processes.is_empty() || Instant::now() >= deadline {
            return processes;
        }
        thread::sleep(STEP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Stdio};

    const BRIEF: Patience = Patience { before_asking: Duration::ZERO, before_forcing: Duration::from_millis(100) };

    /// Starts a marked shell, and waits until it reports that it runs.
    fn start(mark: &Mark, script: &str) -> Child {
        let mut command = Command::new("sh");
        mark.put_on(command.args(["-c", &format!("{script}; echo; exec sleep 60")]).stdout(Stdio::piped()));
        let mut child = command.spawn().expect("start a shell");
        child.stdout.as_mut().expect("a pipe").read_exact(&mut [0]).expect("its line");
        child
    }

    #[test]
    fn mark_finds_its_bearers_and_no_others() {
        let token = format!("life-test-{}", std::process::id());
        let mut one = start(&Mark::of_guest(&token, "acme-1"), ":");
        let mut ten = start(&Mark::of_guest(&token, "acme-10"), ":");
        let pids = |mark: Mark| mark.bearers().iter().map(|id| id.pid).collect::<Vec<_>>();
        assert_eq!(pids(Mark::of_guest(&token, "acme-1")), [one.id()]);
        let mut both = vec![one.id(), ten.id()];
        both.sort_unstable();
        let mut found = pids(Mark::of_lab(&token));
        found.sort_unstable();
        assert_eq!(found, both);
        assert!(end(&Mark::of_lab(&token).bearers(), BRIEF).is_empty());
        assert!(pids(Mark::of_lab(&token)).is_empty());
        assert!(one.wait().is_err() && ten.wait().is_err(), "collected already");
    }

    #[test]
    fn process_is_found_while_it_executes_another_program() {
        let mark = Mark::of_guest(&format!("life-exec-{}", std::process::id()), "changing");
        let script = "exec sh -c \"$0\" \"$0\"";
        let mut command = Command::new("sh");
        mark.put_on(command.args(["-c", script, script]));
        let mut changing = command.spawn().expect("start a shell");
        let missed = (0..100).filter(|_| mark.bearers().is_empty()).count();
        assert!(end(&mark.bearers(), BRIEF).is_empty());
        assert!(changing.wait().is_err(), "collected already");
        assert_eq!(missed, 0);
    }

    #[test]
    fn process_that_ignores_sigterm_is_killed() {
        let mark = Mark::of_guest(&format!("life-deaf-{}", std::process::id()), "deaf");
        let mut deaf = start(&mark, "trap '' TERM");
        let before = Instant::now();
        assert!(end(&mark.bearers(), BRIEF).is_empty());
        assert!(before.elapsed() >= BRIEF.before_forcing);
        assert!(deaf.wait().is_err(), "collected already");
    }
}
