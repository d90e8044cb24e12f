//! Reading the pages of guests: which there are, which frame each is, and what it holds.
//!
//! A scan has two steps. The *plan* walks the page tables once and lists what is resident, cut into
//! units of a few megabytes, each with its place in the order of the scan. Then threads take units,
//! and for each:
//!
//! ```text
//!   pagemap ---> mapped nowhere else? --yes--> read, fingerprint --> sample
//!                      |
//!                      no: page of a library, of a parent, of KSM, the kernel's huge zero page
//!                      v
//!                frames of this guest that somebody may share: one read each, mappings counted
//!                      |  (when the guest's last unit is done)
//!                      v
//!                kpagecount: more mappings than this guest's own? kpageflags: KSM? zero page? --> sample
//! ```
//!
//! Bytes are read through the memory of the process ([`host::ProcessMemory`]), with care not to end any
//! sharing; or, on demand, from the page frames themselves ([`host::FrameReader`]), which leaves no trace.
//!
//! Only pages that the page tables show as present are read, so that reading makes nothing resident; the
//! kernel's zero page is never counted. A page that goes away between the two looks is counted as
//! vanished and makes the result partial. Page tables stay bound to the address space they were opened
//! on, which is how the end of a process, or its `exec`, is noticed.
//!
//! **Without root** the kernel hides frame numbers. Frames are then told apart by what is visible: pages
//! of files by file and offset; private pages by process and address; private pages that are mapped
//! elsewhere too (after a fork) by address and content. Where `PAGEMAP_SCAN` is missing, or does not know the
//! kernel's zero page in its huge form, such a caller cannot tell it from memory, and counts it.

mod found;
mod frames;
mod plan;
mod read;

pub use plan::{HostSide, Missed, Place, Plan};
pub use read::{ScanOptions, ScanTotals};
