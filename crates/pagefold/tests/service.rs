//! `pagefold serve` with real supervisors and workers: which processes are admitted, and which outlive others.

mod common;

use common::supervised::{Fake, Installed, Supervisor, is_alive, signal, wait_for, wait_for_within};
use common::{json_of, not_root, unprivileged};
use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

const TWO: &str = "\
[[group]]
name = 'acme'
[[group]]
name = 'beta'
users = [65534]
[[group.processes]]
uid = 65534
program = '/tmp/*/fake_agent'
";

fn status_of(pid: u32, key: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    status.lines().find_map(|l| l.strip_prefix(key)).expect("the kernel says").trim().to_owned()
}

#[test]
fn only_registered_processes_and_those_of_a_rule_are_admitted() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let _supervisor = installed.serve(TWO, &[]);
    let mut web = installed.member("acme", "web");
    assert!(web.connects(&installed), "{}", installed.log());
    installed.until_members("acme", &["web"]);
    // A child of a member is no member: it was not registered.
    let child = web.tell(&format!("child {}", installed.text("s/agent.sock")));
    assert!(child.starts_with("closed"), "{child}");
    assert!(installed.stranger().is_refused(&installed));
    // The reason is logged after the connection has been closed.
    let refused = || installed.log().contains("was not started by `pagefold run`, and no rule fits it");
    wait_for("the log has the reason", || refused().then_some(()));
    let mut by_rule = installed.stranger_unprivileged();
    assert!(by_rule.connects(&installed), "{}", installed.log());
    installed.until_members("beta", &[&format!("fake-agent-{}", by_rule.pid())]);
    installed.until_members("acme", &["web"]);
    // A process's end also ends its membership, and frees its name.
    web.kill();
    wait_for("web is forgotten", || (installed.listed("acme")["members"] == 0).then_some(()));
    assert!(installed.member("acme", "web").connects(&installed));
}

#[test]
fn false_registrations_are_refused() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let _supervisor = installed.serve(TWO, &[]);
    let mut web = installed.member("acme", "web");
    assert!(web.connects(&installed));
    // A member cannot join another group.
    let answer = web.ask(&installed, r#"{"join":{"group":"beta","name":"web","program":"x"}}"#);
    assert!(answer["refused"].as_str().unwrap().contains("stays one until it ends"), "{answer}");
    let (mut other, mut root) = (installed.stranger_unprivileged(), installed.stranger());
    assert_other_user_is_refused(&installed, &mut other);
    assert_bad_names_are_refused(&installed, &mut root);
    // A pid in the question changes nothing: the supervisor takes it from the peer's credentials.
    let spoof = format!(r#"{{"join":{{"group":"beta","name":"spoof","program":"x","pid":{}}}}}"#, web.pid());
    assert!(other.ask(&installed, &spoof)["joined"] == "spoof");
    let state = fs::read_to_string(installed.path("s/state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_str(&state).unwrap();
    let spoof = state["members"].as_array().unwrap().iter().find(|m| m["name"] == "spoof").unwrap();
    assert_eq!(spoof["pid"], other.pid());
    // A message that is no question ends the connection, and the service goes on answering.
    for nonsense in ["", "{}", "nonsense", r#"{"join":{}}"#, r#"{"show":{"group":"acme"}} {"#] {
        assert_eq!(root.ask(&installed, nonsense), "closed", "{nonsense}");
    }
    assert!(web.is_connected());
    installed.until_members("acme", &["web"]);
}

/// Asserts that a user whom the group does not name may not join it, change it or look at it.
fn assert_other_user_is_refused(installed: &Installed, other: &mut Fake) {
    for question in [
        r#"{"join":{"group":"acme","name":"x","program":"x"}}"#,
        r#"{"set":{"group":"acme","change":{"fold":"off"}}}"#,
        r#"{"show":{"group":"acme"}}"#,
    ] {
        let answer = other.ask(installed, question);
        assert!(answer["refused"].as_str().unwrap().contains("user 65534 may not deal with group acme"), "{answer}");
    }
    assert_eq!(installed.listed("acme")["settings"]["fold"], "on");
    let answer = other.ask(installed, r#"{"join":{"group":"no-such","name":"x","program":"x"}}"#);
    assert!(answer["refused"].is_string(), "{answer}");
    assert!(other.ask(installed, r#""members""#).to_string().contains("done"), "acme's members were shown");
}

/// Asserts that nobody can join with a name that is taken or malformed.
fn assert_bad_names_are_refused(installed: &Installed, root: &mut Fake) {
    for (name, words) in [
        ("web", "has a member web already"),
        ("../../x", "member name \\\"../../x\\\""),
        ("\\u001b[2J", "member name"),
        ("", "member name"),
        (&"n".repeat(49), "member name"),
    ] {
        let question = format!(r#"{{"join":{{"group":"acme","name":"{name}","program":"x"}}}}"#);
        let answer = root.ask(installed, &question).to_string();
        assert!(answer.contains("refused") && answer.contains(words), "{name}: {answer}");
    }
}

#[test]
fn process_that_maps_another_groups_pool_cannot_join() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let _supervisor = installed.serve(TWO, &[]);
    // The program holds a private mapping of a file that looks like acme's pool, and connects for beta.
    installed.connect_with_pool_of_acme("beta");
    let refused = || installed.log().contains("maps the pool of group acme, and cannot join beta");
    wait_for("the log has the reason", || refused().then_some(()));
}

#[test]
fn workers_outlive_the_supervisor_and_are_found_by_the_next() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let mut supervisor = installed.serve(TWO, &[]);
    let (mut web, mut db) = (installed.member("acme", "web"), installed.member("acme", "db"));
    assert!(web.connects(&installed) && db.connects(&installed));
    let worker = installed.worker("acme");
    assert!(installed.pagefold(&["group", "set", "acme", "--scan-rate", "1234"]).status.success());
    supervisor.kill();
    assert!(is_alive(worker) && web.is_connected());
    let mut supervisor = installed.serve(TWO, &[]);
    assert_eq!(installed.worker("acme"), worker, "{}", installed.log());
    installed.until_members("acme", &["db", "web"]);
    assert_eq!(installed.listed("acme")["settings"]["scan_rate"], 1234);
    assert!(web.is_connected() && db.is_connected());
    // Members are still members, and no other process gets their names.
    assert!(web.connects(&installed));
    let taken = installed.pagefold(&["run", "--group", "acme", "--name", "db", "--", "true"]);
    assert!(String::from_utf8_lossy(&taken.stderr).contains("has a member db already"), "{taken:?}");
    // The worker may also die while there is no supervisor.
    supervisor.kill();
    signal(worker, "KILL");
    let supervisor = installed.serve(TWO, &[]);
    assert!(web.connects(&installed), "{}", installed.log());
    assert_ne!(installed.worker("acme"), worker);
    // A supervisor that ends on `SIGTERM` also leaves its workers to the next one.
    let worker = installed.worker("acme");
    supervisor.terminate();
    assert!(is_alive(worker) && web.is_connected());
    assert!(installed.log().contains("workers go on for 30 s"), "{}", installed.log());
    let supervisor = installed.serve(TWO, &["--stop-workers"]);
    assert_eq!(installed.worker("acme"), worker);
    supervisor.terminate();
    // Half a minute after the first of these ends, the worker would be ended in any case.
    wait_for_within(Duration::from_secs(15), "the worker ends", || (!is_alive(worker)).then_some(()));
    assert!(is_alive(web.pid()) && !web.is_connected());
}

#[test]
fn a_dead_worker_is_replaced() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let _supervisor = installed.serve(TWO, &[]);
    let mut web = installed.member("acme", "web");
    assert!(web.connects(&installed));
    let mut workers = vec![installed.worker("acme")];
    for _ in 0..3 {
        signal(*workers.last().unwrap(), "KILL");
        wait_for("the connection ends", || (!web.is_connected()).then_some(()));
        // A group has a worker as long as it has a member, even if the member does not ask for it.
        let next = wait_for("another worker", || Some(installed.worker("acme")).filter(|w| !workers.contains(w)));
        workers.push(next);
        assert!(web.connects(&installed));
        installed.until_members("acme", &["web"]);
    }
    let log = installed.log();
    assert_eq!(log.matches("worker started").count(), 4, "{log}");
}

#[test]
fn worker_has_no_rights_and_its_own_user_and_control_group() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let supervisor = installed.serve(TWO, &["--stop-workers"]);
    let (mut one, mut other) = (installed.member("acme", "a"), installed.member("beta", "b"));
    assert!(one.connects(&installed) && other.connects(&installed));
    let workers = [installed.worker("acme"), installed.worker("beta")];
    let mut places = Vec::new();
    for (pid, group) in workers.iter().zip(["acme", "beta"]) {
        let uid: u32 = status_of(*pid, "Uid:").split('\t').next().unwrap().parse().unwrap();
        assert!((61_184..65_520).contains(&uid));
        for ids in ["Uid:", "Gid:"] {
            assert_eq!(status_of(*pid, ids), vec![uid.to_string(); 4].join("\t"), "{ids}");
        }
        assert_eq!(status_of(*pid, "Groups:"), "");
        assert_eq!(status_of(*pid, "NoNewPrivs:"), "1");
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
            assert_eq!(status_of(*pid, set), "0000000000000000", "{set}");
        }
        let fields = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let session: Vec<&str> = fields.rsplit_once(") ").unwrap().1.split(' ').collect();
        assert_eq!(session[2], pid.to_string(), "it leads its process group");
        assert!(fs::read(format!("/proc/{pid}/environ")).unwrap().is_empty());
        let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        if cgroup.contains(&format!("/pagefold/{group}")) {
            places.extend(cgroup_dirs(group, *pid));
        } else {
            assert!(installed.log().contains("no control groups of their own"), "{}", installed.log());
        }
    }
    assert_ne!(status_of(workers[0], "Uid:"), status_of(workers[1], "Uid:"));
    // Only a supervisor can connect to a worker's socket.
    let socket = installed.text("s/workers/acme.sock");
    let mut connect = unprivileged("/usr/bin/python3");
    connect.args(["-c", &format!("import socket; socket.socket(1, 5).connect('{socket}')")]);
    assert!(!connect.output().expect("run python3").status.success());
    supervisor.terminate();
    wait_for("the workers end", || (!workers.into_iter().any(is_alive)).then_some(()));
    // Another test of this program may have a group of the same name for a while.
    for place in places {
        wait_for(&format!("{} is removed", place.display()), || (!place.exists()).then_some(()));
    }
}

/// Directories of a worker's control group, below this test's own control group.
fn cgroup_dirs(group: &str, pid: u32) -> Vec<std::path::PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap();
    let paths = own.lines().filter_map(|l| l.rsplit(':').next());
    let trees = fs::read_dir("/sys/fs/cgroup").unwrap().flatten().map(|e| e.path()).chain(["/sys/fs/cgroup".into()]);
    let trees: Vec<_> = trees.collect();
    paths
        .flat_map(|p| trees.iter().map(move |t| t.join(p.trim_start_matches('/')).join("pagefold").join(group)))
        // Others may have such a group elsewhere in the tree.
        .filter(|dir| {
            let inside = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
            inside.lines().any(|line| line == pid.to_string())
        })
        .collect()
}

#[test]
fn a_second_service_in_the_same_place_is_refused() {
    let installed = Installed::new();
    let _supervisor = installed.serve("", &[]);
    let second = installed.pagefold(&["serve", "--dir", &installed.text("s")]);
    assert_eq!(second.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&second.stderr).contains("another service runs in"), "{second:?}");
}

#[test]
fn annotated_example_is_served_and_help_has_its_keys() {
    if not_root() {
        return;
    }
    let example = include_str!("../../../docs/pagefold.toml");
    let installed = Installed::new();
    let _supervisor = installed.serve(example, &[]);
    assert_eq!(installed.listed("acme")["settings"]["fold"], "on");
    let help = String::from_utf8(installed.pagefold(&["serve", "--help"]).stdout).expect("text");
    assert!(help.contains("docs/pagefold.toml"), "{help}");
    for key in example.lines().filter_map(|line| line.trim_start_matches('#').split_once(" = ")).map(|(key, _)| key) {
        assert!(help.contains(&format!("\n  {key} = ")), "{key}: {help}");
    }
}

#[test]
fn a_wrong_configuration_is_named_by_file_line_and_key() {
    let installed = Installed::new();
    let path = installed.text("wrong.toml");
    fs::write(&path, "[[group]]\nname = 'acme'\nscan-rat = 3\n").unwrap();
    let output = installed.pagefold(&["serve", "--config", &path, "--dir", &installed.text("s")]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains(&format!("{path}: line 3: unknown field `scan-rat`")), "{error}");
    assert!(!installed.path("s").exists(), "it left a directory behind");
}

#[test]
fn hangup_without_configuration_changes_nothing_and_is_logged() {
    let installed = Installed::new();
    let supervisor = installed.serve("", &[]);
    signal(supervisor.0.id(), "HUP");
    wait_for("the log has it", || installed.log().contains("SIGHUP: this service has no configuration").then_some(()));
    assert!(installed.pagefold(&["group", "list"]).status.success());
    supervisor.terminate();
}

#[test]
fn one_rule_says_where_the_service_is() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let at = |words: &[&str], preset: &str| {
        let mut command = Command::new(installed.path("pagefold"));
        command.args(words).env("PAGEFOLD_DIR", installed.path(preset)).output().expect("run pagefold")
    };
    // `serve`: the variable counts more than the configuration, and the option more than both.
    let config = format!("[service]\ndir = '{}'\n", installed.text("by-config"));
    fs::write(installed.path("dirs.toml"), config).unwrap();
    let serve = |more: &[&str], dir: &str| {
        let mut command = Command::new(installed.path("pagefold"));
        command.args(["serve", "--config", &installed.text("dirs.toml")]).args(more);
        let child = command
            .env("PAGEFOLD_DIR", installed.path("preset"))
            .stderr(Stdio::null())
            .spawn()
            .expect("start pagefold serve");
        let supervisor = Supervisor(child);
        let listening = || at(&["group", "list"], dir).status.success().then_some(());
        wait_for(&format!("the service answers in {dir}"), listening);
        supervisor.terminate();
    };
    serve(&[], "preset");
    serve(&["--dir", &installed.text("named")], "named");
    assert!(!installed.path("by-config").exists());
    // `run` starts a private service where the variable says, and none where an option does.
    let run = at(&["run", "--group", "acme", "--", "sleep", "0.1"], "private");
    assert!(run.status.success(), "{run:?}");
    let listed = json_of(&at(&["group", "list", "--json", "--service", &installed.text("private")], "nowhere"));
    assert_eq!(listed[0]["name"], "acme");
    let none = at(&["run", "--group", "acme", "--service", &installed.text("none"), "--", "true"], "private");
    assert!(none.status.code() == Some(1) && !installed.path("none").exists(), "{none:?}");
    // `doctor` asks the one that is named.
    let doctor = at(&["doctor", "--pid", "1", "--json", "--service", &installed.text("none")], "private");
    assert!(String::from_utf8_lossy(&doctor.stdout).contains("no service answers in"), "{doctor:?}");
    for words in [&["run"][..], &["serve"], &["group"], &["audit"], &["doctor"]] {
        let help = at(&[words, &["--help"]].concat(), "private");
        let help = String::from_utf8_lossy(&help.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(help.contains(api::place::RULE), "{words:?}: {help}");
    }
}
