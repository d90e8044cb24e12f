//! Members that verify their own memory, and waiting until they fold and have recovered.

use crate::common::number;
use crate::common::service::{Member, Service, find_member, member, until};
use serde_json::Value;

pub const STABLE: [&str; 5] = ["stable", "--pages", "3000", "--classes", "80"];

/// Starts members that hold duplicates and check them, and waits until they fold.
pub fn folding(service: &Service, names: &[&str], more: &[&str]) -> Vec<Member> {
    let mut members: Vec<Member> =
        names.iter().map(|name| service.torture("acme", name, &[], &[&STABLE, more].concat())).collect();
    service.show("acme");
    service.set("acme", &["--scan-rate", "400000"]);
    until_folding(service, &mut members, 1000);
    members
}

pub fn until_folding(service: &Service, members: &mut [Member], pages: u64) {
    until(60, "the members fold", || {
        members.iter_mut().for_each(|m| m.assert_is_well());
        let shown = service.show("acme");
        members.iter().all(|m| has(&shown, &m.name, "folded_pages") >= pages)
    });
}

pub fn has(shown: &Value, name: &str, what: &str) -> u64 {
    let members = shown["members"].as_array().expect("a list");
    // A member may be missing while it connects again.
    members.iter().find(|m| m["name"] == name).map_or(0, |m| number(&m[what]))
}

/// Asserts that the group has recovered: a new member folds, all members go on checking without a fault, and the audit
/// is clean.
pub fn assert_recovers(service: &Service, members: &mut [Member]) {
    let mut fresh = vec![service.torture("acme", "fresh", &[], &STABLE)];
    until_folding(service, &mut fresh, 1000);
    members.iter_mut().for_each(|m| m.assert_is_well());
    let counts: Vec<usize> = members.iter().map(|m| m.lines().len()).collect();
    until(60, "all go on checking", || members.iter().zip(&counts).all(|(m, count)| m.lines().len() > *count));
    service.assert_audit_is_clean();
}

pub fn wait_for_state(service: &Service, name: &str, state: &str) -> Value {
    until(30, &format!("{name} is {state}"), || {
        find_member(&service.show("acme"), name).is_some_and(|m| m["state"] == state)
    });
    member(&service.show("acme"), name).clone()
}
