//! `pagefold bench census` prints every figure it promises, and its censuses agree. Speed is not tested.

mod common;

use common::formats::assert_documented;
use common::{json_of, number, pagefold};

#[test]
fn every_kind_of_census_is_measured_and_finds_the_same() {
    if common::not_root() {
        return;
    }
    let found = json_of(&pagefold(&["bench", "census", "--memory", "64M", "--guests", "4", "--rounds", "1", "--json"]));
    assert_documented(&["bench census --json"], &found);
    for backing in ["huge_pages", "small_pages"] {
        let figures = &found[backing];
        let ways = figures["census"].as_array().unwrap();
        let ways_of = |what: &str| ways.iter().map(|w| w[what].to_string()).collect::<Vec<_>>();
        assert_eq!(ways_of("threads"), ["1", "2", "1", "1"]);
        assert_eq!(ways_of("read"), ["\"processes\"", "\"processes\"", "\"processes\"", "\"frames\""]);
        assert!(ways.iter().all(|w| number(&w["duplicate_pages"]).abs_diff(number(&ways[0]["duplicate_pages"])) < 50));
        // Each of the 4 guests has 4096 pages. Of every eight, two are in all guests, one has one of 128 contents of
        // that guest, and one is zeros. A few pages of the program's own come on top.
        let made = 3 * 1024 + 4 * (512 - 128) + (4 * 512 - 1);
        let superfluous = number(&ways[0]["duplicate_pages"]);
        assert!((made..made + 100).contains(&superfluous), "{superfluous}, made {made}");
        assert!(number(&ways[2]["passes"]) > 1 && number(&ways[0]["passes"]) == 1);
        assert!(number(&ways[2]["index_bytes"]) <= number(&ways[2]["index_bound_bytes"]));
        assert!(figures["index_bytes_per_page"].as_f64().unwrap() <= 24.0);
        assert!(number(&figures["peak_rss_bytes"]) > 1 << 20);
        let ratios = figures["ratio"].as_object().unwrap();
        assert!(ratios.values().all(|r| r.as_f64().unwrap() > 0.0), "{ratios:?}");
        let sizes = figures["by_size"].as_array().unwrap();
        assert!(sizes.windows(2).all(|w| number(&w[0]["pages"]) < number(&w[1]["pages"])));
    }
}

#[test]
fn policies_are_replayed_over_what_a_program_wrote() {
    let trace = pagefold(&["bench", "policy", "--record", &std::process::id().to_string(), "--seconds", "4"]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("this-test.trace");
    std::fs::write(&file, &trace.stdout).unwrap();
    let found = json_of(&pagefold(&["bench", "policy", "--json", file.to_str().unwrap()]));
    assert_documented(&["bench policy --json"], &found);
    let rows: Vec<_> = found.as_array().unwrap().iter().map(|row| (&row["trace"], &row["policy"])).collect();
    assert_eq!(rows, [(&"this-test".into(), &"today".into()), (&"this-test".into(), &"textbook".into())]);
    assert!(number(&found[1]["folds"]) > 0, "{found}");
}
