//! `madvise`: enrols, discards, and keeps what was advised.

use super::{Answer, State, ask, between, bytes, enter, map_fresh, range, refuse, state};
use crate::maps::{self, Kind, Maps};
use crate::raw::{self, c_answer};
use crate::table::{Advice, Shut, Table, Traits};
use page::PageRange;
use std::ffi::{c_int, c_void};

const MADV_DONTNEED_LOCKED: c_int = 24;
const MADV_COLLAPSE: c_int = 25;
const MADV_GUARD_INSTALL: c_int = 102;
const MADV_GUARD_REMOVE: c_int = 103;

/// What an advice means to us.
#[derive(Clone, Copy, Debug)]
enum Meaning {
    /// `MADV_MERGEABLE`
    Enrol,
    /// `MADV_UNMERGEABLE`
    Leave,
    /// Contents are given up, now or when memory is short.
    Discard,
    /// Contents are given up, and whoever touches the range is killed.
    Guard,
    /// No longer so.
    Unguard,
    /// Is refused for anonymous memory, and must be for pages in mappings of the pool.
    OnlyFiles,
    /// Children find zeros.
    Wipe,
    /// No longer so.
    Keep,
    /// Something to remember.
    Remember(fn(&mut Advice)),
}

/// `None`: nothing.
fn meaning(advice: c_int) -> Option<Meaning> {
    Some(match advice {
        libc::MADV_MERGEABLE => Meaning::Enrol,
        libc::MADV_UNMERGEABLE => Meaning::Leave,
        libc::MADV_DONTNEED | MADV_DONTNEED_LOCKED | libc::MADV_FREE => Meaning::Discard,
        MADV_GUARD_INSTALL => Meaning::Guard,
        MADV_GUARD_REMOVE => Meaning::Unguard,
        // Collapsing would act on the pool's own pages.
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
    // SAFETY: passed on as it came.
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
        Meaning::Discard | Meaning::Guard => {
            end_pooled(table, range, advice == MADV_DONTNEED_LOCKED);
            if matches!(meaning, Meaning::Guard) {
                table.shut(range, Shut::Guarded);
            }
            let answer = pass();
            // Even where the kernel gave up on the way, nothing of the pool is left in what it came to.
            drop_from_table(table, range);
            answer
        }
        Meaning::Unguard => noted(pass(), || table.open(range, Shut::Guarded)),
        Meaning::OnlyFiles if !table.pooled_pages(range).is_empty() => refuse(libc::EINVAL),
        Meaning::OnlyFiles => pass(),
        // The kernel will not have it for mappings of the pool, and says so.
        Meaning::Wipe => noted(pass(), || table.shut(range, Shut::Wiped)),
        Meaning::Keep => noted(pass(), || table.open(range, Shut::Wiped)),
        Meaning::Remember(change) => noted(pass(), || table.advise(range, change)),
    }
}

/// Notes what succeeded. `ENOMEM` also means that the kernel skipped holes and did the rest.
fn noted(answer: Answer, note: impl FnOnce()) -> Answer {
    if answer == 0 || raw::error(answer) == Some(libc::ENOMEM) {
        note();
    }
    answer
}

/// Asks in what is private anonymous memory in the range, instead of telling the kernel, whose own merger knows no groups.
fn enrol(table: &mut Table, range: PageRange) -> Answer {
    let mappings = maps::mappings(range, true).unwrap_or_default();
    for mapping in mappings.iter().filter(|mapping| mapping.anonymous) {
        let shut = [(mapping.locked, Shut::Locked), (mapping.special, Shut::Special)];
        let shut = shut.iter().filter(|(is, _)| *is).fold(0, |bits, (_, why)| bits | *why as u8);
        ask(table, mapping.range, Traits { asked: true, access: mapping.access, shut, advice: mapping.advice });
    }
    // Pages in mappings of the pool are known already, and no anonymous memory to the kernel.
    for (known, _) in table.known(range) {
        table.ask(known);
    }
    let mapped: u64 = mappings.iter().map(|mapping| mapping.range.pages).sum();
    if mapped == range.pages { 0 } else { refuse(libc::ENOMEM) }
}

/// The range is not to be merged any more: what is, becomes private, as the kernel's own merger does it. `None` where the
/// kernel has the last word.
fn leave(table: &mut Table, range: PageRange) -> Option<Answer> {
    table.unask(range);
    for run in table.slot_runs(range) {
        let pages = PageRange { start: run.start, pages: run.pages.into() };
        // SAFETY: populating for writing changes no contents; it makes the kernel break the mapping of the pool.
        let answer = unsafe {
            raw::call(
                libc::SYS_madvise,
                [pages.start.0 as usize, bytes(pages), libc::MADV_POPULATE_WRITE as usize, 0, 0, 0],
            )
        };
        match raw::error(answer) {
            None => table.set_broken(pages),
            // Memory that may not be written goes on mapping the pool until it is.
            Some(libc::ENOMEM) => return Some(refuse(libc::ENOMEM)),
            Some(_) => {}
        }
    }
    None
}

/// Puts anonymous memory in the place of all mappings of the pool in the range, whose contents are given up. The kernel could do
/// it where they are, and would tell of each; this is quicker.
fn end_pooled(table: &mut Table, range: PageRange, locked_too: bool) {
    // The kernel goes as far as the first locked page, and refuses that.
    let first_locked = table.known(range).into_iter().find(|(_, traits)| traits.is_locked() && !locked_too);
    let range = first_locked.map_or(range, |(locked, _)| between(range.start, locked.start));
    let pooled = table.pooled_pages(range);
    if pooled.is_empty() {
        return;
    }
    let Ok(maps) = Maps::open() else { return };
    for pooled in pooled {
        for (piece, traits) in table.known(pooled) {
            if maps.shows(piece, traits, Kind::Pool) && raw::error(map_fresh(piece, traits)).is_none() {
                table.discard(piece);
            } else {
                // It is locked, the program has changed it past the doors, or no mapping can be had. The kernel discards it where it is,
                // and tells of it.
                table.set_broken(piece);
            }
        }
    }
}

/// Notes that contents are gone, but for pages that are still in mappings of the pool: from the first locked one on, and those for which there was no
/// mapping.
fn drop_from_table(table: &mut Table, range: PageRange) {
    let mut at = range.start;
    for pooled in table.pooled_pages(range) {
        table.discard(between(at, pooled.start));
        at = pooled.end();
    }
    table.discard(between(at, range.end()));
}
