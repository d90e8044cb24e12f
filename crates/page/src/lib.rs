//! The vocabulary every other room shares: addresses, page frames, what kind of memory a page is,
//! and the fingerprint of its content. No input or output, no unsafe code.
#![forbid(unsafe_code)]

mod address;
mod fingerprint;
mod guest_kind;
mod kind;
mod page_set;
mod sample;
mod slot;

pub use address::{GuestPhys, HostVirt, PAGE_BYTES, PAGE_SHIFT, PageRange, Pfn, pages_to_bytes};
pub use fingerprint::Fingerprint;
pub use guest_kind::{FrameUse, GuestPageKind, Lru};
pub use kind::{PageKind, Region};
pub use page_set::PageSet;
pub use sample::{FrameId, GuestIndex, PageSample};
pub use slot::PoolSlot;
