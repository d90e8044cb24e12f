//! Real guests to try Pagefold on, for users, for the demo and for tests: VMs in QEMU, containers in LXC, and plain
//! processes where neither rights nor packages are there.
//!
//! A [`Lab`] is a directory. It holds the state of the guests, and of each guest its sockets and logs; commands that
//! know the directory can list the guests, run commands inside, and end them, whoever started them. Guests say
//! themselves when they are ready. Images are built once and kept in a [`Cache`].
//!
//! ```text
//!   up:  image from the cache -> name in the state file -> marked process -> pid in the state file -> ready
//! down:  asked to end (QMP, lxc-stop) -> SIGTERM -> SIGKILL -> directories removed
//! ```
//! A process is known by its mark, so `down` is complete wherever `up` was cut off.
#![forbid(unsafe_code)]

mod accel;
mod agent;
mod cache;
mod cpio;
mod error;
mod family;
mod guest;
mod image;
mod kernel;
mod lab;
mod life;
mod lxc;
mod name;
mod place;
mod process;
mod program;
mod qemu;
mod random;
mod settle;
mod spec;
mod start;
mod state;
mod suite;

pub use agent::Output;
pub use cache::Cache;
pub use error::{Error, Result};
pub use guest::Guest;
pub use lab::{Lab, Progress};
pub use place::{cache_dir, default_lab_dir};
pub use process::live;
pub use qemu::Accelerator;
pub use settle::{Idle, Settled};
pub use spec::{Fold, Spec};
pub use state::Image;
pub use suite::kernel_of_suite;
