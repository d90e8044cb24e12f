//! One file per command: its arguments, and the way it combines the other crates.

mod absent;
pub mod admit;
pub mod apart;
pub mod attach;
pub mod audit;
pub mod balance;
pub mod census;
pub mod clone;
pub mod config;
pub mod doctor;
pub mod enrol;
pub mod explain;
pub mod forecast;
pub mod group;
pub mod guests;
pub mod journal;
pub mod ksm;
pub mod migrate;
pub mod park;
pub mod place;
pub mod room;
pub mod run;
pub mod serve;
pub mod stop;
pub mod template;
pub mod top;
mod which;
