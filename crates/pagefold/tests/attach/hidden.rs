//! Processes that the kernel hides from their own user, and what that user must not learn.

use crate::common::supervised::{Installed, wait_for_within};
use crate::rig::{CONFIG, Running, Waits, attach, cycle, detach, mappings, member, own_in_pool, wait_for_folds, words};
use host::{Mapping, Pagemap};
use rustix::process::Pid;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The kernel hides it from its own user: that may open neither its page table, nor anything else that shows its memory.
#[test]
fn program_that_gave_up_roots_rights_is_folded_and_left_as_it_was_before() {
    let Some(installed) = Installed::attaching() else { return };
    let mut supervisor = installed.serve(CONFIG, &[]);
    let mut waits = Waits::start_with(&installed, &[], &["give-up-root"]);
    waits.tell("stop");
    assert_eq!(host::Visibility::of(waits.pid).unwrap(), host::Visibility::RootSinceGivenUp);
    waits.tell("go");
    cycle(&installed, &mut waits, 2);
    // A further supervisor knows it, too. To fold again what was broken, and to leave, takes proofs of the prover's.
    attach(&installed, &waits.pid());
    wait_for_folds(&installed, &waits.pid(), 1000);
    supervisor.kill();
    drop(supervisor);
    let _supervisor = installed.serve(CONFIG, &[]);
    let broken = waits.break_enough();
    wait_for_within(Duration::from_secs(120), "most of it is folded again", || {
        (own_in_pool(waits.pid) < broken / 2).then_some(())
    });
    detach(&installed, &waits.pid());
    assert!(!mappings(waits.pid).iter().any(|mapping| mapping.contains("pagefold")));
}

/// Page tables that threads of a process have open, in whatever table of files. A thread may end meanwhile.
fn page_tables_of(pid: u32) -> Vec<Pagemap> {
    let mut all = Vec::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task")).expect("its threads").flatten() {
        let tid = thread.file_name().to_str().and_then(|text| text.parse().ok()).and_then(Pid::from_raw);
        for file in fs::read_dir(thread.path().join("fd")).into_iter().flatten().flatten() {
            let is_one = fs::read_link(file.path()).is_ok_and(|target| target.ends_with("pagemap"));
            let number = file.file_name().to_str().and_then(|text| text.parse().ok()).filter(|_| is_one);
            all.extend(number.map(|number| act::file_of_thread(tid.expect("a thread"), number).expect("its file")));
        }
    }
    all.into_iter().map(Pagemap::handed).collect()
}

/// Its user must not learn from it where the host has which page.
#[test]
fn page_table_that_agent_was_given_shows_no_frame_numbers() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    for arguments in [&[][..], &["give-up-root"]] {
        let mut waits = Waits::start_with(&installed, &[], arguments);
        waits.tell("stop");
        waits.tell("go");
        attach(&installed, &waits.pid());
        wait_for_folds(&installed, &waits.pid(), 1000);
        let all = Mapping::read_all(waits.pid).expect("its mappings");
        let end = all.iter().find(|mapping| mapping.name == "[stack]").expect("a stack").end;
        let place = page::HostVirt(end.0 - 4096);
        let frame = |table: &Pagemap| {
            let mut entries = Vec::new();
            table.read(place, 1, &mut entries).expect("its page table");
            assert!(entries[0].present(), "{arguments:?}");
            entries[0].pfn()
        };
        assert!(frame(&Pagemap::open(waits.pid).expect("its page table")).is_some());
        let tables = page_tables_of(waits.pid);
        assert!(!tables.is_empty(), "{arguments:?}");
        assert!(tables.iter().all(|table| frame(table).is_none()), "{arguments:?}");
        detach(&installed, &waits.pid());
        assert!(page_tables_of(waits.pid).is_empty());
    }
}

/// As `ssh-agent` and `gpg-agent` ask for, and as programs are that have more rights than their user.
#[test]
fn process_that_is_hidden_from_its_user_for_another_reason_is_refused() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let as_user = ["--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c"];
    let hides =
        "import ctypes, time; assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0; print(flush=True); time.sleep(600)";
    let mut child = Command::new("setpriv");
    let mut child = Running(child.args(as_user).arg(hides).stdout(Stdio::piped()).spawn().expect("setpriv"));
    assert_eq!(BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut String::new()).unwrap(), 1);
    let refused = |more: &[&str]| {
        let pid = child.0.id().to_string();
        let output = installed.pagefold(&[&["attach", &pid, "--group", "acme", "--all-anonymous"], more].concat());
        assert!(!output.status.success(), "{output:?}");
        words(&output)
    };
    for said in [refused(&[]), refused(&["--dry-run"])] {
        assert!(said.contains("not because it gave up root's rights"), "{said}");
    }
    assert!(member(&installed, &child.0.id().to_string()).is_none());
}
