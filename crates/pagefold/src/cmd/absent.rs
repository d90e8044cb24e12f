//! Why a member's agent is not connected, as far as its process shows it.

use host::{Mapping, Process};

/// File name of the agent's library.
const LIBRARY: &str = "libpagefold.so";
/// The reason why a process has no connected agent.
pub fn why_absent(pid: u32) -> String {
    let Ok(mappings) = Mapping::list(pid) else {
        return "its process has ended, or you may not look at it".to_owned();
    };
    let is_loaded = mappings.iter().any(|m| m.name.trim_end_matches(" (deleted)").ends_with(LIBRARY));
    if is_loaded {
        return "its agent is there, and has yet to connect: see the log of pagefold serve".to_owned();
    }
    let program = Process::read(pid).ok().and_then(|process| process.exe);
    let program = program.map_or_else(String::new, |path| format!(" ({})", path.display()));
    format!(
        "its program{program} runs without {LIBRARY}: it is linked statically or with another C library, has more rights \
         than its caller, or was executed past the C library by the one before (as Go does)"
    )
}
