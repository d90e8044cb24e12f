//! Finding guests, what their processes map, which group they belong to, and reading their pages.
#![forbid(unsafe_code)]

mod model;
pub mod qmp;

pub use model::{Footprint, Guest, GuestKind, RegionFootprint};
