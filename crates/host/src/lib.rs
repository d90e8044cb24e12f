//! The only home of system calls, ioctls and the parsing of `/proc` and `/sys`.

mod advice;
mod bpf;
mod btf;
mod cgroup;
mod cgroup_home;
mod check;
mod confine;
mod error;
mod features;
mod file_map;
mod follow;
mod frame_read;
mod kpage;
mod ksm;
mod ksm_knobs;
mod member_memory;
mod mounts;
mod own_cpu;
mod page_cache;
mod pagemap;
mod peer_process;
mod plain_file;
mod pool_memory;
mod process;
mod process_id;
mod prover;
mod reference_counts;
mod seqpacket;
mod shadow;
mod signals;
mod smaps;
mod soft_read;
mod stream;
mod system;
mod text;
mod thread_cpu;
mod userfault;
mod vm_read;

pub use advice::{ask_to_merge, prefer_huge_pages};
pub use cgroup::{CgroupLayout, Cgroups};
pub use cgroup_home::CgroupHome;
pub use check::{Check, Status};
pub use confine::{
    give_up_rights, give_up_rights_but_looking, keep_files_from_children, parent, raise_open_files_limit,
};
pub use error::{Error, Result};
pub use features::probe_host;
pub use file_map::FileMap;
pub use follow::{Expected, Follower, Told};
pub use frame_read::FrameReader;
pub use kpage::{FrameTable, kpf};
pub use ksm::{Ksm, KsmStat};
pub use ksm_knobs::{KsmKnobs, set_ksm};
pub use member_memory::{
    HUGE_PAGES, Inherit, MemberMemory, PoolView, SharedMark, copy_page, give_to_children, make_present, make_private,
    map_anonymous_over, map_anonymous_where_free, move_mapping_over, pages_equal, split_huge_page, unmap, write_pages,
};
pub use mounts::proc_hides_processes;
pub use own_cpu::own_cpu_time;
pub use page::PageRange;
pub use page_cache::CachedFile;
pub use pagemap::{Pagemap, PagemapEntry, frames_visible, has_pagemap_scan};
pub use peer_process::{PeerPages, PeerProcess};
pub use plain_file::{open_plain_file, read_plain_file};
pub use pool_memory::{DonationWindow, HeldLease, InheritedSegment, Lease, LeaseState, PoolSegment};
pub use process::{Process, check_readable, is_userfaultfd_open, open_files, pids};
pub use process_id::{ProcessId, ProcessStat};
pub use prover::Prover;
pub use reference_counts::{Held, ReferenceCounts};
pub use seqpacket::{MOST_FDS, Peer, Received, Seqpacket, SeqpacketListener};
pub use shadow::Shadow;
pub use signals::{Caught, Signals, let_signals_through};
pub use smaps::{Mapping, Usage};
pub use soft_read::SoftReader;
pub use stream::connect_within;
pub use system::{Kernel, available_bytes, own_peak_rss_bytes, ram_bytes, slab_object_bytes, swapped_bytes};
pub use thread_cpu::ThreadCpu;
pub use userfault::{Fault, Message, Moved, Purpose, Userfault, Watch};
pub use vm_read::ProcessMemory;
