//! `pagefold-agent`: the agent as one object that needs nothing of the process that it is put into. See [`attached`].

#![no_main]

use agent::arena::Arena;
use std::alloc::{GlobalAlloc, Layout};
use std::ffi::{c_char, c_int, c_void};

/// The C library calls this on the thread that was put into the process.
#[unsafe(no_mangle)]
extern "C" fn main(_: c_int, _: *const *const c_char) -> c_int {
    attached::run()
}

// The C library's own allocations come from the arena, too: its allocator would move the program break, which is the
// program's.

/// Bytes in front of each allocation of the C library, which hold its size.
const HEADER: usize = 16;

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.checked_add(HEADER)?, HEADER).ok()
}

/// `malloc`
#[unsafe(no_mangle)]
extern "C" fn malloc(bytes: usize) -> *mut c_void {
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
extern "C" fn calloc(count: usize, bytes: usize) -> *mut c_void {
    count.checked_mul(bytes).map_or(std::ptr::null_mut(), |bytes| malloc(bytes))
}

/// `realloc`
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
unsafe extern "C" fn realloc(place: *mut c_void, bytes: usize) -> *mut c_void {
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
unsafe extern "C" fn free(place: *mut c_void) {
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
