//! Real guests, folded: they run Debian with a database that is read and written all the time. In a long run these are four guests
//! in two groups, and else two in one.
//!
//! The guests check themselves, by checksums of their files, checks of their tables, and their kernels' logs.

mod common;

use common::lab::{self, Lab};
use common::number;
use common::service::{Service, cannot_fold, seconds, until};
use serde_json::Value;

/// Brings two guests up for each of these groups, as members; `None`, with the reason printed, if the host lacks something.
fn up(lab: &Lab, service: &Service, names: &[&str]) -> Option<Vec<String>> {
    let groups = names.iter().map(|group| service.group(group)).collect::<Vec<_>>().join(",");
    let place = service.place();
    let count = (2 * names.len()).to_string();
    let words = ["--image", "debian", "--guests", &count, "--groups", &groups, "--saved"];
    let fold = ["--fold", "--service", place.to_str().expect("a plain path")];
    Some(lab.up(&[&words[..], &fold].concat())?.iter().map(lab::name).collect())
}

/// Script that makes a table whose rows can be checked, and starts a client that changes and checks it for ever.
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
      sleep $PAUSE
    done
CLIENT
    setsid sh /root/client > /dev/null 2>&1 < /dev/null &
    echo started"#;

/// Script of the guest's own checks: it prints one line of numbers that must not change, and fails if anything is
/// wrong.
const CHECKS: &str = r#"
    set -e
    sync; echo 1 > /proc/sys/vm/drop_caches
    find /usr/bin /usr/sbin /usr/lib/x86_64-linux-gnu -xdev -type f -size -300k | sort | awk "NR % $EVERY == 0" | xargs cksum | cksum
    mariadb-check --silent t >&2
    test "$(mariadb -NBe 'SELECT COUNT(*) FROM t.rows WHERE sum <> CRC32(CONCAT(n, text))')" = 0
    test -s /root/answers
    if grep -v '^right$' /root/answers >&2; then exit 1; fi
    if dmesg --level emerg,alert,crit,err 2>/dev/null | grep -E 'BUG:|Oops|orrupt|I/O error|EXT4-fs error|segfault|general protection' >&2; then exit 1; fi"#;

/// Whether this is a long run, in which the database works all the time, and all files are checked.
fn is_long() -> bool {
    seconds(1) > 1
}

/// The checks: of one file of 48, or of all.
fn checks() -> String {
    format!("EVERY={}\n{CHECKS}", if is_long() { 1 } else { 48 })
}

fn folded(service: &Service, group: &str) -> u64 {
    number(&service.show(group)["sharing_pages"])
}

/// Unfolds all groups, and waits until members and page frames both show that nothing is folded.
fn unfold_all(service: &Service, groups: &[&str]) {
    for group in groups {
        service.set(group, &["--fold", "unfold"]);
    }
    until(180, "all is private again", || groups.iter().all(|group| folded(service, group) == 0));
    // A member's own figures may be a second older than those of the page frames.
    let shared = || number(&service.assert_audit_is_clean()["shared_within_group"]);
    until(60, "page frames say so, too", || shared() < 200);
}

/// Asserts that each group has its two members, and prints the group's figures.
fn assert_all_are_members(service: &Service, groups: &[&str]) {
    for group in groups {
        let shown = service.show(group);
        let members: &Vec<Value> = shown["members"].as_array().expect("a list");
        assert_eq!(members.len(), 2, "{shown}");
        eprintln!(
            "{group}: {} sharing, {} zero, {} broken, {}",
            shown["sharing_pages"], shown["zero_pages"], shown["broken_pages"], shown["fold_failures"]
        );
    }
}

#[test]
fn real_guests_stay_right_while_they_are_folded() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    // Members also fold pages that will not stay folded for long.
    let lab = Lab::new(&[service.mark(), ("PAGEFOLD_EAGER", "1")]);
    let groups = if is_long() { &["acme", "beta"][..] } else { &["acme"] };
    let Some(guests) = up(&lab, &service, groups) else { return };
    let began = std::time::Instant::now();
    let done = |step: &str| eprintln!("{:.0} s: {step}", began.elapsed().as_secs_f64());
    for group in groups {
        service.set(group, &["--fold", "off"]);
    }
    lab.everywhere(&guests, &format!("export PAUSE={}\n{DATABASE}", if is_long() { 0.2 } else { 8.0 }));
    let before = lab.everywhere(&guests, &checks());
    assert!(before.iter().all(|sum| *sum == before[0] && !sum.is_empty()), "one image: {before:?}");
    done("databases are there");

    // The checks run while pages are folded: both begin at about the same time.
    for group in groups {
        service.set(group, &["--fold", "on", "--scan-rate", "auto"]);
    }
    let while_folding = lab.everywhere(&guests, &checks());
    assert_eq!(while_folding, before);
    done("checked while they are folded");
    until(120, "guests are folded", || groups.iter().all(|group| folded(&service, group) > 10_000));
    // Many mappings may still be of few frames each, which saves less.
    until(120, "it saves memory", || {
        number(&service.assert_audit_is_clean()["saved_bytes"]) > (groups.len() as u64 * 20) << 20
    });
    let after = lab.everywhere(&guests, &checks());
    assert_eq!(after, before);
    done("folded and checked");

    unfold_all(&service, groups);
    done("unfolded");
    for group in groups {
        service.set(group, &["--fold", "on"]);
    }
    until(120, "guests are folded again", || groups.iter().all(|group| folded(&service, group) > 5_000));
    assert_eq!(lab.everywhere(&guests, &checks()), before);
    assert_all_are_members(&service, groups);
    service.assert_audit_is_clean();
}
