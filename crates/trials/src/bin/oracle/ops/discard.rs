//! Operations that give up the contents of pages.

use super::{Done, Outcome, judge};
use crate::plot::{Page, traits};
use crate::sys::{self, Answer, Way};
use crate::verdict::Wrong;
use crate::worker::Worker;
use std::sync::OnceLock;

const MADV_DONTNEED_LOCKED: i32 = 24;
const MADV_GUARD_INSTALL: i32 = 102;
const MADV_GUARD_REMOVE: i32 = 103;
/// A pidfd of this process, for kernels without `PIDFD_SELF_PROCESS`.
static OWN_PIDFD: OnceLock<i32> = OnceLock::new();

/// Makes an `madvise` call on pages of a plot.
pub fn madvise(worker: &Worker<'_>, at: usize, way: Way, (from, pages): (usize, usize), advice: i32) -> Answer {
    let (start, length) = worker.plots[at].range(from, pages);
    // SAFETY: memory of this thread's own, to whose contents nobody has a plain reference.
    unsafe { sys::call(way, libc::SYS_madvise, [start, length, advice as usize, 0, 0, 0]) }
}

/// Number of pages of a part that come before its first locked page.
fn unlocked(worker: &Worker<'_>, at: usize, (from, pages): (usize, usize)) -> usize {
    worker.plots[at].part(from, pages).iter().take_while(|page| !page.has(traits::LOCKED)).count()
}

/// Discards a part with one call. The kernel discards the pages before the first locked one, and answers an error for
/// that page.
fn discard(
    worker: &mut Worker<'_>,
    at: usize,
    way: Way,
    (from, pages): (usize, usize),
    (name, advice): (&'static str, i32),
    becomes: fn(&mut Page),
) -> Outcome {
    worker.note(at, name, way, (from, pages), 0);
    worker.check(at, from, pages)?;
    let unlocked = unlocked(worker, at, (from, pages));
    let expected = if unlocked < pages { libc::EINVAL } else { 0 };
    let answer = madvise(worker, at, way, (from, pages), advice);
    // Called directly, the kernel frees nothing in a mapping of a file, as folded pages are. It may still have freed
    // the pages before.
    let frees = advice == libc::MADV_FREE && matches!(way, Way::Raw);
    let done = judge(name, from, answer, expected, if frees { &[libc::EINVAL] } else { &[] })?;
    worker.plots[at].part_mut(from, unlocked).iter_mut().for_each(becomes);
    worker.check(at, from, pages)?;
    Ok(done)
}

/// A randomly picked part of a plot, up to its first locked page; `None` if that is its first page.
pub fn discardable(worker: &mut Worker<'_>, at: usize) -> Option<(usize, usize)> {
    let (from, pages) = worker.part(at);
    let unlocked = unlocked(worker, at, (from, pages));
    (unlocked > 0).then_some((from, unlocked))
}

pub fn dontneed(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let Some(part) = discardable(worker, at) else { return Ok(Done::NotNow) };
    discard(worker, at, way, part, ("MADV_DONTNEED", libc::MADV_DONTNEED), Page::zero)
}

pub fn free(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let Some(part) = discardable(worker, at) else { return Ok(Done::NotNow) };
    discard(worker, at, way, part, ("MADV_FREE", libc::MADV_FREE), Page::free)
}

/// Discards a part in which some pages may be locked.
pub fn across_locks(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let part = worker.part(at);
    if worker.random.one_in(2) {
        return discard(worker, at, way, part, ("MADV_DONTNEED", libc::MADV_DONTNEED), Page::zero);
    }
    discard(worker, at, way, part, ("MADV_FREE", libc::MADV_FREE), Page::free)
}

/// Discards a part with its locked pages (`MADV_DONTNEED_LOCKED`).
pub fn dontneed_locked(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let (from, pages) = worker.part(at);
    worker.note(at, "MADV_DONTNEED_LOCKED", way, (from, pages), 0);
    let answer = madvise(worker, at, way, (from, pages), MADV_DONTNEED_LOCKED);
    let done = judge("MADV_DONTNEED_LOCKED", from, answer, 0, &[])?;
    worker.plots[at].part_mut(from, pages).iter_mut().for_each(Page::zero);
    worker.check(at, from, pages)?;
    Ok(done)
}

fn own_pidfd() -> i32 {
    *OWN_PIDFD.get_or_init(|| {
        // SAFETY: takes a number and flags, and returns a descriptor.
        let fd = unsafe { sys::raw(libc::SYS_pidfd_open, [sys::own_pid(), 0, 0, 0, 0, 0]) };
        fd.map_or(-1, |fd| fd as i32)
    })
}

/// Advises this process itself by `process_madvise`, which kernels allow from 6.13 on.
pub fn process_madvise(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let Some((from, pages)) = discardable(worker, at) else { return Ok(Done::NotNow) };
    worker.note(at, "process_madvise", way, (from, pages), 0);
    let (start, length) = worker.plots[at].range(from, pages);
    let range = libc::iovec { iov_base: start as *mut _, iov_len: length };
    let arguments = [own_pidfd() as usize, &raw const range as usize, 1, libc::MADV_DONTNEED as usize, 0, 0];
    // SAFETY: memory of this thread's own, to whose contents nobody has a plain reference.
    let answer = unsafe { sys::call(way, libc::SYS_process_madvise, arguments) };
    if answer.is_ok_and(|advised| advised < length) {
        return Err(Wrong::Answer { call: "process_madvise (short)", page: from, expected: 0, found: 0 });
    }
    let done = judge("process_madvise", from, answer, 0, &[libc::EPERM, libc::EINVAL, libc::ENOSYS])?;
    if matches!(done, Done::Yes) {
        worker.plots[at].part_mut(from, pages).iter_mut().for_each(Page::zero);
        worker.check(at, from, pages)?;
    }
    Ok(done)
}

/// Installs guards on pages, which then cannot be used, and removes the guards, which leaves zeros.
pub fn guard(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let Some((from, pages)) = discardable(worker, at) else { return Ok(Done::NotNow) };
    worker.note(at, "guard", way, (from, pages), 0);
    let answer = madvise(worker, at, way, (from, pages), MADV_GUARD_INSTALL);
    // Kernels before 6.13 lack this advice.
    let done = judge("MADV_GUARD_INSTALL", from, answer, 0, &[libc::EINVAL])?;
    if matches!(done, Done::Yes) {
        worker.plots[at].part_mut(from, pages).iter_mut().for_each(Page::zero);
        worker.senses.check_guarded(&worker.plots[at], from, pages, &mut worker.random)?;
        let answer = madvise(worker, at, way, (from, pages), MADV_GUARD_REMOVE);
        judge("MADV_GUARD_REMOVE", from, answer, 0, &[])?;
        worker.check(at, from, pages)?;
    }
    Ok(done)
}
