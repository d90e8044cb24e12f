//! The agent as one object that `pagefold-attach` puts into a running process. The object is a whole program with a C
//! library and an allocator of its own. It runs on a thread that `pagefold-attach` made, and needs no library of the
//! process, in whichever language the process is written.
//!
//! ```text
//!   the object's C library starts, on a stack of its own, as in a new process
//!      v
//!   run: settings from the environment that the stack holds; the channel is descriptor 0
//!      |  folds, and follows what the program does by the kernel's messages and list (`enrol`, `follow`, `world`)
//!      v  told to leave
//!   all as it was before (`leave`); the thread waits until the other side has it unmap the object, and end
//! ```
//!
//! The object does nothing that belongs to the whole process: it changes no signal's handler, no program break, and
//! starts no other program. All signals are blocked on its threads. Its C library is the one of its own: thread-local
//! data, `errno` and streams are not the program's.

use crate::arena::{self, Arena};
use crate::enrol::Enrolment;
use crate::thread::{self, Asked, Files};
use crate::{gate, program, world};
use page::{HostVirt, PAGE_BYTES, PageRange};
use rustix::fd::{FromRawFd, OwnedFd};
use std::alloc::{GlobalAlloc, Layout};
use std::arch::asm;
use std::env;
use std::ffi::c_void;
use std::panic::catch_unwind;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Variable with the socket to connect to.
const SOCKET: &str = "PAGEFOLD_SOCKET";
/// Variable with the addresses that the object lies at, in hexadecimal: `START-END`.
const OBJECT: &str = "PAGEFOLD_OBJECT";
/// Variable that enrols all private anonymous memory.
const ALL: &str = "PAGEFOLD_ALL";
/// Variable with the number of mappings from which on folding adds no more.
const VMA_BUDGET: &str = "PAGEFOLD_VMA_BUDGET";
/// Variable with the address of a gate that this process has inherited from its parent, in hexadecimal.
const GATE: &str = "PAGEFOLD_GATE";
/// Variable that makes the agent fold every page that has rested, even if it may soon be written again; for tests.
const EAGER: &str = "PAGEFOLD_EAGER";

/// Variable that is set if this thread shares its root and working directory with the program (`CLONE_FS`).
const SHARED: &str = "PAGEFOLD_SHARED_DIRECTORIES";

static ASKED: OnceLock<Asked> = OnceLock::new();

/// Runs the agent of this process until the agent is told to leave. Ends the thread.
pub fn run() -> ! {
    // Folded pages do not need this thread. If a bug ends it, nothing more is folded.
    let _ = catch_unwind(|| {
        std::panic::set_hook(Box::new(|_| {}));
        world::join();
        // A `pagefold-attach` that takes the place of a killed one finds this thread by its name.
        // SAFETY: names the calling thread.
        unsafe { libc::prctl(libc::PR_SET_NAME, c"pagefold".as_ptr()) };
        // SAFETY: the thread was started with this descriptor open in a table of its own, and nobody else uses it.
        let channel = unsafe { OwnedFd::from_raw_fd(0) };
        let Ok(pagemap) = world::open(channel.into()) else { return };
        if env::var_os(SHARED).is_none() {
            // SAFETY: the thread was made without `CLONE_FS`, so this changes its own working directory alone. At `/`,
            // it keeps no other file system from being unmounted.
            unsafe { libc::chdir(c"/".as_ptr()) };
        }
        let Some((asked, object)) = asked() else { return };
        let asked = ASKED.get_or_init(|| asked);
        world::know(object, asked.all_anonymous);
        program::know_leases();
        let enrolment = Enrolment::new(asked.all_anonymous, object);
        let inherited = env::var(GATE).ok().and_then(|at| u64::from_str_radix(&at, 16).ok()).map(HostVirt);
        // Without a gate, `mremap` goes to the kernel, which may refuse it.
        if let Ok(gate) = gate::open(inherited) {
            world::tell_gate(gate.start);
        }
        if thread::run(asked, Files::with(pagemap, asked), false, Some(enrolment)).is_ok() {
            gate::close();
            world::left([Some(arena::range()), gate::range()].into_iter().flatten().collect());
            // The other side makes this thread unmap everything, and end.
            world::wait_for_end()
        }
    });
    loop {
        // SAFETY: ends this thread alone, on which nothing runs any more.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
}

/// The settings, and where the object lies.
fn asked() -> Option<(Asked, PageRange)> {
    let object = env::var(OBJECT).ok()?;
    let (start, end) = object.split_once('-')?;
    let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).ok());
    let object = range(start?, end?);
    let asked = Asked {
        socket: PathBuf::from(env::var_os(SOCKET)?),
        all_anonymous: env::var_os(ALL).is_some(),
        most_vmas: env::var(VMA_BUDGET).ok().and_then(|most| most.parse().ok()),
        compare_fingerprints: false,
        children_after: None,
        eager: env::var_os(EAGER).is_some(),
        kernel: host::Kernel::this().release,
    };
    // If the thread-local data lies outside the object, the kernel has joined its mapping with one of the program's.
    (object.start.0..object.end().0).contains(&thread_pointer()).then_some((asked, object))
}

const fn range(start: u64, end: u64) -> PageRange {
    PageRange { start: HostVirt(start), pages: (end - start) / PAGE_BYTES as u64 }
}

fn thread_pointer() -> u64 {
    let pointer: u64;
    // SAFETY: the first word of thread-local data is its own address on x86-64.
    unsafe { asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly)) };
    pointer
}

// The C library's own allocations come from the arena, too: its allocator would move the program break, which is the
// program's.

/// Bytes in front of an allocation of the C library's, where its size stands.
const HEADER: usize = 16;

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.checked_add(HEADER)?, HEADER).ok()
}

/// `malloc`
#[unsafe(no_mangle)]
pub extern "C" fn malloc(bytes: usize) -> *mut c_void {
    let Some(layout) = layout(bytes) else { return std::ptr::null_mut() };
    // SAFETY: the layout has a size.
    let place = unsafe { Arena.alloc_zeroed(layout) };
    if place.is_null() {
        return place.cast();
    }
    // SAFETY: the allocation begins with room for a number, and is aligned for one.
    unsafe { place.cast::<usize>().write(bytes) };
    // SAFETY: the allocation is larger than the header.
    unsafe { place.add(HEADER).cast() }
}

/// `calloc`
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: usize, bytes: usize) -> *mut c_void {
    count.checked_mul(bytes).map_or(std::ptr::null_mut(), |bytes| malloc(bytes))
}

/// `realloc`
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(place: *mut c_void, bytes: usize) -> *mut c_void {
    let new = malloc(bytes);
    if !place.is_null() && !new.is_null() {
        // SAFETY: `malloc` has written the size in front of what it returned.
        let before = unsafe { place.cast::<u8>().sub(HEADER).cast::<usize>().read() };
        // SAFETY: both have at least so many bytes, and do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(place.cast::<u8>(), new.cast(), before.min(bytes)) };
        // SAFETY: by the caller.
        unsafe { free(place) };
    }
    new
}

/// `free`
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(place: *mut c_void) {
    if place.is_null() {
        return;
    }
    // SAFETY: `malloc` returned a place behind a header.
    let start = unsafe { place.cast::<u8>().sub(HEADER) };
    // SAFETY: `malloc` has written the size there.
    let bytes = unsafe { start.cast::<usize>().read() };
    if let Some(layout) = layout(bytes) {
        // SAFETY: this is what `malloc` was given for this layout.
        unsafe { Arena.dealloc(start, layout) };
    }
}
