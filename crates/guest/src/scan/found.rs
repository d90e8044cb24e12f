//! Pages that were found in a page table and are to become samples.

use host::{PageRange, kpf};
use page::{Fingerprint, FrameId, GuestIndex, HostVirt, PageKind, PageSample, Region};

/// A resident page on its way to becoming a sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub position: u32,
    pub frame: FrameId,
    pub fingerprint: Option<Fingerprint>,
    pub pid: u32,
    pub address: HostVirt,
    pub kind: PageKind,
    pub region: Region,
    /// Whether the frame may have another mapping, in this process or another one.
    pub shared: bool,
    pub kpageflags: Option<u64>,
}

impl Found {
    /// Whether KSM is known to hold it.
    pub fn in_ksm(&self) -> bool {
        self.kpageflags.is_some_and(|word| word & kpf::KSM != 0)
    }

    /// The sample of this page, which must have been read.
    pub fn sample(&self, owner: GuestIndex) -> PageSample {
        PageSample {
            owner,
            position: self.position,
            pid: self.pid,
            address: self.address,
            frame: self.frame,
            kind: self.kind,
            region: self.region,
            mapped_elsewhere: false,
            ksm: self.in_ksm(),
            kpageflags: self.kpageflags,
            fingerprint: self.fingerprint.expect("only pages that were read become samples"),
        }
    }
}

/// A frame number made of the properties that identify a page. If two pages get the same number by chance, they are
/// taken for one frame only if they also hold the same bytes.
pub(super) fn mix(parts: &[u64]) -> FrameId {
    let bytes: Vec<u8> = parts.iter().flat_map(|p| p.to_ne_bytes()).collect();
    FrameId(Fingerprint::of(&bytes).0 & FrameId::MAX)
}

/// Ranges of neighbouring pages.
pub(super) fn join(pages: &[Found]) -> Vec<PageRange> {
    let neighbours = |a: &Found, b: &Found| a.address.add_pages(1) == b.address;
    let runs = pages.chunk_by(neighbours);
    runs.map(|run| PageRange { start: run[0].address, pages: run.len() as u64 }).collect()
}
