//! Memory that is mapped, unmapped, protected and locked: `mmap`, `munmap`, `mprotect`, `mlock` and similar functions.

use super::{ALL, State, ask, enter, range, state};
use agent::maps;
use agent::raw::{self, Answer, c_answer};
use agent::table::{Shut, Table, Traits};
use page::{HostVirt, PAGE_BYTES, PAGE_SHIFT, PageRange};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::Ordering;

const MCL_FUTURE: c_int = libc::MCL_FUTURE;
/// Flags of mappings that are never enrolled, because folding does not suit their use.
const UNFIT: c_int = libc::MAP_STACK | libc::MAP_GROWSDOWN | libc::MAP_HUGETLB | libc::MAP_LOCKED;

/// `mmap`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    at: *mut c_void,
    length: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    let arguments = [at as usize, length, access as usize, flags as usize, file as usize, offset as usize];
    let mut table = enter();
    // SAFETY: the caller's arguments are passed on unchanged, with the caller's promises.
    let mapped = unsafe { raw::call(libc::SYS_mmap, arguments) };
    if raw::error(mapped).is_none()
        && let Some(table) = &mut table
        && let Some(range) = range(mapped as usize, length)
    {
        born(table, range, access, flags);
    }
    drop(table);
    c_answer(mapped) as *mut c_void
}

/// `mmap64`: the same where `long` has 64 bits.
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    at: *mut c_void,
    length: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the caller's arguments are passed on unchanged, with the caller's promises.
    unsafe { mmap(at, length, access, flags, file, offset) }
}

/// Notes a new mapping.
fn born(table: &mut Table, range: PageRange, access: c_int, flags: c_int) {
    table.forget(range);
    let kind = flags & (libc::MAP_TYPE | libc::MAP_ANONYMOUS);
    let anonymous = kind == libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    if anonymous && flags & UNFIT == 0 && state() == State::Member {
        ask(table, range, Traits { access: access as u8, ..Traits::default() });
        if !ALL.load(Ordering::Relaxed) {
            // The mapping is known to the table without being enrolled: if the program enrols it by advice later, its
            // traits are known.
            table.unask(range);
        }
    }
}

/// `munmap`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(at: *mut c_void, length: usize) -> c_int {
    let mut table = enter();
    // SAFETY: the caller's arguments are passed on unchanged, with the caller's promises.
    let answer = unsafe { raw::call(libc::SYS_munmap, [at as usize, length, 0, 0, 0, 0]) };
    if raw::error(answer).is_none()
        && let Some(table) = &mut table
        && let Some(range) = range(at as usize, length)
    {
        table.forget(range);
    }
    drop(table);
    c_answer(answer) as c_int
}

/// `mprotect`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(at: *mut c_void, length: usize, access: c_int) -> c_int {
    let mut table = enter();
    // SAFETY: the caller's arguments are passed on unchanged, with the caller's promises.
    let answer = unsafe { raw::call(libc::SYS_mprotect, [at as usize, length, access as usize, 0, 0, 0]) };
    if let Some(table) = &mut table {
        protected(table, range(at as usize, length), access, answer);
    }
    drop(table);
    c_answer(answer) as c_int
}

/// `pkey_mprotect`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkey_mprotect(at: *mut c_void, length: usize, access: c_int, key: c_int) -> c_int {
    let mut table = enter();
    let arguments = [at as usize, length, access as usize, key as usize, 0, 0];
    let number = if key == -1 { libc::SYS_mprotect } else { libc::SYS_pkey_mprotect };
    // SAFETY: the caller's arguments are passed on unchanged, with the caller's promises. Without a key the call is
    // `mprotect`, which the kernel knows on every machine.
    let answer = unsafe { raw::call(number, arguments) };
    if let Some(table) = &mut table {
        let range = range(at as usize, length);
        protected(table, range, access, answer);
        if let Some(range) = range.filter(|_| key > 0) {
            table.shut(range, Shut::Special);
        }
    }
    drop(table);
    c_answer(answer) as c_int
}

/// Notes that the protection of a range was changed; after an error, that of a part of it.
fn protected(table: &mut Table, range: Option<PageRange>, access: c_int, answer: Answer) {
    let Some(range) = range.filter(|range| table.touches(*range)) else { return };
    let plain = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    if answer == 0 && access & !plain == 0 {
        return table.protect(range, access as u8);
    }
    // Only the kernel knows how far it came before the error, or where a growing stack ends.
    table.protect(range, 0);
    for mapping in maps::mappings(range, false).unwrap_or_default() {
        table.protect(mapping.range, mapping.access);
    }
}

/// The pages that contain any of these bytes, as the kernel counts them for locking.
fn holding(start: usize, length: usize) -> Option<PageRange> {
    let within = start % PAGE_BYTES;
    range(start - within, length.checked_add(within)?)
}

fn lock_pages(number: i64, at: usize, length: usize, flags: usize) -> c_int {
    shut_locked(holding(at, length));
    // SAFETY: locking changes no contents.
    c_answer(unsafe { raw::call(number, [at, length, flags, 0, 0, 0]) }) as c_int
}

/// Excludes a range from folding before an attempt to lock it. The range stays excluded if the attempt fails, because a
/// part of it may be locked then. The table's lock is released before the attempt: the kernel populates the range, and
/// so waits for pages of it that a section has moved out.
fn shut_locked(range: Option<PageRange>) {
    if let (Some(mut table), Some(range)) = (enter(), range) {
        table.shut(range, Shut::Locked);
    }
}

/// `mlock`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(at: *const c_void, length: usize) -> c_int {
    lock_pages(libc::SYS_mlock, at as usize, length, 0)
}

/// `mlock2`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(at: *const c_void, length: usize, flags: c_uint) -> c_int {
    lock_pages(libc::SYS_mlock2, at as usize, length, flags as usize)
}

/// `munlock`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munlock(at: *const c_void, length: usize) -> c_int {
    let mut table = enter();
    // SAFETY: unlocking changes no contents.
    let answer = unsafe { raw::call(libc::SYS_munlock, [at as usize, length, 0, 0, 0, 0]) };
    if answer == 0
        && let Some(table) = &mut table
        && let Some(range) = holding(at as usize, length)
    {
        table.open(range, Shut::Locked);
    }
    drop(table);
    c_answer(answer) as c_int
}

/// `mlockall`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    shut_locked((flags & libc::MCL_CURRENT != 0).then_some(everything()));
    // SAFETY: locking changes no contents.
    let answer = unsafe { raw::call(libc::SYS_mlockall, [flags as usize, 0, 0, 0, 0, 0]) };
    if answer == 0 && enter().is_some() {
        maps::lock_future(flags & MCL_FUTURE != 0);
    }
    c_answer(answer) as c_int
}

/// `munlockall`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munlockall() -> c_int {
    let mut table = enter();
    // SAFETY: unlocking changes no contents.
    let answer = unsafe { raw::call(libc::SYS_munlockall, [0; 6]) };
    if answer == 0
        && let Some(table) = &mut table
    {
        maps::lock_future(false);
        table.open(everything(), Shut::Locked);
    }
    drop(table);
    c_answer(answer) as c_int
}

/// All addresses of user space.
const fn everything() -> PageRange {
    PageRange { start: HostVirt(0), pages: 1 << (57 - PAGE_SHIFT) }
}
