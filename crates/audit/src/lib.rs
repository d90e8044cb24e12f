//! Proves isolation between groups, and the savings of folding, from page frames: nothing here comes from the engine's
//! own counters (the engine is the agents and workers that fold).
//!
//! An audit looks at the members that the service names. It also looks at every other process of the host that maps a
//! pool privately (a member's child, say). Of each process, the page table tells the frames of its private memory:
//! anonymous pages, and pages of the pool. Pages of other files are left out: groups may well run the same programs.
//!
//! - A **cross-group frame** is mapped by two groups, or lies in one group's pool and is mapped by another group. Page
//!   tables are read one after the other, and a frame that one process gives back may be another's a moment later. So
//!   each suspect is looked at again, with both page tables open, before it is reported. Those that are left are
//!   looked at once more, with the pools' frames looked up anew.
//! - The **savings** of a group are the sum of [`Savings`]. Folded pages are the places where members map pages of the
//!   pool, touched or not, that were not written since. Without the pool, each would be a frame; but places that forked
//!   children inherit would share one (`families.rs`). The pool is its frames, be they mapped or not. Mappings are
//!   those that `/proc/PID/maps` lists. Two terms are the engine's account, because nothing shows them: pages of zeros
//!   are in no page table, and tables lie among other memory.
//!
//! The frames of one pass take 8 bytes for every page, [`MOST_ENTRIES`] at most. If there are more, several passes
//! each cover a part of the frame numbers.
#![forbid(unsafe_code)]

pub mod contents;
mod families;
mod frames;
mod places;
mod pool;
mod subjects;

use cli::exit::Stop;
use frames::{Frames, Seen};
use host::{FrameTable, Pagemap, kpf};
use page::{HostVirt, Pfn, Savings};
use serde::Serialize;
pub use subjects::{Engine, Member};
use subjects::{Subject, Subjects};

/// Most entries of frames that are held at once: 256 MiB.
const MOST_ENTRIES: usize = 1 << 25;
/// Most cross-group frames that are listed one by one; all are counted.
const MOST_SHOWN: usize = 32;

/// Findings from the frames, in the shape that `pagefold audit --json` prints.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Findings {
    /// Distinct frames that were looked at.
    pub frames_checked: u64,
    /// Frames that their group maps more than once.
    pub shared_within_group: u64,
    /// Frames that two groups have in common.
    pub cross_group_frames: u64,
    /// Savings of the groups of services that were asked; of all groups where none was.
    pub saved_bytes: i64,
    /// The groups.
    pub by_group: Vec<GroupFindings>,
    /// Cross-group frames, the first of them.
    pub cross_group: Vec<Crossing>,
    /// Processes that could not be looked at.
    pub partial: Vec<Missed>,
}

/// One group.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GroupFindings {
    /// Its name.
    pub name: String,
    /// Directory of the service that has it; `None` for a service that was not asked.
    pub service: Option<String>,
    /// Processes that are members.
    pub members: usize,
    /// Other processes that map its pool.
    pub other_processes: usize,
    /// Distinct frames that its processes map.
    pub frames: u64,
    /// Frames that its processes map more than once.
    pub shared_frames: u64,
    /// Frames that the files of its pool hold.
    pub pool_frames: u64,
    /// Places where members map pages of the pool.
    pub pool_mappings: u64,
    /// Places where the other processes map pages of the pool.
    pub other_pool_mappings: u64,
    /// Pages of `pool_mappings` and `other_pool_mappings` that a forked child has inherited from its parent. They do
    /// not count as saved again.
    pub inherited_mappings: u64,
    /// Pages in members' mappings of the pool that were written, and are private frames.
    pub broken_pages: u64,
    /// Savings of the group: gross less costs. Negative while folding costs more than it saves.
    pub saved_bytes: i64,
    /// The terms of `saved_bytes`: folded pages, pool and mappings as counted here, zero pages and tables by the
    /// engine's account. A group whose members the service does not name has the places and mappings of
    /// `other_processes` added.
    pub savings: Savings,
    /// Savings by the engine's account.
    pub engine_saved_bytes: Option<i64>,
    /// The terms of `engine_saved_bytes`.
    pub engine: Option<Savings>,
}

/// A frame that is common to two groups.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Crossing {
    /// Its number.
    pub frame: u64,
    /// Whether KSM, the kernel's own merger, merged pages into the frame.
    pub ksm: bool,
    /// Two places where it is mapped.
    pub places: [Place; 2],
}

/// A place where a frame is mapped.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Place {
    /// The group of the process that maps it.
    pub group: String,
    /// The process.
    pub pid: u32,
    /// The address.
    pub address: u64,
    /// The group whose pool the mapping maps, if any.
    pub pool: Option<String>,
}

/// A process that could not be looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Missed {
    /// Its group, where that is known.
    pub group: Option<String>,
    /// The process.
    pub pid: u32,
    /// The reason.
    pub reason: String,
}

/// Audits all frames of all groups, by the accounts of all services that were asked. A group is told by the service
/// that has it: its processes hold the pool's files, or it names the members that map them.
///
/// # Errors
/// The kernel hides frames, or their flags.
pub fn take(engines: &[Engine]) -> anyhow::Result<Findings> {
    if !host::frames_visible() {
        let why = "proving anything from page frames takes root (CAP_SYS_ADMIN): nobody else is shown them";
        return Err(Stop::HostLacks(why.into()).into());
    }
    let flags = FrameTable::flags()?;
    let mut subjects = Subjects::find(engines)?;
    let mut findings = Findings::default();
    let mut passes = 1;
    let candidates = loop {
        match pass_all(&mut subjects, passes, &flags, &mut findings)? {
            Some(candidates) => break candidates,
            // More than fit: try again with more passes, each over a part of the frames.
            None => passes *= 2,
        }
    };
    findings.by_group = subjects.groups(engines);
    for (group, (frames, shared)) in findings.by_group.iter_mut().zip(&subjects.frames) {
        (group.frames, group.shared_frames) = (*frames, *shared);
    }
    // A pool that turned out to be part of another one has no frames of its own left.
    findings.by_group.retain(|group| group.service.is_some() || group.pool_frames > 0 || group.frames > 0);
    (findings.saved_bytes, _) = saved(&findings.by_group);
    let (mut crossing, mut shown) = confirm(&subjects, &candidates, &flags)?;
    if !crossing.is_empty() {
        // The pools' frames were looked up at the beginning, and slots may have got other frames since. So the
        // remaining suspects are checked with all frames looked up anew.
        (crossing, shown) = confirm(&Subjects::find(engines)?, &crossing, &flags)?;
    }
    findings.cross_group_frames = crossing.len() as u64;
    findings.cross_group = shown;
    findings.partial = subjects.missed;
    Ok(findings)
}

/// The savings of all groups together, and the number of groups that are left out of the sum. Left out are groups of
/// services that were not asked, if any service was asked: they are no part of what the caller's services save.
pub fn saved(groups: &[GroupFindings]) -> (i64, usize) {
    let is_any_asked = groups.iter().any(|group| group.service.is_some());
    let (counted, others): (Vec<_>, Vec<_>) = groups.iter().partition(|group| group.service.is_some() || !is_any_asked);
    // A user's own service may report any number, so the sum saturates.
    (counted.iter().fold(0, |sum: i64, group| sum.saturating_add(group.saved_bytes)), others.len())
}

/// Makes all passes, and returns the frames that seem to be common to several groups. `None` if a pass has more frames
/// than can be held.
fn pass_all(
    subjects: &mut Subjects,
    passes: u64,
    flags: &FrameTable,
    findings: &mut Findings,
) -> host::Result<Option<Vec<Pfn>>> {
    let mut candidates = Vec::new();
    *findings = Findings::default();
    subjects.begin();
    for pass in 0..passes {
        let mut frames = Frames::default();
        let wanted = |pfn: u64| pfn % passes == pass;
        if !subjects.scan(pass == 0, &wanted, |seen| frames.push(seen, MOST_ENTRIES)) {
            return Ok(None);
        }
        let counted = frames.count(flags, subjects.frames.as_mut_slice())?;
        findings.frames_checked += counted.frames;
        findings.shared_within_group += counted.shared_within_group;
        candidates.extend(counted.crossing);
    }
    Ok(Some(candidates))
}

/// Looks again at the frames that seem to be common to several groups (`candidates`, in ascending order). Returns those
/// that are, in the same order, and the places of the first of them.
fn confirm(subjects: &Subjects, candidates: &[Pfn], flags: &FrameTable) -> host::Result<(Vec<Pfn>, Vec<Crossing>)> {
    let (mut crossing, mut shown) = (Vec::new(), Vec::new());
    if candidates.is_empty() {
        return Ok((crossing, shown));
    }
    let mut found: Vec<(Pfn, usize, HostVirt, Option<u16>)> = Vec::new();
    for (n, subject) in subjects.all.iter().enumerate() {
        // A process that can no longer be read has ended and maps nothing, or is listed as missed already.
        let _ = subject.each_frame(subjects, &mut |address, seen: Seen| {
            if candidates.binary_search(&seen.pfn).is_ok() {
                found.push((seen.pfn, n, address, seen.pool));
            }
            true
        });
    }
    found.sort_unstable();
    for places in found.chunk_by(|a, b| a.0 == b.0) {
        if let Some((one, other)) = pair(subjects, places)
            && is_mapped_by_both(subjects, one, other)
        {
            crossing.push(one.0);
            if shown.len() < MOST_SHOWN {
                let mut ksm = false;
                flags.read(&[one.0], |_, word| ksm = word & kpf::KSM != 0)?;
                let places = [one, other].map(|place| subjects.place(place));
                shown.push(Crossing { frame: one.0.0, ksm, places });
            }
        }
    }
    Ok((crossing, shown))
}

type Found = (Pfn, usize, HostVirt, Option<u16>);

/// Two places of one frame that belong to different groups, or the same place twice if it is in another group's pool.
fn pair<'a>(subjects: &Subjects, places: &'a [Found]) -> Option<(&'a Found, &'a Found)> {
    let group = |found: &Found| subjects.all[found.1].group;
    let first = places.first()?;
    let elsewhere = places.iter().find(|p| group(p) != group(first)).map(|other| (first, other));
    elsewhere.or_else(|| places.iter().find(|p| p.3.is_some_and(|pool| pool != group(p))).map(|p| (p, p)))
}

/// Whether the frame is still in both places, at the same time.
fn is_mapped_by_both(subjects: &Subjects, one: &Found, other: &Found) -> bool {
    let open = |found: &Found| Pagemap::open(subjects.all[found.1].pid());
    let (Ok(first), Ok(second)) = (open(one), open(other)) else { return false };
    let maps = |map: &Pagemap, found: &Found| {
        let mut entries = Vec::new();
        let read = map.read(found.2, 1, &mut entries).is_ok();
        // A page of a pool that the process has not touched is not in its page table.
        read && entries.first().is_some_and(|e| e.pfn() == Some(found.0) || found.3.is_some() && !e.present())
    };
    maps(&first, one) && maps(&second, other) && maps(&first, one)
}

impl Subject {
    fn pid(&self) -> u32 {
        self.process.pid
    }
}
