//! `mremap` of memory that the program knows as one mapping. The kernel may refuse only for want of memory or of
//! mappings.

use super::mapping::left_behind;
use super::{Done, Outcome, judge, map};
use crate::plot::{Access, Kind, Plot, traits};
use crate::sys::{self, Answer, Way};
use crate::verdict::Wrong;
use crate::worker::{Worker, bytes};

const SHORT: &[i32] = &[libc::ENOMEM, libc::EAGAIN];

/// Errors of `mremap` that are right. To the kernel, memory with folded pages is several mappings, and a direct call,
/// which the agent does not see, cannot move several at once.
const fn may_be(way: Way) -> &'static [i32] {
    if matches!(way, Way::Raw) { &[libc::ENOMEM, libc::EAGAIN, libc::EFAULT] } else { SHORT }
}

/// Calls `mremap` on pages of a plot, for a new size of `pages` pages. If `flags` say so, they move to the address
/// `to`.
fn mremap(
    worker: &Worker<'_>,
    at: usize,
    way: Way,
    part: (usize, usize),
    pages: usize,
    flags: i32,
    to: usize,
) -> Answer {
    let (start, length) = worker.plots[at].range(part.0, part.1);
    // SAFETY: this thread's own memory, and afterwards the model follows the answer; `to` was reserved for this.
    unsafe { sys::call(way, libc::SYS_mremap, [start, length, bytes(pages), flags as usize, to, 0]) }
}

fn is_movable(plot: &Plot) -> bool {
    plot.kind == Kind::Mapping && plot.is_one(0, plot.len())
}

/// Whether one of the pages is locked. Such pages are not moved with `MREMAP_DONTUNMAP`: the kernel then unlocks the
/// whole mapping that the part belongs to, which may extend beyond this plot.
fn is_locked(plot: &Plot, from: usize, pages: usize) -> bool {
    plot.part(from, pages).iter().any(|page| page.has(traits::LOCKED))
}

/// Maps memory to which pages are going to be moved, so that no other thread gets the place.
fn reserve(worker: &mut Worker<'_>, way: Way, pages: usize) -> Option<usize> {
    let access = if worker.random.one_in(2) { Access::None } else { Access::Write };
    map(way, 0, pages, access, 0).ok()
}

/// Unmaps memory that is no longer needed.
fn unmap(way: Way, start: usize, pages: usize) {
    // SAFETY: a mapping of this thread's own, in which no plot lies.
    let _ = unsafe { sys::call(way, libc::SYS_munmap, [start, bytes(pages), 0, 0, 0, 0]) };
}

/// The model of a plot that was moved as a whole. Additional pages are like the last one.
fn moved(plot: &mut Plot, start: usize, pages: usize) {
    plot.start = start;
    let (old, last) = (plot.len(), plot.pages[plot.len() - 1]);
    plot.pages.truncate(pages);
    plot.extend(pages.saturating_sub(old), last.access, last.traits);
}

/// Grows or shrinks the plot.
pub fn resize(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let old = worker.plots[at].len();
    let pages = 1 + worker.random.below(worker.plan.most_pages);
    let may_move = !worker.random.one_in(3);
    if worker.plots[at].kind == Kind::Heap || pages > old && !is_movable(&worker.plots[at]) {
        return Ok(Done::NotNow);
    }
    let (flags, name) = if may_move { (libc::MREMAP_MAYMOVE, "mremap MAYMOVE") } else { (0, "mremap in place") };
    worker.note(at, name, way, (0, old), pages);
    worker.check(at, 0, old)?;
    let mut answer = mremap(worker, at, way, (0, old), pages, flags, 0);
    if answer == Err(libc::ENOMEM) && !may_move {
        // There is no room behind the plot: move it, so that the run does not depend on the layout of memory.
        answer = mremap(worker, at, way, (0, old), pages, libc::MREMAP_MAYMOVE, 0);
    }
    let done = judge(name, 0, answer, 0, may_be(way))?;
    if matches!((&done, way), (Done::Refused(_), Way::Raw)) {
        // The kernel may have moved a part of the plot only: the plot is given up.
        worker.replace(at, &[], Way::Libc);
        return Ok(done);
    }
    if let Ok(start) = answer {
        moved(&mut worker.plots[at], start, pages);
    }
    let pages = worker.plots[at].len();
    worker.check(at, 0, pages)?;
    Ok(done)
}

/// Moves the whole plot to a given place, at the same or another size.
pub fn to_reserved(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let old = worker.plots[at].len();
    let pages = if worker.random.one_in(3) { 1 + worker.random.below(worker.plan.most_pages) } else { old };
    if !is_movable(&worker.plots[at]) {
        return Ok(Done::NotNow);
    }
    let Some(to) = reserve(worker, way, pages) else { return Ok(Done::Refused(libc::ENOMEM)) };
    worker.note(at, "mremap MAYMOVE|FIXED", way, (0, old), to);
    worker.check(at, 0, old)?;
    let answer = mremap(worker, at, way, (0, old), pages, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, to);
    let done = judge("mremap FIXED", 0, answer, 0, may_be(way))?;
    if matches!(done, Done::Refused(_)) {
        // After a failure it is unknown which parts of the two places are mapped.
        worker.replace(at, &[], Way::Libc);
        return Ok(done);
    }
    moved(&mut worker.plots[at], arrived(answer, to)?, pages);
    worker.check(at, 0, pages)?;
    Ok(done)
}

fn arrived(answer: Answer, to: usize) -> Result<usize, Wrong> {
    let start = answer.unwrap_or(0);
    let elsewhere = Wrong::Answer { call: "mremap FIXED (to another place)", page: 0, expected: 0, found: 0 };
    if start == to { Ok(to) } else { Err(elsewhere) }
}

/// Moves the contents, and leaves a mapping of zeros behind, which sometimes becomes a plot.
pub fn leave_behind(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let pages = worker.plots[at].len();
    if !is_movable(&worker.plots[at]) || is_locked(&worker.plots[at], 0, pages) {
        return Ok(Done::NotNow);
    }
    let mut flags = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
    let to = if worker.random.one_in(2) { reserve(worker, way, pages) } else { None };
    flags |= if to.is_some() { libc::MREMAP_FIXED } else { 0 };
    let (left, like) = (worker.plots[at].start, worker.plots[at].pages[0]);
    worker.note(at, "mremap DONTUNMAP", way, (0, pages), to.unwrap_or(0));
    worker.check(at, 0, pages)?;
    let answer = mremap(worker, at, way, (0, pages), pages, flags, to.unwrap_or(0));
    let done = judge("mremap DONTUNMAP", 0, answer, 0, may_be(way))?;
    if matches!(done, Done::Refused(_)) {
        worker.replace(at, &[], Way::Libc);
        return Ok(done);
    }
    let start = to.map_or(answer, Ok).unwrap_or(0);
    arrived(answer, start)?;
    moved(&mut worker.plots[at], start, pages);
    let empty = left_behind(worker, left, like, pages);
    worker.senses.check(&empty, 0, pages, &mut worker.random)?;
    let other = worker.random.below(worker.plots.len());
    if other != at && worker.plots[other].kind == Kind::Mapping && worker.random.one_in(2) {
        let old = std::mem::replace(&mut worker.plots[other], empty);
        unmap(way, old.start, old.len());
    } else {
        unmap(way, left, pages);
    }
    worker.check(at, 0, pages)?;
    Ok(done)
}

/// Moves a part elsewhere and puts a new mapping in its place; then moves it back over that mapping.
pub fn out_and_back(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let (from, pages) = worker.part(at);
    let plot = &worker.plots[at];
    if plot.kind == Kind::Heap || !plot.is_one(from, pages) || is_locked(plot, from, pages) {
        return Ok(Done::NotNow);
    }
    let Some(to) = reserve(worker, way, pages) else { return Ok(Done::Refused(libc::ENOMEM)) };
    worker.note(at, "mremap DONTUNMAP, and back", way, (from, pages), to);
    worker.check(at, from, pages)?;
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    let answer = mremap(worker, at, way, (from, pages), pages, flags | libc::MREMAP_DONTUNMAP, to);
    let done = judge("mremap of a part", from, answer, 0, may_be(way))?;
    if matches!(done, Done::Refused(_)) {
        worker.replace(at, &[], Way::Libc);
        return Ok(done);
    }
    arrived(answer, to)?;
    let (place, like) = (worker.plots[at].address(from), worker.plots[at].pages[from]);
    let empty = left_behind(worker, place, like, pages);
    worker.senses.check(&empty, 0, pages, &mut worker.random)?;
    let mut there = left_behind(worker, to, like, 0);
    there.pages.extend_from_slice(worker.plots[at].part(from, pages));
    worker.senses.check(&there, 0, pages, &mut worker.random)?;
    // SAFETY: both places are this thread's own; the target holds nothing.
    let answer =
        unsafe { sys::call(way, libc::SYS_mremap, [to, bytes(pages), bytes(pages), flags as usize, place, 0]) };
    worker.plots[at].pieced = true;
    if matches!(judge("mremap back", from, answer, 0, may_be(way))?, Done::Refused(_)) {
        worker.replace(at, &[], Way::Libc);
        return Ok(Done::Refused(libc::ENOMEM));
    }
    worker.check(at, from, pages)?;
    Ok(done)
}
