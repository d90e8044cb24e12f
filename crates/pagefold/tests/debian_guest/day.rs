//! An operator's first day with the package: it is installed and looked at. A user's program joins a group by `pagefold run`, and a unit's by a
//! rule; they fold. Each part is killed, then all at once. The package is upgraded. At last everything is private again, and the
//! package is purged: nothing of it is left, and both programs have lived through all of it.

use crate::common::number;
use crate::common::supervised::wait_for_within;
use crate::machine::{Debian, PATIENCE};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const CONFIG: &str = "[[group]]
name = 'acme'
users = ['alice']
[[enrol]]
group = 'acme'
unit = 'two.service'
all-anonymous = true
";
/// Starts two programs that know their pages. Each takes commands out of one file, and writes its answers to another.
const PROGRAMS: &str = "mkdir /run/day; cd /run/day; touch one.in one.out two.in two.out; chown alice one.out
run='pagefold run --group acme --name one --all-anonymous --'
systemd-run --quiet --unit one --uid alice sh -c \"tail -n +1 -f /run/day/one.in | $run /mnt/more/known_pages >> /run/day/one.out\"
systemd-run --quiet --unit two sh -c 'tail -n +1 -f /run/day/two.in | /mnt/more/known_pages >> /run/day/two.out'";
/// Pages of each program, which both hold: 16 MiB.
const PAGES: u64 = 4096;
/// Pages of them that count as all: 3/4. The last ones may wait for a round of their own.
const MOST: u64 = PAGES / 4 * 3;
/// All that is called pagefold: files, control groups, units, programs, and mappings of processes.
const LEFT: &str = "find / /run /tmp /dev -xdev -iname '*pagefold*' 2> /dev/null || true
find /sys/fs/cgroup -name '*pagefold*' 2> /dev/null || true
systemctl list-units --all --plain --no-legend 'pagefold*'; systemctl list-unit-files --no-legend 'pagefold*' || true
find /proc -maxdepth 2 -name exe -lname '*pagefold*' 2> /dev/null || true
grep -l pagefold /proc/[0-9]*/maps 2> /dev/null || true";
/// Parts that run as programs of their own.
const PROGRAM_PARTS: [&str; 3] = ["pagefold-prove", "pagefold-web", "pagefold-attach"];

/// The group, if its service and worker answer.
fn shown(debian: &Debian) -> Option<Value> {
    serde_json::from_str(&debian.quietly("pagefold group show acme --json 2> /dev/null || true")).ok()
}

/// Waits until both programs are connected, and what they have in common is folded.
fn until_folded(debian: &Debian, when: &str) -> Value {
    let found = wait_for_within(PATIENCE, &format!("both fold: {when}"), || {
        std::thread::sleep(Duration::from_secs(1));
        let shown = shown(debian)?;
        let folds = |member: &&Value| member["connected"] == true && number(&member["folded_pages"]) >= MOST;
        (shown["members"].as_array()?.iter().filter(folds).count() == 2).then_some(shown)
    });
    eprintln!("debian: both fold: {when}: {} bytes saved", found["saved_bytes"]);
    found
}

/// Has a program do something, and waits for its answer.
fn tell(debian: &Debian, program: &str, command: &str) -> String {
    let script = format!(
        "cd /run/day; n=$(wc -l < {program}.out); echo '{command}' >> {program}.in
        until [ $(wc -l < {program}.out) -gt $n ]; do systemctl --quiet is-active {program}; sleep 0.2; done; tail -n 1 {program}.out"
    );
    debian.quietly(&script)
}

/// Asserts that both programs have all of their bytes.
fn check(debian: &Debian) {
    for program in ["one", "two"] {
        assert_eq!(tell(debian, program, &format!("check x 0 {PAGES} 1")), "ok");
    }
}

/// Processes of a part.
fn processes(debian: &Debian, part: &str) -> Vec<String> {
    let main = |unit: &str| format!("systemctl show -P MainPID {unit}.service | grep -vx 0 || true");
    let script = match part {
        "worker" => {
            let worker = shown(debian).and_then(|shown| shown["worker_pid"].as_u64());
            return worker.iter().map(u64::to_string).collect();
        }
        "service" => main("pagefold"),
        "rules" => main("pagefold-enrol"),
        program => format!("find /proc -maxdepth 2 -name exe -lname '*/{program}*' 2> /dev/null | cut -d / -f 3"),
    };
    debian.quietly(&script).split_whitespace().map(str::to_owned).collect()
}

/// Kills parts with `SIGKILL`, and waits until there are others, and both programs fold.
fn kill(debian: &Debian, parts: &[&str]) {
    let before: Vec<_> = parts.iter().map(|part| processes(debian, part)).collect();
    assert!(before.iter().all(|pids| !pids.is_empty()), "{parts:?}: {before:?}");
    debian.sh(&format!("kill -9 {}", before.concat().join(" ")));
    for (part, before) in parts.iter().zip(&before) {
        wait_for_within(PATIENCE, &format!("another {part}"), || {
            let after = processes(debian, part);
            (!after.is_empty() && after.iter().all(|pid| !before.contains(pid))).then_some(())
        });
    }
    until_folded(debian, &format!("{parts:?} were killed"));
}

/// Asserts on the first looks of an operator.
fn assert_looks_agree(debian: &Debian) {
    let doctor: Value = serde_json::from_str(&debian.quietly("pagefold doctor --json || true")).expect("JSON");
    let checks = doctor["checks"].as_array().expect("checks");
    let parts = checks.iter().find(|check| check["id"] == "host:parts").expect("a check");
    assert_eq!(parts["status"], "ok", "{parts}");
    let audit: Value = serde_json::from_str(&debian.quietly("pagefold audit --json")).expect("JSON");
    assert_eq!((number(&audit["cross_group_frames"]), &audit["partial"]), (0, &json!([])), "{audit}");
    debian.sh("pagefold group list");
}

#[test]
fn programs_live_through_the_packages_first_day_and_nothing_is_left_of_it() {
    let Some(debian) = Debian::with_package(&[("config", CONFIG)]) else { return };
    debian.sh("useradd --groups kvm alice; cat /mnt/more/config >> /etc/pagefold/pagefold.toml");
    debian.sh("pagefold config check /etc/pagefold/pagefold.toml && systemctl reload pagefold.service");
    debian.sh("until pagefold group list | grep -q acme; do sleep 1; done");
    debian.sh(PROGRAMS);
    for program in ["one", "two"] {
        tell(&debian, program, &format!("alloc x {PAGES}"));
        tell(&debian, program, &format!("fill x 0 {PAGES} 1"));
    }
    until_folded(&debian, "both have begun");
    assert_looks_agree(&debian);
    for part in ["worker", "service", "rules"].into_iter().chain(PROGRAM_PARTS) {
        kill(&debian, &[part]);
    }
    kill(&debian, &["service", "worker", "pagefold-prove", "pagefold-web"]);
    check(&debian);
    let worker = processes(&debian, "worker");
    debian.sh("dpkg -i /mnt/more/next.deb 2>&1; systemctl is-active pagefold.service pagefold-enrol.service");
    until_folded(&debian, "the package is a newer one");
    assert_eq!(processes(&debian, "worker"), worker, "a worker outlives an upgrade");
    let stopped: Value = serde_json::from_str(&debian.sh("pagefold stop --everything --json")).expect("JSON");
    assert_eq!(stopped[0]["left_bytes"], 0, "{stopped}");
    assert_eq!(stopped[0]["detached"].as_array().map(Vec::len), Some(1), "{stopped}");
    check(&debian);
    debian.sh("dpkg --purge pagefold 2>&1");
    check(&debian);
    debian.sh("systemctl stop one.service two.service");
    assert_nothing_is_left(&debian);
}

/// Waits until nothing is left of the package: workers end half a minute after the service.
fn assert_nothing_is_left(debian: &Debian) {
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        let left = debian.quietly(LEFT);
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < end, "of the package is left: {left}");
        std::thread::sleep(Duration::from_secs(5));
    }
}
