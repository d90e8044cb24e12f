//! How the agent comes to life: the loader calls [`constructor`] before the program's own code runs. A process that was
//! not asked in stays as it would be without us; one that was gets a thread.
//!
//! The thread ([`spawn`]) has a table of file descriptors of its own, so that the program neither sees nor closes what we
//! have open, and forked children do not inherit it.

use crate::thread::{Asked, run};
use crate::{doors, spawn};
use std::ffi::{OsStr, OsString};
use std::panic::catch_unwind;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Where to connect. Set by `pagefold run`, like the others.
const SOCKET: &str = "PAGEFOLD_SOCKET";
/// The process that is asked in, and no other.
const PROCESS: &str = "PAGEFOLD_PID";
/// Set if all private anonymous memory is asked in.
const ALL: &str = "PAGEFOLD_ALL";
/// Mappings that the process may have before no more are spent on folding. Set by whoever wants another bound.
const VMA_BUDGET: &str = "PAGEFOLD_VMA_BUDGET";
/// Set to do without the kernel's noting of writes.
const COMPARE: &str = "PAGEFOLD_COMPARE_FINGERPRINTS";
/// Set to fold what rests although it may not rest for long, as tests do.
const EAGER: &str = "PAGEFOLD_EAGER";
/// What the loader is told by.
const PRELOAD: &str = "LD_PRELOAD";
/// Our name in it.
const LIBRARY: &str = "libpagefold.so";

static ASKED: OnceLock<Asked> = OnceLock::new();

#[used]
// SAFETY: a pointer to a function of the type that the loader calls for every entry of this section.
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

extern "C" fn constructor() {
    // A panic must not leave this function. It would be a bug, and the program is better off without us then.
    let _ = catch_unwind(|| {
        let Some(asked) = asked() else { return };
        doors::init(asked.all_anonymous);
        if ASKED.set(asked).is_ok() {
            start();
        }
    });
}

/// How this very process was asked in, if it was. Takes what asked it out of its environment, so that no child finds it.
fn asked() -> Option<Asked> {
    let socket = std::env::var_os(SOCKET)?;
    let process = std::env::var(PROCESS).ok()?;
    let all_anonymous = std::env::var_os(ALL).is_some();
    let most_vmas = std::env::var(VMA_BUDGET).ok().and_then(|n| n.parse().ok()).unwrap_or_else(half_of_all_vmas);
    let compare_fingerprints = std::env::var_os(COMPARE).is_some();
    let eager = std::env::var_os(EAGER).is_some();
    let preload = std::env::var_os(PRELOAD).unwrap_or_default();
    let names: [&str; 6] = [SOCKET, PROCESS, ALL, VMA_BUDGET, COMPARE, EAGER];
    // SAFETY: constructors run before the program's own code, on the only thread there is.
    names.into_iter().for_each(|name| unsafe { std::env::remove_var(name) });
    match without_us(&preload) {
        // SAFETY: as above.
        Some(others) => unsafe { std::env::set_var(PRELOAD, others) },
        // SAFETY: as above.
        None => unsafe { std::env::remove_var(PRELOAD) },
    }
    (process == std::process::id().to_string()).then(|| Asked {
        socket: PathBuf::from(socket),
        all_anonymous,
        most_vmas,
        compare_fingerprints,
        eager,
    })
}

/// A list of libraries to preload without ours.
fn without_us(preload: &OsStr) -> Option<OsString> {
    let bytes = preload.as_encoded_bytes();
    let others = bytes
        .split(|byte| matches!(byte, b':' | b' '))
        .filter(|name| !name.is_empty() && !name.ends_with(LIBRARY.as_bytes()));
    let joined = others.collect::<Vec<_>>().join(&b':');
    // SAFETY: cut from an `OsStr` at ASCII characters only.
    (!joined.is_empty()).then(|| unsafe { OsString::from_encoded_bytes_unchecked(joined) })
}

/// Half of what the kernel allows: the other half stays the program's own.
fn half_of_all_vmas() -> u64 {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    limit.and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(65530) / 2
}

fn start() {
    // Without it, nothing is folded.
    let _ = spawn::thread(c"pagefold", spawn::STACK_BYTES, || {
        // What is folded needs this thread no more. If it ends by a bug, nothing more is folded, and the worker sees us go.
        let _ = catch_unwind(|| {
            own_files();
            std::panic::set_hook(Box::new(|_| {}));
            if let Some(asked) = ASKED.get() {
                let _ = run(asked);
            }
        });
    });
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
    fn we_take_only_ourselves_out_of_the_list() {
        let left = |list: &str| without_us(OsStr::new(list)).map(|l| l.to_string_lossy().into_owned());
        assert_eq!(left("/usr/lib/libpagefold.so"), None);
        assert_eq!(left("/a/libpagefold.so:/b/libjemalloc.so.2"), Some("/b/libjemalloc.so.2".into()));
        assert_eq!(left("/b/one.so /a/libpagefold.so /c/two.so"), Some("/b/one.so:/c/two.so".into()));
        assert_eq!(left(""), None);
    }
}
