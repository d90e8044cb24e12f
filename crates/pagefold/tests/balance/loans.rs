//! Loans between guests: they are withdrawn, lent again, kept where they are needed, and never below the guarantee.

use crate::common::formats::assert_documented;
use crate::common::service::until;
use crate::common::{json_of, number};
use crate::rig::{Guests, KEPT, M, RAM, guests};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

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
    assert_documented(&["pagefold balance", "pagefold journal"], &guests_of.journal().into());
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
const FILL: &str = "mkdir /f && mount -t tmpfs -o size=120m none /f && dd if=/dev/urandom of=/f/x bs=64k count=1760 2>/dev/null && \
                    md5sum /f/x";
/// Prints the checksum again, and the processes that were killed; and removes the file.
const FREE: &str = "md5sum /f/x; grep oom_kill /proc/vmstat; rm /f/x";

/// The loan is withdrawn once its guest does not need it.
#[test]
fn guest_that_needs_its_loan_keeps_it() {
    let Some(guests_of) = Guests::start("need") else { return };
    let names = guests_of.names();
    let full = &names[..1];
    let written = guests_of.lab.everywhere(full, FILL);
    let applying = guests_of.keep_withdrawing_in_a_hurry();
    until(120, "the other guest's loan is back", || guests_of.sizes()[1].abs_diff(KEPT) < 4 * M);
    // Time for a driver that is stuck to be reminded: 20 s by the balancer's clock.
    std::thread::sleep(Duration::from_secs(5));
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
    let applying = guests_of.keep_withdrawing_in_a_hurry();
    let are_back = || guests_of.sizes().iter().all(|size| size.abs_diff(KEPT) < 4 * M);
    until(120, "all loans are back", are_back);
    let names = guests_of.names();
    let full = &names[..1];
    let written = guests_of.lab.everywhere(full, FILL);
    let before = guests_of.entries("reminder");
    // Time for three reminders: 36 s by the balancer's clock.
    std::thread::sleep(Duration::from_secs(9));
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
