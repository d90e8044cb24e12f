//! Metrics of a worker's report with each number at the ends of its range: a worker may have been taken over.

use super::tests::scrape;
use super::*;
use serde_json::{Value, json};
use std::sync::Arc;

/// Pointers to all numbers.
fn numbers(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(at.to_owned()),
        Value::Array(all) => {
            all.iter().enumerate().for_each(|(n, one)| numbers(one, &format!("{at}/{n}"), found));
        }
        Value::Object(all) => all.iter().for_each(|(key, one)| numbers(one, &format!("{at}/{key}"), found)),
        _ => {}
    }
}

#[test]
fn numbers_at_their_ends_are_metrics() {
    let state = scrape().groups[0].state.clone().unwrap();
    let (whole, mut places) = (serde_json::to_value(&*state).unwrap(), Vec::new());
    numbers(&whole["report"], "/report", &mut places);
    assert!(places.len() > 40, "{places:?}");
    for place in &places {
        for number in [0, 1, 1 << 52, i64::MAX as u64, u64::MAX] {
            let mut lie = whole.clone();
            *lie.pointer_mut(place).unwrap() = json!(number);
            let Ok(state) = serde_json::from_value::<GroupState>(lie) else { continue };
            let mut scrape = scrape();
            scrape.members[0].report = state.report.members[0].clone();
            scrape.groups[0].state = Some(Arc::new(state));
            assert!(text(scrape, Form::OpenMetrics).unwrap().ends_with("# EOF\n"), "{place} is {number}");
        }
    }
}
