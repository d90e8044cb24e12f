//! Why a member's agent does nothing, as far as its process shows it.

use api::member_words::START_ITSELF;
use api::shown::Look;
use host::{Mapping, Process, ProcessStat};
use std::fs;

/// File name of the agent's library.
const LIBRARY: &str = "libpagefold.so";
/// Beginning of the names (`/proc/PID/task/*/comm`) of the agent's threads.
const THREADS: &str = "pagefold";
/// Beginning of the names of valgrind's libraries.
const VALGRIND: &str = "vgpreload_";

/// Reasons why a process has no connected agent.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Absent {
    /// The process does not exist, or the caller may not read it.
    Hidden,
    /// The process is stopped; by a debugger, or by a signal.
    Stopped { by_debugger: bool },
    /// The agent's threads run, and have no connection to the service yet.
    Connecting,
    /// The agent's library is loaded, and has no thread.
    Still(Still),
    /// The program runs without the agent's library.
    NotLoaded { program: String },
}

/// Reasons why an agent has no thread. The agent has printed the reason on the program's stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Still {
    Valgrind,
    Filtered,
    NoThread,
}

/// Why a member's process does nothing. For a connected member, the only reason looked for is that its process is
/// stopped; `None` if it is not.
pub fn look(pid: u32, is_connected: bool) -> Option<Look> {
    if is_connected { stopped(pid) } else { Some(absent(pid)) }
}

/// Whether a process is stopped, and how to make it go on; `None` if it is not.
pub fn stopped(pid: u32) -> Option<Look> {
    find_stopped(pid).map(|absent| absent.look(pid))
}

/// The reason why a process has no connected agent.
pub fn absent(pid: u32) -> Look {
    find_stopped(pid).unwrap_or_else(|| find(pid)).look(pid)
}

fn find_stopped(pid: u32) -> Option<Absent> {
    match ProcessStat::read(pid).ok()?.state {
        b'T' => Some(Absent::Stopped { by_debugger: false }),
        b't' => Some(Absent::Stopped { by_debugger: true }),
        _ => None,
    }
}

fn find(pid: u32) -> Absent {
    let Ok(mappings) = Mapping::list(pid) else { return Absent::Hidden };
    if has_agents_thread(pid) {
        return Absent::Connecting;
    }
    let is_loaded = mappings.iter().any(|m| m.name.trim_end_matches(" (deleted)").ends_with(LIBRARY));
    // An agent ends when its process installs a seccomp filter. A program that this process executes then runs without
    // the library.
    if !is_loaded && !is_filtered(pid) {
        let program = Process::read(pid).ok().and_then(|process| process.exe);
        return Absent::NotLoaded {
            program: program.map_or_else(String::new, |path| format!(" ({})", path.display())),
        };
    }
    let is_valgrinds = |m: &Mapping| m.name.rsplit('/').next().is_some_and(|name| name.starts_with(VALGRIND));
    Absent::Still(match () {
        () if mappings.iter().any(is_valgrinds) => Still::Valgrind,
        () if is_filtered(pid) => Still::Filtered,
        () => Still::NoThread,
    })
}

fn has_agents_thread(pid: u32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks.into_iter().any(|task| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with(THREADS))
            // The main thread is skipped: the program itself may have such a name.
            && task.file_name().to_str() != Some(pid.to_string().as_str())
    })
}

/// Whether a thread of the process is under seccomp.
fn is_filtered(pid: u32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks.into_iter().any(|task| {
        let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
        status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() != "0"))
    })
}

impl Absent {
    fn look(&self, pid: u32) -> Look {
        let is_stopped = matches!(self, Self::Stopped { .. });
        let (why, fix) = self.words(pid);
        Look { is_stopped, why, fix }
    }

    /// The reason, and what to do about it.
    fn words(&self, pid: u32) -> (String, String) {
        match self {
            Self::Hidden => {
                ("its process has ended, or you may not look at it".into(), "ask as root, or start it again".into())
            }
            Self::Stopped { by_debugger: true } => {
                ("a debugger has stopped it".into(), "let the debugger go on with it".into())
            }
            Self::Stopped { by_debugger: false } => ("a signal has stopped it".into(), format!("kill -CONT {pid}")),
            Self::Connecting => (
                "its agent is there, and is not connected".into(),
                "look again in a moment; if this stays, raise its limit of open files (ulimit -n) and start it again, or see \
                 the log of pagefold serve"
                    .into(),
            ),
            Self::Still(still) => still.words(),
            Self::NotLoaded { program } => (
                format!(
                    "its program{program} runs without {LIBRARY}: it is linked statically or with another C library, has \
                     more rights than its caller, or was executed past the C library by the one before (as Go does)"
                ),
                START_ITSELF.into(),
            ),
        }
    }
}

impl Still {
    fn words(self) -> (String, String) {
        let (why, fix) = match self {
            Self::Valgrind => ("valgrind looks after its memory", "start it without valgrind"),
            Self::Filtered => (
                "it has a filter of system calls (seccomp) under which an agent's calls could end it",
                "start it without that filter, or let pagefold run stand behind the filter; see what it writes on stderr",
            ),
            Self::NoThread => (
                "at its start it could have no thread more: its limit of processes was reached (pids.max, ulimit -u), or \
                 memory was short; or it made way for a filter of system calls that the kernel then refused, or for \
                 capabilities that the program keeps (PR_SET_KEEPCAPS)",
                "raise the limit of its control group or user, and start it again",
            ),
        };
        (format!("its agent keeps still: {why}"), fix.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_says_what_to_do() {
        let still = [Still::Valgrind, Still::Filtered, Still::NoThread].map(Absent::Still);
        let stopped = [true, false].map(|by_debugger| Absent::Stopped { by_debugger });
        let others = [Absent::Hidden, Absent::Connecting, Absent::NotLoaded { program: " (x)".into() }];
        for absent in still.iter().chain(&stopped).chain(&others) {
            let (file, name) = test_of(absent);
            let text = fs::read_to_string(format!("{}/tests/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap();
            assert!(text.contains(&format!("fn {name}() {{")), "{file} has no test {name}");
        }
        let all: Vec<Look> = still.iter().chain(&stopped).chain(&others).map(|absent| absent.look(7)).collect();
        for (n, look) in all.iter().enumerate() {
            assert!(!look.why.is_empty() && !look.fix.is_empty(), "{look:?}");
            assert!(all[..n].iter().all(|other| other.why != look.why), "{look:?}");
        }
        assert_eq!(all.iter().filter(|look| look.is_stopped).count(), 2);
        assert_eq!(all[4].fix, "kill -CONT 7");
    }

    /// The whole-program test that causes a reason, and ends it by its remedy: a file of `tests`, and a name.
    const fn test_of(absent: &Absent) -> (&'static str, &'static str) {
        let other = "reasons/without_agent.rs";
        match absent {
            Absent::Hidden => (other, "member_that_may_not_be_looked_at_is_so_for_others_than_root"),
            Absent::Stopped { by_debugger: true } => (other, "debugger_is_named_until_it_lets_the_member_go_on"),
            Absent::Stopped { by_debugger: false } => ("reasons/main.rs", "stopped_member_says_so_until_it_goes_on"),
            Absent::Connecting => (other, "limit_of_open_files_is_named_and_raised"),
            Absent::Still(Still::Valgrind) => (other, "valgrind_is_named_and_the_program_folded_without"),
            Absent::Still(Still::Filtered) => (other, "filter_of_system_calls_is_named_and_the_program_folded_without"),
            Absent::Still(Still::NoThread) => ("reasons/main.rs", "limit_of_processes_is_named_and_raised"),
            Absent::NotLoaded { .. } => {
                (other, "program_without_the_library_is_named_and_folded_when_it_is_started_itself")
            }
        }
    }

    #[test]
    fn process_without_library_and_gone_one_are_told_apart() {
        assert_eq!(find(u32::MAX), Absent::Hidden);
        let own = find(std::process::id());
        assert!(matches!(own, Absent::NotLoaded { .. }), "{own:?}");
    }
}
