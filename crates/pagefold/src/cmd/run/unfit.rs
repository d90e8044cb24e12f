//! Programs that are run without an agent, because an agent in them would do harm.

use object::LittleEndian;
use object::elf::{FileHeader64, SHT_STRTAB, SectionHeader64};
use object::read::ReadCache;
use object::read::elf::{FileHeader, SectionHeader};
use std::fs::{self, File};
use std::path::Path;

/// Sanitizers: the function by which each runtime begins, and its name.
const SANITIZERS: [(&[u8], &str); 4] = [
    (b"__asan_init", "AddressSanitizer"),
    (b"__hwasan_init", "HWAddressSanitizer"),
    (b"__msan_init", "MemorySanitizer"),
    (b"__tsan_init", "ThreadSanitizer"),
];

/// Number of filters of system calls (seccomp) that this process has, and that the program will inherit.
pub fn filters() -> u32 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let count = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"));
    count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// The reason against an agent, if one of `count` filters ends a process for a system call of the agent.
pub fn by_filters(count: u32) -> Option<String> {
    let call = (count > 0).then(act::fatal_call)??;
    Some(format!("a filter of system calls (seccomp) of this process ends programs that call {call}; allow that call"))
}

/// The reason against an agent, if the program has a sanitizer's runtime: it looks after all of the program's memory,
/// and must be loaded before any other library.
pub fn by_sanitizer(program: &Path) -> Option<String> {
    let file = File::open(program).ok()?;
    // Scripts and stripped programs have no such tables. In these, the name may stand anywhere, so the whole file is
    // searched.
    let names = string_tables(&file).or_else(|| fs::read(program).ok())?;
    let begin_of = |text: &[u8]| SANITIZERS.into_iter().find(|(begin, _)| *begin == text);
    let (_, name) = names.split(|byte| *byte == 0).find_map(begin_of)?;
    Some(format!("it is built with {name}, which looks after its memory by itself; build it without"))
}

/// Most bytes of tables that are read: 64 MiB.
const MOST_BYTES: u64 = 64 << 20;

/// A program's tables of symbols' names: the loader's (`.dynstr`) and the linker's (`.strtab`). A runtime's names stand
/// in the first if it is a library, and in the second if it was linked in.
fn string_tables(file: &File) -> Option<Vec<u8>> {
    let file = ReadCache::new(file);
    let header = FileHeader64::<LittleEndian>::parse(&file).ok()?;
    let endian = header.endian().ok()?;
    let sections = header.section_headers(endian, &file).ok().filter(|sections| !sections.is_empty())?;
    let is_table = |section: &&SectionHeader64<_>| section.sh_type(endian) == SHT_STRTAB;
    let tables = || sections.iter().filter(is_table);
    let bytes = tables().try_fold(0_u64, |all, section| all.checked_add(section.sh_size(endian)));
    bytes.filter(|bytes| *bytes <= MOST_BYTES)?;
    let names: Result<Vec<&[u8]>, _> = tables().map(|section| section.data(endian, &file)).collect();
    Some(names.ok()?.concat())
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
