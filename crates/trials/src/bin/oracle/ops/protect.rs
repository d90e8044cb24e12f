//! `mprotect`. Every check tries whether the protections hold (`senses`).

use super::{Done, Outcome, SPLITS, judge};
use crate::plot::Access;
use crate::sys::{self, Way};
use crate::worker::Worker;

pub fn protect(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let part = worker.part(at);
    let access = [Access::None, Access::Read, Access::Write, Access::Write][worker.random.below(4)];
    change(worker, at, way, part, access)
}

/// Makes all pages writable again.
pub fn unprotect(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let pages = worker.plots[at].len();
    change(worker, at, way, (0, pages), Access::Write)
}

fn change(worker: &mut Worker<'_>, at: usize, way: Way, (from, pages): (usize, usize), access: Access) -> Outcome {
    worker.note(at, "mprotect", way, (from, pages), access.bits());
    let (start, length) = worker.plots[at].range(from, pages);
    // SAFETY: memory of this thread's own, which the thread accesses only as the model allows.
    let answer = unsafe { sys::call(way, libc::SYS_mprotect, [start, length, access.bits(), 0, 0, 0]) };
    let done = judge("mprotect", from, answer, 0, SPLITS)?;
    if matches!(done, Done::Refused(_)) {
        worker.give_up(at);
        return Ok(done);
    }
    worker.plots[at].part_mut(from, pages).iter_mut().for_each(|page| page.access = access);
    worker.check(at, from, pages)?;
    Ok(done)
}
