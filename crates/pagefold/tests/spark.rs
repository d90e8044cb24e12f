//! The job for Spark makes the same sums as this program: a test that takes long, and Spark.

mod common;

use common::{json_of, number};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

const SUMS: [&str; 6] = ["hosts", "guests", "held_bytes", "zero_bytes", "saved_without_zero_bytes", "inside_bytes"];

/// Whether two sums are the same within 1%.
fn is_same(one: &Value, other: &Value) -> bool {
    let (one, other) = (number(one), number(other));
    one.abs_diff(other) * 100 <= one.max(other)
}

#[test]
fn workers_of_spark_make_the_same_sums() {
    if std::env::var_os("PAGEFOLD_LONG_TESTS").is_none() {
        eprintln!("skipped: it takes some minutes; PAGEFOLD_LONG_TESTS=1");
        return;
    }
    let python = std::env::var("PAGEFOLD_SPARK_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    if !Command::new(&python).args(["-c", "import pyspark"]).output().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: {python} has no pyspark: PAGEFOLD_SPARK_PYTHON names one that has");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let table = dir.path().join("table.parquet");
    let table = table.to_str().expect("a plain path");
    let size = ["bench", "place", "--json", "--hosts", "50", "--guests", "1000", "--tenants", "5", "--parquet", table];
    json_of(&common::pagefold(&size));
    let own = json_of(&common::pagefold(&["fleet", "--json", table]));

    let job = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/spark/fleet.py");
    let submit = "--master local-cluster[2,1,1024] --conf spark.executor.memory=1g pyspark-shell";
    let spark = json_of(
        &Command::new(&python)
            .arg(job)
            .arg(table)
            .env("PYSPARK_SUBMIT_ARGS", submit)
            .env("SPARK_LOCAL_IP", "127.0.0.1")
            .env("SPARK_LOCAL_DIRS", dir.path())
            .current_dir(dir.path())
            .output()
            .expect("run Spark"),
    );
    for sum in SUMS {
        assert!(is_same(&own[sum], &spark[sum]), "{sum}: {} by pagefold, {} by Spark", own[sum], spark[sum]);
    }
    let groups = |found: &Value| found["groups"].as_array().expect("groups").clone();
    assert_eq!(groups(&own).len(), groups(&spark).len());
    for (own, spark) in groups(&own).iter().zip(groups(&spark)) {
        assert_eq!(own["group"], spark["group"]);
        assert!(is_same(&own["saved_without_zero_bytes"], &spark["saved_without_zero_bytes"]), "{own} {spark}");
    }
}
