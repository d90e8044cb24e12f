//! Forked children of members enrol by themselves, fold, and keep their contents. They are shown as a family.

mod common;

use common::built::Built;
use common::number;
use common::service::{Member, Service, cannot_fold, until};
use serde_json::Value;
use std::time::{Duration, Instant};

const GROUP: &str = "acme";
const WORKERS: u64 = 4;
const MIB: u64 = 40;

/// Members of the family of `server`, as `group show` tells.
fn family(shown: &Value) -> Vec<&Value> {
    let members = shown["members"].as_array().expect("members");
    members.iter().filter(|member| member["family"] == "server" && member["name"] != "server").collect()
}

fn folded_pages(shown: &Value) -> u64 {
    family(shown).iter().map(|member| number(&member["folded_pages"])).sum()
}

fn start(service: &Service, built: &Built, words: &[&str], env: &[(&str, &str)]) -> Member {
    let all: Vec<&str> = [built.program(), "4", "40"].iter().chain(words).copied().collect();
    let member = service.run_with(GROUP, "server", &["--all-anonymous"], &all, env);
    until(60, "all workers have filled their memory", || member.errors().contains("filled"));
    service.set(GROUP, &["--scan-rate", "400000"]);
    member
}

/// Has the workers check their memory for the last time, and end.
fn assert_all_is_well(mut member: Member) {
    member.close_input();
    let found = member.finish(60);
    eprintln!("{found}");
    assert_eq!((number(&found["wrong"]), number(&found["failed"])), (0, 0), "{found}");
    assert!(number(&found["checks"]) >= WORKERS, "{found}");
}

fn workers_fold(words: &[&str]) {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("prefork.c") else { return };
    let service = Service::start();
    let member = start(&service, &built, words, &[]);
    let most = WORKERS * (MIB << 20) / 4096;
    let (mut shown, end) = (service.show(GROUP), Instant::now() + Duration::from_secs(240));
    while folded_pages(&shown) < most * 9 / 10 {
        assert!(Instant::now() < end, "{} of {most} pages are folded: {shown}", folded_pages(&shown));
        std::thread::sleep(Duration::from_millis(200));
        shown = service.show(GROUP);
    }
    eprintln!("{} of {most} pages, {} saved", folded_pages(&shown), cli::bytes(number(&shown["saved_bytes"])));
    assert!(number(&shown["saved_bytes"]) > (WORKERS - 1) * (MIB << 20) * 8 / 10, "{shown}");
    let first = shown["members"].as_array().expect("members").iter().find(|m| m["name"] == "server").expect("server");
    assert_eq!(first["pids"].as_array().map(Vec::len), Some(WORKERS as usize + 1), "{first}");
    let text = |words: &[&str]| {
        let group = service.group(GROUP);
        let output = service.pagefold(&[&["group", "show", &group], words].concat());
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert!(text(&[]).contains(&format!("{} +{WORKERS}", member.pid())), "{}", text(&[]));
    assert!(text(&["--family", "server"]).matches("prefork-").count() >= WORKERS as usize);
    service.assert_audit_is_clean();
    assert_all_is_well(member);
}

#[test]
fn memory_that_workers_take_is_folded() {
    workers_fold(&[]);
}

#[test]
fn memory_that_workers_inherit_and_fill_is_folded() {
    workers_fold(&["before"]);
}

/// As Apache's, which begin as root. The files that an agent needs are root's to open.
#[test]
fn memory_of_workers_that_give_up_roots_rights_is_folded() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root gives up rights");
    }
    workers_fold(&["nobody"]);
}

#[test]
fn children_do_not_enrol_where_they_are_not_to() {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("prefork.c") else { return };
    let service = Service::start();
    let member = start(&service, &built, &[], &[("PAGEFOLD_CHILDREN_AFTER", "never")]);
    std::thread::sleep(Duration::from_secs(5));
    assert!(family(&service.show(GROUP)).is_empty());
    assert_all_is_well(member);
}

/// The `/proc` that such a child sees is its parent's, in which its number is another process's.
#[test]
fn child_in_pid_namespace_without_proc_is_left_alone() {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("namespaces.c") else { return };
    let service = Service::start();
    let env = [("PAGEFOLD_CHILDREN_AFTER", "0.5"), ("PAGEFOLD_EAGER", "1")];
    let mut member = service.run_with(GROUP, "server", &["--all-anonymous"], &[built.program()], &env);
    until(60, "both children are there", || !member.lines().is_empty());
    let pids: Vec<u64> = member.lines()[0].split(' ').map(|pid| pid.parse().expect("a number")).collect();
    let folded = |shown: &Value, pid: u64| {
        let member = family(shown).into_iter().find(|member| number(&member["pid"]) == pid)?;
        Some(number(&member["folded_pages"]))
    };
    service.set(GROUP, &["--scan-rate", "400000"]);
    until(60, "the first child is folded", || folded(&service.show(GROUP), pids[0]).is_some_and(|pages| pages > 1500));
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(folded(&service.show(GROUP), pids[1]), None, "it was forked at the same time");
    member.close_input();
    assert_eq!(number(&member.finish(60)["wrong"]), 0);
}
