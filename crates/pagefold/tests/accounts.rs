//! Limits, bills and savings as `group` and `audit` tell an operator. They stay true when workers, supervisors, members
//! or the group's configuration end.

mod common;

use common::service::{Member, Service, cannot_fold, failures, find_member, folded_pages, member, until};
use common::supervised::signal;
use common::{json_of, number, once_in_ten_times};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

/// Path of `trials/known_pages.rs`, a program with pages of known content.
fn known_pages() -> String {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    path.to_str().expect("a plain path").to_owned()
}

/// Starts a member with `pages` pages, each of them there twice, and `zeros` pages of zeros.
fn member_with(service: &Service, group: &str, name: &str, pages: u64, zeros: u64) -> Member {
    let mut member = service.run(group, name, &[], &[&known_pages()]);
    for line in [
        format!("alloc x {}", 2 * pages + zeros),
        format!("fill x 0 {pages} 1"),
        format!("fill x {pages} {pages} 1"),
        format!("zero x {} {zeros}", 2 * pages),
        "mergeable x".to_owned(),
    ] {
        member.tell(&line);
    }
    member
}

/// How often threads of these processes have gone to sleep.
fn sleeps(pids: &[u32]) -> u64 {
    let tasks = pids.iter().flat_map(|pid| fs::read_dir(format!("/proc/{pid}/task")).expect("threads"));
    let of = |status: &str| {
        status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse::<u64>().ok())
    };
    let status = tasks.map(|task| fs::read_to_string(task.expect("a thread").path().join("status")).expect("a status"));
    status.map(|status| of(&status).unwrap_or_else(|| panic!("no switches in {status}"))).sum::<u64>()
}

/// Memory of the files with this name that a process has open, in bytes.
fn memory_file_bytes(pid: u32, name: &str) -> u64 {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).expect("open files").map(|file| file.expect("a file").path());
    let named = files.filter(|file| fs::read_link(file).is_ok_and(|to| to.to_string_lossy().contains(name)));
    named.map(|file| fs::metadata(file).map_or(0, |found| found.blocks() * 512)).sum()
}

fn text(service: &Service, words: &[&str]) -> String {
    String::from_utf8(service.pagefold(words).stdout).expect("text")
}

fn saved(of: &Value) -> i64 {
    of["saved_bytes"].as_i64().unwrap_or_else(|| panic!("nothing saved in {of}"))
}

/// The terms of a `savings` object: folded, zero pages, pool, tables, mappings.
fn terms(of: &Value) -> [i64; 5] {
    ["folded_bytes", "zero_bytes", "pool_bytes", "tables_bytes", "mappings_bytes"]
        .map(|term| of[term].as_i64().unwrap_or_else(|| panic!("no {term} in {of}")))
}

/// Adds up the lines of a printed sum by a column of figures, and asserts that the last line is their sum. Returns it.
fn add_up(printed: &str, column: usize) -> i64 {
    let mut sum = 0;
    for line in printed.lines() {
        let (sign, factor) = (line.split(' ').next().unwrap_or_default(), 1 - 2 * i64::from(line.starts_with('-')));
        if !["+", "-", "="].contains(&sign) {
            continue;
        }
        let is_figure = |word: &&str| word.chars().all(|c| c.is_ascii_digit() || ",-".contains(c));
        let figures: Vec<&str> = line.split_whitespace().skip(1).filter(is_figure).collect();
        let kib: i64 = figures[column].replace(',', "").parse().expect("a figure");
        if sign == "=" {
            assert_eq!(kib, sum, "{printed}");
            return kib;
        }
        sum += factor * kib;
    }
    panic!("no sum in {printed}");
}

#[test]
fn saved_is_one_sum_in_show_audit_and_json() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let _member = member_with(&service, "acme", "a", 1000, 500);
    let group = service.group("acme");
    until(60, "all is folded", || {
        let shown = service.show("acme");
        folded_pages(&shown, "a") == 2000 && number(&shown["zero_pages"]) == 500
    });
    let audited = || {
        let audit = json_of(&service.pagefold(&["audit", "--group", &group, "--json"]));
        assert_eq!(saved(&audit), saved(&audit["by_group"][0]), "the total is the sum of the groups");
        audit["by_group"][0].clone()
    };
    let (shown, audit) = (service.show("acme"), audited());
    for of in [&shown, &audit] {
        let [folded, zero, pool, tables, mappings] = terms(&of["savings"]);
        assert_eq!([folded, zero, pool], [2000 << 12, 500 << 12, 1000 << 12], "{of}");
        assert!(tables > 0 && mappings > 0, "{of}");
        assert_eq!(saved(of), folded + zero - pool - tables - mappings);
    }
    assert_eq!(terms(&audit["engine"])[..3], terms(&shown["savings"])[..3]);
    let shown = text(&service, &["group", "show", &group]);
    assert!(add_up(&shown, 0) > 3000, "{shown}");
    let compared = text(&service, &["audit", "--group", &group]);
    assert!((add_up(&compared, 0) - add_up(&compared, 1)).abs() < 100 && !compared.contains("DIFFERS"), "{compared}");

    // Afterwards the pool keeps its memory for a while: both say so, and neither says 0.
    service.set("acme", &["--fold", "unfold"]);
    until(30, "all is private again", || folded_pages(&service.show("acme"), "a") == 0);
    until(30, "the slots are free", || number(&service.show("acme")["slots"]) == 0);
    let (shown, audit) = (service.show("acme"), audited());
    assert!(number(&shown["idle_slots"]) == 1000, "{shown}");
    for of in [&shown, &audit] {
        let [folded, _, pool, ..] = terms(&of["savings"]);
        assert_eq!([folded, pool], [0, 1000 << 12], "{of}");
    }
    for words in [&["group", "show", &group][..], &["audit", "--group", &group]] {
        let printed = text(&service, words);
        assert!(printed.contains("Negative: folding takes more memory than it saves"), "{printed}");
        add_up(&printed, 0);
    }
    let listed = text(&service, &["group", "list"]);
    assert!(listed.contains("saved MiB"), "{listed}");
}

#[test]
fn members_and_workers_at_rest_sleep() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut members = ["a", "b"].map(|name| member_with(&service, "acme", name, 256, 0));
    until(60, "both are folded", || {
        let shown = service.show("acme");
        members.iter().all(|member| folded_pages(&shown, &member.name) == 512)
    });
    std::thread::sleep(Duration::from_secs(12));
    let agents = members.each_ref().map(Member::pid);
    let worker_pid = service.worker_pid("acme").expect("a worker");
    let worker = [worker_pid];
    let woken = || {
        let before = (sleeps(&agents), sleeps(&worker));
        std::thread::sleep(Duration::from_secs(4));
        (sleeps(&agents) - before.0, sleeps(&worker) - before.1)
    };
    // While they change, members wake 10 times a second, and a worker 4 times.
    once_in_ten_times(woken, |(agents, worker)| *agents <= 20 && *worker <= 10);
    assert!(memory_file_bytes(worker_pid, "memfd:pagefold-") > 0, "the pool has memory");
    assert_eq!(memory_file_bytes(worker_pid, "memfd:pagefold-donation"), 0, "windows of members that donate nothing");
    for member in &mut members {
        member.tell("drop x 0 100");
    }
    until(60, "the worker knows what was discarded", || {
        let shown = service.show("acme");
        members.iter().all(|member| folded_pages(&shown, &member.name) == 412)
    });
}

/// Asserts that no counter of a bill is smaller than it was.
fn assert_not_less(bill: &Value, before: &Value) {
    for counter in ["folds", "refolds", "short_folds", "pages_scanned", "pages_hashed", "worker_cpu_s", "agent_cpu_s"] {
        let (now, then) = (bill[counter].as_f64(), before[counter].as_f64());
        assert!(now.is_some() && now >= then, "{counter}: {now:?} after {then:?}");
    }
    assert!(failures(bill) >= failures(before), "{bill} after {before}");
}

#[test]
fn bills_survive_ends_of_members_workers_and_supervisors() {
    if cannot_fold() {
        return;
    }
    let mut service = Service::start();
    let mut a = member_with(&service, "acme", "a", 1000, 0);
    let _b = member_with(&service, "acme", "b", 1000, 0);
    let all_folded = |service: &Service| {
        let shown = service.show("acme");
        folded_pages(&shown, "a") + folded_pages(&shown, "b") == 4000
    };
    until(60, "all is folded", || all_folded(&service));
    let mut before = service.show("acme");
    assert!(number(&before["folds"]) >= 4000 && before["agent_cpu_s"].as_f64() > Some(0.0), "{before}");
    let kill_worker = |service: &Service| {
        let pid = service.worker_pid("acme").expect("it has a worker");
        signal(pid, "KILL");
        until(20, "another worker", || service.worker_pid("acme").is_some_and(|next| next != pid));
    };
    kill_worker(&service);
    let after = service.show("acme");
    assert_not_less(&after, &before);
    before = after;
    service.kill_supervisor();
    let after = service.show("acme");
    assert_not_less(&after, &before);
    before = after;
    // Both at once: what was shown stays, because it was written before it was shown.
    signal(service.worker_pid("acme").expect("it has a worker"), "KILL");
    service.kill_supervisor();
    let after = service.show("acme");
    assert_not_less(&after, &before);
    until(60, "members are back", || service.show("acme")["members"].as_array().is_some_and(|m| m.len() == 2));
    before = service.show("acme");
    a.kill();
    until(20, "a is gone", || {
        let shown = service.show("acme");
        assert_not_less(&shown, &before);
        shown["members"].as_array().is_some_and(|m| m.iter().all(|m| m["name"] != "a"))
    });
}

const SMALL: &str = "[[group]]\nname = 'acme-TOKEN'\npool = '4M'\n[[group]]\nname = 'beta-TOKEN'\n";

#[test]
fn full_pool_is_named_and_made_larger_on_the_fly() {
    if cannot_fold() {
        return;
    }
    let mut service = Service::start_with(Some(SMALL));
    // Twice the pages that the pool has slots for.
    let _member = member_with(&service, "acme", "a", 2000, 0);
    let group = service.group("acme");
    until(60, "the pool is full", || service.show("acme")["members"][0]["state"] == "no_room");
    let shown = service.show("acme");
    assert!(number(&shown["fold_failures"]["no_room"]) > 0, "{shown}");
    assert!(shown["no_room"].as_str().is_some_and(|why| why.contains("in use: 4 MiB")), "{shown}");
    let a = member(&shown, "a");
    assert_eq!((&a["detail"], number(&shown["slots"])), (&shown["no_room"], 1024));
    let fix = format!("pagefold group set {group} --pool 8M");
    assert_eq!(a["fix"], fix[..], "{shown}");
    let printed = text(&service, &["group", "show", &group]);
    for words in [&fix[..], "4.0 MiB in use, of the 4.0 MiB that it may hold; FULL", "no room: it folds onto"] {
        assert!(printed.contains(words), "{words}: {printed}");
    }
    assert!(service.log().contains("nothing new is folded: all that the pool may hold is in use: 4 MiB"));
    // The advice is followed, to the letter.
    let words: Vec<&str> = fix.split(' ').skip(1).collect();
    let set = json_of(&service.pagefold(&[&words[..], &["--json"]].concat()));
    assert_eq!((&set["pool"], &set["huge_pages"]), (&(8 << 20).into(), &50.into()), "{set}");
    until(60, "all is folded", || folded_pages(&service.show("acme"), "a") == 4000);
    let shown = service.show("acme");
    assert!(shown["no_room"].is_null() && member(&shown, "a")["state"] == "folding", "{shown}");
    // A smaller pool unfolds nothing.
    let set = json_of(&service.pagefold(&["group", "set", &group, "--pool", "1M", "--json"]));
    assert_eq!(set["pool"], 1 << 20);
    service.kill_supervisor();
    until(20, "the next supervisor has a report", || folded_pages(&service.show("acme"), "a") == 4000);
    assert_eq!(service.show("acme")["settings"]["pool"], 1 << 20);
}

/// Memory that is advised to be merged and written all the time.
const BUSY: &str = "
import mmap, time
m = mmap.mmap(-1, 64 * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
m.madvise(mmap.MADV_MERGEABLE)
n = 0
while True:
    n += 1
    for page in range(64): m[page * 4096] = n % 256
    time.sleep(0.001)
";

#[test]
fn members_without_folded_pages_have_a_reason_and_a_remedy() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut quiet = service.run("acme", "quiet", &[], &[&known_pages()]);
    quiet.tell("alloc x 100");
    let mut alone = service.run("acme", "alone", &[], &[&known_pages()]);
    for line in ["alloc x 300", "fill x 0 300 77", "mergeable x"] {
        alone.tell(line);
    }
    // Not eager: its pages would rest while other programs have all processors.
    let _busy = service.run_with("acme", "busy", &[], &["python3", "-c", BUSY], &[("PAGEFOLD_EAGER", "")]);
    let mut bounded = service.run_with("acme", "bounded", &[], &[&known_pages()], &[("PAGEFOLD_VMA_BUDGET", "1")]);
    for line in ["alloc x 400", "fill x 0 200 5000", "fill x 200 200 5000", "mergeable x"] {
        bounded.tell(line);
    }
    for (name, state, detail, fix) in [
        ("quiet", "nothing_enrolled", "", "--all-anonymous"),
        ("alone", "folding", "none of its pages that rest has a lasting duplicate", ""),
        ("busy", "folding", "none of its pages has rested for a whole round", ""),
        ("bounded", "no_vma", "see vm.max_map_count", "sysctl vm.max_map_count"),
    ] {
        let is_said = |m: &Value| {
            m["state"] == state
                && m["detail"].as_str().is_some_and(|said| said.contains(detail))
                && m["fix"].as_str().map_or(fix.is_empty(), |said| !fix.is_empty() && said.contains(fix))
        };
        until(120, &format!("{name}: {}", service.show("acme")), || {
            find_member(&service.show("acme"), name).is_some_and(is_said)
        });
    }
    let printed = text(&service, &["group", "show", &service.group("acme")]);
    for words in ["busy: none of its pages has rested", "no vma: it has as many", "-> sysctl vm.max_map_count"] {
        assert!(printed.contains(words), "{words}: {printed}");
    }
}

#[test]
fn group_that_is_configured_no_more_keeps_its_limits() {
    if cannot_fold() {
        return;
    }
    let mut service = Service::start_with(Some(SMALL));
    let mut a = member_with(&service, "acme", "a", 500, 0);
    until(60, "all is folded", || folded_pages(&service.show("acme"), "a") == 1000);
    let config = service.place().with_file_name("config.toml");
    fs::write(config, format!("[[group]]\nname = '{}'\n", service.group("beta"))).expect("write the configuration");
    // Twice: the second supervisor has the limits from its predecessor alone.
    for _ in 0..2 {
        service.kill_supervisor();
        let shown = service.show("acme");
        assert_eq!((&shown["settings"]["pool"], &shown["configured"]), (&(4 << 20).into(), &false.into()), "{shown}");
    }
    let group = service.group("acme");
    let words = "not configured any more: runs with its last limits, takes no new members";
    assert!(service.log().contains(&format!("group {group}: {words}")), "{}", service.log());
    for said in [text(&service, &["group", "list"]), text(&service, &["group", "show", &group])] {
        assert!(said.replace('\n', " ").contains(words), "{said}");
    }
    let mut late = service.run("acme", "late", &[], &["true"]);
    assert!(!late.end(20).success() && late.errors().contains("takes no new members; add it to"), "{}", late.errors());
    // The limit binds: there is room for half of what comes now.
    for line in ["alloc y 4000", "fill y 0 2000 9000", "fill y 2000 2000 9000", "mergeable y"] {
        a.tell(line);
    }
    until(60, "the pool is full", || member(&service.show("acme"), "a")["state"] == "no_room");
    assert_eq!(number(&service.show("acme")["slots"]), 1024);
}

#[test]
fn watch_prints_an_object_a_line_and_list_has_totals() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let (_a, _b) = (member_with(&service, "acme", "a", 100, 0), member_with(&service, "beta", "b", 100, 0));
    until(60, "all is folded", || {
        folded_pages(&service.show("acme"), "a") == 200 && folded_pages(&service.show("beta"), "b") == 200
    });
    let group = service.group("acme");
    let lines = text(&service, &["group", "show", &group, "--watch", "1", "--rounds", "2", "--json"]);
    let rounds: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect();
    assert!(rounds.len() == 2 && rounds.iter().all(|round| round["name"] == group[..]), "{lines}");
    let rounds = text(&service, &["group", "show", &group, "--watch", "--rounds", "1"]);
    assert!(rounds.starts_with(&group) && !rounds.contains('\u{1b}'), "{rounds}");
    let totals = || {
        let listed = json_of(&service.pagefold(&["group", "list", "--json"]));
        let all: i64 = listed.as_array().expect("a list").iter().map(saved).sum();
        assert_eq!(listed.as_array().map(Vec::len), Some(2), "{listed}");
        let printed = text(&service, &["group", "list"]);
        let total = printed.lines().find(|line| line.starts_with("total")).unwrap_or_else(|| panic!("{printed}"));
        (cli::size::signed_mib(all), total.to_owned())
    };
    // Agents may take another page of memory between both.
    once_in_ten_times(totals, |(all, total)| total.contains(&**all));
}
