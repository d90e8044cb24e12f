//! Pagefold as a merger: a service that the bench starts, with one group, whose settings imitate ksmd.

use super::account::{Slots, savings};
use super::curve::{Details, Progress};
use super::equal::Guest;
use super::merger::{Account, Folds, Merger};
use super::zeros::Zeros;
use crate::guardian::Guardian;
use crate::serving::{Serving, program, wait_for};
use anyhow::bail;
use api::change::Change;
use api::client::Service;
use api::control::{Fold, GroupReport};
use api::place::Place;
use audit::contents::Taken;
use page::{HostVirt, Savings};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use wire::Why;

/// Name of the one group.
pub const GROUP: &str = "bench";

/// The service's configuration. As ksmd does, it folds pages of zeros and splits a huge page for a few small pages: at
/// 1%, six of its 512.
fn config(prover: bool) -> String {
    format!(
        "[service]\nprover = {prover}\n\n[[group]]\nname = \"{GROUP}\"\nzero-pages = \"share\"\nhuge-pages = 1\nfold = \"off\"\n"
    )
}

/// How long agents kept pages out of reach: the worst of all members, as upper bounds that are powers of two of a
/// microsecond.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct AgentStalls {
    /// At the median.
    pub p50_us: u64,
    /// At the 99th percentile.
    pub p99_us: u64,
    /// The longest.
    pub max_us: u64,
}

/// A running service with the guests as members.
///
/// Pages of zeros that the kernel folds by itself are not in the service's own count, and are added ([`Zeros`]). All
/// pages of zeros map the kernel's zero page.
pub struct Folding {
    serving: Serving,
    guests: Vec<u32>,
    zeros: Zeros,
}

impl Folding {
    /// Starts a service in a directory below `dir`, with a prover or without.
    ///
    /// # Errors
    /// The service does not start.
    pub fn start(dir: &Path, prover: bool, guardian: &mut Guardian) -> anyhow::Result<Self> {
        let serving = Serving::start(dir, &config(prover), guardian)?;
        Ok(Self { serving, guests: Vec::new(), zeros: Zeros::default() })
    }

    /// The service's directory.
    pub fn dir(&self) -> &Path {
        self.serving.dir()
    }

    /// Process ids of members that were attached, each with the helper process that stays beside it.
    fn attached(&self) -> anyhow::Result<impl Iterator<Item = (u32, u32)>> {
        let members = Service::connect(Place::at(self.serving.dir()))?.members()?;
        Ok(members.into_iter().filter_map(|member| Some((member.identity.pid, member.attached_by?))))
    }

    /// Process ids of the members that were attached to while they ran.
    ///
    /// # Errors
    /// The service does not answer.
    pub fn helped(&self) -> anyhow::Result<Vec<u32>> {
        Ok(self.attached()?.map(|(pid, _)| pid).collect())
    }

    /// Process ids of the helper processes, one beside each attached member.
    ///
    /// # Errors
    /// The service does not answer.
    pub fn helpers(&self) -> anyhow::Result<Vec<u32>> {
        Ok(self.attached()?.map(|(_, helper)| helper).collect())
    }

    /// Changes the group's settings.
    ///
    /// # Errors
    /// The service does not answer.
    pub fn set(&self, change: Change) -> anyhow::Result<()> {
        self.serving.set(GROUP, change)
    }

    /// Bytes that the group's pool takes.
    ///
    /// # Errors
    /// The service does not answer.
    pub fn pool_bytes(&self) -> anyhow::Result<u64> {
        Ok(self.serving.show(GROUP)?.report.savings.pool_bytes)
    }

    /// Processor time of each part. The agents are threads of the guests' processes.
    fn cpu_by_part(&self) -> anyhow::Result<BTreeMap<&'static str, f64>> {
        self.serving.cpu_by_part(GROUP, &self.guests)
    }
}

/// The change of settings that switches folding on in the group.
pub fn folds() -> Change {
    Change { fold: Some(Fold::On), ..Change::default() }
}

fn folds_of(report: &GroupReport) -> Folds {
    Folds { all: report.bill.folds, again: report.bill.refolds, short: report.bill.short_folds }
}

/// Number of saved pages. For each slot of the pool, all pages but one that map it are saved. Pages of zeros need no
/// slot, because they map the kernel's zero page: `zeros` pages by page tables, if these are more than the service
/// counts.
fn merged_pages(report: &GroupReport, zeros: u64) -> u64 {
    (report.sharing_pages + report.zero_pages.max(zeros)).saturating_sub(report.slots)
}

impl Merger for Folding {
    fn name(&self) -> &'static str {
        "pagefold"
    }

    fn command(&self, name: &str) -> anyhow::Result<Command> {
        let mut command = Command::new(cli::pagefold());
        command
            .args(["run", "--group", GROUP, "--name", name, "--service"])
            .arg(self.serving.dir())
            .arg("--")
            .arg(program()?);
        Ok(command)
    }

    fn fold(&self) -> anyhow::Result<Option<lab::Fold>> {
        Ok(Some(lab::Fold { pagefold: cli::pagefold().to_owned(), service: Some(self.serving.dir().to_owned()) }))
    }

    fn own_pids(&self) -> anyhow::Result<Vec<u32>> {
        Ok(self.serving.show(GROUP)?.worker_pid.into_iter().collect())
    }

    /// Waits until all guests are members. Pages of a guest that never connects would be missing from the count of
    /// merged pages, and nobody would notice.
    fn meet(&mut self, guests: &[Guest]) -> anyhow::Result<()> {
        self.guests = guests.iter().map(|(pid, _)| *pid).collect();
        self.zeros = Zeros::of(guests)?;
        let connected = || {
            let members = self.serving.show(GROUP)?.report.members;
            for pid in &self.guests {
                let Some(member) = members.iter().find(|m| m.pid == *pid && m.connected) else {
                    bail!("process {pid} is not a member");
                };
                if member.enrolled_pages == 0 {
                    bail!(
                        "member {} has nothing that could be folded: {} {}",
                        member.name,
                        member.state,
                        member.detail
                    );
                }
            }
            Ok(())
        };
        wait_for(connected, "not every guest became a member")
    }

    fn on(&mut self) -> anyhow::Result<()> {
        self.set(folds())
    }

    fn cpu_s(&self) -> anyhow::Result<f64> {
        Ok(self.cpu_by_part()?.values().sum())
    }

    fn progress(&self) -> anyhow::Result<Progress> {
        let report = self.serving.show(GROUP)?.report;
        let (broken_pages, slots, vmas) = (report.broken_pages, report.slots, report.vmas);
        let details = Details { broken_pages, slots, vmas, folds: folds_of(&report) };
        let merged_pages = merged_pages(&report, self.zeros.since()?);
        Ok(Progress { merged_pages, cpu_s: self.cpu_s()?, details: Some(details) })
    }

    fn account(&self) -> anyhow::Result<Account> {
        let report = self.serving.show(GROUP)?.report;
        let worst = |of: fn(&api::control::MemberReport) -> u64| report.members.iter().map(of).max().unwrap_or(0);
        let agent_stalls = AgentStalls {
            p50_us: worst(|m| m.stall_p50_us),
            p99_us: worst(|m| m.stall_p99_us),
            max_us: worst(|m| m.stall_max_us),
        };
        Ok(Account {
            metadata_bytes: report.index_bytes + report.agent_bytes,
            pages_scanned: Some(report.bill.pages_scanned),
            broken_pages: Some(report.broken_pages),
            folds: Some(folds_of(&report)),
            agent_stalls: Some(agent_stalls),
            failures: Some(report.bill.fold_failures),
            cpu_by_part_s: Some(self.cpu_by_part()?),
        })
    }

    fn slots(&self) -> anyhow::Result<Option<Slots>> {
        let frames = self.serving.show(GROUP)?.report.frames;
        Ok(Some(Slots {
            pool_in_use: frames.pool_in_use,
            pool_idle: frames.pool_idle,
            slots_by_sharers: frames.slots_by_sharers,
            deferred_bytes: frames.deferred_bytes,
        }))
    }

    fn savings(&self, taken: &Taken) -> anyhow::Result<Savings> {
        let report = self.serving.show(GROUP)?.report;
        Ok(savings(taken, report.zero_pages, report.savings.tables_bytes))
    }

    fn why(&self, pages: &[(u32, HostVirt)]) -> anyhow::Result<Vec<Why>> {
        let mut reasons = Vec::with_capacity(pages.len());
        for of_member in pages.chunk_by(|one, next| one.0 == next.0) {
            for asked in of_member.chunks(wire::RUNS) {
                let pages = asked.iter().map(|(_, at)| (at.0, 1)).collect();
                reasons.append(&mut self.serving.why(GROUP, asked[0].0, pages)?);
            }
        }
        Ok(reasons)
    }

    fn off(&mut self) -> anyhow::Result<()> {
        self.serving.end()
    }
}
