//! Reading the pages of guests: which pages are resident, in which frames, and with which content.
//!
//! A scan has two steps. First, the *plan* walks the page tables once. It lists the resident pages, cut into units of a
//! few megabytes, and gives each unit its position in the order of the scan. Then threads take units, and do this for
//! each page:
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
//! Bytes are read through the memory of the process ([`host::ProcessMemory`]), in such a way that shared pages stay
//! shared. If asked for, they are read from the page frames themselves ([`host::FrameReader`]), which leaves no trace.
//!
//! Only pages that the page tables show as present are read, so that reading makes nothing resident. The kernel's
//! zero page is never counted. A page that goes away between plan and reading is counted as vanished, and makes the
//! result partial. An open page table stays bound to its address space. So the scan notices if a process ends or
//! executes another program.
//!
//! **Without root** the kernel hides frame numbers. Frames are then told apart by visible properties:
//!
//! | page | told apart by |
//! |---|---|
//! | of a file | file and offset |
//! | private | process and address |
//! | private, but mapped elsewhere too (after a fork) | address and content |
//!
//! A caller without root counts the kernel's zero page as memory if `PAGEMAP_SCAN` is missing. It counts the huge
//! zero page, too, if `PAGEMAP_SCAN` does not know that one.

mod found;
mod frames;
mod plan;
mod read;

pub use plan::{HostSide, Missed, Place, Plan};
pub use read::{ScanOptions, ScanTotals};
