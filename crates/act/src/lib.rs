//! Everything that *changes* something in the kernel: userfaultfd, mappings, the memory of pools, control groups,
//! rights and the knobs of KSM. Code that only observes is in `host`, so a program that does not link this crate
//! changes nothing.

#[cfg(test)]
use std::sync::{Mutex, MutexGuard, PoisonError};

mod advice;
mod apart;
mod cgroup_home;
mod confine;
mod dumpable;
mod file_store;
mod filter_trial;
mod follow;
mod fork_probe;
mod journal;
mod ksm_knobs;
mod member_memory;
mod object_file;
mod own_machine;
mod pool_memory;
mod prover;
pub mod raw;
mod scheduling;
pub mod seccomp;
mod soft_read;
mod standby;
// libc knows `ptrace` of glibc only.
#[cfg(target_env = "gnu")]
pub mod trace;
mod userfault;

pub use advice::{ask_to_merge, page_out, prefer_huge_pages};
pub use apart::map_apart;
pub use cgroup_home::CgroupHome;
pub use confine::{
    give_up_rights, give_up_rights_but_looking, keep_files_from_children, let_own_user_look, parent,
    raise_open_files_limit, without_frame_numbers,
};
pub use dumpable::is_dumpable;
pub use file_store::FileStore;
pub use filter_trial::fatal_call;
pub use follow::{Expected, Follower, PROGRAMS, Told};
pub use fork_probe::ForkProbe;
pub use journal::{About, Entry, Journal};
pub use ksm_knobs::{KsmKnobs, memory_merge, set_ksm, set_memory_merge};
pub use member_memory::{
    AGAIN, HUGE_PAGES, Inherit, MemberMemory, PoolView, SharedMark, copy_page, drop_private, empty_file,
    give_to_children, make_present, make_private, map_anonymous_where_free, move_mapping_over, pages_equal,
    split_huge_page, write_pages,
};
pub use object_file::{is_sealed_object, seal_object};
pub use own_machine::{SEED_BYTES, make_raw, put_file_over, reseed_kernel_random};
pub use pool_memory::{
    DonationWindow, HeldLease, InheritedSegment, Lease, LeaseState, POOL_NAMES, PoolSegment, Role, Template, check,
};
pub use prover::Prover;
pub use scheduling::set_preempting;
pub use seccomp::FilterInstruction;
pub use soft_read::SoftReader;
pub use standby::{Inheritance, Inherited, Standby};
pub use userfault::{Claim, Fault, Message, Moved, Purpose, Userfault, Watch, file_of_thread};

/// For tests: a lock for tests that fork, or that ask whether a lease is mapped. A forked child has all mappings that
/// other tests of this process have made.
#[cfg(test)]
fn turn_to_fork() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
