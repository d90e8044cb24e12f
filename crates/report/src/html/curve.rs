//! Average footprint by number of guests, as they are and as if they were folded. Points show the measured part; a
//! broken line shows the forecast for further guests like these.

use super::text::legend;
use census::Commonness;
use cli::size::bytes;
use std::fmt::Write as _;
use std::io::{self, Write};

/// Width of the picture, in SVG units.
const WIDTH: f64 = 640.0;
/// Height of the picture, in SVG units.
const HEIGHT: f64 = 220.0;
/// Number of guests up to which each has a point; of more guests, only some have one.
const MOST_POINTS: usize = 64;

/// Writes the curves, if there are two guests or more: a single guest says nothing about further ones.
pub fn write(out: &mut dyn Write, common: &Commonness) -> io::Result<()> {
    let guests = common.guests();
    if guests < 2 || common.together(guests, false) <= 0.0 {
        return Ok(());
    }
    let label = |folded| {
        let size = |n| bytes((average(common, n, folded) * 4096.0) as u64);
        format!("{} with one guest, {} with {guests}, {} with {}", size(1), size(guests), size(2 * guests), 2 * guests)
    };
    writeln!(
        out,
        "<section id=\"curve\"><h2>The average guest</h2><p>What a guest takes on average, over all ways to choose so many of \
         these. As they are: {}. If all of them were folded in one group: {}. Beyond {guests} guests it is a forecast: each \
         further one is taken to cost what the last did.</p><figure>",
        label(false),
        label(true),
    )?;
    legend(out, [("curve-key-now", "as they are"), ("curve-key-folded", "if folded")])?;
    write!(
        out,
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"average footprint by number of guests: {}; if folded \
         {}\"><path class=\"curve-axis\" d=\"M10 {axis}H{right}M10 10V{axis}\"/>",
        label(false),
        label(true),
        axis = HEIGHT - 10.0,
        right = WIDTH - 10.0,
    )?;
    for (class, folded) in [("curve-now", false), ("curve-folded", true)] {
        line(out, common, class, folded)?;
    }
    writeln!(out, "</svg></figure></section>")
}

/// Average footprint of `n` guests in pages. Beyond the guests that there are, each further one costs as much as the
/// last.
fn average(common: &Commonness, n: usize, folded: bool) -> f64 {
    let guests = common.guests();
    let next = common.together(guests, folded) - common.together(guests - 1, folded);
    let more = n.saturating_sub(guests) as f64 * next;
    (common.together(n.min(guests), folded) + more) / n as f64
}

/// Writes one curve: the measured line with its points, and the line of the forecast.
fn line(out: &mut dyn Write, common: &Commonness, class: &str, folded: bool) -> io::Result<()> {
    let guests = common.guests();
    let top = average(common, 1, false).max(average(common, 1, true)).max(1.0);
    let x = |n: usize| (n - 1) as f64 / (2 * guests - 1) as f64 * (WIDTH - 20.0) + 10.0;
    let y = |n: usize| HEIGHT - 10.0 - average(common, n, folded) / top * (HEIGHT - 20.0);
    let step = guests.div_ceil(MOST_POINTS);
    let (mut line, mut points) = (String::new(), String::new());
    for n in (1..=guests).step_by(step) {
        let (x, y) = (x(n), y(n));
        // Writing to a string cannot fail.
        let _ = write!(line, "{}{x:.1} {y:.1}", if n == 1 { "M" } else { "L" });
        let _ = write!(points, "M{:.1} {y:.1}h6M{x:.1} {:.1}v6", x - 3.0, y - 3.0);
    }
    let mut ahead = format!("M{:.1} {:.1}", x(guests), y(guests));
    for n in (guests + 1..=2 * guests).step_by(step) {
        let _ = write!(ahead, "L{:.1} {:.1}", x(n), y(n));
    }
    write!(
        out,
        "<path class=\"{class}\" d=\"{line}\"/><path class=\"{class}\" d=\"{points}\"/><path class=\"{class} \
         curve-ahead\" d=\"{ahead}\"/>"
    )
}
