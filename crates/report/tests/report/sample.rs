//! A made-up census with the proportions of a real one. There are VMs of 256 MiB in groups of two, and three
//! containers, two of which share a root. The figures agree with each other, as a real census's do.

use census::{
    AlreadyShared, ByKinds, Change, Commonness, Duplicates, Findings, GroupFindings, GuestFindings, HostFindings,
    MapCell, Opportunity, Partial, RegionFindings, RunLengths, Share,
};
use guest::{Facts, Footprint, Guest, GuestKind, RegionFootprint};
use page::{Region, pages_to_bytes};

/// Number of pages of a cell of the map.
const CELL_PAGES: u32 = 32;

/// A small generator of numbers that look random and are the same on every run.
struct Dice(u64);

impl Dice {
    /// A number below `n`.
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(n)) as u32
    }
}

/// Regions of a VM, and the number of cells that each takes.
const VM: [(Region, u32); 5] = [
    (Region::Files, 150),
    (Region::Heap, 160),
    (Region::TranslationCache, 120),
    (Region::GuestRam, 1700),
    (Region::Stack, 1),
];
/// Regions of a container, and the number of cells that each takes.
const CONTAINER: [(Region, u32); 3] = [(Region::Files, 40), (Region::Heap, 12), (Region::Stack, 1)];

/// Neighbouring cells mostly resemble each other, as in a real address space.
fn map_of(regions: &[(Region, u32)], dice: &mut Dice) -> Vec<MapCell> {
    let mut cells = Vec::new();
    for &(region, count) in regions {
        let mut main = Share::Unique;
        for _ in 0..count {
            if dice.below(6) == 0 {
                main = pick(region, dice);
            }
            let mut pages = [0; Share::ALL.len()];
            let most = CELL_PAGES / 2 + dice.below(CELL_PAGES / 2 + 1);
            pages[main as usize] += most;
            pages[pick(region, dice) as usize] += CELL_PAGES - most;
            cells.push(MapCell { pages, region: Some(region) });
        }
    }
    cells
}

fn pick(region: Region, dice: &mut Dice) -> Share {
    let of = |weights: [u32; 7], dice: &mut Dice| {
        let mut roll = dice.below(weights.iter().sum());
        for (share, weight) in Share::ALL.into_iter().zip(weights) {
            if roll < weight {
                return share;
            }
            roll -= weight;
        }
        Share::Unique
    };
    match region {
        Region::Files => of([0, 70, 3, 2, 1, 6, 18], dice),
        Region::GuestRam => of([12, 0, 34, 8, 5, 6, 35], dice),
        _ => of([10, 0, 4, 2, 4, 1, 79], dice),
    }
}

fn guest_findings(name: &str, group: &str, kind: GuestKind, dice: &mut Dice) -> GuestFindings {
    let page_map = map_of(if kind.is_vm() { &VM } else { &CONTAINER }, dice);
    let sum = |of: &dyn Fn(&MapCell) -> bool, share: Share| -> u64 {
        page_map.iter().filter(|c| of(c)).map(|c| u64::from(c.pages[share as usize])).sum()
    };
    let all = |share| sum(&|_| true, share);
    let resident: u64 = Share::ALL.map(all).iter().sum();
    let regions = Region::ALL.iter().filter(|&&r| page_map.iter().any(|c| c.region == Some(r))).map(|&region| {
        let here = |share| sum(&|c| c.region == Some(region), share);
        let resident: u64 = Share::ALL.map(here).iter().sum();
        RegionFindings {
            region,
            resident_pages: resident,
            zero_pages: here(Share::Zero),
            duplicate_pages: resident - here(Share::Unique),
            incremental_pages: resident - here(Share::AlreadyShared),
            incremental_folded_pages: here(Share::Unique),
        }
    });
    GuestFindings {
        id: format!("{}:{name}", kind.name()),
        name: name.into(),
        group: group.into(),
        kind: kind.name().into(),
        mapped_pages: resident + 40,
        resident_pages: resident,
        zero_pages: all(Share::Zero),
        distinct_pages: resident - all(Share::Zero) - all(Share::Within) / 2,
        duplicates: Duplicates {
            within: all(Share::Within) / 2 + all(Share::Zero),
            group: all(Share::Group),
            other_groups: all(Share::OtherGroups),
            host: Some(all(Share::Host)),
        },
        already_shared_pages: all(Share::AlreadyShared),
        incremental_pages: resident - all(Share::AlreadyShared),
        incremental_folded_pages: all(Share::Unique),
        regions: regions.collect(),
        kinds: if kind.is_vm() { kinds(resident) } else { Vec::new() },
        page_map,
        ..GuestFindings::default()
    }
}

/// A VM's memory by kind: each kind has a tenth of it, and as much again that the host does not back.
fn kinds(resident: u64) -> Vec<census::KindFindings> {
    let some = |kind| census::KindFindings {
        pages: resident / 5,
        backed_pages: resident / 10,
        zero_pages: resident / 100,
        incremental_pages: resident / 20,
        ..census::KindFindings::empty(kind, true)
    };
    page::GuestPageKind::ALL.map(some).into()
}

/// Splits superfluous frames by pair of kinds, in the proportions of the study that the table comes from.
fn by_kinds(total: u64) -> ByKinds {
    let (file_file, anon_file) = (total / 11, total / 8);
    ByKinds { anon_anon: total - file_file - anon_file, file_file, anon_file, total }
}

/// A census of `groups` groups of two VMs and a group of three containers.
pub fn findings(groups: usize) -> Findings {
    let guests = guests(groups);
    let groups = group_findings(&guests);
    let of_groups: u64 = groups.iter().map(|g| g.saved_pages).sum();
    let price = guests.iter().map(|g| g.duplicates.other_groups).sum::<u64>() / 2;
    let all_saved = of_groups + 900 + price;
    let pages: u64 = guests.iter().map(|g| g.mapped_pages).sum();
    Findings {
        host: host(pages),
        commonness: commonness(guests.len()),
        opportunity: opportunity(&guests, all_saved),
        across_groups_saved_pages: 900,
        all_saved_pages: all_saved,
        isolation_price_pages: price,
        already_shared: AlreadyShared {
            frames: guests.iter().map(|g| g.already_shared_pages).max().unwrap_or(0),
            saved_pages: guests.iter().map(|g| g.already_shared_pages).sum::<u64>() * 2 / 3,
            ..AlreadyShared::default()
        },
        runs: runs(pages),
        change: None,
        partial: Vec::new(),
        guests,
        groups,
    }
}

fn guests(groups: usize) -> Vec<GuestFindings> {
    let mut dice = Dice(7);
    let names = ["acme", "beta", "gamma", "delta"];
    let mut guests = Vec::new();
    for g in 0..groups {
        let group = names.get(g).map_or_else(|| format!("tenant-{g}"), |name| (*name).into());
        for n in 1..=2 {
            guests.push(guest_findings(&format!("{group}-{n}"), &group, GuestKind::Qemu, &mut dice));
        }
    }
    for name in ["web-shared", "db-shared", "web-copied"] {
        guests.push(guest_findings(name, "containers", GuestKind::Lxc, &mut dice));
    }
    guests
}

fn opportunity(guests: &[GuestFindings], all_saved: u64) -> Opportunity {
    let sum = |of: fn(Duplicates) -> u64| guests.iter().map(|g| of(g.duplicates)).sum::<u64>();
    let (within, host) = (sum(|d| d.within), sum(|d| d.host.unwrap_or(0)));
    Opportunity {
        within: by_kinds(within),
        host: Some(by_kinds(host)),
        between: by_kinds(all_saved - within),
        total: by_kinds(all_saved + host),
    }
}

fn host(pages: u64) -> HostFindings {
    HostFindings {
        page_bytes: 4096,
        pages_scanned: pages,
        pages_hashed: pages * 9 / 10,
        seconds: 0.83,
        hash_gib_per_s: 2.31,
        threads: 2,
        index_bytes: pages * 20,
        passes: 1,
        host_resident_pages: Some(91_234),
        drifted_pages: 12,
        ..HostFindings::default()
    }
}

fn commonness(guests: usize) -> Commonness {
    Commonness {
        frames_mapped_by: (0..guests as u64).map(|n| 40_000 >> n.min(60)).collect(),
        other_frames_mapped_by: (0..guests as u64).map(|n| 4_000 >> n.min(60)).collect(),
        contents_held_by: (0..guests as u64).map(|n| 20_000 >> n.min(60)).collect(),
        alone_if_folded: vec![5_000; guests],
    }
}

fn runs(pages: u64) -> RunLengths {
    RunLengths {
        one_stretch_in: 1,
        pages_looked_at: pages,
        matched_pages: 96_100,
        runs: 30_870,
        mean: 3.1,
        median: 1,
        share_in_runs_of_8: 0.63,
        runs_by_log2_length: vec![21_020, 4_630, 2_410, 1_505, 880, 301, 84, 30, 9, 1],
        pages_by_log2_length: vec![21_020, 10_905, 12_150, 15_320, 17_410, 11_740, 4_390, 1_660, 890, 615],
    }
}

fn group_findings(guests: &[GuestFindings]) -> Vec<GroupFindings> {
    let mut groups: Vec<GroupFindings> = Vec::new();
    for guest in guests {
        if groups.last().is_none_or(|g| g.name != guest.group) {
            groups.push(GroupFindings { name: guest.group.clone(), ..GroupFindings::default() });
        }
        let group = groups.last_mut().expect("one was pushed");
        group.guests.push(guest.id.clone());
        group.resident_pages += guest.incremental_pages;
        group.saved_pages += guest.duplicates.within + guest.duplicates.group / 2;
        group.saved_bytes = pages_to_bytes(group.saved_pages);
    }
    groups
}

/// The second round of a watch, and two guests that could not be read to the end.
pub fn with_change_and_partial(mut findings: Findings) -> Findings {
    findings.change = Some(Change {
        round: 2,
        seconds: 10.2,
        unchanged_pages: 480_210,
        changed_pages: 11_204,
        gone_pages: 2_410,
        new_pages: 3_377,
        duplicate_pages: 190_330,
        still_duplicate_pages: 181_004,
        mean_duplicate_seconds: 9.6,
    });
    for (guest, pid, reason) in [
        ("qemu:acme-2", 4711, "process ended while its pages were read; what was read before is counted"),
        ("lxc:web-copied", 1892, "cannot open /proc/1892/mem: permission denied; run as root to see it"),
    ] {
        findings.partial.push(Partial { guest: guest.into(), pid, reason: reason.into() });
    }
    findings
}

/// Footprints of the guests of `findings`.
pub fn footprints(findings: &Findings) -> Vec<Footprint> {
    findings.guests.iter().enumerate().map(|(n, guest)| footprint(guest, n as u32)).collect()
}

fn footprint(found: &GuestFindings, n: u32) -> Footprint {
    let regions: Vec<_> = found
        .regions
        .iter()
        .map(|r| {
            let (rss, uss) = (pages_to_bytes(r.resident_pages), pages_to_bytes(r.incremental_pages));
            RegionFootprint {
                region: r.region,
                rss_bytes: rss,
                pss_bytes: uss + (rss - uss) / 3,
                uss_bytes: uss,
                swap_bytes: 0,
            }
        })
        .collect();
    let sum = |of: fn(&RegionFootprint) -> u64| regions.iter().map(of).sum();
    let vm = found.kind == "qemu";
    Footprint {
        guest: Guest {
            id: found.id.clone(),
            name: found.name.clone(),
            kind: if vm { GuestKind::Qemu } else { GuestKind::Lxc },
            pids: if vm { vec![4000 + n] } else { vec![4000 + n, 5000 + n, 6000 + n] },
            group: found.group.clone(),
            ram_bytes: vm.then_some(256 << 20),
            facts: Facts::default(),
        },
        rss_bytes: sum(|r| r.rss_bytes),
        pss_bytes: sum(|r| r.pss_bytes),
        uss_bytes: sum(|r| r.uss_bytes),
        swap_bytes: 0,
        ksm_bytes: Some(0),
        thp_bytes: 0,
        hugetlb_bytes: 0,
        folded_bytes: 0,
        regions,
    }
}
