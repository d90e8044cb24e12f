//! `pagefold bench serve` in small. Speed is not tested.

mod common;

use common::formats::assert_documented;
use common::service::cannot_fold;
use common::{json_of, number, pagefold};

#[test]
fn figures_of_a_small_service_are_true() {
    if cannot_fold() {
        return;
    }
    let words = ["bench", "serve", "--members", "12", "--groups", "3", "--pages", "4096", "--short", "--json"];
    let found = json_of(&pagefold(&words));
    assert_documented(&["bench serve --json"], &found);
    let bytes = |field: &str| found[field].as_i64().unwrap_or_else(|| panic!("no {field} in {found}"));
    // 12 members of 16 MiB, of which 3/4 are there in each member of a group, and the rest many times.
    assert!(bytes("saved_bytes") > 90 << 20, "{found}");
    let (shown, audit) = (bytes("saved_bytes"), bytes("audit_saved_bytes"));
    assert!((shown - audit).abs() <= audit / 100, "{found}");
    // Without folding there are no savings, and tables alone are left as costs. Free memory is changed by other programs, too.
    assert!((shown..shown + (40 << 20)).contains(&bytes("unfolded_bytes")), "{found}");
    assert!(found["free_difference_percent"].as_f64() > Some(0.0), "{found}");
    assert!(number(&found["requests"]) > 0 && found["api_p99_ms"].as_f64() >= found["api_p50_ms"].as_f64());
    assert!(number(&found["crowd_requests"]) > 0 && number(&found["crowd_answers"]) > 0, "{found}");
    let claims = found["claims"].as_array().expect("claims");
    for claim in claims {
        let value = &found[claim["claim"].as_str().expect("a field")];
        assert_eq!(claim["value"], *value, "{claim}");
        assert_eq!(claim["holds"], value.as_f64() < claim["bar"].as_f64(), "{claim}");
    }
    assert_eq!(claims.len(), 6, "{found}");
}
