//! The service: a supervisor that decides who is a member of which group, and one worker a group that folds.
//!
//! ```text
//!   pagefold run ... --Join--> supervisor                    who are you? (pidfd, start time, uid, control group)
//!   a member's agent --------> supervisor --Admit + socket--> worker of its group      (from then on, directly)
//!   pagefold group set ------> supervisor --Set-------------> worker
//!                              supervisor <-Segment + file--- worker                   (kept for a successor)
//! ```
//!
//! The supervisor moves no page and reads nothing that a member says: what a member says goes to its worker, which has
//! no rights that could be abused. What outlives whom:
//!
//! | what ends | what happens |
//! |---|---|
//! | a worker | it is started again, after a while that doubles, with the files of the pool that the one before had made |
//! | the supervisor | workers and members go on; the next one finds the workers by their sockets, members in `state.json` |
//! | a member | its registration ends with its process: pid and start time together are used once |
//! | the last member of a group | the worker ends after a while, and the pool with it |

pub mod ask;
pub mod change;
pub mod client;
pub mod config;
mod decide;
mod group;
pub(crate) mod log;
pub mod name;
pub mod place;
mod prover;
mod requests;
mod state;
mod supervisor;
mod worker;

pub use supervisor::{Options, Supervisor};
