//! Why a process cannot be attached to, as far as it shows beforehand.

use crate::threads;
use host::{Mapping, Process, ProcessStat};
use rustix::process::Pid;
use std::fs;
use std::io::Read;
use std::time::{Duration, Instant};

/// `ELFCLASS64`, the fifth byte of a program's file.
const CLASS_64: u8 = 2;
/// Beginning of the names of a pool's files, as the kernel shows them.
const POOL: &str = "/memfd:pagefold-";
/// Names of the threads of an agent.
const AGENTS: [&str; 2] = ["pagefold", "pagefold-follow"];

/// Time for a child of vfork to execute a program, after which it counts as one that goes on sharing memory: 500 ms.
const VFORK_TIME: Duration = Duration::from_millis(500);
/// Time between two looks for such a child: 5 ms.
const LOOK: Duration = Duration::from_millis(5);

/// Memory of a process that may be folded, and its threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Bytes of memory that would be enrolled.
    pub enrolled_bytes: u64,
    /// Number of its threads.
    pub threads: usize,
    /// Whether its system calls are filtered (seccomp), which counts for an agent. Its filters are looked at while a thread is
    /// stopped.
    pub is_filtered: bool,
}

/// Looks at a process that ksmd is to merge: one of its threads makes one system call.
///
/// # Errors
/// None of its threads can do that, for this reason.
pub fn check_for_ksm(pid: u32) -> Result<Facts, String> {
    let threads = check_threads(pid, check_traced)?;
    let mappings = Mapping::read_all(pid).map_err(|e| e.to_string())?;
    check_alone(pid)?;
    let enrolled_bytes = foldable_bytes(&mappings, true);
    Ok(Facts { enrolled_bytes, threads: threads.len(), is_filtered: false })
}

/// Looks at a process that is to have an agent.
///
/// # Errors
/// It cannot be attached to, for this reason.
pub fn check(pid: u32, all_anonymous: bool) -> Result<Facts, String> {
    let threads = check_threads(pid, check_thread)?;
    let is_filtered = check_filters(pid, &threads)?;
    check_proc(pid)?;
    let mappings = Mapping::read_all(pid).map_err(|e| e.to_string())?;
    let is_forked = ProcessStat::read(pid).is_ok_and(|stat| stat.forked);
    if mappings.iter().any(|mapping| is_looked_after(mapping) && !(is_forked && is_inherited(mapping))) {
        return Err(
            "a userfaultfd looks after some of its memory: its own, or that of an agent which is there already".into(),
        );
    }
    check_alone(pid)?;
    let enrolled_bytes = foldable_bytes(&mappings, all_anonymous);
    if enrolled_bytes == 0 && !all_anonymous {
        return Err("it has advised no memory to be mergeable (madvise MADV_MERGEABLE): see --all-anonymous".into());
    }
    Ok(Facts { enrolled_bytes, threads: threads.len(), is_filtered })
}

/// Whether a userfaultfd looks after a mapping.
fn is_looked_after(mapping: &Mapping) -> bool {
    [b"um", b"uw", b"ui"].iter().any(|flag| mapping.has_flag(flag))
}

/// Whether a forked child may have a mapping with its userfaultfd from a member: memory that was folded there. The keeper
/// follows it.
fn is_inherited(mapping: &Mapping) -> bool {
    !mapping.shared && mapping.name.starts_with(POOL)
}

/// Checks a process and each of its threads, which are returned.
fn check_threads(pid: u32, check: fn(u32, Pid) -> Result<(), String>) -> Result<Vec<Pid>, String> {
    let process = Process::read_without_arguments(pid).map_err(|e| e.to_string())?;
    if process.stat.kernel_thread {
        return Err("it is a thread of the kernel's, and has no memory of its own".into());
    }
    if matches!(process.stat.state, b'Z' | b'X') {
        return Err("it has ended".into());
    }
    let all = threads::list(pid).map_err(|e| format!("its threads cannot be listed: {e}"))?;
    for thread in &all {
        check(pid, *thread)?;
    }
    check_program(pid)?;
    Ok(all)
}

fn check_alone(pid: u32) -> Result<(), String> {
    check_soon_alone(VFORK_TIME, || shares_memory(pid))
}

/// Gives a child of vfork the time to execute a program. `look` finds a process that shares the memory.
fn check_soon_alone(time: Duration, look: impl Fn() -> Option<u32>) -> Result<(), String> {
    let until = Instant::now() + time;
    while let Some(other) = look() {
        if Instant::now() > until {
            return Err(format!("it shares its memory with process {other}, as a child of vfork does"));
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// Bytes of memory that may be shared: all private anonymous memory, or only what the program has advised.
fn foldable_bytes(mappings: &[Mapping], all_anonymous: bool) -> u64 {
    let is_foldable = |mapping: &&Mapping| {
        !mapping.shared
            && mapping.inode == 0
            && mapping.read
            && mapping.write
            && !mapping.has_flag(b"gd")
            && (mapping.name.is_empty() || mapping.name == "[heap]" || mapping.name.starts_with("[anon:"))
            && (all_anonymous || mapping.has_flag(b"mg"))
    };
    mappings.iter().filter(is_foldable).map(|mapping| mapping.end.0 - mapping.start.0).sum()
}

fn check_traced(pid: u32, thread: Pid) -> Result<(), String> {
    if let Some(tracer) = threads::status(pid, thread, "TracerPid").filter(|tracer| tracer != "0") {
        return Err(format!("process {tracer} traces it (a debugger, strace): a process has one tracer at most"));
    }
    Ok(())
}

fn is_agent(pid: u32, thread: Pid) -> bool {
    fs::read_to_string(threads::of(pid, thread, "comm")).is_ok_and(|name| AGENTS.contains(&name.trim_end()))
}

/// Whether a process has an agent, by the names of its threads. A program can choose those of its own: it keeps an agent away so.
pub fn has_agent(pid: u32) -> bool {
    threads::list(pid).is_ok_and(|all| all.iter().any(|thread| is_agent(pid, *thread)))
}

fn check_thread(pid: u32, thread: Pid) -> Result<(), String> {
    check_traced(pid, thread)?;
    if is_agent(pid, thread) {
        return Err("there is an agent in it already".into());
    }
    Ok(())
}

/// Whether system calls are filtered. The agent's threads get the filters of one thread, and must have no more rights than any.
fn check_filters(pid: u32, all: &[Pid]) -> Result<bool, String> {
    let filters =
        |thread: &Pid| ["Seccomp", "Seccomp_filters", "NoNewPrivs"].map(|field| threads::status(pid, *thread, field));
    // One that has just ended has no status.
    let mut each = all.iter().map(filters).filter(|fields| fields[0].is_some());
    let first = each.next().unwrap_or_default();
    if each.any(|other| other != first) {
        return Err("its threads have different filters of system calls (seccomp)".into());
    }
    Ok(first[0].as_ref().is_some_and(|mode| mode != "0"))
}

fn check_program(pid: u32) -> Result<(), String> {
    let mut head = [0_u8; 5];
    let read = fs::File::open(format!("/proc/{pid}/exe")).and_then(|mut file| file.read_exact(&mut head));
    read.map_err(|e| format!("its program cannot be read: {e}"))?;
    if head[4] == CLASS_64 { Ok(()) } else { Err("it is a program of 32 bits".into()) }
}

/// The agent looks at its process in `/proc`, as its own namespaces show it.
fn check_proc(pid: u32) -> Result<(), String> {
    if host::has_proc(pid) { Ok(()) } else { Err("there is no /proc where it runs".into()) }
}

fn shares_memory(pid: u32) -> Option<u32> {
    let others = host::pids().unwrap_or_default();
    others.into_iter().find(|other| *other != pid && act::share_memory(pid, *other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// A Go program that starts others all the time was refused now and then.
    #[test]
    fn child_of_vfork_that_soon_executes_a_program_is_waited_for() {
        let looks = Cell::new(0);
        let there_for = |number: u32| {
            looks.set(0);
            let look = || {
                looks.set(looks.get() + 1);
                (looks.get() <= number).then_some(7)
            };
            check_soon_alone(Duration::from_millis(50), look)
        };
        assert_eq!(there_for(3), Ok(()));
        let why = there_for(u32::MAX).unwrap_err();
        assert!(why.contains("process 7") && looks.get() > 2, "{why}");
    }
}
