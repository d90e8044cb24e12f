//! A simulated host with guests, for tests: plans take effect in it.

use crate::facts::{Claims, Facts, GuestFacts, HostFacts};
use crate::{DriverState, Plan};

const M: u64 = 1 << 20;

/// A guest with an empty balloon. All of its memory is resident, and it claims that it needs none.
pub(crate) fn guest(id: &str, ram_bytes: u64, guaranteed_bytes: u64) -> GuestFacts {
    GuestFacts {
        id: id.into(),
        group: "g".into(),
        ram_bytes,
        guaranteed_bytes,
        actual_bytes: ram_bytes,
        resident_bytes: ram_bytes,
        driver: DriverState::Works,
        withdrawal_bytes_per_s: 1 << 40,
        claims: Some(Claims { total_bytes: ram_bytes, available_bytes: ram_bytes, ..Claims::default() }),
        ..GuestFacts::default()
    }
}

/// One guest of a world, in MiB: RAM, guarantee, memory that it uses, and the shared percentage of that memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Program {
    pub ram: u64,
    pub guaranteed: u64,
    pub used: u64,
    pub shared_percent: u64,
    pub faults: f64,
}

/// A host whose guests use the same memory all the time.
#[derive(Clone, Debug)]
pub(crate) struct World {
    pub total: u64,
    pub floor: u64,
    pub programs: Vec<Program>,
    /// Sizes in bytes.
    pub sizes: Vec<u64>,
}

impl World {
    /// Guests that begin with their guarantee.
    pub fn new(total: u64, floor: u64, programs: Vec<Program>) -> Self {
        let sizes = programs.iter().map(|program| program.guaranteed * M).collect();
        Self { total, floor, programs, sizes }
    }

    pub fn facts(&self) -> Facts {
        let of = |(n, (program, size)): (usize, (&Program, &u64))| {
            let resident = (program.used * M).min(*size);
            let mut guest = guest(&format!("vm{n}"), program.ram * M, program.guaranteed * M);
            guest.group = format!("g{}", n % 2);
            guest.reports_free_pages = n % 3 == 0;
            (guest.actual_bytes, guest.resident_bytes) = (*size, resident);
            guest.folded_bytes = resident / 100 * program.shared_percent;
            guest.saved_bytes = guest.folded_bytes as i64;
            let free_bytes = size - resident;
            guest.claims = Some(Claims {
                total_bytes: *size,
                free_bytes,
                available_bytes: free_bytes + resident / 4,
                cache_bytes: resident / 4,
                faults_per_s: program.faults,
                ..Claims::default()
            });
            guest
        };
        let guests: Vec<_> = self.programs.iter().zip(&self.sizes).enumerate().map(of).collect();
        let frames: u64 = guests.iter().map(|guest| guest.resident_bytes - guest.folded_bytes).sum();
        let host = HostFacts {
            total_bytes: self.total * M,
            available_bytes: (self.total * M).saturating_sub(frames),
            floor_bytes: self.floor * M,
            ..HostFacts::default()
        };
        let mut facts = Facts { host, guests, ..Facts::default() };
        for guest in &facts.guests {
            facts.groups.entry(guest.group.clone()).or_default().saved_bytes += guest.saved_bytes;
        }
        facts.bounded()
    }

    /// Carries a plan out.
    pub fn apply(&mut self, plan: &Plan) {
        let facts = self.facts();
        for step in plan.frees.iter().chain(&plan.grows) {
            let n = facts.guests.iter().position(|guest| guest.id == step.guest).expect("a guest of this world");
            self.sizes[n] = step.to_bytes;
        }
    }
}
