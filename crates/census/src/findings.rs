//! Findings of a census, in the shape that `pagefold census --json` prints. Counts are of base pages (4 KiB) and of
//! page frames, each frame once, unless the name says otherwise.

use page::{GuestPageKind, Region};
use serde::Serialize;

/// All findings of one census.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Findings {
    /// The course of the census.
    pub host: HostFindings,
    /// One entry a guest, in the order in which they were selected.
    pub guests: Vec<GuestFindings>,
    /// Superfluous frames by place and kind; each is counted once, so the cells add up.
    pub opportunity: Opportunity,
    /// Each group, with the frames that merging within it would save.
    pub groups: Vec<GroupFindings>,
    /// Superfluous among frames that members of several groups map already (shared files): saving
    /// them needs no group to trust another.
    pub across_groups_saved_pages: u64,
    /// Frames that merging all guests with each other would save.
    pub all_saved_pages: u64,
    /// The part of it that only merging across groups would save: `all_saved_pages` less the groups' own savings and
    /// `across_groups_saved_pages`.
    pub isolation_price_pages: u64,
    /// Frames that are merged already.
    pub already_shared: AlreadyShared,
    /// Lengths of runs of matches between guests.
    pub runs: RunLengths,
    /// Numbers of frames and contents by the number of guests that have them.
    pub commonness: Commonness,
    /// Change since the previous round (`--watch`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<Change>,
    /// Guests that could not be read in full; empty when the census is complete.
    pub partial: Vec<Partial>,
}

/// The course of the census.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HostFindings {
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Page-table entries followed; a frame mapped twice counts twice.
    pub pages_scanned: u64,
    /// Pages whose bytes were read and fingerprinted.
    pub pages_hashed: u64,
    /// Wall time of the census.
    pub seconds: f64,
    /// GiB fingerprinted per second of that wall time, which includes looking up, reading, hashing and indexing.
    pub hash_gib_per_s: f64,
    /// Scanning threads.
    pub threads: usize,
    /// Most memory the index ever held.
    pub index_bytes: u64,
    /// Most memory this process has had resident.
    pub peak_rss_bytes: Option<u64>,
    /// Passes over the hash space; 1 when the index fitted.
    pub passes: u32,
    /// `exact` when page frames were visible, `inferred` when frames had to be told apart by file and
    /// address (no root).
    pub frames: FrameIdentity,
    /// The source of the bytes that were read.
    pub read: ReadThrough,
    /// Resident pages of the host side (`--include-host`); `None` if it was not counted.
    pub host_resident_pages: Option<u64>,
    /// Pages that changed, came or went between two passes, so that a pass missed them or saw them twice.
    pub drifted_pages: u64,
}

/// How frames were told apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FrameIdentity {
    /// By page frame number.
    #[default]
    Exact,
    /// By file and offset, or process and address: the kernel hid the frame numbers.
    Inferred,
}

/// The source of the bytes that are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadThrough {
    /// Page frames themselves: leaves no trace.
    Frames,
    /// The memory of processes: pages look recently used afterwards.
    #[default]
    Processes,
}

/// Findings about one guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GuestFindings {
    /// The guest, as `pagefold guests` names it.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its group.
    pub group: String,
    /// `qemu`, `lxc`, `process`, ...
    pub kind: String,
    /// Page-table entries that map memory; its resident set without the kernel's zero page.
    pub mapped_pages: u64,
    /// Distinct page frames it maps.
    pub resident_pages: u64,
    /// Frames of it that hold nothing but zeros (the kernel's shared zero page is not one).
    pub zero_pages: u64,
    /// Distinct contents.
    pub distinct_pages: u64,
    /// Pages in swap; their content is not read.
    pub swapped_pages: u64,
    /// Present pages whose content could not be read.
    pub unreadable_pages: u64,
    /// Frames held by the kernel's own merger.
    pub ksm_pages: u64,
    /// Frames of its group's pool that it maps: its pages that were folded and that it has touched since.
    pub folded_pages: u64,
    /// Copies beyond the first within the guest, and places where its remaining contents have a duplicate.
    pub duplicates: Duplicates,
    /// Frames that somebody else maps too.
    pub already_shared_pages: u64,
    /// Frames that only it maps: they would become free if the guest ended.
    pub incremental_pages: u64,
    /// Contents that only it holds: what it would cost if everything were merged.
    pub incremental_folded_pages: u64,
    /// The same by region; regions without pages are left out.
    pub regions: Vec<RegionFindings>,
    /// Its memory by kind inside the guest; empty where no kind is known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kinds: Vec<KindFindings>,
    /// Backed pages that the guest would reclaim first: on an inactive list, not referenced, and held by nobody else.
    #[serde(skip)]
    pub idle_pages: IdlePages,
    /// Its pages in address order, each cell some neighbouring pages; for pictures.
    #[serde(skip)]
    pub page_map: Vec<MapCell>,
}

/// A guest's memory of one kind, as the guest itself sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct KindFindings {
    /// The kind.
    pub kind: GuestPageKind,
    /// Frames of the guest's memory, backed by the host or not.
    pub pages: u64,
    /// Frames that the host backs.
    pub backed_pages: u64,
    /// Frames of zeros among them.
    pub zero_pages: u64,
    /// Copies beyond the first within the guest, and places where the remaining contents have a duplicate. A content
    /// held in several kinds counts with the kind of its first page.
    pub duplicates: Duplicates,
    /// Frames of the group's pool.
    pub folded_pages: u64,
    /// Frames held by the kernel's own merger.
    pub ksm_pages: u64,
    /// Frames that only this guest maps.
    pub incremental_pages: u64,
    /// Contents that only this guest holds.
    pub incremental_folded_pages: u64,
}

impl KindFindings {
    /// The kind with all counts zero, with the host's memory counted or not.
    pub fn empty(kind: GuestPageKind, with_host: bool) -> Self {
        Self {
            kind,
            pages: 0,
            backed_pages: 0,
            zero_pages: 0,
            duplicates: Duplicates::none(with_host),
            folded_pages: 0,
            ksm_pages: 0,
            incremental_pages: 0,
            incremental_folded_pages: 0,
        }
    }
}

/// Pages that a guest does without for the moment: its kernel would reclaim them first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct IdlePages {
    /// Pages on an inactive list, not referenced, and of a content that nobody else holds.
    pub inactive_unique: u64,
    /// Those of them that only this guest maps: they would become free if the guest gave them back.
    pub incremental: u64,
}

/// Parts of a guest's cost: section 3 of Agarwal, "A Study of Virtualization Overheads" (2015).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CostPart {
    /// Heap, stack, devices and code of the VMM.
    Vmm,
    /// The guest's kernel: text, data, page tables, slab, stacks, reserved memory.
    GuestKernel,
    /// The guest's page cache, with tmpfs.
    GuestPageCache,
    /// Memory of the guest's processes.
    GuestAnonymous,
    /// Backed by the host, and not used by the guest: free, or in its balloon.
    GuestUnused,
    /// Guest memory of unknown kind.
    GuestUnknown,
}

impl CostPart {
    /// Every part.
    pub const ALL: [Self; 6] = [
        Self::Vmm,
        Self::GuestKernel,
        Self::GuestPageCache,
        Self::GuestAnonymous,
        Self::GuestUnused,
        Self::GuestUnknown,
    ];

    /// The part that a kind belongs to.
    pub const fn of(kind: GuestPageKind) -> Self {
        match kind {
            GuestPageKind::PageCache | GuestPageKind::Shmem => Self::GuestPageCache,
            GuestPageKind::Anonymous => Self::GuestAnonymous,
            GuestPageKind::Free | GuestPageKind::Balloon => Self::GuestUnused,
            GuestPageKind::Unknown => Self::GuestUnknown,
            _ => Self::GuestKernel,
        }
    }
}

/// The cost of one part of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Cost {
    /// The part.
    pub part: CostPart,
    /// Frames.
    pub resident_pages: u64,
    /// Frames that would become free if the guest ended.
    pub incremental_pages: u64,
    /// Contents that only this guest holds: its cost if everything were merged.
    pub incremental_folded_pages: u64,
}

impl GuestFindings {
    /// The guest's cost by part; empty where its kinds are not known.
    pub fn cost(&self) -> Vec<Cost> {
        if self.kinds.is_empty() {
            return Vec::new();
        }
        let mut costs = CostPart::ALL.map(|part| Cost {
            part,
            resident_pages: 0,
            incremental_pages: 0,
            incremental_folded_pages: 0,
        });
        let mut add = |part: CostPart, pages: [u64; 3]| {
            let cost = &mut costs[part as usize];
            cost.resident_pages += pages[0];
            cost.incremental_pages += pages[1];
            cost.incremental_folded_pages += pages[2];
        };
        for region in self.regions.iter().filter(|r| r.region != Region::GuestRam) {
            add(CostPart::Vmm, [region.resident_pages, region.incremental_pages, region.incremental_folded_pages]);
        }
        for kind in &self.kinds {
            add(CostPart::of(kind.kind), [kind.backed_pages, kind.incremental_pages, kind.incremental_folded_pages]);
        }
        costs.into()
    }
}

/// Numbers of frames and contents that are common to 1, 2, 3, ... guests: the data behind the curve of the average
/// footprint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Commonness {
    /// Frames that exactly 1, 2, 3, ... of the guests map. Those of one guest count if no other process maps them
    /// either.
    pub frames_mapped_by: Vec<u64>,
    /// The same for the frames that folding leaves alone: all but guest RAM, and anonymous memory of containers and
    /// processes.
    pub other_frames_mapped_by: Vec<u64>,
    /// Contents, zeros aside, that exactly 1, 2, 3, ... of the guests hold in frames that can be folded.
    pub contents_held_by: Vec<u64>,
    /// By guest: contents that only it holds in frames that can be folded, plus other frames that only it maps.
    pub alone_if_folded: Vec<u64>,
}

impl Commonness {
    /// Number of guests counted.
    pub fn guests(&self) -> usize {
        self.frames_mapped_by.len()
    }

    /// Pages that `guests` of the guests take together, on average over all choices of them; at most
    /// [`Commonness::guests`].
    pub fn together(&self, guests: usize, folded: bool) -> f64 {
        if folded {
            wanted_by(&self.contents_held_by, guests) + wanted_by(&self.other_frames_mapped_by, guests)
        } else {
            wanted_by(&self.frames_mapped_by, guests)
        }
    }
}

/// Number of items that at least one of `n` guests has, on average over all choices of the `n`. Of the items,
/// `held_by` says how many are with exactly 1, 2, 3, ... guests. None of n guests has an item that k of N hold with
/// probability C(N-k, n) / C(N, n).
fn wanted_by(held_by: &[u64], n: usize) -> f64 {
    let guests = held_by.len();
    let wanted = |(k, count): (usize, &u64)| {
        let none: f64 =
            if n + k > guests { 0.0 } else { (0..k).map(|i| (guests - n - i) as f64 / (guests - i) as f64).product() };
        *count as f64 * (1.0 - none)
    };
    held_by.iter().enumerate().map(|(k, count)| wanted((k + 1, count))).sum()
}

/// Places where a guest's contents are held once more. The four are disjoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Duplicates {
    /// Frames beyond the first with the same content in the same guest.
    pub within: u64,
    /// Contents that another guest of its group holds in a frame of its own.
    pub group: u64,
    /// Contents that only a guest of another group holds in a frame of its own.
    pub other_groups: u64,
    /// Contents that, of all others, only the host holds; `None` if the host's own memory was not counted.
    pub host: Option<u64>,
}

impl Duplicates {
    /// No duplicates, with the host's memory counted or not.
    pub fn none(with_host: bool) -> Self {
        Self { host: with_host.then_some(0), ..Self::default() }
    }
}

/// One region of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RegionFindings {
    /// The region.
    pub region: Region,
    /// Frames.
    pub resident_pages: u64,
    /// Frames of zeros.
    pub zero_pages: u64,
    /// Frames whose content some other frame of this guest, another guest or the host holds too.
    pub duplicate_pages: u64,
    /// Frames that only this guest maps.
    pub incremental_pages: u64,
    /// Frames whose content only this guest holds, each content once.
    pub incremental_folded_pages: u64,
}

/// State of a page, for pictures: the first that applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Share {
    /// Nothing but zeros.
    Zero = 0,
    /// The same frame is mapped by somebody else already.
    AlreadyShared = 1,
    /// Another guest of the group holds the same content.
    Group = 2,
    /// A guest of another group holds the same content.
    OtherGroups = 3,
    /// The same content is held twice within the guest.
    Within = 4,
    /// The host holds the same content.
    Host = 5,
    /// Nobody else holds this content.
    Unique = 6,
}

impl Share {
    /// Every value, in the order of its number.
    pub const ALL: [Self; 7] =
        [Self::Zero, Self::AlreadyShared, Self::Group, Self::OtherGroups, Self::Within, Self::Host, Self::Unique];
}

/// Some neighbouring pages of a guest: how many there are of each [`Share`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MapCell {
    /// Pages by [`Share`].
    pub pages: [u32; Share::ALL.len()],
    /// Region of the cell's first page.
    pub region: Option<Region>,
}

/// Superfluous frames by pair of kinds. Shared memory counts as file: it is page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ByKinds {
    /// Both anonymous: what merging can reach.
    pub anon_anon: u64,
    /// Both page cache.
    pub file_file: u64,
    /// One of each.
    pub anon_file: u64,
    /// The three together.
    pub total: u64,
}

impl std::ops::AddAssign for ByKinds {
    fn add_assign(&mut self, other: Self) {
        self.anon_anon += other.anon_anon;
        self.file_file += other.file_file;
        self.anon_file += other.anon_file;
        self.total += other.total;
    }
}

/// The opportunity table: table 6.4 of Agarwal, "A Study of Virtualization Overheads" (2015).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Opportunity {
    /// Copies beyond the first within each guest.
    pub within: ByKinds,
    /// Contents left that the host holds too; `None` if the host's own memory was not counted.
    pub host: Option<ByKinds>,
    /// Contents left that several guests hold: all but one of them.
    pub between: ByKinds,
    /// The three together.
    pub total: ByKinds,
}

/// Findings about one group of guests.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GroupFindings {
    /// Its name.
    pub name: String,
    /// Ids of its guests.
    pub guests: Vec<String>,
    /// Frames that only guests of this group map.
    pub resident_pages: u64,
    /// Frames of them that merging within the group would free.
    pub saved_pages: u64,
    /// The same in bytes.
    pub saved_bytes: u64,
}

/// Frames that are shared already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AlreadyShared {
    /// Frames that several of the guests map.
    pub frames: u64,
    /// Additional frames needed if each guest had its own.
    pub saved_pages: u64,
    /// Frames that the kernel's own merger holds.
    pub ksm_frames: u64,
    /// Additional frames needed if the kernel had not merged them.
    pub ksm_saved_pages: u64,
}

/// Lengths of runs: neighbouring pages of one guest that match neighbouring pages of another.
/// Zero pages are left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RunLengths {
    /// Sampling of stretches: one in this many was looked at, 1 unless the census is large.
    pub one_stretch_in: u32,
    /// Pages looked at, without zero pages and pages that are shared already.
    pub pages_looked_at: u64,
    /// Pages that match a page of another guest.
    pub matched_pages: u64,
    /// Number of runs they form.
    pub runs: u64,
    /// Mean length of a run, in pages.
    pub mean: f64,
    /// Median length of a run, in pages.
    pub median: u64,
    /// Share of the matched pages that lie in runs of eight or more.
    pub share_in_runs_of_8: f64,
    /// Runs of 1, 2-3, 4-7, 8-15, ... pages.
    pub runs_by_log2_length: Vec<u64>,
    /// Pages in runs of those lengths.
    pub pages_by_log2_length: Vec<u64>,
}

/// Change since the previous round of `--watch`, by page of the address space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Change {
    /// Number of the round, from 1.
    pub round: u32,
    /// Time since the previous round.
    pub seconds: f64,
    /// Same page, same content.
    pub unchanged_pages: u64,
    /// Same page, other content.
    pub changed_pages: u64,
    /// Resident then, not now.
    pub gone_pages: u64,
    /// Resident now, not then.
    pub new_pages: u64,
    /// Pages whose content is held elsewhere too, in this round.
    pub duplicate_pages: u64,
    /// Pages that were duplicates in the previous round, still have the same content, and are still duplicates.
    pub still_duplicate_pages: u64,
    /// Mean time, in seconds, for which this round's duplicates have been duplicates with the same content.
    pub mean_duplicate_seconds: f64,
}

/// A guest's process that could not be read in full.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Partial {
    /// The guest concerned.
    pub guest: String,
    /// The process concerned.
    pub pid: u32,
    /// The missing part, and the reason.
    pub reason: String,
}
