//! A table or picture of a paper, drawn from its numbers, and ours beside it in the same form.

use super::chart::{self, Line, Row, Value};
use crate::data::{Panel, PanelForm, Series};
use crate::figure::figure;
use crate::record::Record;
use crate::result::Outcome;
use crate::table;
use report::Align;
use report::html::{self, Text, legend};
use std::io::{self, Write};

/// The numbers that a panel draws on one side: the paper's, or those measured here.
pub struct Side {
    rows: Vec<Row>,
    cells: Vec<(String, Vec<String>)>,
}

impl Side {
    /// The side with the paper's numbers.
    pub fn paper(panel: &Panel) -> Self {
        let of = panel.series.iter().enumerate().filter(|(_, series)| !series.paper.is_empty());
        let (mut rows, mut cells) = (Vec::new(), Vec::new());
        for (n, series) in of {
            let value = |v: &f64| v.is_finite().then_some(Value { mean: *v, half: None });
            let values: Vec<Option<Value>> = series.paper.iter().map(value).collect();
            let texts = values.iter().map(|v| v.map_or("-".to_owned(), |v| figure(v.mean))).collect();
            cells.push((series.name.clone(), texts));
            rows.push(Row { name: series.name.clone(), class: class_of(panel, n), values });
        }
        Self { rows, cells }
    }

    /// The side with the numbers measured here.
    pub fn ours(panel: &Panel, result: &Outcome) -> Self {
        let (mut rows, mut cells) = (Vec::new(), Vec::new());
        for (n, series) in panel.series.iter().enumerate() {
            let records = table::ours(panel, series, result);
            if records.iter().all(Option::is_none) {
                continue;
            }
            cells.push((series.name.clone(), records.iter().map(|r| table::cell(*r)).collect()));
            let value = |r: Option<&Record>| r.map(|r| Value { mean: r.mean, half: r.half_width });
            let values = records.into_iter().map(value).collect();
            rows.push(Row { name: series.name.clone(), class: class_of(panel, n), values });
        }
        Self { rows, cells }
    }

    /// For each row, the class of its colour and its name.
    pub fn keys(&self) -> impl Iterator<Item = (&str, &str)> {
        self.rows.iter().map(|row| (row.class.as_str(), row.name.as_str()))
    }

    /// The largest value on this side, intervals included.
    fn top(&self) -> f64 {
        chart::top_of(&self.rows)
    }

    /// Whether the side has no number.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The picture of this side; `None` if the panel is a table.
    pub fn picture(&self, panel: &Panel, label: &str, top: f64) -> Option<String> {
        match panel.form {
            PanelForm::Table => None,
            PanelForm::Bars => Some(chart::bars(label, &panel.unit, &panel.x, &self.rows, top)),
            PanelForm::Lines => {
                let numbers: Vec<f64> = panel.x.iter().filter_map(|x| x.parse().ok()).collect();
                let line = |row: &Row| Line {
                    name: row.name.clone(),
                    class: row.class.clone(),
                    points: numbers.iter().zip(&row.values).filter_map(|(x, v)| Some((*x, (*v)?))).collect(),
                };
                let lines: Vec<Line> = self.rows.iter().map(line).collect();
                Some(chart::lines(label, (&panel.unit, &panel.along), &lines, &numbers, &[]))
            }
        }
    }

    fn write(&self, out: &mut dyn Write, panel: &Panel, whose: &str, top: f64) -> io::Result<()> {
        writeln!(out, "<div><h4>{whose}</h4>")?;
        let label = format!("{}, {whose}", panel.title);
        let picture = self.picture(panel, &label, top);
        if let Some(picture) = &picture {
            legend(out, self.keys())?;
            writeln!(out, "<figure>{picture}</figure><details><summary>figures</summary>")?;
        }
        let first = (panel.along.as_str(), Align::Left);
        let columns: Vec<_> = [first].into_iter().chain(panel.x.iter().map(|x| (x.as_str(), Align::Right))).collect();
        let rows = self.cells.iter().map(|(name, cells)| [vec![name.clone()], cells.clone()].concat());
        html::table(out, &label, &columns, rows)?;
        writeln!(out, "{}</div>", if picture.is_some() { "</details>" } else { "" })
    }
}

/// The class of a row's colour: its arm's, or one by its place.
fn class_of(panel: &Panel, n: usize) -> String {
    let Series { name, arm, metric, .. } = &panel.series[n];
    let arm = arm.as_deref().unwrap_or("");
    match () {
        () if metric.is_none() || name.starts_with("reported") => "c-paper".to_owned(),
        () if arm.starts_with("ksm") => "c-ksm".to_owned(),
        () if arm.starts_with("fold") => "c-fold".to_owned(),
        () => format!("c-{}", n % 4),
    }
}

/// The upper ends of both sides' axes. They are the same, unless one side's values would be too small to be seen.
pub fn tops(paper: &Side, ours: &Side) -> (f64, f64) {
    let (theirs, own) = (paper.top(), ours.top());
    let most = theirs.max(own);
    if most > 5.0 * theirs.min(own) { (theirs, own) } else { (most, most) }
}

/// Writes both sides of a panel.
pub fn write(out: &mut dyn Write, panel: &Panel, result: &Outcome) -> io::Result<()> {
    let unit = if panel.unit.is_empty() { String::new() } else { format!(" ({})", panel.unit) };
    writeln!(out, "<h3>{}</h3><div class=\"pair\">", Text(&format!("{}{unit}", panel.title)))?;
    let (paper, ours) = (Side::paper(panel), Side::ours(panel, result));
    let tops = tops(&paper, &ours);
    if paper.is_empty() {
        writeln!(out, "<div><h4>reported</h4><p class=\"quiet\">The paper gives no numbers for this.</p></div>")?;
    } else {
        paper.write(out, panel, "reported", tops.0)?;
    }
    if ours.is_empty() {
        writeln!(out, "<div><h4>here</h4><p class=\"quiet\">Not measured in this run.</p></div>")?;
    } else {
        ours.write(out, panel, "here", tops.1)?;
    }
    writeln!(out, "</div>")
}
