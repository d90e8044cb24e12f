//! `prctl`, because of filters of system calls (seccomp) that the program sets for itself. If a filter forbids calls of
//! the agent or its hooks, the agent ends before the filter is set ([`crate::resign`]). The agent also ends before
//! `PR_SET_KEEPCAPS`. The system call `seccomp` comes through [`syscall`](super::syscall), because the C library has no
//! function for it.

use super::{exec, is_member, refuse};
use crate::resign;
use act::{FilterInstruction, seccomp};
use agent::arena;
use agent::raw::{self, Answer, c_answer};
use std::ffi::{c_int, c_long};

/// Most instructions of a filter: the kernel's `BPF_MAXINSNS`.
const LONGEST: usize = 4096;
/// Memory in which a filter is copied and judged: 2 MiB.
const JUDGING_BYTES: usize = 2 << 20;

/// `prctl`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int {
    // SAFETY: the caller's arguments are passed on unchanged.
    c_answer(unsafe { control([option as usize, a, b, c, d, 0]) }) as c_int
}

/// The system call `prctl`.
///
/// # Safety
/// As the system call.
pub unsafe fn control(arguments: [usize; 6]) -> Answer {
    let [option, mode, filter, ..] = arguments;
    if option as c_int == libc::PR_SET_KEEPCAPS && mode == 1 && is_member() && exec::is_served() {
        // If the agent cannot end, the call is made all the same: by itself, it does no harm.
        let _ = resign::ask(false);
    }
    let is_filter = option as c_int == libc::PR_SET_SECCOMP && mode == libc::SECCOMP_MODE_FILTER as usize;
    // SAFETY: the caller's promise.
    unsafe { pass_on(libc::SYS_prctl, arguments, is_filter.then_some((2, filter))) }
}

/// The system call `seccomp`.
///
/// # Safety
/// As the system call.
pub unsafe fn set(arguments: [usize; 6]) -> Answer {
    let [operation, _, filter, ..] = arguments;
    let is_filter = operation as u32 == libc::SECCOMP_SET_MODE_FILTER;
    // SAFETY: the caller's promise.
    unsafe { pass_on(libc::SYS_seccomp, arguments, is_filter.then_some((2, filter))) }
}

/// Makes the call. If it sets a filter that forbids calls of the agent, the agent ends first. `filter` is the index of
/// the argument with a filter's address, and this address.
///
/// # Safety
/// As the system call.
unsafe fn pass_on(number: c_long, mut arguments: [usize; 6], filter: Option<(usize, usize)>) -> Answer {
    // A child that shares the member's memory (`vfork`) sets filters for itself only.
    let filter = filter.filter(|_| is_member() && exec::is_served());
    if filter.is_some() && !arena::ensure(JUDGING_BYTES) {
        return refuse(libc::ENOMEM);
    }
    // Without a copy, the kernel refuses the filter, too: it cannot be read.
    let mut copy = filter.and_then(|(_, at)| copy_of(at));
    let is_forbidding = copy.as_deref().is_some_and(|filter| seccomp::forbidden_when_loaded(filter).is_some());
    // SAFETY: the caller's promise.
    let takes_filters = |(place, _)| unsafe { takes_filters(number, arguments, place) };
    if is_forbidding && filter.is_some_and(takes_filters) && !resign::ask(true) {
        return refuse(libc::ENOMEM);
    }
    // The kernel gets the copy that was judged: another thread may change the program's own filter meanwhile.
    let judged = copy.as_mut().map(|copy| libc::sock_fprog { len: copy.len() as u16, filter: copy.as_mut_ptr() });
    if let (Some((place, _)), Some(judged)) = (filter, &judged) {
        arguments[place] = std::ptr::from_ref(judged) as usize;
    }
    // SAFETY: the caller's promise. The copy lives until the call returns.
    unsafe { raw::call(number, arguments) }
}

/// Whether the kernel accepts filters by such a call: the caller has set `no_new_privs` or has `CAP_SYS_ADMIN`, and the
/// kernel knows the flags. The kernel checks both before it reads the instructions, and the address that it is given
/// here has none.
///
/// # Safety
/// As the system call.
unsafe fn takes_filters(number: c_long, mut arguments: [usize; 6], place: usize) -> bool {
    let unreadable = libc::sock_fprog { len: 1, filter: std::ptr::without_provenance_mut(1 << 63) };
    arguments[place] = &raw const unreadable as usize;
    // SAFETY: the caller's promise. The instructions lie where a program has no memory, so no filter comes of it.
    raw::error(unsafe { raw::call(number, arguments) }) == Some(libc::EFAULT)
}

/// A copy of the filter at this address; `None` if it cannot be read, or has no length that a filter may have.
fn copy_of(at: usize) -> Option<Vec<FilterInstruction>> {
    let mut program = libc::sock_fprog { len: 0, filter: std::ptr::null_mut() };
    // SAFETY: any bytes are such a structure, which is exclusively borrowed.
    unsafe { read(at, (&raw mut program).cast(), size_of::<libc::sock_fprog>()) }?;
    let count = usize::from(program.len);
    if !(1..=LONGEST).contains(&count) {
        return None;
    }
    let mut copy: Vec<FilterInstruction> = Vec::with_capacity(count);
    // SAFETY: there is room for so many.
    unsafe { read(program.filter as usize, copy.as_mut_ptr().cast(), count * size_of::<FilterInstruction>()) }?;
    // SAFETY: so many were written, and any bytes are an instruction.
    unsafe { copy.set_len(count) };
    Some(copy)
}

/// Copies memory of the program. `None` if it cannot be read.
///
/// # Safety
/// There is room for so many bytes, which are any bytes afterwards.
unsafe fn read(from: usize, to: *mut u8, bytes: usize) -> Option<()> {
    if from == 0 {
        return None;
    }
    let part = |base: usize| libc::iovec { iov_base: base as *mut _, iov_len: bytes };
    let (source, target) = (part(from), part(to as usize));
    let own = std::process::id() as usize;
    let arguments = [own, &raw const target as usize, 1, &raw const source as usize, 1, 0];
    // SAFETY: the kernel reads only what is mapped readable, and writes where the caller has room.
    let answer = unsafe { raw::call(libc::SYS_process_vm_readv, arguments) };
    if answer == bytes as isize {
        return Some(());
    }
    if answer >= 0 || raw::error(answer) == Some(libc::EFAULT) {
        return None;
    }
    // A filter that is in force forbids that call.
    // SAFETY: the program says that so many bytes are there, which the kernel is to read in a moment.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to, bytes) };
    Some(())
}
