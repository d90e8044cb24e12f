//! A process that shares an attached program's memory (`CLONE_VM`), and that was made later, is no thread: nobody stops it.

use crate::common::supervised::{Installed, signal};
use crate::rig::{CONFIG, Waits, attach, compile_source, detach, member, wait_for_folds, words};
use std::process::Command;
use std::time::{Duration, Instant};

/// An attached program whose memory is folded.
fn folded(installed: &Installed, arguments: &[&str]) -> Waits {
    let program = installed.path("shares_memory");
    compile_source("cc", &[], &program, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/shares_memory.c"));
    let mut shares = Waits::run(Command::new(&program).args(arguments));
    assert_eq!(shares.hear(), "filled\n");
    let pid = shares.pid();
    attach(installed, &pid);
    wait_for_folds(installed, &pid, 1000);
    shares
}

/// The rounds that the process has made which shares memory, and the pages that were wrong.
fn end(shares: &mut Waits) -> [u64; 2] {
    let said = shares.tell("end");
    let numbers = said.split_whitespace().map(|n| n.parse().expect("a number"));
    numbers.collect::<Vec<_>>().try_into().expect("two")
}

/// It writes and discards memory that is folded, broken and folded again meanwhile.
#[test]
fn writes_and_discards_of_process_that_shares_memory_are_not_lost() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut shares = folded(&installed, &[]);
    let other: u32 = shares.tell("begin").trim().parse().expect("a process");
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        assert!(host::ProcessId::of(other).is_ok(), "the process that shares memory has ended");
        std::thread::sleep(Duration::from_millis(100));
    }
    let folds = installed.show("acme")["folds"].as_u64();
    assert!(folds > Some(1000), "{folds:?}");
    let [rounds, wrong] = end(&mut shares);
    eprintln!("{rounds} rounds, {folds:?} folds");
    assert!(rounds > 1000, "{rounds} rounds");
    assert_eq!(wrong, 0, "pages are wrong after {rounds} rounds");
}

/// Each page is discarded again within a second: none can be made private, and nobody said why. The agent tried for ever, and
/// folded nothing more.
#[test]
fn process_that_keeps_another_from_being_detached_is_named_and_that_stays_a_member() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut shares = folded(&installed, &["never-rests"]);
    let other: u32 = shares.tell("begin").trim().parse().expect("a process");
    std::thread::sleep(Duration::from_secs(2));
    let pid = shares.pid();
    let output = installed.pagefold(&["detach", &pid, "--wait", "3"]);
    assert!(words(&output).contains(&format!("process {other} shares its memory")), "{output:?}");
    let until = Instant::now() + Duration::from_secs(300);
    while member(&installed, &pid).is_none() {
        assert!(Instant::now() < until, "it does not become a member again: {}", installed.show("acme"));
        std::thread::sleep(Duration::from_millis(100));
    }
    // The remedy.
    signal(other, "STOP");
    wait_for_folds(&installed, &pid, 1000);
    detach(&installed, &pid);
    signal(other, "CONT");
    let [rounds, wrong] = end(&mut shares);
    assert_eq!(wrong, 0, "pages are wrong after {rounds} rounds");
}
