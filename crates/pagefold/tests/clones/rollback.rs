//! Back to the template's state, and machines that wait.

use crate::rig::{Rig, text};

#[test]
fn rolled_back_clone_has_templates_state_and_its_own_name() {
    let rig = Rig::new();
    if !rig.template("web", "acme", &[]) {
        return;
    }
    let made = rig.clone("web", &["--count", "2", "--warm", "1"]);
    assert_eq!(rig.living().len(), 3, "one waits");
    rig.inside("web-1", "echo changed >/root/file");
    let script = "cat /etc/machine-id /proc/sys/kernel/random/boot_id; hostname; cat /root/file 2>&- | wc -l";
    let before: Vec<String> = rig.inside("web-1", script).lines().map(str::to_owned).collect();
    assert_eq!(before[3], "1");
    let back = rig.json(&["rollback", "web-1"]);
    assert_ne!(back["clones"][0]["pid"], made[0]["pid"]);
    let after: Vec<String> = rig.inside("web-1", script).lines().map(str::to_owned).collect();
    assert_eq!((&after[0], &after[2], after[3].as_str()), (&before[0], &before[2], "0"));
    assert_ne!(after[1], before[1], "another start has another boot_id");
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
