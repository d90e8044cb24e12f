//! `pagefold bench attach`: attaches to a program that checks itself, and detaches from it, again and again. Calls that
//! were interrupted are counted, and so is everything that is left of the agent.
//!
//! ```text
//!   a cycle: stop the program's work, and note its mappings, threads and files; go on
//!            attach --> 1000 pages folded --> the program writes some of them: more than 100 break --> detach
//!            stop its work, and look again
//! ```

mod program;

use crate::guardian::Guardian;
use crate::serving::{Serving, wait_for};
use anyhow::{Context, ensure};
use cli::exit::{Outcome, Stop};
use cli::say;
use host::ProcessId;
use program::Program;
use serde::Serialize;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Name of the group.
const GROUP: &str = "bench";
/// Least pages that are folded and broken in each cycle.
const LEAST: (u64, u64) = (1000, 100);
/// Attempts at having pages folded, each of 20 s.
const TRIES: usize = 6;
/// Most leftovers that are named: 20.
const MOST_LEFT: usize = 20;

/// Arguments of `pagefold bench attach`.
#[derive(clap::Args)]
#[command(after_help = "\
The program has six threads, which wait with time limits, take signals, fork, write pipes, change mappings and
memory, and check all of it. It is compiled by cc. Root's rights are needed.")]
pub struct Args {
    /// How often to attach and detach
    #[arg(long, value_name = "N", default_value_t = 1000)]
    cycles: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The result.
#[derive(Serialize)]
struct Figures {
    cycles: usize,
    stopped_us: Spread,
    cycle_ms: Spread,
    leftovers: usize,
    left: Vec<String>,
    eintr: u64,
}

/// Times of one kind.
#[derive(Serialize)]
struct Spread {
    p50: u64,
    p99: u64,
    max: u64,
}

impl Spread {
    fn of(mut all: Vec<u64>) -> anyhow::Result<Self> {
        all.sort_unstable();
        let at = |part: usize| all.get((all.len() * part / 100).min(all.len().saturating_sub(1))).copied();
        let none = "nothing was measured";
        Ok(Self { p50: at(50).context(none)?, p99: at(99).context(none)?, max: at(100).context(none)? })
    }
}

/// Runs the bench and prints its result.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    if !rustix::process::geteuid().is_root() {
        return Err(Stop::HostLacks("attaching takes root's service: run this with sudo".to_owned()).into());
    }
    let mut guardian = Guardian::start()?;
    let dir = std::env::temp_dir().join(format!("pagefold-bench-{}", std::process::id()));
    fs::create_dir(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    guardian.keep_dir(&dir)?;
    let measured = measure(args.cycles, &dir, &mut guardian);
    guardian.finish()?;
    let figures = measured?;
    let mut out = std::io::stdout().lock();
    if args.json { report::json::write(&mut out, &figures) } else { print(&mut out, &figures) }
        .and_then(|()| out.flush())
        .context("cannot write to stdout")?;
    Ok(Outcome::Done)
}

fn print(out: &mut impl Write, figures: &Figures) -> std::io::Result<()> {
    let Figures { cycles, stopped_us: Spread { p50, p99, max }, cycle_ms, leftovers, eintr, .. } = figures;
    writeln!(
        out,
        "{cycles} cycles of attaching and detaching, {} ms each (p50), {} ms at most",
        cycle_ms.p50, cycle_ms.max
    )?;
    writeln!(out, "threads were stopped for {p50} us (p50), {p99} us (p99), {max} us at most")?;
    writeln!(out, "mappings, threads and files left: {leftovers}; system calls interrupted: {eintr}")
}

fn measure(cycles: usize, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Figures> {
    let serving = Serving::start(dir, &format!("[[group]]\nname = '{GROUP}'\n"), guardian)?;
    let mut program = Program::start(dir)?;
    guardian.keep_process(ProcessId::of(program.pid())?)?;
    let stops = dir.join("stops");
    let (mut left, mut times) = (Vec::new(), Vec::new());
    for cycle in 0..cycles {
        let began = Instant::now();
        program.stop()?;
        let before = program.look()?;
        program.go()?;
        attached(&serving, &mut program, &stops).with_context(|| format!("in cycle {cycle}"))?;
        program.stop()?;
        let after = program.look()?;
        let new: Vec<String> = after.into_iter().filter(|one| !before.contains(one)).collect();
        if !new.is_empty() {
            say!("pagefold: left after cycle {cycle}: {new:#?}");
        }
        left.extend(new);
        program.go()?;
        times.push(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
        if cycle % 100 == 99 {
            say!("pagefold: {} of {cycles} cycles", cycle + 1);
        }
    }
    let eintr = program.stop()?;
    let text = fs::read_to_string(&stops).context("cannot read how long threads were stopped")?;
    let all = text.lines().filter_map(|line| line.parse().ok()).collect();
    let (stopped_us, cycle_ms, leftovers) = (Spread::of(all)?, Spread::of(times)?, left.len());
    left.truncate(MOST_LEFT);
    Ok(Figures { cycles, stopped_us, cycle_ms, leftovers, left, eintr })
}

/// Attaches, waits until pages are folded, has some broken, and detaches.
fn attached(serving: &Serving, program: &mut Program, stops: &Path) -> anyhow::Result<()> {
    let helper = attacher()?;
    let pid = program.pid();
    let mut child = Command::new(&helper)
        .args(["--pid", &pid.to_string(), "--group", GROUP, "--all-anonymous", "--dir"])
        .arg(serving.dir())
        .arg("--stops")
        .arg(stops)
        .env("PAGEFOLD_EAGER", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", helper.display()))?;
    let mut said = String::new();
    child.stdout.take().context("no output")?.read_to_string(&mut said)?;
    ensure!(!said.is_empty(), "the program could not be attached: see above");
    let is_folded = || {
        let state = serving.show(GROUP)?;
        let members = state.report.members.iter().filter(|member| member.pid == pid);
        let folded: u64 = members.map(|member| member.folded_pages).sum();
        ensure!(folded >= LEAST.0, "{folded} pages are folded");
        Ok(())
    };
    let folded = (0..TRIES).find_map(|_| wait_for(is_folded, "too few pages are folded").ok());
    folded.context("too few pages are folded after two minutes")?;
    let broken = program.break_folds()?;
    ensure!(broken >= LEAST.1, "only {broken} pages were broken");
    let helper = ProcessId::of(child.id())?;
    helper.terminate();
    ensure!(child.wait()?.success(), "the program could not be detached: see above");
    Ok(())
}

/// The program that attaches, which lies beside this one.
fn attacher() -> anyhow::Result<PathBuf> {
    let beside = crate::serving::program()?.with_file_name("pagefold-attach");
    if beside.is_file() {
        return Ok(beside);
    }
    let why = format!("{} is missing: it is built together with pagefold (./x build)", beside.display());
    Err(Stop::HostLacks(why).into())
}
