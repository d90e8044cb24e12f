//! One file per command: its arguments, and the way it combines the crates.

pub mod generate;
pub mod lab;
pub mod template;
