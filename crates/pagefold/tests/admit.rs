//! `pagefold admit` and `POST /v1/admissions`, where a service balances memory between guests.

mod common;

use common::formats::assert_documented;
use common::http::Reply;
use common::lab::Lab;
use common::service::{Service, until};
use common::supervised::wait_for;
use common::web::{CONTROLS_ACME, CONTROLS_ALL, READS_ALL, Web};
use common::{Stage, json_of, not_root, number, unprivileged};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const M: u64 = 1 << 20;

/// `pagefold admit` at the service of this directory.
fn admit(place: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.args(["admit", "--json", "--service"]).arg(place).args(words);
    command.output().expect("run pagefold admit")
}

/// Ends of promises in the journal, by name.
fn became(place: &Path, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(place.join("journal/journal")).unwrap_or_default();
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut over = lines.filter(|line| line["entry"] == "promise_over" && line["name"] == name);
    over.find_map(|line| Some(line["became"].as_str()?.to_owned()))
}

#[test]
fn nothing_is_promised_where_nobody_balances() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let refused = admit(dir.path(), &["--memory", "1M"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        refused.status.code() == Some(3) && said.contains("have [balance] in the service's configuration"),
        "{said}"
    );
}

#[test]
fn promise_is_used_by_a_vm_of_its_name_ended_by_who_asked_or_lapses() {
    if not_root() {
        return;
    }
    let group = format!("p{}", common::world());
    let service = Service::start_with(Some(&format!(
        "[balance]\nevery = 1\nfloor = '1M'\n[[group]]\nname = '{group}'\nusers = [65534]\n"
    )));
    let place = service.place();
    until(60, "the balancer has looked", || admit(&place, &["--memory", "1M", "--hold", "0"]).status.success());
    let asked = json_of(&admit(&place, &["--memory", "1M", "--for", "short", "--hold", "1s"]));
    assert_documented(&["pagefold admit"], &asked);
    assert_eq!((&asked["admitted"], &asked["promise"], number(&asked["bytes"])), (&true.into(), &"short".into(), M));
    json_of(&admit(&place, &["--memory", "1M", "--for", "ended"]));
    assert!(service.pagefold(&["balance", "reserve", "0", "--for", "ended"]).status.success());
    until(60, "both are over", || became(&place, "short").is_some() && became(&place, "ended").is_some());
    assert_eq!([became(&place, "short"), became(&place, "ended")], ["lapsed", "ended"].map(|end| Some(end.to_owned())));
    let refused = admit(&place, &["--memory", "100T"]);
    let no: Value = serde_json::from_slice(&refused.stdout).expect("JSON");
    assert_documented(&["pagefold admit"], &no);
    assert!(refused.status.code() == Some(1) && no["admitted"] == false && no["promise"].is_null(), "{no}");
    let text = std::fs::read_to_string(place.join("journal/journal")).expect("a journal");
    let lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let balance: Vec<&Value> = lines.iter().filter(|line| line["what"] == "balance").collect();
    assert_documented(&["pagefold balance", "pagefold journal"], &serde_json::json!(balance));
    used_by_a_vm(&service, &group);
}

/// A VM of a member's group starts: its promise is used, and further ones are like it.
fn used_by_a_vm(service: &Service, group: &str) {
    let (lab, place) = (Lab::new(&[]), service.place());
    let dir = place.to_str().expect("a plain path").to_owned();
    let up = ["--image", "tiny", "--groups", group, "--memory", "128M", "--saved", "--fold", "--service", &dir];
    json_of(&admit(&place, &["--memory", "128M", "--for", &format!("{group}-1"), "--hold", "10m"]));
    let Some(listed) = lab.up(&up) else { return };
    let name = listed[0]["name"].as_str().expect("a name").to_owned();
    until(60, "the VM is seen, and its promise is used", || became(&place, &name).as_deref() == Some("used"));
    let like = json_of(&admit(&place, &["--like", &name, "-n", "2", "--hold", "0"]));
    let costs = &like["costs"];
    assert_eq!((number(&costs["measured_guests"]), like["promise"].is_null()), (1, true), "{like}");
    assert!(
        number(&costs["storm_bytes"]) > 128 * M && number(&costs["diverged_bytes"]) < number(&costs["storm_bytes"])
    );
    let show = || json_of(&service.pagefold(&["group", "show", group, "--json"]));
    let fit = show()["fit"].clone();
    assert_documented(&["group show --json", "Savings of folding"], &show());
    assert_eq!(number(&fit["like_bytes"]), 128 * M, "{fit}");
    let text = service.pagefold(&["group", "show", group]);
    let first = String::from_utf8_lossy(&text.stdout).lines().next().unwrap_or_default().to_owned();
    assert!(first.contains("more guests of 128 MiB fit (strict); a full break storm needs "), "{first}");
    // A tenant learns nothing of the memory of all.
    let stage = Stage::new();
    let parent = place.parent().expect("a directory");
    fs::set_permissions(parent, Permissions::from_mode(0o755)).expect("open the directory");
    let mut tenant = unprivileged(&stage.path("pagefold"));
    let shown = json_of(&tenant.args(["group", "show", group, "--json", "--service", &dir]).output().expect("run it"));
    assert!(shown["fit"].is_null() && shown["name"] == group, "{shown}");
}

fn post(web: &Web, token: &str, body: &str) -> Reply {
    let kind = "Content-Type: application/json\r\n";
    web.tcp.with(token).try_request("POST", "/v1/admissions", kind, body).expect("an answer")
}

#[test]
fn web_side_promises_memory_to_those_that_control_all_groups() {
    if not_root() {
        return;
    }
    let web = Web::start("control = true\n[balance]\nevery = 1\nfloor = '1M'");
    let place = web.installed.path("s");
    let one = r#"{"memory_bytes": 1048576, "name": "next", "hold_s": 30}"#;
    let reply = wait_for("the balancer has looked", || {
        let reply = post(&web, CONTROLS_ALL, one);
        (reply.status != 409).then_some(reply)
    });
    let answered = reply.json();
    assert_documented(&["pagefold admit"], &answered);
    assert_eq!((reply.status, &answered["admitted"], &answered["promise"]), (200, &true.into(), &"next".into()));
    for token in [READS_ALL, CONTROLS_ACME] {
        assert_eq!(post(&web, token, one).status, 403);
    }
    for (body, status) in [("{}", 409), ("{", 400), (r#"{"guests": "x"}"#, 422), (r#"{"n": 1}"#, 422), (one, 409)] {
        let reply = post(&web, CONTROLS_ALL, body);
        assert_eq!(reply.status, status, "{body}: {}", reply.text);
    }
    let no = post(&web, CONTROLS_ALL, r#"{"memory_bytes": 1125899906842624}"#);
    assert_eq!((no.status, &no.json()["admitted"]), (200, &false.into()), "{}", no.text);
    let journal = std::fs::read_to_string(place.join("journal/journal")).expect("a journal");
    let line = journal.lines().find(|line| line.contains("\"promise\"") && line.contains("\"next\"")).expect("a line");
    assert!(line.contains("controls-all") || line.contains("\"token\""), "{line}");
}

/// Prints the times of answers by a whole program; `pagefold bench admit` has those without its start.
#[test]
fn askers_at_the_same_time_share_what_there_is() {
    if not_root() {
        return;
    }
    // All but 1 GiB of what is available is never lent.
    let available = host::available_bytes().expect("the kernel tells");
    let floor = available.saturating_sub(host::high_watermark_bytes().unwrap_or(0)).saturating_sub(1 << 30);
    let service = Service::start_with(Some(&format!("[balance]\nevery = 1\nfloor = '{}'\n", floor.max(M))));
    let place = service.place();
    until(60, "the balancer has looked", || admit(&place, &["--memory", "1M", "--hold", "0"]).status.code() != Some(3));
    let began = Instant::now();
    let asker = |_| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(["admit", "--json", "--memory", "300M", "--hold", "10m", "--service"]).arg(&place);
        command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("run pagefold admit")
    };
    let askers: Vec<_> = (0..16).map(asker).collect();
    let answers = askers.into_iter().map(|asker| asker.wait_with_output().expect("an answer"));
    let answers: Vec<Value> = answers.map(|out| serde_json::from_slice(&out.stdout).expect("JSON")).collect();
    eprintln!("16 answers in {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(60));
    let admitted: u64 = answers.iter().filter(|one| one["admitted"] == true).map(|one| number(&one["bytes"])).sum();
    let most = answers.iter().map(|one| number(&one["reserve_bytes"])).max().unwrap_or(0);
    assert!(admitted <= most && admitted < 16 * 300 * M, "{admitted} of {most}: {answers:?}");
}
