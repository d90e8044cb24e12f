//! Selection of guests and of their groups: the arguments that several commands share.

use anyhow::{Context, bail};
use clap::value_parser;
use cli::say;
use guest::{Glob, GroupFile, GroupRule, Guest, Survey};
use std::path::PathBuf;
use std::sync::Once;

/// Help text of `--groups`; a doc comment would take its brackets for links.
const HELP_OF_GROUPS: &str = "TOML file that puts guests into groups: [groups] with lines such as acme = [\"acme-*\"]";

/// Guests and their groups. Without `--pid` and `--guest`: every VM and container the caller may read.
#[derive(clap::Args, Debug, Default)]
pub struct Selection {
    /// This process, or the guest that it is part of (repeatable)
    #[arg(long = "pid", value_name = "PID", value_parser = value_parser!(u32).range(1..))]
    pids: Vec<u32>,
    /// Guests whose id or name matches; * is any text, ? any one character (repeatable)
    #[arg(long = "guest", value_name = "GLOB")]
    globs: Vec<Glob>,
    /// Which guests trust each other: each, all, user, name (up to the last -), cgroup or cgroup:N
    #[arg(long, value_name = "RULE", default_value = "each")]
    group_by: GroupRule,
    /// TOML file that puts guests into groups, with a table of patterns by group
    #[arg(long, value_name = "FILE", help = HELP_OF_GROUPS)]
    groups: Option<PathBuf>,
}

impl Selection {
    /// Looks up the guests. Prints on stderr, once, what the caller's rights hide, and whether there are no guests at
    /// all.
    ///
    /// # Errors
    /// A process or pattern matches nothing, the groups' file is wrong, or `/proc` cannot be read.
    pub fn resolve(&self) -> anyhow::Result<Vec<Guest>> {
        let file = self.groups.as_deref().map(GroupFile::read).transpose()?.unwrap_or_default();
        let survey = Survey::take().context("cannot look for guests")?;
        for &pid in &self.pids {
            check_process(pid, &survey)?;
        }
        let all = survey.guests(&self.pids);
        self.check_globs(&all)?;
        let selects_all = self.pids.is_empty() && self.globs.is_empty();
        let (mut guests, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|g| if selects_all { survey.may_read(g) } else { self.selects(g) });
        guest::assign_groups(&mut guests, self.group_by, &file)?;
        static SAID: Once = Once::new();
        SAID.call_once(|| {
            if selects_all {
                say_hidden(&survey, others.len());
            }
            if guests.is_empty() {
                say!(
                    "pagefold: no guest found. Name a process with --pid PID, or start guests to try: pagefold lab up"
                );
            }
        });
        Ok(guests)
    }

    fn selects(&self, guest: &Guest) -> bool {
        guest.pids.iter().any(|pid| self.pids.contains(pid)) || self.globs.iter().any(|glob| hits(glob, guest))
    }

    /// An error for a pattern that matches no guest, since it is more likely a slip than meant.
    fn check_globs(&self, guests: &[Guest]) -> anyhow::Result<()> {
        let Some(glob) = self.globs.iter().find(|glob| !guests.iter().any(|g| hits(glob, g))) else { return Ok(()) };
        let glob = cli::printable(glob.as_str());
        if guests.is_empty() {
            bail!("no guest matches {glob}: there is no VM and no container on this host");
        }
        let ids: Vec<String> = guests.iter().map(|g| cli::printable(&g.id)).collect();
        bail!("no guest matches {glob}; there are {}", ids.join(", "))
    }
}

fn hits(glob: &Glob, guest: &Guest) -> bool {
    glob.matches(&guest.id) || glob.matches(&guest.name)
}

/// Checks that a process given by number exists and has memory.
fn check_process(pid: u32, survey: &Survey) -> anyhow::Result<()> {
    if survey.processes.iter().any(|p| p.pid == pid) {
        return Ok(());
    }
    match host::Process::read(pid) {
        Ok(p) if p.stat.kernel_thread => bail!("process {pid} is a thread of the kernel and has no memory of its own"),
        Ok(p) if p.stat.has_ended() => bail!("process {pid} has ended; only its parent has not noticed yet"),
        Err(e) if e.is_denied() => bail!("process {pid} belongs to somebody else: run as root to look at it"),
        Err(_) if host::proc_hides_processes() => {
            bail!("there is no process {pid}, or /proc hides it (hidepid): run as root to see all")
        }
        // It started a moment ago, or has ended meanwhile.
        _ => bail!("there is no process {pid}"),
    }
}

/// Prints what was left out because the caller may not look at it. Root without all capabilities misses some
/// processes, which is reported only if one belongs to a guest.
fn say_hidden(survey: &Survey, guests: usize) {
    let count = |n: usize, one: &str, many: &str| format!("{n} {}", if n == 1 { one } else { many });
    let is_root = survey.own.uid == 0;
    let processes = count(survey.unreadable.len(), "process", "processes");
    let what = match (guests, survey.unreadable.len()) {
        (0, 0) if host::proc_hides_processes() && !is_root => "processes (/proc is mounted with hidepid)".to_owned(),
        (0, n) if n == 0 || is_root => return,
        (0, _) => processes,
        _ => format!("{}, and {processes} in all", count(guests, "guest", "guests")),
    };
    let advice = if is_root { "root needs CAP_SYS_PTRACE and all other capabilities" } else { "run as root" };
    say!("pagefold: hidden, because they belong to others: {what}; {advice} to see them");
}

/// Every process that belongs to no selected guest, except this one and threads of the kernel.
pub fn other_processes(guests: &[Guest]) -> Vec<u32> {
    let of_guests: std::collections::HashSet<u32> = guests.iter().flat_map(|g| &g.pids).copied().collect();
    let mut pids = host::pids().unwrap_or_default();
    let has_memory = |pid: u32| host::Process::read(pid).is_ok_and(|process| !process.stat.kernel_thread);
    pids.retain(|&pid| !of_guests.contains(&pid) && pid != std::process::id() && has_memory(pid));
    pids
}
