//! Carries out what `balance` plans. It gathers facts from host, groups and guests, moves balloons and keeps reservations. It pauses
//! guests while memory runs out. Every action is written down. Guests that an operator parks or moves to another host are in `park.rs` and
//! `moving.rs`. It drives ksmd where the operator has it do so (`ksmd.rs`).
//!
//! ```text
//!   Gatherer: /proc, control groups, QMP --> Facts --> balance::plan --> Plan
//!                                                                         |
//!   Ledger: targets, reservations, journal <-- Outcome <-- carry_out: shrink, wait until it has landed, grow
//! ```
//!
//! A process that is killed between any two steps leaves every guest at a size that one plan allowed. Guests that shrink
//! stay above their guarantee, and guests grow from memory that is there. Guests that it has paused are resumed by another
//! process (`hold.rs`).
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
