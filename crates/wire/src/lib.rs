//! What a member's agent and its group's worker say to each other.
//!
//! The two talk over a `SOCK_SEQPACKET` socket: one frame is one datagram, so a frame arrives whole or
//! not at all, and nobody waits for the rest of one. A frame is two bytes that say which message it is,
//! followed by the message's fields in the order of their declaration, little-endian, lists after their
//! 32-bit length. File descriptors that belong to a message travel with its datagram (`SCM_RIGHTS`).
//!
//! ```text
//!   agent                                                     worker
//!     | Hello {version, ...}                                     |
//!     | -------------------------------------------------------> |
//!     |        Welcome {version, donation window (fd)}, Lease (fd), Segment (fd) ..., Pace
//!     | <------------------------------------------------------- |
//!     | Held: slots mapped since an earlier worker ------------> |
//!     |                                                          |
//!     | Rested: pages at rest and their fingerprints ----------> |
//!     | <------------------------- Donate: show me these pages   |
//!     | Donated: they lie in the donation window --------------> |
//!     | <------------------- Fold: replace these pages by slots  |
//!     | Folded: what became of each ---------------------------> |
//!     | Released: these places map their slots no longer ------> |
//!     | <------------------------ Lease: a new era begins (fd)   |
//!     | LeaseTaken: and the old lease is let go ---------------> |
//!     | Stats: once a second ----------------------------------> |
//! ```
//!
//! Neither side believes the other. Decoding bounds every list, refuses unknown kinds, bytes that are left
//! over and values out of range, and never panics (`tests/hostile.rs`); what a message *means* is checked
//! where it is acted on. A side that gets a frame it cannot decode hangs up.
#![forbid(unsafe_code)]

mod codec;
mod message;
pub mod prove;
mod stats;

pub use codec::Malformed;
pub use message::{
    DONATION_PAGES, FOLD_PAGES, FRAME_BYTES, FoldMode, FoldRun, Hello, HugePages, Outcome, Pace, RESTED_PAGES,
    RestedRun, SlotRun, Target, ToAgent, ToWorker, VERSION, ZeroPages,
};
pub use stats::{Failures, MemberState, MemberStats, STALL_BUCKETS, Stalls};
