//! A host that is short of memory: each rung of the answer, from page cache to paused guests and refused reservations.

use crate::common;
use crate::common::formats::assert_documented;
use crate::common::service::{Member, Service, cannot_fold, cgroup_path, small_memory, until};
use crate::common::{Afterwards, json_of, number};
use crate::rig::{Applying, Guests, M};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The control group's page cache is given back under pressure, by the way that its version has.
#[test]
fn page_cache_is_reclaimed_under_pressure() {
    let token = format!("cache{}", std::process::id());
    let Some((group, _afterwards)) = small_memory(&token, 256 * M) else { return };
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory on a disk");
    let file = dir.path().join("read");
    std::fs::write(&file, vec![1; 64 << 20]).expect("write a file");
    File::open(&file).and_then(|file| file.sync_all()).expect("write a file");
    // Pages are charged to the group that reads them, once nobody has them in memory.
    let read = format!(
        "echo $$ > {group}/cgroup.procs && dd if={0} iflag=nocache count=0 && cat {0} > /dev/null",
        file.display()
    );
    assert!(Command::new("sh").args(["-c", &read]).status().expect("run a shell").success());
    let ledger = dir.path().join("ledger");
    let within = cgroup_path(&group);
    // This process is no VM, so nothing else is done.
    let own = std::process::id().to_string();
    let words =
        ["balance", "--pid", &own, "apply", "--every", "1", "--hurry", "4", "--floor", "1G", "--within", within];
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.args(words).arg("--service").arg(&ledger).stdout(Stdio::null());
    let _applying = Applying(command.spawn().expect("run pagefold balance"));
    let mut line = Value::Null;
    until(60, "page cache is reclaimed", || {
        let text = std::fs::read_to_string(ledger.join("journal/journal")).unwrap_or_default();
        let mut lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        line = lines.find(|line| line["entry"] == "reclaim").unwrap_or_default();
        !line.is_null()
    });
    assert_documented(&["pagefold balance", "pagefold journal"], &line);
    let swaps = std::fs::read_to_string("/proc/swaps").map_or(0, |swaps| swaps.lines().count());
    let is_new = Path::new(&group).join("memory.reclaim").exists();
    if swaps > 1 && !is_new {
        assert!(line["problem"].as_str().is_some_and(|why| why.contains("swap")), "{line}");
        return;
    }
    assert_eq!(line["way"], if is_new { "memory.reclaim" } else { "memory.force_empty" });
    assert!(number(&line["freed_bytes"]) >= 32 * M && line["groups"] == json!([within]), "{line}");
}

/// Two members of one group hold the same contents, and a member of another one holds contents that nobody else has. A control group stands for a host that is short of memory,
/// until its limit is raised.
#[test]
fn group_that_yields_folds_faster_under_pressure_and_one_that_does_not_scans_slower() {
    let token = format!("pace{}", std::process::id());
    let Some((group, _afterwards)) = small_memory(&token, 32 * M) else { return };
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let _members = alike_and_alone(&service);
    let within = cgroup_path(&group);
    let own = std::process::id().to_string();
    let ledger = service.place();
    let words = ["balance", "--json", "--pid", &own, "apply", "--every", "1", "--hurry", "12"];
    let words = [&words[..], &["--floor", "64M", "--within", within]].concat();
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.args(words).arg("--service").arg(&ledger).stdout(Stdio::piped());
    let mut applying = Applying(command.spawn().expect("run pagefold balance"));
    let paced = paces_of(&mut applying);
    let journal = || {
        let text = std::fs::read_to_string(ledger.join("journal/journal")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).collect::<Vec<_>>()
    };
    let has = |name: &str, pace: &str| {
        let group = service.group(name);
        journal().into_iter().find(|line| {
            line["entry"] == "pace" && line["group"] == group[..] && line["pace"] == pace && line["problem"].is_null()
        })
    };
    until(90, "both have another pace", || has("yields", "faster").is_some() && has("vain", "slower").is_some());
    let shown = service.show("yields");
    assert_documented(&["group show --json", "Savings of folding"], &shown);
    assert_eq!((&shown["pressure_scan_rate"], &shown["settings"]["scan_rate"]), (&8000.into(), &2000.into()));
    until(30, "it folds faster than its settings have it", || number(&service.show("yields")["scan_rate"]) > 4000);
    let slower = number(&service.show("vain")["pressure_scan_rate"]);
    assert!((64..2000).contains(&slower), "{slower}");
    until(30, "it scans slower", || number(&service.show("vain")["scan_rate"]) <= slower + 30);
    assert_documented(&["pagefold balance", "pagefold journal"], &has("vain", "slower").expect("it is there"));
    // The pressure ends; the rung does later.
    raise_limit(&group);
    until(240, "both have their own pace", || has("yields", "usual").is_some() && has("vain", "usual").is_some());
    for name in ["yields", "vain"] {
        let shown = service.show(name);
        assert_eq!((&shown["pressure_scan_rate"], &shown["settings"]["scan_rate"]), (&Value::Null, &2000.into()));
    }
    drop(applying);
    let paced = paced.join().expect("its output is read");
    assert_eq!(paced, journal().iter().filter(|line| line["entry"] == "pace").count(), "the output has all of it");
    pace_ends_by_itself_where_nobody_says_it_again(&service);
}

/// Members of the group `yields` that are alike, and one of `vain`, with work for minutes.
fn alike_and_alone(service: &Service) -> [Member; 3] {
    let program = Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    let program = program.to_str().expect("a plain path");
    [("yields", "a"), ("yields", "b"), ("vain", "a")].map(|(group, name)| {
        let mut member = service.run(group, name, &[], &[program]);
        member.tell("alloc x 100000");
        service.set(group, &["--scan-rate", "2000"]);
        member.tell("fill x 0 100000 1");
        member.tell("mergeable x");
        member
    })
}

fn raise_limit(group: &str) {
    let limit = ["memory.limit_in_bytes", "memory.max"].map(|name| format!("{group}/{name}"));
    let limit = limit.iter().find(|file| Path::new(file).exists()).expect("a limit");
    std::fs::write(limit, "1G").expect("raise the limit");
}

/// Counts the paces in what a process prints, until it ends.
fn paces_of(applying: &mut Applying) -> std::thread::JoinHandle<usize> {
    let lines = BufReader::new(applying.0.stdout.take().expect("a pipe")).lines();
    std::thread::spawn(move || {
        let counts = lines.map_while(Result::ok).map(|line| {
            let mut done: Value = serde_json::from_str(&line).expect("JSON");
            done["drivers"].take();
            assert_documented(&["pagefold balance"], &done);
            done["paced"].as_array().map_or(0, Vec::len)
        });
        counts.sum()
    })
}

/// As when the balancer is killed.
fn pace_ends_by_itself_where_nobody_says_it_again(service: &Service) {
    let client = api::client::Service::connect(api::place::Place::at(&service.place())).expect("the service answers");
    client.pace(&service.group("vain"), Some(7), 2).expect("it takes the pace");
    assert_eq!(service.show("vain")["pressure_scan_rate"], 7);
    until(20, "it is over", || service.show("vain")["pressure_scan_rate"].is_null());
}

/// The balancer is stopped while a guest is paused, and then killed, with or without the process that resumes guests.
#[test]
fn paused_guest_runs_again_whoever_is_stopped_or_killed() {
    let token = format!("pause{}", std::process::id());
    let Some((group, _afterwards)) = small_memory(&token, 192 * M) else { return };
    let Some(guests_of) = Guests::start("pause") else { return };
    let is_none = guests_of.run(&["status", "--within", cgroup_path(&group)]);
    assert_eq!(json_of(&is_none)["facts"]["guests"], json!([]), "they are in no such control group");
    for guest in &guests_of.listed {
        std::fs::write(format!("{group}/cgroup.procs"), guest["pid"].to_string()).expect("move a guest");
    }
    // The host has 192 MiB, of which somebody has taken 168. They are back when the file is removed.
    let taken = format!("/dev/shm/pagefold-test-{token}");
    let _remove = Afterwards::run(&format!("rm -f {taken}"));
    let take = format!("echo $$ > {group}/cgroup.procs && exec head -c {} /dev/zero > {taken}", 168 * M);
    assert!(Command::new("sh").args(["-c", &take]).status().expect("run a shell").success());
    let within = cgroup_path(&group);
    let status = |n: usize| guests_of.qmp(n, "query-status", json!({}))["status"].as_str().map(str::to_owned);
    let all_run = || [status(0), status(1)].iter().all(|status| status.as_deref() == Some("running"));
    for ends in ["nobody", "the balancer", "both"] {
        let (applying, holder) = until_one_is_paused(&guests_of, within, &|| !all_run());
        match ends {
            "nobody" => until(60, "the holder resumes it after 10 s", all_run),
            "the balancer" => {
                drop(applying);
                let began = Instant::now();
                until(60, "the holder resumes it", all_run);
                eprintln!("resumed after {:?}", began.elapsed());
            }
            _ => {
                holder.kill();
                drop(applying);
                std::thread::sleep(Duration::from_secs(1));
                assert!(!all_run(), "there is nobody who could resume it");
                assert!(guests_of.run(&["apply", "--floor", "1M"]).status.code().is_some());
                assert!(all_run(), "the next one resumes it");
            }
        }
    }
    let journal = guests_of.journal();
    assert_documented(&["pagefold balance", "pagefold journal"], &journal.clone().into());
    let left = |line: &&Value| line["reason"] == "the process that had paused it is gone";
    assert!(journal.iter().any(|line| left(&line)), "{journal:?}");
}

/// A balancer that was stopped while guests are paused, and the process that resumes them.
fn until_one_is_paused(guests_of: &Guests, within: &str, is_paused: &dyn Fn() -> bool) -> (Applying, host::ProcessId) {
    for _ in 0..20 {
        // A guest is paused once a minute. Without the ledger, nobody knows of the last time.
        let _ = std::fs::remove_file(guests_of.lab.dir().join("ledger/balance.json"));
        let mut command = guests_of.command(&["apply", "--every", "1", "--floor", "64M", "--within", within]);
        let applying = Applying(command.stdout(Stdio::null()).spawn().expect("run pagefold balance"));
        let pid = applying.0.id();
        let mut holder = None;
        until(180, "guests are to be paused", || {
            holder = holder_of(pid);
            holder.is_some()
        });
        std::thread::sleep(Duration::from_millis(20));
        let stopped = Command::new("kill").args(["-STOP", &pid.to_string()]).status().expect("run kill");
        assert!(stopped.success());
        std::thread::sleep(Duration::from_secs(1));
        if let (true, Some(holder)) = (is_paused(), holder.and_then(|pid| host::ProcessId::of(pid).ok())) {
            return (applying, holder);
        }
    }
    panic!("no guest was paused when its balancer was stopped");
}

/// The process that holds guests for this one, if it runs.
fn holder_of(pid: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

/// The floor is above all memory, so the pressure never ends.
#[test]
fn pressure_is_answered_rung_by_rung_until_reservations_are_refused() {
    let Some(guests_of) = Guests::start("rung") else { return };
    let applying = guests_of.keep_withdrawing_in_a_hurry();
    let rungs = || -> Vec<Value> { guests_of.entries("rung").iter().map(|line| line["rung"].clone()).collect() };
    until(120, "the last rung is reached", || rungs().len() >= 5);
    assert_eq!(rungs(), ["withdraw", "reclaim", "pace", "advise", "refuse"]);
    let steps = guests_of.entries("rung");
    assert_documented(&["pagefold balance", "pagefold journal"], &steps.clone().into());
    let reason = steps[3]["reason"].as_str().expect("a reason");
    assert!(reason.contains("pace did not help in 10 s"), "{reason}");
    // 10 s by the balancer's clock.
    assert!(number(&steps[1]["at_s"]) >= number(&steps[0]["at_s"]) + 2, "{steps:?}");
    let refused = guests_of.run(&["reserve", "1M", "--for", "next"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && said.contains("the host has been short of memory"), "{said}");
    assert_eq!(guests_of.status()["facts"]["host"]["rung"], "refuse");
    assert_one_guest_is_proposed(&guests_of);
    drop(applying);
}

/// It is the one that holds most alone, because no guest frees all that is missing. The next proposal is 15 minutes later.
fn assert_one_guest_is_proposed(guests_of: &Guests) {
    let made = guests_of.entries("proposal");
    assert_documented(&["pagefold balance", "pagefold journal"], &made.clone().into());
    let status = guests_of.status();
    let stands = &status["proposal"];
    assert_documented(&["pagefold balance"], stands);
    let [made] = &made[..] else { panic!("{made:?}") };
    let same = ["guest", "frees_bytes", "costs_bytes", "first_s", "next_s", "to", "command"];
    assert!(same.iter().all(|field| made[field] == stands[field]), "{made} and {stands}");
    let [frees, costs, first_s, next_s] =
        ["frees_bytes", "costs_bytes", "first_s", "next_s"].map(|field| number(&made[field]));
    assert!(next_s == first_s + 900 && (M..512 * M).contains(&frees) && (M..=192 * M).contains(&costs), "{made}");
    let guest = status["facts"]["guests"].as_array().expect("guests").iter().find(|guest| guest["id"] == made["guest"]);
    let name = guest.expect("it is there")["name"].as_str().expect("a name").to_owned();
    let pid = guests_of.listed.iter().find(|one| common::lab::name(one) == name).expect("it is ours")["pid"].clone();
    assert_eq!(made["command"], format!("pagefold migrate {pid} --to tcp:HOST:PORT"));
    assert!(made["to"].is_null(), "no rule has a destination: {made}");
    let as_json = guests_of.command(&["status"]);
    let mut as_text = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    as_text.args(as_json.get_args().filter(|word| *word != "--json"));
    let said = String::from_utf8(as_text.output().expect("run it").stdout).expect("text");
    assert!(said.contains(made["command"].as_str().expect("words")) && said.contains("the next time in "), "{said}");
}
