//! `libpagefold.so`, the agent: preloaded into a process, it folds the pages of that process. ARCHITECTURE.md, section
//! "Folding", shows how its modules work together.
//!
//! Built for the musl target, it is `pagefold-agent`, an object that is put into a running process (`attached.rs`).

// An agent without hooks has no use for what only hooks call.
#![cfg_attr(not(target_env = "gnu"), allow(dead_code))]

/// Whether hooks see what the program does. If not, the agent was put into a running process.
const HOOKED: bool = cfg!(target_env = "gnu");

mod arena;
#[cfg(not(target_env = "gnu"))]
pub mod attached;
mod calls;
#[cfg(target_env = "gnu")]
mod child;
mod collapse;
mod cpu_time;
#[cfg(target_env = "gnu")]
mod debugged;
#[cfg(not(target_env = "gnu"))]
mod enrol;
mod fold;
mod follow;
mod forks;
#[cfg(not(target_env = "gnu"))]
mod gate;
mod give_way;
mod home;
#[cfg(target_env = "gnu")]
mod hooks;
#[cfg(not(target_env = "gnu"))]
#[path = "no_hooks.rs"]
mod hooks;
#[cfg(target_env = "gnu")]
mod inherit;
mod keeper;
#[cfg(any(test, not(target_env = "gnu")))]
#[cfg_attr(target_env = "gnu", expect(dead_code, reason = "an agent with hooks stays"))]
mod leave;
mod link;
mod lock;
mod map;
mod maps;
mod openings;
mod patience;
mod place;
#[cfg(any(test, not(target_env = "gnu")))]
#[cfg_attr(target_env = "gnu", expect(dead_code, reason = "an agent with hooks sees policies being set"))]
mod policies;
mod pool;
mod program;
mod raw;
mod references;
mod refold;
mod remap;
#[cfg(target_env = "gnu")]
mod resign;
mod round;
#[cfg(test)]
mod scarce;
mod section;
mod spawn;
#[cfg(target_env = "gnu")]
mod start;
mod table;
#[cfg(test)]
mod testing;
mod thread;
mod unfold;
mod witness;
mod world;
