//! Pagefold as a merger: a service that the run starts, with the groups of the study.

use super::payers::{Cpu, Payer, Payers};
use super::{program, wait};
use anyhow::bail;
use api::ask::GroupState;
use api::change::{Change, ScanRate};
use api::client::Service;
use api::control::{Fold, ZeroPolicy};
use api::place::Place;
use bench::{Guardian, Serving, prover_of};
use host::{ProcessId, ThreadCpu};
use page::PAGE_BYTES;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Name of the agent's threads in the members' processes.
const AGENT: &str = "pagefold";
/// Time limit for members to connect.
const PATIENCE: Duration = Duration::from_secs(20);

/// Time limit for all pages to be private again after folding is undone.
const UNFOLDED: Duration = Duration::from_secs(60);

/// A group of the service, with its settings.
#[derive(Clone, Debug)]
pub struct Group {
    /// Name of the group.
    pub name: &'static str,
    /// Pages that may be fingerprinted a second; `None`: without a limit.
    pub scan_rate: Option<u32>,
    /// Most processor time in percent of a processor, if the scan rate follows its yield; `None` if it does not.
    pub adaptive_percent: Option<u8>,
    /// Whether pages of zeros are given back to the kernel.
    pub zero_pages: bool,
}

impl Group {
    /// A group whose scan rate has no limit, and which gives pages of zeros back.
    pub const fn of(name: &'static str) -> Self {
        Self { name, scan_rate: None, adaptive_percent: None, zero_pages: true }
    }
}

/// A running service. Dropping it ends it.
pub struct Folding {
    serving: Serving,
    groups: Vec<&'static str>,
    members: Vec<(u32, String)>,
    /// The lowest scan rate of all groups at the start, in pages a second; `None` if none has a limit.
    lowest_rate: Option<u32>,
}

fn config(groups: &[Group]) -> String {
    let mut text = String::from("[service]\nprover = true\n");
    for group in groups {
        let rate = match (group.adaptive_percent, group.scan_rate) {
            (Some(percent), _) => format!("\"adaptive:{percent}%\""),
            (None, Some(rate)) => rate.to_string(),
            (None, None) => "\"auto\"".to_owned(),
        };
        let zeros = if group.zero_pages { "share" } else { "ignore" };
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "\n[[group]]\nname = \"{}\"\nzero-pages = \"{zeros}\"\nscan-rate = {rate}\nfold = \"off\"\n",
            group.name
        );
    }
    text
}

impl Folding {
    /// Starts a service in a directory below `dir`.
    ///
    /// # Errors
    /// The service does not start.
    pub fn start(dir: &Path, groups: &[Group], guardian: &mut Guardian) -> anyhow::Result<Self> {
        let serving = Serving::start(dir, &config(groups), guardian)?;
        let lowest_rate = groups.iter().filter_map(|group| group.scan_rate).min();
        let groups = groups.iter().map(|group| group.name).collect();
        Ok(Self { serving, groups, members: Vec::new(), lowest_rate })
    }

    /// The setting by which the lab starts guests as members.
    pub fn lab(&self) -> anyhow::Result<lab::Fold> {
        Ok(lab::Fold { pagefold: cli::pagefold().to_owned(), service: Some(self.serving.dir().to_owned()) })
    }

    /// The beginning of a command that starts a program as an eager member. All memory of the program is new; for a
    /// member that is not eager, the agent would take that for work that goes on, and fold less.
    pub fn command(&self, group: &str, name: &str) -> anyhow::Result<Command> {
        let mut command = Command::new(cli::pagefold());
        command
            .args(["run", "--group", group, "--name", name, "--service"])
            .arg(self.serving.dir())
            .arg("--")
            .arg(program()?);
        command.env("PAGEFOLD_EAGER", "1");
        Ok(command)
    }

    /// Waits until these processes and those of earlier calls are members of their groups, each with memory that can be
    /// folded.
    pub fn meet(&mut self, members: &[(u32, String)]) -> anyhow::Result<()> {
        self.members.extend(members.iter().cloned());
        let mut missing = String::new();
        let all = wait(PATIENCE, || {
            missing = self.missing()?;
            Ok(missing.is_empty())
        })?;
        if all { Ok(()) } else { bail!("not every guest became a member: {missing}") }
    }

    fn missing(&self) -> anyhow::Result<String> {
        for (pid, group) in &self.members {
            let found = self.serving.show(group)?.report.members.into_iter().find(|m| m.pid == *pid);
            match found {
                Some(member) if member.connected && member.enrolled_pages > 0 => {}
                Some(member) => return Ok(format!("{}: {} {}", member.name, member.state, member.detail)),
                None => return Ok(format!("process {pid} is not in {group}")),
            }
        }
        Ok(String::new())
    }

    /// Switches folding on in all groups.
    pub fn on(&self) -> anyhow::Result<()> {
        self.change(|change| change.fold = Some(Fold::On))
    }

    /// Switches folding off. Folded pages stay folded.
    pub fn hold(&self) -> anyhow::Result<()> {
        self.change(|change| change.fold = Some(Fold::Off))
    }

    /// Makes all folded pages private, pages of zeros too, switches folding off, and waits until none is folded.
    pub fn undo(&self) -> anyhow::Result<()> {
        self.change(|change| change.fold = Some(Fold::Unfold))?;
        let is_undone = || Ok(self.saved_pages()? == 0 && self.zero_pages()? == 0);
        if wait(UNFOLDED, is_undone)? { Ok(()) } else { bail!("pages are still folded after {} s", UNFOLDED.as_secs()) }
    }

    /// Says whether pages of zeros are given back from here on.
    pub fn share_zeros(&self, share: bool) -> anyhow::Result<()> {
        self.change(|change| change.zero_pages = Some(if share { ZeroPolicy::Share } else { ZeroPolicy::Ignore }))
    }

    fn change(&self, set: impl Fn(&mut Change)) -> anyhow::Result<()> {
        for group in &self.groups {
            let mut change = Change::default();
            set(&mut change);
            Service::connect(Place::at(self.serving.dir()))?.set(group, change)?;
        }
        Ok(())
    }

    /// Folded pages that were written so far, over all members, with pages of zeros.
    pub fn broken_pages(&self) -> anyhow::Result<u64> {
        let of = |state: GroupState| {
            let folded: u64 = state.report.members.iter().map(|member| member.folded_pages + member.zero_pages).sum();
            state.report.bill.folds.saturating_sub(folded)
        };
        Ok(self.states()?.into_iter().map(of).sum())
    }

    /// Time in which all pages of the members are fingerprinted once, at the lowest scan rate of a group; 0 if no group
    /// has a limit.
    pub fn pass(&self) -> anyhow::Result<Duration> {
        let Some(rate) = self.lowest_rate else { return Ok(Duration::ZERO) };
        let bytes: u64 = self.members.iter().map(|(pid, _)| host::anonymous_bytes(*pid)).sum::<Result<_, _>>()?;
        Ok(Duration::from_secs(bytes / PAGE_BYTES as u64 / u64::from(rate.max(1))))
    }

    /// Sets how many pages a group may fingerprint a second.
    pub fn set_scan_rate(&self, group: &str, pages_per_s: u32) -> anyhow::Result<()> {
        let change = Change { scan_rate: Some(ScanRate::Pages(pages_per_s)), ..Change::default() };
        Service::connect(Place::at(self.serving.dir()))?.set(group, change).map(drop)
    }

    /// Pages that the members of a group have fingerprinted so far.
    pub fn hashed_pages(&self, group: &str) -> anyhow::Result<u64> {
        Ok(self.serving.show(group)?.report.bill.pages_hashed)
    }

    fn states(&self) -> anyhow::Result<Vec<GroupState>> {
        self.groups.iter().map(|group| self.serving.show(group)).collect()
    }

    /// Saved pages by the service's account: of all pages that map slots, less one for each slot.
    pub fn saved_pages(&self) -> anyhow::Result<u64> {
        let of = |state: GroupState| {
            let report = state.report;
            (report.sharing_pages + report.zero_pages).saturating_sub(report.slots)
        };
        Ok(self.states()?.into_iter().map(of).sum())
    }

    /// Pages of zeros that were given back and not written since.
    pub fn zero_pages(&self) -> anyhow::Result<u64> {
        Ok(self.states()?.into_iter().map(|state| state.report.zero_pages).sum())
    }

    /// Folded pages of these processes and pages of zeros that they gave back, by the accounts of their agents.
    pub fn folded_pages_of(&self, pids: &[u32]) -> anyhow::Result<u64> {
        let members = self.states()?.into_iter().flat_map(|state| state.report.members);
        Ok(members
            .filter(|member| pids.contains(&member.pid))
            .map(|member| member.folded_pages + member.zero_pages)
            .sum())
    }

    /// Process ids of the workers, which hold the pools.
    pub fn workers(&self) -> anyhow::Result<Vec<u32>> {
        Ok(self.states()?.into_iter().filter_map(|state| state.worker_pid).collect())
    }

    /// The worker of a group, if it runs.
    pub fn worker_of(&self, group: &str) -> anyhow::Result<Option<u32>> {
        Ok(self.serving.show(group)?.worker_pid)
    }

    /// Processor time of the workers, the agents, the supervisor and the prover, by the party that pays for the control
    /// group in which it was spent.
    pub fn cpu(&self) -> anyhow::Result<Cpu> {
        let members = self.members.iter().map(|(pid, group)| (*pid, group.as_str(), Some(AGENT)));
        let states = self.states()?;
        let workers =
            self.groups.iter().zip(&states).filter_map(|(group, state)| Some((state.worker_pid?, *group, None)));
        let of_groups: Vec<_> = members.chain(workers).collect();
        let of_all: Vec<_> = [Some(self.serving.pid()), prover_of(self.serving.pid())].into_iter().flatten().collect();
        let mut parties: Vec<_> =
            of_groups.iter().map(|(pid, group, _)| (*pid, Payer::Group((*group).to_owned()))).collect();
        parties.extend(of_all.iter().map(|pid| (*pid, Payer::Nobody)));
        let payers = Payers::of(&parties);
        let mut cpu = Cpu::default();
        let spenders = of_groups.into_iter().map(|(pid, _, thread)| (pid, thread));
        for (pid, thread) in spenders.chain(of_all.into_iter().map(|pid| (pid, None))) {
            *cpu.0.entry(payers.payer(pid)?).or_default() += of_process(pid, thread)?;
        }
        Ok(cpu)
    }

    /// What an audit of page frames needs to know of the members.
    pub fn engine(&self) -> anyhow::Result<audit::Engine> {
        let member = |(pid, group): &(u32, String)| -> anyhow::Result<audit::Member> {
            Ok(audit::Member { group: group.clone(), process: ProcessId::of(*pid)? })
        };
        Ok(audit::Engine {
            members: self.members.iter().map(member).collect::<anyhow::Result<_>>()?,
            pids: self.workers()?.into_iter().chain([self.serving.pid()]).collect(),
            groups: self.groups.iter().map(|g| (*g).to_owned()).collect(),
            ..audit::Engine::default()
        })
    }
}

/// Processor time of a guest's process without the agent's threads.
pub fn of_guest(pid: u32) -> anyhow::Result<f64> {
    Ok(of_process(pid, None)? - of_process(pid, Some(AGENT))?)
}

/// Processor time of a process; or of its threads with this name, not counting the first thread, which is never the
/// agent's.
pub fn of_process(pid: u32, thread: Option<&str>) -> anyhow::Result<f64> {
    let threads = ThreadCpu::of_process(pid)?;
    let counted = threads.iter().filter(|t| thread.is_none_or(|name| t.name == name && t.tid != pid));
    Ok(counted.map(|t| t.used.as_secs_f64()).sum())
}
