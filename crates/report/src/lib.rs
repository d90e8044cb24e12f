//! Findings in formats for people and for programs: one file per output format. Nothing is measured here, and only the
//! values that a picture needs are computed.
#![forbid(unsafe_code)]

pub mod audit_table;
pub mod census_table;
pub mod doctor_table;
pub mod explain_table;
pub mod group_table;
pub mod guests_table;
pub mod html;
pub mod json;
#[cfg(feature = "parquet")]
pub mod parquet;
pub mod savings_table;
mod table;
mod words;

pub use table::{Align, Table};
