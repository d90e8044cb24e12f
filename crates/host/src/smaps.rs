//! `/proc/PID/smaps` and `smaps_rollup`: what a process maps and how much memory each mapping holds.
//! Kernel names, in bytes.

use page::HostVirt;

/// The counters of one mapping, or of a whole process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// `Rss`
    pub rss_bytes: u64,
    /// `Pss`
    pub pss_bytes: u64,
    /// `Private_Clean` + `Private_Dirty`
    pub uss_bytes: u64,
    /// `Swap`
    pub swap_bytes: u64,
    /// `AnonHugePages` + `ShmemPmdMapped` + `FilePmdMapped`
    pub thp_bytes: u64,
    /// `Private_Hugetlb` + `Shared_Hugetlb`
    pub hugetlb_bytes: u64,
    /// `KSM`, since Linux 6.5
    pub ksm_bytes: Option<u64>,
    /// `Locked`
    pub locked_bytes: u64,
}

/// One mapping (VMA) of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: HostVirt,
    /// First address behind it.
    pub end: HostVirt,
    /// Readable, that is not `PROT_NONE` or write-only.
    pub read: bool,
    /// Writable.
    pub write: bool,
    /// Executable.
    pub execute: bool,
    /// `MAP_SHARED`
    pub shared: bool,
    /// Offset in the file.
    pub offset: u64,
    /// Device of the file, as `st_dev` encodes it; 0 for none.
    pub device: u64,
    /// Inode of the file; 0 for none.
    pub inode: u64,
    /// File, or the kernel's name in brackets; empty for plain anonymous memory.
    pub name: String,
    /// What it holds.
    pub usage: Usage,
    /// Two-letter `VmFlags`, in the kernel's order (`mg` mergeable, `ht` hugetlb, `io` device, `pf` PFN map,
    /// `lo` locked, `nh`, `hg` huge page advice, `um` `uw` userfaultfd).
    pub vm_flags: Vec<[u8; 2]>,
}
