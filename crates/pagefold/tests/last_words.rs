//! A member whose connection ends and begins again: why is told, and what was counted of it stays.

mod common;

use common::http::{Http, Target};
use common::number;
use common::service::{Member, Service, cannot_fold, folded_pages, member, until};
use std::fs;
use std::path::Path;
use std::process::Command;

/// The highest descriptor of the agent's, which has a table of its own.
fn highest_file_of_agent(pid: u32) -> u32 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("its threads").flatten().map(|entry| entry.path());
    let agents =
        threads.filter(|thread| fs::read_to_string(thread.join("comm")).is_ok_and(|name| name.starts_with("pagefold")));
    let files = agents.flat_map(|thread| fs::read_dir(thread.join("fd")).expect("its files").flatten());
    files.filter_map(|file| file.file_name().to_str()?.parse().ok()).max().expect("some files")
}

/// A member with 400 pages, each of them there twice, from content `first` on.
fn holder(service: &Service, name: &str, first: u64) -> Member {
    let program = Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    let mut member = service.run("acme", name, &[], &[program.to_str().expect("a plain path")]);
    for line in ["alloc x 400", &format!("fill x 0 200 {first}"), &format!("fill x 200 200 {first}"), "mergeable x"] {
        assert_eq!(member.tell(line), "ok");
    }
    member
}

fn stall_max_us(service: &Service, name: &str) -> u64 {
    number(&member(&service.show("acme"), name)["stall_max_us"])
}

/// Both were forgotten when another worker came.
#[test]
fn longest_stall_outlives_a_connection_and_is_a_metric() {
    if cannot_fold() {
        return;
    }
    let service = Service::start_with(Some("[api]\n[[group]]\nname = 'acme-TOKEN'\n"));
    let _member = holder(&service, "a", 1);
    until(60, "it is folded", || folded_pages(&service.show("acme"), "a") == 400);
    until(60, "a stall is told", || stall_max_us(&service, "a") > 0);
    // Nothing more is folded.
    let before = stall_max_us(&service, "a");
    let worker = service.worker_pid("acme").expect("a worker");
    assert!(Command::new("kill").args(["-9", &worker.to_string()]).status().expect("run kill").success());
    until(60, "another worker", || service.worker_pid("acme").is_some_and(|pid| pid != worker));
    until(60, "it is connected again", || folded_pages(&service.show("acme"), "a") == 400);
    assert!(stall_max_us(&service, "a") >= before, "{before}: {}", service.show("acme"));
    let web = Http::at(Target::Unix(service.place().join("api.sock")));
    let metrics = web.try_request("GET", "/metrics", "", "").expect("an answer").body().to_owned();
    let line = metrics.lines().find(|line| line.starts_with("pagefold_member_stall_max_seconds{"));
    let value =
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).unwrap_or_else(|| panic!("{metrics}"));
    assert!((value * 1e6).round() as u64 >= before, "{line:?}");
}

/// Such a member "ended, or closed its connection", and "connected again" all the time.
#[test]
fn agent_that_closes_its_connection_says_why() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let member = holder(&service, "a", 1);
    until(60, "it is folded", || folded_pages(&service.show("acme"), "a") == 400);
    // It may have no more files open than it has: the next worker's pool does not fit beside this one's.
    let (pid, limit) = (member.pid().to_string(), highest_file_of_agent(member.pid()) + 1);
    let limit = format!("--nofile={limit}:{limit}");
    assert!(Command::new("prlimit").args(["--pid", &pid, &limit]).status().expect("run prlimit").success());
    let worker = service.worker_pid("acme").expect("a worker");
    assert!(Command::new("kill").args(["-9", &worker.to_string()]).status().expect("run kill").success());
    let why = format!("member a (pid {pid}) closed its connection: a frame that");
    until(60, "it says why", || service.log().contains(&why));
    assert!(fs::exists(format!("/proc/{pid}")).is_ok_and(|there| there));
}
