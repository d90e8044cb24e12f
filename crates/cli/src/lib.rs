//! What all commands and services of Pagefold share: stdout and stderr, the log and the journal of a service, exit
//! codes, files that commands write, versions, and sizes and times as people type and read them.
#![forbid(unsafe_code)]

mod cache;
pub mod exit;
pub mod journal;
pub mod log;
pub mod output;
mod output_file;
mod printable;
mod program;
pub mod size;
pub mod time;
pub mod version;

pub use cache::cache_dir;
pub use output_file::OutputFile;
pub use printable::printable;
pub use program::{OWN_PROGRAM, pagefold, use_pagefold};
pub use size::bytes;
pub use version::version;
