//! Taking a census of guests: selecting them, looking inside VMs, scanning, explaining what was found, forecasting.
#![forbid(unsafe_code)]

pub mod explain;
pub mod forecast;
mod inside;
mod progress;
mod select;
mod take;

pub use inside::{Inside, KernelFacts, uses};
pub use select::{Members, Selection, check_host_files, other_processes};
pub use take::{HOST, Request, See, WatchRound, take};
