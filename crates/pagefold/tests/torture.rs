//! No write is lost: programs that write and check all of their memory all the time, while it is folded.
//!
//! `PAGEFOLD_SOAK_SECONDS` has them run for longer: hours, if need be.
//!
//! These tests detect the following faults, with two members for 12 s:
//!
//! | fault | detected |
//! |---|---|
//! | pages are replaced without being compared | by both members, within a second |
//! | pages are compared in place and mapped over, without being moved out | in 6 of 6 runs: both found it, or one hung at a discarded page |
//! | the same, without the chase of `trials/torture/owners.rs` | in 2 of 4 runs |

mod common;

use common::number;
use common::service::{Service, cannot_fold, failures, member, seconds, until};
use serde_json::Value;
use std::time::{Duration, Instant};

/// Number of checked writes of each member at least: in a long run, 10 million.
const WRITES: [u64; 2] = [1_000_000, 10_000_000];

/// Time for which a group is watched, in seconds. Where processors are slow, broken pages are folded again after 15.
const WATCHED: u64 = 12;

/// Time limit beyond that for what a test waits for, such as broken pages that are folded again: 240 s.
const PATIENCE: Duration = Duration::from_secs(240);

/// Argument with which a program goes on until its input has ended.
const HELD: &str = "--until-input-ends";

/// [`WRITES`] of this run.
fn least_writes() -> u64 {
    WRITES[usize::from(seconds(1) > 1)]
}

/// Figures of a group, collected while its members ran.
#[derive(Debug, Default)]
struct Seen {
    most_sharing: u64,
    most_slots: u64,
    most_zero: u64,
    last: Value,
}

impl Seen {
    fn look(&mut self, service: &Service, group: &str) {
        let shown = service.show(group);
        self.most_sharing = self.most_sharing.max(number(&shown["sharing_pages"]));
        self.most_slots = self.most_slots.max(number(&shown["slots"]));
        self.most_zero = self.most_zero.max(number(&shown["zero_pages"]));
        self.last = shown;
    }
}

/// Runs two members of one group to their end. Returns the group's figures meanwhile, and the members' counts. The
/// second member gets the further arguments `more`. They are watched until all has been seen that is to be seen.
fn two_members(
    run: &[&str],
    words: &[&str],
    more: &[&str],
    env: &[(&str, &str)],
    is_all: impl Fn(&Seen) -> bool,
) -> (Seen, [Value; 2]) {
    two_members_of(&Service::start(), run, words, more, env, is_all)
}

fn two_members_of(
    service: &Service,
    run: &[&str],
    words: &[&str],
    more: &[&str],
    env: &[(&str, &str)],
    is_all: impl Fn(&Seen) -> bool,
) -> (Seen, [Value; 2]) {
    let words = [words, &[HELD]].concat();
    let mut members = [("one", &[][..]), ("other", more)]
        .map(|(name, more)| service.torture_with("acme", name, run, &[&words[..], more].concat(), env));
    service.show("acme");
    service.set("acme", &["--scan-rate", "400000"]);
    let mut seen = Seen::default();
    let end = Instant::now() + Duration::from_secs(seconds(WATCHED));
    let goes_on = |seen: &Seen, now: Instant| now < end || (now < end + PATIENCE && !is_all(seen));
    while goes_on(&seen, Instant::now()) {
        members.iter_mut().for_each(|m| m.assert_is_well());
        seen.look(service, "acme");
        std::thread::sleep(Duration::from_millis(500));
    }
    service.assert_audit_is_clean();
    members.iter_mut().for_each(|m| m.close_input());
    // Their writes are counted, not timed: on a machine whose page tables are slow, they take minutes.
    let counted = members.each_mut().map(|m| m.finish(seconds(WATCHED) + 1200));
    (seen, counted)
}

#[test]
fn no_write_is_lost_in_memory_that_asks_to_be_merged() {
    if cannot_fold() {
        return;
    }
    let time = seconds(WATCHED + 2).to_string();
    let writes = least_writes().to_string();
    let words = ["memory", "--writes", &writes, "--seconds", &time];
    let folds_all = |seen: &Seen| seen.most_sharing > 3000 && seen.most_slots > 100 && seen.most_zero > 0;
    let (seen, counted) = two_members(&[], &words, &["--no-children"], &[], |seen| {
        let changed = number(&seen.last["fold_failures"]["changed"]);
        folds_all(seen) && changed > 0 && failures(&seen.last) > 10 && number(&seen.last["refolds"]) > 0
    });
    eprintln!("{seen:?} {counted:?}");
    for counted in &counted {
        assert!(number(&counted["checked_writes"]) >= least_writes(), "{counted}");
        for what in ["discards", "moved", "resized", "inaccessible", "frees", "pipes", "parts_unmapped"] {
            assert!(number(&counted["done"][what]) > 0, "{what} in {counted}");
        }
    }
    // A page shared with a child is not folded until it is written again, so the member with children folds less.
    let [with_children, without] = &counted;
    assert!(number(&with_children["done"]["forks"]) > 0, "{with_children}");
    assert!(number(&without["folds_seen"]) > 3000, "{without}");
    // The point of this test: writes at the very moment of a fold.
    assert!(number(&without["done"]["writes_ahead_of_folds"]) > 100, "{without}");
    assert!(folds_all(&seen), "{seen:?}");
    // Pages were written between their report and their fold: the comparison has saved these writes.
    assert!(number(&seen.last["fold_failures"]["changed"]) > 0, "{seen:?}");
    assert!(failures(&seen.last) > 10, "{seen:?}");
    assert!(number(&seen.last["refolds"]) > 0, "{seen:?}");
    assert_eq!(member(&seen.last, "one")["state"], "folding");
}

#[test]
fn no_write_is_lost_on_the_heap() {
    if cannot_fold() {
        return;
    }
    let time = seconds(WATCHED + 2).to_string();
    let writes = least_writes().to_string();
    let words = ["heap", "--writes", &writes, "--seconds", &time];
    let (seen, counted) = two_members(&["--all-anonymous"], &words, &[], &[], |seen| seen.most_sharing > 1000);
    eprintln!("{seen:?} {counted:?}");
    for counted in &counted {
        assert!(number(&counted["checked_writes"]) >= least_writes(), "{counted}");
        assert!(number(&counted["done"]["trims"]) > 0 && number(&counted["done"]["threads"]) > 3, "{counted}");
    }
    assert!(seen.most_sharing > 1000, "{seen:?}");
}

/// The agent compares fingerprints, as on kernels that cannot note writes.
#[test]
fn no_write_is_lost_where_fingerprints_are_compared() {
    if cannot_fold() {
        return;
    }
    let time = seconds(WATCHED + 2).to_string();
    let words = ["memory", "--writes", "1000000", "--seconds", &time];
    let env = [("PAGEFOLD_COMPARE_FINGERPRINTS", "1")];
    let folds_all = |seen: &Seen| seen.most_sharing > 1000 && seen.most_zero > 0;
    let (seen, counted) = two_members(&[], &words, &["--no-children"], &env, folds_all);
    eprintln!("{seen:?} {counted:?}");
    for counted in &counted {
        assert!(number(&counted["checked_writes"]) >= 1_000_000, "{counted}");
    }
    assert!(number(&counted[1]["folds_seen"]) > 1000, "{}", counted[1]);
    assert!(folds_all(&seen), "{seen:?}");
    assert_eq!(member(&seen.last, "one")["state"], "folding");
}

/// Without a prover, broken pages are folded again by the other proof (`refold.rs`). The kernel's reports of forks
/// cannot be followed then, so memory that children would inherit is not folded.
#[test]
fn no_write_is_lost_where_there_is_no_prover() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let provers = [service.place().join("prove.sock"), host::own_socket(&service.place().join("prove.sock"), 0)];
    until(60, "the service listens", || provers.iter().all(|socket| socket.exists()));
    provers.iter().for_each(|socket| std::fs::remove_file(socket).expect("the prover's socket"));
    let time = seconds(WATCHED + 2).to_string();
    let words = ["memory", "--writes", "1000000", "--seconds", &time];
    let held = [&words[..], &[HELD]].concat();
    let mut forking = service.torture_with("acme", "forking", &[], &held, &[("PAGEFOLD_EAGER", "1")]);
    let words = [&words[..], &["--dont-fork"]].concat();
    let (seen, counted) = two_members_of(&service, &[], &words, &[], &[], |seen| number(&seen.last["refolds"]) > 0);
    eprintln!("{seen:?} {counted:?}");
    counted.iter().for_each(|counted| assert!(number(&counted["checked_writes"]) >= 1_000_000, "{counted}"));
    assert!(number(&seen.last["refolds"]) > 0, "{seen:?}");
    assert_eq!(member(&seen.last, "one")["state"], "folding");
    let unfollowed = member(&seen.last, "forking");
    assert_eq!((&unfollowed["state"], number(&unfollowed["folded_pages"])), (&"not_foldable".into(), 0));
    assert!(unfollowed["detail"].as_str().is_some_and(|why| why.contains("could not be followed")), "{unfollowed}");
    forking.close_input();
    forking.finish(seconds(WATCHED) + 1200);
}
