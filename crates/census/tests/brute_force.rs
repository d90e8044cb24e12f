//! The census against counting by hand. Every number of a small made-up host is worked out again from first
//! principles. The findings must be the same whatever the number of threads and the bound of the index.

use census::{Census, Findings, GuestFindings, Interval, Layout};
use page::{Fingerprint, FrameId, FrameUse, GuestIndex, GuestPageKind, HostVirt, Lru, PageKind, PageSample, Region};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const HOST: u16 = u16::MAX;

#[derive(Clone, Debug)]
struct Frame {
    content: u64,
    owners: BTreeSet<u16>,
    kind: PageKind,
    mapped_elsewhere: bool,
}

#[derive(Clone, Debug)]
struct World {
    groups: Vec<u8>,
    frames: Vec<Frame>,
}

impl World {
    fn guests(&self) -> u16 {
        self.groups.len() as u16
    }

    fn group_name(&self, guest: u16) -> String {
        format!("g{}", self.groups[usize::from(guest)])
    }

    /// One sample for each frame and owner, sorted by owner; positions follow that order.
    fn samples(&self) -> (Vec<PageSample>, Layout) {
        let (mut samples, mut ranges, mut uses) = (Vec::new(), Vec::new(), Vec::new());
        for owner in (0..self.guests()).chain([HOST]) {
            let start = samples.len() as u32;
            let mut inside = Vec::new();
            for (n, frame) in self.frames.iter().enumerate().filter(|(_, f)| f.owners.contains(&owner)) {
                inside.push(use_of(n));
                samples.push(PageSample {
                    owner: GuestIndex(owner),
                    position: samples.len() as u32,
                    pid: 1,
                    address: HostVirt(0),
                    frame: FrameId(n as u64),
                    kind: frame.kind,
                    region: Region::GuestRam,
                    mapped_elsewhere: frame.mapped_elsewhere || frame.owners.len() > 1,
                    ksm: false,
                    kpageflags: None,
                    fingerprint: fingerprint(frame.content),
                });
            }
            if owner != HOST {
                ranges.push(start..samples.len() as u32);
                uses.push(inside);
            }
        }
        (samples, Layout { guests: ranges, map_cells: 16, uses, with_host: true })
    }

    fn take(&self, threads: usize, most_bytes: Option<usize>) -> Findings {
        self.take_samples(self.samples(), threads, most_bytes)
    }

    fn take_samples(
        &self,
        (samples, layout): (Vec<PageSample>, Layout),
        threads: usize,
        most_bytes: Option<usize>,
    ) -> Findings {
        let guests = (0..self.guests()).map(|g| GuestFindings {
            id: format!("guest{g}"),
            group: self.group_name(g),
            ..GuestFindings::default()
        });
        let mut census = Census::new(guests.collect(), layout);
        let mut first = Some(0);
        while let Some(from) = first {
            let interval = Interval::from(from);
            let mut collectors: Vec<_> = (0..threads).map(|_| census.collector(&interval, most_bytes)).collect();
            for (n, sample) in samples.iter().enumerate() {
                collectors[n % threads].push(sample);
            }
            let collected = collectors.into_iter().map(|c| c.finish()).collect();
            census.pass(&interval, collected);
            first = interval.next();
        }
        census.finish(None).0
    }
}

/// The use of frame `n` inside its guests; unknown for a few.
fn use_of(n: usize) -> Option<FrameUse> {
    let lru = if n.is_multiple_of(3) { Lru::Inactive } else { Lru::Active };
    (n % 29 != 28).then(|| FrameUse::new(GuestPageKind::ALL[n % 5], lru))
}

/// Content 0 is zeros; the fingerprints of others are spread over the hash space.
fn fingerprint(content: u64) -> Fingerprint {
    if content == 0 { Fingerprint::ZERO_PAGE } else { Fingerprint(content.wrapping_mul(0x9e37_79b9_7f4a_7c15)) }
}

/// The frames of a world by content.
type Contents<'a> = BTreeMap<u64, Vec<&'a Frame>>;

fn has_guest(frame: &Frame) -> bool {
    frame.owners.iter().any(|&o| o != HOST)
}

fn is_of_host_alone(frame: &Frame) -> bool {
    frame.owners.iter().all(|&o| o == HOST)
}

fn superfluous(frames: usize) -> u64 {
    frames.saturating_sub(1) as u64
}

/// Checks every number, slowly and straight from its definition.
fn check(world: &World, found: &Findings) {
    let mut contents = Contents::new();
    for frame in &world.frames {
        contents.entry(frame.content).or_default().push(frame);
    }
    check_savings(world, &contents, found);
    for (g, guest) in (0..).zip(&found.guests) {
        check_guest(world, &contents, g, guest);
    }
    check_kinds(world, found);
    check_commonness(world, found);
    check_opportunity(&contents, found);
    let (shared, extra) = world.frames.iter().fold((0, 0), |(n, x), f| {
        let guests = f.owners.iter().filter(|&&o| o != HOST).count() as u64;
        if guests > 1 { (n + 1, x + guests - 1) } else { (n, x) }
    });
    assert_eq!((found.already_shared.frames, found.already_shared.saved_pages), (shared, extra));
}

/// Checks the savings of merging everything, and of merging within groups.
fn check_savings(world: &World, contents: &Contents<'_>, found: &Findings) {
    // Merging everything leaves one frame a content.
    let all: u64 = contents.values().map(|c| superfluous(c.iter().filter(|f| has_guest(f)).count())).sum();
    assert_eq!(found.all_saved_pages, all, "all saved");

    // Merging within groups: frames whose owners are all of one group merge there; the rest merge among themselves.
    let bucket = |f: &Frame| -> Option<BTreeSet<String>> {
        let groups: BTreeSet<_> = f.owners.iter().filter(|&&o| o != HOST).map(|&o| world.group_name(o)).collect();
        (!groups.is_empty()).then_some(groups)
    };
    let mut saved: BTreeMap<String, u64> = BTreeMap::new();
    let mut common_saved = 0;
    for class in contents.values() {
        let mut in_bucket: BTreeMap<Option<String>, usize> = BTreeMap::new();
        for groups in class.iter().filter_map(|f| bucket(f)) {
            let name = if groups.len() == 1 { groups.first().cloned() } else { None };
            *in_bucket.entry(name).or_default() += 1;
        }
        for (name, frames) in in_bucket {
            match name {
                Some(name) => *saved.entry(name).or_default() += superfluous(frames),
                None => common_saved += superfluous(frames),
            }
        }
    }
    for group in &found.groups {
        assert_eq!(group.saved_pages, saved.get(&group.name).copied().unwrap_or(0), "{}", group.name);
    }
    assert_eq!(found.across_groups_saved_pages, common_saved);
    assert_eq!(found.isolation_price_pages, all - saved.values().sum::<u64>() - common_saved);
}

/// Checks the figures of guest `g`.
fn check_guest(world: &World, contents: &Contents<'_>, g: u16, guest: &GuestFindings) {
    let (mut resident, mut zero, mut distinct, mut within, mut folded) = (0, 0, 0, 0, 0);
    let (mut group, mut other, mut host) = (0, 0, 0);
    for class in contents.values() {
        let frames = class.iter().filter(|f| f.owners.contains(&g)).count() as u64;
        if frames == 0 {
            continue;
        }
        resident += frames;
        zero += if class[0].content == 0 { frames } else { 0 };
        distinct += 1;
        within += frames - 1;
        match nearest_holder(world, class, g) {
            Some(Holder::Group) => group += 1,
            Some(Holder::OtherGroup) => other += 1,
            Some(Holder::Host) => host += 1,
            None => {}
        }
        let alone = class.iter().all(|f| f.owners.len() == 1 && f.owners.contains(&g) && !f.mapped_elsewhere);
        folded += u64::from(alone);
    }
    let shared = world.frames.iter().filter(|f| f.owners.contains(&g) && (f.mapped_elsewhere || f.owners.len() > 1));
    let d = guest.duplicates;
    assert_eq!((guest.resident_pages, guest.zero_pages, guest.distinct_pages), (resident, zero, distinct));
    assert_eq!((d.within, d.group, d.other_groups, d.host), (within, group, other, Some(host)), "guest {g}");
    assert_eq!(guest.incremental_folded_pages, folded);
    assert_eq!(guest.already_shared_pages, shared.count() as u64);
    assert_eq!(guest.incremental_pages + guest.already_shared_pages, resident);
    let by_region: u64 = guest.regions.iter().map(|r| r.resident_pages).sum();
    let on_map: u32 = guest.page_map.iter().flat_map(|c| c.pages).sum();
    assert_eq!((by_region, u64::from(on_map)), (resident, resident));
}

enum Holder {
    Group,
    OtherGroup,
    Host,
}

/// The nearest holder of a content in a frame that guest `g` does not map.
fn nearest_holder(world: &World, class: &[&Frame], g: u16) -> Option<Holder> {
    let not_mine = || class.iter().filter(|f| !f.owners.contains(&g));
    let held_by = |same: bool| {
        not_mine().any(|f| {
            let guests: Vec<_> = f.owners.iter().filter(|&&o| o != HOST).collect();
            let in_group = guests.iter().any(|&&o| world.group_name(o) == world.group_name(g));
            if same { in_group } else { !guests.is_empty() && !in_group }
        })
    };
    if held_by(true) {
        Some(Holder::Group)
    } else if held_by(false) {
        Some(Holder::OtherGroup)
    } else {
        not_mine().any(|f| is_of_host_alone(f)).then_some(Holder::Host)
    }
}

/// Checks that rows and columns of the table of opportunities add up. The host's row counts one frame for each content
/// that both the host and guests hold.
fn check_opportunity(contents: &Contents<'_>, found: &Findings) {
    let table = found.opportunity;
    assert_eq!(table.within.total + table.between.total, found.all_saved_pages);
    let with_host =
        contents.values().filter(|c| c.iter().any(|f| has_guest(f)) && c.iter().any(|f| is_of_host_alone(f)));
    let of_host = table.host.expect("counted");
    assert_eq!(of_host.total, with_host.count() as u64);
    let kinds = |r: census::ByKinds| r.anon_anon + r.file_file + r.anon_file;
    assert_eq!(kinds(table.within) + kinds(table.between) + kinds(of_host), table.total.total);

    // Pairs of kinds, among guests only: the frames of one kind that are superfluous when only that kind merges.
    let one_kind: u64 = contents
        .values()
        .map(|c| superfluous(c.iter().filter(|f| has_guest(f)).filter(|f| f.kind == PageKind::Anon).count()))
        .sum();
    if contents.values().all(|c| c.iter().all(|f| f.kind == PageKind::Anon)) {
        assert_eq!(table.within.anon_anon + table.between.anon_anon, one_kind);
    }
}

/// Kinds, counted by hand. Counts of frames are checked for each kind. Counts of contents are checked in sum, for
/// guests whose kinds are all known.
fn check_kinds(world: &World, found: &Findings) {
    for (g, guest) in found.guests.iter().enumerate() {
        let g = g as u16;
        let mine: Vec<(usize, &Frame)> =
            world.frames.iter().enumerate().filter(|(_, f)| f.owners.contains(&g)).collect();
        let alone = |f: &Frame| f.owners.len() == 1 && !f.mapped_elsewhere;
        for kind in &guest.kinds {
            let of_kind = || mine.iter().filter(|(n, _)| use_of(*n).map(|u| u.kind()) == Some(kind.kind));
            assert_eq!(kind.backed_pages, of_kind().count() as u64);
            assert_eq!(kind.zero_pages, of_kind().filter(|(_, f)| f.content == 0).count() as u64);
            assert_eq!(kind.incremental_pages, of_kind().filter(|(_, f)| alone(f)).count() as u64);
        }
        if mine.iter().all(|(n, _)| use_of(*n).is_some()) && !mine.is_empty() {
            let sum = |figure: fn(&census::KindFindings) -> u64| guest.kinds.iter().map(figure).sum::<u64>();
            let d = guest.duplicates;
            assert_eq!(sum(|k| k.duplicates.within), d.within);
            assert_eq!(sum(|k| k.duplicates.group), d.group);
            assert_eq!(sum(|k| k.duplicates.other_groups), d.other_groups);
            assert_eq!(Some(sum(|k| k.duplicates.host.expect("counted"))), d.host);
            assert_eq!(sum(|k| k.incremental_folded_pages), guest.incremental_folded_pages);
        }
        let idle = mine.iter().filter(|(n, f)| {
            let only = world.frames.iter().filter(|other| other.content == f.content).count() == 1;
            use_of(*n).is_some_and(|u| u.lru() == Lru::Inactive) && only && f.content != 0
        });
        let idle: Vec<_> = idle.collect();
        assert_eq!(guest.idle_pages.inactive_unique, idle.len() as u64);
        assert_eq!(guest.idle_pages.incremental, idle.iter().filter(|(_, f)| alone(f)).count() as u64);
    }
}

fn check_commonness(world: &World, found: &Findings) {
    let guests = |f: &Frame| f.owners.iter().filter(|&&o| o != HOST).copied().collect::<BTreeSet<_>>();
    for (n, count) in found.commonness.frames_mapped_by.iter().enumerate() {
        let counts = |f: &&Frame| guests(f).len() == n + 1 && (n > 0 || f.owners.len() == 1 && !f.mapped_elsewhere);
        assert_eq!(*count, world.frames.iter().filter(counts).count() as u64);
    }
    let mut holders: BTreeMap<u64, BTreeSet<u16>> = BTreeMap::new();
    for frame in world.frames.iter().filter(|f| f.content != 0) {
        holders.entry(frame.content).or_default().extend(guests(frame));
    }
    for (g, count) in found.commonness.alone_if_folded.iter().enumerate() {
        let only = BTreeSet::from([g as u16]);
        assert_eq!(*count, holders.values().filter(|h| **h == only).count() as u64);
    }
    for (n, count) in found.commonness.contents_held_by.iter().enumerate() {
        assert_eq!(*count, holders.values().filter(|h| h.len() == n + 1).count() as u64);
    }
}

fn frame(guests: u16, contents: u64) -> impl Strategy<Value = Frame> {
    let owner = prop_oneof![8 => 0..guests, 1 => Just(HOST)];
    let owners = prop::collection::btree_set(owner, 1..3);
    let kind = prop_oneof![3 => Just(PageKind::Anon), 1 => Just(PageKind::File), 1 => Just(PageKind::Shmem)];
    // Content 0, the zero page, comes up more often than its share.
    let content = prop_oneof![1 => Just(0), 5 => 0..contents];
    (content, owners, kind, prop::bool::weighted(0.1)).prop_map(|(content, owners, kind, mapped_elsewhere)| Frame {
        content,
        owners,
        kind,
        mapped_elsewhere,
    })
}

fn world(frames: std::ops::Range<usize>, contents: u64) -> impl Strategy<Value = World> {
    prop::collection::vec(0..3_u8, 1..6).prop_flat_map(move |groups| {
        let frames = prop::collection::vec(frame(groups.len() as u16, contents), frames.clone());
        frames.prop_map(move |frames| World { groups: groups.clone(), frames })
    })
}

proptest! {
    #[test]
    fn census_equals_counting_by_hand(world in world(0..60, 12)) {
        check(&world, &world.take(1, None));
    }

    #[test]
    fn findings_do_not_depend_on_threads(world in world(0..200, 40)) {
        prop_assert_eq!(world.take(1, None).guests, world.take(3, None).guests);
        check(&world, &world.take(3, None));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The smallest index holds 1,024 entries a thread, so these take several passes.
    #[test]
    fn a_bounded_index_finds_the_same_in_several_passes(world in world(3000..5000, 4000)) {
        let free = world.take(1, None);
        check(&world, &free);
        for threads in [1, 2] {
            let mut bounded = world.take(threads, Some(1));
            prop_assert!(bounded.host.passes > 1);
            prop_assert!(bounded.host.index_bytes <= (threads * 1024 * 20) as u64);
            (bounded.host.passes, bounded.host.index_bytes) = (1, free.host.index_bytes);
            prop_assert_eq!(&bounded, &free);
        }
    }
}

/// A single content exceeds the bound: the pass cannot be cut, the figure says so, and the result is right.
#[test]
fn a_content_larger_than_the_bound_is_counted_whole() {
    let frame = |n: u16| Frame {
        content: if n < 3000 { 7 } else { u64::from(n) },
        owners: BTreeSet::from([n % 2]),
        kind: PageKind::Anon,
        mapped_elsewhere: false,
    };
    let world = World { groups: vec![0, 1], frames: (0..4000).map(frame).collect() };
    let found = world.take(1, Some(1));
    check(&world, &found);
    assert!(found.host.index_bytes > 3000 * 20);
}

/// A page that moves while its guest is looked at is seen in both places.
#[test]
fn frame_that_a_guest_shows_twice_is_one_guests() {
    let frame = |content| Frame { content, owners: BTreeSet::from([0]), kind: PageKind::Anon, mapped_elsewhere: false };
    let world = World { groups: vec![0], frames: vec![frame(1), frame(2)] };
    let (mut samples, layout) = world.samples();
    samples[1].frame = samples[0].frame;
    samples[1].fingerprint = samples[0].fingerprint;
    let found = world.take_samples((samples, layout), 1, None);
    assert_eq!(found.commonness.frames_mapped_by, [1]);
}

/// A booted guest holds mostly zeros; they take no room in the index.
#[test]
fn zero_pages_need_no_index() {
    let frame =
        |n: u16| Frame { content: 0, owners: BTreeSet::from([n % 2]), kind: PageKind::Anon, mapped_elsewhere: false };
    let world = World { groups: vec![0, 1], frames: (0..4000).map(frame).collect() };
    let found = world.take(1, None);
    check(&world, &found);
    assert_eq!((found.host.index_bytes, found.all_saved_pages, found.isolation_price_pages), (0, 3999, 1));
}
