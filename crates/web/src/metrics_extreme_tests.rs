//! Metrics of a worker's report with each number at the ends of its range: a worker may have been taken over.

#[path = "../../api/tests/extremes.rs"]
mod extremes;

use super::tests::scrape;
use super::*;
use std::sync::Arc;

#[test]
fn numbers_at_their_ends_are_metrics() {
    let state = scrape().groups[0].state.clone().unwrap();
    let whole = serde_json::to_value(&*state).unwrap();
    let mut tried = 0;
    for (what, lie) in extremes::lies(&whole, "/report") {
        tried += 1;
        let Ok(state) = serde_json::from_value::<GroupState>(lie) else { continue };
        let mut scrape = scrape();
        scrape.members[0].report = state.report.members[0].clone();
        scrape.groups[0].state = Some(Arc::new(state));
        assert!(text(scrape, Form::OpenMetrics).unwrap().ends_with("# EOF\n"), "{what}");
    }
    assert!(tried > 240, "{tried}");
}
