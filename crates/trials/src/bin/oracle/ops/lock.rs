//! Locking of memory, which changes no contents, and keeps pages from being discarded.

use super::{Done, Outcome, SPLITS, judge};
use crate::plot::{Access, traits};
use crate::sys::{self, Way};
use crate::worker::{UNLOCKS, Worker};
use std::ffi::c_long;
use std::sync::atomic::Ordering::SeqCst;

const MLOCK_ONFAULT: usize = 1;

/// Makes one of the locking calls on pages of a plot.
fn call(worker: &Worker<'_>, at: usize, way: Way, (from, pages): (usize, usize), number: c_long) -> sys::Answer {
    let (start, length) = worker.plots[at].range(from, pages);
    // SAFETY: memory of this thread's own; no contents change.
    unsafe { sys::call(way, number, [start, length, MLOCK_ONFAULT, 0, 0, 0]) }
}

pub fn lock(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let (from, pages) = worker.part(at);
    // The kernel brings pages that it locks into memory. If it may not read them, it answers an error, and locks them
    // nevertheless.
    let pages = worker.plots[at].usable(from, pages, Access::Read);
    if pages == 0 {
        return Ok(Done::NotNow);
    }
    locked(worker, at, way, (from, pages), ("mlock", libc::SYS_mlock, traits::LOCKED))
}

pub fn lock_on_fault(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let part = worker.part(at);
    locked(worker, at, way, part, ("mlock2", libc::SYS_mlock2, traits::LOCKED | traits::ON_FAULT))
}

fn locked(
    worker: &mut Worker<'_>,
    at: usize,
    way: Way,
    (from, pages): (usize, usize),
    (name, number, becomes): (&'static str, c_long, u16),
) -> Outcome {
    worker.note(at, name, way, (from, pages), 0);
    let answer = call(worker, at, way, (from, pages), number);
    let done = judge(name, from, answer, 0, &[libc::ENOMEM, libc::EPERM, libc::EAGAIN])?;
    if matches!(done, Done::Refused(_)) {
        worker.give_up(at);
        return Ok(done);
    }
    let parts = worker.plots[at].part_mut(from, pages).iter_mut();
    parts.for_each(|page| page.traits = page.traits & !traits::ON_FAULT | becomes);
    worker.check(at, from, pages)?;
    Ok(done)
}

pub fn unlock(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let (from, pages) = if worker.random.one_in(2) { (0, worker.plots[at].len()) } else { worker.part(at) };
    worker.note(at, "munlock", way, (from, pages), 0);
    let answer = call(worker, at, way, (from, pages), libc::SYS_munlock);
    let done = judge("munlock", from, answer, 0, SPLITS)?;
    if matches!(done, Done::Refused(_)) {
        worker.give_up(at);
        return Ok(done);
    }
    let parts = worker.plots[at].part_mut(from, pages).iter_mut();
    parts.for_each(|page| page.traits &= !(traits::LOCKED | traits::ON_FAULT));
    Ok(done)
}

/// Locks all memory of the process, and unlocks it. No other thread is in a step meanwhile. Afterwards none of the
/// other threads' locks is left either.
pub fn lock_all(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let flags = libc::MCL_CURRENT | if worker.random.one_in(2) { libc::MCL_ONFAULT } else { 0 };
    let pages = worker.plots[at].len();
    worker.note(at, "mlockall", way, (0, pages), flags as usize);
    // SAFETY: changes no contents.
    let answer = unsafe { sys::call(way, libc::SYS_mlockall, [flags as usize, 0, 0, 0, 0, 0]) };
    let tolerated = [libc::ENOMEM, libc::EPERM, libc::EAGAIN];
    let done = judge("mlockall", 0, answer, 0, &tolerated)?;
    worker.check(at, 0, pages)?;
    // SAFETY: changes no contents.
    let answer = unsafe { sys::call(way, libc::SYS_munlockall, [0; 6]) };
    judge("munlockall", 0, answer, 0, SPLITS)?;
    let unlocks = UNLOCKS.fetch_add(1, SeqCst) + 1;
    worker.plots[at].unlocks = unlocks;
    worker.plots[at].pages.iter_mut().for_each(|page| page.traits &= !(traits::LOCKED | traits::ON_FAULT));
    Ok(done)
}
