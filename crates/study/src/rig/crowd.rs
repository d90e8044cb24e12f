//! Guests of either kind, for studies that count them alike.

use super::{Containers, Merger, Vms};

/// Running guests of a group.
pub enum Crowd {
    /// VMs. With Pagefold, they are members from their start.
    Vms(Vms),
    /// Containers.
    Containers(Containers),
}

impl Crowd {
    /// Has Pagefold attach to containers that are no members yet, if it is the merger.
    ///
    /// # Errors
    /// A container has no process that can be a member.
    pub fn attach(&mut self, merger: &Merger) -> anyhow::Result<()> {
        match self {
            Self::Vms(_) => Ok(()),
            Self::Containers(containers) => containers.attach(merger),
        }
    }

    /// Processes of the guests, without LXC's monitors, which run the host's files.
    pub fn pids(&self) -> Vec<u32> {
        match self {
            Self::Vms(vms) => vms.pids(),
            Self::Containers(containers) => containers.pids_inside(),
        }
    }

    /// Number of guests.
    pub fn guests(&self) -> usize {
        match self {
            Self::Vms(vms) => vms.guests.len(),
            Self::Containers(containers) => containers.guests.len(),
        }
    }
}
