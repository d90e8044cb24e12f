//! Advice that changes no contents of the program's own; some of it decides what a child inherits.

use super::discard::madvise;
use super::{Done, Outcome, SPLITS, judge};
use crate::plot::{Access, Page, traits};
use crate::sys::Way;
use crate::worker::Worker;

const MADV_COLLAPSE: i32 = 25;

/// Advice that lasts: its name, its number, the traits of pages that it takes away, and those that it gives.
type Advice = (&'static str, i32, u16, u16);

const LASTING: [Advice; 10] = [
    ("MADV_HUGEPAGE", libc::MADV_HUGEPAGE, traits::NO_HUGE, traits::HUGE),
    ("MADV_NOHUGEPAGE", libc::MADV_NOHUGEPAGE, traits::HUGE, traits::NO_HUGE),
    ("MADV_DONTFORK", libc::MADV_DONTFORK, 0, traits::DONT_FORK),
    ("MADV_DOFORK", libc::MADV_DOFORK, traits::DONT_FORK, 0),
    ("MADV_WIPEONFORK", libc::MADV_WIPEONFORK, 0, traits::WIPE_ON_FORK),
    ("MADV_KEEPONFORK", libc::MADV_KEEPONFORK, traits::WIPE_ON_FORK, 0),
    ("MADV_DONTDUMP", libc::MADV_DONTDUMP, 0, traits::DONT_DUMP),
    ("MADV_DODUMP", libc::MADV_DODUMP, traits::DONT_DUMP, 0),
    ("MADV_MERGEABLE", libc::MADV_MERGEABLE, 0, traits::MERGEABLE),
    ("MADV_UNMERGEABLE", libc::MADV_UNMERGEABLE, traits::MERGEABLE, 0),
];

/// Advice that the kernel carries out at once: name, number, and the access that all its pages must allow.
const PASSING: [(&str, i32, Access); 6] = [
    ("MADV_WILLNEED", libc::MADV_WILLNEED, Access::None),
    ("MADV_COLD", libc::MADV_COLD, Access::None),
    ("MADV_PAGEOUT", libc::MADV_PAGEOUT, Access::None),
    ("MADV_POPULATE_READ", libc::MADV_POPULATE_READ, Access::Read),
    ("MADV_POPULATE_WRITE", libc::MADV_POPULATE_WRITE, Access::Write),
    ("MADV_COLLAPSE", MADV_COLLAPSE, Access::None),
];

/// Gives the lasting advice with index `N`.
pub fn lasting<const N: usize>(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let part = worker.part(at);
    give(worker, at, way, part, LASTING[N])
}

fn give(
    worker: &mut Worker<'_>,
    at: usize,
    way: Way,
    (from, pages): (usize, usize),
    (name, advice, takes, gives): Advice,
) -> Outcome {
    worker.note(at, name, way, (from, pages), 0);
    let answer = madvise(worker, at, way, (from, pages), advice);
    // The kernel does not wipe mappings of files for children, and folded pages are such mappings.
    let wipes = advice == libc::MADV_WIPEONFORK;
    let tolerated = if wipes { &[libc::EINVAL, libc::ENOMEM, libc::EAGAIN] } else { SPLITS };
    let done = judge(name, from, answer, 0, tolerated)?;
    if matches!(done, Done::Refused(_)) {
        worker.give_up(at);
        return Ok(done);
    }
    let parts = worker.plots[at].part_mut(from, pages).iter_mut();
    parts.for_each(|page| page.traits = page.traits & !takes | gives);
    worker.check(at, from, pages)?;
    Ok(done)
}

/// Gives the advice with index `N` in `PASSING`.
pub fn passing<const N: usize>(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let (name, advice, access) = PASSING[N];
    let (from, pages) = worker.part(at);
    let pages = worker.plots[at].usable(from, pages, access);
    if pages == 0 {
        return Ok(Done::NotNow);
    }
    worker.note(at, name, way, (from, pages), 0);
    let locked = worker.plots[at].part(from, pages).iter().any(|page: &Page| page.has(traits::LOCKED));
    let ages = matches!(advice, libc::MADV_COLD | libc::MADV_PAGEOUT);
    let expected = if locked && ages { libc::EINVAL } else { 0 };
    // The kernel may have no huge page left, or the range no room for one.
    let tolerated: &[i32] =
        if advice == MADV_COLLAPSE { &[libc::EINVAL, libc::EAGAIN, libc::EBUSY, libc::ENOMEM] } else { &[] };
    let answer = madvise(worker, at, way, (from, pages), advice);
    let done = judge(name, from, answer, expected, tolerated)?;
    worker.check(at, from, pages)?;
    Ok(done)
}

/// Takes advice back that keeps pages of the plot in different mappings, so that the kernel can make one mapping of
/// them again.
pub fn settle(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let pages = worker.plots[at].len();
    let any = worker.plots[at].pages.iter().fold(0, |any, page| any | page.traits);
    // The first two kinds of advice cannot be taken back. One of them is given to all pages.
    for (n, advice) in LASTING.into_iter().enumerate() {
        let (_, _, takes, _) = advice;
        let undoes = if n == 1 { traits::HUGE | traits::NO_HUGE } else { takes };
        if n != 0 && any & undoes != 0 && !matches!(give(worker, at, way, (0, pages), advice)?, Done::Yes) {
            break;
        }
    }
    Ok(Done::Yes)
}
