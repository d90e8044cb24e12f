//! `pagefold doctor` on this host, and on real QEMUs that can and cannot be merged.

mod common;

use common::qemu::Qemu;
use common::{Stage, json_of, pagefold, unprivileged};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;

fn check<'a>(checks: &'a Value, id: &str) -> &'a Value {
    let checks = checks.as_array().expect("a list");
    checks.iter().find(|c| c["id"] == id).unwrap_or_else(|| panic!("no {id} in {checks:?}"))
}

/// The checks that `pagefold doctor` prints. It may exit with 3, since a host may lack something.
fn doctor(args: &[&str]) -> Value {
    let output = pagefold(&[&["doctor", "--json"], args].concat());
    assert!(matches!(output.status.code(), Some(0 | 3)), "{output:?}");
    checks_of(&output.stdout)
}

fn checks_of(stdout: &[u8]) -> Value {
    let found: Value = serde_json::from_slice(stdout).expect("JSON");
    common::formats::assert_documented(&["doctor --json"], &found);
    found["checks"].clone()
}

#[test]
fn every_check_has_the_documented_fields() {
    let own = std::process::id().to_string();
    let checks = doctor(&["--pid", &own]);
    for check in checks.as_array().unwrap() {
        let keys: Vec<&String> = check.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["fix", "fix_for_good", "found", "id", "needed_for", "status"]);
        assert!(matches!(check["status"].as_str(), Some("ok" | "warn" | "fail")), "{check}");
        assert_eq!(check["fix"].is_null(), check["status"] == "ok", "{check}");
    }
    for id in [
        "kernel:uffdio_move",
        "kernel:wp_async",
        "kernel:pagemap_scan",
        "kernel:memfd_seals",
        "rights:userfaultfd",
        "rights:page_frames",
        "rights:kpageflags",
        "rights:kpagecount",
        "memory:ksm",
        "memory:max_map_count",
        "memory:huge_pages",
        "memory:swap",
        "memory:page_size",
        "host:kvm",
        "host:cgroup",
        "host:bpf",
        &format!("guest:process:{own}:mergeable"),
    ] {
        check(&checks, id);
    }
    let count = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    assert_eq!(check(&checks, "memory:max_map_count")["found"], count.trim());
}

#[test]
fn root_sees_frames_and_others_do_not() {
    let as_root = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").unwrap()) == 0;
    if !as_root {
        eprintln!("skipped: needs root");
        return;
    }
    assert_eq!(check(&doctor(&[]), "rights:page_frames")["status"], "ok");
    let stage = Stage::new();
    let output = unprivileged(&stage.path("pagefold")).args(["doctor", "--json"]).output().unwrap();
    let checks = json_of(&output)["checks"].clone();
    for id in ["rights:page_frames", "rights:kpageflags", "rights:kpagecount"] {
        assert_eq!(check(&checks, id)["status"], "warn", "{id}");
    }
    assert_eq!(check(&checks, "kernel:memfd_seals")["status"], "ok");
}

#[test]
fn root_that_is_refused_is_not_told_to_be_root() {
    if common::not_root() {
        return;
    }
    let own = std::process::id().to_string();
    let output = std::process::Command::new("setpriv")
        .args(["--bounding-set", "-all", "--inh-caps", "-all", "--", env!("CARGO_BIN_EXE_pagefold")])
        .args(["doctor", "--json", "--pid", &own])
        .output()
        .expect("run setpriv");
    let checks = checks_of(&output.stdout);
    let check = check(&checks, &format!("guest:process:{own}:mergeable"));
    assert_eq!(check["found"], "no right to read it: that takes CAP_SYS_PTRACE");
    assert!(check["fix"].as_str().unwrap().starts_with("give this root CAP_SYS_PTRACE"), "{check}");
}

#[test]
fn reason_is_given_for_vms_that_cannot_be_merged() {
    let memfd = "memory-backend-memfd,id=m,size=128M";
    let shared = format!("{memfd},share=on");
    let private = format!("{memfd},share=off");
    for (name, more, status, words) in [
        ("plain", &[][..], "ok", "advised as mergeable"),
        (
            "shared",
            &["-object", &shared, "-machine", "pc,memory-backend=m"],
            "warn",
            "shared memory (/memfd:memory-backend-memfd)",
        ),
        ("private", &["-object", &private, "-machine", "pc,memory-backend=m"], "warn", "private mapping of a file"),
        ("unmerged", &["-machine", "pc,mem-merge=off"], "warn", "mem-merge=off"),
        ("locked", &["-overcommit", "mem-lock=on"], "warn", "locked"),
    ] {
        let Some(qemu) = Qemu::start(&format!("doctor-{name}"), more) else { return };
        let checks = doctor(&["--guest", &qemu.name]);
        let check = check(&checks, &format!("guest:{}:mergeable", qemu.id()));
        assert_eq!(check["status"], status, "{check}");
        assert!(check["found"].as_str().unwrap().contains(words), "{check}");
    }
}

/// Runs the commands of README's section on installing, with another prefix and this build.
#[test]
fn installation_by_readme_is_complete() {
    let built = Path::new(env!("CARGO_BIN_EXE_pagefold")).parent().expect("a directory");
    let prefix = tempfile::tempdir().expect("a directory");
    let readme = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md")).expect("README");
    let commands: Vec<&str> = readme.lines().filter_map(|line| line.strip_prefix("    sudo install ")).collect();
    assert_eq!(commands.len(), 5, "{commands:?}");
    let profile = built.file_name().expect("a name");
    let for_guests = built.with_file_name("x86_64-unknown-linux-musl").join("guest");
    let apart = built.with_file_name("x86_64-unknown-linux-musl").join(profile);
    for command in commands {
        let command =
            command.replace("target/x86_64-unknown-linux-musl/release", apart.to_str().expect("a plain path"));
        let command =
            command.replace("target/x86_64-unknown-linux-musl/guest", for_guests.to_str().expect("a plain path"));
        let is_built = |name: &str, dir: &Path| !command.contains(name) || dir.join(name).exists();
        if !is_built("pagefold-agent", &apart) || !is_built("pagefold-identity", &for_guests) {
            eprintln!("skipped: nothing is built for x86_64-unknown-linux-musl: ./x build");
            continue;
        }
        let command = command.replace("target/release", built.to_str().expect("a plain path"));
        let command = command.replace("/usr/local", prefix.path().to_str().expect("a plain path"));
        let installed = Command::new("bash").args(["-c", &format!("install {command}")]).status().expect("run bash");
        assert!(installed.success(), "{command}");
    }
    assert!(prefix.path().join("bin/pagefold-prove").exists());
    let output = Command::new(prefix.path().join("bin/pagefold")).args(["doctor", "--json"]).output().expect("run it");
    let checks = checks_of(&output.stdout);
    let library = check(&checks, "host:library");
    let found = library["found"].as_str().expect("text");
    assert!(library["status"] == "ok" && found.ends_with("lib/pagefold/libpagefold.so"), "{library}");
}

#[test]
fn text_has_marks_and_remedies() {
    let output = pagefold(&["doctor", "--pid", &std::process::id().to_string()]);
    let text = String::from_utf8(output.stdout).unwrap();
    for words in ["What the kernel can do", "  ok ", "Whether guests could be merged", "-> ", " missing\n"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(text.lines().all(|l| l.chars().count() <= 100), "{text}");
}

#[test]
fn kernel_faults_are_listed_and_their_tests_exist() {
    let found: Value = json_of(&pagefold(&["doctor", "--json", "--pid", &std::process::id().to_string()]));
    let faults = found["kernel_faults"].as_array().expect("a list");
    assert!(faults.len() > 10, "{faults:?}");
    let mut tests = String::new();
    let mut dirs = vec![std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..")];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).expect("list the tree").map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                tests += &std::fs::read_to_string(path).expect("a source");
            }
        }
    }
    for fault in faults {
        let keys: Vec<&String> = fault.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["applies", "avoided_by", "effect", "id", "test"]);
        assert!(matches!(fault["applies"].as_str(), Some("no" | "may" | "yes")), "{fault}");
        let test = fault["test"].as_str().expect("a name");
        assert!(
            tests.contains(&format!("#[test]\nfn {test}()"))
                || tests.contains(&format!("    #[test]\n    fn {test}()")),
            "no test {test}"
        );
    }
}

#[test]
fn remedies_that_end_with_the_next_boot_have_one_that_does_not() {
    let checks = doctor(&[]);
    let mut tried = 0;
    for check in checks.as_array().expect("a list") {
        let Some(fix) = check["fix"].as_str() else { continue };
        if !["sysctl -w", "> /sys/", "chgrp "].iter().any(|passing| fix.contains(passing)) {
            continue;
        }
        // The command is run, with another directory in place of /etc.
        let for_good = check["fix_for_good"].as_str().unwrap_or_else(|| panic!("{check}"));
        let write = for_good.split(" && ").next().expect("a command");
        let etc = tempfile::tempdir().expect("a temporary directory");
        ["sysctl.d", "udev/rules.d", "tmpfiles.d"].iter().for_each(|dir| {
            std::fs::create_dir_all(etc.path().join(dir)).expect("make a directory");
        });
        let command = write.replace("/etc/", &format!("{}/", etc.path().display()));
        assert!(Command::new("sh").args(["-ec", &command]).status().expect("run sh").success(), "{command}");
        let file = write.rsplit("/etc/").next().expect("a file");
        let text = std::fs::read_to_string(etc.path().join(file)).expect("the file that it names");
        let (dir, line) = (file.split('/').next().expect("a directory"), text.trim());
        match dir {
            "sysctl.d" => assert_eq!(fix, format!("sysctl -w {line}")),
            "tmpfiles.d" => assert!(line.starts_with("w /sys/") && fix.contains(&line[2..20]), "{line}"),
            _ => assert_eq!(line, r#"KERNEL=="userfaultfd", GROUP="kvm", MODE="0660""#),
        }
        tried += 1;
    }
    if tried == 0 {
        eprintln!("skipped: this host needs no such remedy");
    }
}

/// A root with this file of groups.
fn scratch_root() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join("etc")).unwrap();
    fs::write(root.path().join("etc/group"), "root:x:0:\nkvm:x:104:\n").unwrap();
    fs::write(root.path().join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n").unwrap();
    root
}

#[test]
fn fix_prints_what_it_would_do_and_does_it_when_told() {
    if common::not_root() {
        return;
    }
    let root = scratch_root();
    let fix = |more: &[&str]| {
        let output = pagefold(&[&["doctor", "--fix", "--root", root.path().to_str().unwrap()], more].concat());
        let said = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        (output.status.code(), said)
    };
    let files = ["etc/sysctl.d/60-pagefold.conf", "etc/udev/rules.d/60-pagefold.rules", "etc/sysusers.d/pagefold.conf"];
    let packaged = ["60-pagefold.conf", "60-pagefold.rules", "pagefold.sysusers"];
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd");
    let (code, said) = fix(&[]);
    assert!(code == Some(0) && said.contains("nothing was changed") && said.contains("vm.max_map_count = "), "{said}");
    for file in files {
        assert!(said.contains(&format!("would write {}", root.path().join(file).display())), "{said}");
        assert!(!root.path().join(file).exists(), "{file} was written");
    }
    if Command::new("systemd-sysusers").arg("--version").output().is_err() {
        eprintln!("skipped: there is no systemd-sysusers");
        return;
    }
    let (code, said) = fix(&["--yes"]);
    assert_eq!(code, Some(0), "{said}");
    for (file, packaged) in files.iter().zip(packaged) {
        assert_eq!(
            fs::read_to_string(root.path().join(file)).unwrap(),
            fs::read_to_string(packaging.join(packaged)).unwrap()
        );
    }
    let groups = fs::read_to_string(root.path().join("etc/group")).unwrap();
    assert!(groups.contains("\npagefold:x:"), "{groups}");
    let (code, said) = fix(&["--yes"]);
    assert!(code == Some(0) && said.matches("fine: ").count() == 3 && !said.contains("wrote"), "{said}");
    // A file that an administrator has written stays.
    let own = root.path().join(files[0]);
    fs::write(&own, "vm.max_map_count = 70000\n").unwrap();
    let (code, said) = fix(&["--yes"]);
    assert!(code == Some(1) && said.contains("left as it is"), "{said}");
    assert_eq!(fs::read_to_string(&own).unwrap(), "vm.max_map_count = 70000\n");
}
