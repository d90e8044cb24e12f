//! The average footprint over the number of guests, as they are and as if they were folded: points for what was measured, and
//! a broken line for what further guests like these would bring it to.

use super::text::legend;
use crate::size::bytes;
use census::Commonness;
use std::fmt::Write as _;
use std::io::{self, Write};

/// The picture's size.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 220.0;
/// Guests that are drawn one by one; beyond, some of them.
const MOST_POINTS: usize = 64;

/// Writes the curves, where two guests or more say something about further ones.
pub fn write(out: &mut dyn Write, common: &Commonness) -> io::Result<()> {
    let guests = common.guests();
    if guests < 2 || common.together(guests, false) <= 0.0 {
        return Ok(());
    }
    let average = |n: usize, folded: bool| -> f64 {
        let next = common.together(guests, folded) - common.together(guests - 1, folded);
        let more = n.saturating_sub(guests) as f64 * next;
        (common.together(n.min(guests), folded) + more) / n as f64
    };
    let top = average(1, false).max(average(1, true)).max(1.0);
    let x = |n: usize| (n - 1) as f64 / (2 * guests - 1) as f64 * (WIDTH - 20.0) + 10.0;
    let y = |pages: f64| HEIGHT - 10.0 - pages / top * (HEIGHT - 20.0);
    let size = |pages: f64| bytes((pages * 4096.0) as u64);
    let label = |folded| {
        format!(
            "{} with one guest, {} with {guests}, {} with {}",
            size(average(1, folded)),
            size(average(guests, folded)),
            size(average(2 * guests, folded)),
            2 * guests
        )
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
    let step = guests.div_ceil(MOST_POINTS);
    for (class, folded) in [("curve-now", false), ("curve-folded", true)] {
        let (mut line, mut points) = (String::new(), String::new());
        for n in (1..=guests).step_by(step) {
            let (x, y) = (x(n), y(average(n, folded)));
            // Writing to a string cannot fail.
            let _ = write!(line, "{}{x:.1} {y:.1}", if n == 1 { "M" } else { "L" });
            let _ = write!(points, "M{:.1} {y:.1}h6M{x:.1} {:.1}v6", x - 3.0, y - 3.0);
        }
        let mut ahead = format!("M{:.1} {:.1}", x(guests), y(average(guests, folded)));
        for n in (guests + 1..=2 * guests).step_by(step) {
            let _ = write!(ahead, "L{:.1} {:.1}", x(n), y(average(n, folded)));
        }
        write!(
            out,
            "<path class=\"{class}\" d=\"{line}\"/><path class=\"{class}\" d=\"{points}\"/><path class=\"{class} \
             curve-ahead\" d=\"{ahead}\"/>"
        )?;
    }
    writeln!(out, "</svg></figure></section>")
}
