//! Draws the curves of `--churn` as SVG: merged and broken pages over time.

use super::churn::Round;
use super::curve::{Curve, Point};
use std::fmt::Write;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 400.0;
/// Edges of the area in which curves are drawn: left, top, right, bottom.
const FIELD: (f64, f64, f64, f64) = (80.0, 46.0, 640.0, 350.0);

/// Turns seconds and pages into coordinates of the picture.
struct Scale {
    seconds: f64,
    pages: f64,
}

impl Scale {
    fn x(&self, seconds: f64) -> f64 {
        FIELD.0 + seconds / self.seconds * (FIELD.2 - FIELD.0)
    }

    fn y(&self, pages: f64) -> f64 {
        FIELD.3 - pages / self.pages * (FIELD.3 - FIELD.1)
    }
}

/// Distance between two ticks of an axis that ends at `most`: 1, 2 or 5 times a power of ten, for about `count` ticks.
pub fn step(most: f64, count: f64) -> f64 {
    let raw = (most / count).max(1e-9);
    let power = 10_f64.powf(raw.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= raw).unwrap_or(raw)
}

/// Draws the merged pages of both sides over time, and Pagefold's broken pages.
pub fn draw(round: &Round, resident_pages: u64) -> String {
    let all = || round.ksmd.curve.0.iter().chain(&round.pagefold.curve.0);
    let most = all().map(|p| p.so_far.merged_pages.max(p.broken_pages())).max().unwrap_or(1).max(1);
    let scale = Scale { seconds: all().map(|p| p.seconds).fold(1.0, f64::max), pages: most as f64 * 1.08 };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n\
         <text x=\"{}\" y=\"24\" font-size=\"14\">Pages merged while the guests work ({resident_pages} resident before)</text>\n",
        FIELD.0
    );
    axes(&mut svg, &scale);
    let merged = |p: &Point| p.so_far.merged_pages;
    line(&mut svg, &scale, &round.ksmd.curve, merged, ("ksmd", "#b45309", ""));
    line(&mut svg, &scale, &round.pagefold.curve, merged, ("pagefold", "#1d4ed8", ""));
    line(
        &mut svg,
        &scale,
        &round.pagefold.curve,
        Point::broken_pages,
        ("broken", "#1d4ed8", " stroke-dasharray=\"5 4\""),
    );
    svg.push_str("</svg>\n");
    svg
}

fn axes(svg: &mut String, scale: &Scale) {
    let (left, _, right, bottom) = FIELD;
    let pages = step(scale.pages, 5.0);
    for n in 0.. {
        let value = pages * f64::from(n);
        if value > scale.pages {
            break;
        }
        let y = scale.y(value);
        // Writing to a string does not fail.
        let _ = writeln!(
            svg,
            "<line x1=\"{left}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#444\">{value:.0}</text>",
            left - 8.0,
            y + 4.0
        );
    }
    let seconds = step(scale.seconds, 6.0);
    for n in 0.. {
        let value = seconds * f64::from(n);
        if value > scale.seconds {
            break;
        }
        let x = scale.x(value);
        let _ = writeln!(
            svg,
            "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"#444\">{value:.0} s</text>",
            bottom + 18.0
        );
    }
    let _ = writeln!(svg, "<line x1=\"{left}\" x2=\"{right}\" y1=\"{bottom}\" y2=\"{bottom}\" stroke=\"#444\"/>");
}

fn line(svg: &mut String, scale: &Scale, curve: &Curve, of: fn(&Point) -> u64, look: (&str, &str, &str)) {
    let (name, colour, dashes) = look;
    let at = |p: &Point| format!("{:.1},{:.1}", scale.x(p.seconds), scale.y(of(p) as f64));
    let points: Vec<String> = curve.0.iter().map(at).collect();
    let end = curve.end();
    let _ = writeln!(
        svg,
        "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dashes} points=\"{}\"/>\
         <text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{name}</text>",
        points.join(" "),
        scale.x(end.seconds) + 8.0,
        scale.y(of(&end) as f64) + 4.0
    );
}
