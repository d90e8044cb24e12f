//! The command line of `pagefold study`.

use crate::data::{self, Length, Study};
use crate::recipes;
use crate::result;
use crate::runner::{Job, Wanted, in_words};
use crate::series::Series;
use crate::state::State;
use crate::{list, page, selftest, table};
use anyhow::{Context, anyhow, bail};
use clap::Subcommand;
use cli::exit::{self, Outcome, Stop};
use cli::{OutputFile, output, say};
use guest::Glob;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Arguments of `pagefold study`.
#[derive(clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
A study is an experiment of a paper. It is repeated with real guests, and each prediction gets a verdict: holds, fails, or
undecided, with the number of repetitions that would decide. A prediction that fails is a result: the exit code is 0.

Guests are restored from saved states; the first run boots and saves those that are missing. Each finished turn is kept
until all results are written: the same command goes on after an interruption. An arm for which the host lacks something is
left out, and a study that fails does not keep others from running: the exit code is 1, and stderr says why. ksmd is set and
put back: while there are other programs whose memory it would merge, that takes --yes. Takes root.

Examples:
  pagefold study --list
  pagefold study kim-isolate                  the form that ends within ten minutes
  pagefold study 'kim-*' --full --json        studies that take the same turns share them
  pagefold study selftest                     made-up samples for every prediction"
)]
pub struct Args {
    #[command(subcommand)]
    other: Option<Other>,
    /// Studies, by name or pattern
    #[arg(value_name = "ID")]
    ids: Vec<String>,
    /// List all studies, and say why some cannot be run
    #[arg(long, conflicts_with = "ids")]
    list: bool,
    /// The form that ends within ten minutes (default)
    #[arg(long, conflicts_with = "full")]
    short: bool,
    /// The form for publishing
    #[arg(long)]
    full: bool,
    /// These arms, in place of the form's; of several studies, each takes those that it has
    #[arg(long = "arm", value_name = "NAME,...", value_delimiter = ',')]
    arms: Vec<String>,
    /// Repetitions of each arm, in place of the form's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    reps: Option<u32>,
    #[command(flatten)]
    whole_host: bench::WholeHost,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Write a self-contained page: the paper's numbers redrawn, and ours beside them
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Directory for turns until results are written [default: studies in the cache of the lab]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Other {
    /// Feed every prediction with made-up samples that must hold, fail, and be undecided
    Selftest {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Judge results in files that --json wrote by the predictions as they are, and write the files anew
    Judge {
        /// Results
        #[arg(value_name = "FILE", required = true)]
        results: Vec<PathBuf>,
    },
    /// Draw results from files that --json wrote, judged by the predictions as they are
    Draw {
        /// Results
        #[arg(value_name = "FILE", required = true)]
        results: Vec<PathBuf>,
        /// Write a self-contained page
        #[arg(long, value_name = "FILE")]
        html: Option<PathBuf>,
        /// Write a document, with its pictures in a directory of its name
        #[arg(long, value_name = "FILE")]
        markdown: Option<PathBuf>,
        /// Write what --list tells of results
        #[arg(long, value_name = "FILE")]
        state_file: Option<PathBuf>,
    },
}

/// Runs the command.
///
/// # Errors
/// A name matches nothing, the host lacks something, or a study cannot be measured.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let studies = data::all();
    match &args.other {
        Some(Other::Selftest { json }) => run_selftest(&studies, *json),
        Some(Other::Judge { results }) => judge(&studies, results),
        Some(Other::Draw { results, html, markdown, state_file }) => {
            draw(&studies, results, [html, markdown, state_file].map(Option::as_deref))
        }
        None if args.list => list::print(&studies, args.json),
        None => run_studies(args, &studies),
    }
}

fn run_selftest(studies: &[Study], as_json: bool) -> anyhow::Result<Outcome> {
    let tried = selftest::all(studies);
    if as_json {
        output::line(serde_json::to_string_pretty(&tried)?)?;
    } else {
        output::bytes(table::selftest(&tried).as_bytes())?;
    }
    let wrong: usize = tried.iter().map(|one| one.wrong.len()).sum();
    if wrong > 0 {
        bail!("{wrong} made-up samples got a wrong verdict");
    }
    Ok(Outcome::Done)
}

fn judge(studies: &[Study], files: &[PathBuf]) -> anyhow::Result<Outcome> {
    for path in files {
        let results = result::read(path).map_err(Stop::usage)?;
        let judged: Vec<_> = results.into_iter().map(|result| judged_anew(studies, result)).collect();
        let file = OutputFile::create(path)?;
        let text = serde_json::to_string(&judged)? + "\n";
        let written = file.handle().and_then(|mut out| out.write_all(text.as_bytes()));
        written.with_context(|| format!("cannot write {}", path.display()))?;
        file.commit()?;
    }
    Ok(Outcome::Done)
}

fn judged_anew(studies: &[Study], result: result::Outcome) -> result::Outcome {
    match studies.iter().find(|study| study.id == result.id) {
        Some(study) => result.judged_anew(study),
        None => result,
    }
}

fn draw(studies: &[Study], files: &[PathBuf], [html, markdown, state]: [Option<&Path>; 3]) -> anyhow::Result<Outcome> {
    let mut results = Vec::new();
    for file in files {
        let read = result::read(file).map_err(Stop::usage)?;
        results.extend(read.into_iter().map(|result| judged_anew(studies, result)));
    }
    let items = items(studies, &results)?;
    if let Some(html) = html {
        write_page(OutputFile::create(html)?, &items)?;
    }
    if let Some(markdown) = markdown {
        page::write_markdown(markdown, &items)?;
    }
    if let Some(path) = state {
        let all: Vec<State> = items.iter().map(|(_, result)| State::new(result)).collect();
        let text = serde_json::to_string_pretty(&all)? + "\n";
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    output::line(page::summary(&items))?;
    Ok(Outcome::Done)
}

/// Results together with their studies, in the order in which studies are listed.
fn items<'a>(studies: &'a [Study], results: &'a [result::Outcome]) -> anyhow::Result<Vec<page::Item<'a>>> {
    if let Some(unknown) = results.iter().find(|r| studies.iter().all(|study| study.id != r.id)) {
        return Err(Stop::Usage(format!("there is no study {}, of which this is a result", unknown.id)).into());
    }
    let of = |study: &'a Study| results.iter().filter(move |r| r.id == study.id).map(move |r| (study, r));
    Ok(studies.iter().flat_map(of).collect())
}

fn write_page(file: OutputFile, items: &[page::Item<'_>]) -> anyhow::Result<()> {
    let kernel = host::Kernel::this();
    let made_at = format!("drawn on {}, Linux {}", kernel.host_name, kernel.release);
    let written = file.handle().map(BufWriter::new).and_then(|mut out| {
        page::write(&mut out, items, &made_at)?;
        out.flush()
    });
    written.with_context(|| format!("cannot write {}", file.path().display()))?;
    let path = file.path().to_owned();
    file.commit()?;
    say!("pagefold: wrote {}", path.display());
    Ok(())
}

fn run_studies(args: &Args, studies: &[Study]) -> anyhow::Result<Outcome> {
    if args.ids.is_empty() {
        let what = "name a study, or a pattern: pagefold study --list shows them";
        return Err(Stop::Usage(what.to_owned()).into());
    }
    let wanted = Wanted {
        length: if args.full { Length::Full } else { Length::Short },
        arms: args.arms.clone(),
        reps: args.reps,
        whole_host: args.whole_host,
    };
    let chosen = choose(&args.ids, studies)?;
    check_arms(&chosen, &wanted.arms)?;
    let (jobs, left_out) = jobs(&chosen, &wanted)?;
    let state = match &args.state {
        Some(state) => state.clone(),
        None => lab::cache_dir()?.join("studies"),
    };
    // The output file is opened first, so that an error about it does not come after a long run.
    let html = args.html.as_deref().map(OutputFile::create).transpose()?;
    host::note_interrupts().context("cannot catch signals")?;
    let is_first = |(n, job): &(usize, &Job)| !jobs[..*n].iter().any(|other| other.turns_name() == job.turns_name());
    let time = jobs.iter().enumerate().filter(is_first).map(|(_, job)| job.estimate_s()).sum();
    say!("pagefold: {} of {} studies, {}", jobs.len(), chosen.len(), in_words(time));
    let mut series = Series::new(&state)?;
    for job in &jobs {
        let result = series.run(job)?;
        if let Some(result) = result.filter(|_| !args.json) {
            print(&table::result(job.study, result))?;
        }
    }
    let results = series.results()?;
    if args.json {
        print(&format!("{}\n", serde_json::to_string_pretty(results)?))?;
    }
    if let Some(html) = html.filter(|_| !results.is_empty()) {
        write_page(html, &items(studies, results)?)?;
    }
    let is_whole = series.finish()?;
    Ok(if is_whole && !left_out { Outcome::Done } else { Outcome::Partial })
}

/// Prints results.
fn print(text: &str) -> anyhow::Result<()> {
    output::bytes(text.as_bytes()).map_err(|why| unread(&why))
}

/// The error for results that could not be printed. It keeps only the text of the cause: a closed pipe would otherwise
/// count as success.
fn unread(why: &anyhow::Error) -> anyhow::Error {
    anyhow!("{}; turns that were done are kept: the same command prints their results", exit::in_words(why))
}

/// The studies that these names and patterns select.
fn choose<'a>(ids: &[String], studies: &'a [Study]) -> anyhow::Result<Vec<&'a Study>> {
    let mut chosen: Vec<&Study> = Vec::new();
    for id in ids {
        let pattern = id.parse::<Glob>().map_err(Stop::Usage)?;
        let found: Vec<&Study> = studies.iter().filter(|study| pattern.matches(&study.id)).collect();
        if found.is_empty() {
            return Err(Stop::Usage(format!("there is no study {id}: pagefold study --list shows them")).into());
        }
        for study in found {
            if !chosen.iter().any(|known| known.id == study.id) {
                chosen.push(study);
            }
        }
    }
    Ok(chosen)
}

/// A job for each study that can be run; and whether studies were left out, for which the reason was printed.
fn jobs<'a>(chosen: &[&'a Study], wanted: &'a Wanted) -> anyhow::Result<(Vec<Job<'a>>, bool)> {
    let (mut jobs, mut missing) = (Vec::new(), Vec::new());
    for study in chosen {
        match (recipes::of(&study.id), study.form(wanted.length)) {
            (Some(recipe), Some(form)) => jobs.push(Job { study, recipe, form, wanted }),
            _ => missing.push(format!("{}: {}", study.id, study.why_not().unwrap_or("it has no such form"))),
        }
    }
    if jobs.is_empty() {
        return Err(Stop::HostLacks(format!("this Pagefold cannot run {}", missing.join("; "))).into());
    }
    for why in &missing {
        say!("pagefold: left out: {why}");
    }
    Ok((jobs, !missing.is_empty()))
}

/// Checks that each arm that is asked for is an arm of a chosen study, and that each study has one of them. Studies
/// without arms have no recipe, and are left out later.
fn check_arms(chosen: &[&Study], arms: &[String]) -> Result<(), Stop> {
    if arms.is_empty() {
        return Ok(());
    }
    let known = |study: &Study| study.arms.iter().map(|arm| arm.name.as_str()).collect::<Vec<_>>().join(", ");
    let all =
        || chosen.iter().map(|study| format!("{}: it has {}", study.id, known(study))).collect::<Vec<_>>().join("; ");
    if let Some(unknown) = arms.iter().find(|arm| chosen.iter().all(|study| study.arm(arm).is_none())) {
        return Err(Stop::Usage(format!("there is no arm {unknown}; {}", all())));
    }
    let has_none = |study: &&&Study| !study.arms.is_empty() && arms.iter().all(|arm| study.arm(arm).is_none());
    match chosen.iter().find(has_none) {
        Some(study) => Err(Stop::Usage(format!("{} has none of these arms; {}", study.id, all()))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn studies_take_the_arms_that_they_have_and_each_must_have_one() {
        let studies = data::all();
        let chosen = choose(&["kim-fig2".into(), "kim-fig3".into()], &studies).unwrap();
        let check = |arms: &[&str]| {
            let arms: Vec<String> = arms.iter().map(|arm| (*arm).to_owned()).collect();
            check_arms(&chosen, &arms).map_err(|why| why.to_string())
        };
        assert_eq!(check(&[]), Ok(()));
        assert_eq!(check(&["fio-low-1-9", "fio-low-fold-se"]), Ok(()));
        let why = check(&["fio-low-1-9"]).unwrap_err();
        assert!(why.starts_with("kim-fig3 has none of these arms; kim-fig2: it has fio-low-ksm-equal, "), "{why}");
        let why = check(&["fio-low-fold-se", "x"]).unwrap_err();
        assert!(why.starts_with("there is no arm x; "), "{why}");
    }

    #[test]
    fn results_that_nobody_reads_are_no_success() {
        let closed = anyhow::Error::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe));
        assert_eq!(exit::code_of(|| Err(unread(&closed))), std::process::ExitCode::from(1));
    }
}
