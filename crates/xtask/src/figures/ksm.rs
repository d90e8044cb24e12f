//! Rows of `pagefold bench ksm --json`.

use anyhow::Result;

use super::record::Record;
use super::table::{Aim, Row, Spec, Unit};

/// A row whose figure both sides have, ksmd and Pagefold.
const fn both(figure: &'static str, unit: Unit, of_side: &'static str, ratio: Option<&'static str>, aim: Aim) -> Spec {
    Spec { figure, unit, of_side, is_of_both: true, ratio, aim }
}

/// The rows, in the order of the table.
static SPECS: [Spec; 16] = [
    both("pages equal to another one, before", Unit::Count, "/equal_pages", None, Aim::None),
    both("merged pages", Unit::Count, "/merged_pages", Some("merged"), Aim::RatioAtLeast(0.99)),
    both("the same by page frames", Unit::Count, "/frames_saved", Some("frames_saved"), Aim::RatioAtLeast(0.99)),
    both("CPU to 99%", Unit::Seconds, "/cpu_s", Some("cpu"), Aim::RatioAtMost(0.33)),
    both("wall time to 99%", Unit::Seconds, "/wall_s", Some("wall"), Aim::RatioAtMost(0.33)),
    both("CPU until stable", Unit::Seconds, "/total_cpu_s", None, Aim::None),
    both("idle, CPU a second", Unit::Seconds, "/steady_cpu_s_per_s", Some("steady_cpu"), Aim::RatioAtMost(0.05)),
    both("reaction to a new duplicate, median", Unit::Seconds, "/reaction_s", None, Aim::None),
    both("break of a merged page, p50", Unit::Micros, "/break/p50_us", Some("break_p50"), Aim::RatioAtMost(1.2)),
    both("break of a merged page, p99", Unit::Micros, "/break/p99_us", None, Aim::None),
    both("stall as the guest sees it, p99", Unit::Micros, "/stall/waits/p99_us", None, Aim::AtMost(250.0)),
    both("such stalls in a million reads", Unit::Count, "/stall/waits_per_million", None, Aim::None),
    Spec {
        figure: "stall by the agents' account, p99",
        unit: Unit::Micros,
        of_side: "/account/agent_stalls/p99_us",
        is_of_both: false,
        ratio: None,
        aim: Aim::None,
    },
    Spec {
        figure: "stall by the agents' account, longest",
        unit: Unit::Micros,
        of_side: "/account/agent_stalls/max_us",
        is_of_both: false,
        ratio: None,
        aim: Aim::None,
    },
    both("metadata, share of a resident page", Unit::Share, "/metadata_share", None, Aim::AtMost(0.01)),
    both("mappings of all guests, after", Unit::Count, "/vmas_after", None, Aim::None),
];

/// Reads the rows of a record.
pub fn rows(record: &Record) -> Result<Vec<Row>> {
    super::table::rows(&SPECS, record)
}
