//! Hostile words, in each view of a service: nothing is injected, and nothing is told that is not the reader's.
//!
//! A compromised worker says what it likes of its group, and callers send what they like. HTML has its own test in the room
//! `report`: `hostile_names_stay_text`.

mod common;

use api::control::{Bill, GroupReport, MemberReport};
use common::http::{Events, Http};
use common::supervised::{Fake, signal, wait_for};
use common::web::{CONTROLS_ALL, READS_ACME, READS_ALL, Web};
use common::{json_of, not_root};
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Clears a terminal, reorders text, ends a line, an event, a header, a label, an element and a file of metrics.
const HOSTILE: &str =
    "\u{1b}[2J\u{9b}1m\u{202e}\r\n\r\n# EOF\ndata: evil\n\nevil_metric 1\n\"} 1\\\n<script>alert(1)</script>";
/// Words about other groups, which a supervisor may have told the worker.
const OF_OTHERS: &str = "3 GiB of them promised to other groups that unfold";

/// A service whose group acme has a compromised worker.
struct Scene {
    web: Web,
    evil: Fake,
    _member: Fake,
}

impl Scene {
    fn new() -> Self {
        let mut web = Web::start("control = true");
        let member = web.member("acme", "web1");
        let worker = web.installed.worker("acme");
        web.supervisor.kill();
        signal(worker, "KILL");
        let mut evil = web.installed.stranger();
        assert_eq!(evil.tell(&format!("listen {}", web.installed.text("s/workers/acme.sock"))), "ok");
        let config = fs::read_to_string(web.installed.path("config.toml")).unwrap();
        web.supervisor = web.installed.serve(&config, &[]);
        web.wait_until_it_answers();
        let mut scene = Self { web, evil, _member: member };
        scene.say(&json!({ "adopted": { "members": [], "segments": [], "begun": true } }));
        scene
    }

    fn say(&mut self, news: &Value) {
        // Between texts, this JSON has no space.
        let news = news.to_string().replace(' ', "\\u0020");
        assert_eq!(self.evil.tell(&format!("news {news} 0")), "ok");
    }

    /// Does something while the worker reports this, whatever it is asked.
    fn while_it_reports<T>(&mut self, report: &GroupReport, work: impl FnOnce(&Web) -> T) -> T {
        let (news, over) = (json!({ "report": report }).to_string().replace(' ', "\\u0020"), AtomicBool::new(false));
        let Self { web, evil, .. } = self;
        thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    evil.tell(&format!("news {news} 0"));
                    thread::sleep(Duration::from_millis(50));
                }
            });
            // The web side keeps answers for two seconds.
            thread::sleep(Duration::from_millis(2500));
            // A view that fails must not have the reporter go on.
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(web)));
            over.store(true, Ordering::Relaxed);
            done.unwrap_or_else(|e| std::panic::resume_unwind(e))
        })
    }
}

fn report() -> GroupReport {
    let text = || HOSTILE.to_owned();
    // Members whose names are not valid are left out by every reader.
    let member = |name: &str, pid| MemberReport {
        name: name.to_owned(),
        pid,
        connected: true,
        state: text(),
        detail: text(),
        fix: Some(text()),
        ..MemberReport::default()
    };
    let fold_failures = [(text(), 7), ("busy".to_owned(), 3)].into();
    GroupReport {
        members: vec![member("m", 1), member("m", 2), member(HOSTILE, 3)],
        no_room: Some(text()),
        waits_for_room: Some(format!("{HOSTILE}{OF_OTHERS}")),
        bill: Bill { fold_failures, ..Bill::default() },
        ..GroupReport::none()
    }
}

/// Asserts that a text steers nothing, and that no line of it was written by the worker.
fn assert_plain(what: &str, text: &str) {
    let steers = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
    assert!(!text.replace("\r\n", "\n").contains(steers), "{what}: {text:?}");
    for line in text.lines() {
        for begin in ["data: evil", "evil_metric", "\"} 1", "<script>"] {
            assert!(!line.starts_with(begin), "{what}: {text}");
        }
    }
}

/// Asserts that no text within a value steers anything, once it is read.
fn assert_texts_plain(value: &Value) {
    match value {
        Value::String(text) => assert!(!text.contains(|c: char| c.is_control() || c == '\u{202e}'), "{text:?}"),
        Value::Array(items) => items.iter().for_each(assert_texts_plain),
        Value::Object(fields) => fields.iter().for_each(|(key, value)| {
            assert_texts_plain(&json!(key));
            assert_texts_plain(value);
        }),
        _ => {}
    }
}

#[test]
fn terminal_shows_hostile_words_as_text() {
    if not_root() {
        return;
    }
    Scene::new().while_it_reports(&report(), |web| {
        for words in [&["group", "show", "acme"][..], &["group", "list"]] {
            let output = web.installed.pagefold(words);
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success() && text.contains("acme"), "{text}");
            assert_plain("stdout", &text);
            assert_plain("stderr", &String::from_utf8(output.stderr).unwrap());
        }
        let shown = String::from_utf8(web.installed.pagefold(&["group", "show", "acme"]).stdout).unwrap();
        assert!(shown.contains("alert(1)"), "the words are there: {shown}");
    });
}

#[test]
fn json_of_commands_has_hostile_words_as_text() {
    if not_root() {
        return;
    }
    Scene::new().while_it_reports(&report(), |web| {
        let shown = json_of(&web.installed.pagefold(&["group", "show", "acme", "--json"]));
        assert!(shown["no_room"].as_str().unwrap().contains("<script>"), "{shown}");
        assert!(shown["waits_for_room"].as_str().unwrap().contains(OF_OTHERS), "{shown}");
        assert_texts_plain(&shown);
        assert_texts_plain(&json_of(&web.installed.pagefold(&["group", "list", "--json"])));
        // A reason that is none of ours would be kept for ever.
        assert_eq!((&shown["fold_failures"]["busy"], &shown["fold_failures"][HOSTILE]), (&json!(3), &Value::Null));
        let reasons = shown["fold_failures"].as_object().unwrap();
        assert!(reasons.keys().all(|reason| !reason.contains("script")), "{shown}");
        let state = fs::read_to_string(web.installed.path("s/state.json")).unwrap();
        assert!(!state.contains("script"), "{state}");
    });
}

#[test]
fn http_answers_have_hostile_words_as_text_and_none_of_other_groups() {
    if not_root() {
        return;
    }
    Scene::new().while_it_reports(&report(), |web| {
        for path in ["/v1/groups", "/v1/groups/acme", "/v1/members", "/v1/groups/acme/members"] {
            let (all, bound) = (web.unix.get(path), web.tcp.with(READS_ACME).get(path));
            for reply in [&all, &bound] {
                assert_eq!((reply.status, reply.header("content-type")), (200, Some("application/json")));
                assert_eq!(reply.header("x-content-type-options"), Some("nosniff"));
                assert_plain(path, &reply.text);
                assert_texts_plain(&reply.json());
            }
            assert!(!bound.text.contains("other groups"), "{}", bound.text);
        }
        let [all, bound] = [&web.unix, &web.tcp.with(READS_ACME)].map(|http| http.get("/v1/groups/acme").json());
        assert!(all["waits_for_room"].as_str().unwrap().contains(OF_OTHERS), "{all}");
        assert!(bound["waits_for_room"].as_str().unwrap().contains("its log says why"), "{bound}");
    });
}

#[test]
fn metrics_have_hostile_words_in_labels_alone() {
    if not_root() {
        return;
    }
    Scene::new().while_it_reports(&report(), |web| {
        for accept in ["", "Accept: application/openmetrics-text\r\n"] {
            let reply = web.unix.try_request("GET", "/metrics", accept, "").unwrap();
            let text = reply.body();
            assert!(text.contains("alert(1)"), "the words are there: {text}");
            assert_plain("metrics", text);
            for line in text.lines() {
                assert!(line.starts_with("pagefold_") || line.starts_with("# "), "{line}");
                assert!(!line.contains("reason=\"") || !line.contains("script"), "{line}");
            }
            let series =
                text.lines().filter(|line| line.starts_with("pagefold_member_saved_bytes{group=\"acme\",member=\"m\""));
            assert_eq!(series.count(), 1, "two members of one name would be one series twice: {text}");
            assert_eq!(text.matches("# EOF").count() - text.matches("?# EOF").count(), usize::from(!accept.is_empty()));
        }
    });
}

#[test]
fn events_have_hostile_words_in_their_data_alone() {
    if not_root() {
        return;
    }
    let mut scene = Scene::new();
    let honest = MemberReport { name: "m".into(), pid: 1, state: "folding".into(), ..MemberReport::default() };
    let honest = GroupReport { members: vec![honest.clone()], ..GroupReport::none() };
    let mut stream = scene.while_it_reports(&honest, |web| {
        let stream = Events::open(&web.unix);
        // The first look at the groups is what later ones are compared with.
        thread::sleep(Duration::from_secs(4));
        stream
    });
    let text = scene.while_it_reports(&report(), |_| stream.read_until("member_state"));
    // The stream comes in chunks, each after its size.
    let is_size = |line: &str| line.bytes().all(|b| b.is_ascii_hexdigit());
    for line in text.lines().filter(|line| !is_size(line)) {
        assert!(["event: ", "data: {", ":"].iter().any(|begin| line.starts_with(begin)), "{line:?} in {text:?}");
        if let Some(data) = line.strip_prefix("data: ").filter(|data| data.ends_with('}')) {
            assert_texts_plain(&serde_json::from_str(data).unwrap());
        }
    }
    assert!(text.contains("event: no_room") && text.contains("alert(1)"), "{text}");
}

#[test]
fn log_has_hostile_words_within_a_line() {
    if not_root() {
        return;
    }
    let mut scene = Scene::new();
    scene.say(&json!({ "event": HOSTILE }));
    let claimed = json!([{ "name": HOSTILE, "pid": std::process::id(), "started": 1 }]);
    scene.say(&json!({ "adopted": { "members": claimed, "segments": [], "begun": true } }));
    let log =
        wait_for("the event is in the log", || Some(scene.web.installed.log()).filter(|l| l.contains("alert(1)")));
    assert_plain("log", &log);
    assert!(log.lines().all(|line| line.starts_with("pagefold: ")), "{log}");
}

/// The answer to bytes that are sent as they are.
fn answer_to(http: &Http, bytes: &[u8]) -> String {
    let mut stream = http.connect().unwrap();
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).expect("answers are text")
}

#[test]
fn errors_repeat_nothing_that_steers_and_no_secret() {
    if not_root() {
        return;
    }
    let web = Web::start("control = true");
    let secret = "Secret-0123456789abcdef0123456789abcdef";
    let evil_token = format!("Authorization: Bearer {secret}\u{1b}[2J\r\n");
    let patch = "PATCH /v1/groups/acme/settings";
    let json = "Content-Type: application/json\r\n";
    let body = |body: &str| format!("{json}Content-Length: {}\r\n", body.len());
    let bodies =
        ["{\"\\u001b[2J\\u202e\":1}", "{\"fold\":\"\\u001b[2J\\r\\nX-Evil: 1\"}", "\u{1b}[2J\u{202e}", "[[[[[["];
    let mut requests = vec![
        ("GET /v1/groups/%0d%0aX-Evil:%201%0d%0a%0d%0a%1b%5b2J".to_owned(), String::new(), ""),
        ("GET /v1/groups/%e2%80%ae%3cscript%3e".to_owned(), String::new(), ""),
        ("GET /%3cscript%3ealert(1)%3c/script%3e".to_owned(), String::new(), ""),
        ("GET /v1/groups/../../etc/passwd".to_owned(), String::new(), ""),
        ("GET /v1/groups".to_owned(), evil_token, ""),
        ("GET /v1/groups".to_owned(), format!("Authorization: Bearer {secret}\r\n"), ""),
        ("EVIL\u{1b}[2J /v1/groups".to_owned(), String::new(), ""),
    ];
    requests.extend(bodies.map(|text| (patch.to_owned(), body(text), text)));
    for (line, headers, body) in requests {
        for http in [&web.unix, &web.tcp] {
            let request = format!("{line} HTTP/1.1\r\nHost: x\r\n{headers}Connection: close\r\n\r\n{body}");
            let answer = answer_to(http, request.as_bytes());
            let (head, told) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
            assert!(answer.is_empty() || head.starts_with("HTTP/1.1 4"), "{line}: {answer}");
            assert!(!head.contains("X-Evil") && !answer.contains(secret), "{line}: {answer}");
            assert_plain(&line, &answer);
            assert!(told.is_empty() || serde_json::from_str::<Value>(told).is_ok(), "{line}: {answer}");
            if !told.is_empty() {
                assert_texts_plain(&serde_json::from_str(told).unwrap());
                assert!(head.contains("content-type: application/json"), "{head}");
            }
        }
    }
    let log = web.installed.log();
    assert_plain("log", &log);
    for token in [secret, READS_ALL, CONTROLS_ALL, READS_ACME] {
        assert!(!log.contains(token), "a token is in the log");
        for path in ["/openapi.json", "/metrics", "/v1/groups"] {
            assert!(!web.unix.get(path).text.contains(token), "a token is told at {path}");
        }
    }
}

#[test]
fn check_of_a_hostile_configuration_steers_nothing_and_tells_no_secret() {
    let dir = tempfile::tempdir().unwrap();
    let (config, tokens) = (dir.path().join("a\u{1b}[2J.toml"), dir.path().join("tokens\u{1b}[2J.toml"));
    let secret = "Secret-0123456789abcdef0123456789abcdef";
    let escaped = "\\u001b[2J\\u202e";
    let api =
        format!("[api]\ntokens = {:?}\n", tokens.to_str().unwrap().replace('\u{1b}', "X")).replace('X', "\\u001b");
    let named = format!("[[group]]\nname = \"{escaped}\"\n");
    let keyed = format!("[[group]]\nname = 'acme'\n\"{escaped}\" = 1\n");
    let token = |name: &str, more: &str| format!("[[token]]\nname = \"{name}\"\ntoken = '{secret}'\n{more}\n");
    for (written, written_tokens) in [
        (named, String::new()),
        (keyed, String::new()),
        ("[[group]]\nname = 'acme'\npool = \"\\u001b[2J\"\n".to_owned(), String::new()),
        ("[service]\ndir = [\"\\u001b[2J\"]\n".to_owned(), String::new()),
        (api.clone(), token(escaped, "")),
        (api.clone(), token("a", "rights = \"\\u001b[2J\"")),
        (api.clone(), token("a", "groups = [\"\\u001b[2J\"]")),
        (api.clone(), token("a", &format!("\"{secret}\" = 1"))),
        (api.clone(), token("a", "") + &token("b", "")),
        (api, format!("[[token]]\nname = 'a'\ntoken = {secret}\n")),
    ] {
        fs::write(&config, &written).unwrap();
        fs::write(&tokens, &written_tokens).unwrap();
        fs::set_permissions(&tokens, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let output = common::pagefold(&["config", "check", config.to_str().unwrap()]);
        let said = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{written}{written_tokens}: {said}");
        assert_plain("config check", &said);
        assert!(!said.contains(secret), "{said}");
    }
}
