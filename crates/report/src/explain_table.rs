//! Parts of the output of `pagefold explain` and `pagefold census` about guests from inside.

use crate::table::{Align, Table, wrap};
use census::{Cost, CostPart};
use page::pages_to_bytes;

/// Greatest length of a line, in characters.
const COLUMNS: usize = 100;

/// Pages in MiB, for a column.
pub fn mib(pages: u64) -> String {
    cli::size::mib(pages_to_bytes(pages))
}

/// Text that may contain names chosen by strangers, wrapped into lines.
pub fn paragraph(text: &str) -> String {
    wrap(&cli::printable(text), COLUMNS)
}

/// The name of a part of a guest's cost.
pub const fn part(part: CostPart) -> &'static str {
    match part {
        CostPart::Vmm => "VMM: heap, stack, devices, code",
        CostPart::GuestKernel => "guest's kernel",
        CostPart::GuestPageCache => "guest's files and tmpfs",
        CostPart::GuestAnonymous => "guest's processes",
        CostPart::GuestUnused => "backed, not used by the guest",
        CostPart::GuestUnknown => "guest memory, unknown",
    }
}

/// The table of incremental cost; empty if no costs are known.
pub fn cost(costs: &[Cost]) -> String {
    let mut table = Table::new(&[
        ("part", Align::Left),
        ("resident", Align::Right),
        ("incremental", Align::Right),
        ("if folded", Align::Right),
    ]);
    let mut total = [0; 3];
    for cost in costs.iter().filter(|c| c.resident_pages > 0) {
        let figures = [cost.resident_pages, cost.incremental_pages, cost.incremental_folded_pages];
        total.iter_mut().zip(figures).for_each(|(sum, n)| *sum += n);
        table.row([part(cost.part).to_owned()].into_iter().chain(figures.map(mib)));
    }
    if table.is_empty() {
        return String::new();
    }
    table.row(["together".to_owned()].into_iter().chain(total.map(mib)));
    format!("\nWhat it costs, in MiB\n{table}")
}
