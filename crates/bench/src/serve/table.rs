//! The result for people.

use super::Figures;
use cli::size::signed_bytes;
use report::{Align, Table};
use std::io::{self, Write};

/// Prints the figures as a table.
///
/// # Errors
/// `out` cannot be written.
pub fn print(out: &mut dyn Write, figures: &Figures) -> io::Result<()> {
    let f = figures;
    let mut table =
        Table::new(&[("claim", Align::Left), ("value", Align::Right), ("bar", Align::Right), ("", Align::Left)]);
    for claim in &f.claims {
        let holds = if claim.holds { "holds" } else { "DOES NOT HOLD" };
        table.row([
            claim.claim.replace('_', " "),
            format!("{:.2}", claim.value),
            format!("{:.0}", claim.bar),
            holds.to_owned(),
        ]);
    }
    let [saved, audit, unfolded, fell] =
        [f.saved_bytes, f.audit_saved_bytes, f.unfolded_bytes, f.free_fell_bytes].map(signed_bytes);
    writeln!(
        out,
        "{} members in {} groups\n{table}\n{} requests while folding, median {:.2} ms. Agents at rest: {:.2}% of a core. \
         Indexes: {:.1} MiB. {} tasks at most.\n{} requests beside a crowd that got {} answers: p99 {:.2} ms, {:.2} ms without it.\n\
         Saved: {saved} shown, {audit} by page frames. Unfolding: {unfolded} by what is shown, {fell} of free memory.",
        f.members,
        f.groups,
        f.requests,
        f.api_p50_ms,
        f.idle_agents_cpu_percent,
        f.index_mib,
        f.most_tasks,
        f.crowd_requests,
        f.crowd_answers,
        f.crowd_p99_ms,
        f.alone_p99_ms,
    )
}
