//! `pagefold-attach`: makes one running process a member of a group, and stays beside it until it ends or is detached.
//! `pagefold attach` starts it, with the rights of whoever calls that. It writes one line of JSON to its standard
//! output.
#![forbid(unsafe_code)]

use anyhow::{Context, bail};
use api::client::Service;
use api::place::Place;
use attach::inject::inject;
use attach::object::Object;
use attach::serve::{End, Serving};
use attach::{object, refuse};
use clap::Parser;
use cli::exit::{self, Outcome, Stop};
use cli::output;
use host::{ProcessId, Signals};
use serde::Serialize;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// File name of the agent.
const OBJECT: &str = "pagefold-agent";

/// Niceness of this program.
const PRIORITY: i32 = -15;

/// Puts the agent into a running process; `pagefold attach` starts it
#[derive(Parser)]
#[command(version, after_help = exit::CODES)]
struct Args {
    /// The process
    #[arg(long)]
    pid: u32,
    /// The group
    #[arg(long)]
    group: String,
    /// Name of the member
    #[arg(long)]
    name: Option<String>,
    /// Fold all private anonymous memory
    #[arg(long)]
    all_anonymous: bool,
    /// Only look
    #[arg(long)]
    dry_run: bool,
    /// Directory of the service
    #[arg(long)]
    dir: PathBuf,
}

/// What was done.
#[derive(Serialize)]
struct Attached<'a> {
    pid: u32,
    group: &'a str,
    threads: usize,
    stopped_us: u64,
    enrolled_bytes: u64,
}

fn main() -> ExitCode {
    let args = Args::parse();
    exit::code_of(|| run(&args))
}

fn run(args: &Args) -> anyhow::Result<Outcome> {
    let process = ProcessId::of(args.pid).map_err(|e| Stop::Usage(format!("there is no process {}: {e}", args.pid)))?;
    let refused = |why: String| anyhow::anyhow!("process {} cannot be attached: {why}", args.pid);
    let facts = refuse::check(args.pid, args.all_anonymous).map_err(refused)?;
    let said = |stopped_us| Attached {
        pid: args.pid,
        group: &args.group,
        threads: facts.threads,
        stopped_us,
        enrolled_bytes: facts.enrolled_bytes,
    };
    let service = Service::connect(Place::at(&args.dir))?;
    if !service.place.prove_socket().exists() {
        bail!(refused(
            "the service has no prover: only root's has one, where the kernel shows reference counts".into()
        ));
    }
    let object = read_object()?;
    if args.dry_run {
        output::line(serde_json::to_string(&said(0))?)?;
        return Ok(Outcome::Done);
    }
    // The program waits for this one while its threads are stopped. Without the right to that, it waits a little longer.
    let _ = rustix::process::setpriority_process(None, PRIORITY);
    let signals = Signals::catch().context("cannot catch signals")?;
    service.attach(process, &args.group, args.name.as_deref())?;
    let injected = match inject(args.pid, &object, &environment(args, &service.place)?) {
        Ok(injected) => injected,
        Err(e) => {
            // It is no member: nothing of the pool is mapped there.
            service.leave(process)?;
            return Err(e.context(format!("process {} cannot be attached", args.pid)));
        }
    };
    let stopped_us = u64::try_from(injected.stopped.as_micros()).unwrap_or(u64::MAX);
    let serving = Serving::new(process, injected);
    output::line(serde_json::to_string(&said(stopped_us))?)?;
    let place = service.place.clone();
    // Whoever started this program waits for its output to end.
    drop(service);
    leave_terminal()?;
    let may_leave = || Service::connect(place.clone()).is_ok_and(|service| service.may_leave(process).is_ok());
    if serving.run(&signals, may_leave)? == End::Left {
        Service::connect(place)?.leave(process)?;
    }
    Ok(Outcome::Done)
}

/// The agent's settings.
fn environment(args: &Args, place: &Place) -> anyhow::Result<Vec<String>> {
    let socket = std::path::absolute(place.agent_socket())?;
    let socket = socket.to_str().context("the directory of the service is not text")?;
    let most_vmas = fs::read_to_string("/proc/sys/vm/max_map_count").ok().and_then(|text| text.trim().parse().ok());
    let mut all = vec![
        format!("PAGEFOLD_SOCKET={socket}"),
        format!("PAGEFOLD_VMA_BUDGET={}", most_vmas.unwrap_or(65530_u64) / 2),
    ];
    all.extend(args.all_anonymous.then(|| "PAGEFOLD_ALL=1".to_owned()));
    all.extend(std::env::var_os("PAGEFOLD_EAGER").map(|_| "PAGEFOLD_EAGER=1".to_owned()));
    Ok(all)
}

/// Reads the agent, which lies beside this program, or where cargo puts what is built for its target.
fn read_object() -> anyhow::Result<object::Object> {
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
    Object::parse(&bytes).with_context(|| format!("{} is not the agent", found.display()))
}

fn leave_terminal() -> anyhow::Result<()> {
    let nothing = File::options().read(true).write(true).open("/dev/null").context("cannot open /dev/null")?;
    rustix::stdio::dup2_stdin(&nothing)?;
    rustix::stdio::dup2_stdout(&nothing)?;
    rustix::stdio::dup2_stderr(&nothing)?;
    Ok(())
}
