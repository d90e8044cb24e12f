//! Rows of `pagefold bench containers --json`.

use anyhow::Result;

use super::record::Record;
use super::table::{Aim, Row, Spec, Unit};

/// A row whose figure both sides have, ksmd and Pagefold.
const fn both(figure: &'static str, unit: Unit, of_side: &'static str, ratio: Option<&'static str>, aim: Aim) -> Spec {
    Spec { figure, unit, of_side, is_of_both: true, ratio, aim }
}

/// The rows, in the order of the table.
static SPECS: [Spec; 9] = [
    both("merged pages, idle", Unit::Count, "/merged_pages", Some("merged_idle"), Aim::RatioAtLeast(0.95)),
    both(
        "merged pages under load, mean",
        Unit::Count,
        "/merged_under_load",
        Some("merged_under_load"),
        Aim::RatioAtLeast(0.95),
    ),
    both("CPU until stable", Unit::Seconds, "/cpu_s", None, Aim::None),
    both("CPU to 99%", Unit::Seconds, "/to_99/cpu_s", Some("cpu_to_99"), Aim::RatioAtMost(0.33)),
    both("wall time to 99%", Unit::Seconds, "/to_99/wall_s", Some("wall_to_99"), Aim::RatioAtMost(0.33)),
    both("idle, CPU a second", Unit::Seconds, "/idle_cpu_s_per_s", Some("idle_cpu"), Aim::RatioAtMost(0.05)),
    both("CPU under load", Unit::Seconds, "/load_cpu_s", None, Aim::None),
    both("MariaDB, over the rate while nobody merges", Unit::Share, "/over_plain/mariadb", None, Aim::AtLeast(0.98)),
    both("Apache, over the rate while nobody merges", Unit::Share, "/over_plain/apache", None, Aim::AtLeast(0.98)),
];

/// Reads the rows of a record.
pub fn rows(record: &Record) -> Result<Vec<Row>> {
    super::table::rows(&SPECS, record)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_judged_by_pagefolds_own() {
        let side = r#"{"merged_pages": 100, "merged_under_load": 90.0, "cpu_s": 2.0, "to_99": {"cpu_s": 1.0, "wall_s": 1.0},
            "idle_cpu_s_per_s": 0.5, "load_cpu_s": 3.0, "over_plain": {"mariadb": 0.99, "apache": 0.9}}"#;
        let ratio =
            r#"{"merged_idle": 1.0, "merged_under_load": 0.9, "cpu_to_99": 1.0, "wall_to_99": null, "idle_cpu": 1.0}"#;
        let json = format!(
            r#"{{"date": "d", "command": "c", "machine": "m", "output": {{"containers": 5, "rounds": [{{"ksmd": {side},
                "pagefold": {side}, "ratio": {ratio}}}]}}}}"#
        );
        let table = super::super::table::markdown(&rows(&serde_json::from_str(&json).unwrap()).unwrap());
        assert!(
            table.contains("| MariaDB, over the rate while nobody merges | at least 98%: met | 99.00% |"),
            "{table}"
        );
        assert!(table.contains("| Apache, over the rate while nobody merges | at least 98%: **missed** |"), "{table}");
        assert!(table.contains("| merged pages under load, mean | ratio at least 0.95: **missed** |"), "{table}");
    }
}
