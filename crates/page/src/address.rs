//! One newtype for each kind of address, so that a frame number is never taken for an address.

use serde::Serialize;
use std::fmt;

/// Binary logarithm of [`PAGE_BYTES`].
pub const PAGE_SHIFT: u32 = 12;
/// Bytes of a base page on x86-64, the only page size Pagefold supports. `doctor` checks the host's.
pub const PAGE_BYTES: usize = 1 << PAGE_SHIFT;

/// Size of `pages` base pages in bytes. If it does not fit into 64 bits, the greatest number: other processes choose
/// some of these counts.
pub const fn pages_to_bytes(pages: u64) -> u64 {
    pages.saturating_mul(PAGE_BYTES as u64)
}

/// Page frame number: the index of a physical page of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Pfn(pub u64);

/// Virtual address in a process of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct HostVirt(pub u64);

impl HostVirt {
    /// The number of the page that holds this address.
    pub const fn page(self) -> u64 {
        self.0 >> PAGE_SHIFT
    }

    /// The address that is `pages` base pages further on.
    pub const fn add_pages(self, pages: u64) -> Self {
        Self(self.0.saturating_add(pages_to_bytes(pages)))
    }
}

/// Address in a VM's own physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct GuestPhys(pub u64);

impl GuestPhys {
    /// The number of the guest's page frame that holds this address.
    pub const fn frame(self) -> u64 {
        self.0 >> PAGE_SHIFT
    }
}

impl fmt::Display for GuestPhys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for HostVirt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Consecutive pages of an address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRange {
    /// Address of the first page.
    pub start: HostVirt,
    /// Number of pages.
    pub pages: u64,
}

impl PageRange {
    /// The first address behind the last page.
    pub const fn end(self) -> HostVirt {
        self.start.add_pages(self.pages)
    }
}
