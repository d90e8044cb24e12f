//! The report of studies: one HTML file without external parts. For each study it shows the paper's numbers redrawn,
//! and those measured here beside them in the same form. Figures in which Pagefold does worse than ksmd, or than no
//! merging, come first.

mod chart;
mod markdown;
mod overview;
mod panel;

pub use markdown::{summary, write as write_markdown};

use crate::check::{Answer, Check, Rule, Verdict};
use crate::data::Study;
use crate::losses::{self, Merger};
use crate::record::ArmTimeline;
use crate::result::Outcome;
use crate::runner::in_words;
use crate::standing;
use crate::words::{self, of_loss};
use chart::{Line, Value};
use overview::OfPaper;
use report::html::{self, Text};
use std::fmt::Write as _;
use std::io::{self, Write};

const STYLE: &str = concat!(include_str!("../assets/chart.css"), include_str!("../assets/study.css"));

/// A study with its result.
pub type Item<'a> = (&'a Study, &'a Outcome);

/// Writes the page.
///
/// # Errors
/// `out` cannot be written.
pub fn write(out: &mut dyn Write, items: &[Item<'_>], made_at: &str) -> io::Result<()> {
    html::begin(out, "Papers, repeated here", made_at, STYLE)?;
    write!(out, "<nav aria-label=\"Studies\">")?;
    for (study, _) in items {
        write!(out, "<a href=\"#{id}\">{id}</a> ", id = Text(&study.id))?;
    }
    writeln!(out, "</nav>")?;
    tiles(out, items)?;
    papers(out, items)?;
    ten_losses(out, items)?;
    all_studies(out, items)?;
    items.iter().try_for_each(|item| section(out, *item))?;
    writeln!(out, "</main></body></html>")
}

/// The number of verdicts of each kind.
pub fn count(items: &[Item<'_>], answer: Answer) -> usize {
    items.iter().flat_map(|(_, result)| &result.verdicts).filter(|v| v.verdict == answer).count()
}

fn tiles(out: &mut dyn Write, items: &[Item<'_>]) -> io::Result<()> {
    writeln!(out, "<section><dl class=\"tiles\">")?;
    let worse: usize = items.iter().map(|(study, result)| losses::of(study, &result.measured).len()).sum();
    for (class, number, name, text) in [
        ("price", worse, "figures in which Pagefold does worse", "than ksmd, or than nobody merging; they stand first"),
        ("good", count(items, Answer::Holds), "predictions hold", "the 95% interval lies on the stated side"),
        ("price", count(items, Answer::Fails), "predictions fail", "the interval lies wholly on the other side"),
        ("", count(items, Answer::Undecided), "are undecided", "each with the number of repetitions that would decide"),
    ] {
        writeln!(
            out,
            "<div class=\"tile {class}\"><dt>{name}</dt><dd class=\"big\">{number}</dd><dd>{text}</dd></div>"
        )?;
    }
    writeln!(out, "</dl></section>")
}

fn papers(out: &mut dyn Write, items: &[Item<'_>]) -> io::Result<()> {
    writeln!(out, "<section><h2>The papers</h2>")?;
    for paper in OfPaper::all(items) {
        writeln!(out, "<h3>{}: {}</h3>", Text(&paper.paper.paper), Text(&paper.paper.title))?;
        writeln!(out, "<p>{}</p>", Text(&paper.paper.said))?;
        if let Some(lacks) = &paper.paper.lacks {
            writeln!(out, "<p>{}</p>", Text(lacks))?;
        }
        writeln!(out, "<p><b>Here.</b></p><ul>")?;
        for (study, seen) in paper.seen() {
            writeln!(out, "<li><a href=\"#{id}\">{id}</a>: {}</li>", Text(&seen), id = Text(&study.id))?;
        }
        writeln!(out, "</ul><p>Of all predictions: {}</p>", Text(&paper.sure()))?;
        let shown = paper.items.iter().find(|(study, _)| study.id == paper.paper.picture);
        if let Some((panel, result)) = shown.and_then(|(study, result)| Some((study.panel.first()?, result))) {
            panel::write(out, panel, result)?;
        }
    }
    writeln!(out, "</section>")
}

fn ten_losses(out: &mut dyn Write, items: &[Item<'_>]) -> io::Result<()> {
    let losses = overview::losses(items);
    if losses.is_empty() {
        return Ok(());
    }
    writeln!(out, "<section><h2>Where Pagefold does worse</h2><div class=\"worse\"><ul>")?;
    for (study, loss) in losses {
        writeln!(out, "<li><a href=\"#{id}\">{id}</a>: {}</li>", Text(&of_loss(study, &loss)), id = Text(&study.id))?;
    }
    writeln!(out, "</ul></div></section>")
}

fn all_studies(out: &mut dyn Write, items: &[Item<'_>]) -> io::Result<()> {
    let head =
        ["study", "predictions", "first decided", "dose"].map(|name| format!("<th scope=\"col\">{name}</th>")).concat();
    writeln!(out, "<section><h2>All studies</h2><div class=\"wide\"><table><thead><tr>{head}</tr></thead><tbody>")?;
    for (study, result) in items {
        let first = overview::headline(result).map_or_else(String::new, |verdict| overview::told(result, verdict));
        writeln!(
            out,
            "<tr><td><a href=\"#{id}\">{id}</a>: {}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            Text(&study.what),
            Text(&overview::counts(&[(study, result)])),
            Text(&first),
            Text(&overview::dose(result)),
            id = Text(&study.id)
        )?;
    }
    writeln!(out, "</tbody></table></div></section>")
}

fn loss_list(out: &mut dyn Write, study: &Study, result: &Outcome) -> io::Result<()> {
    let losses = losses::of(study, &result.measured);
    if losses.is_empty() {
        return Ok(());
    }
    writeln!(out, "<div class=\"worse\"><ul>")?;
    for loss in &losses {
        writeln!(out, "<li>{}</li>", Text(&of_loss(study, loss)))?;
    }
    writeln!(out, "</ul></div>")
}

fn section(out: &mut dyn Write, (study, result): Item<'_>) -> io::Result<()> {
    let id = Text(&study.id);
    writeln!(
        out,
        "<section id=\"{id}\"><h2>{id}: {} <span class=\"quiet\">{}, {}</span></h2>",
        Text(&study.what),
        Text(&study.title),
        Text(&study.place)
    )?;
    writeln!(out, "<p><b>Found there.</b> {}</p>", Text(&study.found))?;
    writeln!(out, "<p><b>Done here.</b> {}; varied: {}.</p>", Text(&sentence(&study.workload)), Text(&study.variable))?;
    loss_list(out, study, result)?;
    verdicts(out, study, result)?;
    study.panel.iter().try_for_each(|panel| panel::write(out, panel, result))?;
    timelines(out, &result.timelines)?;
    differences(out, study, result)?;
    facts(out, study, result)?;
    writeln!(out, "</section>")
}

/// The text with a capital letter.
fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

fn verdicts(out: &mut dyn Write, study: &Study, result: &Outcome) -> io::Result<()> {
    writeln!(
        out,
        "<div class=\"wide\"><table class=\"verdicts\"><thead><tr><th scope=\"col\">verdict</th><th scope=\"col\">prediction</th><th scope=\"col\">95% interval</th><th scope=\"col\">figures</th></tr></thead><tbody>"
    )?;
    for verdict in &result.verdicts {
        let check = study.predict.iter().filter(|p| p.text == verdict.prediction).find_map(|p| p.check());
        let name = verdict.verdict.name();
        writeln!(
            out,
            "<tr><td class=\"verdict {name}\">{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            standing::verdict(result, verdict),
            Text(&with_marks(verdict)),
            strip(verdict, check.as_ref()),
            Text(&words::of_verdict(study, verdict))
        )?;
    }
    for prediction in study.not_asked() {
        writeln!(
            out,
            "<tr><td class=\"verdict undecided\">not asked</td><td>{}</td><td></td><td>{}</td></tr>",
            Text(&prediction.text),
            Text(standing::not_asked(prediction))
        )?;
    }
    writeln!(out, "</tbody></table></div>")
}

/// A prediction, followed by its marks: see `standing::marks`.
fn with_marks(verdict: &Verdict) -> String {
    let marks: String = standing::marks(verdict).iter().map(|mark| format!(" [{mark}]")).collect();
    format!("{}{marks}", verdict.prediction)
}

fn strip(verdict: &Verdict, check: Option<&Check>) -> String {
    let (Some(interval), Some(mean), Some(check)) = (verdict.interval, verdict.value, check) else {
        return String::new();
    };
    match check.rule {
        Rule::Above(bound) | Rule::Below(bound) => chart::interval(interval, mean, &[bound]),
        Rule::Within(low, high) => chart::interval(interval, mean, &[low, high]),
    }
}

/// A picture for each timeline of that name, with a line for each arm.
fn timelines(out: &mut dyn Write, all: &[ArmTimeline]) -> io::Result<()> {
    for (n, first) in all.iter().enumerate() {
        let name = &first.timeline.name;
        if all[..n].iter().any(|shown| shown.timeline.name == *name) {
            continue;
        }
        writeln!(out, "<h3>{} over time, first repetition</h3><div class=\"pair\">", Text(name))?;
        for one in all.iter().filter(|t| t.timeline.name == *name) {
            let class = if losses::merger_of(&one.arm) == Some(Merger::Ksm) { "c-ksm" } else { "c-fold" };
            let points = one.timeline.points.iter().map(|(x, y)| (*x, Value { mean: *y, half: None })).collect();
            let line = Line { name: one.arm.clone(), class: class.to_owned(), points };
            let end = one.timeline.points.last().map_or(1.0, |(x, _)| *x);
            let label = format!("{name} in {}", one.arm);
            let unit = (one.timeline.unit.as_str(), "seconds");
            let picture = chart::lines(&label, unit, &[line], &chart::marks(end), &one.timeline.events);
            writeln!(out, "<div><h4>{}</h4><figure>{picture}</figure>", Text(&one.arm))?;
            let mut events = String::new();
            for (n, (at, text)) in one.timeline.events.iter().enumerate() {
                // Writing to a string cannot fail.
                let _ = write!(events, "{}: {text} ({at:.0} s). ", n + 1);
            }
            writeln!(out, "<p class=\"quiet\">{}</p></div>", Text(&events))?;
        }
        writeln!(out, "</div>")?;
    }
    Ok(())
}

fn differences(out: &mut dyn Write, study: &Study, result: &Outcome) -> io::Result<()> {
    writeln!(
        out,
        "<h3>What differs, and why that matters</h3><p class=\"quiet\">There: {}.</p><ul class=\"differs\">",
        Text(&study.rig)
    )?;
    for text in study.differs.iter().chain(&result.notes) {
        writeln!(out, "<li>{}</li>", Text(text))?;
    }
    for arm in &study.arms {
        writeln!(out, "<li>Arm {}: {}.</li>", Text(&arm.name), Text(&arm.text))?;
    }
    for arm in &result.ksm {
        writeln!(out, "<li>ksmd in arm {}: {}.</li>", Text(&arm.arm), Text(&arm.settings.to_string()))?;
    }
    writeln!(out, "</ul>")
}

fn facts(out: &mut dyn Write, study: &Study, result: &Outcome) -> io::Result<()> {
    let host = &result.host;
    let scan = host.smart_scan.map_or("not there".to_owned(), |v| v.to_string());
    let mut facts = vec![
        ("command", format!("{}, {}", result.command(study), in_words(result.seconds))),
        ("ksmd at rest", format!("smart_scan {scan}, advisor {}", host.advisor_mode.as_deref().unwrap_or("not there"))),
    ];
    facts.extend(standing::facts(result));
    writeln!(out, "<dl class=\"facts\">")?;
    for (name, text) in facts {
        writeln!(out, "<div><dt>{name}</dt><dd>{}</dd></div>", Text(&text))?;
    }
    let raw = serde_json::to_string(&[result]).map_err(io::Error::other)?;
    writeln!(
        out,
        "<div><dt>raw data</dt><dd><a download=\"{id}.json\" href=\"data:application/json,{}\">{id}.json</a></dd></div></dl>",
        percent_encoded(&raw),
        id = Text(&study.id)
    )
}

/// Text percent-encoded for a `data:` link.
fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len() * 2);
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.:,".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check;
    use crate::record::{Record, Samples};
    use crate::result::reported;
    use crate::result::tests::empty;

    /// A result with a figure for each place of each panel, and hostile text.
    fn result_of(study: &Study) -> Outcome {
        let record = |metric: &str, arm: &str, x: &str| Record {
            metric: metric.into(),
            arm: arm.into(),
            x: Some(x.into()),
            unit: String::new(),
            n: 3,
            mean: 2.0,
            half_width: Some(0.5),
            reps: vec![0, 1, 2],
            samples: vec![1.5, 2.0, 2.5],
        };
        let mut measured = Vec::new();
        for panel in &study.panel {
            for (series, x) in panel.series.iter().flat_map(|s| panel.x.iter().map(move |x| (s, x))) {
                let arm = series.arm.as_ref().map_or(study.arms[0].name.as_str(), String::as_str);
                measured.extend(series.metric.as_ref().map(|metric| record(metric, arm, x)));
            }
        }
        let timeline = crate::record::Timeline {
            name: "<saved>".into(),
            unit: "MB".into(),
            points: vec![(0.0, 1.0), (3.0, 2.0)],
            events: vec![(1.0, "<script>".into())],
        };
        Outcome {
            verdicts: check::judge_all(study, &Samples::default()),
            reported: reported(study),
            measured,
            timelines: vec![ArmTimeline { arm: study.arms[0].name.clone(), timeline }],
            notes: vec!["<script>alert(1)</script>".into()],
            ..empty(study)
        }
    }

    #[test]
    fn page_of_every_study_is_well_formed_and_asks_for_nothing_from_outside() {
        let studies: Vec<Study> = crate::data::all().into_iter().filter(|s| s.why_not().is_none()).collect();
        let results: Vec<Outcome> = studies.iter().map(result_of).collect();
        let items: Vec<Item<'_>> = studies.iter().zip(&results).collect();
        let mut out = Vec::new();
        write(&mut out, &items, "here & there").unwrap();
        let html = String::from_utf8(out).unwrap();
        let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
        let document = roxmltree::Document::parse_with_options(&html, options).unwrap();
        let named = |name: &'static str| document.descendants().filter(move |node| node.has_tag_name(name));
        assert_eq!(named("section").filter(|s| s.attribute("id").is_some()).count(), studies.len());
        assert_eq!(named("script").count(), 0);
        for link in named("a").filter_map(|a| a.attribute("href")) {
            assert!(link.starts_with('#') || link.starts_with("data:application/json,"), "{link}");
        }
        let panels: usize = studies.iter().map(|study| study.panel.len()).sum();
        assert!(named("figure").count() >= panels, "{panels}");
    }

    #[test]
    fn each_name_of_a_timeline_has_one_heading() {
        let timeline = |arm: &str, name: &str| ArmTimeline {
            arm: arm.into(),
            timeline: crate::record::Timeline { name: name.into(), ..Default::default() },
        };
        let all = [timeline("a", "saved"), timeline("a", "size"), timeline("b", "saved"), timeline("b", "size")];
        let mut out = Vec::new();
        timelines(&mut out, &all).unwrap();
        let html = String::from_utf8(out).unwrap();
        assert_eq!((html.matches("<h3>").count(), html.matches("<figure>").count()), (2, 4));
    }

    #[test]
    fn data_in_a_link_is_encoded_byte_by_byte() {
        assert_eq!(percent_encoded("a\"é #"), "a%22%C3%A9%20%23");
    }
}
