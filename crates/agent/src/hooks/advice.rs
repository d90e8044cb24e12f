//! `madvise`: enrols memory, discards it, and remembers the advice given for it.

use super::heap::is_unseen_heap;
use super::policy::has_policy;
use super::{Answer, State, ask, between, break_slots, enter, map_fresh, range, refuse, state};
use crate::maps::{self, Kind, Maps};
use crate::raw::{self, c_answer};
use crate::table::{Advice, Shut, Table, Traits};
use page::PageRange;
use std::ffi::{c_int, c_void};

const MADV_DONTNEED_LOCKED: c_int = 24;
const MADV_COLLAPSE: c_int = 25;
const MADV_GUARD_INSTALL: c_int = 102;
const MADV_GUARD_REMOVE: c_int = 103;

/// The meaning of an advice for folding.
#[derive(Clone, Copy, Debug)]
enum Meaning {
    /// `MADV_MERGEABLE`
    Enrol,
    /// `MADV_UNMERGEABLE`
    Leave,
    /// Contents are given up, at once or when memory is short.
    Discard,
    /// Contents are given up, and a thread that touches the range is killed.
    Guard,
    /// Takes [`Meaning::Guard`] back.
    Unguard,
    /// Must be refused for pages in mappings of the pool.
    OnlyFiles,
    /// Forked children find zeros.
    Wipe,
    /// Takes [`Meaning::Wipe`] back.
    Keep,
    /// Advice that the table remembers.
    Remember(fn(&mut Advice)),
}

/// The meaning of an advice; `None` if it has none for folding.
fn meaning(advice: c_int) -> Option<Meaning> {
    Some(match advice {
        libc::MADV_MERGEABLE => Meaning::Enrol,
        libc::MADV_UNMERGEABLE => Meaning::Leave,
        libc::MADV_DONTNEED | MADV_DONTNEED_LOCKED | libc::MADV_FREE => Meaning::Discard,
        MADV_GUARD_INSTALL => Meaning::Guard,
        MADV_GUARD_REMOVE => Meaning::Unguard,
        // The kernel refuses `MADV_REMOVE` for anonymous memory. `MADV_COLLAPSE` would act on the pool's own pages.
        libc::MADV_REMOVE | MADV_COLLAPSE => Meaning::OnlyFiles,
        libc::MADV_WIPEONFORK => Meaning::Wipe,
        libc::MADV_KEEPONFORK => Meaning::Keep,
        libc::MADV_DONTFORK => Meaning::Remember(|advice| advice.dont_fork = true),
        libc::MADV_DOFORK => Meaning::Remember(|advice| advice.dont_fork = false),
        libc::MADV_DONTDUMP => Meaning::Remember(|advice| advice.dont_dump = true),
        libc::MADV_DODUMP => Meaning::Remember(|advice| advice.dont_dump = false),
        libc::MADV_HUGEPAGE => Meaning::Remember(|advice| advice.huge = Some(true)),
        libc::MADV_NOHUGEPAGE => Meaning::Remember(|advice| advice.huge = Some(false)),
        _ => return None,
    })
}

/// `madvise`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(at: *mut c_void, length: usize, advice: c_int) -> c_int {
    c_answer(advise(at as usize, length, advice)) as c_int
}

fn advise(at: usize, length: usize, advice: c_int) -> Answer {
    // SAFETY: the caller's arguments are passed on unchanged, with the caller's promises.
    let pass = || unsafe { raw::call(libc::SYS_madvise, [at, length, advice as usize, 0, 0, 0]) };
    let (Some(meaning), Some(range)) = (meaning(advice), range(at, length)) else { return pass() };
    let Some(mut table) = enter() else { return pass() };
    let table = &mut *table;
    if matches!(meaning, Meaning::Enrol) && state() == State::Member {
        return enrol(table, range);
    }
    if !table.touches(range) {
        return pass();
    }
    match meaning {
        Meaning::Enrol => pass(),
        Meaning::Leave => leave(table, range).unwrap_or_else(pass),
        Meaning::Discard | Meaning::Guard => discard(table, range, advice, pass),
        Meaning::Unguard => noted(pass(), || table.open(range, Shut::Guarded)),
        Meaning::OnlyFiles if !table.pooled_pages(range).is_empty() => refuse(libc::EINVAL),
        Meaning::OnlyFiles => pass(),
        // The kernel refuses this for mappings of the pool, and the program gets that answer.
        Meaning::Wipe => noted(pass(), || table.shut(range, Shut::Wiped)),
        Meaning::Keep => noted(pass(), || table.open(range, Shut::Wiped)),
        Meaning::Remember(change) => noted(pass(), || table.advise(range, change)),
    }
}

/// Has contents given up, and notes it.
fn discard(table: &mut Table, range: PageRange, advice: c_int, pass: impl FnOnce() -> Answer) -> Answer {
    let is_guard = advice == MADV_GUARD_INSTALL;
    if end_pooled(table, range, advice == MADV_DONTNEED_LOCKED) && !is_guard {
        // Nothing is left for the kernel to discard.
        return 0;
    }
    if is_guard {
        table.shut(range, Shut::Guarded);
    }
    let answer = pass();
    // Even if the kernel gave up on the way, no page of the pool is left in the part that it reached.
    drop_from_table(table, range);
    answer
}

/// Notes a change that succeeded. `ENOMEM` also means that the kernel skipped holes and did the rest.
fn noted(answer: Answer, note: impl FnOnce()) -> Answer {
    if answer == 0 || raw::error(answer) == Some(libc::ENOMEM) {
        note();
    }
    answer
}

/// Enrols the private anonymous memory of the range. The kernel is not told, because its own merger knows no groups.
fn enrol(table: &mut Table, range: PageRange) -> Answer {
    let known: u64 = table.known(range).iter().map(|(part, _)| part.pages).sum();
    if known == range.pages {
        table.ask(range);
        return 0;
    }
    // The kernel takes long for the traits, in a process of many mappings.
    let mappings = maps::mappings(range, true).unwrap_or_default();
    for mapping in mappings.iter().filter(|mapping| mapping.anonymous && !is_unseen_heap(mapping)) {
        let bound = has_policy(mapping.range.start);
        let shut = [(mapping.locked, Shut::Locked), (mapping.special, Shut::Special), (bound, Shut::Policy)];
        let shut = shut.iter().filter(|(is, _)| *is).fold(0, |bits, (_, why)| bits | *why as u8);
        ask(table, mapping.range, Traits { asked: true, access: mapping.access, shut, advice: mapping.advice });
    }
    // Pages in mappings of the pool are known already, and are no anonymous memory to the kernel.
    for (known, _) in table.known(range) {
        table.ask(known);
    }
    let mapped: u64 = mappings.iter().map(|mapping| mapping.range.pages).sum();
    if mapped == range.pages { 0 } else { refuse(libc::ENOMEM) }
}

/// Ends merging for the range: merged pages become private, as the kernel's own merger does it. `None` if the call is
/// to be passed to the kernel, whose answer counts.
fn leave(table: &mut Table, range: PageRange) -> Option<Answer> {
    table.unask(range);
    break_slots(table, range).err().map(refuse)
}

/// Maps anonymous memory in the place of all mappings of the pool in the range, whose contents are given up. The kernel
/// could discard them where they are, and would report each; this is quicker. Returns whether all of the range was
/// replaced, and noted as discarded.
fn end_pooled(table: &mut Table, range: PageRange, locked_too: bool) -> bool {
    let pooled = table.pooled_pages(range);
    if pooled.is_empty() {
        return false;
    }
    // The kernel proceeds to the first locked page, and refuses that.
    let known = table.known(range);
    let first_locked = known.iter().find(|(_, traits)| traits.is_locked() && !locked_too);
    let end = first_locked.map_or(range.end(), |(locked, _)| locked.start);
    let Ok(maps) = Maps::open() else { return false };
    let mut replaced = 0;
    for pooled in pooled.into_iter().map(|pooled| between(pooled.start, pooled.end().min(end))) {
        for (piece, traits) in table.known(pooled) {
            if maps.shows(piece, traits, Kind::Pool) && raw::error(map_fresh(piece, traits)).is_none() {
                table.discard(piece);
                replaced += piece.pages;
            } else {
                // The piece is locked, the program has changed it past the hooks, or no mapping can be had. The kernel
                // discards it where it is, and reports that.
                table.set_broken(piece);
            }
        }
    }
    replaced == range.pages
}

/// Notes that contents are gone, but for pages that are still in mappings of the pool. Those are the pages from the
/// first locked one on, and those for which no mapping could be had.
fn drop_from_table(table: &mut Table, range: PageRange) {
    let mut at = range.start;
    for pooled in table.pooled_pages(range) {
        table.discard(between(at, pooled.start));
        at = pooled.end();
    }
    table.discard(between(at, range.end()));
}
