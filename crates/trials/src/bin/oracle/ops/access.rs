//! Reading and writing: by the processor, and by the kernel on behalf of the program.

use super::{Done, Outcome, judge};
use crate::content::{self, PAGE, WORDS};
use crate::plot::Access;
use crate::sys::{self, Way};
use crate::tally;
use crate::verdict::Wrong;
use crate::worker::{Worker, bytes};
use std::sync::atomic::Ordering::Relaxed;

/// Checks all pages of the plot.
pub fn look(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let pages = worker.plots[at].len();
    worker.note(at, "look", way, (0, pages), 0);
    worker.check(at, 0, pages)?;
    Ok(Done::Yes)
}

/// The writable pages with which a randomly picked part of the plot begins.
fn writable(worker: &mut Worker<'_>, at: usize) -> Option<(usize, usize)> {
    let (from, pages) = worker.part(at);
    let plot = &worker.plots[at];
    let usable = plot.usable(from, pages, Access::Write);
    if usable > 0 {
        worker.senses.count_breaks(plot, from, usable);
    }
    (usable > 0).then_some((from, usable))
}

/// Checks pages, and gives each a content of the set.
pub fn fill(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let Some((from, pages)) = writable(worker, at) else { return Ok(Done::NotNow) };
    worker.note(at, "fill", way, (from, pages), 0);
    worker.check(at, from, pages)?;
    let zeros = worker.random.one_in(12);
    for page in from..from + pages {
        let plot = &mut worker.plots[at];
        let class = if zeros { content::ZERO } else { plot.choose(page, &mut worker.random) };
        plot.fill(page, class);
    }
    Ok(Done::Yes)
}

/// Fills the whole plot with each page's usual content, so that broken pages can be folded again.
pub fn refill(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let pages = worker.plots[at].len();
    worker.note(at, "refill", way, (0, pages), 0);
    worker.check(at, 0, pages)?;
    worker.senses.count_breaks(&worker.plots[at], 0, pages);
    for page in 0..pages {
        let plot = &mut worker.plots[at];
        if plot.pages[page].access == Access::Write {
            plot.fill(page, plot.class_of(page));
        }
    }
    Ok(Done::Yes)
}

/// Checks pages, and marks them.
pub fn mark(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let Some((from, pages)) = writable(worker, at) else { return Ok(Done::NotNow) };
    worker.note(at, "mark", way, (from, pages), 0);
    worker.check(at, from, pages)?;
    for page in from..from + pages {
        worker.plots[at].mark(page, &mut worker.random);
    }
    Ok(Done::Yes)
}

/// Has the kernel read contents of the set from a file into pages (`pread`).
pub fn read_into(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let Some((from, pages)) = writable(worker, at) else { return Ok(Done::NotNow) };
    let first = worker.random.below(content::CLASSES);
    let pages = pages.min(content::CLASSES - first);
    worker.note(at, "read_into", way, (from, pages), first);
    let (start, length) = worker.plots[at].range(from, pages);
    let arguments = [content::file() as usize, start, length, first * PAGE, 0, 0];
    // SAFETY: as many bytes as there are, in memory of this thread's own.
    let answer = unsafe { sys::call(way, libc::SYS_pread64, arguments) };
    if answer.is_ok_and(|read| read < bytes(pages)) {
        return Err(Wrong::Answer { call: "pread (short)", page: from, expected: 0, found: 0 });
    }
    let parts = worker.plots[at].part_mut(from, pages).iter_mut();
    parts.enumerate().for_each(|(n, page)| page.hold((first + n) as u8));
    judge("pread", from, answer, 0, &[])
}

/// Most attempts at a write that the kernel refuses instead of waiting, one each millisecond: 1 s in all.
const PATIENCE: usize = 1000;

/// Writes a page through `/proc/self/mem`, as a debugger does, which disregards the page's protection.
pub fn poke_memory(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let page = worker.random.below(worker.plots[at].len());
    let class = worker.plots[at].choose(page, &mut worker.random);
    worker.note(at, "poke_memory", way, (page, 1), class.into());
    let mut words = [0_u64; WORDS];
    let content = content::words(class).iter().map(|word| word.load(std::sync::atomic::Ordering::Relaxed));
    words.iter_mut().zip(content).for_each(|(to, from)| *to = from);
    let arguments =
        [worker.senses.memory() as usize, (&raw const words) as usize, PAGE, worker.plots[at].address(page), 0, 0];
    // SAFETY: a page of this thread's own, which the kernel writes; the bytes live in this frame.
    let poke = || unsafe { sys::call(way, libc::SYS_pwrite64, arguments) };
    // A write through `/proc/self/mem` cannot wait for a page that is out of reach, and is refused. The program's own
    // accesses wait.
    let is_late =
        |answer: &sys::Answer| *answer == Err(libc::EIO) && worker.plots[at].pages[page].access == Access::Write;
    let mut answer = poke();
    for _ in 0..PATIENCE {
        if !is_late(&answer) {
            break;
        }
        tally::LATE_POKES.fetch_add(1, Relaxed);
        std::thread::sleep(std::time::Duration::from_millis(1));
        answer = poke();
    }
    if answer == Ok(PAGE) {
        worker.plots[at].pages[page].hold(class);
    }
    // Some kernels do not let debuggers past protections.
    let tolerated: &[i32] = if worker.plots[at].pages[page].access == Access::Write { &[] } else { &[libc::EIO] };
    judge("write of /proc/self/mem", page, answer, 0, tolerated)
}
