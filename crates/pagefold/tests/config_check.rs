//! `pagefold config check`: what cannot be meant is refused with its line, and what is dangerous or without effect is told.

mod common;

use common::json_of;
use serde_json::json;
use std::fs;

fn check(text: &str) -> std::process::Output {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("pagefold.toml");
    fs::write(&file, text).expect("write a configuration");
    common::pagefold(&["config", "check", file.to_str().expect("a plain path"), "--json"])
}

#[test]
fn dangerous_and_ineffective_parts_are_told() {
    let own = std::process::id();
    let tokens = tempfile::NamedTempFile::new().expect("a temporary file");
    let api = format!("[api]\nlisten = '0.0.0.0:9469'\ntokens = '{}'\n", tokens.path().display());
    for (text, doubt) in [
        ("[service]\nreserve = '100T'", "nothing can be unfolded"),
        ("[balance]\nwithin = '/nope'", "no such control group"),
        (&api, "plain text"),
        ("[[guest]]\nname = 'a-*'\nguaranteed = '1G'", "1 [[guest]] without [balance] have no effect"),
        ("[balance]\n[[guest]]\nname = 'nobody-*'\nguaranteed = '1G'", "\"nobody-*\" is no guest of this host now"),
        ("[[group]]\nname = 'a'\n[[enrol]]\ngroup = 'a'\ncgroup = '/*'", "the system's own services among them"),
        (
            "[[group]]\nname = 'a'\n[[enrol]]\ngroup = 'a'\ncgroup = '/nope/x'",
            "cgroup /nope/x, of group a, fits no process",
        ),
        ("[[group]]\nname = 'a'\n[[group.processes]]\nuid = 54321", "1 of its rules for processes fit no process"),
    ] {
        let doubts = json_of(&check(text))["doubts"].clone();
        assert!(
            doubts
                .as_array()
                .is_some_and(|all| all.iter().any(|one| one.as_str().is_some_and(|one| one.contains(doubt)))),
            "{doubt}: {doubts}"
        );
    }
    let uid = host::effective_uid(own).expect("this process");
    let fine = format!("[balance]\n[[group]]\nname = 'a'\n[[group.processes]]\nuid = {uid}\n");
    assert_eq!(json_of(&check(&fine))["doubts"], json!([]));
}

#[test]
fn socket_with_a_path_that_the_kernel_does_not_take_is_refused() {
    let long = "x".repeat(120);
    for text in [format!("[api]\nsocket = '/run/{long}'"), format!("[service]\ndir = '/run/{}'", &long[..95])] {
        let refused = check(&text);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(2) && said.contains("line 2") && said.contains("107 bytes"), "{said}");
    }
    assert!(check(&format!("[service]\ndir = '/run/{}'", &long[..80])).status.success());
}
