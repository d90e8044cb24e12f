//! Expected sizes that were worked out by hand from the original rules. Sizes are in MiB.

use super::{Mom, Proxmox, Squeezed};
use crate::facts::{Claims, Facts, GuestFacts, HostFacts};
use crate::policy::Policy;
use crate::{DriverState, baseline};

const M: u64 = 1 << 20;

/// Least, present and greatest size of a guest, and its free memory.
type Vm = (u64, u64, u64, u64);

fn sizes(policy: &dyn Policy, host: (u64, u64, u64), vms: &[Vm]) -> Vec<u64> {
    sizes_if(policy, host, vms, |_| DriverState::Works)
}

/// New sizes, by the host's RAM, available memory and floor.
fn sizes_if(policy: &dyn Policy, host: (u64, u64, u64), vms: &[Vm], driver: fn(usize) -> DriverState) -> Vec<u64> {
    let (total, available, floor) = host;
    let guest = |(n, (least, now, most, free)): (usize, &Vm)| GuestFacts {
        ram_bytes: most * M,
        guaranteed_bytes: least * M,
        actual_bytes: now * M,
        resident_bytes: now * M,
        driver: driver(n),
        claims: Some(Claims { total_bytes: now * M, free_bytes: free * M, ..Claims::default() }),
        ..GuestFacts::default()
    };
    let host = HostFacts {
        total_bytes: total * M,
        available_bytes: available * M,
        floor_bytes: floor * M,
        ..HostFacts::default()
    };
    let facts = Facts { host, guests: vms.iter().enumerate().map(guest).collect(), ..Facts::default() };
    policy.sizes(&facts, 0).iter().map(|wish| wish.size_bytes.div_ceil(M)).collect()
}

#[test]
fn mom_does_as_its_rules_say() {
    let one = |total, free, vm: Vm| sizes(&Mom, (total, free, 0), &[vm])[0];
    let vectors = [
        ("10% free: 5% less, above used 200 + 10% of 400", one(1000, 100, (100, 400, 400, 200)), 380),
        ("used 390 + 40 is above the size: nothing", one(1000, 100, (100, 400, 400, 10)), 400),
        ("3% free: used 400 - 2% of 400, the guest swaps", one(1000, 30, (100, 400, 400, 0)), 392),
        ("nothing free: used 396 - 5% of 400 is below 5% less", one(1000, 0, (100, 400, 400, 4)), 380),
        ("5% less is below the minimum", one(1000, 100, (108, 110, 400, 100)), 108),
        ("2 of 1000 is less than 0.25%", one(10_000, 1000, (998, 1000, 1000, 900)), 1000),
        ("20% free is no pressure: 5% more", one(1000, 200, (100, 200, 400, 100)), 210),
        ("growth goes to used 200 + 20% of 200 at once", one(1000, 300, (100, 200, 400, 0)), 240),
        ("growth ends at the maximum", one(1000, 300, (100, 395, 400, 300)), 400),
        ("a guest without a balloon does not grow", one(1000, 900, (100, 400, 400, 0)), 400),
    ];
    for (rule, is, expected) in vectors {
        assert_eq!(is, expected, "{rule}");
    }
}

/// The goal is available memory less 20% of RAM.
#[test]
fn proxmox_does_as_its_rules_say() {
    let two = |total, available, vms: [Vm; 2]| sizes(&Proxmox, (total, available, 0), &vms);
    let vectors = [
        ("a goal of 5 MiB is none", two(1000, 205, [(100, 100, 200, 0), (100, 100, 200, 0)]), [100, 100]),
        ("60 MiB in equal shares", two(1000, 260, [(100, 100, 200, 0), (100, 100, 200, 0)]), [130, 130]),
        ("100 MiB a round", two(2000, 1000, [(100, 100, 1000, 0), (100, 100, 1000, 0)]), [200, 200]),
        (
            "the guest with little free memory first",
            two(1000, 260, [(100, 100, 400, 0), (100, 100, 400, 50)]),
            [160, 100],
        ),
        (
            "then all: 30, and what the full one does not take",
            two(1000, 260, [(100, 100, 100, 0), (100, 100, 400, 50)]),
            [100, 160],
        ),
        (
            "-80 MiB from the guest with free memory",
            two(1000, 120, [(100, 300, 400, 50), (100, 300, 400, 0)]),
            [220, 300],
        ),
        ("-150 MiB: no more than 100 of a guest", two(1000, 50, [(100, 300, 400, 50), (100, 300, 400, 0)]), [200, 300]),
        ("at the minimum nothing is left", two(1000, 120, [(100, 100, 400, 0), (100, 100, 400, 0)]), [100, 100]),
        (
            "20 MiB: the one above its share gives 3 to the other",
            two(1000, 220, [(100, 116, 400, 0), (100, 100, 400, 0)]),
            [118, 118],
        ),
    ];
    for (rule, is, expected) in vectors {
        assert_eq!(is, expected, "{rule}");
    }
}

/// The surplus is the available memory, and all that guests have above their minimum, less the floor.
#[test]
fn squeezed_does_as_its_rules_say() {
    let two = |available, floor, vms: [Vm; 2]| sizes(&Squeezed, (1000, available, floor), &vms);
    let vectors = [
        ("250 of ranges of 400", two(100, 50, [(100, 200, 300, 0), (100, 200, 300, 0)]), [225, 225]),
        ("80 of 400: a fifth of each range", two(130, 50, [(100, 100, 200, 0), (100, 100, 400, 0)]), [120, 160]),
        ("no surplus: the minimum", two(20, 50, [(100, 100, 300, 0), (100, 100, 300, 0)]), [100, 100]),
        ("more than all ranges: the maximum", two(900, 50, [(100, 100, 300, 0), (100, 100, 300, 0)]), [300, 300]),
    ];
    for (rule, is, expected) in vectors {
        assert_eq!(is, expected, "{rule}");
    }
    let stuck = |n| if n == 1 { DriverState::Stuck } else { DriverState::Works };
    let is = sizes_if(&Squeezed, (1000, 50, 50), &[(100, 200, 300, 0), (100, 250, 300, 0)], stuck);
    assert_eq!(is, [200, 250], "a stuck driver is left out");
}

#[test]
fn every_baseline_is_found_by_its_name() {
    assert!(baseline::NAMES.iter().all(|name| baseline::named(name).is_some_and(|policy| policy.name() == *name)));
}
