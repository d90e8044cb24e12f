//! Prints the result of `pagefold bench latency` as a table.

use super::figures::{Ratio, Row};
use report::{Align, Table};
use std::io::{self, Write};

/// Prints the rows as a table.
///
/// # Errors
/// `out` cannot be written.
pub fn print(out: &mut dyn Write, rows: &[Row]) -> io::Result<()> {
    use Align::{Left, Right};
    let columns = [
        ("load", Left),
        ("member", Left),
        ("host", Left),
        ("arm", Left),
        ("p50", Right),
        ("p99", Right),
        ("p99.9", Right),
        ("longest", Right),
        ("rate", Right),
        ("cpu", Right),
        ("folding", Right),
        ("folded", Right),
        ("p99 over off", Left),
        ("rate over off", Left),
        ("cpu over off", Left),
        ("p99 over ksmd", Left),
    ];
    let mut table = Table::new(&columns);
    for row in rows {
        let over = row.over_off.as_ref();
        let least = row.slices.iter().flat_map(|slice| slice.folded_pages).min().unwrap_or(0);
        let folding: Vec<f64> = row.slices.iter().map(|slice| slice.folding_cpu_percent).collect();
        table.row([
            row.load.to_owned(),
            row.member.name().to_owned(),
            row.host.name().to_owned(),
            row.arm.to_owned(),
            format!("{:.0}", row.p50),
            format!("{:.0}", row.p99),
            format!("{:.0}", row.p999),
            format!("{:.0}", row.max),
            format!("{:.0}", row.rate),
            format!("{:.1}", row.cpu_us_per_op),
            format!("{:.1}%", crate::median::median(&folding)),
            cli::size::count(least),
            ratio(over.map(|over| &over.p99)),
            ratio(over.map(|over| &over.rate)),
            ratio(over.map(|over| &over.cpu_us_per_op)),
            ratio(row.p99_over_ksmd.as_ref()),
        ]);
    }
    let heading =
        "Times in microseconds; processor time in microseconds an operation, of folding in percent of a processor";
    writeln!(out, "{heading}\n{table}")
}

/// A ratio with its interval and its verdict.
fn ratio(ratio: Option<&Ratio>) -> String {
    let Some(Ratio { ratio, ci95, verdict, .. }) = ratio else { return "-".to_owned() };
    let between = ci95.map_or_else(String::new, |[low, high]| format!(" ({low:.2} to {high:.2})"));
    format!("{ratio:.2}{between} {}", verdict.word())
}
