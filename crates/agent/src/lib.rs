//! The core of the agent, which folds the pages of the process that it is in. ARCHITECTURE.md, section "Folding", shows
//! how its modules work together.
//!
//! Two programs are made of it. `preload` is a library that is loaded with a program, and whose functions stand before
//! those of the C library (hooks). `attached` is put into a running process, and works together with the program that
//! put it there ([`world::Host`]).

pub mod arena;
pub mod calls;
mod collapse;
pub mod cpu_time;
pub mod fold;
pub mod follow;
pub mod forks;
pub mod give_way;
mod home;
mod inherit;
mod keeper;
mod link;
pub mod lock;
mod map;
pub mod maps;
mod openings;
mod patience;
mod place;
pub mod pool;
pub mod process;
pub mod program;
pub mod raw;
pub mod references;
mod refold;
pub mod remap;
mod round;
#[cfg(test)]
mod scarce;
#[cfg(test)]
mod scarce_tests;
pub mod section;
pub mod spawn;
pub mod table;
#[cfg(test)]
mod testing;
pub mod thread;
mod unfold;
pub mod witness;
pub mod world;
