//! Many clones, one after the other.

use crate::common::is_long;
use crate::rig::{Rig, text};
use std::collections::BTreeSet;
use std::fs;

/// Clones in turn; 1,000 with `PAGEFOLD_LONG_TESTS` or `PAGEFOLD_SOAK_SECONDS`.
const CLONES: usize = 30;
const MANY: usize = 1000;

#[test]
fn clones_in_turn_leave_nothing_behind_and_never_meet_themselves() {
    let rig = Rig::new();
    if !rig.template("web", "acme", &[]) {
        return;
    }
    // One lives all the time, so that the memory is loaded once.
    let first = rig.clone("web", &["--name", "stays"]);
    let memory = fs::read_link(format!("/proc/{}/fd/0", first[0]["pid"])).expect("its memory");
    let mut seen = BTreeSet::new();
    let count = if is_long() { MANY } else { CLONES };
    for _ in 0..count {
        let made = rig.clone("web", &[]);
        assert_eq!(fs::read_link(format!("/proc/{}/fd/0", made[0]["pid"])).ok().as_ref(), Some(&memory));
        for field in ["machine_id", "random"] {
            assert!(seen.insert(text(&made[0], field)), "{made:?} has been there before");
        }
        rig.json(&["clones", "end", "web-1"]);
    }
    assert_eq!(rig.living(), ["stays"]);
    assert_eq!(rig.inside("stays", "hostname"), "stays");
    let left = fs::read_dir(rig.clones()).expect("list it").count();
    assert_eq!(left, 2, "one clone and the lock");
}
