//! `pagefold-attach`: makes one running process a member of a group, and stays beside it until it ends or is detached.
//! `pagefold attach` starts it, with the rights of its caller. It writes one line of JSON to its standard
//! output.
#![forbid(unsafe_code)]

use act::seccomp::CALLS;
use anyhow::{Context, bail};
use api::client::Service;
use api::enrol::Via;
use api::place::Place;
use attach::children::Children;
use attach::inject::{Injected, inject, look_at_filters};
use attach::object::Object;
use attach::refuse::Facts;
use attach::serve::{End, NICENESS, Serving};
use attach::take_over::{is_there, take_over};
use attach::{gate, ksm, object, refuse};
use clap::Parser;
use cli::exit::{self, Outcome, Stop};
use cli::output;
use host::{ProcessId, Signals};
use serde::Serialize;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// File name of the agent's object file.
const OBJECT: &str = "pagefold-agent";

/// Longest time for which a service is asked again and again to end a membership: 30 s.
const SERVICE_TIME: Duration = Duration::from_secs(30);
/// Pause between two such requests to a service that does not answer: 20 ms.
const ASK_AGAIN: Duration = Duration::from_millis(20);

/// Puts the agent into a running process; `pagefold attach` starts it
#[derive(Parser)]
#[command(name = "pagefold-attach", version = cli::version(), after_help = exit::CODES)]
struct Args {
    /// Print which system calls a filter (seccomp) must allow, as JSON, and end
    #[arg(long, exclusive = true)]
    calls: bool,
    #[command(flatten)]
    order: Option<Order>,
}

/// The process, and how it is attached.
#[derive(Clone, clap::Args)]
struct Order {
    /// The process
    #[arg(long)]
    pid: u32,
    /// Its start, in clock ticks after boot: another process with that pid is not meant
    #[arg(long)]
    started: Option<u64>,
    /// The group
    #[arg(long)]
    group: String,
    /// Name of the member
    #[arg(long)]
    name: Option<String>,
    /// Fold all private anonymous memory
    #[arg(long)]
    all_anonymous: bool,
    /// A rule of the service's wants it
    #[arg(long)]
    by_rule: bool,
    /// The merger: an agent, or ksmd
    #[arg(long, default_value = "agent")]
    via: Via,
    /// Have ksmd merge it no longer
    #[arg(long, requires = "via")]
    undo: bool,
    /// Take the place of a program of this kind that was killed beside it
    #[arg(long)]
    again: bool,
    /// Only look
    #[arg(long)]
    dry_run: bool,
    /// Directory of the service
    #[arg(long)]
    dir: PathBuf,
    /// Add to this file how long threads were stopped, each time, in microseconds
    #[arg(long)]
    stops: Option<PathBuf>,
}

/// The program's output, one line of JSON.
#[derive(Serialize)]
struct Attached<'a> {
    pid: u32,
    group: &'a str,
    threads: usize,
    stopped_us: u64,
    enrolled_bytes: u64,
    via: Via,
    groups_hold: bool,
    ksm_pages: Option<u64>,
}

impl<'a> Attached<'a> {
    fn new(args: &'a Order, facts: Facts, stopped: Duration) -> Self {
        let Facts { threads, enrolled_bytes, is_filtered: _ } = facts;
        let stopped_us = u64::try_from(stopped.as_micros()).unwrap_or(u64::MAX);
        let groups_hold = args.via == Via::Agent;
        let ksm_pages = if groups_hold { None } else { ksm::merged_pages(args.pid) };
        let (pid, group, via) = (args.pid, args.group.as_str(), args.via);
        Self { pid, group, threads, stopped_us, enrolled_bytes, via, groups_hold, ksm_pages }
    }
}

fn main() -> ExitCode {
    let Args { calls, order } = Args::parse();
    exit::code_of(|| match &order {
        Some(order) => run(order),
        None if calls => print_calls(),
        None => Err(Stop::Usage("--pid, --group and --dir are needed".into()).into()),
    })
}

/// A system call in the output of `--calls`, for people who write seccomp filters.
#[derive(Serialize)]
struct Called {
    name: &'static str,
    number: i64,
}

fn print_calls() -> anyhow::Result<Outcome> {
    let mut all: Vec<_> = CALLS.iter().map(|call| Called { name: call.name, number: call.number }).collect();
    all.dedup_by_key(|call| call.number);
    output::line(serde_json::to_string(&all)?)?;
    Ok(Outcome::Done)
}

fn run(args: &Order) -> anyhow::Result<Outcome> {
    let process = ProcessId::of(args.pid).map_err(|e| Stop::Usage(format!("there is no process {}: {e}", args.pid)))?;
    if args.started.is_some_and(|started| started != process.start_ticks) {
        return Err(Stop::Usage(format!("process {} has ended, and another one has its pid", args.pid)).into());
    }
    let service = Service::connect(Place::at(&args.dir))?;
    match args.via {
        Via::Agent if args.again => run_again(args, process, service),
        Via::Agent => run_agent(args, process, service),
        Via::Ksm => run_ksm(args, process, &service),
    }
}

/// Has ksmd merge the process's memory; with `--undo`, has ksmd end that.
fn run_ksm(args: &Order, process: ProcessId, service: &Service) -> anyhow::Result<Outcome> {
    if host::Ksm::read().is_none() {
        return Err(Stop::HostLacks("this kernel has no KSM (CONFIG_KSM)".into()).into());
    }
    let cannot = |why: &dyn std::fmt::Display| anyhow::anyhow!("process {} cannot be attached: {why}", args.pid);
    let facts = refuse::check_for_ksm(args.pid).map_err(|why| cannot(&why))?;
    let signals = Signals::catch().context("cannot catch signals")?;
    let mut stopped = Duration::ZERO;
    if args.undo {
        stopped = ksm::set(args.pid, false, &signals, |why| say_and_leave(args.pid, why))?;
        service.leave(process)?;
        return print_attached(args, facts, stopped);
    }
    service.attach(process, &args.group, args.name.as_deref(), args.by_rule, Via::Ksm, args.dry_run)?;
    if !args.dry_run {
        let tell = |why: &anyhow::Error| is_no_member(service, process, why);
        stopped = ksm::set(args.pid, true, &signals, tell)?;
    }
    print_attached(args, facts, stopped)
}

fn print_attached(args: &Order, facts: Facts, stopped: Duration) -> anyhow::Result<Outcome> {
    output::line(serde_json::to_string(&Attached::new(args, facts, stopped))?)?;
    Ok(Outcome::Done)
}

/// Takes the place of a `pagefold-attach` that was killed beside a process with an agent.
fn run_again(args: &Order, process: ProcessId, service: Service) -> anyhow::Result<Outcome> {
    let signals = Signals::catch().context("cannot catch signals")?;
    let _ = rustix::process::setpriority_process(None, NICENESS);
    if !is_there(args.pid) {
        // There is no agent, because the process has executed another program. If it maps nothing of the pool, it is no
        // member any more.
        service.leave(process)?;
        bail!("there is no agent in process {} any more: it is no member", args.pid);
    }
    // If several processes try this at once, the service allows one of them.
    service.attach(process, &args.group, None, args.by_rule, Via::Agent, false)?;
    let tell = |why: &anyhow::Error| say_and_leave(args.pid, why);
    let (injected, all_anonymous) = take_over(args.pid, &signals, tell)
        .with_context(|| format!("the agent in process {} cannot be taken over", args.pid))?;
    let facts = Facts { enrolled_bytes: 0, threads: 0, is_filtered: false };
    let told = print_attached(args, facts, injected.stopped).map(drop);
    let place = service.place.clone();
    drop(service);
    let told = told.and(leave_terminal());
    let args = Order { all_anonymous, ..args.clone() };
    serve(&args, process, &place, injected, &signals).and(told).map(|()| Outcome::Done)
}

/// Puts the agent into the process, and serves it until the process has ended or the agent has left.
fn run_agent(args: &Order, process: ProcessId, service: Service) -> anyhow::Result<Outcome> {
    let refused = |why: String| anyhow::anyhow!("process {} cannot be attached: {why}", args.pid);
    let facts = refuse::check(args.pid, args.all_anonymous).map_err(refused)?;
    refuse::check_userfaultfd()
        .map_err(|why| Stop::HostLacks(format!("process {} cannot be attached: {why}", args.pid)))?;
    if !service.place.prove_socket().exists() {
        bail!(refused(
            "the service has no prover: only root's has one, where the kernel shows reference counts".into()
        ));
    }
    gate::wait_for_library(args.pid);
    let object = read_object(&service.place)?;
    let signals = Signals::catch().context("cannot catch signals")?;
    if facts.is_filtered {
        look_at_filters(args.pid, &signals, |why| say_and_leave(args.pid, why))?;
    }
    if args.dry_run {
        service.attach(process, &args.group, args.name.as_deref(), args.by_rule, Via::Agent, true)?;
        return print_attached(args, facts, Duration::ZERO);
    }
    // While its threads are stopped, the program waits for this process, so this one gets a high priority. Without the
    // right to set it, the program waits a little longer.
    let _ = rustix::process::setpriority_process(None, NICENESS);
    service.attach(process, &args.group, args.name.as_deref(), args.by_rule, Via::Agent, false)?;
    let tell = |why: &anyhow::Error| is_no_member(&service, process, why);
    let injected = inject(args.pid, &object, &environment(args, &service.place)?, &signals, tell)?;
    drop(object);
    // The agent is in the process, even if the report cannot be written.
    let told = serde_json::to_string(&Attached::new(args, facts, injected.stopped))
        .map_err(anyhow::Error::from)
        .and_then(output::line);
    let place = service.place.clone();
    drop(service);
    // The program that started this one waits for its output to end.
    let told = told.and(leave_terminal());
    serve(args, process, &place, injected, &signals).and(told).map(|()| Outcome::Done)
}

/// Says why a process is not attached, and closes this program's standard streams, for whose end `pagefold attach`
/// waits: this program may still have to look after threads of the process, for as long as that takes.
fn say_and_leave(pid: u32, why: &anyhow::Error) {
    exit::say_error(&anyhow::anyhow!("process {pid} cannot be attached: {why:#}"));
    let _ = leave_terminal();
}

/// As [`say_and_leave`], and ends the membership: nothing of the pool is mapped in the process.
fn is_no_member(service: &Service, process: ProcessId, why: &anyhow::Error) {
    let left = service.leave(process);
    say_and_leave(process.pid, left.as_ref().err().unwrap_or(why));
}

/// Stays beside the process until that has ended, or the agent has left it.
fn serve(
    args: &Order,
    process: ProcessId,
    place: &Place,
    mut injected: Injected,
    signals: &Signals,
) -> anyhow::Result<()> {
    if args.stops.is_some() {
        injected.halts.note_stops();
    }
    let stopped = injected.stopped;
    let children = Children::new(process, arguments_for_child(args)?);
    let mut serving = Serving::new(process, place.clone(), injected, children);
    let may_leave = || Service::connect(place.clone()).is_ok_and(|service| service.may_leave(process, false).is_ok());
    let ended = serving.run(signals, may_leave).and_then(|end| match end {
        End::Left => end_membership(place, process, || serving.tend()),
        End::Gone => {
            // The process may have executed another program, which is no member. The service asks the kernel whether it
            // has.
            if process.is_alive() {
                let _ = Service::connect(place.clone()).and_then(|service| service.leave(process));
            }
            Ok(())
        }
    });
    let halts = serving.finish(signals);
    let noted = args.stops.as_ref().map_or(Ok(()), |file| note_stops(file, stopped, halts.stops()));
    ended.and(noted)
}

/// The arguments of `pagefold-attach` for a forked child, without those that name the child. With `--by-rule`, a child
/// that somebody has detached is not attached again.
fn arguments_for_child(args: &Order) -> anyhow::Result<Vec<String>> {
    let dir = std::path::absolute(&args.dir)?;
    let dir = dir.to_str().context("the directory of the service is not text")?;
    let plain = ["--group", &args.group, "--dir", dir, "--by-rule"].map(str::to_owned);
    Ok(plain.into_iter().chain(args.all_anonymous.then(|| "--all-anonymous".to_owned())).collect())
}

/// Ends the membership of a process that the agent has left. A service that is just started anew answers a little
/// later. `meanwhile` is called from time to time.
fn end_membership(place: &Place, process: ProcessId, mut meanwhile: impl FnMut()) -> anyhow::Result<()> {
    let until = Instant::now() + SERVICE_TIME;
    loop {
        match Service::connect(place.clone()).and_then(|service| service.leave(process)) {
            Ok(()) => return Ok(()),
            Err(e) if Instant::now() > until => return Err(e),
            Err(_) => std::thread::sleep(ASK_AGAIN),
        }
        meanwhile();
    }
}

/// Adds to a file how long threads were stopped: a line for each stop, in microseconds.
fn note_stops(path: &Path, first: Duration, others: &[Duration]) -> anyhow::Result<()> {
    let lines: String = [first].iter().chain(others).map(|time| format!("{}\n", time.as_micros())).collect();
    let file = File::options().append(true).create(true).open(path);
    let noted = file.and_then(|mut file| file.write_all(lines.as_bytes()));
    noted.with_context(|| format!("cannot write {}", path.display()))
}

/// The agent's settings, as variables of its environment.
fn environment(args: &Order, place: &Place) -> anyhow::Result<Vec<String>> {
    let socket = std::path::absolute(place.agent_socket())?;
    let socket = socket.to_str().context("the directory of the service is not text")?;
    let mut all = vec![format!("PAGEFOLD_SOCKET={socket}")];
    all.extend(args.all_anonymous.then(|| "PAGEFOLD_ALL=1".to_owned()));
    all.extend(gate::inherited(args.pid).map(|gate| format!("PAGEFOLD_GATE={:x}", gate.0)));
    all.extend(std::env::var_os("PAGEFOLD_EAGER").map(|_| "PAGEFOLD_EAGER=1".to_owned()));
    Ok(all)
}

/// Reads the agent's object file, which is beside this program, in `../lib/pagefold`, or where cargo puts what it
/// builds for musl.
fn read_object(place: &Place) -> anyhow::Result<object::Object> {
    let program = std::env::current_exe().unwrap_or_default();
    let dir = program.parent().unwrap_or(Path::new("/"));
    let kind = dir.file_name().unwrap_or_default();
    let built = dir.join("../x86_64-unknown-linux-musl").join(kind);
    let places = [dir.join(OBJECT), dir.join("../lib/pagefold").join(OBJECT), built.join(OBJECT)];
    let Some(found) = places.iter().find(|path| path.is_file()) else {
        let places: Vec<_> = places.iter().map(|path| path.display().to_string()).collect();
        let missing = format!("{OBJECT} is missing: it should be {}; build it with ./x build", places.join(" or "));
        return Err(Stop::HostLacks(missing).into());
    };
    let bytes = fs::read(found).with_context(|| format!("cannot read {}", found.display()))?;
    Object::read(&bytes, place).with_context(|| format!("{} is not the agent", found.display()))
}

fn leave_terminal() -> anyhow::Result<()> {
    let nothing = File::options().read(true).write(true).open("/dev/null").context("cannot open /dev/null")?;
    rustix::stdio::dup2_stdin(&nothing)?;
    rustix::stdio::dup2_stdout(&nothing)?;
    rustix::stdio::dup2_stderr(&nothing)?;
    Ok(())
}
