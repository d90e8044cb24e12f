//! The only home of system calls, ioctls and the parsing of `/proc` and `/sys`.

mod error;
mod file_map;
mod kpage;
mod pagemap;
mod process;
mod smaps;
mod vm_read;

pub use error::{Error, Result};
pub use file_map::FileMap;
pub use kpage::{FrameTable, kpf};
pub use pagemap::{PageRange, Pagemap, PagemapEntry};
pub use process::{ProcessId, ProcessStat};
pub use smaps::{Mapping, Usage};
pub use vm_read::ProcessMemory;
