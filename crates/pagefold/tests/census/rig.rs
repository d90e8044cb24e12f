//! Programs with every kind of page, and a count of them by hand.

use crate::common::brute_force::Frames;
use crate::common::formats::assert_documented;
use crate::common::{Known, Stage, guest, number};
use serde_json::{Value, json};

/// Two programs with every kind of page that small programs have, and with some pages in common.
pub fn pair(stage: &Stage) -> (Known, Known) {
    let file = format!("file f {}", stage.path("data"));
    let common = [
        "alloc a 4000",
        "fill a 0 1000 1",
        "same a 1000 200 7000000",
        "zero a 1200 300",
        "read a 1500 100",
        "shared s 64",
        "fill s 0 64 5000",
        &file,
        "read f 0 100",
        "same f 20 10 7000000",
    ];
    let (mut one, mut two) = (stage.start(&common), stage.start(&common));
    one.tell("fill a 2000 500 1000000");
    two.tell("fill a 2000 400 2000000");
    two.tell("fill s 0 10 900000");
    (one, two)
}

/// Compares every figure that can be counted by hand.
pub fn compare(found: &Value, pids: &[u32]) {
    assert_documented(&["census --json"], found);
    let frames = Frames::of(pids);
    for &pid in pids {
        let guest = guest(found, pid);
        assert_eq!(number(&guest["mapped_pages"]), frames.mapped(pid), "mapped");
        assert_eq!(number(&guest["resident_pages"]), frames.resident(pid), "resident");
        assert_eq!(number(&guest["zero_pages"]), frames.zero(pid), "zero");
        assert_eq!(number(&guest["distinct_pages"]), frames.distinct(pid), "distinct");
        assert_eq!(number(&guest["duplicates"]["within"]), frames.resident(pid) - frames.distinct(pid), "within");
        assert_eq!(number(&guest["incremental_pages"]), frames.alone(pid), "alone: {pid} of {pids:?}");
        assert_eq!(number(&guest["already_shared_pages"]), frames.resident(pid) - frames.alone(pid), "shared");
        assert_eq!(guest["unreadable_pages"], 0);
    }
    assert_eq!(number(&found["all_saved_pages"]), frames.superfluous());
    assert_eq!(number(&found["isolation_price_pages"]), frames.superfluous() - frames.superfluous_isolated());
    let table = &found["opportunity"];
    let anonymous = number(&table["within"]["anon_anon"]) + number(&table["between"]["anon_anon"]);
    assert!(anonymous <= frames.superfluous_anonymous(), "{anonymous}");
    let (shared, saved) = frames.shared();
    assert_eq!(
        (number(&found["already_shared"]["frames"]), number(&found["already_shared"]["saved_pages"])),
        (shared, saved)
    );
    assert_eq!(found["host"]["frames"], "exact");
    assert_eq!(found["host"]["drifted_pages"], 0);
    assert_eq!(found["partial"], json!([]));
}
