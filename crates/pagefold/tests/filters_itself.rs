//! A member that gives itself a filter of system calls while it runs: nothing of it is lost, hangs or is killed. Where the filter
//! forbids what the agent calls, the agent has ended before, unless the kernel refuses the filter.

mod common;

use common::built::Built;
use common::service::{Member, Service, cannot_fold, find_member, folded_pages, until};
use std::fs;

/// Names of the threads of a member's process.
fn threads(member: &Member) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", member.pid())).into_iter().flatten().flatten();
    tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok()).collect()
}

fn has_agent(member: &Member) -> bool {
    threads(member).iter().any(|name| name.starts_with("pagefold"))
}

#[test]
fn filter_that_a_member_gives_itself_does_no_harm() {
    if cannot_fold() {
        return;
    }
    let Some(program) = Built::new("filters_itself.c") else { return };
    let service = Service::start();
    let all = [
        ("all", "allow"),
        ("all", "refused"),
        ("one", "refused"),
        ("all", "thread"),
        ("all", "errno"),
        ("all", "process"),
        ("one", "process"),
    ];
    let start = |(threads, action): &(&str, &str)| {
        let words = [program.program(), threads, action];
        service.run_with("acme", &format!("{threads}-{action}"), &["--all-anonymous"], &words, &[])
    };
    let mut members: Vec<Member> = all.iter().map(start).collect();
    for (member, (_, action)) in members.iter_mut().zip(all) {
        until(120, "a member says what it found", || {
            member.assert_is_well();
            !member.lines().is_empty()
        });
        assert_eq!(member.lines(), ["wrong pages: 0 of its own, 0 of its child"], "{}", member.name);
        if ["allow", "refused"].contains(&action) {
            assert!(has_agent(member), "its agent goes on: {:?}", threads(member));
            assert!(folded_pages(&service.show("acme"), &member.name) > 0);
            continue;
        }
        assert!(!has_agent(member), "{}: its agent has ended: {:?}", member.name, threads(member));
        until(30, "group show says why it is not folded", || {
            let shown = service.show("acme");
            let why = find_member(&shown, &member.name).map(ToString::to_string).unwrap_or_default();
            why.contains("filter of system calls") && folded_pages(&shown, &member.name) == 0
        });
    }
    for mut member in members {
        member.close_input();
        let status = member.end(30);
        assert!(status.success(), "{}: {status}", member.name);
    }
}
