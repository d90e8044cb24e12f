//! The only home of system calls, ioctls and the parsing of `/proc` and `/sys`.

mod error;
mod smaps;

pub use error::{Error, Result};
pub use smaps::{Mapping, Usage};
