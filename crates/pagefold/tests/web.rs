//! `pagefold-web` beside a real service: what it tells and to whom, its rights, and its bounds.

mod common;

use common::formats::assert_documented;
use common::http::Events;
use common::supervised::{Fake, is_alive, signal, wait_for};
use common::web::{CONTROLS_ACME, CONTROLS_ALL, READS_ACME, READS_ALL, Web, tokens_text};
use common::{json_of, not_root, unprivileged};
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

/// A value without what changes from one moment to the next.
fn lasting(mut value: Value) -> Value {
    match &mut value {
        Value::Object(fields) => {
            fields.retain(|key, _| !key.ends_with("cpu_s"));
            fields.values_mut().for_each(|value| *value = lasting(value.take()));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| *item = lasting(item.take())),
        _ => {}
    }
    value
}

#[test]
fn groups_over_http_are_those_of_the_command_line() {
    if not_root() {
        return;
    }
    let web = Web::start("");
    let _member = web.member("acme", "web1");
    let _unconnected = web.installed.member("acme", "web2");
    // Answers over HTTP may be two seconds old.
    let list = wait_for("the list over HTTP is that of the command line, with both members", || {
        let listed = web.unix.get("/v1/groups").json();
        let by_command = json_of(&web.installed.pagefold(&["group", "list", "--json"]));
        (listed[0]["members"] == 2 && lasting(listed.clone()) == lasting(by_command)).then_some(listed)
    });
    // The command line, which root runs, may look at the member's process for the reason, and so for the remedy.
    let without_detail = |mut shown: Value| {
        for member in shown["members"].as_array_mut().unwrap() {
            (member["detail"], member["fix"]) = (Value::Null, Value::Null);
        }
        lasting(shown)
    };
    let shown = wait_for("the group over HTTP is that of the command line", || {
        let shown = web.unix.get("/v1/groups/acme").json();
        (without_detail(shown.clone()) == without_detail(web.installed.show("acme"))).then_some(shown)
    });
    assert_eq!((&shown["members"][1]["state"], &shown["members"][1]["connected"]), (&json!("no_agent"), &json!(false)));
    assert_documented(&["group show", "Savings of folding"], &shown);
    assert_documented(&["group list", "group show", "Savings of folding"], &list);
    let members = web.unix.get("/v1/members").json();
    assert_eq!(members, web.unix.get("/v1/groups/acme/members").json());
    assert_eq!((&members[0]["name"], &members[1]["name"]), (&json!("web1"), &json!("web2")));
    assert_documented(&["pagefold-web"], &members);
    assert_eq!(web.unix.get("/v1/groups/beta/members").json(), json!([]));
    let openapi = web.unix.get("/openapi.json").json();
    assert_eq!(openapi["openapi"], "3.1.0");
    let error = web.unix.get("/v1/groups/none").json();
    assert_documented(&["pagefold-web"], &error);
}

#[test]
fn settings_are_changed_by_those_who_may() {
    if not_root() {
        return;
    }
    let web = Web::start("control = true");
    let path = "/v1/groups/acme/settings";
    let changed = web.unix.patch(path, r#"{"pool": "8M", "fold": "off", "scan_rate": 1000}"#);
    assert_eq!(changed.status, 200, "{}", changed.text);
    assert_eq!((&changed.json()["pool"], &changed.json()["fold"]), (&json!(8 << 20), &json!("off")));
    assert_documented(&["group set", "group show"], &changed.json());
    assert_eq!(web.installed.listed("acme")["settings"], changed.json());
    // A change shows at once, and all that is printed can be sent back.
    assert_eq!(web.unix.get("/v1/groups/acme").json()["settings"], changed.json());
    assert_eq!(web.unix.patch(path, changed.body()).json(), changed.json());
    for (who, status) in [
        (web.tcp.with(CONTROLS_ALL), 200),
        (web.tcp.with(CONTROLS_ACME), 200),
        (web.unix.with(READS_ALL), 403),
        (web.tcp.with(READS_ACME), 403),
        (web.tcp.with("unknown-0123456789abcdef0123456789"), 401),
        (web.unix.with("unknown-0123456789abcdef0123456789"), 401),
        (web.tcp.clone(), 401),
    ] {
        let reply = who.patch(path, r#"{"fold": "on"}"#);
        assert_eq!(reply.status, status, "{who:?}: {}", reply.text);
    }
    assert_eq!(web.tcp.with(CONTROLS_ACME).patch("/v1/groups/beta/settings", r#"{"fold": "on"}"#).status, 404);
    for (body, status) in [
        ("{", 400),
        ("[]", 422),
        ("{}", 422),
        (r#"{"pool": -1}"#, 422),
        (r#"{"huge-pages": 1}"#, 422),
        (r#"{"fold": "\u001b[2J"}"#, 422),
        (&format!(r#"{{"pool": "{}"}}"#, "9".repeat(20_000)), 413),
    ] {
        let reply = web.unix.patch(path, body);
        assert_eq!(reply.status, status, "{body}: {}", reply.text);
        assert!(reply.json()["error"].is_string() && !reply.text.contains('\u{1b}'), "{}", reply.text);
    }
    assert_eq!(web.unix.try_request("PATCH", path, "", "{}").unwrap().status, 415);
    assert_eq!(web.installed.listed("acme")["settings"]["fold"], "on");
}

#[test]
fn users_of_the_socket_read_and_do_not_control() {
    if not_root() {
        return;
    }
    let web = Web::start("control = true");
    let script = "
import http.client, socket, sys
c = http.client.HTTPConnection('pagefold'); c.sock = socket.socket(socket.AF_UNIX); c.sock.connect(sys.argv[1])
c.request(sys.argv[2], sys.argv[3], sys.argv[4] or None, {'Content-Type': 'application/json'})
r = c.getresponse(); print(r.status, r.read().decode())";
    let ask = |command: Command, method: &str, path: &str, body: &str| {
        let mut command = command;
        command.args(["-c", script, &web.installed.text("s/api.sock"), method, path, body]);
        let output = command.output().expect("run python3");
        (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (listed, errors) = ask(unprivileged("/usr/bin/python3"), "GET", "/v1/groups", "");
    assert!(listed.starts_with("200 ") && listed.contains("beta"), "{listed} {errors}");
    let (refused, errors) =
        ask(unprivileged("/usr/bin/python3"), "PATCH", "/v1/groups/acme/settings", r#"{"fold":"off"}"#);
    assert!(refused.starts_with("403 "), "{refused} {errors}");
    let mut other = Command::new("setpriv");
    other.args(["--reuid=65533", "--regid=65533", "--clear-groups", "--", "/usr/bin/python3"]);
    let (_, errors) = ask(other, "GET", "/v1/groups", "");
    assert!(errors.contains("PermissionError"), "{errors}");
}

#[test]
fn web_side_has_no_rights_and_may_ask_little() {
    if not_root() {
        return;
    }
    let web = Web::start("");
    let (pid, uid) = web.process();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field =
        |key: &str| status.lines().find_map(|l| l.strip_prefix(key)).expect("the kernel says").trim().to_owned();
    assert_eq!(field("Uid:"), [uid.to_string(), uid.to_string(), uid.to_string(), uid.to_string()].join("\t"));
    assert!(uid >= 61_184 && field("Groups:").is_empty() && field("NoNewPrivs:") == "1");
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        assert_eq!(field(set), "0000000000000000", "{set}");
    }
    // Even root's requests change nothing, as the supervisor takes no change from there.
    assert_eq!(web.unix.patch("/v1/groups/acme/settings", r#"{"fold":"off"}"#).status, 403);
    // A process that has taken the web side over asks the supervisor by itself.
    let mut taken = Command::new("setpriv");
    taken.args([&format!("--reuid={uid}"), &format!("--regid={uid}"), "--clear-groups", "--"]);
    let mut hostile = Fake::start(taken.arg(web.installed.path("fake_agent")));
    for (question, words) in [
        (r#"{"set":{"group":"acme","change":{"fold":"off"}}}"#, "not changed over HTTP"),
        (r#"{"join":{"group":"acme","name":"x","program":"x"}}"#, "not the web side"),
    ] {
        let answer = hostile.ask(&web.installed, question);
        assert!(answer["refused"].as_str().is_some_and(|why| why.contains(words)), "{answer}");
    }
    assert!(hostile.is_refused(&web.installed), "it is no member");
    assert!(hostile.ask(&web.installed, r#"{"show":{"group":"acme"}}"#).to_string().contains("report"));
    assert_eq!(web.installed.listed("acme")["settings"]["fold"], "on");
}

#[test]
fn web_side_is_started_again_and_ends_with_its_supervisor() {
    if not_root() {
        return;
    }
    let mut web = Web::start("");
    let (first, uid) = web.process();
    signal(first, "KILL");
    // The sockets stay: clients that ask meanwhile wait, and are answered.
    assert_eq!(web.unix.get("/v1/groups").status, 200);
    let (second, same) = web.process();
    assert!(second != first && same == uid);
    web.supervisor.kill();
    wait_for("it ends with the supervisor", || (!is_alive(second)).then_some(()));
    let config = fs::read_to_string(web.installed.path("config.toml")).unwrap();
    web.supervisor = web.installed.serve(&config, &[]);
    web.wait_until_it_answers();
    assert_eq!(web.process().1, uid);
}

#[test]
fn events_tell_what_happens_in_groups_that_one_sees() {
    if not_root() {
        return;
    }
    let web = Web::start("control = true");
    let (mut all, mut acme) = (Events::open(&web.unix), Events::open(&web.tcp.with(READS_ACME)));
    // The first look at the groups is what later ones are compared with.
    std::thread::sleep(Duration::from_secs(3));
    let mut beta = web.member("beta", "b1");
    all.read_until(r#""event":"member_joined","group":"beta","member":"b1""#);
    all.read_until(r#""event":"worker_started","group":"beta""#);
    let worker = web.installed.worker("beta");
    signal(worker, "KILL");
    wait_for("another worker", || (web.installed.worker("beta") != worker).then_some(()));
    let restarted = format!(r#""detail":"process {}""#, web.installed.worker("beta"));
    all.read_until(&restarted);
    beta.kill();
    all.read_until(r#""event":"member_ended","group":"beta","member":"b1""#);
    assert_eq!(web.unix.patch("/v1/groups/acme/settings", r#"{"intra_member_only": true}"#).status, 200);
    let text = acme.read_until("settings_changed");
    assert!(text.contains("event: separated\n") && text.contains("intra_member_only: false -> true"), "{text}");
    assert!(!text.contains("beta") && text.matches("data:").count() <= 2, "{text}");
    for line in all.read_until("settings_changed").lines().filter_map(|line| line.strip_prefix("data: ")) {
        assert_documented(&["pagefold-web"], &serde_json::from_str(line).unwrap());
    }
}

#[test]
fn tokens_are_read_again_and_streams_are_asked_for_their_rights() {
    if not_root() {
        return;
    }
    let web = Web::start("");
    let bearer = web.tcp.with(READS_ACME);
    let mut stream = web.tcp.connect().unwrap();
    stream.write_all(bearer.head("GET", "/v1/events", "\r\n").as_bytes()).unwrap();
    let mut first = [0; 12];
    stream.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");
    let config = fs::read_to_string(web.installed.path("config.toml")).unwrap();
    // A file that others can read is refused, and everything stays as it was.
    fs::set_permissions(web.installed.path("tokens.toml"), Permissions::from_mode(0o644)).unwrap();
    signal(web.supervisor.0.id(), "HUP");
    wait_for("it is refused", || web.installed.log().contains("chmod 0600").then_some(()));
    assert_eq!(bearer.get("/v1/groups").status, 200);
    fs::set_permissions(web.installed.path("tokens.toml"), Permissions::from_mode(0o600)).unwrap();
    fs::write(web.installed.path("tokens.toml"), tokens_text().replace(READS_ACME, &"x".repeat(40))).unwrap();
    web.reload(&config);
    stream.read_to_end(&mut Vec::new()).unwrap();
    wait_for("the old token is unknown", || (bearer.get("/v1/groups").status == 401).then_some(()));
    assert_eq!(web.tcp.with(&"x".repeat(40)).get("/v1/groups").status, 200);
}

#[test]
fn request_that_is_too_long_is_refused() {
    if not_root() {
        return;
    }
    let web = Web::start("");
    assert_eq!(web.unix.get(&format!("/{}", "x".repeat(600))).status, 414);
    let status = |more: &str| web.unix.try_request("GET", "/v1/groups", more, "").map(|reply| reply.status);
    assert!(matches!(status(&format!("X: {}\r\n", "x".repeat(20_000))), Ok(431) | Err(_)));
    let many: String = (0..100).map(|n| format!("X-{n}: 1\r\n")).collect();
    assert!(matches!(status(&many), Ok(431) | Err(_)));
    for garbage in
        [&b"\0\x01\xff\xfe rubbish \r\n\r\n"[..], b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\r\n\r\n", &[b'G'; 100_000]]
    {
        let mut stream = web.unix.connect().unwrap();
        let _ = stream.write_all(garbage);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"), "{}", String::from_utf8_lossy(&answer));
    }
    assert_eq!(web.unix.get("/v1/groups").status, 200);
    let reply = web.unix.get("/v1/groups");
    assert_eq!(reply.header("cache-control"), Some("no-store"));
    assert_eq!((reply.header("date"), reply.header("x-content-type-options")), (None, Some("nosniff")));
}

#[test]
fn configuration_is_checked_as_the_service_reads_it() {
    let dir = tempfile::tempdir().unwrap();
    let (config, tokens) = (dir.path().join("pagefold.toml"), dir.path().join("tokens.toml"));
    let check = |more: &[&str]| common::pagefold(&[&["config", "check", config.to_str().unwrap()], more].concat());
    let api = format!("[api]\nlisten = '9469'\ntokens = '{}'\n", tokens.display());
    fs::write(&config, format!("{api}[[group]]\nname = 'acme'\n")).unwrap();
    let refused = |words: &str| {
        let output = check(&[]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && errors.contains(words), "{words}: {errors}");
    };
    refused("tokens.toml");
    fs::write(&tokens, tokens_text()).unwrap();
    fs::set_permissions(&tokens, Permissions::from_mode(0o644)).unwrap();
    refused("chmod 0600");
    fs::set_permissions(&tokens, Permissions::from_mode(0o600)).unwrap();
    let checked = json_of(&check(&["--json"]));
    assert_eq!((&checked["groups"], &checked["http"]["listen"]), (&json!(["acme"]), &json!("127.0.0.1:9469")));
    assert_documented(&["config check"], &checked);
    let said = String::from_utf8(check(&[]).stdout).unwrap();
    assert!(said.contains("fine; 1 group; HTTP") && said.contains("4 tokens, for reading alone"), "{said}");
    fs::write(&config, format!("{api}[[group]]\nname = 'acme'\npool = 'lots'\n")).unwrap();
    refused("line 6, pool: ");
}
