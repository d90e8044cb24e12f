//! The only home of system calls, ioctls and the parsing of `/proc` and `/sys`.

mod cgroup;
mod error;
mod file_map;
mod kpage;
mod mounts;
mod pagemap;
mod process;
mod process_id;
mod smaps;
mod vm_read;

pub use cgroup::{CgroupLayout, Cgroups};
pub use error::{Error, Result};
pub use file_map::FileMap;
pub use kpage::{FrameTable, kpf};
pub use mounts::proc_hides_processes;
pub use pagemap::{PageRange, Pagemap, PagemapEntry};
pub use process::{Process, check_readable, open_files, pids};
pub use process_id::{ProcessId, ProcessStat};
pub use smaps::{Mapping, Usage};
pub use vm_read::ProcessMemory;
