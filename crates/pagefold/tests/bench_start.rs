//! `pagefold bench start` in small. Speed is not tested.

mod common;

use common::formats::assert_documented;
use common::{json_of, pagefold};

#[test]
fn figures_of_each_way_to_start_a_guest_are_there() {
    let output = pagefold(&["bench", "start", "--rounds", "1", "--many", "2", "--idle", "0", "--json"]);
    if output.status.code() == Some(3) {
        eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let found = json_of(&output);
    assert_documented(&["bench start --json"], &found);
    let one = &found["one"][0];
    let ms = |field: &str| one[field].as_f64().unwrap_or_else(|| panic!("no {field} in {found}"));
    for field in ["clone", "warm", "boot", "restore", "rollback", "stock"] {
        assert!(ms(&format!("{field}_p50_ms")) > 1.0, "{field}: {found}");
    }
    // Numbers in JSON have lost their last digits.
    assert!((ms("clone_to_boot") / (ms("clone_p50_ms") / ms("boot_p50_ms")) - 1.0).abs() < 1e-9, "{found}");
    for (list, field) in [("many", "all_answered_s"), ("density", "pss_mib_each")] {
        let arms: Vec<&str> =
            found[list].as_array().expect(list).iter().filter_map(|each| each["arm"].as_str()).collect();
        assert_eq!(arms, ["stock", "clone"]);
        assert!(found[list].as_array().expect(list).iter().all(|each| each[field].as_f64() > Some(0.0)), "{found}");
    }
}
