//! Where guests should live: sketches of what each holds, and plans over the sketches of many hosts.
//!
//! ```text
//!   guests of a host --> census --> sketch.rs: counts, and a theta sketch of HMACs of contents     (reads guests' memory)
//!                                      |
//!                                      v
//!                                   table.rs: Parquet files, which any engine reads               (files in, files out)
//!                                      |
//!                                      v
//!   fleet.rs: hosts, guests, sums --> policy.rs --> plan.rs: what each policy needs, moves           (pure)
//!                                 --> suggest.rs: groups      summary.rs: what there is
//! ```
//!
//! A program of its own, `pagefold-place`, does all of this. Nothing of it is in the service. It changes nothing but
//! the files that it writes: moves and groups are proposals.
#![forbid(unsafe_code)]

pub mod day;
pub mod fleet;
pub mod key;
pub mod plan;
pub mod policy;
pub mod row;
pub mod simulate;
pub mod sketch;
mod slots;
pub mod suggest;
pub mod summary;
pub mod table;
pub mod theta;
pub mod weigh;
