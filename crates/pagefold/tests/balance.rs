//! `pagefold balance`, on real guests with real balloons.

mod common;

use common::formats::assert_documented;
use common::lab::{Lab, name};
use common::service::{Member, Service, cannot_fold, small_memory, until};
use common::{Afterwards, json_of, number};
use guest::Qmp;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const M: u64 = 1 << 20;
/// RAM of each guest: 192 MiB.
const RAM: u64 = 192 * M;
/// Guaranteed size of each guest: 112 MiB.
const KEPT: u64 = 112 * M;

/// Two guests with balloons, and a ledger of their own.
struct Guests {
    lab: Lab,
    /// Their group, by which they differ from all others of the host.
    group: String,
    listed: Vec<Value>,
}

impl Guests {
    fn start(group: &str) -> Option<Self> {
        Self::with(group, "virtio-balloon-pci")
    }

    fn with(group: &str, balloon: &str) -> Option<Self> {
        let lab = Lab::new(&[]);
        let group = format!("{group}{}", std::process::id());
        let memory = format!("{}M", RAM / M);
        let up = ["--image", "tiny", "--guests", "2", "--groups", &group, "--memory", &memory];
        let balloon = ["--qemu-arg", "-device", "--qemu-arg", balloon];
        let listed = lab.up(&[&up[..], &balloon].concat())?;
        Some(Self { lab, group, listed })
    }

    /// `pagefold balance` for these guests alone.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        let ledger = self.lab.dir().join("ledger");
        command.args(["balance", "--guest", &format!("{}-*", self.group)]).args(words).arg("--service").arg(ledger);
        command.args(["--json", "--guaranteed", &format!("{}-*={KEPT}", self.group), "--policy", "equal"]);
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("run pagefold balance")
    }

    fn status(&self) -> Value {
        json_of(&self.run(&["status"]))
    }

    /// Their sizes.
    fn sizes(&self) -> Vec<u64> {
        guests(&self.status()).iter().map(|guest| number(&guest["actual_bytes"])).collect()
    }

    fn names(&self) -> Vec<String> {
        self.listed.iter().map(name).collect()
    }

    fn qmp(&self, n: usize, command: &str, arguments: Value) -> Value {
        let socket = self.listed[n]["qmp"].as_str().expect("a socket");
        let mut qmp = Qmp::connect(Path::new(socket), Duration::from_secs(10)).expect("QEMU answers");
        qmp.execute(command, arguments).expect("QEMU does it")
    }

    /// The journal, whose lines are all whole.
    fn journal(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.lab.dir().join("ledger/balance.journal")).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
    }

    /// Entries of one kind in the journal.
    fn entries(&self, kind: &str) -> Vec<Value> {
        self.journal().into_iter().filter(|line| line["entry"] == kind).collect()
    }

    /// Runs `apply` again and again. The host is taken to be short of memory, and not to run out of it: more than half of the floor is
    /// available.
    fn keep_withdrawing(&self) -> Applying {
        let floor = (host::available_bytes().expect("the kernel tells") / 4 * 5).to_string();
        let mut command = self.command(&["apply", "--every", "1", "--floor", &floor]);
        Applying(command.stdout(Stdio::piped()).spawn().expect("run pagefold balance"))
    }
}

/// A running `apply --every`. Dropping it kills it.
struct Applying(Child);

impl Drop for Applying {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn guests(answer: &Value) -> &Vec<Value> {
    answer["facts"]["guests"].as_array().expect("a list of guests")
}

/// A small host is made of a large one by `--floor`: all that is available is never lent.
#[test]
fn loans_are_withdrawn_to_the_guarantee_and_lent_again() {
    let Some(guests_of) = Guests::start("lend") else { return };
    // Memory that was used and is free again lies in frames of the host.
    guests_of.lab.everywhere(&guests_of.names(), "dd if=/dev/zero of=/tmp/x bs=1M count=60 2>/dev/null ; rm /tmp/x");
    let status = guests_of.status();
    assert_documented(&["pagefold balance"], &status);
    assert!(guests(&status).iter().all(|guest| number(&guest["resident_bytes"]) > KEPT + 8 * M), "{status}");
    let plan = json_of(&guests_of.run(&["plan", "--floor", "100T"]));
    assert_documented(&["pagefold balance"], &plan);
    assert_eq!(plan["plan"]["frees"].as_array().map(Vec::len), Some(2), "{plan}");
    assert_documented(&["pagefold balance"], &json_of(&guests_of.run(&["explain"])));
    guests_of.run(&["apply", "--dry-run", "--floor", "100T"]);
    assert_eq!(guests_of.sizes(), [RAM, RAM], "a dry run changes nothing");

    until(120, "all loans are back", || {
        let mut done = json_of(&guests_of.run(&["apply", "--floor", "100T"]));
        // Its fields are ids of guests.
        done["drivers"].take();
        assert_documented(&["pagefold balance"], &done);
        guests_of.sizes().iter().all(|size| size.abs_diff(KEPT) < 4 * M)
    });
    let status = guests_of.status();
    for guest in guests(&status) {
        assert!(number(&guest["resident_bytes"]) < KEPT + 8 * M, "frames are not back: {guest}");
        assert_eq!((&guest["driver"], number(&guest["target_bytes"])), (&"works".into(), KEPT), "{guest}");
    }
    growth_waits_where_host_is_short(&guests_of);
    until(120, "they have it again", || {
        guests_of.run(&["apply"]);
        guests_of.sizes() == [RAM, RAM]
    });
    assert_documented(&["pagefold balance"], &guests_of.journal().into());
    let (intents, outcomes) = (guests_of.entries("intent"), guests_of.entries("outcome"));
    assert!(intents.len() >= 6 && intents.len() == outcomes.len(), "withdrawn once, lent in two rounds: {intents:?}");
    for intent in intents {
        let is_end = |outcome: &&Value| ["guest", "to_bytes", "at_s"].iter().all(|key| outcome[*key] == intent[*key]);
        let outcome = outcomes.iter().find(is_end).unwrap_or_else(|| panic!("no end of {intent}"));
        assert!(outcome["reason"].is_string() && outcome["expected_bytes"].is_u64(), "{outcome}");
    }
    nothing_grows_before_all_have_shrunk(&guests_of);
}

/// The plan was made while there was memory, and then it is gone.
fn growth_waits_where_host_is_short(guests_of: &Guests) {
    let pids: Vec<u32> = guests_of.listed.iter().filter_map(|guest| guest["pid"].as_u64()?.try_into().ok()).collect();
    // The survey finds all VMs of the host.
    let mut guests = guest::Survey::take().expect("look at processes").guests(&pids, &[]);
    guests.retain(|guest| guest.pids.iter().any(|pid| pids.contains(pid)));
    let dir = guests_of.lab.dir().join("other-ledger");
    let mut ledger = lend::Ledger::open(&dir).expect("a ledger");
    let turn = ledger.take_turn().expect("the turn");
    let guest = guests.first().expect("a guest").id.clone();
    let step = balance::Step {
        guest,
        from_bytes: KEPT,
        to_bytes: RAM,
        expected_bytes: RAM - KEPT,
        is_owed: false,
        reason: "a test".into(),
    };
    let (mut hold, params) = (lend::Hold::default(), balance::Params::default());
    let mut facts = balance::Facts::default();
    facts.host.floor_bytes = 1;
    let (guests, ledger, hold, facts) = (&guests[..], &mut ledger, &mut hold, &facts);
    let mut means = lend::Means { guests, ledger, turn: &turn, params: &params, hold, facts, available: &|| 0 };
    let outcomes = lend::carry_out((&[], &[step]), &mut means).expect("a round");
    assert!(!outcomes[0].is_told && outcomes[0].problem.is_some(), "{outcomes:?}");
}

/// One guest has less than it is guaranteed, and the other one more, on a host that is short of memory.
fn nothing_grows_before_all_have_shrunk(guests_of: &Guests) {
    guests_of.qmp(0, "balloon", json!({"value": KEPT - 16 * M}));
    until(60, "the first one is small", || guests_of.sizes()[0] < KEPT - 12 * M);
    let before = guests_of.journal().len();
    guests_of.run(&["apply", "--floor", "100T"]);
    let steps: Vec<(Value, bool)> = guests_of.journal()[before..]
        .iter()
        .filter(|line| line["entry"] == "intent" || line["entry"] == "outcome")
        .map(|line| (line["entry"].clone(), number(&line["to_bytes"]) > number(&line["from_bytes"])))
        .collect();
    let wanted = [("intent", false), ("outcome", false), ("intent", true), ("outcome", true)];
    assert_eq!(steps, wanted.map(|(entry, grows)| (entry.into(), grows)));
}

#[test]
fn room_is_made_before_a_guest_starts_or_refused_with_the_numbers() {
    let Some(guests_of) = Guests::start("room") else { return };
    let refused = guests_of.run(&["reserve", "100T", "--for", "next"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && said.contains("no room for next: 104857600 MiB are wanted"), "{said}");
    assert_eq!(guests_of.sizes(), [RAM, RAM], "nothing is freed for a guest that does not fit");
    // With a floor at all that is spare, loans have to be withdrawn; other programs may take or free memory meanwhile.
    let spare = guests_of.status()["budget"]["spare_bytes"].as_i64().expect("a number");
    let floor = u64::try_from(spare).expect("memory is spare") + host::usual_reserve_bytes();
    let planned = guests_of.run(&["reserve", "60M", "--for", "next", "--floor", &floor.to_string(), "--dry-run"]);
    assert!(planned.status.success() || String::from_utf8_lossy(&planned.stderr).contains("no room for next"));
    assert_eq!(guests_of.sizes(), [RAM, RAM], "a dry run changes nothing");
    let reserved = guests_of.run(&["reserve", "60M", "--for", "next", "--floor", &floor.to_string()]);
    let status = guests_of.status();
    if reserved.status.success() {
        let outcomes = json_of(&reserved);
        assert_documented(&["pagefold balance"], &outcomes);
        assert_eq!(status["facts"]["reservations"], json!([{"name": "next", "bytes": 60 * M}]));
        assert!(guests_of.sizes().iter().all(|size| *size >= KEPT));
        let freed = outcomes.as_array().expect("a list").iter().any(|outcome| outcome["landed_s"].is_f64());
        assert_eq!(freed, number(&status["budget"]["lent_bytes"]) < 2 * (RAM - KEPT) - 4 * M, "{outcomes} {status}");
    } else {
        assert_eq!(status["facts"]["reservations"], json!([]), "nothing is kept for a guest that was refused");
    }
    assert!(guests_of.run(&["reserve", "0", "--for", "next"]).status.success());
    assert_eq!(guests_of.status()["facts"]["reservations"], json!([]));
}

/// It is killed before it tells anything, while it does, and while balloons are on their way.
#[test]
fn killed_at_any_instant_it_leaves_guests_with_their_guarantee() {
    let Some(guests_of) = Guests::start("kill") else { return };
    for after_ms in [0, 1, 5, 20, 50, 100, 300, 1000] {
        for n in [0, 1] {
            guests_of.qmp(n, "balloon", json!({"value": RAM}));
        }
        until(60, "they have all their RAM", || guests_of.sizes() == [RAM, RAM]);
        let before = guests_of.entries("intent").len();
        let applying = guests_of.keep_withdrawing();
        until(60, "a step is in the journal", || guests_of.entries("intent").len() > before);
        std::thread::sleep(Duration::from_millis(after_ms));
        drop(applying);
        assert!(guests_of.sizes().iter().all(|size| *size >= KEPT), "{after_ms} ms: {:?}", guests_of.sizes());
    }
    assert_eq!(guests_of.lab.everywhere(&guests_of.names(), "echo alive"), ["alive", "alive"]);
    assert!(guests_of.entries("outcome").len() < guests_of.entries("intent").len(), "none was killed in the middle");
    until(120, "the next one does all of it", || {
        guests_of.run(&["apply", "--floor", "100T"]);
        guests_of.sizes().iter().all(|size| size.abs_diff(KEPT) < 4 * M)
    });
}

/// Fills a guest with a file in memory, which a guest without swap cannot give up, and prints a checksum of it.
const FILL: &str = "mkdir /f && mount -t tmpfs -o size=120m none /f && head -c 110m /dev/urandom > /f/x && md5sum /f/x";
/// Prints the checksum again, and the processes that were killed; and removes the file.
const FREE: &str = "md5sum /f/x; grep oom_kill /proc/vmstat; rm /f/x";

/// The loan is withdrawn once its guest does not need it.
#[test]
fn guest_that_needs_its_loan_keeps_it() {
    let Some(guests_of) = Guests::start("need") else { return };
    let names = guests_of.names();
    let full = &names[..1];
    let written = guests_of.lab.everywhere(full, FILL);
    let applying = guests_of.keep_withdrawing();
    until(120, "the other guest's loan is back", || guests_of.sizes()[1].abs_diff(KEPT) < 4 * M);
    // Time for a driver that is stuck to be reminded.
    std::thread::sleep(Duration::from_secs(20));
    let status = guests_of.status();
    let guest = &guests(&status)[0];
    assert!(number(&guest["actual_bytes"]) > KEPT + 16 * M, "{guest}");
    assert_eq!(guest["driver"], "works", "{guest}");
    let seen = guests_of.lab.everywhere(full, FREE);
    assert_eq!(seen[0].lines().collect::<Vec<_>>(), [&*written[0], "oom_kill 0"]);
    until(120, "its loan is back, too", || guests_of.sizes()[0].abs_diff(KEPT) < 4 * M);
    drop(applying);
}

/// The driver gives memory back before the guest's kernel kills. The balancer does not take it again while it is needed.
#[test]
fn guest_that_takes_back_what_it_needs_is_left_alone() {
    let Some(guests_of) = Guests::with("back", "virtio-balloon-pci,deflate-on-oom=on") else { return };
    let applying = guests_of.keep_withdrawing();
    let are_back = || guests_of.sizes().iter().all(|size| size.abs_diff(KEPT) < 4 * M);
    until(120, "all loans are back", are_back);
    let names = guests_of.names();
    let full = &names[..1];
    let written = guests_of.lab.everywhere(full, FILL);
    let before = guests_of.entries("reminder");
    // Time for three reminders.
    std::thread::sleep(Duration::from_secs(35));
    assert_eq!(guests_of.entries("reminder"), before);
    assert!(guests_of.sizes()[0] > KEPT + 16 * M, "{:?}", guests_of.sizes());
    let seen = guests_of.lab.everywhere(full, FREE);
    assert_eq!(seen[0].lines().collect::<Vec<_>>(), [&*written[0], "oom_kill 0"]);
    until(120, "all loans are back again", are_back);
    assert_eq!(guests(&guests_of.status())[0]["driver"], "works");
    drop(applying);
}

/// A paused guest's driver does nothing. It is flagged, and the plan goes on without it.
#[test]
fn stuck_driver_is_flagged_and_the_other_guest_still_shrinks() {
    let Some(guests_of) = Guests::start("stuck") else { return };
    guests_of.qmp(0, "stop", json!({}));
    let ids: Vec<Value> = guests(&guests_of.status()).iter().map(|guest| guest["id"].clone()).collect();
    let mut applying = guests_of.keep_withdrawing();
    let lines = BufReader::new(applying.0.stdout.take().expect("a pipe")).lines();
    let (mut told, mut flagged) = (None, None);
    for line in lines {
        let line: Value = serde_json::from_str(&line.expect("a line")).expect("JSON");
        told = told.or_else(|| line["outcomes"][0]["at_s"].as_u64());
        let state = |n: usize| line["drivers"][ids[n].as_str().expect("an id")].clone();
        if state(0) == "stuck" {
            assert_eq!(state(1), "works", "{line}");
            flagged = line["at_s"].as_u64();
            break;
        }
    }
    drop(applying);
    let after_s = flagged.expect("a flag") - told.expect("a step");
    eprintln!("flagged after {after_s} s");
    // The rule is 20 s; the rest is for a busy machine.
    assert!(after_s <= 40, "{after_s} s");
    let began = Instant::now();
    while guests_of.sizes()[1] > KEPT + 4 * M {
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", guests_of.sizes());
    }
    assert!(guests_of.sizes()[0] >= KEPT);
    guests_of.qmp(0, "cont", json!({}));
}

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
    let within = format!("/pagefold-test-{token}");
    // This process is no VM, so nothing else is done.
    let own = std::process::id().to_string();
    let words = ["balance", "--pid", &own, "apply", "--every", "1", "--floor", "1G", "--within", &within];
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.args(words).arg("--service").arg(&ledger).stdout(Stdio::null());
    let _applying = Applying(command.spawn().expect("run pagefold balance"));
    let mut line = Value::Null;
    until(60, "page cache is reclaimed", || {
        let text = std::fs::read_to_string(ledger.join("balance.journal")).unwrap_or_default();
        let mut lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        line = lines.find(|line| line["entry"] == "reclaim").unwrap_or_default();
        !line.is_null()
    });
    assert_documented(&["pagefold balance"], &line);
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
    let within = format!("/pagefold-test-{token}");
    let own = std::process::id().to_string();
    let ledger = service.place();
    let words = ["balance", "--json", "--pid", &own, "apply", "--every", "1", "--floor", "64M", "--within", &within];
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.args(words).arg("--service").arg(&ledger).stdout(Stdio::piped());
    let mut applying = Applying(command.spawn().expect("run pagefold balance"));
    let paced = paces_of(&mut applying);
    let journal = || {
        let text = std::fs::read_to_string(ledger.join("balance.journal")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).collect::<Vec<_>>()
    };
    let has = |name: &str, pace: &str| {
        let group = service.group(name);
        journal().into_iter().find(|line| {
            line["entry"] == "pace" && line["group"] == group[..] && line["pace"] == pace && line["problem"].is_null()
        })
    };
    until(90, "both have another pace", || has("yields", "faster").is_some() && has("vain", "slower").is_some());
    // The pressure ends; the rung does a minute later.
    raise_limit(&group);
    let shown = service.show("yields");
    assert_documented(&["group show --json", "Savings of folding"], &shown);
    assert_eq!((&shown["pressure_scan_rate"], &shown["settings"]["scan_rate"]), (&2000.into(), &500.into()));
    until(30, "it folds faster than its settings have it", || number(&service.show("yields")["scan_rate"]) > 1000);
    let slower = number(&service.show("vain")["pressure_scan_rate"]);
    assert!((64..400).contains(&slower), "{slower}");
    until(30, "it scans slower", || number(&service.show("vain")["scan_rate"]) <= slower + 30);
    assert_documented(&["pagefold balance"], &has("vain", "slower").expect("it is there"));
    until(240, "both have their own pace", || has("yields", "usual").is_some() && has("vain", "usual").is_some());
    for (name, rate) in [("yields", 500), ("vain", 400)] {
        let shown = service.show(name);
        assert_eq!((&shown["pressure_scan_rate"], &shown["settings"]["scan_rate"]), (&Value::Null, &rate.into()));
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
        service.set(group, &["--scan-rate", if group == "yields" { "500" } else { "400" }]);
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
    let Some((group, _afterwards)) = small_memory(&token, 64 * M) else { return };
    let Some(guests_of) = Guests::start("pause") else { return };
    // The host has 64 MiB, of which somebody has taken 48. They are back when the file is removed.
    let taken = format!("/dev/shm/pagefold-test-{token}");
    let _remove = Afterwards::run(&format!("rm -f {taken}"));
    let take = format!("echo $$ > {group}/cgroup.procs && exec head -c {} /dev/zero > {taken}", 48 * M);
    assert!(Command::new("sh").args(["-c", &take]).status().expect("run a shell").success());
    let within = format!("/pagefold-test-{token}");
    let status = |n: usize| guests_of.qmp(n, "query-status", json!({}))["status"].as_str().map(str::to_owned);
    let all_run = || [status(0), status(1)].iter().all(|status| status.as_deref() == Some("running"));
    for ends in ["nobody", "the balancer", "both"] {
        let (applying, holder) = until_one_is_paused(&guests_of, &within, &|| !all_run());
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
    assert_documented(&["pagefold balance"], &journal.clone().into());
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
    let applying = guests_of.keep_withdrawing();
    let rungs = || -> Vec<Value> { guests_of.entries("rung").iter().map(|line| line["rung"].clone()).collect() };
    until(120, "the last rung is reached", || rungs().len() >= 5);
    assert_eq!(rungs(), ["withdraw", "reclaim", "pace", "advise", "refuse"]);
    let steps = guests_of.entries("rung");
    assert_documented(&["pagefold balance"], &steps.clone().into());
    let advice = steps[3]["reason"].as_str().expect("a reason");
    assert!(advice.contains("pace did not help in 10 s") && advice.contains("moving qemu:rung"), "{advice}");
    assert!(number(&steps[1]["at_s"]) >= number(&steps[0]["at_s"]) + 9, "{steps:?}");
    let refused = guests_of.run(&["reserve", "1M", "--for", "next"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && said.contains("the host has been short of memory"), "{said}");
    assert_eq!(guests_of.status()["facts"]["host"]["rung"], "refuse");
    drop(applying);
}

/// A service that has no memory to lend refuses guests of a lab before they start; one that has makes room for them.
#[test]
fn lab_brings_up_only_guests_that_fit() {
    // Names of processes are short.
    let group = format!("f{}", std::process::id());
    let config = |floor: &str| format!("[balance]\nevery = 1\n{floor}\n[[group]]\nname = '{group}'\n");
    let mut service = Service::start_with(Some(&config("floor = '100T'")));
    let lab = Lab::new(&[]);
    let place = service.place().to_str().expect("a plain path").to_owned();
    let up = ["up", "--image", "process", "--memory", "64M", "--groups", &group, "--fold", "--service", &place];
    let file = service.place().join("balance.json");
    let ledger = || -> Value {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    };
    until(60, "the balancer has its rules in the ledger", || ledger()["rules"].is_array());
    let refused = lab.run(&up);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && said.contains("no room for lab-up-"), "{said}");
    assert!(said.contains("do not fit") && lab.guests().is_empty(), "{said}");
    service.configure(&config(""));
    until(60, "the next balancer has its own", || {
        ledger()["rules"][1].is_object() && ledger()["rules"][1]["floor_bytes"].is_null()
    });
    let running = lab.command(&up).stdout(Stdio::null()).spawn().expect("run pagefold lab");
    until(60, "memory is reserved for it", || {
        ledger()["reserved"].as_object().is_some_and(|names| names.values().any(|one| one["bytes"] == 64 * M))
    });
    assert!(running.wait_with_output().expect("wait for a command").status.success());
    assert_eq!((lab.guests().len(), &ledger()["reserved"]), (1, &json!({})), "it has started, so nothing is reserved");
}

#[test]
fn service_balances_continuously_and_its_balancer_ends_with_it() {
    let Some(guests_of) = Guests::start("serve") else { return };
    let config = format!(
        "[balance]\npolicy = 'equal'\nevery = 1\nfloor = '100T'\n[[guest]]\nname = '{}-*'\nguaranteed = '{KEPT}'\n",
        guests_of.group
    );
    let mut service = Service::start_with(Some(&config));
    // A command waits for its turn, and the balancer keeps what it promises.
    json_of(&service.pagefold(&["balance", "reserve", "1M", "--for", "next", "--floor", "1G", "--json"]));
    until(180, "all loans are back", || guests_of.sizes().iter().all(|size| size.abs_diff(KEPT) < 4 * M));
    let ledger = std::fs::read_to_string(service.place().join("balance.json")).expect("a ledger");
    assert!(ledger.contains("\"next\""), "{ledger}");
    let log = service.log();
    let pid = log.split("balancing memory between guests: process ").nth(1).and_then(|rest| rest.lines().next());
    let pid: u32 = pid.expect("it is in the log").trim().parse().expect("a pid");
    let runs = || std::path::Path::new(&format!("/proc/{pid}")).exists();
    assert!(runs());
    service.configure("");
    until(30, "the balancer has ended with its supervisor", || !runs());
}
