//! The uses that a guest itself has for the page frames of its memory.

use serde::Serialize;

/// The use of a frame of a VM's memory by the kernel inside the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum GuestPageKind {
    /// Code of the kernel and its modules.
    KernelText = 0,
    /// Read-only data of the kernel and its modules.
    KernelRodata = 1,
    /// The kernel's variables, and memory that it allocated for other uses than those below: vmalloc, buffers of
    /// drivers.
    KernelData = 2,
    /// Page tables, the kernel's and those of its processes.
    PageTables = 3,
    /// Objects of the slab allocator.
    Slab = 4,
    /// Kernel stacks of threads.
    KernelStack = 5,
    /// Page cache of files, and of block devices.
    PageCache = 6,
    /// tmpfs, memfd, System V and shared anonymous memory.
    Shmem = 7,
    /// Memory of processes with no file behind it.
    Anonymous = 8,
    /// Free, in the buddy allocator or on its per-CPU lists.
    Free = 9,
    /// Given back by a balloon, or offline.
    Balloon = 10,
    /// Reserved when the kernel started: memory of the firmware, and the array that describes the frames.
    Reserved = 11,
    /// Not known.
    Unknown = 12,
}

impl GuestPageKind {
    /// Every kind, in the order of its number.
    pub const ALL: [Self; 13] = [
        Self::KernelText,
        Self::KernelRodata,
        Self::KernelData,
        Self::PageTables,
        Self::Slab,
        Self::KernelStack,
        Self::PageCache,
        Self::Shmem,
        Self::Anonymous,
        Self::Free,
        Self::Balloon,
        Self::Reserved,
        Self::Unknown,
    ];

    /// The name used in JSON and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::KernelText => "kernel_text",
            Self::KernelRodata => "kernel_rodata",
            Self::KernelData => "kernel_data",
            Self::PageTables => "page_tables",
            Self::Slab => "slab",
            Self::KernelStack => "kernel_stack",
            Self::PageCache => "page_cache",
            Self::Shmem => "shmem",
            Self::Anonymous => "anonymous",
            Self::Free => "free",
            Self::Balloon => "balloon",
            Self::Reserved => "reserved",
            Self::Unknown => "unknown",
        }
    }
}

/// The place of a frame in the guest's own order of reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Lru {
    /// On no list: the guest would not reclaim it.
    None = 0,
    /// On an active list, or in one of the two youngest generations.
    Active = 1,
    /// On an inactive list, but marked as referenced.
    InactiveReferenced = 2,
    /// On an inactive list and not referenced: the guest would reclaim it first.
    Inactive = 3,
    /// On the list of frames that cannot be reclaimed.
    Unevictable = 4,
}

impl Lru {
    const ALL: [Self; 5] = [Self::None, Self::Active, Self::InactiveReferenced, Self::Inactive, Self::Unevictable];
}

/// Kind and place in the order of reclaim, in one byte, because a guest has one for each of its frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FrameUse(u8);

impl FrameUse {
    /// Use of a frame of which nothing is known.
    pub const UNKNOWN: Self = Self::new(GuestPageKind::Unknown, Lru::None);

    /// Packs both.
    pub const fn new(kind: GuestPageKind, lru: Lru) -> Self {
        Self(kind as u8 | (lru as u8) << 4)
    }

    /// The kind.
    pub const fn kind(self) -> GuestPageKind {
        GuestPageKind::ALL[(self.0 & 15) as usize]
    }

    /// The place in the order of reclaim.
    pub const fn lru(self) -> Lru {
        Lru::ALL[(self.0 >> 4) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_numbers_and_bytes_agree() {
        for (n, kind) in GuestPageKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, n);
            assert_eq!(serde_json::to_string(&kind).unwrap(), format!("\"{}\"", kind.name()));
            for (m, lru) in Lru::ALL.into_iter().enumerate() {
                assert_eq!(lru as usize, m);
                let both = FrameUse::new(kind, lru);
                assert_eq!((both.kind(), both.lru()), (kind, lru));
            }
        }
    }
}
