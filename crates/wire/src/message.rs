//! The messages, their bounds and their encoding.

use crate::codec::{Malformed, Reader, Result, Writer};
use crate::stats::MemberStats;
use crate::why::{WHY_PAGES, Why};
use page::{Fingerprint, HostVirt, PAGE_BYTES, PageRange, PoolSlot};

/// Version of the protocol. Both sides send theirs first. If the versions differ, the connection ends.
pub const VERSION: u16 = 3;
/// Longest frame, in bytes.
pub const FRAME_BYTES: usize = 64 << 10;
/// Most pages whose fingerprints one `Rested` frame may carry.
pub const RESTED_PAGES: usize = 4096;
/// Most pages that one `Fold` frame may ask to fold.
pub const FOLD_PAGES: usize = 1024;
/// Pages of a donation window: the memory file of each connection into which the agent copies pages for the worker.
pub const DONATION_PAGES: usize = 256;

/// Most runs (of consecutive pages) that one frame may carry.
pub const RUNS: usize = 2048;
/// Longest reason for the end of a connection, in bytes.
const REASON_BYTES: usize = 256;
/// End of the address space of user programs: larger addresses are refused. 2^57 is enough for every architecture we
/// know.
const ADDRESS_END: u64 = 1 << 57;

/// The first message of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// [`VERSION`] of the agent.
    pub version: u16,
    /// Whether the member folds all pages at rest, even if they were written soon after earlier folds.
    pub eager: bool,
}

/// Consecutive pages that nobody wrote for an interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestedRun {
    /// The first page.
    pub start: HostVirt,
    /// Number of pages.
    pub pages: u16,
    /// Whether they are one transparent huge page, of which all 512 pages are listed.
    pub huge: bool,
}

/// Consecutive pages that map consecutive slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRun {
    /// The first page.
    pub start: HostVirt,
    /// The slot that the first page maps.
    pub slot: PoolSlot,
    /// Number of pages.
    pub pages: u16,
}

/// The replacement of pages that are folded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Nothing: they hold zeros, and the kernel supplies zeros at the next access.
    Zero,
    /// Consecutive slots from this one on.
    Slot(PoolSlot),
}

/// Consecutive pages to fold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoldRun {
    /// The first page.
    pub start: HostVirt,
    /// Number of pages.
    pub pages: u16,
    /// Their replacement.
    pub target: Target,
}

/// The result for a page that was to be folded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Outcome {
    /// The page maps the slot, or nothing if its target was [`Target::Zero`].
    Folded = 0,
    /// The page's bytes differed from the slot's, and the page was put back in its place.
    Changed = 1,
    /// The kernel would not move the page: it is pinned for DMA, shared after a fork, or locked for the moment.
    Busy = 2,
    /// The page is not, or no longer, private anonymous memory that may be folded.
    Gone = 3,
    /// The member has so many mappings (VMAs) that folding may add no more.
    NoVma = 4,
    /// The member has a file open through which a driver may write to its memory without pinning the pages
    /// (`FOLL_PIN`).
    Unpinned = 5,
    /// Host memory was short.
    NoMemory = 6,
    /// The member folds nothing for the moment: its worker told it not to, or a migration or a snapshot uses the
    /// userfaultfd of its memory.
    Off = 7,
}

impl Outcome {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 8] =
        [Self::Folded, Self::Changed, Self::Busy, Self::Gone, Self::NoVma, Self::Unpinned, Self::NoMemory, Self::Off];

    /// Its name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Folded => "folded",
            Self::Changed => "changed",
            Self::Busy => "busy",
            Self::Gone => "gone",
            Self::NoVma => "no_vma",
            Self::Unpinned => "unpinned",
            Self::NoMemory => "no_memory",
            Self::Off => "off",
        }
    }
}

/// Whether a group folds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum FoldMode {
    /// Fold.
    #[default]
    On = 0,
    /// Leave folded pages as they are, and fold nothing more.
    Off = 1,
    /// Make folded pages private again, as far as there is memory for them ([`ToAgent::Room`]), and fold nothing more.
    Unfold = 2,
}

/// Treatment of pages of zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum ZeroPages {
    /// Fold them like any other.
    #[default]
    Share = 0,
    /// Do not fold them: the program will probably write them soon.
    Ignore = 1,
    /// Fold them while the member is nearly idle.
    WhenIdle = 2,
}

/// Whether huge pages may be split to fold parts of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// Never.
    Keep,
    /// A huge page is split if at least this percentage of its pages would fold (1 to 100).
    SplitAt(u8),
}

/// The settings of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Most pages to fingerprint a second. `None`: all pages at rest. The agent then chooses the interval of its rounds
    /// so that looking for written pages takes about 1% of a processor.
    pub pages_per_s: Option<u32>,
    /// Whether to fold.
    pub fold: FoldMode,
    /// Treatment of pages of zeros.
    pub zero_pages: ZeroPages,
    /// Whether to report huge pages at all.
    pub huge_pages: HugePages,
    /// Pages with fingerprints from this one to `last` are to be reported. A full index covers the hash space in
    /// passes, a part at a time.
    pub first: Fingerprint,
    /// The last fingerprint of pages that are to be reported.
    pub last: Fingerprint,
}

/// From an agent to its worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToWorker {
    /// The first frame of a connection.
    Hello(Hello),
    /// Pages that were folded in an earlier connection of this process, and the slots that they still map.
    Held(Vec<SlotRun>),
    /// Pages that nobody wrote for an interval, and their fingerprints, run after run. In a huge page, 0 stands for a
    /// page that is not to be folded.
    Rested(Vec<RestedRun>, Vec<Fingerprint>),
    /// For each page of a [`ToAgent::Donate`] request (with the request's number), in its order: whether the page was
    /// copied into the donation window, at the place of this order.
    Donated(u32, Vec<bool>),
    /// The result for each page of a [`ToAgent::Fold`] request (with the request's number), in its order.
    Folded(u32, Vec<Outcome>),
    /// These places map their slots no longer: they were written, discarded or unmapped.
    Released(Vec<SlotRun>),
    /// The member maps the lease of this epoch, and no older one. (A lease shows the worker whether the member or its
    /// forked children may still map slots.)
    LeaseTaken(u32),
    /// The member maps a template's file here as one mapping, from the page that is this slot on. Every page shows its
    /// own slot of the template (its *home*), unless the page is released.
    Home(Vec<SlotRun>),
    /// Counters and state, about once a second.
    Stats(Box<MemberStats>),
    /// For each page of a [`ToAgent::Why`] request (with the request's number), in its order: why it was not reported,
    /// or [`Why::Other`] if it was.
    Because(u32, Vec<Why>),
    /// The agent closes the connection, for this reason. Nothing follows.
    Bye(String),
}

/// From a worker to an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToAgent {
    /// The worker's [`VERSION`]; with it, the donation window: a file of [`DONATION_PAGES`] pages that both sides
    /// write.
    Welcome(u16),
    /// A segment of the pool, its number and how many slots it has; with it, a file that can only be read.
    Segment(u8, u32),
    /// The lease of a new epoch; with it, an empty file to map (`MAP_SHARED`) in place of the earlier epoch's.
    Lease(u32),
    /// New settings.
    Pace(Pace),
    /// Copy these pages into the donation window.
    Donate(u32, Vec<PageRange>),
    /// Replace these pages.
    Fold(u32, Vec<FoldRun>),
    /// Report every page again: the index was emptied.
    Again,
    /// The member may make this number of pages private: the host keeps memory for them. The number replaces what is
    /// left of an earlier one. Settings ([`Self::Pace`]) other than [`FoldMode::Unfold`] end the promise.
    Room(u64),
    /// Why are these pages not reported?
    Why(u32, Vec<PageRange>),
    /// Make all folded pages private, and end the agent. The process goes on without it.
    Leave,
}

macro_rules! numbered {
    ($type:ty, $name:literal, $($variant:path),+) => {
        impl $type {
            fn decode(r: &mut Reader<'_>) -> Result<Self> {
                let number = r.u8()?;
                [$($variant),+].into_iter().find(|v| *v as u8 == number).ok_or(Malformed::OutOfRange($name))
            }
        }
    };
}
numbered!(FoldMode, "fold mode", Self::On, Self::Off, Self::Unfold);
numbered!(ZeroPages, "zero page policy", Self::Share, Self::Ignore, Self::WhenIdle);

fn page_start(r: &mut Reader<'_>) -> Result<HostVirt> {
    let address = r.u64()?;
    let aligned = address.is_multiple_of(PAGE_BYTES as u64);
    if aligned && address < ADDRESS_END { Ok(HostVirt(address)) } else { Err(Malformed::OutOfRange("address")) }
}

/// A number of pages: at least one.
fn pages(r: &mut Reader<'_>) -> Result<u16> {
    match r.u16()? {
        0 => Err(Malformed::OutOfRange("pages")),
        n => Ok(n),
    }
}

/// The first of `pages` slots, all within one segment.
fn slot(r: &mut Reader<'_>, pages: u16) -> Result<PoolSlot> {
    let slot = PoolSlot::from_bits(r.u32()?);
    slot.add(u32::from(pages).saturating_sub(1)).map(|_| slot).ok_or(Malformed::OutOfRange("slot"))
}

fn bounded<T>(runs: Vec<T>, most: usize, pages: impl Fn(&T) -> u64) -> Result<Vec<T>> {
    let total: u64 = runs.iter().map(pages).fold(0, u64::saturating_add);
    if total <= most as u64 { Ok(runs) } else { Err(Malformed::OutOfRange("pages")) }
}

impl SlotRun {
    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        let (start, pages) = (page_start(r)?, pages(r)?);
        Ok(Self { start, pages, slot: slot(r, pages)? })
    }

    fn encode(&self, w: &mut Writer<'_>) {
        w.u64(self.start.0);
        w.u16(self.pages);
        w.u32(self.slot.bits());
    }
}

impl RestedRun {
    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        let run = Self { start: page_start(r)?, pages: pages(r)?, huge: r.flag("huge")? };
        if run.huge && run.pages != 512 { Err(Malformed::OutOfRange("huge")) } else { Ok(run) }
    }

    fn encode(&self, w: &mut Writer<'_>) {
        w.u64(self.start.0);
        w.u16(self.pages);
        w.u8(u8::from(self.huge));
    }
}

impl FoldRun {
    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        let (start, pages) = (page_start(r)?, pages(r)?);
        let target = if r.flag("target")? { Target::Slot(slot(r, pages)?) } else { Target::Zero };
        Ok(Self { start, pages, target })
    }

    fn encode(&self, w: &mut Writer<'_>) {
        w.u64(self.start.0);
        w.u16(self.pages);
        match self.target {
            Target::Zero => w.u8(0),
            Target::Slot(slot) => {
                w.u8(1);
                w.u32(slot.bits());
            }
        }
    }
}

fn decode_range(r: &mut Reader<'_>) -> Result<PageRange> {
    Ok(PageRange { start: page_start(r)?, pages: u64::from(pages(r)?) })
}

fn encode_range(w: &mut Writer<'_>, range: &PageRange) {
    w.u64(range.start.0);
    w.u16(u16::try_from(range.pages).unwrap_or(u16::MAX));
}

impl HugePages {
    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        match r.u8()? {
            0 => Ok(Self::Keep),
            percent @ 1..=100 => Ok(Self::SplitAt(percent)),
            _ => Err(Malformed::OutOfRange("huge page policy")),
        }
    }

    const fn number(self) -> u8 {
        match self {
            Self::Keep => 0,
            Self::SplitAt(percent) => percent,
        }
    }
}

impl Pace {
    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            pages_per_s: Some(r.u32()?).filter(|rate| *rate != u32::MAX),
            fold: FoldMode::decode(r)?,
            zero_pages: ZeroPages::decode(r)?,
            huge_pages: HugePages::decode(r)?,
            first: Fingerprint(r.u64()?),
            last: Fingerprint(r.u64()?),
        })
    }

    fn encode(&self, w: &mut Writer<'_>) {
        w.u32(self.pages_per_s.unwrap_or(u32::MAX));
        w.u8(self.fold as u8);
        w.u8(self.zero_pages as u8);
        w.u8(self.huge_pages.number());
        w.u64(self.first.0);
        w.u64(self.last.0);
    }
}

fn encode_slots(w: &mut Writer<'_>, kind: u16, runs: &[SlotRun]) {
    w.u16(kind);
    w.list(runs, |w, run| run.encode(w));
}

impl ToWorker {
    /// Reads a frame.
    ///
    /// # Errors
    /// The frame is not valid: no honest agent sends it.
    pub fn decode(frame: &[u8]) -> std::result::Result<Self, Malformed> {
        let r = &mut Reader::new(frame);
        let message = match r.u16()? {
            1 => Self::Hello(Hello { version: r.u16()?, eager: r.flag("eager")? }),
            2 => Self::Held(r.list("runs", RUNS, SlotRun::decode)?),
            3 => {
                let runs = bounded(r.list("runs", RUNS, RestedRun::decode)?, RESTED_PAGES, |run| u64::from(run.pages))?;
                let fingerprints = r.list("fingerprints", RESTED_PAGES, |r| r.u64().map(Fingerprint))?;
                if runs.iter().map(|run| usize::from(run.pages)).fold(0, usize::saturating_add) != fingerprints.len() {
                    return Err(Malformed::OutOfRange("fingerprints"));
                }
                Self::Rested(runs, fingerprints)
            }
            4 => Self::Donated(r.u32()?, r.list("pages", DONATION_PAGES, |r| r.flag("given"))?),
            5 => Self::Folded(
                r.u32()?,
                r.list("outcomes", FOLD_PAGES, |r| {
                    Outcome::ALL.get(usize::from(r.u8()?)).copied().ok_or(Malformed::OutOfRange("outcome"))
                })?,
            ),
            6 => Self::Released(r.list("runs", RUNS, SlotRun::decode)?),
            7 => Self::LeaseTaken(r.u32()?),
            8 => Self::Stats(Box::new(MemberStats::decode(r)?)),
            9 => Self::Because(r.u32()?, r.list("reasons", WHY_PAGES, Why::decode)?),
            10 => Self::Home(r.list("runs", RUNS, SlotRun::decode)?),
            11 => Self::Bye(r.text("reason", REASON_BYTES)?),
            kind => return Err(Malformed::UnknownKind(kind)),
        };
        r.end()?;
        Ok(message)
    }

    /// Replaces `frame` by this message. A message beyond the bounds of this module is refused by the receiver.
    pub fn encode(&self, frame: &mut Vec<u8>) {
        frame.clear();
        let w = &mut Writer(frame);
        match self {
            Self::Hello(hello) => {
                w.u16(1);
                w.u16(hello.version);
                w.u8(u8::from(hello.eager));
            }
            Self::Held(runs) => encode_slots(w, 2, runs),
            Self::Rested(runs, fingerprints) => {
                w.u16(3);
                w.list(runs, |w, run| run.encode(w));
                w.list(fingerprints, |w, f| w.u64(f.0));
            }
            Self::Donated(id, given) => {
                w.u16(4);
                w.u32(*id);
                w.list(given, |w, given| w.u8(u8::from(*given)));
            }
            Self::Folded(id, outcomes) => {
                w.u16(5);
                w.u32(*id);
                w.list(outcomes, |w, outcome| w.u8(*outcome as u8));
            }
            Self::Released(runs) => encode_slots(w, 6, runs),
            Self::LeaseTaken(epoch) => {
                w.u16(7);
                w.u32(*epoch);
            }
            Self::Stats(stats) => {
                w.u16(8);
                stats.encode(w);
            }
            Self::Because(id, reasons) => {
                w.u16(9);
                w.u32(*id);
                w.list(reasons, |w, why| w.u8(*why as u8));
            }
            Self::Home(runs) => encode_slots(w, 10, runs),
            Self::Bye(why) => {
                w.u16(11);
                w.text(why, REASON_BYTES);
            }
        }
    }
}

impl ToAgent {
    /// Reads a frame.
    ///
    /// # Errors
    /// The frame is not valid: no honest worker sends it.
    pub fn decode(frame: &[u8]) -> std::result::Result<Self, Malformed> {
        let r = &mut Reader::new(frame);
        let message = match r.u16()? {
            1 => Self::Welcome(r.u16()?),
            2 => {
                let (segment, slots) = (r.u8()?, r.u32()?);
                if slots > PoolSlot::PER_SEGMENT {
                    return Err(Malformed::OutOfRange("slots"));
                }
                Self::Segment(segment, slots)
            }
            3 => Self::Lease(r.u32()?),
            4 => Self::Pace(Pace::decode(r)?),
            5 => {
                let id = r.u32()?;
                Self::Donate(id, bounded(r.list("runs", RUNS, decode_range)?, DONATION_PAGES, |run| run.pages)?)
            }
            6 => {
                let id = r.u32()?;
                Self::Fold(id, bounded(r.list("runs", RUNS, FoldRun::decode)?, FOLD_PAGES, |run| u64::from(run.pages))?)
            }
            7 => Self::Again,
            8 => Self::Room(r.u64()?),
            9 => {
                let id = r.u32()?;
                Self::Why(id, bounded(r.list("runs", RUNS, decode_range)?, WHY_PAGES, |run| run.pages)?)
            }
            10 => Self::Leave,
            kind => return Err(Malformed::UnknownKind(kind)),
        };
        r.end()?;
        Ok(message)
    }

    /// Replaces `frame` by this message. A message beyond the bounds of this module is refused by the receiver.
    pub fn encode(&self, frame: &mut Vec<u8>) {
        frame.clear();
        let w = &mut Writer(frame);
        match self {
            Self::Welcome(version) => {
                w.u16(1);
                w.u16(*version);
            }
            Self::Segment(segment, slots) => {
                w.u16(2);
                w.u8(*segment);
                w.u32(*slots);
            }
            Self::Lease(epoch) => {
                w.u16(3);
                w.u32(*epoch);
            }
            Self::Pace(pace) => {
                w.u16(4);
                pace.encode(w);
            }
            Self::Donate(id, runs) => {
                w.u16(5);
                w.u32(*id);
                w.list(runs, encode_range);
            }
            Self::Fold(id, runs) => {
                w.u16(6);
                w.u32(*id);
                w.list(runs, |w, run| run.encode(w));
            }
            Self::Again => w.u16(7),
            Self::Room(pages) => {
                w.u16(8);
                w.u64(*pages);
            }
            Self::Why(id, runs) => {
                w.u16(9);
                w.u32(*id);
                w.list(runs, encode_range);
            }
            Self::Leave => w.u16(10),
        }
    }
}
