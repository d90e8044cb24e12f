//! `mremap`, of what the program sees as one mapping while the kernel may see many, since pages of it were folded or are
//! watched. The kernel refuses that when it grows, moves some of them and then refuses the rest (from Linux 6.17 on), or
//! refuses all. And a mapping of the pool must not grow, or more of the pool would come to light where the program
//! expects zeros.
//!
//! ```text
//!   nothing known of it, shrinks in place, or one mapping to the kernel too ---> the kernel's own, done or refused whole
//!      |
//!      v  several
//!   is it one mapping to the program, or a plain move to a given place? -- no --> EFAULT
//!      |
//!      v grows, and there is room behind it: fresh memory there ------------------> table
//!      | no room, and may move, or must
//!      v
//!   pages that map the pool become private: their slots are released where the worker knows them to be
//!      |
//!      v
//!   reserve the new place (what lay there is gone, as with the kernel)
//!      | move mapping by mapping --- one fails: move back what was moved, ENOMEM
//!      v
//!   fresh memory behind it; fresh memory at the old place if that is to stay ------> table
//! ```

use super::{Answer, ask, between, bytes, enter, give_advice, map_fresh, range, refuse};
use crate::follow::Moving;
use crate::maps::{self, Mapping};
use crate::raw::{self, c_answer};
use crate::table::{Advice, Shut, Table, Traits};
use page::{HostVirt, PAGE_BYTES, PageRange};
use std::ffi::{c_int, c_void};

const MAYMOVE: usize = libc::MREMAP_MAYMOVE as usize;
const FIXED: usize = libc::MREMAP_FIXED as usize;
const DONTUNMAP: usize = libc::MREMAP_DONTUNMAP as usize;

/// What was asked for.
#[derive(Clone, Copy)]
struct Request {
    old: PageRange,
    pages: u64,
    flags: usize,
    /// With [`FIXED`], where to.
    to: usize,
}

impl Request {
    fn shrinks(self) -> bool {
        self.pages <= self.old.pages
    }

    /// Where the pages that are kept lie now.
    fn kept(self) -> PageRange {
        PageRange { pages: self.old.pages.min(self.pages), ..self.old }
    }

    /// What lies behind `pages` pages from `start` on up to the new size.
    fn tail(self, start: HostVirt) -> PageRange {
        PageRange { start: start.add_pages(self.old.pages), pages: self.pages.saturating_sub(self.old.pages) }
    }
}

/// `mremap`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    at: *mut c_void,
    old_length: usize,
    new_length: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    let arguments = [at as usize, old_length, new_length, flags as usize, to as usize, 0];
    // SAFETY: passed on as it came.
    let pass = || unsafe { raw::call(libc::SYS_mremap, arguments) };
    let sizes = (range(at as usize, old_length), range(at as usize, new_length));
    let answer = match (enter(), sizes) {
        (Some(mut table), (Some(old), Some(new))) => {
            let request = Request { old, pages: new.pages, flags: flags as usize, to: to as usize };
            remap(&mut table, request, pass)
        }
        // What the kernel refuses, and the copy of a shared mapping, which takes a size of 0.
        _ => pass(),
    };
    c_answer(answer) as *mut c_void
}

fn remap(table: &mut Table, request: Request, pass: impl Fn() -> Answer) -> Answer {
    let Request { old, flags, .. } = request;
    let stays = flags & (FIXED | DONTUNMAP) == 0;
    let pooled = !table.pooled_pages(old).is_empty();
    // What is kept does not move: the kernel only unmaps the rest.
    let simple = !table.touches(old) || request.shrinks() && stays || !pooled && maps::is_one(old);
    if simple || !are_sensible(request) {
        let moving = Moving::announce(old.start);
        let answer = pass();
        drop(moving);
        if raw::error(answer).is_none() {
            moved(table, request, HostVirt(answer as u64));
        } else {
            // It makes room, and unmaps what is not kept, before it finds that it cannot move.
            forget_unmapped(table, old);
            if flags & FIXED != 0 {
                forget_unmapped(table, PageRange { start: HostVirt(request.to as u64), pages: request.pages });
            }
        }
        return answer;
    }
    if one_to_the_program(table, request.kept()).is_none() {
        learn_again(table, request.kept());
    }
    let known = table.known(request.kept());
    let is_whole = known.iter().map(|(part, _)| part.pages).sum::<u64>() == request.kept().pages;
    // From Linux 6.17 on, several mappings may be moved at once, to a place that is given and as large.
    let plain = flags & FIXED != 0 && request.pages == old.pages && is_whole;
    match (one_to_the_program(table, request.kept()), known.first()) {
        (Some(traits), _) => by_hand(table, request, traits),
        (None, Some((_, traits))) if plain => by_hand(table, request, *traits),
        _ => refuse(libc::EFAULT),
    }
}

/// Makes private what maps the pool, before it is moved: the worker knows pages by where they are.
fn leave_pool(table: &mut Table, range: PageRange) -> bool {
    for run in table.slot_runs(range) {
        let pages = PageRange { start: run.start, pages: run.pages.into() };
        let access = table.known(pages).first().map_or(0, |(_, traits)| traits.access);
        // Memory that may not be written is broken by the kernel only when it may.
        let shut = libc::PROT_READ as u8 | libc::PROT_WRITE as u8 != access;
        let done = (!shut || protect(pages, libc::PROT_READ as u8 | libc::PROT_WRITE as u8)) && break_pages(pages);
        if shut {
            protect(pages, access);
        }
        if !done {
            return false;
        }
        table.set_broken(pages);
    }
    true
}

fn protect(range: PageRange, access: u8) -> bool {
    let arguments = [range.start.0 as usize, bytes(range), usize::from(access), 0, 0, 0];
    // SAFETY: the range is the program's memory that it is moving now, so that none of its threads uses it; what it had
    // is put back.
    let answer = unsafe { raw::call(libc::SYS_mprotect, arguments) };
    raw::error(answer).is_none()
}

fn break_pages(range: PageRange) -> bool {
    let arguments = [range.start.0 as usize, bytes(range), libc::MADV_POPULATE_WRITE as usize, 0, 0, 0];
    // SAFETY: populating for writing changes no contents; it makes the kernel break the mapping of the pool.
    let answer = unsafe { raw::call(libc::SYS_madvise, arguments) };
    raw::error(answer).is_none()
}

/// Forgets what is not mapped any more of a range.
fn forget_unmapped(table: &mut Table, range: PageRange) {
    if !table.touches(range) {
        return;
    }
    let Some(mappings) = maps::mappings(range, false) else { return };
    let mut at = range.start;
    for mapping in mappings {
        table.forget(between(at, mapping.range.start));
        at = mapping.range.end();
    }
    table.forget(between(at, range.end()));
}

/// Whether the kernel would take these flags and places, given one mapping.
fn are_sensible(request: Request) -> bool {
    let Request { old, pages, flags, to } = request;
    let known = flags & !(MAYMOVE | FIXED | DONTUNMAP) == 0;
    let may = flags & (FIXED | DONTUNMAP) == 0 || flags & MAYMOVE != 0;
    let stays = flags & DONTUNMAP == 0 || pages == old.pages;
    let fixed = flags & FIXED == 0 || {
        let end = (to as u64).saturating_add(pages * PAGE_BYTES as u64);
        to % PAGE_BYTES == 0 && end < 1 << 47 && (end <= old.start.0 || to as u64 >= old.end().0)
    };
    known && may && stays && fixed
}

/// Takes over what the kernel says of protection and advice, which the program may have changed past the doors.
fn learn_again(table: &mut Table, range: PageRange) {
    let mappings = maps::mappings(range, true).unwrap_or_default();
    let anonymous: Vec<_> = mappings.iter().filter(|mapping| mapping.anonymous).collect();
    let is_known = |mapping: &&Mapping| table.known(mapping.range).iter().all(|(_, t)| t.advice == mapping.advice);
    // Slots have no advice of huge pages. If that of the memory around them is news, and all the same, it was given to all.
    let around = anonymous.first().map(|first| first.advice.huge);
    let is_one = anonymous.iter().all(|mapping| Some(mapping.advice.huge) == around);
    let given = around.flatten().filter(|_| is_one && !anonymous.iter().all(is_known));
    for mapping in &mappings {
        table.protect(mapping.range, mapping.access);
        table.advise(mapping.range, |advice| {
            let huge =
                if mapping.anonymous { mapping.advice.huge } else { mapping.advice.huge.or(given).or(advice.huge) };
            *advice = Advice { huge, ..mapping.advice };
        });
    }
}

/// The traits of a range that was one mapping before pages of it were folded.
fn one_to_the_program(table: &Table, range: PageRange) -> Option<Traits> {
    let known = table.known(range);
    let whole: u64 = known.iter().map(|(part, _)| part.pages).sum();
    let (_, traits) = *known.first()?;
    // What was asked in may be a part of a mapping; all else tells mappings apart for the kernel too.
    let alike = |other: &Traits| other.access == traits.access && other.advice == traits.advice;
    (whole == range.pages && known.iter().all(|(_, other)| alike(other))).then_some(traits)
}

/// The kernel did it: notes it.
fn moved(table: &mut Table, request: Request, to: HostVirt) {
    let Request { old, pages, flags, .. } = request;
    let last = table.known(old).last().filter(|(part, _)| part.end() == old.end()).map(|(_, traits)| *traits);
    let stayed = if flags & DONTUNMAP != 0 { table.known(old) } else { Vec::new() };
    if pages < old.pages {
        table.forget(PageRange { start: old.start.add_pages(pages), pages: old.pages - pages });
    }
    if to != old.start {
        table.forget(PageRange { start: to, pages });
        table.relocate(request.kept(), to);
    }
    if !request.shrinks() {
        table.forget(request.tail(to));
        // Also where it is not to be folded any more: what is one mapping to the program is known as a whole.
        if let Some(traits) = last {
            ask(table, request.tail(to), traits);
            if !traits.asked {
                table.unask(request.tail(to));
            }
        }
    }
    for (part, traits) in stayed.into_iter().filter(|(_, traits)| traits.asked) {
        ask(table, part, traits);
    }
}

/// Does it mapping by mapping.
fn by_hand(table: &mut Table, request: Request, traits: Traits) -> Answer {
    let Request { old, pages, flags, .. } = request;
    if flags & (FIXED | DONTUNMAP) == 0 && !request.shrinks() {
        if map_behind(request.tail(old.start), traits) {
            moved(table, request, old.start);
            return old.start.0 as Answer;
        }
        if flags & MAYMOVE == 0 {
            return refuse(libc::ENOMEM);
        }
    }
    if !leave_pool(table, request.kept()) {
        return refuse(libc::ENOMEM);
    }
    let place = reserve(request);
    if raw::error(place).is_some() {
        return place;
    }
    let there = PageRange { start: HostVirt(place as u64), pages };
    if flags & FIXED != 0 {
        // What lay there is gone from here on, as with the kernel, also if the rest fails.
        table.forget(there);
    }
    if !move_all(request.kept(), there.start) {
        unmap(there);
        return refuse(libc::ENOMEM);
    }
    let tail = request.tail(there.start);
    if tail.pages > 0 && raw::error(map_fresh(tail, traits)).is_some() {
        move_all(PageRange { pages: old.pages, ..there }, old.start);
        unmap(there);
        return refuse(libc::ENOMEM);
    }
    if pages < old.pages {
        unmap(PageRange { start: old.start.add_pages(pages), pages: old.pages - pages });
    }
    if flags & DONTUNMAP != 0 {
        table.known(old).into_iter().for_each(|(part, traits)| {
            map_fresh(part, traits);
        });
    }
    if traits.shut & Shut::Locked as u8 != 0 {
        // SAFETY: locking changes no contents.
        unsafe { raw::call(libc::SYS_mlock2, [place as usize, bytes(there), 1, 0, 0, 0]) };
    }
    moved(table, request, there.start);
    place
}

/// Fresh memory where nothing lies.
fn map_behind(tail: PageRange, traits: Traits) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let start = tail.start.0 as usize;
    // SAFETY: maps only where nothing is mapped.
    let mapped = unsafe {
        raw::call(libc::SYS_mmap, [start, bytes(tail), usize::from(traits.access), flags as usize, usize::MAX, 0])
    };
    if raw::error(mapped).is_some() {
        return false;
    }
    if mapped as usize != start {
        // A kernel that does not know the flag took the address for a hint.
        unmap(PageRange { start: HostVirt(mapped as u64), ..tail });
        return false;
    }
    give_advice(tail, traits);
    true
}

/// Addresses for the moved pages, mapped such that nobody else is given them.
fn reserve(request: Request) -> Answer {
    let fixed = if request.flags & FIXED != 0 { libc::MAP_FIXED } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    let at = if fixed != 0 { request.to } else { 0 };
    let length = (request.pages as usize).saturating_mul(PAGE_BYTES);
    // SAFETY: replaces what lies there only where the program asked for that.
    unsafe { raw::call(libc::SYS_mmap, [at, length, libc::PROT_NONE as usize, flags as usize, usize::MAX, 0]) }
}

/// Moves the mappings of a range one by one. All or, as far as it lies with us, nothing.
fn move_all(from: PageRange, to: HostVirt) -> bool {
    let Some(mappings) = maps::mappings(from, false) else { return false };
    let there = |at: HostVirt| HostVirt(to.0 + (at.0 - from.start.0));
    for (done, mapping) in mappings.iter().enumerate() {
        if !move_one(mapping.range, there(mapping.range.start)) {
            for moved in mappings.iter().take(done) {
                // The old place has been empty only since the program's call began, which has not returned.
                move_one(PageRange { start: there(moved.range.start), ..moved.range }, moved.range.start);
            }
            return false;
        }
    }
    true
}

fn move_one(from: PageRange, to: HostVirt) -> bool {
    let arguments = [from.start.0 as usize, bytes(from), bytes(from), MAYMOVE | FIXED, to.0 as usize, 0];
    let _moving = Moving::announce(from.start);
    // SAFETY: the program wants the pages moved, and the place is reserved for them or was theirs.
    let answer = unsafe { raw::call(libc::SYS_mremap, arguments) };
    raw::error(answer).is_none()
}

fn unmap(range: PageRange) {
    // SAFETY: what the program wants unmapped, or a place that was reserved here.
    unsafe { raw::call(libc::SYS_munmap, [range.start.0 as usize, bytes(range), 0, 0, 0, 0]) };
}
