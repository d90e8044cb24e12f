//! The Debian package: built by `./x package` of the programs under test, unpacked, and run from there.

mod common;

use common::http::{Http, Target};
use common::package::{both, done, text, tree};
use common::supervised::{signal, wait_for_within};
use common::{Afterwards, not_root};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Files of the package, besides those of which there is one for each command.
const FILES: [&str; 38] = [
    "etc/pagefold/pagefold.toml",
    "usr/bin/pagefold",
    "usr/bin/pagefold-qemu",
    "usr/lib/pagefold/libpagefold.so",
    "usr/lib/pagefold/pagefold-agent",
    "usr/lib/pagefold/pagefold-attach",
    "usr/lib/pagefold/pagefold-history",
    "usr/lib/pagefold/pagefold-identity",
    "usr/lib/pagefold/pagefold-place",
    "usr/lib/pagefold/pagefold-prove",
    "usr/lib/pagefold/pagefold-web",
    "usr/lib/pagefold/pagefold-worker",
    "usr/lib/pagefold/pagefoldd",
    "usr/lib/sysctl.d/60-pagefold.conf",
    "usr/lib/systemd/system/pagefold.service",
    "usr/lib/systemd/system/pagefold-enrol.service",
    "usr/lib/sysusers.d/pagefold.conf",
    "usr/lib/udev/rules.d/60-pagefold.rules",
    "usr/share/bash-completion/completions/pagefold",
    "usr/share/doc/pagefold/README.md",
    "usr/share/doc/pagefold/api.md",
    "usr/share/doc/pagefold/changelog.Debian.gz",
    "usr/share/doc/pagefold/copyright",
    "usr/share/doc/pagefold/grafana/pagefold.json",
    "usr/share/doc/pagefold/http.conf",
    "usr/share/doc/pagefold/operations.md",
    "usr/share/doc/pagefold/pagefold.toml",
    "usr/share/doc/pagefold/prometheus/pagefold.rules.yml",
    "usr/share/doc/pagefold/prometheus/scrape.yml",
    "usr/share/doc/pagefold/start.md",
    "usr/share/doc/pagefold/watch.md",
    "usr/share/doc/pagefold/security.md",
    "usr/share/fish/vendor_completions.d/pagefold.fish",
    "usr/share/man/man1/pagefold-doctor.1.gz",
    "usr/share/man/man1/pagefold-group-set.1.gz",
    "usr/share/man/man1/pagefold-qemu.1.gz",
    "usr/share/man/man1/pagefold.1.gz",
    "usr/share/zsh/vendor-completions/_pagefold",
];

/// Files of the lab's package.
const LAB_FILES: [&str; 6] = [
    "usr/bin/pagefold-lab",
    "usr/lib/pagefold/storms",
    "usr/share/man/man1/pagefold-bench-ksm.1.gz",
    "usr/share/man/man1/pagefold-lab.1.gz",
    "usr/share/man/man1/pagefold-lab-up.1.gz",
    "usr/share/man/man1/pagefold-study.1.gz",
];

#[test]
fn package_is_whole_and_folds_from_where_it_is_unpacked() {
    if not_root() {
        return;
    }
    let dir = tempfile::Builder::new().prefix("deb").tempdir_in("/tmp").expect("a temporary directory");
    let Some((package, lab)) = both(&dir) else { return };
    let control = text(&done(Command::new("dpkg-deb").arg("--field").arg(&package)));
    for part in ["Architecture: amd64", "libc6 (>= ", "Linux 6.8 (UFFDIO_MOVE)", "(bookworm) has Linux 6.1"] {
        assert!(control.contains(part), "no {part:?} in {control}");
    }
    let version = control.lines().find_map(|line| line.strip_prefix("Version: ")).expect("a version");
    let changelog = fs::read_to_string(tree().join("packaging/debian/changelog")).expect("the changelog");
    assert!(changelog.starts_with(&format!("pagefold ({version}) ")), "{version}: {changelog}");
    let root = dir.path().join("root");
    done(Command::new("dpkg-deb").arg("--raw-extract").arg(&package).arg(&root));
    for file in FILES {
        assert!(root.join(file).is_file(), "{file} is missing");
    }
    assert_eq!(fs::read_to_string(root.join("DEBIAN/conffiles")).expect("a list"), "/etc/pagefold/pagefold.toml\n");
    let script = fs::read_to_string(root.join("DEBIAN/postinst")).expect("a script");
    for command in ["systemd-sysusers", "_dh_action=restart", "deb-systemd-helper enable pagefold.service"] {
        assert!(script.contains(command), "no {command:?} in {script}");
    }
    done(Command::new("man").args(["--warnings", "-l"]).arg(root.join("usr/share/man/man1/pagefold-serve.1.gz")));
    folds_from(&root);
    has_lab(&root, &lab, version);
    if std::env::var_os("PAGEFOLD_LONG_TESTS").is_some() {
        done(
            Command::new("lintian")
                .args([
                    "--fail-on",
                    "error,warning",
                    "--allow-root",
                    "--suppress-tags",
                    "initial-upload-closes-no-bugs",
                ])
                .arg(&package),
        );
    }
}

/// Unpacks the package of the lab, and starts a guest by it.
fn has_lab(root: &Path, lab: &Path, version: &str) {
    let pagefold = |words: &[&str]| {
        let mut command = Command::new(root.join("usr/bin/pagefold"));
        command.args(words).env("PAGEFOLD_LAB_DIR", root.join("lab")).output().expect("run pagefold")
    };
    assert_eq!(pagefold(&["lab", "list"]).status.code(), Some(3), "it is not there");
    let control = text(&done(Command::new("dpkg-deb").arg("--field").arg(lab)));
    assert!(control.contains(&format!("pagefold (= {version})")), "{control}");
    done(Command::new("dpkg-deb").arg("--extract").arg(lab).arg(root));
    for file in LAB_FILES {
        assert!(root.join(file).is_file(), "{file} is missing");
    }
    let up = pagefold(&["lab", "up", "--image", "process", "--memory", "2M"]);
    assert!(pagefold(&["lab", "down"]).status.success() && up.status.success(), "{up:?}");
}

/// Time limit for each thing that the unpacked service does: 60 s.
const PATIENCE: Duration = Duration::from_secs(60);

/// Holds 8 MiB, in which every content is there twice.
const HOLDER: &str = "import os, sys; half = os.urandom(4 << 20); both = bytearray(half + half); sys.stdin.read()";

/// Runs the unpacked service with the unpacked configuration and a group, and has a program fold there.
fn folds_from(root: &Path) {
    let script = format!(
        "for p in /proc/[0-9]*; do case $(readlink $p/exe) in {}/*) kill -9 ${{p#/proc/}};; esac; done 2>/dev/null",
        root.display()
    );
    let _afterwards = Afterwards::run(&script);
    let (pagefold, service) = (root.join("usr/bin/pagefold"), root.join("s"));
    let config = root.join("etc/pagefold/pagefold.toml");
    done(Command::new(&pagefold).args(["config", "check"]).arg(&config));
    let with_group = fs::read_to_string(&config).expect("the configuration") + "[[group]]\nname = 'acme'\n";
    fs::write(&config, with_group).expect("write the configuration");
    let log = root.join("log");
    let mut supervisor = Command::new(&pagefold)
        .args(["serve", "--stop-workers", "--config"])
        .arg(&config)
        .arg("--dir")
        .arg(&service)
        .stderr(fs::File::create(&log).expect("a log"))
        .spawn()
        .expect("start the service");
    let web = Http::at(Target::Unix(service.join("api.sock")));
    wait_for_within(PATIENCE, "the web side answers", || web.try_request("GET", "/v1/groups", "", "").ok());
    let mut member = Command::new(&pagefold)
        .args(["run", "--group", "acme", "--all-anonymous", "--service"])
        .arg(&service)
        .args(["--", "python3", "-c", HOLDER])
        .env("PAGEFOLD_EAGER", "1")
        .stdin(Stdio::piped())
        .spawn()
        .expect("start a member");
    wait_for_within(PATIENCE, "half of what the member holds is saved", || {
        let saved = web.get("/v1/groups/acme").json()["saved_bytes"].as_i64()?;
        (saved > 2 << 20).then_some(())
    });
    drop(member.stdin.take());
    assert!(member.wait().expect("wait for it").success());
    let log = fs::read_to_string(log).expect("the log");
    assert!(log.contains("prover started"), "{log}");
    signal(supervisor.id(), "TERM");
    assert!(supervisor.wait().expect("wait for it").success());
}

#[test]
fn unit_is_exposed_to_little() {
    let unit = tree().join("packaging/systemd/pagefold.service");
    let mut analyze = Command::new("systemd-analyze");
    analyze.args(["security", "--offline=true", "--no-pager", "--threshold=29"]).arg(&unit);
    match analyze.output() {
        Err(e) => eprintln!("skipped: no systemd-analyze: {e}"),
        Ok(output) if String::from_utf8_lossy(&output.stderr).contains("unrecognized option") => {
            eprintln!("skipped: this systemd-analyze cannot look at a file");
        }
        Ok(output) => assert!(output.status.success(), "{}", text(&output)),
    }
}
