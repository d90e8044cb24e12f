//! What a forked child does. All its pages must stay as they were at the fork, and its own changes must show at once.
//! The child allocates nothing and takes no lock, because other threads of its parent may have held any lock at the
//! fork.

use super::fork::{Report, tell};
use crate::content::Random;
use crate::plot::{Access, Page, Plot, traits};
use crate::select::Selection;
use crate::senses::Senses;
use crate::sys::{self, Way};
use crate::verdict::{self, Wrong};
use std::fmt::Write;
use std::time::{Duration, Instant};

/// Exit code of a child that found something wrong, and has written it into its report.
const WRONG: usize = 7;

/// Number of operations that a child makes on its copy of the memory without a pause.
const ACTS: usize = 12;
/// Time between two further operations of a child that lives longer.
const TURN: Duration = Duration::from_millis(150);

pub fn live(plots: &mut [Plot], selection: &Selection, mut random: Random, life: Duration, report: *mut Report) -> ! {
    end_with_parent();
    let senses = Senses::open();
    plots.iter_mut().for_each(inherit);
    check_all(&senses, plots, &mut random, report);
    // The child did not inherit these pages. The agent in the child may have mapped its own copies there, so their
    // contents are not checked.
    plots.iter_mut().flat_map(|plot| &mut plot.pages).filter(|page| page.has(traits::GONE)).for_each(Page::free);
    for _ in 0..ACTS {
        let plot = &mut plots[random.below(plots.len())];
        if plot.pages.iter().any(|page| page.has(traits::GONE)) {
            continue;
        }
        if let Err(wrong) = act(&senses, plot, selection, &mut random) {
            end_wrong(&senses, report, wrong, plot);
        }
    }
    // A child that lives long becomes a member of its own, and is folded meanwhile.
    let end = Instant::now() + life;
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        sys::rest(left.min(TURN));
        check_all(&senses, plots, &mut random, report);
        let plot = &mut plots[random.below(plots.len())];
        if !plot.pages.iter().any(|page| page.has(traits::GONE))
            && let Err(wrong) = act(&senses, plot, selection, &mut random)
        {
            end_wrong(&senses, report, wrong, plot);
        }
    }
    check_all(&senses, plots, &mut random, report);
    sys::exit_now(0);
}

/// Has the kernel kill this child when its parent ends. If the child hangs and its parent fails, no process is left
/// behind.
fn end_with_parent() {
    // SAFETY: two numbers.
    let _ = unsafe { sys::raw(libc::SYS_prctl, [libc::PR_SET_PDEATHSIG as usize, libc::SIGKILL as usize, 0, 0, 0, 0]) };
}

/// Ends a child that found something wrong. The child prints its own mappings, which its parent cannot.
fn end_wrong(senses: &Senses, report: *mut Report, wrong: Wrong, plot: &Plot) -> ! {
    let (page, pid) = (wrong.page().min(plot.len() - 1), sys::own_pid());
    let _ = writeln!(verdict::Unbuffered, "child {pid}: entry {:#x}, mappings at the page:", senses.entry(plot, page));
    verdict::say_mappings(Some(plot.address(page)));
    tell(report, wrong, plot);
    sys::exit_now(WRONG);
}

/// Changes the model of the parent's pages to what the child must have inherited.
fn inherit(plot: &mut Plot) {
    for page in &mut plot.pages {
        if page.has(traits::WIPE_ON_FORK) {
            page.zero();
        }
        if page.has(traits::DONT_FORK) {
            (page.access, page.traits) = (Access::None, traits::GONE);
        }
        page.traits &= !(traits::LOCKED | traits::ON_FAULT);
    }
}

fn check_all(senses: &Senses, plots: &[Plot], random: &mut Random, report: *mut Report) {
    for plot in plots {
        if let Err(wrong) = senses.check(plot, 0, plot.len(), random) {
            end_wrong(senses, report, wrong, plot);
        }
    }
}

/// Records the operation that is made next in the plot's history.
fn note(plot: &mut Plot, name: &'static str, way: Way, (from, pages): (usize, usize)) {
    plot.history.add(crate::history::Event { name, way: way.name(), from, pages, ..Default::default() });
}

/// Makes one random operation on the child's copy, and checks the result.
fn act(senses: &Senses, plot: &mut Plot, selection: &Selection, random: &mut Random) -> Result<(), Wrong> {
    let from = random.below(plot.len());
    let pages = 1 + random.below((plot.len() - from).min(16));
    let way = Way::ALL[random.below(3)];
    let (kind, n) = (random.below(5), plot.usable(from, pages, Access::Write));
    match kind {
        0 if selection.allows_named("dontneed", way) => discard(plot, way, (from, pages))?,
        1 if selection.allows_named("map_over", way) => map_over(plot, way, (from, pages))?,
        2 if selection.allows_named("mprotect", way) => protect(plot, way, (from, pages), random)?,
        3 => {
            note(plot, "child: fill", way, (from, n));
            (from..from + n).for_each(|page| plot.fill(page, plot.class_of(page)));
        }
        _ => {
            note(plot, "child: mark", way, (from, n));
            (from..from + n).for_each(|page| plot.mark(page, random));
        }
    }
    senses.check(plot, from, pages, random)
}

fn discard(plot: &mut Plot, way: Way, (from, pages): (usize, usize)) -> Result<(), Wrong> {
    note(plot, "child: MADV_DONTNEED", way, (from, pages));
    let (start, length) = plot.range(from, pages);
    // SAFETY: memory of this child's own, to whose contents nobody has a plain reference.
    let answer = unsafe { sys::call(way, libc::SYS_madvise, [start, length, libc::MADV_DONTNEED as usize, 0, 0, 0]) };
    super::judge("MADV_DONTNEED", from, answer, 0, &[])?;
    plot.part_mut(from, pages).iter_mut().for_each(Page::zero);
    Ok(())
}

fn map_over(plot: &mut Plot, way: Way, (from, pages): (usize, usize)) -> Result<(), Wrong> {
    note(plot, "child: mmap MAP_FIXED", way, (from, pages));
    let (start, _) = plot.range(from, pages);
    let answer = super::map(way, start, pages, Access::Write, libc::MAP_FIXED);
    super::judge("mmap MAP_FIXED", from, answer, 0, &[])?;
    for page in plot.part_mut(from, pages) {
        page.zero();
        (page.access, page.traits) = (Access::Write, 0);
    }
    Ok(())
}

fn protect(plot: &mut Plot, way: Way, (from, pages): (usize, usize), random: &mut Random) -> Result<(), Wrong> {
    let access = [Access::None, Access::Read, Access::Write][random.below(3)];
    note(plot, "child: mprotect", way, (from, pages));
    let (start, length) = plot.range(from, pages);
    // SAFETY: memory of this child's own, which the child accesses only as the model allows.
    let answer = unsafe { sys::call(way, libc::SYS_mprotect, [start, length, access.bits(), 0, 0, 0]) };
    super::judge("mprotect", from, answer, 0, &[])?;
    plot.part_mut(from, pages).iter_mut().for_each(|page| page.access = access);
    Ok(())
}
