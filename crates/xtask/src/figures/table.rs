//! Rows of figures, ksmd beside Pagefold, as a Markdown table: medians over the rounds, and the spread of what is
//! judged.

use anyhow::Result;

use super::record::Record;

/// Kinds of numbers, by how they are written.
#[derive(Clone, Copy)]
pub enum Unit {
    /// Pages, mappings and other whole numbers.
    Count,
    /// Seconds.
    Seconds,
    /// Microseconds.
    Micros,
    /// Parts of a whole, as a percentage.
    Share,
}

/// Bounds that a figure is to keep.
#[derive(Clone, Copy)]
pub enum Aim {
    /// No bound.
    None,
    /// Lower bound of the ratio of Pagefold's figure to ksmd's.
    RatioAtLeast(f64),
    /// Upper bound of the ratio of Pagefold's figure to ksmd's.
    RatioAtMost(f64),
    /// Upper bound of Pagefold's own figure.
    AtMost(f64),
    /// Lower bound of Pagefold's own figure.
    AtLeast(f64),
}

/// A row of a table, before its numbers are read.
pub struct Spec {
    /// The figure's name.
    pub figure: &'static str,
    /// How its numbers are written.
    pub unit: Unit,
    /// JSON pointer below `/ksmd` and `/pagefold` of a round.
    pub of_side: &'static str,
    /// Whether ksmd has the figure, too.
    pub is_of_both: bool,
    /// Name below `/ratio` of a round, where the bench gives a ratio of its own.
    pub ratio: Option<&'static str>,
    /// Bound that the figure is to keep.
    pub aim: Aim,
}

/// A row with its numbers, one of each round.
pub struct Row {
    spec: &'static Spec,
    ksmd: Vec<Option<f64>>,
    pagefold: Vec<Option<f64>>,
    ratio: Vec<Option<f64>>,
}

/// Reads the numbers of rows.
pub fn rows(specs: &'static [Spec], record: &Record) -> Result<Vec<Row>> {
    specs.iter().map(|spec| Row::read(spec, record)).collect()
}

impl Row {
    fn read(spec: &'static Spec, record: &Record) -> Result<Self> {
        let of = |side: &str| record.numbers(&format!("/{side}{}", spec.of_side));
        let pagefold = of("pagefold")?;
        let ksmd = if spec.is_of_both { of("ksmd")? } else { Vec::new() };
        let ratio = match spec.ratio {
            Some(name) => record.numbers(&format!("/ratio/{name}"))?,
            None => pagefold.iter().zip(&ksmd).map(|(ours, theirs)| Some(ours.as_ref()? / theirs.as_ref()?)).collect(),
        };
        Ok(Self { spec, ksmd, pagefold, ratio })
    }

    fn cells(&self) -> [String; 6] {
        let unit = self.spec.unit;
        let (judged, is_met): (_, fn(f64, f64) -> bool) = match self.spec.aim {
            Aim::None | Aim::RatioAtMost(_) => (&self.ratio, |number, bound| number <= bound),
            Aim::RatioAtLeast(_) => (&self.ratio, |number, bound| number >= bound),
            Aim::AtMost(_) => (&self.pagefold, |number, bound| number <= bound),
            Aim::AtLeast(_) => (&self.pagefold, |number, bound| number >= bound),
        };
        let (aim, bound) = match self.spec.aim {
            Aim::None => ("-".into(), None),
            Aim::RatioAtLeast(bound) => (format!("ratio at least {bound}"), Some(bound)),
            Aim::RatioAtMost(bound) => (format!("ratio at most {bound}"), Some(bound)),
            Aim::AtMost(bound) if matches!(unit, Unit::Share) => (format!("at most {}%", bound * 100.0), Some(bound)),
            Aim::AtMost(bound) => (format!("at most {}", unit.write(bound)), Some(bound)),
            Aim::AtLeast(bound) if matches!(unit, Unit::Share) => (format!("at least {}%", bound * 100.0), Some(bound)),
            Aim::AtLeast(bound) => (format!("at least {}", unit.write(bound)), Some(bound)),
        };
        // A figure that was not reached in one of the rounds has missed its aim.
        let verdict = bound
            .map(|bound| if median(judged).is_some_and(|number| is_met(number, bound)) { "met" } else { "**missed**" });
        let write = |numbers: &[Option<f64>]| median(numbers).map_or_else(|| "-".into(), |number| unit.write(number));
        let ratio = median(&self.ratio).map_or_else(|| "-".into(), significant);
        let is_of_ratio = !matches!(self.spec.aim, Aim::AtMost(_) | Aim::AtLeast(_));
        let spread = spread(judged, |number| if is_of_ratio { significant(number) } else { unit.write(number) });
        let aim = verdict.map_or_else(|| aim.clone(), |verdict| format!("{aim}: {verdict}"));
        [self.spec.figure.into(), aim, write(&self.ksmd), write(&self.pagefold), ratio, spread]
    }
}

/// The rows as a Markdown table.
pub fn markdown(rows: &[Row]) -> String {
    let mut lines =
        vec!["| figure | aim | ksmd | Pagefold | ratio | spread |".to_string(), "|---|---|---|---|---|---|".into()];
    lines.extend(rows.iter().map(|row| format!("| {} |", row.cells().join(" | "))));
    lines.join("\n")
}

/// The median; none if a number is missing.
fn median(numbers: &[Option<f64>]) -> Option<f64> {
    let mut numbers: Vec<f64> = numbers.iter().copied().collect::<Option<_>>()?;
    numbers.sort_by(f64::total_cmp);
    let middle = numbers.len() / 2;
    match numbers.len() {
        0 => None,
        length if length % 2 == 0 => Some((numbers[middle - 1] + numbers[middle]) / 2.0),
        _ => Some(numbers[middle]),
    }
}

/// The smallest and the largest of several rounds.
fn spread(numbers: &[Option<f64>], write: impl Fn(f64) -> String) -> String {
    let known: Vec<f64> = numbers.iter().flatten().copied().collect();
    if known.len() < 2 {
        return "-".into();
    }
    let (least, most) = known.iter().fold((f64::MAX, f64::MIN), |(least, most), &n| (least.min(n), most.max(n)));
    format!("{} to {}", write(least), write(most))
}

impl Unit {
    fn write(self, number: f64) -> String {
        match self {
            Self::Count => thousands(number.round() as i64),
            Self::Seconds => format!("{} s", significant(number)),
            // Some clocks count whole microseconds: their figures have no decimals.
            Self::Micros if number.fract() == 0.0 => format!("{} us", thousands(number as i64)),
            Self::Micros => format!("{} us", significant(number)),
            Self::Share => format!("{}%", fixed(number * 100.0, 2)),
        }
    }
}

/// A number with three significant digits, or with all digits before its decimal point.
fn significant(number: f64) -> String {
    let before_point = if number == 0.0 { 1 } else { number.abs().log10().floor() as i32 + 1 };
    fixed(number, (3 - before_point).clamp(0, 6) as usize)
}

/// A number with this many decimals. If it has none, thousands are set apart.
fn fixed(number: f64, decimals: usize) -> String {
    if decimals == 0 { thousands(number.round() as i64) } else { format!("{number:.decimals$}") }
}

/// A whole number, thousands set apart.
fn thousands(number: i64) -> String {
    let digits = number.unsigned_abs().to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    if number < 0 { format!("-{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    static SPEC: Spec = Spec {
        figure: "f",
        unit: Unit::Seconds,
        of_side: "/f",
        is_of_both: true,
        ratio: None,
        aim: Aim::RatioAtMost(0.5),
    };
    static OWN: Spec =
        Spec { figure: "g", unit: Unit::Share, of_side: "/f", is_of_both: false, ratio: None, aim: Aim::AtMost(0.05) };

    fn cells(spec: &'static Spec, ksmd: &[Option<f64>], pagefold: &[Option<f64>]) -> [String; 6] {
        let ratio = pagefold.iter().zip(ksmd).map(|(ours, theirs)| Some((*ours)? / (*theirs)?)).collect();
        Row { spec, ksmd: ksmd.to_vec(), pagefold: pagefold.to_vec(), ratio }.cells()
    }

    #[test]
    fn medians_and_spread_are_of_all_rounds() {
        let found = cells(&SPEC, &[Some(10.0), Some(20.0), Some(40.0)], &[Some(2.0), Some(6.0), Some(10.0)]);
        assert_eq!(found, ["f", "ratio at most 0.5: met", "20.0 s", "6.00 s", "0.250", "0.200 to 0.300"]);
    }

    #[test]
    fn missed_aims_are_marked() {
        assert!(cells(&SPEC, &[Some(10.0)], &[Some(6.0)])[1].ends_with("**missed**"));
        let not_reached = cells(&SPEC, &[Some(10.0), Some(10.0)], &[None, Some(1.0)]);
        assert_eq!(not_reached[1..5], ["ratio at most 0.5: **missed**", "10.0 s", "-", "-"]);
        assert_eq!(cells(&OWN, &[], &[Some(0.051)])[1..5], ["at most 5%: **missed**", "-", "5.10%", "-"]);
        assert_eq!(cells(&OWN, &[], &[Some(0.01), Some(0.02)])[5], "1.00% to 2.00%");
    }

    #[test]
    fn numbers_have_three_digits_that_count() {
        let found = [0.0228, 0.146, 1.0404, 14.54, 232.3, 70254.0, 0.0].map(significant);
        assert_eq!(found, ["0.0228", "0.146", "1.04", "14.5", "232", "70,254", "0.00"]);
        assert_eq!([-1234, 12, 123_456].map(thousands), ["-1,234", "12", "123,456"]);
    }
}
