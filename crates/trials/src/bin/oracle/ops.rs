//! Operations on memory.

pub mod access;
pub mod advise;
pub mod brk;
pub mod child;
pub mod discard;
pub mod fork;
pub mod lock;
pub mod mapping;
pub mod protect;
pub mod remap;
pub mod ring;
pub mod uffd;

use crate::plot::Access;
use crate::select::Class::{self, Advise, Brk, Discard, Fork, Lock, Mapping, Protect, Uffd};
use crate::sys::{self, Answer, Way};
use crate::verdict::Wrong;
use crate::worker::{Worker, bytes};

/// How an operation ended in which nothing is wrong.
#[derive(Clone, Copy, Debug)]
pub enum Done {
    Yes,
    /// The kernel refused the operation with this error, as it may.
    Refused(i32),
    /// The operation does not suit this plot.
    NotNow,
}

pub type Outcome = Result<Done, Wrong>;

/// An operation that a step can make.
pub struct Operation {
    pub name: &'static str,
    pub class: Class,
    pub weight: usize,
    pub ways: &'static [Way],
    /// Whether no other thread may be in a step at the same time.
    pub alone: bool,
    pub act: fn(&mut Worker<'_>, usize, Way) -> Outcome,
}

const ALL: &[Way] = &Way::ALL;
/// Ways to make system calls for which the C library has no function of their own.
const CALLS: &[Way] = &[Way::Function, Way::Raw];
/// The one way to make operations that the kernel carries out for an io_uring.
const RAW: &[Way] = &[Way::Raw];

/// Ways to start a program: the C library's function, and instructions of this program.
const SPAWNS: &[Way] = &[Way::Libc, Way::Raw];

type Act = fn(&mut Worker<'_>, usize, Way) -> Outcome;

const fn operation(name: &'static str, class: Class, weight: usize, ways: &'static [Way], act: Act) -> Operation {
    Operation { name, class, weight, ways, alone: false, act }
}

/// Index of the operation that fills a plot anew, so that broken pages can be folded again.
pub const REFILL: usize = 0;

/// All operations.
pub static OPERATIONS: &[Operation] = &[
    operation("refill", Class::Access, 10, ALL, access::refill),
    operation("look", Class::Access, 60, ALL, access::look),
    operation("fill", Class::Access, 200, ALL, access::fill),
    operation("mark", Class::Access, 130, ALL, access::mark),
    operation("read_into", Class::Access, 50, ALL, access::read_into),
    operation("poke_memory", Class::Access, 15, ALL, access::poke_memory),
    operation("dontneed", Discard, 60, ALL, discard::dontneed),
    operation("free", Discard, 30, ALL, discard::free),
    operation("discard_across_locks", Discard, 4, ALL, discard::across_locks),
    operation("dontneed_locked", Discard, 12, ALL, discard::dontneed_locked),
    operation("process_madvise", Discard, 20, CALLS, discard::process_madvise),
    operation("ring_dontneed", Discard, 20, RAW, ring::dontneed),
    operation("guard", Discard, 8, ALL, discard::guard),
    operation("renew", Mapping, 20, ALL, mapping::renew),
    operation("map_over", Mapping, 30, ALL, mapping::map_over),
    operation("unmap_part", Mapping, 20, ALL, mapping::unmap_part),
    operation("mremap_resize", Mapping, 30, ALL, remap::resize),
    operation("mremap_fixed", Mapping, 20, ALL, remap::to_reserved),
    operation("mremap_dontunmap", Mapping, 15, ALL, remap::leave_behind),
    operation("mremap_out_and_back", Mapping, 10, ALL, remap::out_and_back),
    operation("mprotect", Protect, 60, ALL, protect::protect),
    operation("mprotect_whole", Protect, 40, ALL, protect::unprotect),
    operation("mlock", Lock, 10, ALL, lock::lock),
    operation("mlock2_onfault", Lock, 8, ALL, lock::lock_on_fault),
    operation("munlock", Lock, 20, ALL, lock::unlock),
    Operation { alone: true, ..operation("mlockall", Lock, 1, ALL, lock::lock_all) },
    operation("hugepage", Advise, 3, ALL, advise::lasting::<0>),
    operation("nohugepage", Advise, 4, ALL, advise::lasting::<1>),
    operation("dontfork", Advise, 4, ALL, advise::lasting::<2>),
    operation("dofork", Advise, 4, ALL, advise::lasting::<3>),
    operation("wipeonfork", Advise, 4, ALL, advise::lasting::<4>),
    operation("keeponfork", Advise, 4, ALL, advise::lasting::<5>),
    operation("dontdump", Advise, 4, ALL, advise::lasting::<6>),
    operation("dodump", Advise, 4, ALL, advise::lasting::<7>),
    operation("mergeable", Advise, 4, ALL, advise::lasting::<8>),
    operation("unmergeable", Advise, 4, ALL, advise::lasting::<9>),
    operation("willneed", Advise, 4, ALL, advise::passing::<0>),
    operation("cold", Advise, 5, ALL, advise::passing::<1>),
    operation("pageout", Advise, 8, ALL, advise::passing::<2>),
    operation("populate_read", Advise, 5, ALL, advise::passing::<3>),
    operation("populate_write", Advise, 5, ALL, advise::passing::<4>),
    operation("collapse", Advise, 4, ALL, advise::passing::<5>),
    operation("settle", Advise, 15, ALL, advise::settle),
    operation("fork", Fork, 1, ALL, fork::fork),
    operation("spawn", Fork, 2, SPAWNS, fork::spawn),
    operation("brk", Brk, 20, ALL, brk::step),
    operation("uffd", Uffd, 3, ALL, uffd::step),
];

/// The operation with this name.
pub fn by_name(name: &str) -> Option<usize> {
    OPERATIONS.iter().position(|operation| operation.name == name)
}

/// Makes a private anonymous mapping, at an address of the kernel's choice or, with `MAP_FIXED` in `flags`, at `at`.
pub fn map(way: Way, at: usize, pages: usize, access: Access, flags: i32) -> Answer {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | flags;
    // SAFETY: a new place, or with MAP_FIXED one that the caller may map over.
    unsafe { sys::call(way, libc::SYS_mmap, [at, bytes(pages), access.bits(), flags as usize, usize::MAX, 0]) }
}

/// Compares the answer of a call with the only right one, an error number or 0. `tolerated` are errors that the kernel
/// may always answer.
pub fn judge(call: &'static str, page: usize, answer: Answer, expected: i32, tolerated: &[i32]) -> Outcome {
    match answer.err().unwrap_or(0) {
        found if found == expected => Ok(Done::Yes),
        found if tolerated.contains(&found) => Ok(Done::Refused(found)),
        found => Err(Wrong::Answer { call, page, expected, found }),
    }
}

/// Errors that a call may answer if it has to split a mapping: the kernel allows no more mappings.
pub const SPLITS: &[i32] = &[libc::ENOMEM, libc::EAGAIN];
