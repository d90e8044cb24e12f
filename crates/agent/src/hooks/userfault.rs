//! `ioctl`, for the sake of the program's own userfaultfd (postcopy migration, snapshots): a mapping has room for one
//! userfaultfd, and the program's takes precedence. Write-protection works on mappings of the pool as it does on
//! anonymous memory. It does so whatever features the program asked for: the kernel looks at the mapping only
//! (`vma_can_userfault`).
//!
//! Requests that have memory pinned are prepared by [`pinning`].
//!
//! All other requests go straight to the kernel: virtual processors are run through this function.

use super::{State, enter, pinning, range, state};
use crate::arena;
use crate::raw::{self, Answer, c_answer};
use crate::table::{Shut, Traits};
use page::PageRange;
use std::ffi::{c_int, c_ulong};
use std::sync::atomic::{AtomicUsize, Ordering};

const UFFDIO_TYPE: c_ulong = 0xAA;
const UFFDIO_REGISTER: c_ulong = 0xC020_AA00;
const UFFDIO_UNREGISTER: c_ulong = 0x8010_AA01;

/// `struct uffdio_range`, with which `struct uffdio_register` begins too.
#[repr(C)]
#[derive(Clone, Copy)]
struct Range {
    start: u64,
    length: u64,
}

const _: () = assert!(size_of::<Range>() == (UFFDIO_UNREGISTER as usize >> 16 & 0x3fff));

/// Function that takes the agent's userfaultfds off a range, called without the table's lock; 0 before [`set_yield`].
static YIELD: AtomicUsize = AtomicUsize::new(0);

/// Sets the function that takes the agent's userfaultfds off a range on which the program is about to register one.
pub fn set_yield(yield_range: fn(PageRange)) {
    YIELD.store(yield_range as usize, Ordering::Release);
}

/// `ioctl`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(file: c_int, request: c_ulong, argument: usize) -> c_int {
    // SAFETY: the caller's arguments are passed on unchanged, with the caller's promises.
    let pass = || unsafe { raw::call(libc::SYS_ioctl, [file as usize, request as usize, argument, 0, 0, 0]) };
    let kind = request >> 8 & 0xFF;
    let ours = matches!(kind, UFFDIO_TYPE | pinning::VFIO | pinning::VHOST) && argument != 0;
    if !ours || state() != State::Member || arena::holds(raw::stack()) {
        return c_answer(pass()) as c_int;
    }
    // The kernel takes the request for an `unsigned int`.
    let answer = match request & 0xFFFF_FFFF {
        request if kind != UFFDIO_TYPE => {
            pinning::prepare(request, argument);
            pass()
        }
        UFFDIO_REGISTER => register(argument, pass),
        UFFDIO_UNREGISTER => unregister(argument, pass),
        _ => pass(),
    };
    c_answer(answer) as c_int
}

/// Takes the agent's userfaultfds off the range before the program's is registered, and until the program unregisters
/// that.
fn register(argument: usize, pass: impl Fn() -> Answer) -> Answer {
    let Some(range) = range_at(argument) else { return pass() };
    let Some(mut table) = enter().filter(|table| table.touches(range)) else { return pass() };
    let yielded = |(_, traits): &(PageRange, Traits)| traits.is_yielded();
    let before = table.known(range).iter().any(yielded);
    // The range is shut first, so that no fold puts the agent's userfaultfd back once it has been taken off.
    table.shut(range, Shut::Yielded);
    drop(table);
    let target = YIELD.load(Ordering::Acquire);
    if target != 0 {
        // SAFETY: only `set_yield` stores there, and only pointers of this type.
        let yield_range = unsafe { std::mem::transmute::<usize, fn(PageRange)>(target) };
        yield_range(range);
    }
    let answer = pass();
    if answer != 0 && !before {
        enter().into_iter().for_each(|mut table| table.open(range, Shut::Yielded));
    }
    answer
}

fn unregister(argument: usize, pass: impl Fn() -> Answer) -> Answer {
    let range = range_at(argument);
    let answer = pass();
    if let Some(range) = range.filter(|_| answer == 0) {
        enter().into_iter().for_each(|mut table| table.open(range, Shut::Yielded));
    }
    answer
}

fn range_at(argument: usize) -> Option<PageRange> {
    // SAFETY: with this request, the program passes a structure that begins with a `Range`. The kernel reads it at the
    // same place in a moment.
    let asked = unsafe { (argument as *const Range).read_unaligned() };
    range(usize::try_from(asked.start).ok()?, usize::try_from(asked.length).ok()?)
}
