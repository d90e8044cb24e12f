//! Private services of other users: root may ask them, nobody else, and a hostile one harms nobody who asks.

mod common;

use common::supervised::{Installed, Supervisor, wait_for};
use common::{json_of, not_root, unprivileged};
use std::fs;
use std::os::unix::fs::chown;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The user whose service it is, in `common::unprivileged` too.
const OWNER: u32 = 65534;

/// A directory of the owner's.
fn owned(installed: &Installed, name: &str) -> String {
    fs::create_dir(installed.path(name)).expect("make a directory");
    chown(installed.path(name), Some(OWNER), Some(OWNER)).expect("give it away");
    installed.text(name)
}

fn words(output: &Output) -> String {
    [&output.stdout[..], &output.stderr[..]].map(String::from_utf8_lossy).concat()
}

#[test]
fn root_asks_private_service_of_user_and_others_do_not() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let dir = format!("{}/pagefold", owned(&installed, "own"));
    let mut serve = unprivileged(&installed.text("pagefold"));
    serve.args(["serve", "--dir", &dir]).stderr(Stdio::null());
    let _supervisor = Supervisor(serve.spawn().expect("start pagefold serve"));
    let pagefold = |args: &[&str]| installed.pagefold(&[args, &["--service", &dir]].concat());
    wait_for("it answers root", || pagefold(&["group", "list"]).status.success().then_some(()));
    let mut member = installed.stranger_unprivileged();
    let question = r#"{"join":{"group":"any","name":"web","program":"fake"}}"#;
    assert!(member.tell(&format!("ask {dir}/control.sock {question}")).contains("joined"));
    assert_eq!(member.tell(&format!("connect {dir}/agent.sock")), "ok");
    wait_for("root sees its member", || {
        let shown = json_of(&pagefold(&["group", "show", "any", "--json"]));
        (shown["members"][0]["name"] == "web" && shown["members"][0]["connected"] == true).then_some(())
    });
    let audit = json_of(&pagefold(&["audit", "--json"]));
    assert!(audit["by_group"].as_array().expect("groups").iter().any(|g| g["name"] == "any" && g["members"] == 1));
    // Root's processes do not become members there.
    let joined = installed.pagefold(&["run", "--group", "any", "--service", &dir, "--", "true"]);
    assert!(joined.status.code() == Some(1) && words(&joined).contains("run the program as that user"), "{joined:?}");
    let other = Command::new("setpriv")
        .args(["--reuid=65533", "--regid=65533", "--clear-groups", "--", &installed.text("pagefold")])
        .args(["group", "list", "--service", &dir])
        .output()
        .expect("run pagefold");
    assert_eq!(other.status.code(), Some(1), "{other:?}");
    fs::set_permissions(installed.path("own/pagefold"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let other = Command::new("setpriv")
        .args(["--reuid=65533", "--regid=65533", "--clear-groups", "--", &installed.text("pagefold")])
        .args(["group", "list", "--service", &dir])
        .output()
        .expect("run pagefold");
    assert!(other.status.code() == Some(1) && words(&other).contains("belongs to user 65534"), "{other:?}");
}

/// Listens as a service would, and answers each question by `answer`, which is Python.
fn hostile(installed: &Installed, dir: &str, answer: &str) -> Hostile {
    let script = format!(
        "import json, os, socket
s = socket.socket(1, 5); s.bind('{dir}/early.sock'); s.listen(9)
os.rename('{dir}/early.sock', '{dir}/control.sock')
while True:
    c, _ = s.accept()
    try:
        c.recv(99999)
        def send(**answer): c.send(json.dumps(answer).encode())
        group = dict(name='acme', members=1, worker='running', settings={{}})
        {answer}
    except OSError:
        pass
"
    );
    fs::write(installed.path("hostile.py"), script).expect("write a program");
    let child = unprivileged("/usr/bin/python3").arg(installed.path("hostile.py")).spawn().expect("run python3");
    wait_for("it listens", || fs::exists(format!("{dir}/control.sock")).is_ok_and(|there| there).then_some(()));
    Hostile(child)
}

/// Answers for ever. Each answer is long, so that the client soon has more than it takes.
const ENDLESS: &str = "        answer = json.dumps(dict(group=group)).encode() + b' ' * 9999
        while True: c.send(answer)";

struct Hostile(Child);

impl Drop for Hostile {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn hostile_service_harms_nobody_who_asks_it() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let _supervisor = installed.serve("[[group]]\nname = 'acme'\n", &[]);
    let member = installed.member("acme", "roots");
    let line =
        |pid: u32| format!("send(member=dict(group='acme', name='web', pid={pid}, started=1, uid=0, connected=True))");
    let usual = "settings = json.loads('SETTINGS'); group['settings'] = settings";
    // In the form that a service answers in, which `group list` does not print.
    let settings = installed.stranger().ask(&installed, r#""groups""#)["group"]["settings"].to_string();
    let usual = usual.replace("SETTINGS", &settings);
    for (name, answer, expected) in [
        ("steers", "send(refused='\\x1b[2Jno')".to_owned(), "?[2Jno"),
        ("path", format!("{usual}; group['name'] = '../x'; send(group=group)"), "is no answer"),
        ("endless", format!("{usual}\n{ENDLESS}"), "does not stop answering"),
        ("deep", "c.send(b'[' * 100000)".to_owned(), "the service has hung up"),
        ("files", "socket.send_fds(c, [b'{}'], [0] * 60); c.close()".to_owned(), "the service has hung up"),
    ] {
        let dir = owned(&installed, name);
        let _hostile = hostile(&installed, &dir, &answer);
        let begin = Instant::now();
        let output = installed.pagefold(&["group", "list", "--service", &dir]);
        let said = words(&output);
        assert!(output.status.code() == Some(1) && said.contains(expected), "{name}: {said}");
        assert!(!said.contains('\x1b') && said.len() < 2000, "{name}: {said}");
        assert!(begin.elapsed() < Duration::from_secs(30), "{name}");
    }
    // Processes of others are not believed to be its members.
    let dir = owned(&installed, "claims");
    let _hostile = hostile(
        &installed,
        &dir,
        &format!("{}; c.send(b'\"done\"'); c.recv(999); c.send(b'\"done\"')", line(member.pid())),
    );
    let doctor = installed.pagefold(&["doctor", "--json", "--pid", &member.pid().to_string(), "--service", &dir]);
    assert!(!words(&doctor).contains("member web"), "{}", words(&doctor));
    // A socket that leads to root's service is not asked: root would change that one.
    let dir = owned(&installed, "leads");
    std::os::unix::fs::symlink(installed.path("s/control.sock"), format!("{dir}/control.sock")).unwrap();
    let set = installed.pagefold(&["group", "set", "acme", "--fold", "off", "--service", &dir]);
    assert!(set.status.code() == Some(1) && words(&set).contains("a process of user 0 listens there"), "{set:?}");
    assert_eq!(installed.listed("acme")["settings"]["fold"], "on");
}

#[test]
fn advice_about_rights_is_for_directories_of_services() {
    let installed = Installed::new();
    for args in [&["group", "list", "--service", "/tmp"][..], &["serve", "--dir", "/tmp"]] {
        let output = installed.pagefold(args);
        let said = words(&output);
        assert!(output.status.code() == Some(1) && said.contains("others may write in /tmp"), "{said}");
        assert!(!said.contains("chmod") && said.contains("such as /tmp/pagefold"), "{said}");
    }
}
