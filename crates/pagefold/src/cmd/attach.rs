//! `pagefold attach`, `pagefold detach`: make a running process a member of a group, and end that again.

mod left;
mod vms;

use crate::cmd::enrol::program;
use crate::cmd::which::Which;
use anyhow::{Context, bail};
use api::ask::MemberLine;
use api::client::Service;
use api::control::Identity;
use api::enrol::{Rule, Via};
use api::name;
use cli::exit::{Outcome, Stop};
use cli::{output, say};
use enrol::attach::{Attached, Order, PROGRAM, Refused};
use enrol::decide::Rules;
use enrol::facts::{Facts, Looker};
use guest::Survey;
use host::{Ksm, Mapping, ProcessId};
use serde::Serialize;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time between two questions to the service whether a process has been detached: 50 ms. Time between two checks
/// whether its `pagefold-attach` has ended: 10 ms.
const ASK: Duration = Duration::from_millis(50);
const LOOK: Duration = Duration::from_millis(10);
/// Most bytes of a program's file in which the name `mremap` is searched: 256 MiB.
const MOST_PROGRAM_BYTES: u64 = 256 << 20;
/// Longest wait for the end of the `pagefold-attach` beside a process that has been detached: 10 s.
const LINGERS: Duration = Duration::from_secs(10);

/// Arguments of `pagefold attach`.
#[derive(clap::Args)]
#[command(after_help = "\
The process is not started anew, and need not have been started in any special way. One of its threads is
stopped for less than a millisecond, or for some on a busy host, and puts a thread of the agent's beside
the program's own.
While pages are being folded, all threads are stopped for some milliseconds at a time, one part
in 20 at most, one in 3 while the program sleeps or is detached.

You must be allowed to trace the process, and to use the group. A program pagefold-attach stays beside
it until it ends or is detached. Root's service is needed (pagefold serve).

With --via ksm, no agent is put there: a thread makes one system call, and ksmd, the kernel's own merger,
merges all memory of the process. It knows no groups, so the service's configuration must say that this
host is one trust domain. Programs that filter system calls can be attached this way, by root.

Examples:
  pagefold attach 1234 --group acme --all-anonymous
  pagefold attach 1234 --group acme --dry-run --json
  pagefold attach --guest vm7 --group acme
  pagefold attach --cgroup /system.slice/acme.service --group acme --all-anonymous
  pagefold attach --container web --group acme --all-anonymous
  pagefold attach 1234 --group acme --via ksm
  pagefold detach 1234
  pagefold detach --container web")]
pub struct AttachArgs {
    /// The processes
    #[arg(required_unless_present_any = ["guest", "cgroup", "container"], value_name = "PID")]
    pids: Vec<u32>,
    /// A VM, by its name or id (see pagefold guests): its RAM is folded, and nothing else of its process
    #[arg(long, value_name = "NAME", conflicts_with_all = ["pids", "cgroup", "container", "all_anonymous"])]
    guest: Option<String>,
    #[command(flatten)]
    place: Place,
    /// Only the processes that run: with --cgroup and --container, the service also attaches those that start later
    #[arg(long)]
    once: bool,
    /// Of a control group or a container, only processes with so much private memory: each costs a program beside it
    #[arg(long, value_name = "SIZE", default_value = "4M", value_parser = cli::size::parse_bytes)]
    at_least: u64,
    /// The group: its members share pages with each other and with nobody else
    #[arg(long, value_name = "GROUP", value_parser = name::parse_group)]
    group: String,
    /// Name of the member in its group [default: the program's name and pid]
    #[arg(long, value_name = "NAME", value_parser = name::parse_member)]
    name: Option<String>,
    /// Fold all private anonymous memory (heap, arenas, large mappings), and not only what the program advises
    #[arg(long)]
    all_anonymous: bool,
    /// The merger: agent, or ksm for the kernel's own, which takes all memory and knows no groups
    #[arg(long, value_name = "MERGER", default_value = "agent")]
    via: Via,
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
files are gone afterwards. No rule attaches these processes again. In a program that pagefold run has
started, the library stays. With --cgroup and --container, the rule that pagefold attach had added is
dropped, and those processes are detached that were attached. Of a process that ksmd merges, all of its
memory is merged no longer, also what the program itself had advised. Children that it has
forked are detached by themselves.

Examples:
  pagefold detach 1234
  pagefold detach --container web")]
pub struct DetachArgs {
    /// The processes
    #[arg(required_unless_present_any = ["cgroup", "container"], value_name = "PID")]
    pids: Vec<u32>,
    #[command(flatten)]
    place: Place,
    /// Longest time to wait for each
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    wait: u64,
    #[command(flatten)]
    service: Which,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A process that was detached.
#[derive(Serialize)]
struct Detached {
    /// The process.
    pid: u32,
    /// The group that it was a member of.
    group: String,
    /// Places where neighbouring mappings are alike and apart. The kernel joins none that a process has moved (`mremap`,
    /// `realloc`) or has from its parent.
    seams: usize,
}

impl Detached {
    fn in_words(&self) -> String {
        let Self { pid, group, seams } = self;
        let how = match seams {
            0 => "and is as it was before".to_owned(),
            n => format!(
                "and its memory is as it was before; in {n} places neighbouring mappings are alike and stay apart, as the kernel joins \
                 none that a process has moved or has from its parent"
            ),
        };
        format!("process {pid} has left group {group}, {how}")
    }
}

/// A control group or a container, all of whose processes are meant.
#[derive(clap::Args)]
struct Place {
    /// All processes in this control group, and in those below it; each part of the path may have * and ?
    #[arg(long, value_name = "PATH", conflicts_with = "pids", value_parser = parse_cgroup)]
    cgroup: Option<String>,
    /// All processes in this container (see pagefold guests)
    #[arg(long, value_name = "NAME", conflicts_with_all = ["pids", "cgroup"])]
    container: Option<String>,
}

fn parse_cgroup(path: &str) -> Result<String, String> {
    let is_path = path.starts_with('/') && path.len() > 1;
    is_path.then(|| path.trim_end_matches('/').to_owned()).ok_or_else(|| "use a path such as /system.slice/x".into())
}

impl Place {
    const fn is_given(&self) -> bool {
        self.cgroup.is_some() || self.container.is_some()
    }

    fn rule(&self) -> Rule {
        Rule { cgroup: self.cgroup.clone(), container: self.container.clone(), ..Rule::default() }
    }

    /// The processes in the control group or container.
    fn processes(&self) -> anyhow::Result<Vec<Facts>> {
        let (rules, mut looker) = (Rules::new(vec![self.rule()]), Looker::of_caller());
        let all = host::pids()?.into_iter().filter_map(|pid| looker.look(pid, rules.want_names()));
        let found: Vec<Facts> = all.filter(|facts| rules.fit(facts)).collect();
        if found.is_empty() {
            return Err(Stop::Usage(format!("no process is in {}: see pagefold guests", self.rule())).into());
        }
        Ok(found)
    }
}

impl AttachArgs {
    /// The pids of the processes to attach. Processes of a control group or container with less memory than
    /// `--at-least` are left alone, and named on stderr.
    fn pids(&self) -> anyhow::Result<Vec<u32>> {
        if let Some(name) = &self.guest {
            let is_it = |guest: &guest::Guest| guest.kind.is_vm() && (guest.name == *name || guest.id == *name);
            let found = Survey::take()?.guests(&[], &[]).into_iter().filter(is_it).collect::<Vec<_>>();
            return match found.as_slice() {
                [guest] => Ok(guest.pids.clone()),
                [] => Err(Stop::Usage(format!("there is no VM {name} here: see pagefold guests")).into()),
                _ => Err(Stop::Usage(format!("several VMs are named {name}: give one's id")).into()),
            };
        }
        if !self.place.is_given() {
            return Ok(self.pids.clone());
        }
        let (found, small): (Vec<Facts>, Vec<Facts>) =
            self.place.processes()?.into_iter().partition(|facts| facts.private_bytes >= self.at_least);
        for Facts { pid, program, private_bytes, .. } in small {
            let [has, least] = [private_bytes, self.at_least].map(cli::bytes);
            say!(
                "pagefold: process {pid} ({program}) is left alone: it has {has} of private memory, less than {least}"
            );
        }
        Ok(found.into_iter().map(|facts| facts.pid).collect())
    }

    /// Adds a rule to the service, by which it attaches processes that start later in the same control group or
    /// container.
    fn enrol_later(&self, service: &Service) -> anyhow::Result<()> {
        let rule = Rule {
            group: self.group.clone(),
            all_anonymous: self.all_anonymous,
            via: self.via,
            at_least_bytes: self.at_least,
            ..self.place.rule()
        };
        service.add_rule(rule).context("processes that start there later are not attached")
    }
}

/// Attaches processes.
pub fn attach(args: &AttachArgs) -> anyhow::Result<Outcome> {
    let pids = args.pids()?;
    if args.via == Via::Agent {
        vms::say_what_is_left(&pids)?;
    }
    if args.name.is_some() && pids.len() > 1 {
        return Err(Stop::Usage("--name is for one process".into()).into());
    }
    let service = Service::find(&args.service.meant())?.into_iter().next();
    let service = service.context("no service answers: attaching takes root's, see pagefold serve")?;
    let (mut all, mut outcome) = (Vec::new(), Outcome::Done);
    let program = program()?;
    if args.via == Via::Ksm {
        say_whether_ksmd_runs()?;
    }
    for pid in pids {
        match attach_one(args, pid, &service, &program)? {
            Ok(attached) => {
                if args.all_anonymous && args.via == Via::Agent && has_own_mremap(pid) {
                    say!("pagefold: process {pid} may call mremap: where memory is folded, EFAULT, or SIGBUS later");
                }
                all.push(attached);
            }
            Err(refused) if refused.host_lacks => return Err(Stop::HostLacks(refused.why).into()),
            // A process of a control group or container may have ended meanwhile, which is no usage error.
            Err(refused) if refused.is_usage && !args.place.is_given() => return Err(Stop::Usage(refused.why).into()),
            Err(refused) => {
                say!("pagefold: process {pid} cannot be attached: {}", refused.why);
                outcome = Outcome::Partial;
            }
        }
    }
    let is_rule = args.place.is_given() && !args.once && !args.dry_run;
    let later = if is_rule { args.enrol_later(&service) } else { Ok(()) };
    if args.json {
        output::line(serde_json::to_string_pretty(&all)?)?;
    } else {
        all.iter().try_for_each(|attached| output::line(in_words(attached, args.dry_run)))?;
    }
    later.map(|()| outcome)
}

fn in_words(attached: &Attached, dry_run: bool) -> String {
    let Attached { pid, group, threads, stopped_us, enrolled_bytes, groups_hold, .. } = attached;
    let size = cli::size::bytes(*enrolled_bytes);
    let whom =
        if *groups_hold { "" } else { "; ksmd merges it with any process that asked for that: groups do not hold" };
    if dry_run {
        return format!("process {pid} ({threads} threads) can be attached to group {group}: {size}{whom}");
    }
    let stopped = format!("a thread was stopped for {stopped_us} us");
    format!("process {pid} ({threads} threads) is a member of group {group}: {size}; {stopped}{whom}")
}

/// Whether a process may call `mremap` other than through a C library that it has loaded: the agent intercepts only
/// calls through such a library. The file of a statically linked program names its functions, if it was not stripped.
fn has_own_mremap(pid: u32) -> bool {
    // Linkers may store the name `mremap` as the end of `__mremap`, so the byte before it is not looked at.
    const NAME: &[u8] = b"mremap\0";
    let mappings = Mapping::list(pid).unwrap_or_default();
    if mappings.iter().any(Mapping::is_c_library) {
        return false;
    }
    // A file on a file system whose server may not answer is not read: the program may have a call of its own.
    let program = fs::read_link(host::proc_file(pid, "exe")).unwrap_or_default();
    let local = host::LocalFiles::of(pid);
    if !mappings.iter().any(|mapping| program == Path::new(&mapping.name) && local.hold(mapping)) {
        return true;
    }
    let mut bytes = Vec::new();
    let read =
        File::open(host::proc_file(pid, "exe")).and_then(|file| file.take(MOST_PROGRAM_BYTES).read_to_end(&mut bytes));
    read.is_ok() && bytes.windows(NAME.len()).any(|some| some == NAME)
}

/// Prints a remark if ksmd does not run. Whether it runs is for the operator to decide.
///
/// # Errors
/// The kernel has no KSM.
pub fn say_whether_ksmd_runs() -> anyhow::Result<()> {
    let Some(ksm) = Ksm::read() else {
        return Err(Stop::HostLacks("this kernel has no KSM (CONFIG_KSM)".into()).into());
    };
    if ksm.run != 1 {
        say!("pagefold: ksmd does not run, and nothing is merged until root writes 1 to /sys/kernel/mm/ksm/run");
    }
    Ok(())
}

fn attach_one(
    args: &AttachArgs,
    pid: u32,
    service: &Service,
    program: &Path,
) -> anyhow::Result<Result<Attached, Refused>> {
    let process = ProcessId::of(pid).map_err(|e| Stop::Usage(format!("there is no process {pid}: {e}")))?;
    let is_vm = host::Process::read_without_arguments(pid).is_ok_and(|process| guest::is_vm(&process));
    let order = Order {
        process,
        group: args.group.clone(),
        name: args.name.clone(),
        // For a VM in a container, only guest RAM is folded.
        all_anonymous: args.all_anonymous && !(args.place.is_given() && is_vm),
        by_rule: false,
        dry_run: args.dry_run,
        via: args.via,
        undo: false,
        again: false,
    };
    order.carry_out(program, service.place.dir())
}

impl DetachArgs {
    /// The pids of the processes to detach. In a control group or container, these are the processes that were
    /// attached.
    fn meant(&self, services: &[Service], members: &[(&Service, MemberLine)]) -> anyhow::Result<Vec<u32>> {
        if !self.place.is_given() {
            return Ok(self.pids.clone());
        }
        let Place { cgroup, container } = &self.place;
        let mut dropped = services.iter().map(|service| service.drop_rules(cgroup.clone(), container.clone()));
        // Only root's error counts: another user may not drop rules, and so has added none.
        if let Some(e) = dropped.find_map(Result::err).filter(|_| api::place::own_uid() == 0) {
            return Err(e);
        }
        let is_attached =
            |facts: &Facts| members.iter().any(|(_, member)| member.identity.pid == facts.pid && member.was_attached());
        Ok(self.place.processes()?.iter().filter(|facts| is_attached(facts)).map(|facts| facts.pid).collect())
    }
}

/// Detaches processes.
pub fn detach(args: &DetachArgs) -> anyhow::Result<Outcome> {
    let services = Service::find(&args.service.meant())?;
    let mut members = Vec::new();
    for service in &services {
        members.extend(service.members()?.into_iter().map(|member| (service, member)));
    }
    let (mut all, mut outcome) = (Vec::new(), Outcome::Done);
    for pid in &args.meant(&services, &members)? {
        let found = members.iter().find(|(_, member)| member.identity.pid == *pid);
        let Some((service, member)) = found else {
            return Err(Stop::Usage(format!("process {pid} is no member: see pagefold group show")).into());
        };
        match leave(service, member, Duration::from_secs(args.wait)) {
            Ok(()) => all.push(Detached { pid: *pid, group: member.group.clone(), seams: left::seams(*pid) }),
            Err(e) => {
                say!("pagefold: {e:#}");
                outcome = Outcome::Partial;
            }
        }
    }
    if args.json {
        output::line(serde_json::to_string_pretty(&all)?)?;
    } else {
        all.iter().try_for_each(|detached| output::line(detached.in_words()))?;
    }
    Ok(outcome)
}

/// Ends the membership of a process. Waits for `patience` at most until an agent in it has made all folded pages
/// private.
///
/// # Errors
/// The service refuses, or the process still has folded pages when the time is over.
pub fn leave(service: &Service, member: &MemberLine, patience: Duration) -> anyhow::Result<()> {
    let process = ProcessId { pid: member.identity.pid, start_ticks: member.identity.started };
    service.may_leave(process, true)?;
    match (member.via, member.attached_by) {
        (Via::Agent, Some(helper)) => detach_one(service, process, helper, patience),
        (Via::Agent, None) => take_out(service, process, patience),
        (Via::Ksm, _) => undo_ksm(service, process, &member.group),
    }
}

/// Waits until the agent of a process that was started as a member has made all folded pages private and has ended.
/// Then ends the membership.
fn take_out(service: &Service, process: ProcessId, patience: Duration) -> anyhow::Result<()> {
    let pid = process.pid;
    let until = Instant::now() + patience;
    let mut progress = left::Progress::new(pid);
    while process.is_alive() && (left::has_agent(pid) || progress.left_bytes() > 0) {
        progress.look();
        if Instant::now() > until {
            bail!(
                "process {pid} is a member yet, and {} of it map the pool: something holds pages that are folded, or nobody knows where \
                 they lie (pagefold group show has the member's state)",
                cli::bytes(progress.left_bytes())
            );
        }
        std::thread::sleep(ASK);
    }
    service.leave(process)
}

/// Makes ksmd stop merging a process, and ends the membership.
fn undo_ksm(service: &Service, process: ProcessId, group: &str) -> anyhow::Result<()> {
    let (group, via) = (group.to_owned(), Via::Ksm);
    let (all_anonymous, by_rule, dry_run, undo, again) = (false, false, false, true, false);
    let order = Order { process, group, name: None, all_anonymous, by_rule, dry_run, via, undo, again };
    let refused = order.carry_out(&program()?, service.place.dir())?.err();
    refused.map_or(Ok(()), |refused| bail!("process {} is not detached: {}", process.pid, refused.why))
}

fn detach_one(service: &Service, process: ProcessId, helper: u32, patience: Duration) -> anyhow::Result<()> {
    let pid = process.pid;
    let gone =
        || format!("the program beside process {pid} is gone: the service starts another one soon; then try again");
    let helper = ProcessId::of(helper).with_context(gone)?;
    if host::Process::read(helper.pid).is_ok_and(|process| process.program() != PROGRAM) {
        bail!(gone());
    }
    if !helper.terminate() {
        bail!("you may not detach process {pid}: another user has attached it");
    }
    let until = Instant::now() + patience;
    let (mut left, mut progress) = (None, left::Progress::new(pid));
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
        progress.look();
        if Instant::now() > until {
            bail!(
                "process {pid} is not detached yet, {} still map the pool: {}. If nothing can be made private for half a minute, it \
                 stays a member: then try again",
                cli::bytes(progress.left_bytes()),
                hindrance(pid)
            );
        }
        std::thread::sleep(if left.is_some() { LOOK } else { ASK });
    }
    Ok(())
}

/// Why a process is not detached yet, as far as its `/proc` files show it.
fn hindrance(pid: u32) -> String {
    act::trace::sharer_of_memory(pid).map_or_else(
        || "something holds pages that are folded, or its threads cannot be stopped".to_owned(),
        |other| format!("process {other} shares its memory and changes it all the time: suspend it (kill -STOP {other}) for some seconds"),
    )
}

fn is_member(service: &Service, process: ProcessId) -> anyhow::Result<bool> {
    let is_it = |identity: &Identity| (identity.pid, identity.started) == (process.pid, process.start_ticks);
    Ok(service.members()?.iter().any(|member| is_it(&member.identity)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Read;
    use std::process::{Command, Stdio};

    #[test]
    fn program_with_mremap_of_its_own_is_told_from_others() {
        const WAITS: &str = "#include <stdio.h>\n#include <sys/mman.h>\n\
            int main() { puts(\"here\"); fflush(stdout); return getchar() - (mremap(0, 0, 0, 0) != 0); }";
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("waits.c");
        fs::write(&source, format!("#define _GNU_SOURCE\n{WAITS}\n")).unwrap();
        for (flag, is_own) in [("-static", true), ("-rdynamic", false)] {
            let program = dir.path().join("waits");
            let made = Command::new("cc").args([flag, "-o"]).args([&program, &source]).status().unwrap();
            assert!(made.success());
            let mut waits = Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            // Once it has printed this word, it has been executed, and has loaded its libraries.
            let mut said = [0; 5];
            waits.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
            assert_eq!(has_own_mremap(waits.id()), is_own, "{flag}");
            drop(waits.stdin.take());
            waits.wait().unwrap();
        }
    }
}
