//! Results of studies as text for a terminal.

use crate::data::{Panel, Series, Study};
use crate::figure::figure;
use crate::losses;
use crate::record::Record;
use crate::result::Outcome;
use crate::runner::in_words;
use crate::selftest::Tried;
use crate::standing;
use crate::words;
use report::{Align, Table};
use std::fmt::Write as _;

/// A result as text: losses, verdicts, the paper's numbers beside those measured here, and differences of the rig.
pub fn result(study: &Study, result: &Outcome) -> String {
    let mut text = format!("{} ({}, {}): {}\n", study.id, study.title, study.place, study.what);
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{} form, {}; found there: {}", result.form.name(), in_words(result.seconds), study.found);
    let _ = writeln!(text, "load: {}; varied: {}", study.workload, study.variable);
    for arm in &study.arms {
        let _ = writeln!(text, "{}: {}", arm.name, arm.text);
    }
    text.push('\n');
    for loss in losses::of(study, &result.measured) {
        let _ = writeln!(text, "WORSE      {}", words::of_loss(study, &loss));
    }
    for verdict in &result.verdicts {
        let _ = writeln!(text, "{:<9}  {}", standing::verdict(result, verdict), verdict.prediction);
        let _ = writeln!(text, "           {}", words::of_verdict(study, verdict));
        for mark in standing::marks(verdict) {
            let _ = writeln!(text, "           {mark}");
        }
    }
    for prediction in study.not_asked() {
        let _ =
            writeln!(text, "{:<9}  {}\n           {}", "not asked", prediction.text, standing::not_asked(prediction));
    }
    for panel in &study.panel {
        let _ = write!(text, "\n{}{}\n{}", panel.title, unit(&panel.unit), of_panel(panel, result));
    }
    let _ = writeln!(text, "\nThere: {}.", study.rig);
    for difference in &study.differs {
        let _ = writeln!(text, "Here: {difference}");
    }
    for arm in &result.ksm {
        let _ = writeln!(text, "ksmd in {}: {}", arm.arm, arm.settings);
    }
    for (name, fact) in standing::facts(result) {
        let _ = writeln!(text, "{name}: {fact}");
    }
    for note in &result.notes {
        let _ = writeln!(text, "Note: {note}");
    }
    text.push('\n');
    text
}

/// `, UNIT` behind a title, or nothing if there is no unit.
fn unit(unit: &str) -> String {
    if unit.is_empty() { String::new() } else { format!(", {unit}") }
}

/// The measured figures for a row of a panel, one for each `x`; `None` where there is none.
pub fn ours<'a>(panel: &Panel, series: &Series, result: &'a Outcome) -> Vec<Option<&'a Record>> {
    let Some(metric) = &series.metric else { return vec![None; panel.x.len()] };
    let of = |x: &String| {
        let fits = |r: &&Record| r.metric == *metric && r.x.as_ref() == Some(x);
        result.measured.iter().filter(fits).find(|r| series.arm.as_ref().is_none_or(|arm| *arm == r.arm))
    };
    panel.x.iter().map(of).collect()
}

fn of_panel(panel: &Panel, result: &Outcome) -> String {
    let first = (panel.along.as_str(), Align::Left);
    let columns: Vec<_> = [first].into_iter().chain(panel.x.iter().map(|x| (x.as_str(), Align::Right))).collect();
    let mut table = Table::new(&columns);
    for series in &panel.series {
        if !series.paper.is_empty() {
            let values = series.paper.iter().map(|v| if v.is_finite() { figure(*v) } else { "-".to_owned() });
            table.row([format!("{} (paper)", series.name)].into_iter().chain(values));
        }
        let ours = ours(panel, series, result);
        if ours.iter().any(Option::is_some) {
            table.row([format!("{} (here)", series.name)].into_iter().chain(ours.into_iter().map(cell)));
        }
    }
    table.to_string()
}

/// A mean with half the width of its interval, as text.
pub fn cell(record: Option<&Record>) -> String {
    let Some(record) = record else { return "-".to_owned() };
    let half = record.half_width.map_or(String::new(), |half| format!(" ±{}", figure(half)));
    format!("{}{half}", figure(record.mean))
}

/// The result of the selftest as text.
pub fn selftest(tried: &[Tried]) -> String {
    let mut table = Table::new(&[("STUDY", Align::Left), ("", Align::Left), ("PREDICTION", Align::Left)]);
    for one in tried {
        let answer = if one.wrong.is_empty() { "right".to_owned() } else { format!("wrong: {}", one.wrong.join("; ")) };
        table.row([&one.id, &answer, &one.prediction]);
    }
    table.to_string()
}
