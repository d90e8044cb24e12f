//! Rows of `pagefold bench ksm --churn --json`.

use anyhow::Result;

use super::record::Record;
use super::table::{Aim, Row, Spec, Unit};

/// A row whose figure both sides have, ksmd and Pagefold.
const fn both(figure: &'static str, unit: Unit, of_side: &'static str, aim: Aim) -> Spec {
    Spec { figure, unit, of_side, is_of_both: true, ratio: None, aim }
}

/// A row whose figure only Pagefold has.
const fn own(figure: &'static str, unit: Unit, of_side: &'static str, aim: Aim) -> Spec {
    Spec { figure, unit, of_side, is_of_both: false, ratio: None, aim }
}

/// The rows, in the order of the table.
const fn specs(cpu: Aim) -> [Spec; 21] {
    [
        both("frames saved, net, mean of the second half", Unit::Count, "/mean_saved", Aim::RatioAtLeast(0.97)),
        both("frames taken, mean of the second half", Unit::Count, "/mean_resident", Aim::None),
        both("- different contents", Unit::Count, "/frames/contents", Aim::None),
        own("- idle slots", Unit::Count, "/frames/pool_idle", Aim::None),
        own("- broken pages that equal a slot", Unit::Count, "/frames/broken_equal_to_a_slot", Aim::None),
        both("tables of the merger, in frames", Unit::Count, "/frames/tables", Aim::None),
        both("mappings, in frames", Unit::Count, "/frames/mappings", Aim::None),
        both("page tables, in frames", Unit::Count, "/frames/page_tables", Aim::None),
        both("pages merged, before the work", Unit::Count, "/begin_merged_pages", Aim::None),
        both("pages merged, mean of the second half", Unit::Count, "/mean_merged_pages", Aim::RatioAtLeast(0.95)),
        both("pages merged, at the last moment", Unit::Count, "/end_merged_pages", Aim::None),
        both("page frames taken, at the last moment", Unit::Count, "/end_frames", Aim::None),
        both("CPU while the guests worked", Unit::Seconds, "/cpu_s", cpu),
        own("folds", Unit::Count, "/folds/all", Aim::None),
        own("folds of pages that had been broken", Unit::Count, "/folds/again", Aim::None),
        own("short-lived folds", Unit::Share, "/short_folds_share", Aim::AtMost(0.05)),
        own("CPU of a fold", Unit::Micros, "/cpu_us_per_fold", Aim::None),
        own("stall by the agents' account, p99", Unit::Micros, "/agent_stalls/p99_us", Aim::None),
        own("stall by the agents' account, longest", Unit::Micros, "/agent_stalls/max_us", Aim::None),
        both("mappings of all guests, before the work", Unit::Count, "/vmas/0", Aim::None),
        both("mappings of all guests, at the end", Unit::Count, "/vmas/1", Aim::None),
    ]
}

/// Rows for guests that pause: Pagefold may take a fifth of ksmd's processor time.
static WITH_PAUSES: [Spec; 21] = specs(Aim::RatioAtMost(0.2));
/// Rows for guests that work flat out.
static FLAT_OUT: [Spec; 21] = specs(Aim::None);

/// Reads the rows of a record.
pub fn rows(record: &Record) -> Result<Vec<Row>> {
    super::table::rows(if record.is_flat_out() { &FLAT_OUT } else { &WITH_PAUSES }, record)
}

/// A record of one round.
#[cfg(test)]
pub const EXAMPLE: &str = r#"{"date": "2026-01-01", "command": "c", "machine": "m",
    "output": {"minutes": 3.0, "pause_s": 45, "rounds": [{
    "ksmd": {"mean_saved": 9.0, "mean_resident": 8.0, "frames": {"contents": 1, "tables": 1, "mappings": 1,
        "page_tables": 1}, "begin_merged_pages": 1, "mean_merged_pages": 2.0, "end_merged_pages": 3, "end_frames": 4,
        "cpu_s": 20.0, "vmas": [5, 6]},
    "pagefold": {"mean_saved": 9.0, "mean_resident": 8.0, "frames": {"contents": 1, "pool_idle": 1,
        "broken_equal_to_a_slot": 1, "tables": 1, "mappings": 1, "page_tables": 1},
        "begin_merged_pages": 1, "mean_merged_pages": 2.0, "end_merged_pages": 3, "end_frames": 4, "cpu_s": 2.0,
        "folds": {"all": 100, "again": 10, "short": 1}, "short_folds_share": 0.01, "cpu_us_per_fold": 50.5,
        "agent_stalls": {"p50_us": 63, "p99_us": 511, "max_us": 1000}, "vmas": [7, 8]}}]}}"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_guests_that_pause_have_an_aim_for_cpu() {
        let table = |json: &str| super::super::table::markdown(&rows(&serde_json::from_str(json).unwrap()).unwrap());
        assert!(table(EXAMPLE).contains("| CPU while the guests worked | ratio at most 0.2: met | 20.0 s | 2.00 s |"));
        let flat_out = table(&EXAMPLE.replace("\"pause_s\": 45", "\"pause_s\": 0"));
        assert!(flat_out.contains("| CPU while the guests worked | - | 20.0 s |"), "{flat_out}");
    }
}
