//! Containers of the lab for a study.

use super::{Merger, Rig};
use anyhow::{Context, bail};
use cli::say;
use guest::pool_name;
use host::{Mapping, Usage};
use lab::{Guest, Idle, Image, Lab, Progress, Spec};
use std::time::Duration;

/// Time limit for containers to become idle.
const SETTLE: Duration = Duration::from_secs(60);

/// Running containers with nginx and cron. Dropping them ends them.
pub struct Containers {
    lab: Lab,
    /// The containers.
    pub guests: Vec<Guest>,
    /// Number of containers whose processes Pagefold has attached to; they come first.
    attached: usize,
}

impl Rig {
    /// Starts containers of an image. If ksmd is the merger, all memory of their processes is opted in. Pagefold does
    /// not attach to them yet.
    ///
    /// # Errors
    /// A container does not come up.
    pub fn containers(
        &mut self,
        image: Image,
        guests: usize,
        (merger, group): (&mut Merger, &str),
    ) -> anyhow::Result<Containers> {
        self.labs += 1;
        let dir = self.dir().join(format!("lab-{}", self.labs));
        self.guardian.keep_lab(&dir)?;
        let mut containers = Containers { lab: Lab::open(&dir)?, guests: Vec::new(), attached: 0 };
        containers.add(self, image, guests, (merger, group))?;
        Ok(containers)
    }
}

impl Containers {
    /// Starts further containers, and waits until all are idle.
    ///
    /// # Errors
    /// A container does not come up.
    pub fn add(
        &mut self,
        rig: &Rig,
        image: Image,
        guests: usize,
        (merger, group): (&mut Merger, &str),
    ) -> anyhow::Result<()> {
        let spec = Spec { guests, groups: vec![group.to_owned()], ..Spec::new(image) };
        let opt_in = merger.ksmd().is_some();
        if opt_in {
            let why = "ksmd cannot be told to merge whole processes: Linux 6.7 or newer is needed";
            act::set_memory_merge(true).context(why)?;
        }
        let more = self.lab.up(&spec, &rig.cache, &|event| {
            if let Progress::Building(_) = event {
                say!("pagefold: building the image for the containers, once");
            }
        });
        if opt_in {
            act::set_memory_merge(false).context("cannot opt out of KSM again")?;
        }
        let more = more.context("the containers do not come up")?;
        if opt_in {
            let pids = more.iter().flat_map(Guest::pids);
            merger.meet(&pids.map(|pid| (pid, group.to_owned())).collect::<Vec<_>>())?;
        }
        self.guests.extend(more);
        let settled = self.lab.settle(Idle::default(), SETTLE, &|_| {})?;
        if !settled.idle {
            bail!("the containers are not idle after {} s", settled.waited.as_secs());
        }
        Ok(())
    }

    /// If Pagefold is the merger, has it attach to all processes of the containers that were started since the last
    /// call.
    ///
    /// # Errors
    /// A container has no process that can be a member.
    pub fn attach(&mut self, merger: &Merger) -> anyhow::Result<()> {
        let Some(fold) = merger.lab()? else { return Ok(()) };
        for guest in &self.guests[self.attached..] {
            guest.attach(&fold)?;
        }
        self.attached = self.guests.len();
        Ok(())
    }

    /// Process ids of all containers, LXC's monitors among them.
    pub fn pids(&self) -> Vec<u32> {
        self.guests.iter().flat_map(Guest::pids).collect()
    }

    /// Process ids of the containers without LXC's monitors, which run programs of the host and not of the container's
    /// root directory.
    pub fn pids_inside(&self) -> Vec<u32> {
        let inside = |guest: &Guest| guest.pids().into_iter().filter(|pid| Some(*pid) != guest.pid).collect::<Vec<_>>();
        self.guests.iter().flat_map(inside).collect()
    }
}

impl Drop for Containers {
    fn drop(&mut self) {
        if let Err(e) = self.lab.down() {
            say!("pagefold: {e}");
        }
    }
}

/// The footprint of these processes of a group: the sum of their totals in `smaps`. The worker's share of the group's
/// pool is added, because the pool's pages exist for these processes.
///
/// # Errors
/// A process has ended.
pub fn footprint(pids: &[u32], (merger, group): (&Merger, &str)) -> anyhow::Result<Usage> {
    let mut sum = Usage::default();
    for pid in pids {
        sum = sum.plus(&Usage::of(*pid)?);
    }
    if let Some(worker) = merger.worker_of(group)? {
        for mapping in Mapping::read_all(worker)?.iter().filter(|m| pool_name(&m.name).is_some()) {
            sum.pss_bytes += mapping.usage.pss_bytes;
        }
    }
    Ok(sum)
}
