//! Guests that are either VMs or containers, for studies that treat both alike.

use super::{Containers, Merger, Vms};

/// Running guests of a group.
pub enum Crowd {
    /// VMs. With Pagefold, they are members from their start.
    Vms(Vms),
    /// Containers.
    Containers(Containers),
}

impl Crowd {
    /// If Pagefold is the merger, has it attach to containers that are no members yet.
    ///
    /// # Errors
    /// A container has no process that can be a member.
    pub fn attach(&mut self, merger: &Merger) -> anyhow::Result<()> {
        match self {
            Self::Vms(_) => Ok(()),
            Self::Containers(containers) => containers.attach(merger),
        }
    }

    /// Process ids of the guests, without LXC's monitors, which run programs of the host.
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
