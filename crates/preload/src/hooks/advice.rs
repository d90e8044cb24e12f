//! `madvise`: enrols or discards memory, and notes the advice given for it.

use super::heap::is_unseen_heap;
use super::policy::has_policy;
use super::{Answer, State, ask, between, break_slots, bytes, enter, map_fresh, range, refuse, state};
use agent::maps::{self, Kind, Maps};
use agent::raw::{self, c_answer};
use agent::table::{Advice, READ_WRITE, Shut, Table, Traits};
use page::PageRange;
use std::ffi::{c_int, c_void};

const MADV_DONTNEED_LOCKED: c_int = 24;
const MADV_COLLAPSE: c_int = 25;
const MADV_GUARD_INSTALL: c_int = 102;
const MADV_GUARD_REMOVE: c_int = 103;

/// What an advice means for folding.
#[derive(Clone, Copy, Debug)]
enum Meaning {
    /// `MADV_MERGEABLE`
    Enrol,
    /// `MADV_UNMERGEABLE`
    Leave,
    /// The contents are given up, at once or when memory is short.
    Discard,
    /// The contents are given up, and a thread that touches the range gets `SIGSEGV`.
    Guard,
    /// Takes [`Meaning::Guard`] back.
    Unguard,
    /// Must be refused for pages in mappings of the pool, where it would act on the pool's file.
    OnlyFiles,
    /// Forked children find the memory cleared.
    Wipe,
    /// Takes [`Meaning::Wipe`] back.
    Keep,
    /// Advice that the table notes.
    Remember(fn(&mut Advice)),
}

/// What an advice means for folding; `None` if it means nothing.
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
        Meaning::Discard | Meaning::Guard => discard(table, range, advice),
        Meaning::Unguard => noted(pass(), || table.open(range, Shut::Guarded)),
        Meaning::OnlyFiles if !table.pooled_pages(range).is_empty() => refuse(libc::EINVAL),
        Meaning::OnlyFiles => pass(),
        // The kernel refuses this for mappings of the pool, but would have carried it out for the mappings before them.
        Meaning::Wipe if !table.pooled_pages(range).is_empty() => refuse(libc::EINVAL),
        Meaning::Wipe => noted(pass(), || table.shut(range, Shut::Wiped)),
        Meaning::Keep => noted(pass(), || table.open(range, Shut::Wiped)),
        Meaning::Remember(change) => noted(pass(), || table.advise(range, change)),
    }
}

/// Discards a range part by part, in the kernel's order and as far as the kernel would come: it stops at the first page
/// that it may not discard, and steps over holes. In memory that the table does not know, only the kernel knows what is
/// locked.
///
/// Mappings of the pool are replaced by fresh memory. The kernel could discard their pages where they are, and would
/// report each discard; replacing them takes less time.
fn discard(table: &mut Table, range: PageRange, advice: c_int) -> Answer {
    let is_guard = advice == MADV_GUARD_INSTALL;
    if is_guard {
        table.shut(range, Shut::Guarded);
    }
    let parts = parts(table, range);
    // Most discards concern no mapping of the pool, and need no list of mappings.
    let maps = parts.iter().any(|(_, traits)| traits.is_some()).then(Maps::open).and_then(Result::ok);
    let mut all = 0;
    for (part, traits) in parts {
        let has_home = traits.is_some_and(|traits| traits.home.is_some());
        let is_replaced = !has_home
            && maps.as_ref().zip(traits).is_some_and(|(maps, traits)| replace_pooled(table, maps, part, traits));
        if is_replaced && !is_guard {
            continue;
        }
        // SAFETY: a part of the caller's range, with the caller's advice and promises.
        let answer =
            unsafe { raw::call(libc::SYS_madvise, [part.start.0 as usize, bytes(part), advice as usize, 0, 0, 0]) };
        if traits.is_none() {
            // The discard is noted even if the kernel stopped on the way. Mappings of the pool stay as they are known
            // until the kernel reports their discard.
            table.discard(part);
        } else if has_home && answer == 0 {
            table.come_back_unplaced(part);
        }
        match raw::error(answer) {
            None => {}
            Some(libc::ENOMEM) => all = answer,
            Some(_) => return answer,
        }
    }
    all
}

/// The parts of a range in order: parts in mappings of the pool with their traits, and the parts between them.
fn parts(table: &Table, range: PageRange) -> Vec<(PageRange, Option<Traits>)> {
    let (mut parts, mut at) = (Vec::new(), range.start);
    for pooled in table.pooled_pages(range) {
        parts.push((between(at, pooled.start), None));
        parts.extend(table.known(pooled).into_iter().map(|(piece, traits)| (piece, Some(traits))));
        at = pooled.end();
    }
    parts.push((between(at, range.end()), None));
    parts.retain(|(part, _)| part.pages > 0);
    parts
}

/// Maps anonymous memory in place of a piece of a mapping of the pool, and notes that. `false` if the kernel must
/// discard the piece instead, because it is locked, the program has changed it in a way that bypasses the hooks, or no
/// mapping can be made.
fn replace_pooled(table: &mut Table, maps: &Maps, piece: PageRange, traits: Traits) -> bool {
    let is_replaced = maps.shows(piece, traits, Kind::Pool) && raw::error(map_fresh(piece, traits)).is_none();
    if is_replaced {
        table.discard(piece);
    }
    is_replaced
}

/// Notes a change if it succeeded. `ENOMEM` also means that the kernel skipped holes and changed the rest.
fn noted(answer: Answer, note: impl FnOnce()) -> Answer {
    if answer == 0 || raw::error(answer) == Some(libc::ENOMEM) {
        note();
    }
    answer
}

/// Enrols the private anonymous memory of the range. The kernel is not told, because ksmd knows no trust groups.
fn enrol(table: &mut Table, range: PageRange) -> Answer {
    let known: u64 = table.known(range).iter().map(|(part, _)| part.pages).sum();
    if known == range.pages {
        table.ask(range);
        return 0;
    }
    // In a process of many mappings, the kernel takes long to tell the traits.
    let mappings = maps::mappings(range, true).unwrap_or_default();
    for mapping in mappings.iter().filter(|mapping| mapping.anonymous && !is_unseen_heap(mapping)) {
        let bound = has_policy(mapping.range.start);
        let shut = [(mapping.locked, Shut::Locked), (mapping.special, Shut::Special), (bound, Shut::Policy)];
        let shut = shut.iter().filter(|(is, _)| *is).fold(0, |bits, (_, why)| bits | *why as u8);
        ask(
            table,
            mapping.range,
            Traits { asked: true, access: mapping.access, shut, advice: mapping.advice, home: None },
        );
    }
    for mapping in mappings.iter().filter(|mapping| mapping.private && !mapping.anonymous && mapping.file.1 != 0) {
        // It is entered in the table if it turns out to map a template.
        let is_shut = mapping.locked || mapping.special || has_policy(mapping.range.start);
        if mapping.access == READ_WRITE && !is_shut {
            table.ask_file(mapping.range, Traits { advice: mapping.advice, ..Traits::default() });
        }
    }
    // Pages in mappings of the pool are known already, and are no anonymous memory to the kernel.
    for (known, _) in table.known(range) {
        table.ask(known);
    }
    let mapped: u64 = mappings.iter().map(|mapping| mapping.range.pages).sum();
    if mapped == range.pages { 0 } else { refuse(libc::ENOMEM) }
}

/// Ends folding for the range: folded pages become private, as ksmd does it. `None` if the call must be passed to the
/// kernel, whose answer counts.
fn leave(table: &mut Table, range: PageRange) -> Option<Answer> {
    table.unask(range);
    break_slots(table, range).err().map(refuse)
}
