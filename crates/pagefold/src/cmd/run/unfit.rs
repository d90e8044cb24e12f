//! Programs that run as without Pagefold, because an agent in them would do harm.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
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
    let file = File::open(program).ok()?;
    // Scripts have no tables. So have programs whose tables were cut off: then a name may stand anywhere.
    let names = string_tables(&file).or_else(|| fs::read(program).ok())?;
    let begin_of = |text: &[u8]| SANITIZERS.into_iter().find(|(begin, _)| *begin == text);
    let (_, name) = names.split(|byte| *byte == 0).find_map(begin_of)?;
    Some(format!("it is built with {name}, which looks after its memory by itself; build it without"))
}

/// Beginning of a program of 64 bits, little-endian.
const ELF: &[u8] = b"\x7fELF\x02\x01";
/// Size of a program's header and of a section's, in bytes: `Elf64_Ehdr`, `Elf64_Shdr`.
const HEADER_BYTES: usize = 64;
/// Kind of a section that is a table of names: `SHT_STRTAB`.
const NAMES: u64 = 3;
/// Most bytes of tables that are read: 64 MiB.
const MOST_BYTES: u64 = 64 << 20;

/// A program's tables of symbols' names: the loader's (`.dynstr`) and the linker's (`.strtab`). A runtime's names stand in the first if it
/// is a library, and in the second if it was linked in.
fn string_tables(file: &File) -> Option<Vec<u8>> {
    let mut header = [0; HEADER_BYTES];
    file.read_exact_at(&mut header, 0).ok()?;
    let (size, count) = (number(&header, 0x3a, 2)?, number(&header, 0x3c, 2)?);
    if !header.starts_with(ELF) || size != HEADER_BYTES as u64 || count == 0 {
        return None;
    }
    let mut sections = vec![0; HEADER_BYTES * usize::try_from(count).ok()?];
    file.read_exact_at(&mut sections, number(&header, 0x28, 8)?).ok()?;
    let mut names = Vec::new();
    for section in sections.chunks_exact(HEADER_BYTES) {
        let (at, bytes) = (number(section, 0x18, 8)?, number(section, 0x20, 8)?);
        if number(section, 4, 4)? != NAMES {
            continue;
        }
        let mut table = vec![0; usize::try_from(bytes).ok().filter(|_| bytes <= MOST_BYTES - names.len() as u64)?];
        file.read_exact_at(&mut table, at).ok()?;
        names.append(&mut table);
    }
    Some(names)
}

/// A number of so many bytes.
fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let part = bytes.get(at..at + size)?;
    Some(part.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn runtime_is_told_from_a_text_that_names_it() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (source, program) = (dir.path().join("some.c"), dir.path().join("some"));
        for (text, flags, is_found) in [
            ("const char text[] = \"\\0__asan_init\"; int main(void) { return text[0]; }", &[][..], false),
            ("void __asan_init(void) {} int main(void) { __asan_init(); return 0; }", &[], true),
            ("void __asan_init(void) {} int main(void) { __asan_init(); return 0; }", &["-s", "-rdynamic"], true),
        ] {
            fs::write(&source, text).expect("write a program");
            let built = Command::new("cc").args(flags).arg("-o").arg(&program).arg(&source).status();
            if !built.is_ok_and(|built| built.success()) {
                return eprintln!("skipped: there is no C compiler on this host");
            }
            assert_eq!(by_sanitizer(&program).is_some(), is_found, "{text} {flags:?}");
        }
        fs::write(&program, "#!/bin/sh\0__tsan_init\0").expect("write a script");
        assert!(by_sanitizer(&program).is_some(), "anything else is read as a whole");
    }
}
