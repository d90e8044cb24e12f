//! The hooks: functions of this library that stand before those functions of the C library that change memory. By them,
//! the table agrees with the kernel's view, and contents stay right where pages map the pool.
//!
//! ```text
//!   program's thread --> hook --- inert, or one of the agent's own threads ---> system call, unchanged
//!                          |
//!                          v  take the table's lock (no fold is under way then), block signals
//!                        system call, or several in its place where pages map the pool
//!                          |
//!                          v  note what the kernel did; release the lock
//! ```
//!
//! A hook makes its system call by itself, without the C library. Its answer is what the kernel would have answered if
//! nothing had been folded. No hook panics, allocates from the program's heap, or waits for anything but the table's
//! lock.
//!
//! **State.** In a process that was not enrolled, the hooks only pass calls on: it is *inert*. An enrolled process is a
//! *member*. A forked child is inert, however it was made: the kernel clears the state for it. It may get an agent of
//! its own ([`crate::child`]). Mappings of the pool that the child has inherited are followed ([`agent::follow`]). A
//! `vfork` child and a thread made by `clone` share the member's memory, table and state, and are served alike. Only
//! the hooks that execute a program ask which process calls them.
//!
//! **Calls that bypass the hooks** are reported by the kernel as far as contents depend on them: discards of memory
//! that maps the pool, and forks. There are hooks for them all the same, because it takes less time to know of a change
//! beforehand than to handle a report. And the kernel does not report changes of protection, locks and advice.
//!
//! **When all anonymous memory is to be enrolled, only memory that a hook saw being mapped is.** Code that maps memory
//! without the hooks also changes it without the hooks. The C library calls its own functions in a way that cannot be
//! interposed. So [`patch`] replaces their first instructions by jumps to the hooks.

mod advice;
mod exec;
mod exit;
mod filter;
mod fork;
mod heap;
mod memory;
mod patch;
mod pinning;
mod policy;
mod remap;
mod syscall;
mod userfault;

pub use exec::{carry, carry_no_more, search};
pub use fork::find as find_fork;
pub use userfault::set_ways;

use crate::debugged;
use agent::calls::{ask, between, bytes, map_fresh, range, refuse};
use agent::raw::{self, Answer};
use agent::table::{self, Guard, Table};
use agent::{arena, maps, references};
use page::{PAGE_BYTES, PageRange};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering};
use wire::MemberState;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum State {
    Inert = 0,
    Member = 1,
}

/// Address of the state: in a page that the kernel clears for forked children; null in a process that was never
/// enrolled.
static STATE: AtomicPtr<AtomicU8> = AtomicPtr::new(std::ptr::null_mut());
/// Whether all private anonymous memory is enrolled.
static ALL: AtomicBool = AtomicBool::new(false);
/// The reason why not all anonymous memory could be enrolled.
static REFUSAL: OnceLock<patch::Refusal> = OnceLock::new();

/// Makes this process a member. For the constructor: no other thread runs yet.
pub fn init(all_anonymous: bool) {
    let Some(place) = place_for_state() else { return };
    STATE.store(place, Ordering::Release);
    references::init();
    if all_anonymous {
        match patch::patch() {
            Ok(()) => enrol_all(),
            Err(refusal) => drop(REFUSAL.set(refusal)),
        }
    }
    begin_to_serve();
}

/// Makes a forked child a member. For the child's only thread; the locks, the arena and the table are its own.
pub fn begin_anew() {
    // A child does not inherit `mlockall(MCL_FUTURE)`.
    maps::lock_future(false);
    begin_to_serve();
}

fn begin_to_serve() {
    exec::serve();
    set_state(State::Member);
}

/// Makes this process inert, because no agent looks after its memory any more.
pub fn rest() {
    set_state(State::Inert);
}

/// Makes this process inert for good. The next program that it executes has no agent, either.
pub fn rest_for_good() {
    exec::carry_no_more();
    rest();
}

/// Enrols all private anonymous memory from here on, and the heap. The C library has been patched.
fn enrol_all() {
    ALL.store(true, Ordering::Relaxed);
    heap::ask_heap();
}

/// The state of a member that enrols all its memory and has none enrolled, and the reason, as a message for people.
pub fn why_nothing_is_mapped() -> (MemberState, String) {
    if let Some(refusal) = REFUSAL.get() {
        return (MemberState::NotFoldable, format!("not all anonymous memory can be asked in: {refusal}"));
    }
    let why = "the program has mapped no private anonymous memory through the C library: what it has is its stack and data, \
               shared, or mapped by system calls of its own";
    (MemberState::NothingMapped, why.into())
}

/// Maps a page that forked children find cleared.
fn place_for_state() -> Option<*mut AtomicU8> {
    let page = arena::map(PAGE_BYTES)?.start.0 as usize;
    // SAFETY: the page is the agent's own, and children do not need its contents.
    let answer = unsafe { raw::call(libc::SYS_madvise, [page, PAGE_BYTES, libc::MADV_WIPEONFORK as usize, 0, 0, 0]) };
    raw::error(answer).is_none().then_some(page as *mut AtomicU8)
}

fn state() -> State {
    let place = STATE.load(Ordering::Acquire);
    // SAFETY: the pointer is null, or points to a page that is zeroed at first and used for nothing else. The page is
    // mapped for as long as the process lives.
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

/// Whether this process is a member, and the caller a thread of the program.
pub fn is_member() -> bool {
    state() == State::Member && !arena::holds(raw::stack())
}

/// Locks the table for a hook; `None` if the hook only has to pass the call on. That is also the answer if a debugger
/// has stopped the agent's thread, and the lock does not become free.
fn enter() -> Option<Guard> {
    // The agent's threads, known by their stacks, may hold the lock already, and their own mappings do not belong in
    // the table.
    let serves = state() != State::Inert && !arena::holds(raw::stack());
    serves.then(|| table::lock_unless(debugged::LOOK_AFTER, debugged::is_agent_stopped)).flatten()
}

/// Gives pages that map slots private copies, where they lie.
///
/// # Errors
/// `ENOMEM`: memory is short. Pages that the program may not write still map the pool, which is no error.
fn break_slots(table: &mut Table, range: PageRange) -> Result<(), i32> {
    for run in table.slot_runs(range) {
        let pages = PageRange { start: run.start, pages: run.pages.into() };
        let arguments = [pages.start.0 as usize, bytes(pages), libc::MADV_POPULATE_WRITE as usize, 0, 0, 0];
        // SAFETY: populating for writing changes no contents; it makes the kernel break the mapping of the pool.
        let answer = unsafe { raw::call(libc::SYS_madvise, arguments) };
        match raw::error(answer) {
            None => table.set_broken(pages),
            Some(libc::ENOMEM) => return Err(libc::ENOMEM),
            Some(_) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
pub mod tests;
