//! Observing the kernel: `/proc`, `/sys`, page tables and page frames. The sockets between Pagefold's processes are
//! here too.
//!
//! Nothing here changes anything but the calling process itself. Calls that change something else are in `act`.

mod auxiliary;
pub mod bpf;
mod cgroup;
mod cgroup_makers;
mod check;
mod error;
mod features;
mod file_lock;
mod file_map;
mod file_tables;
mod foreign_file;
mod frame_read;
mod freezer;
mod interrupt;
mod kernel_faults;
mod kpage;
mod ksm;
mod local_files;
mod memory_files;
mod memory_limits;
mod mounts;
mod named_file;
mod own_cpu;
mod own_socket;
mod pace;
mod page_cache;
mod pagemap;
mod peer;
mod peer_process;
mod plain_file;
mod pressure;
mod process;
mod process_id;
mod seqpacket;
mod shares;
mod signals;
mod smaps;
mod socket;
mod stream;
mod system;
pub mod text;
mod thread_cpu;
mod userfaultfd;
mod visibility;
mod vm_read;

pub use auxiliary::{AuxiliaryVector, Execution};
pub use cgroup::{CgroupLayout, Cgroups};
pub use cgroup_makers::CgroupMakers;
pub use check::{Check, Status};
pub use error::{Error, Result};
pub use features::{GOOD_MAP_COUNT, KvmTrial, create_vm, probe_host, why_denied};
pub use file_lock::lock_file;
pub use file_map::FileMap;
pub use file_tables::one_of_each_table;
pub use foreign_file::ForeignFile;
pub use frame_read::FrameReader;
pub use freezer::frozen_group;
pub use interrupt::{interrupted, note_interrupts};
pub use kernel_faults::{Applies, KernelFault, kernel_faults, refuses_folding};
pub use kpage::{FrameTable, kpf};
pub use ksm::{Ksm, KsmStat, chosen, ksmd_cpu_time};
pub use local_files::LocalFiles;
pub use memory_files::{proc_file, thread_with_memory};
pub use memory_limits::{Bound, MemoryLimits};
pub use mounts::{filesystem_of_mount, filesystem_of_mount_of, has_proc, proc_hides_processes, proc_is_ours};
pub use named_file::read_file_of;
pub use own_cpu::{own_cpu_time, own_thread_cpu_time};
pub use own_socket::{USERS, own_socket};
pub use pace::Pace;
pub use page::PageRange;
pub use page_cache::CachedFile;
pub use pagemap::{Pagemap, PagemapEntry, Survey, frames_visible, has_pagemap_scan};
pub use peer::Peer;
pub use peer_process::{PeerPages, PeerProcess, peer_layout};
pub use plain_file::{open_plain_file, read_plain_file};
pub use pressure::{cpu_waited_percent, high_watermark_bytes, memory_stalled_percent};
pub use process::{
    MemoryCounters, Process, anonymous_bytes, check_readable, children, effective_uid, is_userfaultfd_open, open_files,
    pids, runs_program,
};
pub use process_id::{ProcessId, ProcessStat};
pub use seqpacket::{Files, MOST_FDS, Received, Seqpacket, SeqpacketListener};
pub use shares::{Shares, one_user, users_in_turn};
pub use signals::{Caught, Signals, let_signals_through};
pub use smaps::{Mapping, Usage};
pub use socket::SocketKind;
pub use stream::connect_within;
pub use system::{
    Kernel, available_bytes, boot_clock_ms, boot_clock_s, boot_id, boot_time_s, free_and_cached_bytes, free_bytes,
    free_swap_bytes, has_swap, own_peak_rss_bytes, own_uid, page_table_bytes, ram_bytes, slab_object_bytes,
    spare_bytes, swapped_bytes, swapped_pages, total_swap_bytes, usual_reserve_bytes,
};
pub use thread_cpu::ThreadCpu;
pub use userfaultfd::{
    UFFDIO_API, ioctl_number, lend_userfaultfd_device, open_userfaultfd, open_userfaultfd_device, userfaultfd_features,
};
pub use visibility::Visibility;
pub use vm_read::ProcessMemory;
