//! Prints the result of `pagefold bench overhead` as a table.

use super::Figures;
use report::{Align, Table};
use std::io::{self, Write};

/// Prints the figures as a table.
///
/// # Errors
/// `out` cannot be written.
pub fn print(out: &mut dyn Write, all: &[Figures]) -> io::Result<()> {
    use Align::{Left, Right};
    let columns = [
        ("workload", Left),
        ("unit", Left),
        ("not a member", Right),
        ("member", Right),
        ("ratio", Right),
        ("95%", Right),
        ("n", Right),
        ("cap", Right),
        ("verdict", Left),
        ("folded", Right),
        ("floor", Right),
    ];
    let mut table = Table::new(&columns);
    let time = |seconds: &[f64]| time(crate::median::median(seconds));
    for f in all {
        table.row([
            f.workload.to_owned(),
            f.unit.to_owned(),
            time(&f.plain_s),
            time(&f.member_s),
            format!("{:.3}", f.ratio),
            f.ci95.map_or_else(|| "-".to_owned(), |[low, high]| format!("{low:.3} to {high:.3}")),
            f.n.to_string(),
            format!("{:.2}", f.cap),
            f.verdict.word().to_owned(),
            cli::size::count(f.folded_pages),
            cli::size::count(f.floor),
        ]);
    }
    writeln!(out, "Wall time of a unit of work, as a member and not; medians of the rounds\n{table}")
}

/// A time in a fitting unit, with three digits.
fn time(seconds: f64) -> String {
    let (number, unit) = match seconds {
        s if s < 1e-6 => (s * 1e9, "ns"),
        s if s < 1e-3 => (s * 1e6, "us"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    let decimals = (2.0 - number.log10().floor()).clamp(0.0, 2.0);
    format!("{number:.*} {unit}", decimals as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_digits_and_a_unit() {
        let shown = [2.444e-7, 1.3e-5, 7.3349e-4, 0.3, 2.532_751, 123.4].map(time);
        assert_eq!(shown, ["244 ns", "13.0 us", "733 us", "300 ms", "2.53 s", "123 s"]);
    }
}
