//! Mapping and unmapping.

use super::{Done, Outcome, SPLITS, judge, map};
use crate::plot::{Access, Kind, Page, Plot};
use crate::sys::{self, Way};
use crate::tally;
use crate::worker::{UNLOCKS, Worker};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

/// Unmaps a plot and maps another one in its place.
pub fn renew(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    if worker.plots[at].kind == Kind::Heap {
        return Ok(Done::NotNow);
    }
    let pages = worker.plots[at].len();
    worker.note(at, "munmap", way, (0, pages), 0);
    worker.replace(at, &[(0, pages)], way);
    Ok(Done::Yes)
}

/// Maps new memory over a part, in one call.
pub fn map_over(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    if worker.plots[at].kind == Kind::Heap {
        return Ok(Done::NotNow);
    }
    let (from, pages) = worker.part(at);
    let access = [Access::None, Access::Read, Access::Write, Access::Write][worker.random.below(4)];
    let populate = if worker.random.one_in(6) { libc::MAP_POPULATE } else { 0 };
    worker.note(at, "mmap MAP_FIXED", way, (from, pages), access.bits());
    let (start, _) = worker.plots[at].range(from, pages);
    let answer = map(way, start, pages, access, libc::MAP_FIXED | populate);
    let done = judge("mmap MAP_FIXED", from, answer, 0, SPLITS)?;
    if matches!(done, Done::Refused(_)) {
        worker.give_up(at);
        return Ok(done);
    }
    mapped_anew(worker, at, (from, pages), access);
    worker.check(at, from, pages)?;
    Ok(done)
}

/// Unmaps a part and maps new memory there. In between, another thread may map something in the hole.
pub fn unmap_part(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    if worker.plots[at].kind == Kind::Heap {
        return Ok(Done::NotNow);
    }
    let (from, pages) = worker.part(at);
    worker.note(at, "munmap, mmap", way, (from, pages), 0);
    let (start, length) = worker.plots[at].range(from, pages);
    // SAFETY: this thread's own memory, which it does not touch until there is memory again.
    let answer = unsafe { sys::call(way, libc::SYS_munmap, [start, length, 0, 0, 0, 0]) };
    let done = judge("munmap", from, answer, 0, SPLITS)?;
    if matches!(done, Done::Refused(_)) {
        worker.give_up(at);
        return Ok(done);
    }
    let answer = map(way, start, pages, Access::Write, libc::MAP_FIXED_NOREPLACE);
    let end = from + pages;
    let others = [(0, from), (end, worker.plots[at].len() - end)];
    let done = judge("mmap MAP_FIXED_NOREPLACE", from, answer, 0, &[libc::EEXIST, libc::ENOMEM])?;
    if matches!(done, Done::Refused(_)) {
        tally::GIVEN_UP.fetch_add(1, Relaxed);
        worker.replace(at, &others, Way::Libc);
        return Ok(done);
    }
    mapped_anew(worker, at, (from, pages), Access::Write);
    worker.check(at, from, pages)?;
    Ok(done)
}

/// Sets the model of pages to newly mapped ones.
fn mapped_anew(worker: &mut Worker<'_>, at: usize, (from, pages): (usize, usize), access: Access) {
    let plot = &mut worker.plots[at];
    let zero = |page: &mut Page| {
        page.zero();
        (page.access, page.traits) = (access, 0);
    };
    plot.part_mut(from, pages).iter_mut().for_each(zero);
    plot.pieced = pages < plot.len() || access != Access::Write;
    plot.unlocks = UNLOCKS.load(SeqCst);
    if !plot.pieced {
        plot.mark(0, &mut worker.random);
    }
}

/// A plot for the mapping that `mremap` left behind: zeros, with the access and the traits of the old pages, but not
/// locked.
pub fn left_behind(worker: &mut Worker<'_>, start: usize, like: Page, pages: usize) -> Plot {
    let mut plot = Plot::fresh(Kind::Mapping, start, 0, &mut worker.random);
    plot.extend(pages, like.access, like.traits & !(crate::plot::traits::LOCKED | crate::plot::traits::ON_FAULT));
    plot.pieced = true;
    plot.unlocks = UNLOCKS.load(SeqCst);
    plot
}
