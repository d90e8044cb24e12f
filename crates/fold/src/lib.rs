//! The group worker: pool, content index, planning, pacing.
//!
//! ```text
//!   worker     the loop: supervisor, members, clock
//!   group      members and settings; conversation: members' messages; tick: timed work
//!   turns      whose messages are next         adapt   a scan rate that follows its yield
//!   member     one connection      lease   how long released slots are kept
//!   headroom   members near the memory limit of their control group
//!   plan       decides what resting pages fold to; dispatch: requests; settle: answers; huge; upkeep
//!   transition states of pages, and who holds slots
//!   table      pages               index   contents              pool, segment, extents   slots
//!   proof      whether a free slot may be filled           report, why   answers to the supervisor
//! ```
#![forbid(unsafe_code)]

mod adapt;
mod conversation;
mod dispatch;
mod extents;
#[cfg(test)]
mod extents_tests;
mod fleeting;
mod group;
mod headroom;
mod home;
mod huge;
mod index;
#[cfg(test)]
mod index_tests;
mod lease;
mod member;
mod pace;
mod plan;
#[cfg(test)]
mod plan_tests;
mod pool;
mod proof;
mod report;
mod room;
mod segment;
mod settle;
#[cfg(test)]
mod share_tests;
mod table;
#[cfg(test)]
mod throughput_tests;
mod tick;
mod transition;
#[cfg(test)]
mod transition_tests;
mod turns;
mod upkeep;
mod waiters;
mod why;
mod worker;

pub use worker::{Error, Result, run};
