//! One page in the index: 20 bytes.

use page::{Fingerprint, FrameId, GuestIndex, PageKind, PageSample, Region};

/// A [`PageSample`] without the fields that only the export of samples needs.
///
/// Packed to a multiple of four bytes; the fields are read by copy, never by reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, packed(4))]
pub struct Entry {
    fingerprint: u64,
    /// From the top: frame 40 bits, owner 16, region 4, kind 2, mapped elsewhere 1, KSM 1. Sorted by this number, the
    /// entries of one content have the mappings of one frame side by side, in order of their owners.
    frame_and_owner: u64,
    position: u32,
}

const _: () = assert!(size_of::<Entry>() == 20);
const _: () = assert!(Region::ALL.len() <= 16 && PageKind::ALL.len() <= 4);

impl From<&PageSample> for Entry {
    fn from(s: &PageSample) -> Self {
        Self {
            fingerprint: s.fingerprint.0,
            frame_and_owner: (s.frame.0 & FrameId::MAX) << 24
                | u64::from(s.owner.0) << 8
                | (s.region as u64) << 4
                | (s.kind as u64) << 2
                | u64::from(s.mapped_elsewhere) << 1
                | u64::from(s.ksm),
            position: s.position,
        }
    }
}

impl Entry {
    /// The content's fingerprint.
    pub const fn fingerprint(self) -> Fingerprint {
        Fingerprint(self.fingerprint)
    }

    /// The sorting key of the index.
    pub const fn key(self) -> (u64, u64) {
        (self.fingerprint, self.frame_and_owner)
    }

    /// The page frame.
    pub const fn frame(self) -> FrameId {
        FrameId(self.frame_and_owner >> 24)
    }

    /// The guest that the page belongs to.
    pub const fn owner(self) -> GuestIndex {
        GuestIndex((self.frame_and_owner >> 8) as u16)
    }

    /// The part of the guest's footprint in which the page lies.
    pub const fn region(self) -> Region {
        Region::ALL[(self.frame_and_owner >> 4 & 0xf) as usize % Region::ALL.len()]
    }

    /// What backs the page, such as anonymous memory or a file.
    pub const fn kind(self) -> PageKind {
        PageKind::ALL[(self.frame_and_owner >> 2 & 3) as usize % PageKind::ALL.len()]
    }

    /// Whether a process other than the owner's maps the frame.
    pub const fn mapped_elsewhere(self) -> bool {
        self.frame_and_owner >> 1 & 1 == 1
    }

    /// Whether KSM, the kernel's own merger, holds the frame.
    pub const fn ksm(self) -> bool {
        self.frame_and_owner & 1 == 1
    }

    /// Place in the order of the scan.
    pub const fn position(self) -> u32 {
        self.position
    }
}

#[cfg(test)]
impl Entry {
    /// A page of guest RAM in a frame of its own, for tests.
    pub(crate) fn sample(owner: u16, position: u32, content: u64) -> Self {
        Self::from(&PageSample {
            owner: GuestIndex(owner),
            position,
            pid: 1,
            address: page::HostVirt(0),
            frame: FrameId(u64::from(position)),
            kind: PageKind::Anon,
            region: Region::GuestRam,
            mapped_elsewhere: false,
            ksm: false,
            kpageflags: None,
            fingerprint: Fingerprint(content),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use page::HostVirt;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn entry_keeps_every_field(
            fingerprint: u64, frame in 0..=FrameId::MAX, owner: u16, position: u32,
            kind in 0..4usize, region in 0..8usize, mapped_elsewhere: bool, ksm: bool,
        ) {
            let s = PageSample {
                owner: GuestIndex(owner), position, pid: 1, address: HostVirt(0), frame: FrameId(frame),
                kind: PageKind::ALL[kind], region: Region::ALL[region], mapped_elsewhere, ksm,
                kpageflags: None, fingerprint: Fingerprint(fingerprint),
            };
            let e = Entry::from(&s);
            prop_assert_eq!((e.fingerprint(), e.frame(), e.owner()), (s.fingerprint, s.frame, s.owner));
            prop_assert_eq!((e.kind(), e.region(), e.position()), (s.kind, s.region, s.position));
            prop_assert_eq!((e.mapped_elsewhere(), e.ksm()), (mapped_elsewhere, ksm));
        }
    }
}
