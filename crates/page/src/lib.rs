//! The vocabulary that all other rooms share: addresses, page frames, sets and kinds of pages, fingerprints of their
//! content, savings, and waits. No input or output, no unsafe code.
#![forbid(unsafe_code)]
// Figures from other processes are added up here, so no sum may overflow.
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

mod address;
mod bits;
mod fingerprint;
mod guest_kind;
mod kind;
mod page_set;
mod sample;
mod savings;
mod slot;
mod wait;

pub use address::{GuestPhys, HostVirt, PAGE_BYTES, PAGE_SHIFT, PageRange, Pfn, pages_to_bytes};
pub use bits::{Bits, CHUNK_PAGES, chunks};
pub use fingerprint::Fingerprint;
pub use guest_kind::{FrameUse, GuestPageKind, Lru};
pub use kind::{PageKind, Region};
pub use page_set::PageSet;
pub use sample::{FrameId, GuestIndex, PageSample};
pub use savings::Savings;
pub use slot::{NOT_GROUPS, PoolSlot};
pub use wait::doubled;
