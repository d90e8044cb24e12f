//! Real guests to try Pagefold on, for users, for the demo and for tests. A guest is a VM in QEMU, a container in LXC,
//! or a plain process, which needs neither rights nor packages.
//!
//! A [`Lab`] is a directory with the state file of the guests, and with each guest's sockets and logs. Any process that
//! knows the directory can list the guests, run commands inside, and end them. Each guest itself reports that it is
//! ready. Images are built once and kept in a [`Cache`].
//!
//! ```text
//!   up:  image from the cache -> name in the state file -> marked process -> pid in the state file -> ready
//! down:  asked to end (QMP, lxc-stop) -> SIGTERM -> SIGKILL -> directories removed
//! ```
//! `down` finds processes by their marks (`life.rs`), so it ends all of them after an `up` that was killed at any step.
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
mod recipe;
mod saved;
mod settle;
mod spec;
mod start;
mod state;
mod suite;

pub use agent::Output;
pub use cache::Cache;
pub use error::{Error, Result};
pub use guest::{Guest, GuestState};
pub use lab::{Lab, Progress};
pub use place::{cache_dir, default_lab_dir};
pub use process::live;
pub use qemu::Accelerator;
pub use recipe::{DIR, DISK, NAME, Recipe};
pub use settle::{Idle, Settled};
pub use spec::{Fold, Spec};
pub use state::Image;
pub use suite::kernel_of_suite;
