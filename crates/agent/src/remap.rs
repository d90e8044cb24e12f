//! `mremap`, for memory that the program sees as one mapping while the kernel may see several, because pages of it were
//! folded or are watched. The kernel refuses to enlarge several mappings. It refuses to move them, or (from Linux 6.17
//! on) moves some of them and then refuses the rest. And a mapping of the pool must not grow, or it would show more of
//! the pool where the program expects zeros.
//!
//! ```text
//!   unknown to the table, shrinks in place, or one mapping to the kernel too --> made by the kernel, or refused whole
//!      |
//!      v  several mappings
//!   one mapping to the program, or a plain move to a given place? -- no --> EFAULT
//!      |
//!      v  grows, and there is room behind it: fresh memory there ------------------> table
//!      |  no room, and may move, or has to
//!      v
//!   pages that map the pool become private: their slots are released at the addresses that the worker knows
//!      |
//!      v
//!   reserve the new place (memory that lay there is gone, as with the kernel)
//!      |  move mapping by mapping --- one fails: move the others back until that is done, ENOMEM
//!      v
//!   fresh memory behind it; fresh memory at the old place if that is to stay -------> table
//! ```

use crate::calls::{ask, between, bytes, give_advice, map_fresh, range, refuse};
use crate::follow::Moving;
use crate::maps::{self, Mapping};
use crate::raw::{self, Answer};
use crate::table::{Advice, Guard, READ_WRITE, Table, Traits};
use act::{AGAIN, move_mapping_over};
use page::{HostVirt, PAGE_BYTES, PageRange, PageSet};
use rustix::io::Errno;

const MAYMOVE: usize = libc::MREMAP_MAYMOVE as usize;
const FIXED: usize = libc::MREMAP_FIXED as usize;
const DONTUNMAP: usize = libc::MREMAP_DONTUNMAP as usize;

/// A request of the program to resize or move memory.
#[derive(Clone, Copy)]
struct Request {
    old: PageRange,
    pages: u64,
    flags: usize,
    /// The new address, with [`FIXED`].
    to: usize,
}

impl Request {
    fn shrinks(self) -> bool {
        self.pages <= self.old.pages
    }

    /// The pages that the request keeps, at their old addresses.
    fn kept(self) -> PageRange {
        PageRange { pages: self.old.pages.min(self.pages), ..self.old }
    }

    /// The pages by which the memory grows, if it begins at `start`.
    fn tail(self, start: HostVirt) -> PageRange {
        PageRange { start: start.add_pages(self.old.pages), pages: self.pages.saturating_sub(self.old.pages) }
    }
}

/// Serves a program's `mremap` with these arguments: old address, old length in bytes, new length in bytes, flags, new
/// address. `pass` makes the system call unchanged. `enter` locks the table for the old range; if it returns `None`,
/// the call is only passed on.
pub fn serve(
    arguments: [usize; 5],
    enter: impl FnOnce(PageRange) -> Option<Guard>,
    pass: impl Fn() -> Answer,
) -> Answer {
    let [at, old_length, new_length, flags, to] = arguments;
    match (range(at, old_length), range(at, new_length)) {
        (Some(old), Some(new)) => match enter(old) {
            Some(mut table) => remap(&mut table, Request { old, pages: new.pages, flags, to }, pass),
            None => pass(),
        },
        // Requests that the kernel refuses, and the one with an old length of 0, which duplicates a shared mapping.
        _ => pass(),
    }
}

fn remap(table: &mut Table, request: Request, pass: impl Fn() -> Answer) -> Answer {
    let Request { old, flags, .. } = request;
    let stays = flags & (FIXED | DONTUNMAP) == 0;
    let pooled = !table.pooled_pages(old).is_empty();
    // Pages that are kept do not move here: the kernel only unmaps the others.
    let simple = !table.touches(old) || request.shrinks() && stays || !pooled && maps::is_one(old);
    if simple || !are_sensible(request) {
        let moving = Moving::announce(old.start);
        let answer = pass();
        drop(moving);
        if raw::error(answer).is_none() {
            moved(table, request, HostVirt(answer as u64));
        } else {
            // The kernel unmaps what lies at the new address, and pages that are not kept, before it finds that it
            // cannot move.
            forget_unmapped(table, old);
            if flags & FIXED != 0 {
                forget_unmapped(table, PageRange { start: HostVirt(request.to as u64), pages: request.pages });
            }
        }
        return answer;
    }
    let kept = request.kept();
    if one_to_the_program(table, kept).is_none() {
        learn_again(table, kept);
    }
    // From Linux 6.17 on, the kernel moves several mappings at once, but only to a given place and with their size
    // unchanged.
    let is_plain = || flags & FIXED != 0 && request.pages == old.pages && is_mapped(kept);
    let traits = one_to_the_program(table, kept).or_else(|| one_with_unknown_parts(table, kept));
    match traits.or_else(|| table.known(kept).first().map(|(_, traits)| *traits).filter(|_| is_plain())) {
        Some(traits) => by_hand(table, request, traits),
        None => refuse(libc::EFAULT),
    }
}

/// Gives pages that map slots private memory before they are moved: the worker knows pages by their addresses. Returns
/// whether it succeeded.
fn leave_pool(table: &mut Table, range: PageRange) -> bool {
    let runs = table.slot_runs(range).into_iter();
    let runs = runs.map(|run| PageRange { start: run.start, pages: run.pages.into() });
    // A run of consecutive slots may lie in memory of different protection.
    runs.flat_map(|run| table.known(run)).collect::<Vec<_>>().into_iter().all(|(pages, traits)| {
        // The kernel gives pages private copies only in memory that may be written.
        let shut = READ_WRITE != traits.access;
        let done = (!shut || protect(pages, READ_WRITE)) && break_pages(pages);
        if shut {
            protect(pages, traits.access);
        }
        if done {
            table.set_broken(pages);
        }
        done
    })
}

fn protect(range: PageRange, access: u8) -> bool {
    let arguments = [range.start.0 as usize, bytes(range), usize::from(access), 0, 0, 0];
    // SAFETY: the range is memory of the program, which is about to move it, so none of its threads uses it meanwhile.
    // The caller restores the protection.
    let answer = unsafe { raw::call(libc::SYS_mprotect, arguments) };
    raw::error(answer).is_none()
}

fn break_pages(range: PageRange) -> bool {
    let arguments = [range.start.0 as usize, bytes(range), libc::MADV_POPULATE_WRITE as usize, 0, 0, 0];
    // SAFETY: populating for writing changes no contents; it makes the kernel break the mapping of the pool.
    let answer = unsafe { raw::call(libc::SYS_madvise, arguments) };
    raw::error(answer).is_none()
}

/// Forgets the parts of a range that are not mapped any more.
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

/// Whether the kernel would accept these flags and addresses if the memory were one mapping.
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

/// Notes the kernel's protection and advice of a range in the table: the program may have changed them in a way that
/// bypasses the hooks.
fn learn_again(table: &mut Table, range: PageRange) {
    for mapping in &maps::mappings(range, true).unwrap_or_default() {
        table.protect(mapping.range, mapping.access);
        table.advise(mapping.range, |advice| {
            // Mappings of slots have no advice on huge pages, and are accounted for in another way than anonymous
            // memory.
            let there = mapping.advice;
            *advice = if mapping.anonymous {
                there
            } else {
                Advice {
                    dont_fork: there.dont_fork,
                    dont_dump: there.dont_dump,
                    huge: there.huge.or(advice.huge),
                    ..*advice
                }
            };
        });
    }
}

/// Whether two parts of memory may be parts of one mapping of the program. Advice on core dumps and huge pages does not
/// count: the program may have changed it in a way that bypasses the hooks, and memory that has taken the place of a
/// part has the advice of before. No program is hurt by a move that the kernel would have refused.
fn are_alike(one: &Traits, other: &Traits) -> bool {
    one.access == other.access && one.advice.dont_fork == other.advice.dont_fork
}

/// The traits of a range that was one mapping of the program before pages of it were folded; `None` if it was not.
fn one_to_the_program(table: &Table, range: PageRange) -> Option<Traits> {
    let known = table.known(range);
    let whole: u64 = known.iter().map(|(part, _)| part.pages).sum();
    let (_, traits) = *known.first()?;
    // Parts may differ in whether they are enrolled: the program may have enrolled a part of a mapping.
    (whole == range.pages && known.iter().all(|(_, other)| are_alike(&traits, other))).then_some(traits)
}

/// As [`one_to_the_program`], if the table does not know parts of the range, because the program mapped them in a way
/// that bypasses the hooks. The kernel sees several mappings there, because only the known parts are watched.
fn one_with_unknown_parts(table: &Table, range: PageRange) -> Option<Traits> {
    let mappings = maps::mappings(range, true)?;
    let mapped: u64 = mappings.iter().map(|mapping| mapping.range.pages).sum();
    let is_known = |mapping: &&Mapping| {
        table.known(mapping.range).iter().map(|(part, _)| part.pages).sum::<u64>() == mapping.range.pages
    };
    let unknown: Vec<_> = mappings.iter().filter(|mapping| !is_known(mapping)).collect();
    let of = |mapping: &&Mapping| Traits { access: mapping.access, advice: mapping.advice, ..Traits::default() };
    let known = table.known(range);
    let mut all = known.iter().map(|(_, traits)| *traits).chain(unknown.iter().map(of));
    let first = all.next()?;
    let alike = all.all(|other| are_alike(&first, &other));
    (alike && mapped == range.pages && unknown.iter().all(|mapping| mapping.anonymous)).then_some(first)
}

/// The parts of a range that are anonymous memory, known to the table or not, with their traits.
fn all_parts(table: &Table, range: PageRange) -> Vec<(PageRange, Traits)> {
    let mut parts = table.known(range);
    let mut known = PageSet::new();
    parts.iter().for_each(|(part, _)| known.insert(*part));
    if !known.missing(range).is_empty() {
        // Mappings of files are left out: with `MREMAP_DONTUNMAP`, the kernel itself leaves those at the old place.
        let mappings = maps::mappings(range, true).unwrap_or_default().into_iter().filter(|mapping| mapping.anonymous);
        for Mapping { range: mapped, access, advice, .. } in mappings {
            let traits = Traits { access, advice, ..Traits::default() };
            parts.extend(known.missing(mapped).into_iter().map(|part| (part, traits)));
        }
    }
    parts
}

/// Whether all of the range is mapped.
fn is_mapped(range: PageRange) -> bool {
    let mappings = maps::mappings(range, false).unwrap_or_default();
    mappings.iter().map(|mapping| mapping.range.pages).sum::<u64>() == range.pages
}

/// Notes in the table that a request was carried out.
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
        // Memory that is no longer to be folded is noted, too, so that the table knows one mapping of the program as a
        // whole.
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

/// Carries out the request mapping by mapping.
fn by_hand(table: &mut Table, request: Request, traits: Traits) -> Answer {
    let Request { old, pages, flags, .. } = request;
    if flags & (FIXED | DONTUNMAP) == 0 && !request.shrinks() {
        if map_behind(request.tail(old.start), traits) {
            lock_like(traits, request.tail(old.start));
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
    let stays = (flags & DONTUNMAP != 0).then(|| all_parts(table, old));
    let place = reserve(request);
    if raw::error(place).is_some() {
        return place;
    }
    let there = PageRange { start: HostVirt(place as u64), pages };
    if flags & FIXED != 0 {
        // Memory that lay there is gone from here on, even if the call fails later, as with the kernel.
        table.forget(there);
    }
    if !move_all(request.kept(), there) {
        return refuse(libc::ENOMEM);
    }
    let tail = request.tail(there.start);
    if tail.pages > 0 && raw::error(map_fresh(tail, traits)).is_some() {
        unmap(tail);
        for moved in &maps::mappings(PageRange { pages: old.pages, ..there }, false).unwrap_or_default() {
            let at = moved.range.start.0 - there.start.0;
            move_back(moved.range, HostVirt(old.start.0 + at));
        }
        return refuse(libc::ENOMEM);
    }
    match stays {
        None => unmap(old),
        Some(parts) => {
            for (part, traits) in parts {
                map_fresh(part, traits);
            }
        }
    }
    lock_like(traits, there);
    moved(table, request, there.start);
    place
}

/// Locks a range if these traits say that the program has locked its memory.
fn lock_like(traits: Traits, range: PageRange) {
    if traits.is_locked() {
        // SAFETY: locking changes no contents.
        unsafe { raw::call(libc::SYS_mlock2, [range.start.0 as usize, bytes(range), 1, 0, 0, 0]) };
    }
}

/// Maps fresh memory at `tail`, if nothing is mapped there. Returns whether it did.
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
        // A kernel that does not know the flag has taken the address as a hint.
        unmap(PageRange { start: HostVirt(mapped as u64), ..tail });
        return false;
    }
    give_advice(tail, traits);
    true
}

/// Reserves addresses for the moved pages, so that the kernel gives them to no other mapping.
fn reserve(request: Request) -> Answer {
    let fixed = if request.flags & FIXED != 0 { libc::MAP_FIXED } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    let at = if fixed != 0 { request.to } else { 0 };
    let length = (request.pages as usize).saturating_mul(PAGE_BYTES);
    // SAFETY: replaces what lies there only where the program asked for that.
    unsafe { raw::call(libc::SYS_mmap, [at, length, libc::PROT_NONE as usize, flags as usize, usize::MAX, 0]) }
}

/// Moves the mappings of a range one by one to a reserved place. If one cannot be moved, none is, and the place is
/// unmapped. Each leaves an empty mapping behind (`MREMAP_DONTUNMAP`): otherwise another thread could be given
/// addresses there before this call is done.
fn move_all(from: PageRange, place: PageRange) -> bool {
    let there = |at: HostVirt| HostVirt(place.start.0 + (at.0 - from.start.0));
    let Some(mappings) = maps::mappings(from, false) else {
        unmap(place);
        return false;
    };
    for (done, mapping) in mappings.iter().enumerate() {
        if !move_one(mapping.range, there(mapping.range.start)) {
            // Each mapping that was moved has left another one behind. Unmapping the rest of the place makes room,
            // within the limit of mappings, for moving them back.
            unmap(between(there(mapping.range.start), place.end()));
            for moved in mappings.iter().take(done) {
                move_back(PageRange { start: there(moved.range.start), ..moved.range }, moved.range.start);
            }
            return false;
        }
    }
    true
}

fn move_one(from: PageRange, to: HostVirt) -> bool {
    let move_by = |flags: usize| {
        let arguments = [from.start.0 as usize, bytes(from), bytes(from), flags, to.0 as usize, 0];
        // SAFETY: the program wants the pages moved, and the new place is reserved for them, or was theirs and is
        // empty.
        raw::error(unsafe { raw::call(libc::SYS_mremap, arguments) })
    };
    let _moving = Moving::announce(from.start);
    // A mapping of a device refuses `MREMAP_DONTUNMAP`.
    let stays = move_by(MAYMOVE | FIXED | DONTUNMAP);
    stays.is_none() || stays == Some(libc::EINVAL) && move_by(MAYMOVE | FIXED).is_none()
}

/// Moves a mapping back over the empty one that it has left behind. This is repeated until it succeeds: the mapping
/// holds the program's memory.
fn move_back(from: PageRange, to: HostVirt) {
    let _moving = Moving::announce(from.start);
    // SAFETY: the place was theirs and is empty.
    while unsafe { move_mapping_over(from, to) } == Err(Errno::NOMEM) {
        std::thread::sleep(AGAIN);
    }
}

fn unmap(range: PageRange) {
    // SAFETY: the program wants this range unmapped, or this module has reserved it.
    unsafe { raw::call(libc::SYS_munmap, [range.start.0 as usize, bytes(range), 0, 0, 0, 0]) };
}
