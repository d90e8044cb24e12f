//! System calls that the agent makes on behalf of the program, and what it notes of them in the table.

use crate::raw::{self, Answer};
use crate::table::{Advice, Shut, Table, Traits};
use crate::{arena, maps};
use page::{HostVirt, PAGE_BYTES, PAGE_SHIFT, PageRange};

/// Upper bound of the bytes that are allocated when a range is added to the table.
const EXTENT_BYTES: usize = 16 << 10;

/// The pages of `bytes` bytes from `start` on, as the kernel counts them; `None` for a range that the kernel will
/// refuse.
pub fn range(start: usize, bytes: usize) -> Option<PageRange> {
    let end = start.checked_add(bytes)?.checked_add(PAGE_BYTES - 1)? >> PAGE_SHIFT;
    let first = start >> PAGE_SHIFT;
    let aligned = start.is_multiple_of(PAGE_BYTES) && end > first;
    aligned.then(|| PageRange { start: HostVirt(start as u64), pages: (end - first) as u64 })
}

/// Bytes of a range.
pub fn bytes(range: PageRange) -> usize {
    (range.pages << PAGE_SHIFT) as usize
}

/// The pages from one address to another, if any.
pub const fn between(start: HostVirt, end: HostVirt) -> PageRange {
    PageRange { start, pages: end.page().saturating_sub(start.page()) }
}

/// Enrols memory with known traits.
pub fn ask(table: &mut Table, range: PageRange, traits: Traits) {
    // If the agent has no memory to note the range, the range is not enrolled.
    if arena::ensure(EXTENT_BYTES) {
        let locked = if maps::locks_future() { Shut::Locked as u8 } else { 0 };
        table.ask_as(range, Traits { shut: traits.shut | locked, ..traits });
    }
}

/// Maps fresh anonymous memory in the place of a range, with the protection and the advice that the range had.
pub fn map_fresh(range: PageRange, traits: Traits) -> Answer {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // From Linux 6.7 on, `MAP_STACK` means no more than advice against huge pages. Given at once, it lets the mapping
    // join its neighbours.
    let against_huge = if traits.advice.huge == Some(false) { libc::MAP_STACK } else { 0 };
    let flags = (flags | against_huge) as usize;
    let arguments = [range.start.0 as usize, bytes(range), usize::from(traits.access), flags, usize::MAX, 0];
    // SAFETY: callers replace memory whose contents the program has just given up, or that they have reserved.
    let mapped = unsafe { raw::map_over(arguments) };
    if raw::error(mapped).is_none() {
        let advice = Advice { huge: traits.advice.huge.filter(|huge| *huge), ..traits.advice };
        give_advice(range, Traits { advice, ..traits });
    }
    mapped
}

/// Gives a new mapping the advice of the one that it replaces.
pub fn give_advice(range: PageRange, traits: Traits) {
    let advice = traits.advice;
    let huge = advice.huge.map(|huge| if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE });
    let fork = advice.dont_fork.then_some(libc::MADV_DONTFORK);
    let dump = advice.dont_dump.then_some(libc::MADV_DONTDUMP);
    let wipe = (traits.shut & Shut::Wiped as u8 != 0).then_some(libc::MADV_WIPEONFORK);
    for advice in [huge, fork, dump, wipe].into_iter().flatten() {
        // SAFETY: none of these changes contents.
        unsafe { raw::call(libc::SYS_madvise, [range.start.0 as usize, bytes(range), advice as usize, 0, 0, 0]) };
    }
}

/// The answer of a system call that fails with this error.
pub const fn refuse(error: i32) -> Answer {
    -(error as Answer)
}
