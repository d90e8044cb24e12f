//! Programs that run as without Pagefold, because an agent in them would do harm.

use std::fs;
use std::path::Path;

/// Sanitizers: the function by which each runtime begins, and its name.
const SANITIZERS: [(&[u8], &str); 4] = [
    (b"__asan_init", "AddressSanitizer"),
    (b"__hwasan_init", "HWAddressSanitizer"),
    (b"__msan_init", "MemorySanitizer"),
    (b"__tsan_init", "ThreadSanitizer"),
];

/// Number of filters of system calls (seccomp) that this process has, and that the program will have.
pub fn filters() -> u32 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let count = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"));
    count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// The reason, if one of these filters ends a process for a call of the agent's.
pub fn by_filters(count: u32) -> Option<String> {
    let call = (count > 0).then(act::fatal_call)??;
    Some(format!("a filter of system calls (seccomp) of this process ends programs that call {call}; allow that call"))
}

/// The reason, if the program has a runtime that looks after all of its memory, and must be loaded before any other library.
pub fn by_sanitizer(program: &Path) -> Option<String> {
    let image = fs::read(program).ok()?;
    // As it stands in the table of names that the loader reads.
    let begin_of = |text: &[u8]| SANITIZERS.into_iter().find(|(begin, _)| *begin == text);
    let (_, name) = image.split(|byte| *byte == 0).find_map(begin_of)?;
    Some(format!("it is built with {name}, which looks after its memory by itself; build it without"))
}
