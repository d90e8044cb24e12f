//! Pieces of what `pagefold explain` and `pagefold census` print of guests from inside.

use crate::table::{Align, Table, wrap};
use census::{Cost, CostPart};
use page::pages_to_bytes;

/// Longest line.
const COLUMNS: usize = 100;

/// Pages in MiB, for a column.
pub fn mib(pages: u64) -> String {
    crate::size::mib(pages_to_bytes(pages))
}

/// Text of strangers in lines that fit.
pub fn paragraph(text: &str) -> String {
    wrap(&crate::printable(text), COLUMNS)
}

/// What a part of a guest's cost is called.
pub const fn part(part: CostPart) -> &'static str {
    match part {
        CostPart::Vmm => "VMM: heap, stack, devices, code",
        CostPart::GuestKernel => "guest's kernel",
        CostPart::GuestPageCache => "guest's page cache",
        CostPart::GuestAnonymous => "guest's processes",
        CostPart::GuestUnused => "backed, not used by the guest",
        CostPart::GuestUnknown => "guest memory, unknown",
    }
}

/// The table of incremental cost; nothing where nothing is known.
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
