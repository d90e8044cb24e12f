//! Counts the page frames of a guest's RAM. For that, the kernel walks all page tables of the guest's process. So
//! frames are counted again only when counters of that process have changed that are cheap to read.

use guest::{Guest, RegionMap, holds_folded_pages};
use host::{Mapping, MemoryCounters};
use page::Region;
use std::time::Duration;

/// Change of the process's counters at which frames are counted again, as a part of the guest's RAM: 1/128. All guests
/// together are then off by half of the memory that a plan keeps spare, at most.
const MOVED: u64 = 128;
/// Time after which frames are counted again in any case: 5 minutes. The kernel's counters of a process with threads on
/// many processors are not exact.
const STALE: Duration = Duration::from_secs(300);

/// Figures of one guest's RAM, at the time of a count.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RamUse {
    pid: u32,
    at: Duration,
    counters: MemoryCounters,
    /// RAM in frames, folded pages included.
    pub resident_bytes: u64,
    /// RAM whose frames other processes share: folded by Pagefold, or merged by ksmd.
    pub folded_bytes: u64,
    /// RAM in the host's swap.
    pub swapped_bytes: u64,
    /// Size of the mappings of RAM, used or not.
    pub mapped_bytes: u64,
    /// The most RAM that the guest held alone (in frames that nobody shares, and in swap), of all counts of this
    /// process.
    pub peak_bytes: u64,
    /// Private memory of the process that is not the guest's RAM: the VMM's own.
    pub beside_bytes: u64,
}

impl RamUse {
    /// Counts the frames of a guest, or returns the `known` count if that is recent and the process's counters have
    /// hardly changed since.
    ///
    /// # Errors
    /// The guest has ended, or may not be looked at.
    pub fn of(guest: &Guest, ram_bytes: u64, known: Option<Self>, at: Duration) -> host::Result<Self> {
        let pid = guest.pids.first().copied().unwrap_or(0);
        let counters = MemoryCounters::of(pid)?;
        let is_same = |known: &Self| {
            let moved = page::pages_to_bytes(counters.change_since(&known.counters));
            known.pid == pid && moved <= ram_bytes / MOVED && at.saturating_sub(known.at) < STALE
        };
        match known.filter(is_same) {
            Some(known) => Ok(known),
            None => {
                let counted = Self::count(guest, pid, counters, at)?;
                let before = known.filter(|known| known.pid == pid).map_or(0, |known| known.peak_bytes);
                Ok(Self { peak_bytes: counted.peak_bytes.max(before), ..counted })
            }
        }
    }

    fn count(guest: &Guest, pid: u32, counters: MemoryCounters, at: Duration) -> host::Result<Self> {
        let mappings = Mapping::read_all(pid)?;
        let regions = RegionMap::new(Some(guest), &mappings);
        let (mut rss, mut uss, mut folded, mut merged) = (0_u64, 0_u64, 0_u64, 0_u64);
        let (mut swapped_bytes, mut mapped_bytes, mut beside_bytes) = (0_u64, 0_u64, 0_u64);
        for (n, mapping) in mappings.iter().enumerate() {
            let usage = &mapping.usage;
            merged = usage.ksm_bytes.unwrap_or(0).saturating_add(merged);
            if regions.region_of(n) == Region::GuestRam {
                (rss, uss) = (usage.rss_bytes.saturating_add(rss), usage.uss_bytes.saturating_add(uss));
                swapped_bytes = usage.swap_bytes.saturating_add(swapped_bytes);
                mapped_bytes = mapping.bytes().saturating_add(mapped_bytes);
            } else {
                beside_bytes = usage.uss_bytes.saturating_add(beside_bytes);
            }
            if holds_folded_pages(mapping) {
                let unbroken = mapping.bytes().saturating_sub(usage.anonymous_bytes.saturating_add(usage.swap_bytes));
                folded = unbroken.saturating_add(folded);
            }
        }
        // Folded pages that were not touched since are in no page table.
        let resident_bytes = rss.max(uss.saturating_add(folded));
        let folded_bytes = folded.saturating_add(merged);
        Ok(Self {
            pid,
            at,
            counters,
            resident_bytes,
            folded_bytes,
            peak_bytes: resident_bytes.saturating_sub(folded_bytes).saturating_add(swapped_bytes),
            swapped_bytes,
            mapped_bytes,
            beside_bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own_guest() -> Guest {
        let own = std::process::id();
        let survey = guest::Survey::take().unwrap();
        let mut guest = survey.guests(&[own], &[]).into_iter().find(|guest| guest.pids.contains(&own)).unwrap();
        guest.pids = vec![own];
        guest
    }

    #[test]
    fn frames_are_counted_again_when_counters_have_moved_or_five_minutes_are_over() {
        let (guest, second) = (own_guest(), Duration::from_secs(1));
        // All memory of this test could be allocated meanwhile by others.
        let large = 1 << 50;
        let first = RamUse::of(&guest, large, None, second).unwrap();
        let marked = RamUse { resident_bytes: 7, ..first };
        let again = |ram_bytes, at| RamUse::of(&guest, ram_bytes, Some(marked), at).unwrap();
        assert_eq!(again(large, 2 * second).resident_bytes, 7, "nothing has moved");
        assert_ne!(again(large, 301 * second).resident_bytes, 7, "five minutes are over");
        let touched = vec![1_u8; 64 << 20];
        assert_ne!(again(256 << 20, 2 * second).resident_bytes, 7, "64 MiB more than before");
        drop(touched);
        let other = RamUse { pid: first.pid + 1, ..marked };
        assert_ne!(RamUse::of(&guest, large, Some(other), second).unwrap().resident_bytes, 7, "another process");
    }
}
