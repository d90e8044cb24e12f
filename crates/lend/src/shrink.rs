//! Writes private memory of parked guests to swap.
//!
//! Mappings of the pool are left out: when such a mapping loses a page to reclaim, the agent has to serve the next page
//! fault there.

use guest::{Guest, RegionMap, holds_folded_pages};
use host::{Mapping, ProcessId};
use page::Region;
use serde::Serialize;

/// Memory of a guest that no other guest shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Held {
    /// The part of it that lies in page frames.
    pub private_bytes: u64,
    /// For a VM, the part of `private_bytes` that is the VM's RAM and not its VMM's own memory; otherwise 0.
    pub ram_bytes: u64,
    /// Memory in the host's swap.
    pub swapped_bytes: u64,
}

/// The outcome of parking a guest, as figures of its memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shrunk {
    /// Private memory in page frames before it was written to swap.
    pub private_before_bytes: u64,
    /// Private memory afterwards.
    #[serde(flatten)]
    pub held: Held,
    /// Why not all equal pages had been folded by then; `None` if they had.
    pub not_folded: Option<String>,
    /// Why private memory stays in frames; `None` where it was written to swap.
    pub problem: Option<String>,
}

impl Held {
    /// Memory of a guest. Processes that cannot be read, or have ended, hold nothing.
    pub fn of(guest: &Guest) -> Self {
        let mut held = Self::default();
        for mappings in guest.pids.iter().filter_map(|pid| Mapping::read_all(*pid).ok()) {
            let regions = RegionMap::new(Some(guest), &mappings);
            for (n, mapping) in mappings.iter().enumerate() {
                // A slot that one process alone maps is the pool's nevertheless.
                let usage = &mapping.usage;
                let private = if holds_folded_pages(mapping) { usage.anonymous_bytes } else { usage.uss_bytes };
                let private = private.saturating_sub(usage.ksm_bytes.unwrap_or(0));
                let ram = if regions.region_of(n) == Region::GuestRam { private } else { 0 };
                held.private_bytes = held.private_bytes.saturating_add(private);
                held.ram_bytes = held.ram_bytes.saturating_add(ram);
                held.swapped_bytes = held.swapped_bytes.saturating_add(usage.swap_bytes);
            }
        }
        held
    }
}

/// Has private memory of a guest written to swap: of a VM its RAM, of a program all of it. `before` is the memory that
/// it held before, `not_folded` the reason why not all equal pages were folded first. Where the kernel swaps nothing,
/// the guest is parked nevertheless.
pub fn shrink(guest: &Guest, before: Held, not_folded: Option<String>) -> Shrunk {
    let problem = if host::total_swap_bytes() > 0 {
        page_out(guest).err().map(|why| format!("its memory is not written to swap: {why:#}"))
    } else {
        let lacks =
            "this host has no swap (nor zram): what it holds alone stays in memory, and only what is equal is folded";
        Some(lacks.to_owned())
    };
    Shrunk { private_before_bytes: before.private_bytes, held: Held::of(guest), not_folded, problem }
}

fn page_out(guest: &Guest) -> anyhow::Result<()> {
    for pid in &guest.pids {
        let mappings = Mapping::read_all(*pid)?;
        let regions = RegionMap::new(Some(guest), &mappings);
        let is_cold = |n: usize, mapping: &Mapping| {
            let is_ram = !guest.kind.is_vm() || regions.region_of(n) == Region::GuestRam;
            let is_plain = !mapping.shared && mapping.inode == 0 && !mapping.hugetlb && !mapping.has_flag(b"lo");
            is_ram && is_plain && !holds_folded_pages(mapping) && mapping.usage.anonymous_bytes > 0
        };
        let cold = mappings.iter().enumerate().filter(|(n, mapping)| is_cold(*n, mapping));
        let ranges: Vec<_> = cold.map(|(_, mapping)| mapping.start.0..mapping.end.0).collect();
        act::page_out(&ProcessId::of(*pid)?, &ranges)?;
    }
    Ok(())
}
