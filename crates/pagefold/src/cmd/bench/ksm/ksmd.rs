//! The kernel's own merger, at the highest rate it can be set to.

use super::curve::Progress;
use super::equal::{Guest, memory_of};
use super::merger::{Account, Merger};
use crate::exit::Stop;
use crate::output::say;
use anyhow::{Context, bail};
use host::{Ksm, KsmKnobs, KsmStat, Mapping, Pagemap, ThreadCpu, set_ksm};
use std::process::Command;

/// As fast as it can: it sleeps between batches for no time at all, and passes no page over.
const FASTEST: [(&str, &str); 3] = [("pages_to_scan", "1000000"), ("sleep_millisecs", "0"), ("smart_scan", "0")];

/// How many sharers a merged page may have (`max_page_sharing`) is left as it is.
///
/// Its own count lacks pages of zeros in huge pages: to merge a part of a huge page, the kernel splits it, and then maps
/// its pages of zeros to the one zero page. That saves them just as well, so they are counted too.
pub struct Ksmd {
    pid: u32,
    guests: Vec<u32>,
    memory: Vec<Memory>,
    zeros_before: u64,
    use_zero_pages: bool,
}

/// The mappings of a guest that may be its memory.
struct Memory {
    pagemap: Pagemap,
    mappings: Vec<Mapping>,
}

impl Memory {
    fn of(guest: Guest) -> anyhow::Result<Self> {
        Ok(Self { pagemap: Pagemap::open(guest.0)?, mappings: memory_of(guest)? })
    }

    fn zeros(&self) -> anyhow::Result<u64> {
        let mut zeros = 0;
        for mapping in &self.mappings {
            zeros += self.pagemap.zero_ranges(mapping.start, mapping.end)?.iter().map(|r| r.pages).sum::<u64>();
        }
        Ok(zeros)
    }
}

/// Whether the bench may use ksmd: it is there, and nobody else's pages are merged.
///
/// # Errors
/// It may not; says what to do.
pub fn may_use() -> anyhow::Result<KsmKnobs> {
    let (Some(ksm), Some(knobs)) = (Ksm::read(), KsmKnobs::read()) else {
        let lacks = "this kernel has no KSM to compare with (CONFIG_KSM)";
        return Err(Stop::HostLacks(lacks.to_owned()).into());
    };
    if ksm.pages_shared + ksm.pages_sharing > 0 {
        let merged = format!(
            "ksmd has merged {} pages of somebody else's, which this bench would undo; to let it: echo 2 > /sys/kernel/mm/ksm/run",
            ksm.pages_sharing
        );
        return Err(Stop::HostLacks(merged).into());
    }
    Ok(knobs)
}

impl Ksmd {
    /// Finds it.
    ///
    /// # Errors
    /// It has no thread.
    pub fn new(use_zero_pages: bool) -> anyhow::Result<Self> {
        let is_ksmd = |pid: &u32| {
            let process = host::Process::read(*pid);
            process.is_ok_and(|p| p.stat.kernel_thread && p.comm == "ksmd")
        };
        let pid = host::pids()?.into_iter().find(is_ksmd).context("there is no thread ksmd in this PID namespace")?;
        Ok(Self { pid, guests: Vec::new(), memory: Vec::new(), zeros_before: 0, use_zero_pages })
    }

    fn zeros(&self) -> anyhow::Result<u64> {
        self.memory.iter().map(Memory::zeros).sum()
    }

    /// Says so when other programs' memory would be merged too, which costs time that is not the guests'.
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
        Ok(Command::new(std::env::current_exe().context("cannot find this program to start it again")?))
    }

    fn fold(&self) -> anyhow::Result<Option<lab::Fold>> {
        Ok(None)
    }

    fn own_pids(&self) -> anyhow::Result<Vec<u32>> {
        Ok(Vec::new())
    }

    fn meet(&mut self, guests: &[Guest]) -> anyhow::Result<()> {
        self.guests = guests.iter().map(|(pid, _)| *pid).collect();
        self.memory = guests.iter().map(|guest| Memory::of(*guest)).collect::<anyhow::Result<_>>()?;
        self.zeros_before = self.zeros()?;
        self.look_for_others()
    }

    fn on(&mut self) -> anyhow::Result<()> {
        if KsmKnobs::read().is_some_and(|knobs| knobs.0.iter().any(|(name, _)| name == "advisor_mode")) {
            set_ksm("advisor_mode", "none")?;
        }
        let zeros = ("use_zero_pages", if self.use_zero_pages { "1" } else { "0" });
        for (knob, value) in FASTEST.into_iter().chain([zeros]) {
            match set_ksm(knob, value) {
                // A kernel that has no such knob does not do what it turns off.
                Err(e) if e.is_gone() => {}
                done => done?,
            }
        }
        Ok(set_ksm("run", "1")?)
    }

    fn cpu_s(&self) -> anyhow::Result<f64> {
        let threads = ThreadCpu::of_process(self.pid)?;
        Ok(threads.iter().map(|thread| thread.used.as_secs_f64()).sum())
    }

    fn progress(&self) -> anyhow::Result<Progress> {
        let ksm = Ksm::read().context("KSM cannot be read any more")?;
        let merged_pages = ksm.pages_sharing + self.zeros()?.saturating_sub(self.zeros_before);
        Ok(Progress { merged_pages, cpu_s: self.cpu_s()?, details: None })
    }

    /// ksmd keeps an item for every page it looks at, and a node for each that it has merged.
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

    fn off(&mut self) -> anyhow::Result<()> {
        set_ksm("run", "2")?;
        Ok(set_ksm("run", "0")?)
    }
}
