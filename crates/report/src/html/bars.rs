//! Horizontal stacked bars: a name, the bar, a figure. Only the bar is SVG, and stretches with the page; names and
//! figures are text beside it.

use super::text::Text;
use std::io::{self, Write};

/// Width of a bar, in SVG units.
const WIDTH: f64 = 1000.0;
/// Least width of a part, in SVG units, so that a small part stays visible.
const LEAST: f64 = 1.5;
/// Height of a bar, in SVG units.
const HEIGHT: f64 = 20.0;

/// One part of a bar.
pub struct Part {
    /// Class in the style sheet that gives the part its colour.
    pub class: &'static str,
    /// Size of the part, in the unit of the bar's scale.
    pub amount: u64,
    /// Name and figure, for the hint under the pointer.
    pub title: String,
}

/// One bar.
pub struct Bar {
    /// Name of the bar.
    pub name: String,
    /// Remark beside the name; may be empty.
    pub note: String,
    /// Parts from the left; those of size 0 are not drawn.
    pub parts: Vec<Part>,
    /// A mark on the same scale, with its meaning.
    pub mark: Option<(u64, String)>,
    /// The figure beside the bar.
    pub figure: String,
}

/// Writes `bars` on one scale, on which `full` fills the width.
pub fn write(out: &mut dyn Write, full: u64, bars: impl IntoIterator<Item = Bar>) -> io::Result<()> {
    writeln!(out, "<div class=\"bars\">")?;
    for bar in bars {
        write!(out, "<div class=\"bar\"><span class=\"name\" title=\"{0}\">{0}", Text(&bar.name))?;
        if !bar.note.is_empty() {
            write!(out, " <span class=\"quiet\">{}</span>", Text(&bar.note))?;
        }
        write!(out, "</span>")?;
        picture(out, full, &bar.name, &bar.parts, bar.mark.as_ref())?;
        writeln!(out, "<span class=\"figure\">{}</span></div>", Text(&bar.figure))?;
    }
    writeln!(out, "</div>")
}

/// Writes only a bar: `parts` on a scale on which `full` fills the width.
pub fn picture(
    out: &mut dyn Write,
    full: u64,
    name: &str,
    parts: &[Part],
    mark: Option<&(u64, String)>,
) -> io::Result<()> {
    let told: Vec<_> = parts.iter().filter(|part| part.amount > 0).map(|part| part.title.as_str()).collect();
    write!(
        out,
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{}: {}\">",
        Text(name),
        Text(&told.join("; "))
    )?;
    let units = |amount: u64| (amount as f64 / full.max(1) as f64 * WIDTH).min(WIDTH);
    let mut left = 0;
    for part in parts.iter().filter(|part| part.amount > 0) {
        let (x, end) = (units(left), units(left.saturating_add(part.amount)));
        write!(
            out,
            "<rect class=\"{}\" x=\"{x:.1}\" width=\"{:.1}\" height=\"{HEIGHT}\"><title>{}</title></rect>",
            part.class,
            (end - x).max(LEAST),
            Text(&part.title)
        )?;
        left = left.saturating_add(part.amount);
    }
    if let Some((at, meaning)) = mark {
        let (from, to) = (units(left), units(*at));
        write!(
            out,
            "<path class=\"reach\" d=\"M{from:.1} {y}H{to:.1}\"/><path class=\"mark\" d=\"M{to:.1} 1V19\"><title>{}</title></path>",
            Text(meaning),
            y = HEIGHT / 2.0,
        )?;
    }
    write!(out, "</svg>")
}
