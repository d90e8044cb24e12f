//! Carries out what `balance` plans: gathers facts from host, groups and guests, moves balloons, keeps reservations, and
//! writes every action down.
//!
//! ```text
//!   Gatherer: /proc, control groups, QMP --> Facts --> balance::plan --> Plan
//!                                                                         |
//!   Ledger: targets, reservations, journal <-- Outcome <-- carry_out: shrink, wait until it has landed, grow
//! ```
//!
//! A process that is killed between any two steps leaves every guest at a size that one plan allowed. Guests that shrink
//! stay above their guarantee, and guests grow from memory that is there.
#![forbid(unsafe_code)]

mod balloon;
mod carry_out;
mod gather;
mod ledger;
mod many;
mod rules;

pub use balloon::Balloon;
pub use carry_out::{Means, Outcome, carry_out};
pub use gather::{Gatherer, Saved};
pub use ledger::{Entry, Ledger, Reserved, Turn};
pub use rules::Rules;
