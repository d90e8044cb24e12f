//! Input and output of commands: stdout, stderr, a service's log and journal, exit codes, files that they write, versions. Sizes and times as people type and
//! read them.
#![forbid(unsafe_code)]

mod cache;
pub mod exit;
pub mod journal;
pub mod log;
pub mod output;
mod output_file;
mod printable;
pub mod size;
pub mod time;
pub mod version;

/// The file of this program, to start it again. It is the same one after an upgrade has replaced it, whose path would name another, or none.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

pub use cache::cache_dir;
pub use output_file::OutputFile;
pub use printable::printable;
pub use size::bytes;
pub use version::version;
