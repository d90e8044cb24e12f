//! Back to the template's state, and machines that wait.

use crate::rig::{Rig, text};
use serde_json::Value;
use std::fs;

/// A network card, whose MAC is the template's in each clone at first.
const CARD: [&str; 4] = [
    "--qemu-arg=-netdev",
    "--qemu-arg=user,id=net,restrict=on",
    "--qemu-arg=-device",
    "--qemu-arg=virtio-net-pci,netdev=net,romfile=,mac=52:54:00:00:00:01",
];

#[test]
fn rolled_back_clone_has_templates_state_and_its_own_name_and_addresses() {
    let rig = Rig::new();
    if !rig.template("web", "acme", &CARD) {
        return;
    }
    let made = rig.clone("web", &["--count", "2", "--warm", "1"]);
    assert_eq!(rig.living().len(), 3, "one waits");
    rig.inside("web-1", "echo changed >/root/file");
    let script = "cat /etc/machine-id /proc/sys/kernel/random/boot_id; hostname; cat /root/file 2>&- | wc -l
                  cat /sys/class/net/eth0/address; ip -o -4 addr show dev eth0 | awk '{print $4}'; ip route | grep default";
    let look = || rig.inside("web-1", &format!("{script}; true")).lines().map(str::to_owned).collect::<Vec<_>>();
    let before = look();
    assert_eq!((before.len(), before[3].as_str()), (5, "1"), "it has no address: {before:?}");
    give_address(&rig, "web-1", "eth0,10.9.0.7/24,10.9.0.1");
    let back = rig.json(&["rollback", "web-1"]);
    assert_ne!(back["clones"][0]["pid"], made[0]["pid"]);
    let after = look();
    assert_eq!((&after[0], &after[2], after[3].as_str()), (&before[0], &before[2], "0"));
    assert_ne!(after[1], before[1], "another start has another boot_id");
    assert_eq!((&after[4], after[5].as_str()), (&before[4], "10.9.0.7/24"), "MAC and address");
    assert_ne!(after[4], "52:54:00:00:00:01");
    assert!(after[6].contains("via 10.9.0.1"), "{after:?}");
    rig.inside("web-1", "ip addr flush dev eth0; ip link set eth0 down; ip link set eth0 address 02:00:00:00:00:09");
    rig.json(&["rollback", "web-1"]);
    assert_eq!(look()[4..], after[4..], "again");
    // The machine that waits becomes a clone with an identity of its own.
    let warm = rig.living().into_iter().find(|name| name.starts_with("warm-")).expect("one that waits");
    let listed = rig.json(&["clones"]);
    let pid = listed["clones"].as_array().expect("a list").iter().find(|one| one["name"] == warm.as_str());
    let pid = pid.expect("it is listed")["process"]["pid"].clone();
    let next = rig.clone("web", &[]);
    assert_eq!((text(&next[0], "name").as_str(), &next[0]["pid"]), ("web-3", &pid));
    assert_eq!(rig.inside("web-3", "hostname"), "web-3");
    assert_ne!(text(&next[0], "machine_id"), after[0]);
    assert!(rig.fails(&["rollback", "web-9"], 2).contains("no clone web-9"));
}

/// Notes an address of a clone, as if the host had given it.
fn give_address(rig: &Rig, clone: &str, address: &str) {
    let path = rig.clones().join(clone).join("clone.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&path).expect("its record")).expect("JSON");
    assert!(record["identity"]["address"].is_null(), "{record}");
    record["identity"]["address"] = address.into();
    fs::write(&path, record.to_string()).expect("write it");
}
