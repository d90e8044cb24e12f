//! The main heap, which grows and shrinks by `brk`. The C library's allocator calls the library's own `brk`, which
//! [`patch`](super::patch) leads here. If the C library is not patched, changes of the heap go unseen, and the heap is
//! not enrolled.

use super::{ALL, Answer, ask, between, enter, refuse};
use agent::maps::Mapping;
use agent::raw::{self, c_answer};
use agent::table::{self, Table, Traits};
use page::{HostVirt, PAGE_BYTES};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// The C library's variable with the heap's end (`__curbrk`), from which its `sbrk` computes; null if the C library is
/// not patched.
static NOTED_END: AtomicPtr<AtomicPtr<c_void>> = AtomicPtr::new(std::ptr::null_mut());

/// Says where the C library notes the heap's end. To be called before the C library is patched.
pub fn note_end_at(place: *mut AtomicPtr<c_void>) {
    NOTED_END.store(place, Ordering::Release);
}

/// `brk`, in place of the C library's.
///
/// # Safety
/// As the C library's: the memory that the heap gives back is no longer used.
pub unsafe extern "C" fn brk(end: *mut c_void) -> c_int {
    // SAFETY: by the caller.
    let now = unsafe { set_end(end as usize) };
    // SAFETY: null, or a variable of the C library's that lives as long as the process, is aligned, and is accessed as
    // an atomic here. The C library itself expects callers of `brk` not to be interrupted by others.
    let noted = unsafe { NOTED_END.load(Ordering::Acquire).as_ref() };
    noted.inspect(|noted| noted.store(now as *mut c_void, Ordering::Relaxed));
    // If the kernel cannot set this end, it answers with the end that was before.
    c_answer(if (now as usize) < end as usize { refuse(libc::ENOMEM) } else { 0 }) as c_int
}

/// The system call: sets the heap's end, and returns the end that is in force then.
///
/// # Safety
/// The memory that the heap gives back is no longer used.
pub unsafe fn set_end(end: usize) -> Answer {
    let mut table = enter();
    let before = table.is_some().then(heap_end);
    // SAFETY: by the caller.
    let now = unsafe { raw::call(libc::SYS_brk, [end, 0, 0, 0, 0, 0]) };
    if let (Some(table), Some(before)) = (&mut table, before) {
        moved(table, before, whole_pages(now as u64));
    }
    now
}

/// Notes in the table that the heap's end has moved.
fn moved(table: &mut Table, before: HostVirt, now: HostVirt) {
    table.forget(between(now, before));
    let grown = between(before, now);
    if grown.pages > 0 && ALL.load(Ordering::Relaxed) {
        ask(table, grown, Traits::default());
    }
}

/// Enrols the heap as it is. For the constructor, once the C library is patched.
pub fn ask_heap() {
    if let Some(start) = heap_start() {
        let heap = between(start, heap_end());
        if heap.pages > 0 {
            ask(&mut table::lock(), heap, Traits::default());
        }
    }
}

/// Whether a mapping is part of a heap whose changes go unseen.
pub fn is_unseen_heap(mapping: &Mapping) -> bool {
    mapping.heap && !ALL.load(Ordering::Relaxed)
}

/// The end of the heap.
fn heap_end() -> HostVirt {
    // SAFETY: the call asks for an impossible end, which changes nothing. The kernel answers with the heap's end.
    whole_pages(unsafe { raw::call(libc::SYS_brk, [0; 6]) } as u64)
}

/// The beginning of the heap: the 47th field of the process's `stat`.
fn heap_start() -> Option<HostVirt> {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").ok()?;
    let fields = stat.rsplit_once(')')?.1;
    let start: u64 = fields.split_ascii_whitespace().nth(44)?.parse().ok()?;
    (start != 0).then(|| whole_pages(start))
}

/// An address rounded up to whole pages, as the kernel does it with the heap's ends.
const fn whole_pages(address: u64) -> HostVirt {
    HostVirt(address.next_multiple_of(PAGE_BYTES as u64))
}
