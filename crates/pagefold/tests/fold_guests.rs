//! Real guests, folded: four of them in two groups run Debian with a database that is asked and written all the
//! time, and say themselves that all is well: checksums of their files, checks of their tables, their kernels' logs.

mod common;

use common::service::{Service, cannot_fold, until};
use common::{json_of, number};
use serde_json::Value;
use std::process::{Command, Output, Stdio};

/// A lab whose guests are members of a service. Dropping it ends its guests.
struct Lab<'a> {
    service: &'a Service,
    dir: tempfile::TempDir,
}

impl<'a> Lab<'a> {
    fn new(service: &'a Service) -> Self {
        let dir = tempfile::Builder::new().prefix("foldlab").tempdir_in("/tmp").expect("a temporary directory");
        Self { service, dir }
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        let (variable, token) = self.service.mark();
        command.arg("lab").args(words).env("PAGEFOLD_LAB_DIR", self.dir.path().join("lab")).env(variable, token);
        // Also what will not last.
        command.env("PAGEFOLD_EAGER", "1");
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("run pagefold lab")
    }

    /// Brings guests up; `None` where that cannot be, which has been said.
    fn up(&self, groups: &[&str]) -> Option<Vec<String>> {
        let groups = groups.iter().map(|group| self.service.group(group)).collect::<Vec<_>>().join(",");
        let place = self.service.place();
        let words = ["up", "--json", "--image", "debian", "--guests", "4", "--groups", &groups];
        let service = ["--fold", "--service", place.to_str().expect("a plain path")];
        let output = self.run(&[&words[..], &service].concat());
        if output.status.code() == Some(3) {
            eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr));
            return None;
        }
        let guests = json_of(&output);
        let list = guests["guests"].as_array().or(guests.as_array()).expect("a list of guests");
        Some(list.iter().map(|g| g["name"].as_str().expect("a name").to_owned()).collect())
    }

    /// Runs a shell script in all guests at once, and returns what each printed.
    fn everywhere(&self, guests: &[String], script: &str) -> Vec<String> {
        let start = |guest: &String| {
            let mut command = self.command(&["exec", "--guest", guest, "--timeout", "120", "--", "sh", "-c", script]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("run pagefold lab exec")
        };
        let running: Vec<_> = guests.iter().map(start).collect();
        let wait = |(guest, child): (&String, std::process::Child)| {
            let output = child.wait_with_output().expect("wait for a command");
            let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{guest}: {script}: {text} {errors}");
            text
        };
        guests.iter().zip(running).map(wait).collect()
    }
}

impl Drop for Lab<'_> {
    fn drop(&mut self) {
        self.run(&["down"]);
    }
}

/// A table whose rows can be checked, and a client that goes on changing it and asking for its sum.
const DATABASE: &str = r#"
    set -e
    mariadb -e 'CREATE DATABASE t; CREATE TABLE t.rows (id INT PRIMARY KEY, n INT, text CHAR(200), sum INT UNSIGNED) ENGINE=InnoDB;
                INSERT INTO t.rows SELECT seq, seq, REPEAT(MD5(seq), 6), CRC32(CONCAT(seq, REPEAT(MD5(seq), 6))) FROM mysql.seq_1_to_2000' 2>/dev/null ||
    mariadb -e 'CREATE DATABASE IF NOT EXISTS t; CREATE OR REPLACE TABLE t.rows (id INT PRIMARY KEY, n INT, text CHAR(200), sum INT UNSIGNED) ENGINE=InnoDB;
                INSERT INTO t.rows WITH RECURSIVE s AS (SELECT 1 AS seq UNION ALL SELECT seq + 1 FROM s WHERE seq < 900)
                SELECT seq, seq, REPEAT(MD5(seq), 6), CRC32(CONCAT(seq, REPEAT(MD5(seq), 6))) FROM s'
    cat > /root/client <<'CLIENT'
    while :; do
      id=$((($(date +%N | sed 's/^0*//') + 0) % 900 + 1))
      mariadb -e "UPDATE t.rows SET n = n + 1, sum = CRC32(CONCAT(n, text)) WHERE id = $id;
                  SELECT COUNT(*) INTO @wrong FROM t.rows WHERE sum <> CRC32(CONCAT(n, text));
                  SELECT IF(@wrong = 0, 'right', 'WRONG')" -NB >> /root/answers 2>&1
      sleep 0.2
    done
CLIENT
    setsid sh /root/client > /dev/null 2>&1 < /dev/null &
    echo started"#;

/// The guest's own checks: prints one line of numbers that must not change, and fails if anything is wrong.
const CHECKS: &str = r#"
    set -e
    sync; echo 1 > /proc/sys/vm/drop_caches
    find /usr/bin /usr/sbin /usr/lib/x86_64-linux-gnu -xdev -type f -size -300k | sort | xargs cksum | cksum
    mariadb-check --silent t >&2
    test "$(mariadb -NBe 'SELECT COUNT(*) FROM t.rows WHERE sum <> CRC32(CONCAT(n, text))')" = 0
    test -s /root/answers
    if grep -v '^right$' /root/answers >&2; then exit 1; fi
    if dmesg --level emerg,alert,crit,err 2>/dev/null | grep -E 'BUG:|Oops|orrupt|I/O error|EXT4-fs error|segfault|general protection' >&2; then exit 1; fi"#;

fn folded(service: &Service, group: &str) -> u64 {
    number(&service.show(group)["sharing_pages"])
}

#[test]
fn real_guests_stay_right_while_they_are_folded() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let lab = Lab::new(&service);
    let groups = ["acme", "beta"];
    let Some(guests) = lab.up(&groups) else { return };
    for group in groups {
        service.set(group, &["--fold", "off"]);
    }
    lab.everywhere(&guests, DATABASE);
    let before = lab.everywhere(&guests, CHECKS);
    assert!(before.iter().all(|sum| *sum == before[0] && !sum.is_empty()), "one image: {before:?}");

    // While: both begin at about the same time.
    for group in groups {
        service.set(group, &["--fold", "on", "--scan-rate", "auto"]);
    }
    let while_folding = lab.everywhere(&guests, CHECKS);
    assert_eq!(while_folding, before);
    until(60, "guests are folded", || groups.iter().all(|group| folded(&service, group) > 10_000));
    let audit = service.assert_audit_is_clean();
    assert!(number(&audit["saved_bytes"]) > (2 * 20) << 20, "{audit}");
    let after = lab.everywhere(&guests, CHECKS);
    assert_eq!(after, before);

    for group in groups {
        service.set(group, &["--fold", "unfold"]);
    }
    until(60, "all is private again", || groups.iter().all(|group| folded(&service, group) == 0));
    let private = service.assert_audit_is_clean();
    assert!(number(&private["shared_within_group"]) < 200, "{private}");
    for group in groups {
        service.set(group, &["--fold", "on"]);
    }
    until(60, "guests are folded again", || groups.iter().all(|group| folded(&service, group) > 5_000));
    assert_eq!(lab.everywhere(&guests, CHECKS), before);
    for group in groups {
        let shown = service.show(group);
        let members: &Vec<Value> = shown["members"].as_array().expect("a list");
        assert_eq!(members.len(), 2, "{shown}");
        eprintln!(
            "{group}: {} sharing, {} zero, {} broken, {}",
            shown["sharing_pages"], shown["zero_pages"], shown["broken_pages"], shown["fold_failures"]
        );
    }
    service.assert_audit_is_clean();
}
