//! What Pagefold found, for people and for programs: one file per output format. Nothing is measured
//! or computed here beyond what a picture needs.
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
mod size;
mod table;
mod words;

pub use size::bytes;
pub use table::{Align, Table, printable};
