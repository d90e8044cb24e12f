//! The doors through which the program changes its memory: functions of the C library that this library puts itself in
//! front of, so that the table follows the kernel's view, and contents stay right where pages map the pool.
//!
//! ```text
//!   program's thread --> door --- inert, or the agent's own thread ---> system call, as it came
//!                          |
//!                          v  take the table's lock (no fold is under way then), signals blocked
//!                        system call, or several in its place where pages map the pool
//!                          |
//!                          v  write down what the kernel did; let go
//! ```
//!
//! A door makes its system call by itself, so that nothing of the C library's is needed, and answers what the kernel
//! would have answered had nothing been folded. Nothing in a door panics, allocates from the program's heap, or waits
//! for anything but the table.
//!
//! **State.** *Inert*: in a process that was not asked in, doors only pass on. *Member*. A forked child is inert again,
//! however it was made: the kernel clears the state for it. What it got of the pool is followed ([`crate::follow`]). A
//! `vfork` child and a thread made by `clone` share the member's memory, table and state, and the doors serve them alike:
//! nothing here asks who or which process it is.
//!
//! **What does not come through a door** is told of by the kernel as far as contents depend on it: discards of memory that maps the
//! pool, and forks. The doors are there because what they know beforehand costs less than being told.
//!
//! **Only memory whose birth was seen is enrolled** when all anonymous memory is asked in: who makes memory behind the
//! doors' back changes it behind their back. The C library itself calls its functions without going through anything that
//! could be interposed; so their first instruction is replaced by a jump to ours ([`patch`]).

mod advice;
mod exit;
mod heap;
mod memory;
mod patch;
mod remap;
mod syscall;
mod userfault;

pub use heap::{ask_heap, is_heap, lost_heap};
pub use userfault::set_yield;

use crate::raw::{self, Answer};
use crate::table::{self, Guard, Shut, Table, Traits};
use crate::{arena, references};
use page::{HostVirt, PAGE_BYTES, PAGE_SHIFT, PageRange};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum State {
    Inert = 0,
    Member = 1,
}

/// Where the state is kept: in a page that is cleared for forked children. None is there in a process that was never asked in.
static STATE: AtomicPtr<AtomicU8> = AtomicPtr::new(std::ptr::null_mut());
/// Whether all private anonymous memory is asked in.
static ALL: AtomicBool = AtomicBool::new(false);
/// Whether memory is locked from its birth (`mlockall(MCL_FUTURE)`).
static LOCK_FUTURE: AtomicBool = AtomicBool::new(false);
/// Why not all anonymous memory could be asked in.
static REFUSAL: OnceLock<patch::Refusal> = OnceLock::new();

/// What adding an extent to the table may allocate.
const EXTENT_BYTES: usize = 16 << 10;

/// Makes this process a member. For the constructor: no other thread runs yet.
pub fn init(all_anonymous: bool) {
    let Some(place) = place_for_state() else { return };
    STATE.store(place, Ordering::Release);
    references::init();
    if all_anonymous {
        match patch::patch() {
            Ok(()) => ALL.store(true, Ordering::Relaxed),
            Err(refusal) => drop(REFUSAL.set(refusal)),
        }
    }
    set_state(State::Member);
}

/// For people: why the table is empty, if it is.
pub fn why_nothing_is_enrolled() -> String {
    match REFUSAL.get() {
        Some(refusal) => format!("not all anonymous memory can be asked in: {refusal}"),
        None if ALL.load(Ordering::Relaxed) => "the program has no private anonymous memory yet".into(),
        None => {
            "the program has advised no memory to be mergeable (madvise MADV_MERGEABLE); see --all-anonymous".into()
        }
    }
}

/// A page that children find cleared.
fn place_for_state() -> Option<*mut AtomicU8> {
    let page = arena::map(PAGE_BYTES)?.start.0 as usize;
    // SAFETY: the page is ours; children do not miss what it holds.
    let answer = unsafe { raw::call(libc::SYS_madvise, [page, PAGE_BYTES, libc::MADV_WIPEONFORK as usize, 0, 0, 0]) };
    raw::error(answer).is_none().then_some(page as *mut AtomicU8)
}

fn state() -> State {
    let place = STATE.load(Ordering::Acquire);
    // SAFETY: null, or a page that is mapped for as long as the process lives, zeroed at first, and used for nothing else.
    match unsafe { place.as_ref() }.map(|state| state.load(Ordering::Relaxed)) {
        Some(1) => State::Member,
        _ => State::Inert,
    }
}

fn set_state(state: State) {
    let place = STATE.load(Ordering::Acquire);
    // SAFETY: as in `state`.
    unsafe { place.as_ref() }.into_iter().for_each(|place| place.store(state as u8, Ordering::SeqCst));
}

/// Whether all that is mapped is locked, as far as the doors know.
pub fn locks_future() -> bool {
    LOCK_FUTURE.load(Ordering::Relaxed)
}

/// Whether this process is folded.
pub fn is_member() -> bool {
    state() == State::Member && !arena::holds(raw::stack())
}

/// The table, for a door that has to look at it.
fn enter() -> Option<Guard> {
    // The agent's thread works with the lock held, and what it maps is nobody's business; it is known by its stack.
    (state() != State::Inert && !arena::holds(raw::stack())).then(table::lock)
}

/// The pages of `bytes` bytes from `start` on, as the kernel counts them; `None` for what it will refuse.
fn range(start: usize, bytes: usize) -> Option<PageRange> {
    let end = start.checked_add(bytes)?.checked_add(PAGE_BYTES - 1)? >> PAGE_SHIFT;
    let first = start >> PAGE_SHIFT;
    let aligned = start.is_multiple_of(PAGE_BYTES) && end > first;
    aligned.then(|| PageRange { start: HostVirt(start as u64), pages: (end - first) as u64 })
}

/// Bytes of a range.
fn bytes(range: PageRange) -> usize {
    (range.pages << PAGE_SHIFT) as usize
}

/// The pages from one address to another, if any.
const fn between(start: HostVirt, end: HostVirt) -> PageRange {
    PageRange { start, pages: end.page().saturating_sub(start.page()) }
}

/// Asks memory in whose traits are known.
fn ask(table: &mut Table, range: PageRange, traits: Traits) {
    // Where the agent has no memory to note it, it is not asked in.
    if arena::ensure(EXTENT_BYTES) {
        let locked = if LOCK_FUTURE.load(Ordering::Relaxed) { Shut::Locked as u8 } else { 0 };
        table.ask_as(range, Traits { shut: traits.shut | locked, ..traits });
    }
}

/// Puts fresh anonymous memory in the place of a range, with the protection and the advice of what was there.
fn map_fresh(range: PageRange, traits: Traits) -> Answer {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let arguments = [range.start.0 as usize, bytes(range), usize::from(traits.access), flags as usize, usize::MAX, 0];
    // SAFETY: callers replace memory whose contents the program has just given up, or that they have reserved.
    let mapped = unsafe { raw::call(libc::SYS_mmap, arguments) };
    if raw::error(mapped).is_none() {
        give_advice(range, traits);
    }
    mapped
}

/// Puts fresh anonymous memory where what was folded has been discarded. Says whether it is there.
pub fn map_discarded(range: PageRange, traits: Traits) -> bool {
    raw::error(map_fresh(range, traits)).is_none()
}

/// Advises for a mapping what was advised for what it replaces.
fn give_advice(range: PageRange, traits: Traits) {
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

/// The answer that says this error.
const fn refuse(error: i32) -> Answer {
    -(error as Answer)
}

#[cfg(test)]
pub mod tests;
