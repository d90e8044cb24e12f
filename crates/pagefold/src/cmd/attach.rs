//! `pagefold attach`, `pagefold detach`: make a running process a member of a group, and end that again.

use crate::cmd::which::Which;
use anyhow::{Context, bail};
use api::client::Service;
use api::control::Identity;
use api::name;
use cli::exit::{Outcome, Stop};
use cli::{output, say};
use guest::Survey;
use host::{Cgroups, ProcessId};
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The program that puts agents into processes.
const PROGRAM: &str = "pagefold-attach";
/// Time between two questions whether a process has been detached, and between two looks whether the program beside it
/// has ended: 50 ms, 10 ms.
const ASK: Duration = Duration::from_millis(50);
const LOOK: Duration = Duration::from_millis(10);
/// Longest time to wait for the program beside a process that has been detached: 10 s.
const LINGERS: Duration = Duration::from_secs(10);

/// Arguments of `pagefold attach`.
#[derive(clap::Args)]
#[command(after_help = "\
The process is not started anew, and need not have been started in any special way. One of its threads is
stopped for less than a millisecond, and puts a thread of the agent's beside the program's own.
While pages are being folded, all threads are stopped for some milliseconds at a time, one part
in 20 at most.

You must be allowed to trace the process, and to use the group. A program pagefold-attach stays beside
it until it ends or is detached. Root's service is needed (pagefold serve).

Examples:
  pagefold attach 1234 --group acme --all-anonymous
  pagefold attach 1234 --group acme --dry-run --json
  pagefold attach --guest vm7 --group acme
  pagefold attach --cgroup /system.slice/acme.service --group acme --all-anonymous
  pagefold detach 1234")]
pub struct AttachArgs {
    /// The processes
    #[arg(required_unless_present_any = ["guest", "cgroup"], value_name = "PID")]
    pids: Vec<u32>,
    /// A VM, by its name or id (see pagefold guests): its RAM is folded, and nothing else of its process
    #[arg(long, value_name = "NAME", conflicts_with_all = ["pids", "cgroup", "all_anonymous"])]
    guest: Option<String>,
    /// All processes in this control group, and in those below it
    #[arg(long, value_name = "PATH", conflicts_with = "pids")]
    cgroup: Option<String>,
    /// The group: its members share pages with each other and with nobody else
    #[arg(long, value_name = "GROUP", value_parser = name::parse_group)]
    group: String,
    /// Name of the member in its group [default: the program's name and pid]
    #[arg(long, value_name = "NAME", value_parser = name::parse_member)]
    name: Option<String>,
    /// Fold all private anonymous memory (heap, arenas, large mappings), and not only what the program advises
    #[arg(long)]
    all_anonymous: bool,
    /// Only say what would be done, and what is against it
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    service: Which,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `pagefold detach`.
#[derive(clap::Args)]
#[command(after_help = "\
Everything that is folded becomes private again, which takes memory. The agent's threads, mappings and
files are gone afterwards.

Example:
  pagefold detach 1234")]
pub struct DetachArgs {
    /// The processes
    #[arg(required = true, value_name = "PID")]
    pids: Vec<u32>,
    /// Longest time to wait for each
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    wait: u64,
    #[command(flatten)]
    service: Which,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A process that was attached, as `pagefold-attach` and `--json` say it.
#[derive(Serialize, Deserialize)]
struct Attached {
    pid: u32,
    group: String,
    threads: usize,
    stopped_us: u64,
    enrolled_bytes: u64,
}

/// A process that was detached.
#[derive(Serialize)]
struct Detached {
    pid: u32,
    group: String,
}

impl AttachArgs {
    /// The processes that are meant.
    fn pids(&self) -> anyhow::Result<Vec<u32>> {
        let pids = if let Some(name) = &self.guest {
            let is_it = |guest: &guest::Guest| guest.kind.is_vm() && (guest.name == *name || guest.id == *name);
            let found = Survey::take()?.guests(&[], &[]).into_iter().filter(is_it).collect::<Vec<_>>();
            match found.as_slice() {
                [guest] => guest.pids.clone(),
                [] => return Err(Stop::Usage(format!("there is no VM {name} here: see pagefold guests")).into()),
                _ => return Err(Stop::Usage(format!("several VMs are named {name}: give one's id")).into()),
            }
        } else if let Some(path) = &self.cgroup {
            let all = Survey::take()?.processes;
            all.into_iter().filter(|process| is_below(&process.cgroups, path)).map(|process| process.pid).collect()
        } else {
            self.pids.clone()
        };
        if pids.is_empty() {
            let path = self.cgroup.as_deref().unwrap_or_default();
            return Err(Stop::Usage(format!("no process is in control group {path}, or below it")).into());
        }
        Ok(pids)
    }
}

/// Whether a process is in this control group, or in one below it.
fn is_below(cgroups: &Cgroups, path: &str) -> bool {
    let path = path.trim_end_matches('/');
    cgroups.paths().any(|its| its.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
}

/// Attaches processes.
pub fn attach(args: &AttachArgs) -> anyhow::Result<Outcome> {
    let pids = args.pids()?;
    if args.name.is_some() && pids.len() > 1 {
        return Err(Stop::Usage("--name is for one process".into()).into());
    }
    let service = Service::find(&args.service.meant())?.into_iter().next();
    let service = service.context("no service answers: attaching takes root's, see pagefold serve")?;
    let mut all = Vec::new();
    let mut outcome = Outcome::Done;
    for pid in pids {
        match attach_one(args, pid, &service)? {
            Some(attached) => all.push(attached),
            None => outcome = Outcome::Partial,
        }
    }
    if args.json {
        output::line(serde_json::to_string_pretty(&all)?)?;
        return Ok(outcome);
    }
    for Attached { pid, group, threads, stopped_us, enrolled_bytes } in all {
        let size = cli::size::bytes(enrolled_bytes);
        if args.dry_run {
            output::line(format!("process {pid} ({threads} threads) can be attached to group {group}: {size}"))?;
        } else {
            let stopped = format!("a thread was stopped for {stopped_us} us");
            output::line(format!("process {pid} ({threads} threads) is a member of group {group}: {size}; {stopped}"))?;
        }
    }
    Ok(outcome)
}

/// `None` if it is refused; the reason was said then.
fn attach_one(args: &AttachArgs, pid: u32, service: &Service) -> anyhow::Result<Option<Attached>> {
    let program = service::helper::program(PROGRAM).map_err(|e| Stop::HostLacks(format!("{PROGRAM}: {e}")))?;
    let mut command = Command::new(&program);
    command.args(["--pid", &pid.to_string(), "--group", &args.group]).arg("--dir").arg(service.place.dir());
    command.args(args.name.iter().flat_map(|name| ["--name", name]));
    command.args(args.all_anonymous.then_some("--all-anonymous")).args(args.dry_run.then_some("--dry-run"));
    // It goes on when this program has ended, and an interrupt at the terminal is not meant for it.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
    let mut child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
    let mut text = String::new();
    child.stdout.take().context("no output")?.read_to_string(&mut text)?;
    if text.is_empty() {
        let status = child.wait()?;
        if status.code() == Some(i32::from(cli::exit::Code::HostLacks as u8)) {
            return Err(Stop::HostLacks(format!("process {pid} is not attached")).into());
        }
        return Ok(None);
    }
    serde_json::from_str(&text).map(Some).context("pagefold-attach says something else than was asked")
}

/// Detaches processes.
pub fn detach(args: &DetachArgs) -> anyhow::Result<Outcome> {
    let services = Service::find(&args.service.meant())?;
    let mut members = Vec::new();
    for service in &services {
        members.extend(service.members()?.into_iter().map(|member| (service, member)));
    }
    let mut all = Vec::new();
    let mut outcome = Outcome::Done;
    for pid in &args.pids {
        let found = members.iter().find(|(_, member)| member.identity.pid == *pid);
        let Some((service, member, helper)) =
            found.and_then(|(service, member)| Some((service, member, member.attached_by?)))
        else {
            return Err(Stop::Usage(format!("process {pid} was not attached: see pagefold attach")).into());
        };
        let process = ProcessId { pid: *pid, start_ticks: member.identity.started };
        let may_leave = service.may_leave(process);
        match may_leave.and_then(|()| detach_one(service, process, helper, Duration::from_secs(args.wait))) {
            Ok(()) => all.push(Detached { pid: *pid, group: member.group.clone() }),
            Err(e) => {
                say!("pagefold: {e:#}");
                outcome = Outcome::Partial;
            }
        }
    }
    if args.json {
        output::line(serde_json::to_string_pretty(&all)?)?;
    } else {
        for Detached { pid, group } in &all {
            output::line(format!("process {pid} has left group {group}, and is as it was before"))?;
        }
    }
    Ok(outcome)
}

fn detach_one(service: &Service, process: ProcessId, helper: u32, patience: Duration) -> anyhow::Result<()> {
    let pid = process.pid;
    let gone = || format!("the program beside process {pid} is gone: what is folded there stays so until it ends");
    let helper = ProcessId::of(helper).with_context(gone)?;
    if host::Process::read(helper.pid).is_ok_and(|process| process.program() != PROGRAM) {
        bail!(gone());
    }
    if !helper.terminate() {
        bail!("you may not detach process {pid}: another user has attached it");
    }
    let until = Instant::now() + patience;
    let mut left = None;
    while helper.is_alive() {
        if left.is_none() && !is_member(service, process)? {
            left = Some(Instant::now());
        }
        if left.is_some_and(|left| left.elapsed() > LINGERS) {
            say!(
                "pagefold: threads of process {pid} wait in system calls that were begun again; process {} traces \
                 them until these calls end",
                helper.pid
            );
            return Ok(());
        }
        if Instant::now() > until {
            bail!(
                "process {pid} is not detached yet: something holds pages that are folded, or its threads cannot be \
                 stopped; the agent goes on trying"
            );
        }
        std::thread::sleep(if left.is_some() { LOOK } else { ASK });
    }
    Ok(())
}

fn is_member(service: &Service, process: ProcessId) -> anyhow::Result<bool> {
    let is_it = |identity: &Identity| (identity.pid, identity.started) == (process.pid, process.start_ticks);
    Ok(service.members()?.iter().any(|member| is_it(&member.identity)))
}
