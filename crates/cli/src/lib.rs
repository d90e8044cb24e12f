//! Input and output of commands: stdout, stderr, a service's log, exit codes, and sizes as people type and read them.
#![forbid(unsafe_code)]

pub mod exit;
pub mod log;
pub mod output;
mod printable;
pub mod size;

pub use printable::printable;
pub use size::bytes;
