//! `docs/studies.md`: the overview, and beside it in a directory a page for each study that ran. The pictures are files of
//! their own, with the colours of both themes in them.

use super::overview::{self, OfPaper};
use super::panel::{self, Side};
use super::{Item, sentence, with_marks};
use crate::data::{Panel, PanelForm};
use crate::losses;
use crate::result::Outcome;
use crate::runner::in_words;
use crate::standing;
use crate::words;
use anyhow::Context;
use report::html::Text;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// Style sheet with the colours of pictures that stand alone, for a light and a dark theme: the report has the same.
const THEMES: &str = "\
:root{--ground:#fdfdfb;--line:#dcdcd5;--ink:#1d1f22;--quiet:#5c6066;--unique:#b9bcc0;--shared:#009e73;--group:#0072b2;--others:#d55e00;--host:#cc79a7;--ram:#4d3fa3;--stack:#b79b2d}\
@media(prefers-color-scheme:dark){:root{--ground:#15171a;--line:#34383e;--ink:#e8e8e4;--quiet:#a3a7ad;--unique:#6a7077;--shared:#1fb88a;--group:#2f97d6;--others:#ee7a21;--host:#d990b8;--ram:#8f83dd;--stack:#d8c25e}}\
.ground{fill:var(--ground)}.head{font-weight:600}";
const CHART: &str = include_str!("../../assets/chart.css");

/// Writes the document, and its pictures into the directory beside it that has its name without the ending.
///
/// # Errors
/// A file cannot be written.
pub fn write(path: &Path, items: &[Item<'_>]) -> anyhow::Result<()> {
    let dir = path.with_extension("");
    let name = dir.file_name().context("a document without a name")?.to_string_lossy().into_owned();
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    for (file, content) in pictures(items).into_iter().chain(pages(items)) {
        let file = dir.join(file);
        fs::write(&file, content).with_context(|| format!("cannot write {}", file.display()))?;
    }
    fs::write(path, text(items, &name)).with_context(|| format!("cannot write {}", path.display()))
}

/// All pictures, with the names of their files.
fn pictures(items: &[Item<'_>]) -> Vec<(String, String)> {
    let of = |(study, result): &Item<'_>| -> Vec<(String, String)> {
        let panels = study.panel.iter().enumerate();
        panels.map(|(n, panel)| (picture_name(&study.id, n), picture(panel, result))).collect()
    };
    items.iter().flat_map(of).collect()
}

/// The pages of all studies, with the names of their files.
fn pages(items: &[Item<'_>]) -> Vec<(String, String)> {
    items.iter().map(|item| (format!("{}.md", item.0.id), of_study(*item))).collect()
}

fn picture_name(id: &str, n: usize) -> String {
    if n == 0 { format!("{id}.svg") } else { format!("{id}-{}.svg", n + 1) }
}

/// The document.
pub fn text(items: &[Item<'_>], dir: &str) -> String {
    let mut text = format!(
        "# Studies\n\nExperiments of five papers, repeated with `pagefold study`. `./x studies` writes this page and a page for each study from the raw \
         results in [{dir}]({dir}).\nEach prediction has a verdict from a 95% interval over `n` repetitions. A ratio is the geometric mean of the \
         repetitions' ratios. *Here alone*: at a dose below a third of the paper's, nothing is claimed about the paper. Formats: \
         [formats.md](formats.md).\n\n"
    );
    let all = crate::data::all().len();
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "{} of {all} studies have results. Of their predictions, {}; {} of those that are decided are of this rig alone.\n",
        items.len(),
        overview::counts(items),
        overview::here_alone(items)
    );
    text.push_str("## The papers\n\n");
    OfPaper::all(items).iter().for_each(|paper| of_paper(&mut text, paper, dir));
    worse(&mut text, items, dir);
    text.push_str("## All studies\n\nBeside each: its first prediction that was decided, one about Pagefold if there is one.\n\n| study | predictions | first decided | dose |\n|---|---|---|---|\n");
    items.iter().for_each(|item| line_of(&mut text, *item, dir));
    text.push_str("\nWithout a result:\n\n| why | studies |\n|---|---|\n");
    for (why, ids) in overview::missing(items) {
        let _ = writeln!(text, "| {} | {} |", cell(&why), ids.join(", "));
    }
    text
}

fn of_paper(text: &mut String, paper: &OfPaper<'_>, dir: &str) {
    let lacks = paper.paper.lacks.as_ref().map_or(String::new(), |lacks| format!("\n\n{lacks}"));
    let _ = writeln!(text, "### {}: {}\n\n{}{lacks}\n", paper.paper.paper, paper.paper.title, paper.paper.said);
    let seen: Vec<String> =
        paper.seen().iter().map(|(study, seen)| format!("- {}: {seen}", link(&study.id, dir))).collect();
    let _ = writeln!(text, "Here:\n\n{}\n\nOf all predictions: {}\n", seen.join("\n"), paper.sure());
    let _ = writeln!(text, "![{}]({dir}/{})\n", paper.paper.picture, picture_name(&paper.paper.picture, 0));
}

/// Writes the list of the largest losses.
fn worse(text: &mut String, items: &[Item<'_>], dir: &str) {
    let rows = overview::losses(items).into_iter();
    let rows: Vec<String> = rows
        .map(|(study, loss)| format!("| {} | {} |", link(&study.id, dir), cell(&words::of_loss(study, &loss))))
        .collect();
    if !rows.is_empty() {
        let _ = writeln!(
            text,
            "## Where Pagefold does worse\n\nOne of each study, the largest part of its figure first. Each study's page has all of its own.\n\n\
             | study | figure |\n|---|---|\n{}\n",
            rows.join("\n")
        );
    }
}

fn line_of(text: &mut String, (study, result): Item<'_>, dir: &str) {
    let first = overview::headline(result).map_or_else(|| "-".to_owned(), |verdict| overview::told(result, verdict));
    let counts = overview::counts(&[(study, result)]);
    let _ = writeln!(text, "| {} | {counts} | {} | {} |", link(&study.id, dir), cell(&first), overview::dose(result));
}

fn link(id: &str, dir: &str) -> String {
    format!("[{id}]({dir}/{id}.md)")
}

/// Text with the characters escaped that end a cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

/// The page of a study.
fn of_study((study, result): Item<'_>) -> String {
    let mut text = format!(
        "# {}\n\n{}, {}: {}. [All studies](../studies.md)\n\n**Found there.** {}\n\n**Done here.** {}; varied: {}.\n\n",
        study.id,
        study.title,
        study.place,
        study.what,
        study.found,
        sentence(&study.workload),
        study.variable
    );
    let _ = writeln!(text, "`{}`, {}.\n", result.command(study), in_words(result.seconds));
    text.push_str("| run | |\n|---|---|\n");
    for (name, fact) in standing::facts(result) {
        let _ = writeln!(text, "| {name} | {} |", cell(&fact));
    }
    verdicts(&mut text, (study, result));
    for (n, panel) in study.panel.iter().enumerate() {
        let _ = writeln!(text, "![{}]({})\n", panel.title, picture_name(&study.id, n));
    }
    let losses = losses::of(study, &result.measured);
    if !losses.is_empty() {
        text.push_str("| Pagefold does worse |\n|---|\n");
        for loss in &losses {
            let _ = writeln!(text, "| {} |", cell(&words::of_loss(study, loss)));
        }
        text.push('\n');
    }
    text.push_str("| differs here |\n|---|\n");
    for difference in study.differs.iter().chain(&result.notes) {
        let _ = writeln!(text, "| {} |", cell(difference));
    }
    for arm in &result.ksm {
        let _ = writeln!(text, "| ksmd in arm {}: {} |", arm.arm, arm.settings);
    }
    text
}

fn verdicts(text: &mut String, (study, result): Item<'_>) {
    text.push_str("\n| verdict | prediction | figures |\n|---|---|---|\n");
    for verdict in &result.verdicts {
        let _ = writeln!(
            text,
            "| {} | {} | {} |",
            standing::verdict(result, verdict),
            cell(&with_marks(verdict)),
            cell(&words::of_verdict(study, verdict))
        );
    }
    for prediction in study.not_asked() {
        let _ =
            writeln!(text, "| not asked | {} | {} |", cell(&prediction.text), cell(standing::not_asked(prediction)));
    }
    text.push('\n');
}

/// A panel as a picture that stands alone: the paper's numbers on the left, ours on the right.
fn picture(panel: &Panel, result: &Outcome) -> String {
    // A table has no picture of its own. Its rows are drawn as bars.
    let drawn = if panel.form == PanelForm::Table { PanelForm::Bars } else { panel.form };
    let panel = &Panel { form: drawn, ..panel.clone() };
    let (paper, ours) = (Side::paper(panel), Side::ours(panel, result));
    let tops = panel::tops(&paper, &ours);
    let sides = [("reported", paper, tops.0), ("here", ours, tops.1)];
    let shown: Vec<_> = sides.iter().filter(|(_, side, _)| !side.is_empty()).collect();
    let width = 540.0 * shown.len().max(1) as f64;
    let keys = shown.iter().map(|(_, side, _)| side.keys().count()).max().unwrap_or(0);
    let height = 300.0 + 15.0 * keys as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\">\
         <style>{THEMES}{CHART}</style><rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n"
    );
    for (n, (whose, side, top)) in shown.into_iter().enumerate() {
        let left = 540.0 * n as f64;
        let _ = write!(
            svg,
            "<g class=\"chart\"><text class=\"head\" x=\"{}\" y=\"20\">{}: {whose}</text>",
            left + 10.0,
            Text(&panel.title)
        );
        for (m, (class, name)) in side.keys().enumerate() {
            let at = 36.0 + 15.0 * m as f64;
            let _ = write!(
                svg,
                "<rect class=\"{class}\" x=\"{}\" y=\"{}\" width=\"10\" height=\"10\"/><text x=\"{}\" y=\"{at}\">{}</text>",
                left + 12.0,
                at - 9.0,
                left + 27.0,
                Text(name)
            );
        }
        let picture = side.picture(panel, &panel.title, *top).unwrap_or_default();
        let placed = format!("<svg x=\"{}\" y=\"{}\" width=\"520\" height=\"250\"", left + 10.0, height - 255.0);
        let _ = writeln!(svg, "</g>{}", picture.replacen("<svg", &placed, 1));
    }
    svg + "</svg>\n"
}

/// The figures of a result as one line, for a terminal.
pub fn summary(items: &[Item<'_>]) -> String {
    overview::counts(items)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data;
    use crate::ksm::KsmSettings;
    use crate::record::ArmKsm;
    use crate::result;
    use crate::result::tests::empty;
    use std::path::PathBuf;

    /// The raw results in the documents' directory, in the order of their names.
    fn committed(dir: &Path) -> Vec<Outcome> {
        let mut files: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.retain(|file| file.extension().is_some_and(|ending| ending == "json"));
        files.sort();
        files.iter().flat_map(|file| result::read(file).unwrap()).collect()
    }

    #[test]
    fn document_and_pictures_are_as_the_raw_results_yield() {
        let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/studies.md");
        let dir = document.with_extension("");
        let studies = data::all();
        let find = |id: &str| studies.iter().find(|study| study.id == id).expect("a study");
        let judged = |result: Outcome| {
            let study = find(&result.id);
            result.judged_anew(study)
        };
        let results: Vec<Outcome> = committed(&dir).into_iter().map(judged).collect();
        let mut items: Vec<Item<'_>> = Vec::new();
        for study in &studies {
            items.extend(results.iter().filter(|r| r.id == study.id).map(|r| (study, r)));
        }
        let remedy = "write it anew: ./x studies";
        for (study, result) in &items {
            let state = crate::state::of(&study.id);
            assert_eq!(state, Some(&crate::state::State::new(result)), "{remedy}");
        }
        for raw in committed(&dir) {
            let judged = judged(raw.clone());
            let answers = |of: &Outcome| -> Vec<_> {
                of.verdicts
                    .iter()
                    .map(|v| (v.prediction.clone(), v.verdict, v.rule.clone(), v.registered.clone()))
                    .collect()
            };
            assert!(answers(&raw) == answers(&judged) && raw.dose == judged.dose, "{}: {remedy}", raw.id);
        }
        assert!(fs::read_to_string(&document).unwrap() == text(&items, "studies"), "{}: {remedy}", document.display());
        assert!(text(&items, "studies").len() <= 20_000, "one page is read; several are not");
        let files: Vec<_> = pictures(&items).into_iter().chain(pages(&items)).collect();
        for (name, content) in &files {
            assert!(fs::read_to_string(dir.join(name)).is_ok_and(|found| found == *content), "{name}: {remedy}");
        }
        let is_made = |path: PathBuf| path.extension().is_some_and(|ending| ending == "svg" || ending == "md");
        let made = fs::read_dir(&dir).unwrap().filter(|entry| is_made(entry.as_ref().unwrap().path()));
        assert_eq!(made.count(), files.len(), "a page or picture of nothing is left in {}", dir.display());
    }

    #[test]
    fn document_has_command_build_notes_settings_and_predictions_without_a_rule() {
        let study = data::all().into_iter().find(|study| study.id == "kim-live").unwrap();
        assert!(study.not_asked().count() > 0);
        let settings = KsmSettings {
            run: 1,
            pages_to_scan: Some(1000),
            sleep_millisecs: Some(20),
            smart_scan: Some(0),
            advisor_mode: Some("none".into()),
            use_zero_pages: None,
        };
        let mut result = Outcome {
            reps: Some(9),
            notes: vec!["fold: a|b".into()],
            ksm: vec![ArmKsm { arm: "fold".into(), settings }],
            ..empty(&study)
        };
        result.arms = study.arms.iter().map(|arm| arm.name.clone()).collect();
        result.host.pagefold = "1".into();
        result.host.debug_build = true;
        let text = of_study((&study, &result));
        for line in [
            "`pagefold study kim-live --short --reps 9`, 1 s.",
            "| Pagefold | 1, build not recorded, a build for development |",
            "| fold: a\\|b |",
            "| ksmd in arm fold: run 1, pages_to_scan 1000, sleep_millisecs 20, smart_scan 0, advisor_mode none |",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        for prediction in study.not_asked() {
            assert!(
                text.contains(&format!(
                    "| not asked | {} | {} |",
                    cell(&prediction.text),
                    standing::not_asked(prediction)
                )),
                "{text}"
            );
        }
    }
}
