//! From classes to findings: the amounts that every class adds to every guest, group and cell of the tables.

use crate::class::{ClassCounts, Groups};
use crate::zeros::{ZeroCount, Zeros};
use crate::{
    AlreadyShared, ByKinds, Commonness, Duplicates, Entry, Findings, GroupFindings, GuestFindings, KindFindings,
    Layout, MapCell, Opportunity, RegionFindings, Share,
};
use page::{Fingerprint, FrameUse, GuestIndex, GuestPageKind, Lru, PageKind, Region, pages_to_bytes};

/// Counts of one guest as they grow.
#[derive(Clone, Debug)]
struct GuestTally {
    findings: GuestFindings,
    regions: [RegionFindings; Region::ALL.len()],
    kinds: [KindFindings; GuestPageKind::ALL.len()],
    /// Number of the last class of which a page of this guest was counted by kind; 0 before the first one.
    last_class: u64,
}

/// The nearest other holder of a content that a guest holds: the first that applies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Nearest {
    Group,
    OtherGroups,
    Host,
    None,
}

/// Kinds of guests that are VMs: of these only guest RAM is folded.
const VMS: [&str; 3] = ["qemu", "firecracker", "cloud_hypervisor"];

/// Everything counted so far.
#[derive(Debug)]
pub struct Tally {
    groups: Groups,
    group_names: Vec<String>,
    guests: Vec<GuestTally>,
    /// By bucket, that is by group and for all frames common to several: resident frames, and frames that merging would
    /// free.
    buckets: Vec<(u64, u64)>,
    opportunity: Opportunity,
    already_shared: AlreadyShared,
    /// `None` if the host's own memory is not counted.
    host_resident_pages: Option<u64>,
    counts: ClassCounts,
    commonness: Commonness,
    /// Whether a guest is a VM, by guest.
    vms: Vec<bool>,
    /// Buffer of `add_commonness`: guests that hold the content in frames that can be folded.
    holders: Vec<GuestIndex>,
    /// Buffer of `add_commonness`: guests that map the frame.
    mappers: Vec<GuestIndex>,
    /// Classes counted so far.
    classes: u64,
}

impl Tally {
    /// Starts counting for `guests`. Of each guest, id, name, group and kind are filled in.
    pub fn new(guests: Vec<GuestFindings>, layout: &Layout) -> Self {
        let mut group_names: Vec<String> = Vec::new();
        let of_guest = guests.iter().map(|g| {
            group_names.iter().position(|n| *n == g.group).unwrap_or_else(|| {
                group_names.push(g.group.clone());
                group_names.len() - 1
            }) as u16
        });
        let groups = Groups { of_guest: of_guest.collect(), count: group_names.len() as u16 };
        let tally_of = |(n, mut findings): (usize, GuestFindings)| {
            let cells = layout.cells_of(GuestIndex(n as u16));
            findings.duplicates = Duplicates::none(layout.with_host);
            findings.page_map = vec![MapCell::default(); cells as usize];
            GuestTally {
                findings,
                regions: Region::ALL.map(RegionFindings::empty),
                kinds: GuestPageKind::ALL.map(|kind| KindFindings::empty(kind, layout.with_host)),
                last_class: 0,
            }
        };
        Self {
            commonness: Commonness {
                frames_mapped_by: vec![0; guests.len()],
                other_frames_mapped_by: vec![0; guests.len()],
                contents_held_by: vec![0; guests.len()],
                alone_if_folded: vec![0; guests.len()],
            },
            vms: guests.iter().map(|g| VMS.contains(&g.kind.as_str())).collect(),
            holders: Vec::new(),
            mappers: Vec::new(),
            classes: 0,
            counts: ClassCounts::new(&groups),
            buckets: vec![(0, 0); group_names.len() + 1],
            guests: guests.into_iter().enumerate().map(tally_of).collect(),
            groups,
            group_names,
            opportunity: Opportunity { host: layout.with_host.then(ByKinds::default), ..Opportunity::default() },
            already_shared: AlreadyShared::default(),
            host_resident_pages: layout.with_host.then_some(0),
        }
    }

    /// Adds all frames of one content. Returns whether the content is held more than once.
    pub fn class(&mut self, layout: &Layout, class: &[Entry], zeros: Option<&Zeros>) -> bool {
        if let (&[only], None) = (class, zeros)
            && only.fingerprint() != Fingerprint::ZERO_PAGE
        {
            self.add_single(layout, only);
            return false;
        }
        self.classes += 1;
        let zero_counts = || zeros.into_iter().flat_map(Zeros::iter);
        self.counts.count(&self.groups, class, zero_counts());
        self.add_totals();
        let is_zero = zeros.is_some() || class.first().is_some_and(|e| e.fingerprint() == Fingerprint::ZERO_PAGE);
        for owner in self.counts.guests.clone() {
            self.add_guest(owner);
        }
        self.add_regions_of_single_holder(layout, class, zero_counts());
        self.add_commonness(class, zero_counts(), is_zero);
        for mappings in class.chunk_by(|a, b| a.frame() == b.frame()) {
            let shared = mappings.len() > 1;
            for &mapping in mappings {
                self.add_mapping(layout, mapping, shared, is_zero);
            }
        }
        for zero in zero_counts() {
            self.add_zeros(zero);
        }
        self.counts.guest_frames + u64::from(self.counts.duplicate_in_host()) > 1
    }

    /// Adds a content that is held once, as most are. The result is the same as [`Tally::class`]'s, but quicker.
    fn add_single(&mut self, layout: &Layout, only: Entry) {
        let owner = only.owner();
        if owner == GuestIndex::HOST {
            add(&mut self.host_resident_pages, 1);
            return;
        }
        let shared = only.mapped_elsewhere();
        self.classes += 1;
        self.add_single_commonness(only);
        self.buckets[usize::from(self.groups.of(owner))].0 += 1;
        self.already_shared.ksm_frames += u64::from(only.ksm());
        let guest = &mut self.guests[usize::from(owner.0)];
        guest.findings.resident_pages += 1;
        guest.findings.distinct_pages += 1;
        guest.findings.incremental_folded_pages += u64::from(!shared);
        guest.regions[only.region() as usize].incremental_folded_pages += u64::from(!shared);
        guest.add_frame(layout, only, if shared { Share::AlreadyShared } else { Share::Unique }, shared, false);
        if let Some(inside) = layout.use_of(owner, only.position()) {
            guest.kinds[inside.kind() as usize].incremental_folded_pages += u64::from(!shared);
            guest.add_kind(
                inside,
                self.classes,
                Some(only),
                Counted { pages: 1, zero: false, shared, nearest: Nearest::None },
            );
            guest.add_idle(inside, shared);
        }
    }

    fn can_fold(&self, owner: GuestIndex, region: Region, kind: PageKind) -> bool {
        kind.can_be_folded(region, self.vms[usize::from(owner.0)])
    }

    fn add_single_commonness(&mut self, only: Entry) {
        let foldable = self.can_fold(only.owner(), only.region(), only.kind());
        let frame = u64::from(!only.mapped_elsewhere());
        let common = &mut self.commonness;
        common.frames_mapped_by[0] += frame;
        common.other_frames_mapped_by[0] += if foldable { 0 } else { frame };
        common.contents_held_by[0] += u64::from(foldable);
        common.alone_if_folded[usize::from(only.owner().0)] += if foldable { 1 } else { frame };
    }

    /// Counts each frame by the number of guests that map it, and the content by the number of guests that hold it.
    fn add_commonness(&mut self, class: &[Entry], zeros: impl Iterator<Item = ZeroCount>, is_zero: bool) {
        self.holders.clear();
        for mappings in class.chunk_by(|a, b| a.frame() == b.frame()) {
            let guests = || mappings.iter().filter(|m| m.owner() != GuestIndex::HOST);
            let Some(first) = guests().next() else { continue };
            let mut foldable = true;
            for mapping in guests() {
                foldable &= self.can_fold(mapping.owner(), mapping.region(), mapping.kind());
            }
            if foldable && !is_zero {
                self.holders.extend(guests().map(|m| m.owner()));
            }
            // A frame that the kernel gave to another page during the scan may have two entries of one guest.
            self.mappers.clear();
            self.mappers.extend(guests().map(|m| m.owner()));
            self.mappers.sort_unstable();
            self.mappers.dedup();
            let owners = self.mappers.len();
            if owners == 1 && mappings.iter().any(|m| m.mapped_elsewhere()) {
                continue;
            }
            let common = &mut self.commonness;
            common.frames_mapped_by[owners - 1] += 1;
            if !foldable {
                common.other_frames_mapped_by[owners - 1] += 1;
                common.alone_if_folded[usize::from(first.owner().0)] += u64::from(owners == 1);
            }
        }
        for zero in zeros.filter(|z| z.owner != GuestIndex::HOST) {
            let foldable = self.can_fold(zero.owner, zero.region, zero.kind);
            let others = if foldable { 0 } else { zero.pages };
            self.commonness.frames_mapped_by[0] += zero.pages;
            self.commonness.other_frames_mapped_by[0] += others;
            self.commonness.alone_if_folded[usize::from(zero.owner.0)] += others;
        }
        self.holders.sort_unstable();
        self.holders.dedup();
        if let Some(n) = self.holders.len().checked_sub(1) {
            self.commonness.contents_held_by[n] += 1;
            if n == 0 {
                self.commonness.alone_if_folded[usize::from(self.holders[0].0)] += 1;
            }
        }
    }

    fn nearest_duplicate(&self, owner: GuestIndex) -> Nearest {
        let (counts, groups) = (&self.counts, &self.groups);
        match () {
            () if counts.duplicate_in_group(groups, owner) => Nearest::Group,
            () if counts.duplicate_in_other_groups(groups, owner) => Nearest::OtherGroups,
            () if counts.duplicate_in_host() => Nearest::Host,
            () => Nearest::None,
        }
    }

    fn add_totals(&mut self) {
        let counts = &self.counts;
        let (within, between, host) = counts.opportunity();
        let table = &mut self.opportunity;
        table.within += within;
        table.between += between;
        if let Some(of_host) = &mut table.host {
            *of_host += host;
        }
        for part in [within, between, host] {
            table.total += part;
        }
        for &bucket in &counts.buckets {
            let frames = counts.bucket_frames(bucket);
            let (resident, superfluous) = &mut self.buckets[usize::from(bucket)];
            *resident += frames;
            *superfluous += frames - 1;
        }
        self.already_shared.frames += counts.shared_frames;
        self.already_shared.saved_pages += counts.shared_mappings;
        self.already_shared.ksm_frames += counts.ksm_frames;
    }

    fn add_guest(&mut self, owner: GuestIndex) {
        let (counts, groups) = (&self.counts, &self.groups);
        let frames = counts.frames_of(owner);
        let findings = &mut self.guests[usize::from(owner.0)].findings;
        findings.resident_pages += frames;
        findings.distinct_pages += 1;
        let Duplicates { within, group, other_groups, host } = &mut findings.duplicates;
        *within += frames - 1;
        if counts.duplicate_in_group(groups, owner) {
            *group += 1;
        } else if counts.duplicate_in_other_groups(groups, owner) {
            *other_groups += 1;
        } else if counts.duplicate_in_host() {
            add(host, 1);
        }
    }

    /// Contents that one guest alone holds: they remain its cost if everything is merged.
    fn add_regions_of_single_holder(
        &mut self,
        layout: &Layout,
        class: &[Entry],
        mut zeros: impl Iterator<Item = ZeroCount>,
    ) {
        let counts = &self.counts;
        let &[owner] = counts.guests.as_slice() else { return };
        if counts.mapped_elsewhere || counts.duplicate_in_host() {
            return;
        }
        let inside = |e: &Entry| layout.use_of(owner, e.position()).map(|u| u.kind());
        let first = class.first().map(|e| (e.region(), inside(e)));
        let Some((region, kind)) = first.or_else(|| zeros.next().map(|z| (z.region, z.guest_kind))) else { return };
        let guest = &mut self.guests[usize::from(owner.0)];
        guest.findings.incremental_folded_pages += 1;
        guest.regions[region as usize].incremental_folded_pages += 1;
        if let Some(kind) = kind {
            guest.kinds[kind as usize].incremental_folded_pages += 1;
        }
    }

    fn add_mapping(&mut self, layout: &Layout, mapping: Entry, shared_here: bool, is_zero: bool) {
        let owner = mapping.owner();
        if owner == GuestIndex::HOST {
            add(&mut self.host_resident_pages, 1);
            return;
        }
        let shared = shared_here || mapping.mapped_elsewhere();
        let share = if is_zero { Share::Zero } else { self.share_of(owner, shared) };
        let duplicate = self.is_duplicate(owner);
        let (nearest, class) = (self.nearest_duplicate(owner), self.classes);
        let guest = &mut self.guests[usize::from(owner.0)];
        guest.add_frame(layout, mapping, share, shared, duplicate);
        if let Some(inside) = layout.use_of(owner, mapping.position()) {
            guest.add_kind(inside, class, Some(mapping), Counted { pages: 1, zero: is_zero, shared, nearest });
            if !duplicate && !is_zero {
                guest.add_idle(inside, shared);
            }
        }
    }

    fn add_zeros(&mut self, zero: ZeroCount) {
        if zero.owner == GuestIndex::HOST {
            add(&mut self.host_resident_pages, zero.pages);
            return;
        }
        let duplicate = self.is_duplicate(zero.owner);
        let (nearest, class) = (self.nearest_duplicate(zero.owner), self.classes);
        let guest = &mut self.guests[usize::from(zero.owner.0)];
        if let Some(kind) = zero.guest_kind {
            let counted = Counted { pages: zero.pages, zero: true, shared: false, nearest };
            guest.add_kind(FrameUse::new(kind, Lru::None), class, None, counted);
        }
        let region = &mut guest.regions[zero.region as usize];
        region.resident_pages += zero.pages;
        region.zero_pages += zero.pages;
        region.duplicate_pages += if duplicate { zero.pages } else { 0 };
        region.incremental_pages += zero.pages;
        guest.findings.zero_pages += zero.pages;
        guest.findings.incremental_pages += zero.pages;
        if let Some(cell) = zero.cell {
            let cell = &mut guest.findings.page_map[cell as usize];
            cell.pages[Share::Zero as usize] += zero.pages as u32;
            cell.region.get_or_insert(zero.region);
        }
    }

    fn is_duplicate(&self, owner: GuestIndex) -> bool {
        let (counts, groups) = (&self.counts, &self.groups);
        counts.frames_of(owner) > 1
            || counts.duplicate_in_group(groups, owner)
            || counts.duplicate_in_other_groups(groups, owner)
            || counts.duplicate_in_host()
    }

    fn share_of(&self, owner: GuestIndex, shared: bool) -> Share {
        let (counts, groups) = (&self.counts, &self.groups);
        match () {
            () if shared => Share::AlreadyShared,
            () if counts.duplicate_in_group(groups, owner) => Share::Group,
            () if counts.duplicate_in_other_groups(groups, owner) => Share::OtherGroups,
            () if counts.frames_of(owner) > 1 => Share::Within,
            () if counts.duplicate_in_host() => Share::Host,
            () => Share::Unique,
        }
    }

    /// The findings, without the fields that only the scan can fill in.
    pub fn finish(self) -> Findings {
        let Self { groups, group_names, guests, buckets, opportunity, already_shared, .. } = self;
        let guests: Vec<_> = guests.into_iter().map(GuestTally::finish).collect();
        let group_of = |(n, name): (usize, String)| GroupFindings {
            name,
            guests: guests
                .iter()
                .zip(&groups.of_guest)
                .filter(|p| usize::from(*p.1) == n)
                .map(|p| p.0.id.clone())
                .collect(),
            resident_pages: buckets[n].0,
            saved_pages: buckets[n].1,
            saved_bytes: pages_to_bytes(buckets[n].1),
        };
        let across_groups_saved_pages = buckets[usize::from(groups.common())].1;
        let groups: Vec<_> = group_names.into_iter().enumerate().map(group_of).collect();
        let all_saved_pages = opportunity.within.total + opportunity.between.total;
        let isolated: u64 = groups.iter().map(|g| g.saved_pages).sum();
        let mut findings = Findings {
            guests,
            groups,
            opportunity,
            already_shared,
            across_groups_saved_pages,
            all_saved_pages,
            isolation_price_pages: all_saved_pages - isolated - across_groups_saved_pages,
            ..Findings::default()
        };
        findings.host.host_resident_pages = self.host_resident_pages;
        findings.commonness = self.commonness;
        findings
    }
}

impl GuestTally {
    /// Counts one frame of this guest by itself: in its region, its sharing and its cell on the map.
    fn add_frame(&mut self, layout: &Layout, mapping: Entry, share: Share, shared: bool, duplicate: bool) {
        let is_zero = share == Share::Zero;
        let region = &mut self.regions[mapping.region() as usize];
        region.resident_pages += 1;
        region.zero_pages += u64::from(is_zero);
        region.duplicate_pages += u64::from(duplicate);
        region.incremental_pages += u64::from(!shared);
        let findings = &mut self.findings;
        findings.zero_pages += u64::from(is_zero);
        findings.incremental_pages += u64::from(!shared);
        findings.already_shared_pages += u64::from(shared);
        findings.ksm_pages += u64::from(mapping.ksm());
        findings.folded_pages += u64::from(mapping.kind() == PageKind::Folded);
        if let Some(cell) = layout.cell(mapping.owner(), mapping.position()) {
            let cell = &mut findings.page_map[cell as usize];
            cell.pages[share as usize] += 1;
            cell.region.get_or_insert(mapping.region());
        }
    }

    /// Counts frames of one content by their kind inside the guest. The first frame of the class is taken as the one
    /// that merging keeps: it counts by the nearest other holder of the content. The others count as superfluous within
    /// the guest.
    fn add_kind(&mut self, inside: FrameUse, class: u64, mapping: Option<Entry>, counted: Counted) {
        let Counted { pages, zero, shared, nearest } = counted;
        let is_first = self.last_class != class;
        self.last_class = class;
        let kind = &mut self.kinds[inside.kind() as usize];
        kind.backed_pages += pages;
        kind.zero_pages += if zero { pages } else { 0 };
        kind.incremental_pages += if shared { 0 } else { pages };
        kind.ksm_pages += u64::from(mapping.is_some_and(|m| m.ksm()));
        kind.folded_pages += u64::from(mapping.is_some_and(|m| m.kind() == PageKind::Folded));
        kind.duplicates.within += pages - u64::from(is_first);
        let Duplicates { group, other_groups, host, .. } = &mut kind.duplicates;
        match nearest {
            Nearest::Group => *group += u64::from(is_first),
            Nearest::OtherGroups => *other_groups += u64::from(is_first),
            Nearest::Host => add(host, u64::from(is_first)),
            Nearest::None => {}
        }
    }

    /// Counts a frame whose content nobody else holds as idle, if it is on an inactive list of the guest's kernel.
    fn add_idle(&mut self, inside: FrameUse, shared: bool) {
        if inside.lru() == Lru::Inactive {
            self.findings.idle_pages.inactive_unique += 1;
            self.findings.idle_pages.incremental += u64::from(!shared);
        }
    }

    fn finish(self) -> GuestFindings {
        let kinds = if self.last_class > 0 { self.kinds.into() } else { Vec::new() };
        let regions = self.regions.into_iter().filter(|r| r.resident_pages > 0).collect();
        GuestFindings { regions, kinds, ..self.findings }
    }
}

/// Frames of one content that are counted together.
#[derive(Clone, Copy)]
struct Counted {
    pages: u64,
    zero: bool,
    shared: bool,
    nearest: Nearest,
}

/// Adds to a count of host pages, if the host's memory is counted.
fn add(count: &mut Option<u64>, pages: u64) {
    if let Some(count) = count {
        *count += pages;
    }
}

impl RegionFindings {
    fn empty(region: Region) -> Self {
        Self {
            region,
            resident_pages: 0,
            zero_pages: 0,
            duplicate_pages: 0,
            incremental_pages: 0,
            incremental_folded_pages: 0,
        }
    }
}
