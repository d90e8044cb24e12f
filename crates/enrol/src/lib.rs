//! Enrols running processes by the rules of a service (`[[enrol]]`), also those that start later.
//!
//! ```text
//!   every 2 s                             facts of the kernel's           rules of the service
//!     look: which processes are there? ----------> decide: to be attached? why not? <---'
//!                                                       |
//!                                                       v
//!                                     attach: pagefold-attach, a few at a time ---> the supervisor decides on membership
//! ```
//!
//! | step | module | it |
//! |---|---|---|
//! | look | `facts`, `watch` | reads what the kernel says of each process. None of it is chosen by the process, but for what makes it less likely to be attached |
//! | decide | `decide` | is a pure function of facts and rules |
//! | act | `attach` | starts `pagefold-attach`, which the kernel lets trace that process or not |
//!
//! A process that cannot be attached is tried again after a wait that doubles, and its reason is told to the service.
//!
//! A program that stays beside an attached process may be killed. Every 10 s, others are started in the place of such ones.
#![forbid(unsafe_code)]

pub mod attach;
mod crew;
pub mod decide;
pub mod facts;
mod labels;
mod metadata;
mod run;
mod watch;

pub use run::{Planned, plan, run};
