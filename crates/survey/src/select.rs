//! Selection of guests and of their groups: the arguments that several commands share.

use anyhow::{Context, anyhow, bail};
use clap::value_parser;
use cli::exit::Stop;
use cli::say;
use guest::{Glob, GroupFile, GroupRule, Guest, Membership, Survey};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Help text of `--groups`; a doc comment would take its brackets for links.
const HELP_OF_GROUPS: &str = "TOML file that puts guests into groups: [groups] with lines such as acme = [\"acme-*\"]";

/// Guests and their groups. Without `--pid` and `--guest`: every VM, container and member of a service the caller may
/// read.
#[derive(clap::Args, Debug, Default)]
pub struct Selection {
    /// This process, or the guest that it is part of (repeatable)
    #[arg(long = "pid", value_name = "PID", value_parser = value_parser!(u32).range(1..))]
    pids: Vec<u32>,
    /// Guests whose id or name matches; * is any text, ? any one character (repeatable)
    #[arg(long = "guest", value_name = "GLOB")]
    globs: Vec<Glob>,
    /// Which guests trust each other: each, all, user, name (up to the last -), service (as it folds them), cgroup or
    /// cgroup:N
    #[arg(long, value_name = "RULE", default_value = "each")]
    group_by: GroupRule,
    /// TOML file that puts guests into groups, with a table of patterns by group
    #[arg(long, value_name = "FILE", help = HELP_OF_GROUPS)]
    groups: Option<PathBuf>,
}

/// Asks the services for their members; `None` if there is no service.
pub type Members<'a> = &'a dyn Fn() -> anyhow::Result<Option<Vec<Membership>>>;

impl Selection {
    /// Whether all guests are selected that the caller may read.
    pub const fn selects_all(&self) -> bool {
        self.pids.is_empty() && self.globs.is_empty()
    }

    /// Looks up the guests. Prints on stderr, once, what the caller's rights hide, and whether there are no guests at
    /// all. `members` asks the services, where their members matter; `None` if there is no service.
    ///
    /// # Errors
    /// - A process or pattern matches nothing, or the groups' file is wrong.
    /// - The groups are those of a service, and none answers.
    /// - `/proc` cannot be read.
    pub fn resolve(&self, members: Members<'_>) -> anyhow::Result<Vec<Guest>> {
        self.resolve_in(&Survey::take().context("cannot look for guests")?, members)
    }

    /// Looks up the guests among processes that were found already; see [`Self::resolve`].
    ///
    /// # Errors
    /// As of [`Self::resolve`].
    pub fn resolve_in(&self, survey: &Survey, members: Members<'_>) -> anyhow::Result<Vec<Guest>> {
        static RESOLVED: AtomicBool = AtomicBool::new(false);
        let first = !RESOLVED.swap(true, Ordering::Relaxed);
        let file = self.groups.as_deref().map(GroupFile::read).transpose().map_err(Stop::usage)?.unwrap_or_default();
        for &pid in &self.pids {
            // During a watch, a process may have ended since the first round: that is no wrong usage.
            check_process(pid, survey).map_err(|error| if first { error } else { anyhow!("{error}") })?;
        }
        let all = survey.guests(&self.pids, &self.members(members, first)?);
        // Guests that end during a watch do not end the watch.
        if first {
            self.check_globs(&all)?;
            file.check(|glob| all.iter().any(|g| hits(glob, g)) || is_process(glob, survey)).map_err(Stop::usage)?;
        }
        let selects_all = self.selects_all();
        let (mut guests, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|g| if selects_all { survey.may_read(g) } else { self.selects(g) });
        guest::assign_groups(&mut guests, self.group_by, &file).map_err(Stop::usage)?;
        if first && selects_all {
            say_hidden(survey, others.len());
        }
        if first && guests.is_empty() {
            say!("pagefold: no guest found. Name a process with --pid PID, or start guests to try: pagefold lab up");
        }
        Ok(guests)
    }

    /// Asks services for their members: folded programs, which are guests too, and whose groups `--group-by service`
    /// takes. Without that rule, a failure is only printed, and there are no members.
    fn members(&self, ask: Members<'_>, first: bool) -> anyhow::Result<Vec<Membership>> {
        let by_service = self.group_by == GroupRule::Service;
        if !by_service && self.globs.is_empty() && !self.pids.is_empty() {
            return Ok(Vec::new());
        }
        match ask() {
            Err(error) if by_service => Err(error.context("cannot group guests by their service")),
            Ok(None) if by_service => {
                bail!("cannot group guests by their service: none answers; start one with pagefold serve")
            }
            Err(error) => {
                if first {
                    say!("pagefold: programs that are folded are left out: {}", cli::exit::in_words(&error));
                }
                Ok(Vec::new())
            }
            Ok(members) => Ok(members.unwrap_or_default()),
        }
    }

    fn selects(&self, guest: &Guest) -> bool {
        guest.pids.iter().any(|pid| self.pids.contains(pid)) || self.globs.iter().any(|glob| hits(glob, guest))
    }

    /// Fails if a pattern matches no guest, since it is more likely a slip than meant.
    fn check_globs(&self, guests: &[Guest]) -> anyhow::Result<()> {
        let Some(glob) = self.globs.iter().find(|glob| !guests.iter().any(|g| hits(glob, g))) else { return Ok(()) };
        let glob = cli::printable(glob.as_str());
        if guests.is_empty() {
            return usage(format!("no guest matches {glob}: there is no VM and no container on this host"));
        }
        let ids: Vec<String> = guests.iter().map(|g| cli::printable(&g.id)).collect();
        usage(format!("no guest matches {glob}; there are {}", ids.join(", ")))
    }
}

fn hits(glob: &Glob, guest: &Guest) -> bool {
    glob.matches(&guest.id) || glob.matches(&guest.name)
}

fn usage(text: String) -> anyhow::Result<()> {
    Err(Stop::Usage(text).into())
}

/// Whether a pattern means a process that is no guest, because no `--pid` names it.
fn is_process(glob: &Glob, survey: &Survey) -> bool {
    survey.processes.iter().any(|p| glob.matches(&p.comm) || glob.matches(&format!("process:{}", p.pid)))
}

/// Checks that the page cache of these files can be counted.
///
/// # Errors
/// One of them cannot be opened, is empty, or is no plain file.
pub fn check_host_files(files: &[PathBuf]) -> anyhow::Result<()> {
    for file in files {
        let (_, metadata) = host::open_plain_file(file).map_err(Stop::usage)?;
        if metadata.len() == 0 {
            return usage(format!("--host-file {}: it is empty", file.display()));
        }
    }
    Ok(())
}

/// Checks that a process given by number exists and has memory.
fn check_process(pid: u32, survey: &Survey) -> anyhow::Result<()> {
    if survey.processes.iter().any(|p| p.pid == pid) {
        return Ok(());
    }
    match host::Process::read(pid) {
        Ok(p) if p.stat.kernel_thread => {
            usage(format!("process {pid} is a thread of the kernel and has no memory of its own"))
        }
        Ok(p) if p.stat.has_ended() => bail!("process {pid} has ended; only its parent has not noticed yet"),
        Err(e) if e.is_denied() => {
            Err(Stop::HostLacks(format!("process {pid} belongs to somebody else: run as root to look at it")).into())
        }
        Err(_) if host::proc_hides_processes() => {
            usage(format!("there is no process {pid}, or /proc hides it (hidepid): run as root to see all"))
        }
        // It started after the processes were listed, or has ended meanwhile.
        _ => usage(format!("there is no process {pid}")),
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
