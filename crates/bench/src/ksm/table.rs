//! Prints the result of `pagefold bench ksm` as a table.

use super::result::Bench;
use report::{Align, Table};
use serde_json::Value;
use std::io::{self, Write};

/// A row of the table: its title, where its number is in the JSON of a turn, its decimals, and the value that Pagefold
/// is to reach.
struct Row {
    what: &'static str,
    pointer: &'static str,
    decimals: usize,
    /// Factor by which the JSON's number is multiplied.
    scale: f64,
    aim: &'static str,
}

const fn row(what: &'static str, pointer: &'static str, decimals: usize, scale: f64, aim: &'static str) -> Row {
    Row { what, pointer, decimals, scale, aim }
}

const ROWS: [Row; 25] = [
    row("pages resident before", "/resident_pages", 0, 1.0, ""),
    row("  equal to another", "/equal_pages", 0, 1.0, ""),
    row("pages merged", "/merged_pages", 0, 1.0, ""),
    row("  by page frames", "/frames_saved", 0, 1.0, ""),
    row("to 99% of ksmd's: s", "/wall_s", 2, 1.0, ""),
    row("  CPU s", "/cpu_s", 2, 1.0, ""),
    row("until stable: s", "/total_wall_s", 1, 1.0, ""),
    row("  CPU s", "/total_cpu_s", 2, 1.0, ""),
    row("CPU us a merged page", "/cpu_us_per_merged_page", 2, 1.0, ""),
    row("idle: CPU ms a second", "/steady_cpu_s_per_s", 2, 1000.0, ""),
    row("new duplicate merged after, p50: s", "/reaction_s", 3, 1.0, ""),
    row("  longest: s", "/reaction_max_s", 3, 1.0, ""),
    row("first write, p50: us", "/break/p50_us", 2, 1.0, ""),
    row("  p99: us", "/break/p99_us", 2, 1.0, ""),
    row("read kept waiting (5 us), p50: us", "/stall/waits/p50_us", 1, 1.0, ""),
    row("  p99: us", "/stall/waits/p99_us", 1, 1.0, "<= 250"),
    row("  longest: us", "/stall/waits/max_us", 1, 1.0, ""),
    row("  of a million reads", "/stall/waits_per_million", 1, 1.0, ""),
    row("  merged meanwhile: %", "/stall/merged_share", 1, 100.0, ">= 99"),
    row("  nobody merging, p99: us", "/stall/floor_waits/p99_us", 1, 1.0, ""),
    row("  by the agents, p99: us", "/account/agent_stalls/p99_us", 0, 1.0, ""),
    row("metadata bytes a page", "/metadata_bytes_per_page", 1, 1.0, ""),
    row("  % of the page", "/metadata_share", 2, 100.0, "<= 1"),
    row("mappings before", "/vmas_before", 0, 1.0, ""),
    row("  after", "/vmas_after", 0, 1.0, ""),
];

/// Prints the result as a table.
///
/// # Errors
/// `out` cannot be written.
pub fn print(out: &mut dyn Write, bench: &Bench) -> io::Result<()> {
    use Align::{Left, Right};
    let mut table = Table::new(&[("", Left), ("ksmd", Right), ("pagefold", Right), ("aim", Left)]);
    for row in &ROWS {
        let cell = |turn: &Value| match turn.pointer(row.pointer).and_then(Value::as_f64) {
            Some(number) => format!("{:.*}", row.decimals, number * row.scale),
            None => "-".to_owned(),
        };
        table.row([row.what.to_owned(), cell(&bench.ksmd), cell(&bench.pagefold), row.aim.to_owned()]);
    }
    writeln!(out, "{table}")?;
    let r = &bench.ratio;
    let mut table = Table::new(&[("ours over theirs", Left), ("", Right), ("aim", Left)]);
    for (what, ratio, aim) in [
        ("merged", r.merged, ">= 0.99"),
        ("  by page frames", r.frames_saved, ""),
        ("cpu", r.cpu, "<= 0.33"),
        ("wall", r.wall, "<= 0.33"),
        ("steady_cpu", r.steady_cpu, "<= 0.05"),
        ("break_p50", r.break_p50, "<= 1.2"),
    ] {
        let ratio = ratio.map_or_else(|| "not reached".to_owned(), |r| format!("{r:.3}"));
        table.row([what.to_owned(), ratio, aim.to_owned()]);
    }
    write!(out, "{table}")
}
