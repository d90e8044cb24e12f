//! One file a command: its arguments, and how it strings the other rooms together.

pub mod bench;
pub mod census;
pub mod doctor;
pub mod guests;
pub mod lab;
pub mod select;
