//! Detaching from a program that has locked its memory, while somebody else holds pages of that.

use crate::common::json_of;
use crate::common::supervised::Installed;
use crate::rig::{CONFIG, Waits, attach, compile_source, wait_for_folds};
use host::{Mapping, PageRange, ProcessMemory};
use page::PAGE_BYTES;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Most pages that are read again and again: 64.
const READ_PAGES: u64 = 64;
/// Time for which they are: 3 s. The agent tries each piece of memory some ten times a second.
const READ_FOR: Duration = Duration::from_secs(3);

/// Pages of the process that map the pool.
fn pooled(pid: u32) -> PageRange {
    let all = Mapping::read_all(pid).expect("its mappings");
    let pages = |mapping: &Mapping| (mapping.end.0 - mapping.start.0) / PAGE_BYTES as u64;
    let pooled = all.iter().filter(|mapping| mapping.name.contains("pagefold-acme"));
    let largest = pooled.max_by_key(|mapping| pages(mapping)).expect("a mapping of the pool");
    PageRange { start: largest.start, pages: pages(largest).min(READ_PAGES) }
}

/// Reads pages, which the kernel pins for it, until it is `over`.
fn read_until(pid: u32, range: PageRange, over: &AtomicBool) {
    let memory = ProcessMemory::open(pid).expect("its memory");
    let mut bytes = vec![0; range.pages as usize * PAGE_BYTES];
    while !over.load(Ordering::Relaxed) {
        // A page may be out of the address space for a moment.
        let _ = memory.read_unshared(&[range], &mut bytes);
    }
}

/// A page that somebody holds stays for the time being. Locked again while writers were kept out of it, it kept the agent waiting
/// for ever.
#[test]
fn locked_memory_that_somebody_reads_is_left_once_nobody_does() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let program = installed.path("locked");
    compile_source("cc", &[], &program, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/locked.c"));
    let mut locked = Waits::run(&mut Command::new(&program));
    let pid = locked.pid();
    attach(&installed, &pid);
    wait_for_folds(&installed, &pid, 1000);
    assert_eq!(locked.tell("all"), "ok\n");
    let (range, over, number) = (pooled(locked.pid), AtomicBool::new(false), locked.pid);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| read_until(number, range, &over));
        }
        let detaching = scope.spawn(|| installed.pagefold(&["detach", &pid, "--json", "--wait", "60"]));
        thread::sleep(READ_FOR);
        over.store(true, Ordering::Relaxed);
        json_of(&detaching.join().expect("a thread that detaches"));
    });
    assert_eq!(locked.tell("check"), "ok\n");
}
