//! The start of the agent: the loader calls [`constructor`] before the program's own code runs. `pagefold run` enrols a
//! process by environment variables. An enrolled process gets the agent's thread; any other process stays as it would
//! be without the agent.
//!
//! The thread ([`spawn`]) has a table of file descriptors of its own. So the program neither sees nor closes the
//! agent's files, and forked children do not inherit them.

use crate::{child, debugged, hooks, resign};
use agent::fold::Folder;
use agent::pool::Pool;
use agent::program::Program;
use agent::thread::{Asked, Files, run};
use agent::{give_way, spawn};
use host::Pagemap;
use rustix::io::Errno;
use std::ffi::{CString, OsStr, OsString};
use std::io::Write;
use std::panic::catch_unwind;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use wire::{MemberState, MemberStats};

/// Variable with the path of the socket to connect to. `pagefold run` sets this variable, and those below.
pub const SOCKET: &str = "PAGEFOLD_SOCKET";
/// Variable with the id of the one process that is enrolled.
const PROCESS: &str = "PAGEFOLD_PID";
/// Variable that enrols all private anonymous memory.
const ALL: &str = "PAGEFOLD_ALL";
/// Variable with the number of mappings (VMAs) of the process at which folding stops adding mappings; without it, half
/// of the kernel's limit.
const VMA_BUDGET: &str = "PAGEFOLD_VMA_BUDGET";
/// Variable that makes the agent compare fingerprints instead of having the kernel note writes.
const COMPARE: &str = "PAGEFOLD_COMPARE_FINGERPRINTS";
/// Variable that makes the agent fold every page that has rested, even if it may soon be written again; for tests.
const EAGER: &str = "PAGEFOLD_EAGER";
/// Variable with the seconds after which a forked child enrols; if it is no number, such as `never`, children do not.
const CHILDREN: &str = "PAGEFOLD_CHILDREN_AFTER";
/// Time after which a forked child enrols: 3 s.
const CHILDREN_AFTER: Duration = Duration::from_secs(3);
/// Variable with a kernel's release to assume in place of the running one's, as tests do.
const KERNEL: &str = "PAGEFOLD_KERNEL";
/// Variable with the number of seccomp filters that were found to do no harm; without it, 0.
const FILTERS: &str = "PAGEFOLD_FILTERS";
/// Beginning of the names of valgrind's libraries.
const VALGRIND: &[u8] = b"vgpreload_";
/// Variable that lists the libraries which the loader preloads.
pub const PRELOAD: &str = "LD_PRELOAD";
/// Name of the agent's library in that list.
const LIBRARY: &str = "libpagefold.so";

static ASKED: OnceLock<Asked> = OnceLock::new();

/// A program that the agent was loaded with. The agent stays in it, except as [`resign`] tells.
struct Loaded;

impl Program for Loaded {
    fn why_nothing_is_mapped(&self) -> (MemberState, String) {
        hooks::why_nothing_is_mapped()
    }

    fn be_told_to_leave(&self) {
        resign::be_told_to_leave();
    }

    fn is_leaving(&self) -> bool {
        resign::is_asked()
    }

    fn sleep(&self, time: Duration) {
        resign::sleep(time);
    }

    fn leave(&self, all: &mut Result<Folder, String>, given: (&Pagemap, &Pool), stats: &mut MemberStats) -> bool {
        all.as_mut().map_or(true, |folder| resign::give_up_all(folder, given, stats))
    }
}

#[used]
// SAFETY: a pointer to a function of the type that the loader calls for every entry of this section.
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

extern "C" fn constructor() {
    // A panic must not leave this function. It would be a bug, and the program is then better off without the agent.
    let _ = catch_unwind(|| {
        hooks::search();
        hooks::find_fork();
        let Some(asked) = asked() else { return };
        hooks::init(asked.all_anonymous);
        hooks::set_ways(give_way::unregister, give_way::make_anonymous);
        if ASKED.set(asked).is_ok() {
            start();
        }
    });
}

/// The settings with which this very process was enrolled; `None` if it was not. Removes the variables from the
/// environment, so that no child finds them. The next program that this process executes gets them again
/// ([`hooks::carry`]).
fn asked() -> Option<Asked> {
    let socket = std::env::var_os(SOCKET)?;
    let process = std::env::var(PROCESS).ok()?;
    let all_anonymous = std::env::var_os(ALL).is_some();
    let most_vmas = std::env::var(VMA_BUDGET).ok().and_then(|n| n.parse().ok());
    let compare_fingerprints = std::env::var_os(COMPARE).is_some();
    let eager = std::env::var_os(EAGER).is_some();
    let kernel = std::env::var(KERNEL).unwrap_or_else(|_| host::Kernel::this().release);
    let preload = std::env::var_os(PRELOAD).unwrap_or_default();
    let children_after = match std::env::var(CHILDREN) {
        Ok(text) => text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
        Err(_) => Some(CHILDREN_AFTER),
    };
    let names: [&str; 9] = [SOCKET, PROCESS, ALL, VMA_BUDGET, COMPARE, EAGER, CHILDREN, KERNEL, FILTERS];
    let mut is_enrolled = process == std::process::id().to_string();
    if is_enrolled && let Some(why) = unfit(&preload) {
        // The reason is printed here, because no service can report it: to connect, the agent would need a thread,
        // whose system calls may do the harm.
        let _ = std::io::stderr().write_all(format!("pagefold: this program is not folded: {why}\n").as_bytes());
        is_enrolled = false;
    }
    if is_enrolled && let Some(library) = libraries(&preload).find(|name| is_ours(name)) {
        let set = names.into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        let entry = |(name, value): (&str, OsString)| [name.as_bytes(), b"=", value.as_encoded_bytes()].concat();
        hooks::carry(set.filter_map(|set| CString::new(entry(set)).ok()).collect(), library);
    }
    // SAFETY: constructors run before the program's own code, on the only thread there is.
    names.into_iter().for_each(|name| unsafe { std::env::remove_var(name) });
    match without_us(&preload) {
        // SAFETY: as above.
        Some(others) => unsafe { std::env::set_var(PRELOAD, others) },
        // SAFETY: as above.
        None => unsafe { std::env::remove_var(PRELOAD) },
    }
    is_enrolled.then(|| Asked {
        socket: PathBuf::from(socket),
        all_anonymous,
        most_vmas,
        compare_fingerprints,
        eager,
        kernel,
        children_after,
    })
}

/// The reason why an agent would do harm in this process; `None` if it would not.
fn unfit(preload: &OsStr) -> Option<&'static str> {
    if libraries(preload).any(|name| name.split(|byte| *byte == b'/').any(|part| part.starts_with(VALGRIND))) {
        return Some("valgrind looks after its memory");
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let filters = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"))?;
    let known = std::env::var(FILTERS).unwrap_or_else(|_| "0".into());
    (filters.trim() != known).then_some("it has a filter of system calls (seccomp) that pagefold run did not have")
}

/// A list of libraries to preload, without the agent; `None` if no other is left.
fn without_us(preload: &OsStr) -> Option<OsString> {
    let joined = libraries(preload).filter(|name| !is_ours(name)).collect::<Vec<_>>().join(&b':');
    // SAFETY: cut from an `OsStr` at ASCII characters only.
    (!joined.is_empty()).then(|| unsafe { OsString::from_encoded_bytes_unchecked(joined) })
}

/// The names in a list of libraries to preload.
fn libraries(preload: &OsStr) -> impl Iterator<Item = &[u8]> {
    preload.as_encoded_bytes().split(|byte| matches!(byte, b':' | b' ')).filter(|name| !name.is_empty())
}

fn is_ours(name: &[u8]) -> bool {
    name.ends_with(LIBRARY.as_bytes())
}

fn start() {
    let started = spawn::thread(c"pagefold", spawn::STACK_BYTES, || {
        // Folded pages do not need this thread. If a bug ends it, nothing more is folded, and the worker sees the
        // member go.
        let _ = catch_unwind(|| {
            own_files();
            debugged::note_agent();
            std::panic::set_hook(Box::new(|_| {}));
            if let Some(asked) = ASKED.get() {
                let _ = Files::open(asked).and_then(|files| run(asked, files, false, &Loaded));
                resign::end_as_told();
            }
        });
    });
    if let Err(e) = started {
        // The reason is printed here, because no service can report it. Without an agent's thread, the hooks need not
        // keep the table.
        hooks::rest();
        let why = if e == Errno::NOMEM {
            "memory is short"
        } else {
            "its limit of processes (pids.max, ulimit -u) is reached"
        };
        let _ = std::io::stderr().write_all(format!("pagefold: this program is not folded: {why}\n").as_bytes());
    }
}

/// Longest time that a forked child waits for its agent to open files: 20 ms.
const OPENING_TIME: Duration = Duration::from_millis(20);

/// Time after which forked children of this process enrol; `None` if they do not.
pub fn children_after() -> Option<Duration> {
    ASKED.get().and_then(|asked| asked.children_after)
}

/// Starts the agent's thread in a forked child, and waits until the thread has opened its files: the program may give
/// up its rights next. Then the thread sleeps for some time.
///
/// # Errors
/// Memory is short, or the process has as many threads as it may.
pub fn in_child() -> Result<(), Errno> {
    let are_open = Arc::new(AtomicBool::new(false));
    let opened = Arc::clone(&are_open);
    spawn::thread(c"pagefold", spawn::STACK_BYTES, move || {
        // As in `start`.
        let _ = catch_unwind(|| {
            own_files();
            debugged::note_agent();
            if let (Some(asked), Some(after)) = (ASKED.get(), children_after()) {
                let files = Files::open(asked);
                opened.store(true, Ordering::Release);
                if asked.eager {
                    resign::sleep(after);
                } else {
                    child::wait_until_worth_it(after);
                }
                let _ = files.and_then(|files| run(asked, files, true, &Loaded));
                // Unless a worker told the agent to leave, nothing was folded. Without an agent's thread, the hooks
                // need not keep the table.
                if !resign::end_as_told() {
                    hooks::rest();
                }
            }
        });
    })?;
    let end = Instant::now() + OPENING_TIME;
    while !are_open.load(Ordering::Acquire) && Instant::now() < end {
        std::thread::yield_now();
    }
    Ok(())
}

/// Gives this thread a table of file descriptors of its own, with nothing in it.
fn own_files() {
    const UNSHARE: libc::c_int = 1 << 1;
    // SAFETY: this thread has no descriptor yet, and the table that is emptied is a copy that only it uses.
    let own = unsafe { libc::syscall(libc::SYS_close_range, 0, u32::MAX, UNSHARE) };
    debug_assert_eq!(own, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_agent_is_removed_from_ld_preload() {
        let left = |list: &str| without_us(OsStr::new(list)).map(|l| l.to_string_lossy().into_owned());
        assert_eq!(left("/usr/lib/libpagefold.so"), None);
        assert_eq!(left("/a/libpagefold.so:/b/libjemalloc.so.2"), Some("/b/libjemalloc.so.2".into()));
        assert_eq!(left("/b/one.so /a/libpagefold.so /c/two.so"), Some("/b/one.so:/c/two.so".into()));
        assert_eq!(left(""), None);
    }
}
