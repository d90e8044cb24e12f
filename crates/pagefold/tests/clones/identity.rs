//! A clone is not its sibling: each hazard, looked at from inside.

use crate::common::formats::assert_documented;
use crate::rig::{Rig, text};
use std::collections::BTreeSet;

/// A network card without a network: its MAC is the template's in every clone.
const CARD: &[&str] = &[
    "--qemu-arg=-netdev",
    "--qemu-arg=user,id=net,restrict=on",
    "--qemu-arg=-device",
    "--qemu-arg=virtio-net-pci,netdev=net,romfile=,mac=52:54:00:00:00:01",
];

#[test]
fn clones_answer_and_differ_in_everything_that_a_copy_has_in_common() {
    let rig = Rig::new();
    if !rig.template("web", "acme", CARD) {
        return;
    }
    let made = rig.clone("web", &["--count", "3"]);
    assert_documented(&["pagefold clone --json"], &serde_json::json!({"clones": made}));
    assert_eq!(made.iter().map(|one| text(one, "name")).collect::<Vec<_>>(), ["web-1", "web-2", "web-3"]);
    for field in ["machine_id", "random", "qmp"] {
        let all: BTreeSet<String> = made.iter().map(|one| text(one, field)).collect();
        assert_eq!(all.len(), 3, "{field}: {all:?}");
    }
    let script = "cat /proc/sys/kernel/random/boot_id /etc/machine-id /sys/class/net/eth0/address /proc/sys/kernel/random/uuid; hostname";
    let mut seen = BTreeSet::new();
    for one in &made {
        let name = text(one, "name");
        let found = rig.inside(&name, script);
        let [boot_id, machine_id, mac, random, hostname] = found.lines().collect::<Vec<_>>()[..] else {
            panic!("{found}");
        };
        assert_eq!((machine_id, hostname), (text(one, "machine_id").as_str(), name.as_str()));
        let (clock, apart) = rig.clock(&name);
        assert!(apart <= 0.5, "{clock} is {apart} s away from the host's");
        assert_ne!(mac, "52:54:00:00:00:01");
        for value in [boot_id, machine_id, mac, random] {
            assert!(seen.insert(value.to_owned()), "{value} is in two clones");
        }
    }
}

#[test]
fn clone_in_which_nobody_answers_is_handed_out_only_when_asked_for() {
    let rig = Rig::new();
    // The last word of a name counts: the helper is not started.
    let silent = ["--append", "pagefold.identity=", "--timeout", "25"];
    let words = ["template", "create", "bare", "--image", "tiny", "--memory", "128M", "--group", "acme"];
    let output = rig.run(&[&words[..], &["--append", "pagefold.identity=", "--timeout", "2"]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.code() == Some(3) {
        eprintln!("skipped: {said}");
        return;
    }
    assert!(output.status.code() == Some(1) && said.contains("nobody inside has answered"), "{said}");
    assert!(!rig.templates().join("acme/bare").exists());
    rig.template("bare", "acme", &[&silent[..], &["--allow-unconfirmed"]].concat());
    let said = rig.fails(&["clone", "bare", "--group", "acme"], 2);
    assert!(said.contains("--allow-unconfirmed"), "{said}");
    let made = rig.clone("bare", &["--count", "2", "--allow-unconfirmed"]);
    for one in &made {
        assert_eq!((text(one, "state").as_str(), one["machine_id"].is_null()), ("unconfirmed", true));
        // As the template: without the repairs, siblings are the same.
        assert_eq!(rig.inside(&text(one, "name"), "hostname"), "bare");
    }
}
