//! Facts of one round: the host, its groups and its guests.
//!
//! Sizes on the host's side (resident, folded, available) come from the kernel. The rest is claimed by a guest:
//! [`Facts::bounded`] limits claims to bounds that the host knows. A claim steers which guest gets a loan, and how much
//! of the loan counts as withdrawable. A claim never decides what is guaranteed.

use crate::driver::{DriverState, EXTRA_FRAMES};
use crate::ladder::Rung;
use crate::reserve::signed;
use serde::Serialize;
use std::collections::BTreeMap;

/// Most faults a second that are believed of a guest: 1,000,000.
const MOST_FAULTS_PER_S: f64 = 1e6;

/// Memory that a guest keeps of what it claims that it could free, as a part of its RAM: 1/16. The claim includes
/// kernel memory that cannot always be freed in time, and statistics are some seconds old.
const LEAST_LEFT: u64 = 16;

/// Everything that a plan is made of.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Facts {
    /// The host.
    pub host: HostFacts,
    /// Groups by name.
    pub groups: BTreeMap<String, GroupFacts>,
    /// Guests with a size that can be changed, and others.
    pub guests: Vec<GuestFacts>,
    /// Memory that is promised to guests that have not started.
    pub reservations: Vec<Reservation>,
}

/// The host's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct HostFacts {
    /// RAM.
    pub total_bytes: u64,
    /// `MemAvailable`.
    pub available_bytes: u64,
    /// Speed at which available memory last fell, in bytes a second; 0 if it was not measured.
    pub falling_bytes_per_s: u64,
    /// Memory that is never lent: the reserve for other programs, and the kernel's high watermarks.
    pub floor_bytes: u64,
    /// Swap in use.
    pub swap_used_bytes: u64,
    /// Swap.
    pub swap_total_bytes: u64,
    /// Part of the last 10 s in which some task waited for memory, in percent; `None` if the kernel does not tell.
    pub stalled_percent: Option<f64>,
    /// The place on the pressure ladder.
    pub rung: Rung,
}

/// A group of guests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct GroupFacts {
    /// Net savings of folding.
    pub saved_bytes: i64,
    /// Processor time of folding, in seconds.
    pub cpu_s: f64,
    /// Pages fingerprinted.
    pub pages_hashed: u64,
    /// Pages folded.
    pub folds: u64,
    /// Of those, pages that were written again within a minute or so.
    pub short_folds: u64,
    /// Most pages that it fingerprints a second, by its settings; `None`: all that rest.
    pub scan_rate: Option<u32>,
}

/// Memory promised to a guest that has not started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reservation {
    /// The guest's name.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

/// One guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GuestFacts {
    /// Its id, as `pagefold guests` has it.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its first process.
    pub pid: u32,
    /// Seconds since its process started, or since the balancer saw it first, whichever is less.
    pub age_s: u64,
    /// Its group.
    pub group: String,
    /// RAM without a balloon.
    pub ram_bytes: u64,
    /// Size that balancing never takes from the guest.
    pub guaranteed_bytes: u64,
    /// Its size, by its balloon driver.
    pub actual_bytes: u64,
    /// The size that it was told to have; `None` while it was told nothing.
    pub target_bytes: Option<u64>,
    /// Memory that the limits of its control groups leave it; `None` if none binds.
    pub cgroup_left_bytes: Option<u64>,
    /// RAM that lies in frames of the host, folded pages included.
    pub resident_bytes: u64,
    /// RAM that the host has put into swap.
    pub swapped_bytes: u64,
    /// RAM whose frames others hold too.
    pub folded_bytes: u64,
    /// The most RAM that it was seen to hold alone.
    pub peak_bytes: u64,
    /// Private memory of its process beside its RAM.
    pub beside_bytes: u64,
    /// Its part of its group's net savings.
    pub saved_bytes: i64,
    /// Whether its balloon device lets it report free pages, which its host takes at once.
    pub reports_free_pages: bool,
    /// Behaviour of its balloon driver.
    pub driver: DriverState,
    /// Bytes a second that its balloon was seen to take.
    pub withdrawal_bytes_per_s: u64,
    /// Its own statistics; `None` if driver or QEMU have none, or only old ones.
    pub claims: Option<Claims>,
    /// Faults by size as they were measured: size in bytes, faults a second. In ascending order of sizes.
    pub faults_by_size: Vec<(u64, f64)>,
}

/// Statistics that a guest claims about itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Claims {
    /// Memory that its kernel has in use or free.
    pub total_bytes: u64,
    /// Free memory.
    pub free_bytes: u64,
    /// Memory that it could free without swapping.
    pub available_bytes: u64,
    /// Page cache that its kernel can free.
    pub cache_bytes: u64,
    /// Major faults and pages read back from swap, a second.
    pub faults_per_s: f64,
    /// Stalls of allocations since it started; `None` before Linux 6.12.
    pub stalls: Option<u64>,
    /// Processes killed for want of memory since it started; `None` before Linux 6.12.
    pub oom_kills: Option<u64>,
}

impl Facts {
    /// The same facts with all claims within bounds.
    pub fn bounded(mut self) -> Self {
        let host = &mut self.host;
        host.available_bytes = host.available_bytes.min(host.total_bytes);
        host.floor_bytes = host.floor_bytes.min(host.total_bytes);
        for guest in &mut self.guests {
            guest.bound();
        }
        self
    }
}

impl Facts {
    /// Savings of a group that its guests are lent: as the group's worker reports them, but no more than the guests'
    /// folded pages that the kernel shows.
    pub(crate) fn saved_bytes(&self, group: &str) -> u64 {
        let told = self.groups.get(group).map_or(0, |group| u64::try_from(group.saved_bytes).unwrap_or(0));
        let guests = self.guests.iter().filter(|guest| guest.group == group);
        told.min(guests.fold(0, |sum: u64, guest| sum.saturating_add(guest.folded_bytes)))
    }
}

impl GuestFacts {
    /// Puts everything that the guest or its configuration says within its RAM.
    fn bound(&mut self) {
        let ram = self.ram_bytes;
        self.guaranteed_bytes = self.guaranteed_bytes.min(ram);
        self.resident_bytes = self.resident_bytes.min(ram);
        self.folded_bytes = self.folded_bytes.min(self.resident_bytes);
        self.peak_bytes = self.peak_bytes.min(ram);
        // Savings are bounded by folded pages: a page that shares no frame saves nothing that the kernel shows.
        self.saved_bytes = self.saved_bytes.min(signed(self.folded_bytes));
        self.actual_bytes = self.actual_bytes.min(ram);
        self.target_bytes = self.target_bytes.map(|target| target.min(ram));
        self.swapped_bytes = self.swapped_bytes.min(self.untouched_bytes());
        let size = self.size_bytes();
        if let Some(claims) = &mut self.claims {
            claims.total_bytes = claims.total_bytes.min(size);
            claims.available_bytes = claims.available_bytes.min(claims.total_bytes);
            claims.free_bytes = claims.free_bytes.min(claims.total_bytes);
            claims.cache_bytes = claims.cache_bytes.min(claims.total_bytes.saturating_sub(claims.free_bytes));
            claims.faults_per_s = faults(claims.faults_per_s);
        }
        self.faults_by_size.retain(|(size, _)| (1..=ram).contains(size));
        self.faults_by_size.iter_mut().for_each(|(_, rate)| *rate = faults(*rate));
    }

    /// The guest's size. If its frames show that it holds more than its driver says, the frames count.
    pub fn size_bytes(&self) -> u64 {
        self.actual_bytes.max(self.resident_bytes).min(self.ram_bytes)
    }

    /// RAM in frames that it alone holds.
    pub const fn private_bytes(&self) -> u64 {
        self.resident_bytes.saturating_sub(self.folded_bytes)
    }

    /// Its size above its guarantee.
    pub fn loan_bytes(&self) -> u64 {
        self.size_bytes().saturating_sub(self.guaranteed_bytes)
    }

    /// Part of the guest's size for which it has no frames.
    pub fn untouched_bytes(&self) -> u64 {
        self.size_bytes().saturating_sub(self.resident_bytes)
    }

    /// Page frames that the guest may take at any instant: for the part of its size that has none, and for each folded
    /// page.
    ///
    /// If the balloon does not hold what its driver says, no size limits the guest, and it may take all of its RAM. The
    /// guest's frames show that before the driver is flagged.
    pub fn may_take_bytes(&self) -> u64 {
        let size = if self.is_unbounded() { self.ram_bytes } else { self.size_bytes() };
        size.saturating_sub(self.resident_bytes).saturating_add(self.folded_bytes)
    }

    fn is_unbounded(&self) -> bool {
        let excess = self.resident_bytes.saturating_sub(self.actual_bytes);
        matches!(self.driver, DriverState::Lies | DriverState::Deflated) || excess > self.ram_bytes / EXTRA_FRAMES
    }

    /// Whether the guest gives back the memory that it is told to give, as far as frames and driver show.
    pub fn gives_back(&self) -> bool {
        matches!(self.driver, DriverState::Works | DriverState::Absent) && !self.is_unbounded()
    }

    /// The part of its size that has neither a frame nor swap: memory that it never used, or has given back.
    pub fn never_used_bytes(&self) -> u64 {
        self.untouched_bytes().saturating_sub(self.swapped_bytes)
    }

    /// Growth that the guest was told and has yet to make; 0 if its driver does not do as it is told.
    pub fn coming_bytes(&self) -> u64 {
        let target = self.target_bytes.filter(|_| self.can_balloon()).unwrap_or(0);
        target.saturating_sub(self.size_bytes())
    }

    /// Memory that the guest does not need: what it claims that it could free without swapping. If it sends no
    /// statistics, what it never used, which is less: a guest's kernel reserves memory that it does not touch.
    pub fn idle_bytes(&self) -> u64 {
        self.claimed_idle_bytes().unwrap_or_else(|| self.never_used_bytes())
    }

    fn claimed_idle_bytes(&self) -> Option<u64> {
        self.claims.map(|claims| claims.available_bytes.max(claims.free_bytes))
    }

    /// Memory that the guest can give up without harm: all that it does not need ([`Self::idle_bytes`]), less 1/16 of
    /// its RAM. If a balloon takes more, the guest swaps, or kills its processes.
    pub fn harmless_bytes(&self) -> u64 {
        self.idle_bytes().saturating_sub(self.ram_bytes / LEAST_LEFT)
    }

    /// Memory that the guest needs to run: all that it could not free without swapping. Without statistics, its whole
    /// size.
    pub fn needed_bytes(&self) -> u64 {
        self.size_bytes().saturating_sub(self.claimed_idle_bytes().unwrap_or(0))
    }

    /// Whether its size can be changed.
    pub fn can_balloon(&self) -> bool {
        self.driver == DriverState::Works
    }
}

/// A rate of faults that a guest claims, made finite and bounded.
fn faults(rate: f64) -> f64 {
    if rate.is_finite() { rate.clamp(0.0, MOST_FAULTS_PER_S) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_are_bounded_by_what_host_knows() {
        let claims = Claims {
            total_bytes: u64::MAX,
            free_bytes: u64::MAX,
            available_bytes: u64::MAX,
            cache_bytes: u64::MAX,
            faults_per_s: f64::NAN,
            ..Claims::default()
        };
        let guest = GuestFacts {
            ram_bytes: 256,
            guaranteed_bytes: 300,
            actual_bytes: 100,
            resident_bytes: 120,
            folded_bytes: 500,
            claims: Some(claims),
            faults_by_size: vec![(0, 1.0), (200, f64::INFINITY), (400, 1.0)],
            ..GuestFacts::default()
        };
        let facts = Facts { guests: vec![guest], ..Facts::default() }.bounded();
        let guest = &facts.guests[0];
        assert_eq!((guest.size_bytes(), guest.guaranteed_bytes, guest.folded_bytes), (120, 256, 120));
        let claims = guest.claims.unwrap();
        assert_eq!(
            (claims.total_bytes, claims.free_bytes, claims.cache_bytes, claims.faults_per_s),
            (120, 120, 0, 0.0)
        );
        assert_eq!((claims.available_bytes, guest.idle_bytes()), (120, 120));
        assert_eq!(guest.faults_by_size, [(200, 0.0)]);
    }

    #[test]
    fn guest_that_holds_more_than_it_says_has_that_much() {
        let guest = GuestFacts {
            ram_bytes: 100,
            guaranteed_bytes: 40,
            actual_bytes: 50,
            resident_bytes: 90,
            ..GuestFacts::default()
        };
        assert_eq!((guest.size_bytes(), guest.loan_bytes(), guest.untouched_bytes()), (90, 50, 0));
    }
}
