//! A simulated host, in steps of a quarter of a second. Its guests have balloons, memory that is folded, and break
//! storms: times at which a guest writes all its folded pages.

use balance::{Claims, DriverState, Facts, GuestFacts, HostFacts};
use std::collections::BTreeMap;

pub const M: u64 = 1 << 20;
/// RAM of the host: 16 GiB.
pub const TOTAL: u64 = 16 << 30;
/// RAM of each guest: 512 MiB.
pub const RAM: u64 = 512 * M;
/// Guaranteed size of each guest: 256 MiB.
pub const KEPT: u64 = 256 * M;
/// Memory that one guest writes in a step at most, in bytes: 184 MiB a second, four times what was measured in storms
/// of the lab.
const WRITTEN: u64 = 46 * M;
/// Memory by which a balloon shrinks a guest in a step, in bytes: 64 MiB a second.
const WITHDRAWN: u64 = 16 * M;
/// Memory of one guest that is folded in a step at most, in bytes: 8 MiB a second.
const FOLDED: u64 = 2 * M;
/// Most memory that a guest has in common with others of its group.
const ALIKE: u64 = 120 * M;
/// One part in so many of the memory that a guest uses is page cache, which its kernel can free: 1/4.
const CACHE: u64 = 4;
/// Number of simulated steps in a second.
pub const STEPS: u64 = 4;

/// A simulated guest.
#[derive(Clone, Debug)]
pub struct Vm {
    pub name: String,
    pub group: usize,
    pub born: u64,
    /// Its present size by its balloon; in `target`, the size that the balancer last told it.
    pub size: u64,
    pub target: u64,
    /// Memory in page frames that only this guest maps; in `folded`, memory in frames that its group shares.
    pub private: u64,
    pub folded: u64,
    pub peak: u64,
    /// Memory that the guest's programs use if they get it, with their page cache.
    pub wants: u64,
    pub in_storm: bool,
    pub paused: Option<u64>,
    pub last_pause: Option<u64>,
}

impl Vm {
    pub fn new(name: String, group: usize, born: u64, wants: u64) -> Self {
        let (size, target) = (RAM, RAM);
        let vm = Self { name, group, born, size, target, private: 0, folded: 0, peak: 0, wants, ..Self::none() };
        Self { private: 8 * M, ..vm }
    }

    const fn none() -> Self {
        Self {
            name: String::new(),
            group: 0,
            born: 0,
            size: 0,
            target: 0,
            private: 0,
            folded: 0,
            peak: 0,
            wants: 0,
            in_storm: false,
            paused: None,
            last_pause: None,
        }
    }

    const fn resident(&self) -> u64 {
        self.private + self.folded
    }

    /// The part of `wants` that is no page cache: the guest's balloon cannot take it.
    const fn needs(&self) -> u64 {
        self.wants - self.wants / CACHE
    }

    /// Simulates a quarter of a second of this guest: folding or a storm, its balloon, and its writes. Nothing happens
    /// to a paused guest.
    pub fn step(&mut self, now: u64) {
        if self.paused.is_some() {
            return;
        }
        if self.in_storm {
            let broken = self.folded.min(WRITTEN);
            (self.folded, self.private) = (self.folded - broken, self.private + broken);
            self.in_storm = self.folded > 0;
        } else if now.saturating_sub(self.born) > 30 * STEPS {
            let alike = ALIKE.min(self.wants / 2).saturating_sub(self.folded).min(FOLDED).min(self.private);
            (self.folded, self.private) = (self.folded + alike, self.private - alike);
        }
        // The balloon takes free memory first, and then page cache. It stops where only memory is left that programs
        // need.
        if self.size > self.target {
            let least = self.target.max(self.needs());
            self.size = self.size.saturating_sub(WITHDRAWN).max(least).min(self.size);
            let excess = self.resident().saturating_sub(self.size).min(self.private);
            self.private -= excess;
        } else {
            self.size = self.target;
        }
        let wanted = self.wants.min(self.size);
        let more = wanted.saturating_sub(self.resident()).min(WRITTEN);
        self.private += more;
        self.peak = self.peak.max(self.private);
    }

    fn facts(&self, now: u64) -> GuestFacts {
        let (free_bytes, cache_bytes) = (self.size - self.resident(), self.resident().saturating_sub(self.needs()));
        let claims = Claims {
            total_bytes: self.size,
            free_bytes,
            available_bytes: free_bytes + cache_bytes,
            cache_bytes,
            ..Claims::default()
        };
        GuestFacts {
            id: self.name.clone(),
            name: self.name.clone(),
            group: self.group.to_string(),
            age_s: now.saturating_sub(self.born) / STEPS,
            ram_bytes: RAM,
            guaranteed_bytes: KEPT,
            actual_bytes: self.size,
            target_bytes: Some(self.target),
            resident_bytes: self.resident(),
            folded_bytes: self.folded,
            peak_bytes: self.peak,
            driver: DriverState::Works,
            withdrawal_bytes_per_s: WITHDRAWN * STEPS,
            claims: Some(claims),
            ..GuestFacts::default()
        }
    }
}

/// Memory of the host in use: what each guest has for itself, and one copy of what each group has folded.
pub fn frames(vms: &[Vm]) -> u64 {
    let mut pools: BTreeMap<usize, u64> = BTreeMap::new();
    for vm in vms {
        let pool = pools.entry(vm.group).or_default();
        *pool = vm.folded.max(*pool);
    }
    vms.iter().map(|vm| vm.private).sum::<u64>() + pools.values().sum::<u64>()
}

/// Facts of the simulated host and guests at this moment, as the balancer gathers them on a real host.
pub fn facts(vms: &[Vm], now: u64, fell_per_s: u64) -> Facts {
    let guests: Vec<GuestFacts> = vms.iter().map(|vm| vm.facts(now)).collect();
    let host = HostFacts {
        total_bytes: TOTAL,
        available_bytes: TOTAL.saturating_sub(frames(vms)),
        falling_bytes_per_s: fell_per_s,
        floor_bytes: lend::usual_floor_bytes(TOTAL, &guests),
        ..HostFacts::default()
    };
    Facts { host, guests, ..Facts::default() }.bounded()
}
