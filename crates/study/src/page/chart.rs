//! Pictures: bars in groups, lines over numbers, and the interval of a verdict. SVG whose colours come from classes, so
//! that a page's style sheet gives them both themes.

use crate::figure::figure;
use report::html::Text;
use std::fmt::Write as _;

/// Width of a picture, in SVG units.
const WIDTH: f64 = 520.0;
/// Height of a picture, in SVG units.
const HEIGHT: f64 = 250.0;
/// Edges of the area in which values are drawn: left, top, right, bottom.
const FIELD: (f64, f64, f64, f64) = (62.0, 14.0, 510.0, 206.0);
/// An axis is logarithmic if its largest number is at least this many times the smallest.
const LOGARITHMIC_FROM: f64 = 20.0;
/// Largest end of an axis. Numbers beyond it are drawn at the end.
const LARGEST: f64 = 1e300;
/// Most ticks of an axis.
const MOST_MARKS: u32 = 20;

/// A mean, with half the width of its confidence interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Value {
    /// The value.
    pub mean: f64,
    /// Half the width of its interval, where there is one.
    pub half: Option<f64>,
}

/// Bars or a line of one colour.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Name in the key.
    pub name: String,
    /// Class of its colour.
    pub class: String,
    /// Values, in the order of the axis.
    pub values: Vec<Option<Value>>,
}

/// A line over time or numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Name in the key.
    pub name: String,
    /// Class of its colour.
    pub class: String,
    /// Points of the line.
    pub points: Vec<(f64, Value)>,
}

/// Largest value of rows, intervals included.
pub fn top_of(rows: &[Row]) -> f64 {
    rows.iter().flat_map(|r| r.values.iter().flatten()).map(|v| v.mean + v.half.unwrap_or(0.0)).fold(0.0, f64::max)
}

/// The upper end of an axis on which values up to `top` are drawn.
fn with_room(top: f64) -> f64 {
    if top > 0.0 { (top * 1.05).min(LARGEST) } else { 1.0 }
}

/// The distance between the ticks of an axis: 1, 2 or 5 times a power of ten, for about five ticks up to `most`.
fn step(most: f64) -> f64 {
    let raw = (most / 5.0).max(1e-9);
    let power = 10_f64.powf(raw.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= raw * 0.999).unwrap_or(raw)
}

/// The vertical coordinate of a value, if `top` is at the upper edge.
fn y(value: f64, top: f64) -> f64 {
    FIELD.3 - (value / top).clamp(0.0, 1.0) * (FIELD.3 - FIELD.1)
}

/// The beginning of an SVG with its vertical axis, which ends at `top`.
fn begin(label: &str, unit: &str, top: f64) -> String {
    let mut svg =
        format!("<svg class=\"chart\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">", Text(label));
    for at in marks(top) {
        let y = y(at, top);
        // Writing to a string cannot fail.
        let _ = write!(
            svg,
            "<path class=\"mark\" d=\"M{} {y:.1}H{}\"/><text class=\"minor\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            FIELD.0,
            FIELD.2,
            FIELD.0 - 6.0,
            y + 4.0,
            figure(at)
        );
    }
    let _ = write!(
        svg,
        "<path class=\"axis\" d=\"M{} {}V{}H{}\"/><text class=\"minor\" x=\"4\" y=\"11\">{}</text>",
        FIELD.0,
        FIELD.1,
        FIELD.3,
        FIELD.2,
        Text(unit)
    );
    svg
}

fn whisker(svg: &mut String, x: f64, value: Value, top: f64) {
    let Some(half) = value.half.filter(|half| *half > 0.0) else { return };
    let (low, high) = (y(value.mean - half, top), y(value.mean + half, top));
    let _ = write!(
        svg,
        "<path class=\"whisker\" d=\"M{x:.1} {low:.1}V{high:.1}M{:.1} {low:.1}h6M{:.1} {high:.1}h6\"/>",
        x - 3.0,
        x - 3.0
    );
}

/// Bars in groups, one group for each name in `x`. `top` is the upper end of the axis.
pub fn bars(label: &str, unit: &str, x: &[String], rows: &[Row], top: f64) -> String {
    let top = with_room(top);
    let mut svg = begin(label, unit, top);
    let group = (FIELD.2 - FIELD.0) / x.len().max(1) as f64;
    let bar = (group * 0.8 / rows.len().max(1) as f64).min(48.0);
    for (n, name) in x.iter().enumerate() {
        let middle = FIELD.0 + group * (n as f64 + 0.5);
        for (m, row) in rows.iter().enumerate() {
            let Some(Some(value)) = row.values.get(n) else { continue };
            let left = middle + (m as f64 - rows.len() as f64 / 2.0) * bar;
            let upper = y(value.mean, top);
            let _ = write!(
                svg,
                "<rect class=\"{}\" x=\"{left:.1}\" y=\"{upper:.1}\" width=\"{:.1}\" height=\"{:.1}\"><title>{}: {} {}</title></rect>",
                row.class,
                bar - 1.5,
                (FIELD.3 - upper).max(0.5),
                Text(&format!("{}, {name}", row.name)),
                figure(value.mean),
                Text(unit)
            );
            whisker(&mut svg, left + bar / 2.0 - 0.75, *value, top);
        }
        let _ = write!(
            svg,
            "<text x=\"{middle:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            FIELD.3 + 16.0 + if x.len() > 4 { 13.0 * (n % 2) as f64 } else { 0.0 },
            Text(name)
        );
    }
    svg + "</svg>"
}

/// Turns numbers into horizontal coordinates.
struct Across {
    from: f64,
    to: f64,
    logarithmic: bool,
}

impl Across {
    fn of(numbers: &[f64]) -> Self {
        let (from, to) = numbers.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), n| (a.min(*n), b.max(*n)));
        Self { from, to, logarithmic: from > 0.0 && to / from >= LOGARITHMIC_FROM }
    }

    fn x(&self, number: f64) -> f64 {
        let of = |n: f64| if self.logarithmic { n.ln() } else { n };
        let share = (of(number) - of(self.from)) / (of(self.to) - of(self.from)).max(1e-9);
        FIELD.0 + 8.0 + share.clamp(0.0, 1.0) * (FIELD.2 - FIELD.0 - 16.0)
    }
}

/// Lines over a horizontal axis of numbers, with a tick for each of `marks`, and vertical lines for events.
pub fn lines(
    label: &str,
    (unit, along): (&str, &str),
    lines: &[Line],
    marks: &[f64],
    events: &[(f64, String)],
) -> String {
    let values = || lines.iter().flat_map(|line| &line.points);
    let top = values().map(|(_, v)| v.mean + v.half.unwrap_or(0.0)).fold(0.0, f64::max);
    let top = with_room(top);
    let numbers: Vec<f64> = values().map(|(x, _)| *x).chain(marks.iter().copied()).collect();
    let across = Across::of(&numbers);
    let mut svg = begin(label, unit, top);
    for mark in marks {
        let x = across.x(*mark);
        let _ = write!(
            svg,
            "<text class=\"minor\" x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            FIELD.3 + 16.0,
            figure(*mark)
        );
    }
    let _ = write!(
        svg,
        "<text class=\"minor\" x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
        FIELD.2,
        HEIGHT - 6.0,
        Text(along)
    );
    for (n, (at, _)) in events.iter().enumerate() {
        let x = across.x(*at);
        let _ = write!(
            svg,
            "<path class=\"event\" d=\"M{x:.1} {}V{}\"/><text class=\"minor\" x=\"{:.1}\" y=\"{}\">{}</text>",
            FIELD.1,
            FIELD.3,
            x + 3.0,
            FIELD.1 + 9.0,
            n + 1
        );
    }
    lines.iter().for_each(|line| draw_line(&mut svg, line, &across, top));
    svg + "</svg>"
}

fn draw_line(svg: &mut String, line: &Line, across: &Across, top: f64) {
    let mut path = String::new();
    for (n, (x, value)) in line.points.iter().enumerate() {
        let _ = write!(path, "{}{:.1} {:.1}", if n == 0 { "M" } else { "L" }, across.x(*x), y(value.mean, top));
    }
    let _ = write!(svg, "<path class=\"line {}\" d=\"{path}\"><title>{}</title></path>", line.class, Text(&line.name));
    line.points.iter().for_each(|(x, value)| whisker(svg, across.x(*x), *value, top));
}

/// Ticks for an axis from 0 to `to`.
pub fn marks(to: f64) -> Vec<f64> {
    let step = step(to.min(LARGEST));
    (0..MOST_MARKS).map(|n| f64::from(n) * step).take_while(|at| *at <= to * 1.0001).collect()
}

/// The interval of a verdict beside its bounds: a margin is a band, a single bound a line.
pub fn interval(interval: [f64; 2], mean: f64, bounds: &[f64]) -> String {
    let ends = interval.iter().chain(bounds).chain([&mean]);
    let (low, high) = ends.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), v| (a.min(*v), b.max(*v)));
    let room = ((high - low) * 0.12).max(1e-12);
    let x = |value: f64| 4.0 + (value - low + room) / (high - low + 2.0 * room) * 182.0;
    let mut svg = String::from(
        "<svg class=\"chart\" viewBox=\"0 0 190 30\" aria-hidden=\"true\"><path class=\"mark\" d=\"M4 15H186\"/>",
    );
    if let [from, to] = bounds {
        let _ = write!(
            svg,
            "<rect class=\"margin\" x=\"{:.1}\" y=\"4\" width=\"{:.1}\" height=\"22\"/>",
            x(*from),
            x(*to) - x(*from)
        );
    }
    for bound in bounds {
        let _ = write!(svg, "<path class=\"bound\" d=\"M{:.1} 4V26\"/>", x(*bound));
    }
    let (low, high) = (x(interval[0]), x(interval[1]));
    let _ = write!(
        svg,
        "<path class=\"whisker\" d=\"M{low:.1} 15H{high:.1}M{low:.1} 10v10M{high:.1} 10v10\"/><circle class=\"dot c-fold\" cx=\"{:.1}\" cy=\"15\" r=\"3.5\"/></svg>",
        x(mean)
    );
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_round_and_few() {
        assert_eq!([step(10.0), step(7.0), step(0.9), step(1234.0)], [2.0, 2.0, 0.2, 500.0]);
        assert_eq!(marks(50.0), [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]);
    }

    #[test]
    fn picture_of_immense_numbers_ends() {
        assert!(marks(f64::INFINITY).len() <= MOST_MARKS as usize && marks(f64::NAN).is_empty());
        let value = Value { mean: 1.7e308, half: Some(1.7e308) };
        let row = Row { name: "x".into(), class: "c-ksm".into(), values: vec![Some(value)] };
        let top = top_of(std::slice::from_ref(&row));
        let drawn = bars("x", "MB", &["a".into()], &[row], top);
        let line = Line { name: "x".into(), class: "c-ksm".into(), points: vec![(0.0, value), (1.7e308, value)] };
        let lines = lines("x", ("MB", "s"), &[line], &marks(1.7e308), &[]);
        assert!([drawn, lines].iter().all(|svg| !svg.contains("NaN") && !svg.contains("inf")));
    }

    #[test]
    fn axis_over_powers_of_ten_is_logarithmic() {
        let across = Across::of(&[1.0, 10.0, 100.0]);
        let middle = (across.x(1.0) + across.x(100.0)) / 2.0;
        assert!((across.x(10.0) - middle).abs() < 1e-6);
        let plain = Across::of(&[0.0, 5.0, 10.0]);
        assert!((plain.x(5.0) - (plain.x(0.0) + plain.x(10.0)) / 2.0).abs() < 1e-6);
    }

    #[test]
    fn picture_has_a_bar_and_a_whisker_for_each_value_and_hostile_names_stay_text() {
        let row = |name: &str, mean| Row {
            name: name.into(),
            class: "c-ksm".into(),
            values: vec![Some(Value { mean, half: Some(1.0) }), None],
        };
        let svg = bars("<b>", "MB", &["a".into(), "<script>".into()], &[row("x", 3.0), row("\"", 9.0)], 10.0);
        assert_eq!((svg.matches("<rect").count(), svg.matches("whisker").count()), (2, 2));
        assert!(!svg.contains("<script>") && !svg.contains("<b>"));
    }
}
