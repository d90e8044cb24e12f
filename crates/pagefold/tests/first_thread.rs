//! Programs that end their first thread and go on with others: `/proc/PID` looks as if they had ended.

mod common;

use common::built::Built;
use common::service::{Member, Service, cannot_fold, find_member, folded_pages, until};
use common::supervised::{Installed, wait_for_within};
use common::{json_of, number};
use host::ProcessId;
use serde_json::Value;
use std::process::Command;
use std::time::Duration;

/// Pages of the program, the most of which are folded.
const PAGES: u64 = 2048;
const MOST: u64 = PAGES / 4 * 3;
const GROUP: &str = "acme";

/// Bytes that are resident by `pagefold guests`.
fn resident_bytes(found: &Value) -> u64 {
    number(&found["guests"][0]["rss_bytes"])
}

#[test]
fn member_without_its_first_thread_is_folded_counted_and_audited() {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("first_thread.c") else { return };
    let mut service = Service::start();
    let mut member = service.run_with(GROUP, "one", &["--all-anonymous"], &[built.program()], &[]);
    assert_eq!(member.tell("check"), "ok");
    service.set(GROUP, &["--scan-rate", "400000"]);
    let is_folded = |service: &Service| folded_pages(&service.show(GROUP), "one") >= MOST;
    until(60, "it is folded", || is_folded(&service));

    assert_eq!(member.tell("end"), "ok");
    let process = ProcessId::of(member.pid()).expect("it is there");
    assert!(process.is_alive() && process.stat().is_some_and(|stat| stat.has_no_first_thread() && !stat.loading));
    for _ in 0..3 {
        assert_eq!([member.tell("change"), member.tell("check")], ["ok", "ok"]);
        until(60, "it is folded again", || is_folded(&service));
    }

    let found = json_of(&service.pagefold(&["guests", "--pid", &member.pid().to_string(), "--json"]));
    assert!(resident_bytes(&found) > MOST * 4096, "{found}");
    let audit = service.assert_audit_is_clean();
    let of_group = |group: &&Value| group["name"].as_str().is_some_and(|name| name == service.group(GROUP));
    let group = audit["by_group"].as_array().expect("groups").iter().find(of_group).expect("its group");
    assert!(number(&group["savings"]["folded_bytes"]) >= MOST * 4096, "{audit}");

    // The next supervisor takes over who is alive.
    service.kill_supervisor();
    until(60, "it is a member again", || {
        find_member(&service.show(GROUP), "one").is_some_and(|member| member["connected"] == true)
    });
    assert_eq!([member.tell("change"), member.tell("check")], ["ok", "ok"]);
    until(60, "it is folded again", || is_folded(&service));
    assert_eq!(member.tell("check"), "ok");
}

fn attach(installed: &Installed, pid: &str) {
    let mut command = Command::new(installed.path("pagefold"));
    command.args(["attach", pid, "--group", GROUP, "--all-anonymous", "--json"]);
    json_of(&command.env("PAGEFOLD_DIR", installed.path("s")).env("PAGEFOLD_EAGER", "1").output().expect("attach it"));
}

/// Attaches a program, ends its first thread before or after that, and detaches it.
fn attached(ends_before: bool) {
    let Some(installed) = Installed::attaching() else { return };
    let Some(built) = Built::new("first_thread.c") else { return };
    let _supervisor = installed.serve("[[group]]\nname = 'acme'\n", &[]);
    let mut program = Member::spawn(Command::new(built.program()), "one", installed.dir.path());
    let (id, pid) = (program.pid(), program.pid().to_string());
    let threads = || host::ThreadCpu::of_process(id).map_or(0, |threads| threads.len());
    assert_eq!(program.tell(if ends_before { "end" } else { "check" }), "ok");
    let before = threads();
    attach(&installed, &pid);
    assert_eq!(program.tell(if ends_before { "check" } else { "end" }), "ok");

    let folded = || {
        let shown = installed.show(GROUP);
        let members = shown["members"].as_array()?;
        let member = members.iter().find(|member| number(&member["pid"]) == u64::from(id))?;
        Some(member).filter(|member| member["connected"] == true).map(|member| number(&member["folded_pages"]))
    };
    // The helper looks whether the process is there, after ten seconds at the latest.
    for seconds in [0, 11] {
        std::thread::sleep(Duration::from_secs(seconds));
        assert_eq!([program.tell("change"), program.tell("check")], ["ok", "ok"]);
        wait_for_within(Duration::from_secs(60), "it is folded", || folded().filter(|pages| *pages >= MOST));
    }
    json_of(&installed.pagefold(&["detach", &pid, "--json", "--wait", "120"]));
    assert_eq!([program.tell("check"), program.tell("change"), program.tell("check")], ["ok", "ok", "ok"]);
    assert!(folded().is_none());
    wait_for_within(Duration::from_secs(60), "all of the agent's threads are gone", || {
        (threads() <= before).then_some(())
    });
}

#[test]
fn attached_program_may_end_its_first_thread() {
    attached(false);
}

#[test]
fn program_without_its_first_thread_is_attached_and_left() {
    attached(true);
}
