//! `ioctl`, because of the program's own userfaultfd (postcopy migration, snapshots): a mapping can be registered with
//! one userfaultfd, and the program's takes precedence. Write protection works on mappings of the pool as it does on
//! anonymous memory, with any features that the program has asked for: the kernel only checks the mapping
//! (`vma_can_userfault`).
//!
//! Two requests work on anonymous memory only: registering for missing pages, and moving pages. The agent's thread
//! makes folded memory anonymous before these requests are made. If it cannot, moves are answered by `EBUSY`, as the
//! kernel does for a page that may be pinned. The program then gets messages of missing pages only where memory was
//! anonymous.
//!
//! Requests that have memory pinned are prepared by [`pinning`].
//!
//! All other requests go straight to the kernel, and quickly: virtual processors run by this call.

use super::{State, enter, pinning, range, refuse, state};
use agent::raw::{self, Answer, c_answer};
use agent::table::{Guard, Shut};
use agent::{arena, maps};
use page::{HostVirt, PAGE_BYTES, PageRange};
use std::collections::BTreeSet;
use std::ffi::{c_int, c_ulong};
use std::sync::OnceLock;

const UFFDIO_TYPE: c_ulong = 0xAA;
const UFFDIO_REGISTER: c_ulong = 0xC020_AA00;
const UFFDIO_UNREGISTER: c_ulong = 0x8010_AA01;
const UFFDIO_MOVE: c_ulong = 0xC028_AA05;
/// `UFFDIO_REGISTER_MODE_MISSING`
const MISSING: u64 = 1;
/// Most times that memory is made anonymous for one request, if it is folded again meanwhile.
const MOST_TRIES: u32 = 3;

/// `struct uffdio_range`, with which `struct uffdio_register` begins too.
#[repr(C)]
#[derive(Clone, Copy)]
struct Range {
    start: u64,
    length: u64,
}

/// `struct uffdio_register`
#[repr(C)]
#[derive(Clone, Copy)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_move`
#[repr(C)]
#[derive(Clone, Copy)]
struct Move {
    to: u64,
    from: u64,
    length: u64,
    mode: u64,
    moved: i64,
}

const _: () = assert!(size_of::<Range>() == (UFFDIO_UNREGISTER as usize >> 16 & 0x3fff));
const _: () = assert!(size_of::<Register>() == (UFFDIO_REGISTER as usize >> 16 & 0x3fff));
const _: () = assert!(size_of::<Move>() == (UFFDIO_MOVE as usize >> 16 & 0x3fff));

/// Functions of the agent by which memory is yielded to the program's userfaultfd. They are called without the table's
/// lock.
#[derive(Clone, Copy)]
struct Ways {
    yield_range: fn(PageRange),
    make_anonymous: fn(PageRange) -> bool,
}

static WAYS: OnceLock<Ways> = OnceLock::new();

/// Sets two functions. The first unregisters a range from the agent's userfaultfds, because the program is about to
/// register its own. The second makes the memory of a range anonymous, and returns whether it did.
pub fn set_ways(yield_range: fn(PageRange), make_anonymous: fn(PageRange) -> bool) {
    // A second call sets the same functions.
    let _ = WAYS.set(Ways { yield_range, make_anonymous });
}

/// `ioctl`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(file: c_int, request: c_ulong, argument: usize) -> c_int {
    // SAFETY: the caller's arguments are passed on with the caller's promises. Other arguments are structures of the
    // same request, which this module has made of them.
    let ask =
        |argument: usize| unsafe { raw::call(libc::SYS_ioctl, [file as usize, request as usize, argument, 0, 0, 0]) };
    let kind = request >> 8 & 0xFF;
    let ours = matches!(kind, UFFDIO_TYPE | pinning::VFIO | pinning::VHOST) && argument != 0;
    if !ours || state() != State::Member || arena::holds(raw::stack()) {
        return c_answer(ask(argument)) as c_int;
    }
    // The kernel takes the request number as an `unsigned int`.
    let answer = match request & 0xFFFF_FFFF {
        request if kind != UFFDIO_TYPE => {
            pinning::prepare(request, argument);
            ask(argument)
        }
        UFFDIO_REGISTER => register(argument, || ask(argument)),
        UFFDIO_UNREGISTER => unregister(argument, || ask(argument)),
        UFFDIO_MOVE => move_pages(argument, ask),
        _ => ask(argument),
    };
    c_answer(answer) as c_int
}

/// Registers a range with the program's userfaultfd. The range is unregistered from the agent's userfaultfds before,
/// and stays so until the program unregisters its own.
fn register(argument: usize, pass: impl Fn() -> Answer) -> Answer {
    // SAFETY: with this request, the program passes this structure. The kernel reads it at the same place in a moment.
    let asked = unsafe { (argument as *const Register).read_unaligned() };
    let Some(range) = range_of(asked.range.start, asked.range.length) else { return pass() };
    let is_known = |table: &Guard| state() == State::Member && table.touches(range);
    let is_yielded = |table: &Guard| table.known(range).iter().any(|(_, traits)| traits.is_yielded());
    // If a part is registered with the program's userfaultfd already, the agent cannot replace it any more.
    let may_wait = asked.mode & MISSING != 0 && !enter().as_ref().is_some_and(is_yielded);
    let table = if may_wait { anonymous(&[range]) } else { None };
    let Some(mut table) = table.unwrap_or_else(enter).filter(is_known) else { return pass() };
    let before = is_yielded(&table);
    // The range is excluded from folding first, so that no fold registers it with the agent's userfaultfd again.
    table.shut(range, Shut::Yielded);
    drop(table);
    WAYS.get().inspect(|ways| (ways.yield_range)(range));
    let answer = pass();
    if answer != 0 && !before {
        enter().into_iter().for_each(|mut table| table.open(range, Shut::Yielded));
    }
    answer
}

fn unregister(argument: usize, pass: impl Fn() -> Answer) -> Answer {
    // SAFETY: with this request, the program passes this structure. The kernel reads it at the same place in a moment.
    let asked = unsafe { (argument as *const Range).read_unaligned() };
    let range = range_of(asked.start, asked.length);
    let answer = pass();
    if let Some(range) = range.filter(|_| answer == 0) {
        enter().into_iter().for_each(|mut table| table.open(range, Shut::Yielded));
    }
    answer
}

/// Locks the table as [`enter`] does, once no page of these ranges lies in mappings of the pool. The outer `None`: the
/// memory cannot be made anonymous.
#[expect(clippy::option_option, reason = "the inner one is that of every hook")]
fn anonymous(ranges: &[PageRange]) -> Option<Option<Guard>> {
    for _ in 0..MOST_TRIES {
        let table = enter();
        let is_pooled =
            |range: &&PageRange| table.as_ref().is_some_and(|table| !table.pooled_pages(**range).is_empty());
        let Some(pooled) = ranges.iter().copied().find(|range| is_pooled(&range)) else { return Some(table) };
        drop(table);
        if !WAYS.get().is_some_and(|ways| (ways.make_anonymous)(pooled)) {
            return None;
        }
    }
    None
}

/// Moves pages that lie in one mapping to the program, and in several to the kernel: part by part, in order.
fn move_pages(argument: usize, ask: impl Fn(usize) -> Answer) -> Answer {
    let moved_at = argument.wrapping_add(std::mem::offset_of!(Move, moved)) as *mut i64;
    // SAFETY: with this request, the program passes this structure. The kernel reads it at the same place in a moment.
    let asked = unsafe { (argument as *const Move).read_unaligned() };
    let ranges = [asked.from, asked.to].map(|start| range_of(start, asked.length));
    let [Some(from), Some(to)] = ranges else { return ask(argument) };
    // The table's lock is held until all pages are moved. So no page is folded or out on a stage meanwhile.
    let Some(table) = anonymous(&[from, to]) else { return refuse(libc::EBUSY) };
    if !table.as_ref().is_some_and(|table| table.touches(from) || table.touches(to)) {
        return ask(argument);
    }
    let mut answer = ask(argument);
    // These errors come from the mappings, which the kernel checks before it moves anything.
    if !matches!(raw::error(answer), Some(libc::EINVAL | libc::ENOENT)) {
        return answer;
    }
    let mut done = 0;
    for (start, end) in parts_of(from, to) {
        let mut part = Move { to: asked.to + start, from: asked.from + start, length: end - start, ..asked };
        answer = ask(&raw mut part as usize);
        done += part.moved.max(0).cast_unsigned();
        if answer != 0 {
            break;
        }
    }
    let moved = if done == 0 { answer as i64 } else { done.cast_signed() };
    // SAFETY: as above; the kernel writes to this field.
    unsafe { moved_at.write_unaligned(moved) };
    // As the kernel does, answers `EAGAIN` to a request that was carried out in part.
    if answer != 0 && done > 0 { refuse(libc::EAGAIN) } else { answer }
}

/// The parts of a move that lie in one mapping each, at both places, as distances in bytes from the beginning.
fn parts_of(from: PageRange, to: PageRange) -> Vec<(u64, u64)> {
    let length = from.pages * PAGE_BYTES as u64;
    let mut cuts = BTreeSet::from([0, length]);
    for range in [from, to] {
        for mapping in maps::mappings(range, false).unwrap_or_default() {
            let ends = [mapping.range.start, mapping.range.end()];
            cuts.extend(ends.map(|end: HostVirt| end.0.saturating_sub(range.start.0).min(length)));
        }
    }
    let cuts: Vec<u64> = cuts.into_iter().collect();
    cuts.windows(2).map(|pair| (pair[0], pair[1])).collect()
}

fn range_of(start: u64, length: u64) -> Option<PageRange> {
    range(usize::try_from(start).ok()?, usize::try_from(length).ok()?)
}
