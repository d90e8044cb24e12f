//! The interface through which this crate reads a guest's memory: bytes at guest-physical addresses.

use page::{GuestPhys, PAGE_BYTES};

/// A range of a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhysRange {
    /// Address of the first byte, at a page's boundary.
    pub start: GuestPhys,
    /// Number of frames.
    pub frames: u64,
}

impl PhysRange {
    /// The first address behind the range.
    pub const fn end(self) -> GuestPhys {
        GuestPhys(self.start.0.saturating_add(self.frames.saturating_mul(PAGE_BYTES as u64)))
    }
}

/// A guest's memory. The guest may have written any bytes, and may change them between two reads.
pub trait GuestMemory {
    /// The ranges of the guest's memory, in ascending order, without overlaps.
    fn ranges(&self) -> &[PhysRange];

    /// Copies bytes. False if some are not the guest's memory, or cannot be read. Memory that the host does not back
    /// reads as zeros.
    fn read(&self, at: GuestPhys, into: &mut [u8]) -> bool;

    /// Calls `each` with the beginning of every frame that the host backs, in any order, until it returns false. A
    /// beginning has at least [`HEAD_BYTES`] bytes.
    fn heads(&self, each: &mut dyn FnMut(GuestPhys, &[u8]) -> bool);
}

/// Least bytes of a frame that [`GuestMemory::heads`] shows.
pub const HEAD_BYTES: usize = 64;

/// Memory held in a buffer, from guest-physical address 0 on: a saved guest, for tests.
#[derive(Clone, Debug)]
pub struct Saved {
    bytes: Vec<u8>,
    ranges: [PhysRange; 1],
}

impl Saved {
    /// The memory of these bytes. Bytes behind the last whole frame are cut off.
    pub fn new(mut bytes: Vec<u8>) -> Self {
        let frames = bytes.len() / PAGE_BYTES;
        bytes.truncate(frames * PAGE_BYTES);
        Self { bytes, ranges: [PhysRange { start: GuestPhys(0), frames: frames as u64 }] }
    }

    /// All bytes, so that a test can change them as a guest may do.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl GuestMemory for Saved {
    fn ranges(&self) -> &[PhysRange] {
        &self.ranges
    }

    fn read(&self, at: GuestPhys, into: &mut [u8]) -> bool {
        let Ok(start) = usize::try_from(at.0) else { return false };
        let found = start.checked_add(into.len()).and_then(|end| self.bytes.get(start..end));
        found.map(|bytes| into.copy_from_slice(bytes)).is_some()
    }

    fn heads(&self, each: &mut dyn FnMut(GuestPhys, &[u8]) -> bool) {
        let frames = self.bytes.chunks_exact(PAGE_BYTES).enumerate();
        let mut frames = frames.map(|(n, frame)| (GuestPhys((n * PAGE_BYTES) as u64), &frame[..HEAD_BYTES]));
        let _ = frames.all(|(at, head)| each(at, head));
    }
}
