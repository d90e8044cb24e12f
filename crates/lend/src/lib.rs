//! Carries out what `balance` plans: gathers facts from host, groups and guests, moves balloons, keeps reservations,
//! and pauses guests while memory runs out. Every action is written to the service's journal. Other modules park guests
//! and move them to other hosts for an operator (`park.rs`, `moving.rs`), and drive ksmd (`ksmd.rs`).
//!
//! ```text
//!   Gatherer: /proc, control groups, QMP --> Facts --> balance::plan --> Plan
//!                                                                         |
//!   Ledger: targets, reservations, journal <-- Outcome <-- carry_out: shrink, wait until it has landed, grow
//! ```
//!
//! If this process is killed between any two steps, each guest has a size that a plan allowed: guests that shrink stay
//! above their guarantee, and guests grow only into memory that is available. Guests that were paused are resumed by
//! another process (`hold.rs`).
#![forbid(unsafe_code)]
// Figures from other processes are added up here, so no sum may overflow.
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

mod awake;
mod balloon;
mod carry_out;
#[cfg(test)]
mod fake_qemu;
mod folded;
mod gather;
mod hold;
pub mod ksmd;
mod ledger;
mod many;
mod moving;
mod park;
mod pause;
mod ram_use;
mod reclaim;
mod rules;
mod shrink;

pub use balloon::Balloon;
pub use carry_out::{Means, Outcome, carry_out};
pub use folded::until_folded;
pub use gather::{Gatherer, Saved};
pub use hold::hold;
pub use ledger::{Entry, Ledger, Paced, Proposed, Turn};
pub use moving::{Estimate, Movable, Moved, Pace, Progress, Wanted};
pub use park::{NOTES_WITHIN, Parked, Parking, wake_left};
pub use pause::{Hold, Paused, resume_left};
pub use reclaim::{Reclaimed, reclaim};
pub use rules::{Rules, usual_floor_bytes};
pub use shrink::{Held, Shrunk, shrink};
