//! Reasons that share a state with others: each is named, and so is what ends it.

use crate::common::service::{Service, cannot_fold, find_member, until};
use crate::{fix, until_state};
use std::path::Path;
use std::process::Command;

/// Advises memory, which has a NUMA policy if there is an argument. Says whether it could have one.
const BOUND: &str = "
import ctypes, mmap, sys
memory = mmap.mmap(-1, 64 * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
node, number, bind = ctypes.c_ulong(1), 237, 2
def mbind(): return ctypes.CDLL(None).syscall(number, address, ctypes.c_ulong(64 * 4096), bind, ctypes.byref(node), ctypes.c_ulong(64), 0)
print(len(sys.argv) < 2 or mbind() == 0, flush=True)
memory.madvise(mmap.MADV_MERGEABLE)
sys.stdin.read()
";

#[test]
fn memory_with_a_numa_policy_is_named_and_member_without_it_is_folded() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let bound = service.run("acme", "a", &[], &["python3", "-c", BOUND, "bound"]);
    until(60, "it has a policy or not", || !bound.lines().is_empty());
    if bound.lines()[0] != "True" {
        return eprintln!("skipped: this kernel has no NUMA policies");
    }
    let row = until_state(&service, "a", "not_foldable");
    assert!(row["detail"].as_str().is_some_and(|why| why.contains("a NUMA policy of its own")), "{row}");
    assert!(fix(&row).contains("start it again without what is named"), "{row}");
    let _again = service.run("acme", "b", &[], &["python3", "-c", BOUND]);
    until_state(&service, "b", "folding");
}

/// A program whose every second page has one of 16 contents. With an argument, it forks all the time after a line: each child ends at once.
const FORKS: &str = "
import mmap, os, sys
memory = mmap.mmap(-1, 4096 * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(4096):
    memory[page * 4096:page * 4096 + 8] = (page // 2 % 16 + 1 if page % 2 == 0 else page << 16).to_bytes(8, 'little')
memory.madvise(mmap.MADV_MERGEABLE)
sys.stdin.readline()
print('begins', flush=True)
while len(sys.argv) > 1:
    child = os.fork()
    if child == 0: os._exit(0)
    os.waitpid(child, 0)
sys.stdin.read()
";

#[test]
fn program_that_forks_all_the_time_is_named_and_folded_without() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let detail = |name: &str| {
        let row = find_member(&service.show("acme"), name).cloned().unwrap_or_default();
        row["detail"].as_str().unwrap_or_default().to_owned()
    };
    let folded = |name: &str| {
        let row = find_member(&service.show("acme"), name).cloned().unwrap_or_default();
        row["folded_pages"].as_u64().unwrap_or(0)
    };
    let mut forks = service.run("acme", "a", &[], &["python3", "-c", FORKS, "fork"]);
    until(60, "it is folded", || folded("a") > 1500);
    assert_eq!(forks.tell("fork"), "begins");
    until(60, "it is named", || detail("a").contains("the program forks so often"));
    until(60, "its short runs are private again", || folded("a") < 1000);
    assert!(detail("a").contains("nothing more is folded for "), "{}", detail("a"));
    let mut again = service.run("acme", "b", &[], &["python3", "-c", FORKS]);
    assert_eq!(again.tell("rest"), "begins");
    until(60, "it is folded", || folded("b") > 1500);
    assert_eq!((until_state(&service, "b", "folding")["state"].as_str(), detail("b").as_str()), (Some("folding"), ""));
}

/// A library that starts a thread before the program, if it is told to by the environment.
const EARLY: &str = "
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
static void *sleeps(void *unused) { for (;;) pause(); return unused; }
__attribute__((constructor)) static void early(void)
{
	pthread_t thread;
	if (getenv(\"EARLY\"))
		pthread_create(&thread, 0, sleeps, 0);
}
int early_is_linked;
";

/// A program that needs the library. It maps 400 equal pages, and waits.
const NEEDS_EARLY: &str = "
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
extern int early_is_linked;
int main(void)
{
	char byte, *area = mmap(0, 400 * 4096, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memset(area, 7 + early_is_linked, 400 * 4096);
	while (read(0, &byte, 1) > 0)
		;
	return 0;
}
";

/// Compiles C.
fn compile(dir: &Path, text: &str, words: &[&str]) {
    let source = dir.join("source.c");
    std::fs::write(&source, text).expect("write a source");
    let compiled = Command::new("cc").current_dir(dir).arg("source.c").args(words).output().expect("run cc");
    assert!(compiled.status.success(), "{compiled:?}");
}

#[test]
fn program_whose_library_starts_a_thread_first_is_named_and_folded_without() {
    if cannot_fold() {
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    compile(dir.path(), EARLY, &["-shared", "-fPIC", "-o", "libearly.so"]);
    compile(dir.path(), NEEDS_EARLY, &["-L.", "-learly", "-Wl,-rpath,$ORIGIN", "-o", "program"]);
    let program = dir.path().join("program").to_str().expect("a plain path").to_owned();
    let service = Service::start();
    let _early = service.run("acme", "a", &["--all-anonymous"], &["env", "EARLY=1", &program]);
    let row = until_state(&service, "a", "not_foldable");
    let why = "not all anonymous memory can be asked in: other threads were running before the program's own code";
    assert_eq!(row["detail"], why, "{row}");
    assert!(fix(&row).starts_with("start it again without what is named"), "{row}");
    let _again = service.run("acme", "b", &["--all-anonymous"], &[&program]);
    until_state(&service, "b", "folding");
}
