//! `pagefold config check`: what cannot be meant is refused with its line, and what is dangerous or without effect is told.

mod common;

use common::json_of;
use serde_json::json;
use std::fs;
use std::process::Command;

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
        ("[park]\nidle = '10m'\ngroups = ['nope']", "[park] groups: there is no [[group]] with the name \"nope\""),
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

/// A source of users and groups for the C library, as LDAP is one: neither stands in a file.
const SOURCE: &str = r#"
#include <grp.h>
#include <nss.h>
#include <pwd.h>
#include <string.h>
enum nss_status _nss_elsewhere_getpwnam_r(const char *name, struct passwd *found, char *text, size_t size, int *error) {
    if (strcmp(name, "afar")) return NSS_STATUS_NOTFOUND;
    strncpy(text, name, size);
    *found = (struct passwd){text, "", 54399, 54399, "", "/", "/bin/sh"};
    return NSS_STATUS_SUCCESS;
}
enum nss_status _nss_elsewhere_getgrnam_r(const char *name, struct group *found, char *text, size_t size, int *error) {
    static char *none[] = {0};
    if (strcmp(name, "afar")) return NSS_STATUS_NOTFOUND;
    strncpy(text, name, size);
    *found = (struct group){text, "", 54399, none};
    return NSS_STATUS_SUCCESS;
}
"#;

#[test]
fn users_and_groups_that_stand_in_no_file_are_known() {
    if common::not_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    let at = |name: &str| dir.path().join(name).display().to_string();
    fs::write(at("source.c"), SOURCE).expect("write a program");
    let cc = ["-shared", "-fPIC", "-o", &at("libnss_elsewhere.so.2"), &at("source.c")];
    assert!(Command::new("cc").args(cc).status().expect("run cc").success());
    fs::write(at("nsswitch.conf"), "passwd: files elsewhere\ngroup: files elsewhere\n").expect("write a file");
    let text = "[api]\ngroup = 'afar'\n[[group]]\nname = 'a'\nusers = ['afar']\n";
    fs::write(at("pagefold.toml"), text).expect("write a configuration");
    let check = |sources: &str| {
        let script = format!("{sources} exec \"$@\"");
        let words = ["-m", "sh", "-c", &script, "sh", env!("CARGO_BIN_EXE_pagefold"), "config", "check"];
        let mut command = Command::new("unshare");
        command.args(words).arg(at("pagefold.toml")).env("LD_LIBRARY_PATH", dir.path());
        command.output().expect("run unshare")
    };
    let known = check(&format!("mount --bind {} /etc/nsswitch.conf;", at("nsswitch.conf")));
    assert!(known.status.success(), "{known:?}");
    let unknown = check("");
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(unknown.status.code() == Some(2) && said.contains("has no") && said.contains("\"afar\""), "{said}");
}
