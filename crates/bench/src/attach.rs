//! `pagefold bench attach`: puts the folding agent into a running program and takes it out again, many times. After
//! each cycle, the bench counts everything of the agent that is left in the program. It also counts system calls that
//! the agent interrupted, where the program counts them.
//!
//! ```text
//!   a cycle: note the program's mappings, threads and files
//!            attach --> 1000 pages folded --> the program writes some of them: more than 100 break --> detach
//!            is its memory what it wrote? look again
//! ```

mod guest;
mod program;
mod subject;

use crate::guardian::Guardian;
use crate::serving::{Serving, beside, wait_for};
use crate::side::GROUP;
use anyhow::{Context, ensure};
use cli::exit::{Outcome, Stop};
use cli::say;
use guest::Vm;
use host::ProcessId;
use program::Program;
use serde::Serialize;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;
use subject::{Subject, broken_pages};

/// A cycle waits until at least 1000 pages of the program are folded, and then until 100 of them are broken: written,
/// and so private again.
const LEAST: (u64, u64) = (1000, 100);
/// Number of waits, of 20 s each, for enough pages to be folded; and then for enough to be broken.
const TRIES: usize = 6;
/// Most leftovers that are named: 20.
const MOST_LEFT: usize = 20;

/// Arguments of `pagefold bench attach`.
#[derive(clap::Args)]
#[command(after_help = "\
The program has six threads, which wait with time limits, take signals, fork, write pipes, change mappings and
memory, and check all of it. It is compiled by cc. Of QEMU, the agent's traces and parts of its RAM are left-overs:
it changes other mappings by itself. Root's rights are needed.

Examples:
  pagefold bench attach --cycles 100
  pagefold bench attach --on qemu --cycles 10 --json")]
pub struct Args {
    /// The program: waits checks itself, qemu has a guest under load
    #[arg(long, value_enum, default_value = "waits")]
    on: On,
    /// How often to attach and detach
    #[arg(long, value_name = "N", default_value_t = 1000)]
    cycles: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A program to attach to.
#[derive(Clone, Copy, Debug, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
enum On {
    /// One that checks itself.
    Waits,
    /// QEMU with a guest under load.
    Qemu,
}

/// The result.
#[derive(Serialize)]
struct Figures {
    /// The program.
    on: On,
    /// How often it was attached and detached. Each time, at least 1,000 pages were folded and 100 broken, and its
    /// contents were checked.
    cycles: usize,
    /// How long threads were stopped: one of them to put the agent in, all of them while mappings were replaced.
    stopped_us: Spread,
    /// Time of a cycle, from one look at the program to the next.
    cycle_ms: Spread,
    /// Parts of a cycle.
    phases_ms: Phases,
    /// Mappings, threads and open files that were there after a cycle and not before. Of `qemu`, which changes these by
    /// itself: those of the agent, and parts of the RAM of another kind than before.
    leftovers: usize,
    /// The first 20 of the leftovers: lines of `maps`, `task TID`, `fd NUMBER`.
    left: Vec<String>,
    /// System calls that were interrupted, and must not have been; `None` where the program does not count them.
    eintr: Option<u64>,
}

/// Parts of cycles.
#[derive(Serialize)]
struct Phases {
    /// Until the agent was there.
    attach: Spread,
    /// Until the pages were folded.
    fold: Spread,
    /// Detaching.
    detach: Spread,
}

/// Times in all cycles, in milliseconds: of the whole cycle, until the agent was there, until pages were folded, and of
/// detaching.
#[derive(Default)]
struct Times {
    cycle: Vec<u64>,
    attach: Vec<u64>,
    fold: Vec<u64>,
    detach: Vec<u64>,
}

/// Times of one kind.
#[derive(Serialize)]
struct Spread {
    /// Median.
    p50: u64,
    /// 99th percentile.
    p99: u64,
    /// Longest time.
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
    let measured = measure(args, &dir, &mut guardian);
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
    let phases = &figures.phases_ms;
    let [attach, fold, detach] = [&phases.attach, &phases.fold, &phases.detach].map(|spread| spread.p50);
    writeln!(out, "attached after {attach} ms, folded after {fold} ms; detaching took {detach} ms (p50)")?;
    let eintr = eintr.map_or_else(|| "not counted".to_owned(), |count| count.to_string());
    writeln!(out, "mappings, threads and files left: {leftovers}; system calls interrupted: {eintr}")
}

fn measure(args: &Args, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Figures> {
    let config = format!("[[group]]\nname = '{GROUP}'\nhuge-pages = 1\n");
    let serving = Serving::start(dir, &config, guardian)?;
    let mut subject: Box<dyn Subject> = match args.on {
        On::Waits => Box::new(Program::start(dir, guardian)?),
        On::Qemu => Box::new(Vm::start(dir, guardian)?),
    };
    let stops = dir.join("stops");
    let (mut left, mut times) = (Vec::new(), Times::default());
    for cycle in 0..args.cycles {
        let began = Instant::now();
        let before = subject.look()?;
        attached(&serving, &mut *subject, &stops, &mut times).with_context(|| format!("in cycle {cycle}"))?;
        subject.check().with_context(|| format!("after cycle {cycle}"))?;
        let new: Vec<String> = subject.look()?.into_iter().filter(|one| !before.contains(one)).collect();
        if !new.is_empty() {
            say!("pagefold: left after cycle {cycle}: {new:#?}");
        }
        left.extend(new);
        times.cycle.push(milliseconds(began));
        if cycle % 100 == 99 {
            say!("pagefold: {} of {} cycles", cycle + 1, args.cycles);
        }
    }
    let eintr = subject.interrupted()?;
    let text = fs::read_to_string(&stops).context("cannot read how long threads were stopped")?;
    let stopped_us = Spread::of(text.lines().filter_map(|line| line.parse().ok()).collect())?;
    let Times { cycle, attach, fold, detach } = times;
    let [cycle_ms, attach, fold, detach] = [cycle, attach, fold, detach].map(Spread::of);
    let phases_ms = Phases { attach: attach?, fold: fold?, detach: detach? };
    let leftovers = left.len();
    left.truncate(MOST_LEFT);
    let (on, cycles) = (args.on, args.cycles);
    Ok(Figures { on, cycles, stopped_us, cycle_ms: cycle_ms?, phases_ms, leftovers, left, eintr })
}

fn milliseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// The middle of a cycle: attaches, waits until enough pages are folded, has the program write folded pages until
/// enough are broken, and detaches.
fn attached(serving: &Serving, subject: &mut dyn Subject, stops: &Path, times: &mut Times) -> anyhow::Result<()> {
    let (pid, began) = (subject.pid(), Instant::now());
    let mut child = attach(pid, serving.dir(), stops, subject.is_whole(), true)?;
    times.attach.push(milliseconds(began));
    let is_folded = || {
        let state = serving.show(GROUP)?;
        let members = state.report.members.iter().filter(|member| member.pid == pid);
        let folded: u64 = members.map(|member| member.folded_pages).sum();
        ensure!(folded >= LEAST.0, "{folded} pages are folded");
        Ok(())
    };
    let folded = (0..TRIES).find_map(|_| wait_for(is_folded, "too few pages are folded").ok());
    folded.context("too few pages are folded after two minutes")?;
    times.fold.push(milliseconds(began));
    // The pages that the program writes may not be those that were folded first. So it writes until enough are broken.
    let mut is_broken = || {
        subject.break_folds()?;
        let broken = broken_pages(pid)?;
        ensure!(broken >= LEAST.1, "{broken} pages are broken");
        Ok(())
    };
    let broken = (0..TRIES).find_map(|_| wait_for(&mut is_broken, "too few pages are broken").ok());
    broken.context("too few pages are broken after two minutes")?;
    let (helper, began) = (ProcessId::of(child.id())?, Instant::now());
    helper.terminate();
    ensure!(child.wait()?.success(), "the program could not be detached: see above");
    times.detach.push(milliseconds(began));
    Ok(())
}

/// Makes a process a member of the group: with all of its private anonymous memory (`is_whole`), or with what it
/// advises as mergeable. With `is_eager`, the agent folds every page that was not written for a while, even if it may
/// soon be written again. Returns the helper process, which stays as long as the process is attached, and detaches it
/// on `SIGTERM`. At its end the helper adds to the file `stops` how long it stopped threads, in microseconds.
///
/// # Errors
/// The process cannot be attached.
pub fn attach(pid: u32, service: &Path, stops: &Path, is_whole: bool, is_eager: bool) -> anyhow::Result<Child> {
    let helper = attacher()?;
    let mut child = Command::new(&helper)
        .args(["--pid", &pid.to_string(), "--group", GROUP, "--dir"])
        .arg(service)
        .arg("--stops")
        .arg(stops)
        .args(is_whole.then_some("--all-anonymous"))
        .envs(is_eager.then_some(("PAGEFOLD_EAGER", "1")))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", helper.display()))?;
    let mut said = String::new();
    child.stdout.take().context("no output")?.read_to_string(&mut said)?;
    ensure!(!said.is_empty(), "the program could not be attached: see above");
    Ok(child)
}

/// Path of the program `pagefold-attach`.
fn attacher() -> anyhow::Result<PathBuf> {
    beside("pagefold-attach", "it is built together with pagefold (./x build)")
}
