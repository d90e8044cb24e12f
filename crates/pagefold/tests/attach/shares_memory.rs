//! A process that shares an attached program's memory (`CLONE_VM`), and that was made later, is no thread: nobody stops it.

use crate::common::supervised::Installed;
use crate::rig::{CONFIG, Waits, attach, compile_source, wait_for_folds};
use std::process::Command;
use std::time::{Duration, Instant};

/// It writes and discards memory that is folded, broken and folded again meanwhile.
#[test]
fn writes_and_discards_of_process_that_shares_memory_are_not_lost() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let program = installed.path("shares_memory");
    compile_source("cc", &[], &program, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/shares_memory.c"));
    let mut shares = Waits::run(&mut Command::new(&program));
    assert_eq!(shares.hear(), "filled\n");
    let pid = shares.pid();
    attach(&installed, &pid);
    wait_for_folds(&installed, &pid, 1000);
    let other: u32 = shares.tell("begin").trim().parse().expect("a process");
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        assert!(host::ProcessId::of(other).is_ok(), "the process that shares memory has ended");
        std::thread::sleep(Duration::from_millis(100));
    }
    let folds = installed.show("acme")["folds"].as_u64();
    assert!(folds > Some(1000), "{folds:?}");
    let said = shares.tell("end");
    let [rounds, wrong]: [u64; 2] =
        said.split_whitespace().map(|n| n.parse().expect("a number")).collect::<Vec<_>>().try_into().expect("two");
    eprintln!("{rounds} rounds, {folds:?} folds");
    assert!(rounds > 1000, "{rounds} rounds");
    assert_eq!(wrong, 0, "pages are wrong after {rounds} rounds");
}
