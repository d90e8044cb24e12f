//! The protocol between a member's agent and its group's worker.
//!
//! The two talk over a `SOCK_SEQPACKET` socket. One frame is one datagram, so a frame arrives whole or not at all, and
//! nobody waits for the rest of one. File descriptors that belong to a message travel with its datagram (`SCM_RIGHTS`).
//!
//! A frame is the message's number in two bytes, followed by the message's fields in the order of their declaration.
//! All numbers are little-endian, and a list follows its 32-bit length.
//!
//! ```text
//!   agent                                                     worker
//!     | Hello {version, ...}                                     |
//!     | -------------------------------------------------------> |
//!     |        Welcome {version, donation window (fd)}, Lease (fd), Segment (fd) ..., Pace
//!     | <------------------------------------------------------- |
//!     | Held: slots mapped since an earlier worker ------------> |
//!     | Home: a template is mapped here ------------------------> |
//!     |                                                          |
//!     | Rested: pages at rest and their fingerprints ----------> |
//!     | <------------------------- Donate: show me these pages   |
//!     | Donated: they lie in the donation window --------------> |
//!     | <------------------- Fold: replace these pages by slots  |
//!     | Folded: what became of each ---------------------------> |
//!     | Released: these places map their slots no longer ------> |
//!     | <------------------------ Lease: a new epoch begins (fd)   |
//!     | LeaseTaken: and the old lease is let go ---------------> |
//!     | Stats: once a second ----------------------------------> |
//!     | <----- Room: there is memory to make so many private     |
//!     |                                                          |
//!     | <------------- Why: what keeps you from reporting these? |   only when an operator's question names pages
//!     | Because: a reason for each ----------------------------> |
//!     |                                                          |
//!     | Bye: why the agent closes the connection --------------> |
//! ```
//!
//! Neither side believes the other. Decoding bounds every list, never panics (`tests/hostile.rs`), and refuses unknown
//! kinds, bytes that are left over, and values out of range. The *meaning* of a message is checked where it is acted
//! on. A side that gets a frame it cannot decode hangs up.
#![forbid(unsafe_code)]
// Figures from other processes are added up here, so no sum may overflow.
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

pub mod attach;
mod codec;
mod message;
pub mod prove;
mod stats;
mod why;

pub use codec::Malformed;
pub use message::{
    DONATION_PAGES, FOLD_PAGES, FRAME_BYTES, FoldMode, FoldRun, Hello, HugePages, Outcome, Pace, RESTED_PAGES, RUNS,
    RestedRun, SlotRun, Target, ToAgent, ToWorker, VERSION, ZeroPages,
};
pub use stats::{Counters, Failures, MemberState, MemberStats, STALL_BUCKETS, Stalls};
pub use why::{WHY_PAGES, Why};
