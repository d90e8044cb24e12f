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
        let all = ["copy", "stock", "clone", "clone+fold"];
        assert_eq!(arms, if list == "many" { &all[..] } else { &all[1..] });
        assert!(found[list].as_array().expect(list).iter().all(|each| each[field].as_f64() > Some(0.0)), "{found}");
    }
}

/// The work. `./x soak` runs it: ksmd would merge guests of other tests, and eleven minutes are too long beside them.
const WORK: [&str; 6] = ["--work", "600", "--workers", "12", "--image", "tiny,debian"];

#[test]
fn frames_of_guests_that_work_are_counted_in_each_arm() {
    if std::env::var_os("PAGEFOLD_SOAK_SECONDS").is_none() {
        eprintln!("skipped: ./x soak runs it");
        return;
    }
    let output = pagefold(&[&["bench", "start", "--rounds", "0", "--many", "0", "--json"], &WORK[..]].concat());
    if output.status.code() == Some(3) {
        eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let found = json_of(&output);
    assert_documented(&["bench start --json"], &found);
    let counts = found["memory"].as_array().expect("memory");
    for arm in ["clone", "merge", "clone+fold", "clone+ksmd"] {
        let of: Vec<&serde_json::Value> = counts.iter().filter(|count| count["arm"] == arm).collect();
        assert!(of.len() >= 2 && of.iter().all(|count| count["bytes_each"].as_f64() > Some(1e6)), "{arm}: {found}");
        let last = of[of.len() - 1];
        assert_eq!(last["folded_of_possible"].is_null(), arm == "clone", "{found}");
        assert_eq!(last["merger_cpu_s"].as_f64() > Some(0.0), arm != "clone", "{found}");
    }
}
