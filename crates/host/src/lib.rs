//! The only home of system calls, ioctls and the parsing of `/proc` and `/sys`.

mod advice;
mod bpf;
mod cgroup;
mod check;
mod error;
mod features;
mod file_map;
mod frame_read;
mod kpage;
mod ksm;
mod mounts;
mod page_cache;
mod pagemap;
mod process;
mod process_id;
mod smaps;
mod system;
mod text;
mod vm_read;

pub use advice::prefer_huge_pages;
pub use cgroup::{CgroupLayout, Cgroups};
pub use check::{Check, Status};
pub use error::{Error, Result};
pub use features::probe_host;
pub use file_map::FileMap;
pub use frame_read::FrameReader;
pub use kpage::{FrameTable, kpf};
pub use ksm::{Ksm, KsmStat};
pub use mounts::proc_hides_processes;
pub use page_cache::CachedFile;
pub use pagemap::{PageRange, Pagemap, PagemapEntry, frames_visible};
pub use process::{Process, check_readable, open_files, pids};
pub use process_id::{ProcessId, ProcessStat};
pub use smaps::{Mapping, Usage};
pub use system::{Kernel, own_peak_rss_bytes, swapped_bytes};
pub use vm_read::ProcessMemory;
