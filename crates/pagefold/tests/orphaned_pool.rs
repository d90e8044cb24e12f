//! All parts of a service are killed, and a new one comes that knows nothing of the pool: members fold again by themselves.

mod common;

use common::service::{Member, Service, cannot_fold, folded_pages, member, until};
use std::time::{Duration, Instant};

/// Time in which what was folded is folded again: 60 s.
const SOON: Duration = Duration::from_secs(60);

/// Holds 8 MiB of the contents that its argument names, twice, and writes nothing. It answers each line with whether they are as they were.
const HOLDER: &str = "
import random, sys
half = random.Random(int(sys.argv[1])).randbytes(8 << 20)
kept = bytearray(half) + half
for line in sys.stdin:
    print(kept[: len(half)] == half and kept[len(half) :] == half, flush=True)
";

fn holder(service: &Service, name: &str, contents: &str) -> Member {
    service.run("acme", name, &["--all-anonymous"], &["python3", "-c", HOLDER, contents])
}

/// A page with a duplicate is folded again, in its place. One without waits for one, and says so.
#[test]
fn members_of_a_pool_that_nobody_serves_fold_again_by_themselves() {
    if cannot_fold() {
        return;
    }
    let mut service = Service::start();
    let mut members = [holder(&service, "a", "1"), holder(&service, "b", "2")];
    let folded = |service: &Service| ["a", "b"].map(|name| folded_pages(&service.show("acme"), name));
    until(120, "both are folded", || folded(&service).iter().all(|pages| *pages > 4000));
    service.kill_supervisor_and_worker("acme");
    let killed = Instant::now();
    until(120, "both are folded again", || folded(&service).iter().all(|pages| *pages > 4000));
    let took = killed.elapsed();
    let shown = service.show("acme");
    assert!(shown["saved_bytes"].as_i64().is_some_and(|bytes| bytes > 0), "{shown}");
    let broken: u64 = ["a", "b"].iter().filter_map(|name| member(&shown, name)["broken_pages"].as_u64()).sum();
    assert!(broken < 400, "{shown}");
    members.iter_mut().for_each(|member| assert_eq!(member.tell("look"), "True"));
    assert!(took < SOON * 2, "{took:?}");
    service.assert_audit_is_clean();
}

/// Of two members with the same contents, one ends with all parts. The pages of the other wait for duplicates.
#[test]
fn page_of_a_pool_that_nobody_serves_says_what_it_waits_for() {
    if cannot_fold() {
        return;
    }
    let script =
        &HOLDER.replace("bytearray(half) + half", "bytearray(half)").replace(" and kept[len(half) :] == half", "");
    let mut service = Service::start();
    let start = |service: &Service, name: &str| {
        service.run("acme", name, &["--all-anonymous"], &["python3", "-c", script, "3"])
    };
    let (mut stays, mut ends) = (start(&service, "a"), start(&service, "b"));
    until(120, "both are folded", || folded_pages(&service.show("acme"), "a") > 2000);
    ends.kill();
    service.kill_supervisor_and_worker("acme");
    until(60, "it says what it waits for", || {
        let shown = service.show("acme");
        let row = common::service::find_member(&shown, "a");
        row.is_some_and(|row| row["detail"].as_str().is_some_and(|why| why.contains("MiB still map a pool whose")))
    });
    let _again = start(&service, "c");
    until(60, "it is folded again", || folded_pages(&service.show("acme"), "a") > 2000);
    assert_eq!(stays.tell("look"), "True");
}
