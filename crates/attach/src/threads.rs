//! The threads of a process, and what each of them does at the moment, as the kernel tells.

use crate::mend::Call;
use rustix::io::Errno;
use rustix::process::Pid;
use std::fs;
use std::io;

/// Kernel flags of a thread, in its `stat`: `PF_EXITING`; `PF_IO_WORKER` and `PF_USER_WORKER`.
const EXITING: u64 = 4;
const WORKERS: u64 = 0x10 | 0x4000;

/// Names of the threads of an agent.
const AGENTS: [&str; 3] = ["pagefold", "pagefold-follow", "pagefold-gate"];

/// What a thread does at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// It runs, or would if a processor were free.
    Running,
    /// It sleeps in this system call.
    Call(Call),
    /// It sleeps for another reason, in a page fault for example.
    Other,
}

/// The ids of a process's threads.
///
/// # Errors
/// The process is gone.
pub fn list(pid: u32) -> io::Result<Vec<Pid>> {
    let entries = fs::read_dir(format!("/proc/{pid}/task"))?;
    let number = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse::<i32>().ok();
    Ok(entries.filter_map(number).filter_map(Pid::from_raw).collect())
}

/// Whether a thread runs the program's code. Threads that the kernel made for its own work (`io_uring`, vhost) do not,
/// and threads that are ending will not any more.
pub fn runs_program(pid: u32, thread: Pid) -> bool {
    let stat = match fs::read_to_string(of(pid, thread, "stat")) {
        Ok(stat) => stat,
        Err(e) => return !matches!(Errno::from_io_error(&e), Some(Errno::NOENT | Errno::SRCH)),
    };
    let Some((_, rest)) = stat.rsplit_once(')') else { return false };
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let ended = fields.first().is_none_or(|state| matches!(*state, "Z" | "X"));
    // State, parent, group, session, terminal, its group, flags.
    let flags = fields.get(6).and_then(|flags| flags.parse::<u64>().ok());
    !ended && flags.is_some_and(|flags| flags & (EXITING | WORKERS) == 0)
}

/// Whether a thread has a name of an agent's thread. A program can give its own threads any name.
pub fn is_named_as_agents(pid: u32, thread: Pid) -> bool {
    let name = fs::read_to_string(of(pid, thread, "comm")).unwrap_or_default();
    AGENTS.contains(&name.trim_end())
}

/// Looks what a thread does.
pub fn doing(pid: u32, thread: Pid) -> Doing {
    let text = fs::read_to_string(of(pid, thread, "syscall")).unwrap_or_default();
    if text.trim_end() == "running" { Doing::Running } else { call(&text).map_or(Doing::Other, Doing::Call) }
}

/// The system call in a line of `/proc/PID/task/TID/syscall`: its number, six arguments, stack pointer and instruction
/// pointer. `None` if the thread sleeps outside a call.
fn call(line: &str) -> Option<Call> {
    let (number, rest) = line.trim_end().split_once(' ')?;
    let number = number.parse().ok().filter(|number| *number >= 0)?;
    let mut words = rest.split_ascii_whitespace().map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16));
    let mut next = || words.next()?.ok();
    let arguments = [next()?, next()?, next()?, next()?, next()?, next()?];
    Some(Call { number, arguments, place: [next()?, next()?] })
}

/// Whether a thread sleeps in a way that a signal ends. One that waits for a disk does not.
pub fn is_interruptible(pid: u32, thread: Pid) -> bool {
    let stat = fs::read_to_string(of(pid, thread, "stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('S'))
}

/// Whether a thread's system calls are filtered (seccomp).
pub fn is_filtered(pid: u32, thread: Pid) -> bool {
    status(pid, thread, "Seccomp").is_some_and(|mode| mode != "0")
}

/// A thread's id in its own PID namespace.
pub fn inner(pid: u32, thread: Pid) -> Option<u64> {
    status(pid, thread, "NSpid")?.split_ascii_whitespace().last()?.parse().ok()
}

/// A field of a thread's `status`.
pub fn status(pid: u32, thread: Pid, field: &str) -> Option<String> {
    let [value] = statuses(pid, thread, [field])?;
    value
}

/// Fields of a thread's `status`, all of one moment.
pub fn statuses<const N: usize>(pid: u32, thread: Pid, fields: [&str; N]) -> Option<[Option<String>; N]> {
    let text = fs::read_to_string(of(pid, thread, "status")).ok()?;
    let value = |line: &str, field| Some(line.strip_prefix(field)?.strip_prefix(':')?.trim().to_owned());
    Some(fields.map(|field| text.lines().find_map(|line| value(line, field))))
}

/// The path of a thread's file below `/proc`.
pub fn of(pid: u32, thread: Pid, file: &str) -> String {
    format!("/proc/{pid}/task/{}/{file}", thread.as_raw_nonzero())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_of_sleeping_thread_is_read() {
        let line = "232 0x4 0x7ffd 0x1 0x12c 0x0 0x8 0x7ffd5ce8dcd0 0x7f24993c3aec\n";
        let found = call(line).unwrap();
        assert_eq!((found.number, found.arguments), (232, [4, 0x7ffd, 1, 0x12c, 0, 8]));
        assert_eq!(found.place, [0x7ffd_5ce8_dcd0, 0x7f24_993c_3aec]);
        assert_eq!(call("-1 0x7ffd5ce8dcd0 0x7f24993c3aec"), None);
        assert_eq!(call("232 0x4"), None);
    }
}
