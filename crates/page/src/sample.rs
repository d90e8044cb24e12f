//! One page of one guest, as the scanner saw it.

use crate::{Fingerprint, HostVirt, PageKind, Region};
use serde::Serialize;

/// A guest's place in the list of guests of one census.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct GuestIndex(pub u16);

impl GuestIndex {
    /// Owner of the host's own memory, where a census includes it.
    pub const HOST: Self = Self(u16::MAX);
}

/// What tells two page frames apart: the frame number where the kernel shows it, otherwise a number
/// inferred from what is visible (file and offset, process and address). 40 bits, which is every
/// frame that x86-64's 52 bits of physical address can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct FrameId(pub u64);

impl FrameId {
    /// Width of a frame's number.
    pub const BITS: u32 = 40;
    /// The largest frame number.
    pub const MAX: u64 = (1 << Self::BITS) - 1;
}

/// One resident page of one guest. A frame that a guest maps several times is one sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSample {
    /// Whose page it is.
    pub owner: GuestIndex,
    /// Position in the order of the scan: neighbours in an address space are neighbours here, and
    /// a gap in one is a gap in the other. Unique within a census.
    pub position: u32,
    /// Process it was found in; 0 for page cache that no process maps.
    pub pid: u32,
    /// Where that process maps it (for page cache: the offset in the file).
    pub address: HostVirt,
    /// The page frame.
    pub frame: FrameId,
    /// What backs it.
    pub kind: PageKind,
    /// Which part of the guest it belongs to.
    pub region: Region,
    /// Somebody other than the owner maps the frame too.
    pub mapped_elsewhere: bool,
    /// The kernel's own merger (KSM) holds it.
    pub ksm: bool,
    /// `/proc/kpageflags` of the frame, where it was read.
    pub kpageflags: Option<u64>,
    /// Its content.
    pub fingerprint: Fingerprint,
}
