//! What Pagefold found, for people and for programs: one file per output format. Nothing is measured
//! or computed here beyond what a picture needs.
#![forbid(unsafe_code)]

mod size;
mod table;

pub use size::{bytes, count, mib, percent};
pub use table::{Align, Table, printable, shorten};
