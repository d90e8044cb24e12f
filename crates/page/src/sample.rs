//! Samples: one page of one guest each, as the scanner saw it.

use crate::{Fingerprint, HostVirt, PageKind, Region};
use serde::Serialize;

/// A guest's place in the list of guests of one census.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct GuestIndex(pub u16);

impl GuestIndex {
    /// Owner of the host's own memory, where a census includes it.
    pub const HOST: Self = Self(u16::MAX);
}

/// Identity of a page frame: its number where the kernel shows it. Otherwise a number inferred from visible
/// properties (file and offset, process and address). It has 40 bits, enough for all frames within x86-64's 52 bits
/// of physical address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct FrameId(pub u64);

impl FrameId {
    /// Width of a frame's number, in bits.
    pub const BITS: u32 = 40;
    /// The largest frame number.
    pub const MAX: u64 = (1 << Self::BITS) - 1;
}

/// One resident page of one guest. A frame that a guest maps several times is one sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSample {
    /// The guest that has the page.
    pub owner: GuestIndex,
    /// Position in the order of the scan, unique within a census. Neighbours in an address space have neighbouring
    /// positions. A gap in the address space is a gap in the positions.
    pub position: u32,
    /// Process that it was found in; 0 for page cache that no process maps.
    pub pid: u32,
    /// Its address in that process; for page cache, its offset in the file.
    pub address: HostVirt,
    /// The page frame.
    pub frame: FrameId,
    /// Its backing.
    pub kind: PageKind,
    /// The part of the guest's footprint that it belongs to.
    pub region: Region,
    /// Whether the frame has mappings outside its owner.
    pub mapped_elsewhere: bool,
    /// Whether KSM, the kernel's own merger, holds it.
    pub ksm: bool,
    /// `/proc/kpageflags` of the frame, where it was read.
    pub kpageflags: Option<u64>,
    /// Fingerprint of its content.
    pub fingerprint: Fingerprint,
}
