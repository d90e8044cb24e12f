//! Pictures of a result: time to an answer as a distribution, memory of a clone at rest and over time. One SVG with colours of its own,
//! alone or in a page.

use crate::ksm::svg::step;
use crate::median::median;
use anyhow::{Context, ensure};
use cli::size::count;
use report::Align;
use report::html::{self, Text};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Width of the picture, in SVG units.
const WIDTH: f64 = 760.0;
/// Left and right edge of the field of values, in SVG units.
const FIELD: (f64, f64) = (150.0, 640.0);
/// Height of a row of dots or of a bar, in SVG units.
const ROW: f64 = 24.0;
/// Height of the area of curves, in SVG units.
const CURVES: f64 = 200.0;
/// Least vertical distance between the names of two curves, in SVG units.
const APART: f64 = 14.0;
/// Ways to start a guest, in the order of a round's fields, with their names.
const WAYS: [(&str, &str); 6] = [
    ("boot", "boot"),
    ("restore", "restore by copying"),
    ("stock", "stock prototype"),
    ("clone", "clone"),
    ("rollback", "rollback"),
    ("warm", "clone, warm"),
];
/// Colours of curves, by turns.
const COLOURS: [&str; 4] = ["#6b7280", "#b45309", "#0f766e", "#1d4ed8"];
/// Colours of a guest's RAM, and of the rest of its process.
const PARTS: [&str; 2] = ["#1d4ed8", "#9ca3af"];
const MIB: f64 = (1 << 20) as f64;

/// Figures that are drawn, as `--json` prints them.
#[derive(Default, Deserialize)]
pub struct Figures {
    one: Vec<One>,
    density: Vec<Density>,
    memory: Vec<Memory>,
}

#[derive(Deserialize)]
struct One {
    image: String,
    rounds: Vec<BTreeMap<String, f64>>,
}

#[derive(Deserialize)]
struct Density {
    image: String,
    arm: String,
    n: u32,
    seconds: u64,
    guest_mib_each: f64,
    vmm_mib_each: f64,
}

#[derive(Deserialize)]
struct Memory {
    image: String,
    arm: String,
    n: u32,
    seconds: f64,
    bytes_each: f64,
}

/// A file for pictures, by its ending.
///
/// # Errors
/// The name ends neither in `.html` nor in `.svg`.
pub fn parse_report(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let is_known = path.extension().is_some_and(|ending| ending == "html" || ending == "svg");
    if is_known { Ok(path) } else { Err("pictures are written to FILE.html or FILE.svg".into()) }
}

impl Figures {
    /// Reads what `--json` has printed; figures of several files are put side by side.
    ///
    /// # Errors
    /// A file cannot be read, or is no result of this bench.
    pub fn read(files: &[PathBuf]) -> anyhow::Result<Self> {
        let mut all = Self::default();
        for file in files {
            let text = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
            let no_result = || format!("{} is not what pagefold bench start --json prints", file.display());
            let result: serde_json::Value = serde_json::from_slice(&text).with_context(no_result)?;
            // In recorded figures, the command by which they came stands beside its output.
            let output = result.get("output").unwrap_or(&result);
            let one: Self = serde_json::from_value(output.clone()).with_context(no_result)?;
            all.one.extend(one.one);
            all.density.extend(one.density);
            all.memory.extend(one.memory);
        }
        Ok(all)
    }

    /// The figures of a result of this bench.
    ///
    /// # Errors
    /// The value is no result of this bench.
    pub fn of(result: &impl Serialize) -> anyhow::Result<Self> {
        Ok(serde_json::from_value(serde_json::to_value(result)?)?)
    }

    /// Writes the pictures to a file: alone to an `.svg`, with a table of each to an `.html`.
    ///
    /// # Errors
    /// There is nothing to draw, or the file cannot be written.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let svg = self.draw();
        ensure!(!svg.is_empty(), "nothing is there to draw: no round, no guests at rest, no work");
        let mut out = svg.into_bytes();
        if path.extension().is_some_and(|ending| ending == "html") {
            let svg = std::mem::take(&mut out);
            html::begin(&mut out, "Starting guests", "pagefold bench start", "")?;
            out.write_all(b"<figure>")?;
            out.write_all(&svg)?;
            writeln!(out, "</figure>")?;
            self.tables(&mut out)?;
            writeln!(out, "</main></body></html>")?;
        }
        std::fs::write(path, out).with_context(|| format!("cannot write {}", path.display()))
    }

    fn images(&self) -> Vec<&str> {
        let all = self.one.iter().map(|one| &one.image).chain(self.density.iter().map(|density| &density.image));
        let mut images: Vec<&str> = Vec::new();
        for image in all.chain(self.memory.iter().map(|memory| &memory.image)) {
            if !images.contains(&image.as_str()) {
                images.push(image);
            }
        }
        images
    }

    /// The picture; empty if there is nothing to draw.
    fn draw(&self) -> String {
        let mut sheet = Sheet { svg: String::new(), bottom: 0.0 };
        for image in self.images() {
            self.one.iter().filter(|one| one.image == image).for_each(|one| sheet.answers(one));
            let rest: Vec<_> = self.density.iter().filter(|density| density.image == image).collect();
            let work: Vec<_> = self.memory.iter().filter(|memory| memory.image == image).collect();
            sheet.at_rest(&rest);
            sheet.over_time(&work);
        }
        sheet.finish()
    }

    fn tables(&self, out: &mut Vec<u8>) -> std::io::Result<()> {
        let columns =
            [("image", Align::Left), ("way", Align::Left), ("median, ms", Align::Right), ("range", Align::Right)];
        let rows = self.one.iter().flat_map(|one| {
            one.ways().into_iter().map(move |(name, times)| {
                let range = format!("{:.0} to {:.0}", least(&times), most(&times));
                vec![one.image.clone(), name.into(), format!("{:.0}", median(&times)), range]
            })
        });
        table(out, "Time to an answer", &columns, rows.collect())?;
        let columns =
            ["image", "arm", "guests", "seconds", "guest, MiB", "VMM, MiB"].map(|heading| (heading, Align::Right));
        let rows = self.density.iter().map(|of| {
            let [guest, vmm] = [of.guest_mib_each, of.vmm_mib_each].map(|mib| format!("{mib:.1}"));
            vec![of.image.clone(), of.arm.clone(), of.n.to_string(), of.seconds.to_string(), guest, vmm]
        });
        table(out, "Memory of each at rest", &columns, rows.collect())?;
        let columns = ["image", "arm", "guests", "seconds of work", "MiB each"].map(|heading| (heading, Align::Right));
        let rows = self.memory.iter().map(|of| {
            let mib = format!("{:.1}", of.mib());
            vec![of.image.clone(), of.arm.clone(), of.n.to_string(), count(of.seconds as u64), mib]
        });
        table(out, "Memory of each while it works", &columns, rows.collect())
    }
}

/// Writes a table below its heading, if it has a row.
fn table(out: &mut Vec<u8>, heading: &str, columns: &[(&str, Align)], rows: Vec<Vec<String>>) -> std::io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(out, "<section><h2>{heading}</h2>")?;
    html::table(out, heading, columns, rows)?;
    writeln!(out, "</section>")
}

impl One {
    /// Times of each way, in ms.
    fn ways(&self) -> Vec<(&'static str, Vec<f64>)> {
        let times = |field: &str| self.rounds.iter().filter_map(|round| round.get(field).copied()).collect::<Vec<_>>();
        let all = WAYS.into_iter().map(|(field, name)| (name, times(field)));
        all.filter(|(_, times)| !times.is_empty() && times.iter().all(|ms| *ms > 0.0)).collect()
    }
}

impl Memory {
    fn mib(&self) -> f64 {
        self.bytes_each / MIB
    }
}

fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn most(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

/// Ticks of a logarithmic axis: 1, 2 and 5 times powers of ten, from below the least value to above the greatest.
fn marks(least: f64, most: f64) -> Vec<f64> {
    let mut marks: Vec<f64> = (-3..=9).flat_map(|power| [1.0, 2.0, 5.0].map(|m| m * 10_f64.powi(power))).collect();
    let (first, last) = (marks.iter().rposition(|mark| *mark <= least), marks.iter().position(|mark| *mark >= most));
    let first = first.unwrap_or(0);
    let last = last.unwrap_or(marks.len() - 1).max(first + 1).min(marks.len() - 1);
    marks.truncate(last + 1);
    marks.split_off(first)
}

/// Ticks of an axis from 0, about this many.
fn from_zero(most: f64, about: f64) -> Vec<f64> {
    let step = step(most, about);
    (0..20).map(|n| f64::from(n) * step).take_while(|mark| *mark <= most).collect()
}

/// A tick's number as text, rounded so that it shows no error of binary fractions.
fn number(mark: f64) -> String {
    format!("{}", (mark * 1e3).round() / 1e3)
}

/// A picture to which blocks are added from top to bottom.
struct Sheet {
    svg: String,
    bottom: f64,
}

impl Sheet {
    /// Begins a block with a heading.
    fn heading(&mut self, text: &str) {
        self.bottom += 34.0;
        let y = self.bottom;
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(self.svg, "<text x=\"8\" y=\"{y:.1}\" font-size=\"14\">{}</text>", Text(text));
        self.bottom += 12.0;
    }

    /// Writes a text whose anchor is `start`, `middle` or `end`.
    fn text(&mut self, (x, y): (f64, f64), anchor: &str, text: &str) {
        let _ = writeln!(self.svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>", Text(text));
    }

    fn path(&mut self, colour: &str, width: f64, path: &str) {
        let _ = writeln!(self.svg, "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"/>");
    }

    fn bar(&mut self, colour: &str, (from, to): (f64, f64)) {
        let (y, width) = (self.bottom + 5.0, (to - from).max(0.5));
        let _ = writeln!(
            self.svg,
            "<rect x=\"{from:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{}\" fill=\"{colour}\"/>",
            ROW - 10.0
        );
    }

    /// Vertical lines at an axis's ticks, with their numbers below.
    fn axis(&mut self, marks: &[f64], height: f64, x: &dyn Fn(f64) -> f64) {
        let end = self.bottom + height;
        for mark in marks {
            self.path("#ddd", 1.0, &format!("M{:.1} {:.1}V{end:.1}", x(*mark), self.bottom));
            self.text((x(*mark), end + 15.0), "middle", &number(*mark));
        }
    }

    /// A row for each way: a dot for each round, and a line for their median.
    fn answers(&mut self, one: &One) {
        let ways = one.ways();
        let all: Vec<f64> = ways.iter().flat_map(|(_, times)| times).copied().collect();
        if all.is_empty() {
            return;
        }
        let marks = marks(least(&all), most(&all));
        let (from, to) = (least(&marks).ln(), most(&marks).ln());
        let x = |ms: f64| FIELD.0 + (ms.ln() - from) / (to - from) * (FIELD.1 - FIELD.0);
        let rounds = one.rounds.len();
        self.heading(&format!(
            "{}: ms from the command to an answer from inside, {rounds} rounds and their median",
            one.image
        ));
        self.axis(&marks, ROW * ways.len() as f64, &x);
        for (name, times) in ways {
            let middle = self.bottom + ROW / 2.0;
            self.text((FIELD.0 - 10.0, middle + 4.0), "end", name);
            for ms in &times {
                let _ = writeln!(
                    self.svg,
                    "<circle cx=\"{:.1}\" cy=\"{middle:.1}\" r=\"4\" fill=\"#1d4ed8\" fill-opacity=\".35\"/>",
                    x(*ms)
                );
            }
            let p50 = median(&times);
            self.path("#111", 2.0, &format!("M{:.1} {:.1}v16", x(p50), middle - 8.0));
            self.text((FIELD.1 + 12.0, middle + 4.0), "start", &format!("{p50:.0} ms"));
            self.bottom += ROW;
        }
        self.bottom += 18.0;
    }

    /// A bar for each arm: the guest's RAM, and the rest of its process.
    fn at_rest(&mut self, arms: &[&Density]) {
        let Some(first) = arms.first() else { return };
        let whole = arms.iter().map(|of| of.guest_mib_each.max(0.0) + of.vmm_mib_each.max(0.0)).fold(1.0, f64::max);
        let x = |mib: f64| FIELD.0 + mib.max(0.0) / whole * (FIELD.1 - FIELD.0);
        self.heading(&format!(
            "{}: MiB of each of {} that were idle for {} s: guest (blue) and VMM (grey)",
            first.image, first.n, first.seconds
        ));
        self.axis(&from_zero(whole, 5.0), ROW * arms.len() as f64, &x);
        for of in arms {
            let (guest, vmm) = (of.guest_mib_each.max(0.0), of.vmm_mib_each.max(0.0));
            self.text((FIELD.0 - 10.0, self.bottom + 16.0), "end", &of.arm);
            self.bar(PARTS[0], (x(0.0), x(guest)));
            self.bar(PARTS[1], (x(guest), x(guest + vmm)));
            self.text((FIELD.1 + 12.0, self.bottom + 16.0), "start", &format!("{guest:.1} + {vmm:.1}"));
            self.bottom += ROW;
        }
        self.bottom += 18.0;
    }

    /// A curve for each arm, over the seconds of its guests' work.
    fn over_time(&mut self, counts: &[&Memory]) {
        let Some(first) = counts.first() else { return };
        let (seconds, whole) = counts
            .iter()
            .fold((1.0_f64, 1.0_f64), |(seconds, whole), of| (seconds.max(of.seconds), whole.max(of.mib() * 1.05)));
        self.heading(&format!("{}: MiB of each of {}, over seconds of work", first.image, first.n));
        let bottom = self.bottom + CURVES;
        let x = |at: f64| FIELD.0 + at / seconds * (FIELD.1 - FIELD.0);
        let y = |mib: f64| bottom - mib / whole * CURVES;
        self.axis(&from_zero(seconds, 6.0), CURVES, &x);
        for mark in from_zero(whole, 5.0) {
            self.path("#ddd", 1.0, &format!("M{:.1} {:.1}H{:.1}", FIELD.0, y(mark), FIELD.1));
            self.text((FIELD.0 - 10.0, y(mark) + 4.0), "end", &number(mark));
        }
        let mut arms: BTreeMap<&str, Vec<&Memory>> = BTreeMap::new();
        counts.iter().for_each(|of| arms.entry(&of.arm).or_default().push(of));
        let mut names = Vec::new();
        for ((arm, of), colour) in arms.into_iter().zip(COLOURS.into_iter().cycle()) {
            let points: Vec<_> = of.iter().map(|of| format!("{:.1} {:.1}", x(of.seconds), y(of.mib()))).collect();
            self.path(colour, 2.0, &format!("M{}", points.join("L")));
            names.extend(of.last().map(|last| (y(last.mib()) + 4.0, format!("{arm} {:.1}", last.mib()))));
        }
        names.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let mut above = f64::INFINITY;
        for (at, name) in names {
            above = at.min(above - APART);
            self.text((FIELD.1 + 8.0, above), "start", &name);
        }
        self.bottom = bottom + 18.0;
    }

    fn finish(self) -> String {
        if self.svg.is_empty() {
            return self.svg;
        }
        let height = self.bottom + 14.0;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"12\" \
             role=\"img\" aria-label=\"Times until guests answer, and their memory\">\n\
             <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n{}</svg>\n",
            self.svg
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axis_begins_below_the_least_and_ends_above_the_greatest() {
        assert_eq!(marks(30.0, 1234.0), [20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0]);
        assert_eq!(marks(100.0, 100.0), [100.0, 200.0]);
    }

    #[test]
    fn every_round_and_every_count_is_drawn() {
        let text = r#"{"one": [{"image": "tiny", "rounds": [{"boot": 2700.5, "clone": 200.0}, {"boot": 2500.0, "clone": 210.0}]}],
            "density": [{"image": "tiny", "arm": "<clone>", "n": 5, "seconds": 30, "guest_mib_each": 1.5, "vmm_mib_each": 20.0}],
            "memory": [{"image": "debian", "arm": "merge", "n": 2, "seconds": 0, "bytes_each": 1e6},
                       {"image": "debian", "arm": "merge", "n": 2, "seconds": 60, "bytes_each": 3e6}]}"#;
        let figures: Figures = serde_json::from_str(text).unwrap();
        let svg = figures.draw();
        assert_eq!((svg.matches("<circle").count(), svg.matches("<rect").count()), (4, 3), "{svg}");
        assert!(svg.contains("2600 ms") && svg.contains("1.5 + 20.0") && svg.contains("merge 2.9"), "{svg}");
        assert!(svg.contains("debian: MiB of each of 2") && !svg.contains("<clone>") && !svg.contains("NaN"), "{svg}");
        assert!(Figures::default().draw().is_empty());
    }
}
