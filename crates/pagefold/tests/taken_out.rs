//! `pagefold detach` of programs that `pagefold run` has started: the program goes on without an agent, and loses nothing.

mod common;

use common::member::Member;
use common::service::{Service, cannot_fold, torture, until};
use common::{json_of, number};
use host::Mapping;
use serde_json::json;
use std::fs;

/// Threads of an agent's in a process, and its mappings of a pool.
fn agents_and_pools(pid: u32) -> (usize, usize) {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").flatten();
    let is_agents = |thread: &fs::DirEntry| {
        fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name.starts_with("pagefold"))
    };
    let mappings = Mapping::list(pid).expect("its mappings");
    let pools = mappings.iter().filter(|mapping| mapping.name.starts_with("/memfd:pagefold")).count();
    (threads.filter(is_agents).count(), pools)
}

fn is_member(service: &Service, member: &Member) -> bool {
    let shown = service.show("acme");
    shown["members"].as_array().expect("a list").iter().any(|one| number(&one["pid"]) == u64::from(member.pid()))
}

/// Writes and checks all the while.
#[test]
fn program_that_writes_all_the_time_is_taken_out_and_loses_nothing() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let words = ["memory", "--writes", "100000", "--seconds", "5", "--until-input-ends", "--no-children"];
    let [mut one, mut other] = ["one", "other"].map(|name| service.torture("acme", name, &[], &words));
    let sharing = || number(&service.show("acme")["sharing_pages"]);
    until(60, "much is folded", || sharing() > 1000);
    let left = json_of(&service.pagefold(&["detach", &one.pid().to_string(), "--json"]));
    assert_eq!((&left[0]["pid"], &left[0]["group"]), (&json!(one.pid()), &json!(service.group("acme"))), "{left}");
    assert_eq!(agents_and_pools(one.pid()), (0, 0));
    assert!(is_member(&service, &other), "{}", service.show("acme"));
    // Its slots are free when the worker has seen that nobody holds its lease.
    until(60, "nothing of it is left", || !is_member(&service, &one));
    // The other is folded within itself, and the first one stays out.
    until(60, "the other is folded", || sharing() > 100);
    assert_eq!(agents_and_pools(one.pid()), (0, 0));
    let again = service.pagefold(&["detach", &one.pid().to_string()]);
    assert_eq!(again.status.code(), Some(2), "it is no member");
    for member in [&mut one, &mut other] {
        member.assert_is_well();
        member.close_input();
        assert!(number(&member.finish(240)["checked_writes"]) >= 100_000);
    }
}

/// The next program of the process is no member, either, and neither are children that it forks from then on.
#[test]
fn next_program_and_children_of_one_that_was_taken_out_are_no_members() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let torture = torture();
    let script =
        format!("read line; sleep 1000 & echo $!; exec {torture} stable --pages 3000 --classes 100 --writes 0");
    let mut shell = service.run("acme", "shell", &["--all-anonymous"], &["sh", "-c", &script]);
    until(60, "it is a member", || service.show("acme")["members"][0]["connected"] == true);
    json_of(&service.pagefold(&["detach", &shell.pid().to_string(), "--json"]));
    let child: u32 = shell.tell("go").trim().parse().expect("the child's pid");
    until(60, "it is another program", || {
        fs::read_link(format!("/proc/{}/exe", shell.pid())).is_ok_and(|exe| exe.ends_with("torture"))
    });
    std::thread::sleep(std::time::Duration::from_secs(4));
    assert_eq!(service.show("acme")["members"], json!([]));
    assert_eq!((agents_and_pools(shell.pid()), agents_and_pools(child)), ((0, 0), (0, 0)));
}
