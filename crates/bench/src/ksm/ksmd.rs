//! ksmd, the kernel's own merger, at its highest rate.

use super::account::{Slots, savings};
use super::curve::Progress;
use super::equal::Guest;
use super::merger::{Account, Merger};
use super::zeros::Zeros;
use act::{KsmKnobs, set_ksm};
use anyhow::{Context, bail};
use audit::contents::Taken;
use cli::exit::Stop;
use cli::say;
use host::{Ksm, KsmStat, Mapping, ThreadCpu};
use page::{HostVirt, Savings};
use std::process::Command;
use wire::Why;

/// Knobs for the highest rate: no sleep between batches, and no page is skipped by `smart_scan`.
const FASTEST: [(&str, &str); 3] = [("pages_to_scan", "1000000"), ("sleep_millisecs", "0"), ("smart_scan", "0")];

/// ksmd as a merger. Its knob `max_page_sharing`, the most pages that may share one merged page, keeps the host's
/// value.
///
/// ksmd's own count lacks pages of zeros that the kernel folds when it splits huge pages ([`Zeros`]). The bench adds them.
pub struct Ksmd {
    pid: u32,
    guests: Vec<u32>,
    zeros: Zeros,
    use_zero_pages: bool,
}

/// The option of each command that sets ksmd to work.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct WholeHost {
    /// Go on although ksmd, which is one for the whole host, merges memory of other programs meanwhile
    #[arg(long)]
    pub yes: bool,
}

/// Most processes whose names a message lists.
const MOST_NAMED: usize = 8;

/// Whether ksmd may merge memory of a process. Before Linux 6.16 the kernel tells this by the flags of mappings only.
fn is_mergeable(pid: u32) -> bool {
    let Ok(stat) = KsmStat::of(pid) else { return false };
    let by_mappings = || Mapping::read_all(pid).is_ok_and(|all| all.iter().any(|m| m.has_flag(b"mg")));
    stat.ksm_mergeable.unwrap_or_else(|| stat.ksm_merge_any == Some(true) || by_mappings())
}

/// Names and pids of processes whose memory ksmd may merge, for a message; `None` if there are none. Called before
/// guests start.
fn others() -> anyhow::Result<Option<String>> {
    let own = std::process::id();
    let others: Vec<u32> = host::pids()?.into_iter().filter(|pid| *pid != own && is_mergeable(*pid)).collect();
    let named = others.iter().take(MOST_NAMED).map(|pid| {
        let name = host::Process::read(*pid).map_or_else(|_| String::new(), |process| process.comm);
        format!("{} {pid}", cli::printable(&name)).trim_start().to_owned()
    });
    let named: Vec<String> = named.collect();
    let more = if others.len() > MOST_NAMED { ", ..." } else { "" };
    Ok((!others.is_empty()).then(|| format!("{}{more}", named.join(", "))))
}

/// Checks that a run may use ksmd: the kernel has it, and it has merged no pages of other programs. Nor may it merge
/// any during the run, unless `yes` allows that. Prints that ksmd works for the whole host. Returns ksmd's present
/// knobs.
///
/// # Errors
/// The run may not use it; the error says what to do.
pub fn may_use(whole_host: WholeHost) -> anyhow::Result<KsmKnobs> {
    let (Some(ksm), Some(knobs)) = (Ksm::read(), KsmKnobs::read()) else {
        let lacks = "this kernel has no KSM to compare with (CONFIG_KSM)";
        return Err(Stop::HostLacks(lacks.to_owned()).into());
    };
    match others()? {
        Some(others) if !whole_host.yes => {
            let why = "ksmd is one for the whole host: it would merge memory of programs that are not this run's, and end that at last";
            return Err(Stop::HostLacks(format!("{why} ({others}): end them first, or say --yes")).into());
        }
        Some(others) => say!("pagefold: ksmd will merge memory of other programs too, as was said: {others}"),
        None => {}
    }
    if ksm.pages_shared + ksm.pages_sharing > 0 {
        let merged = format!(
            "ksmd has merged {} pages of somebody else's, which this run would undo; to let it: echo 2 > /sys/kernel/mm/ksm/run",
            ksm.pages_sharing
        );
        return Err(Stop::HostLacks(merged).into());
    }
    say!(
        "pagefold: ksmd, which is one for the whole host, is set to work at times; its settings are put back at the end"
    );
    Ok(knobs)
}

/// Sets ksmd to work with these knobs, and switches its advisor off, which would change them.
///
/// # Errors
/// The caller is not root.
pub fn set_to_work(knobs: impl IntoIterator<Item = (&'static str, &'static str)>) -> anyhow::Result<()> {
    if KsmKnobs::read().is_some_and(|knobs| knobs.0.iter().any(|(name, _)| name == "advisor_mode")) {
        set_ksm("advisor_mode", "none")?;
    }
    for (knob, value) in knobs {
        match set_ksm(knob, value) {
            // A kernel without this knob lacks the feature that the knob switches off.
            Err(e) if e.is_gone() => {}
            done => done?,
        }
    }
    Ok(set_ksm("run", "1")?)
}

impl Ksmd {
    /// Finds ksmd's thread.
    ///
    /// # Errors
    /// There is no such thread.
    pub fn new(use_zero_pages: bool) -> anyhow::Result<Self> {
        let is_ksmd = |pid: &u32| {
            let process = host::Process::read(*pid);
            process.is_ok_and(|p| p.stat.kernel_thread && p.comm == "ksmd")
        };
        let pid = host::pids()?.into_iter().find(is_ksmd).context("there is no thread ksmd in this PID namespace")?;
        Ok(Self { pid, guests: Vec::new(), zeros: Zeros::default(), use_zero_pages })
    }

    /// Prints a warning if other programs' memory would be merged too, which costs ksmd time that is not for the
    /// guests.
    fn look_for_others(&self) -> anyhow::Result<()> {
        let others = host::pids()?.into_iter().filter(|pid| !self.guests.contains(pid));
        let mergeable = |pid: &u32| KsmStat::of(*pid).is_ok_and(|s| s.ksm_mergeable == Some(true));
        let others: Vec<String> = others.filter(mergeable).map(|pid| pid.to_string()).collect();
        if !others.is_empty() {
            say!(
                "pagefold: ksmd will merge memory of other processes too ({}): its figures are not the guests' alone",
                others.join(", ")
            );
        }
        Ok(())
    }
}

impl Merger for Ksmd {
    fn name(&self) -> &'static str {
        "ksmd"
    }

    fn command(&self, _: &str) -> anyhow::Result<Command> {
        Ok(Command::new(cli::OWN_PROGRAM))
    }

    fn fold(&self) -> anyhow::Result<Option<lab::Fold>> {
        Ok(None)
    }

    fn own_pids(&self) -> anyhow::Result<Vec<u32>> {
        Ok(Vec::new())
    }

    fn meet(&mut self, guests: &[Guest]) -> anyhow::Result<()> {
        self.guests = guests.iter().map(|(pid, _)| *pid).collect();
        self.zeros = Zeros::of(guests)?;
        self.look_for_others()
    }

    fn on(&mut self) -> anyhow::Result<()> {
        let zeros = ("use_zero_pages", if self.use_zero_pages { "1" } else { "0" });
        set_to_work(FASTEST.into_iter().chain([zeros]))
    }

    fn cpu_s(&self) -> anyhow::Result<f64> {
        let threads = ThreadCpu::of_process(self.pid)?;
        Ok(threads.iter().map(|thread| thread.used.as_secs_f64()).sum())
    }

    fn progress(&self) -> anyhow::Result<Progress> {
        let ksm = Ksm::read().context("KSM cannot be read any more")?;
        let merged_pages = ksm.pages_sharing + self.zeros.since()?;
        Ok(Progress { merged_pages, cpu_s: self.cpu_s()?, details: None })
    }

    /// Bookkeeping: ksmd keeps an item for every page that it has scanned, and a node for each content that it has
    /// merged.
    fn account(&self) -> anyhow::Result<Account> {
        let ksm = Ksm::read().context("KSM cannot be read any more")?;
        let items: u64 = self.guests.iter().filter_map(|pid| KsmStat::of(*pid).ok()?.ksm_rmap_items).sum();
        if items == 0 {
            bail!("ksmd has not looked at any page of the guests");
        }
        let object = |cache| host::slab_object_bytes(cache).unwrap_or(64);
        let metadata_bytes = items * object("ksm_rmap_item") + ksm.pages_shared * object("ksm_stable_node");
        Ok(Account { metadata_bytes, pages_scanned: ksm.pages_scanned, ..Account::default() })
    }

    fn slots(&self) -> anyhow::Result<Option<Slots>> {
        Ok(None)
    }

    fn savings(&self, taken: &Taken) -> anyhow::Result<Savings> {
        let zeros = self.zeros.since()?;
        Ok(savings(taken, zeros, self.account()?.metadata_bytes))
    }

    fn why(&self, pages: &[(u32, HostVirt)]) -> anyhow::Result<Vec<Why>> {
        let is_memory = |(pid, at): &(u32, HostVirt)| {
            let of_guest = self.guests.iter().position(|guest| guest == pid).and_then(|n| self.zeros.mappings_of(n));
            of_guest.is_some_and(|mappings| mappings.iter().any(|m| (m.start..m.end).contains(at)))
        };
        // ksmd does not say why a page is not merged.
        Ok(pages.iter().map(|page| if is_memory(page) { Why::Other } else { Why::NotEnrolled }).collect())
    }

    fn off(&mut self) -> anyhow::Result<()> {
        set_ksm("run", "2")?;
        Ok(set_ksm("run", "0")?)
    }
}
