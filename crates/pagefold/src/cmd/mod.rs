//! One file a command: its arguments, and how it strings the other rooms together.

pub mod audit;
pub mod bench;
pub mod census;
pub mod doctor;
pub mod explain;
pub mod forecast;
pub mod group;
pub mod guests;
pub mod lab;
pub mod prove;
pub mod run;
pub mod select;
pub mod serve;
pub mod worker;
