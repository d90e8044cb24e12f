//! Areas that come and go. Each is filled with duplicates of other pages, is left alone for a while so that it may be
//! folded, and then undergoes an operation: it is grown, shrunk, moved, partly replaced, locked, advised, or protected.

use crate::area::KEPT_FROM_CHILDREN;
use crate::children::Children;
use crate::content::Random;
use crate::owners::ok;
use crate::plot::Plot;
use crate::tally::{Mismatch, count, counted, must, stopping};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Number of areas that a thread has at a time.
const AREAS: usize = 24;

struct Field {
    plot: Plot,
    next: Instant,
    /// Whether the area's present protection allows reading only.
    read_only: bool,
    /// Whether a part of the area was mapped anew. The kernel may keep that part in a mapping of its own, and cannot
    /// move several mappings at once.
    split: bool,
}

impl Field {
    fn new(classes: usize, random: &mut Random) -> Self {
        let mut plot = Plot::whole(16 + random.below(240), classes);
        must("in a new area", plot.fill_all(random));
        Self { plot, next: Instant::now() + rest(random), read_only: false, split: false }
    }
}

fn rest(random: &mut Random) -> Duration {
    Duration::from_micros(random.next() % 1_500_000)
}

/// Works on areas until the threads are to end.
pub fn live(classes: usize, with_children: bool) {
    let mut random = Random::unforeseen();
    let mut fields: Vec<Field> = (0..AREAS).map(|_| Field::new(classes, &mut random)).collect();
    let mut children = Children::default();
    while !stopping() {
        std::thread::sleep(Duration::from_millis(3));
        let Some(field) = fields.iter_mut().find(|field| field.next <= Instant::now()) else { continue };
        field.next += rest(&mut random);
        if random.one_in(40) {
            // Areas may be dropped at any time, whether they are folded or not.
            *field = Field::new(classes, &mut random);
            count("areas");
        } else if with_children && random.one_in(60) && !field.read_only {
            children.born(&mut field.plot, &mut random);
        } else {
            must("in an area", act(field, &mut random));
        }
    }
    for field in &fields {
        must("in an area at the end", field.plot.check_all());
    }
    children.wait_for_all();
}

/// Checks the whole area, makes one operation on it, and checks it again.
fn act(field: &mut Field, random: &mut Random) -> Result<(), Mismatch> {
    field.plot.check_all()?;
    if std::mem::take(&mut field.read_only) {
        ok("mprotect", field.plot.area().unprotect(0, field.plot.len()));
        return field.plot.fill_all(random);
    }
    let (from, pages) = part(&field.plot, random);
    match random.below(12) {
        0 if !field.split => resize(&mut field.plot, random)?,
        1 if !field.split => relocate(&mut field.plot)?,
        2 => replace_part(field, from, pages)?,
        3 => advise(&mut field.plot, from, pages, random)?,
        4 => leave_read_only(field),
        5 => lock(&mut field.plot, from, pages, random)?,
        6 => discard(&mut field.plot, from, pages)?,
        7 => unmerge(&field.plot, from, pages)?,
        8 => unmap_part(field, from, pages)?,
        _ => (from..from + pages).try_for_each(|i| field.plot.poke(i, 1, random))?,
    }
    field.plot.check_all()
}

fn part(plot: &Plot, random: &mut Random) -> (usize, usize) {
    let from = random.below(plot.len());
    (from, 1 + random.below(plot.len() - from))
}

fn replace_part(field: &mut Field, from: usize, pages: usize) -> Result<(), Mismatch> {
    count("parts_replaced");
    field.split = true;
    ok("mmap", field.plot.area().replace(from, pages));
    field.plot.zeroed(from, pages)
}

fn unmap_part(field: &mut Field, from: usize, pages: usize) -> Result<(), Mismatch> {
    count("parts_unmapped");
    field.split = true;
    if ok("munmap, mmap", field.plot.area().unmap_and_map(from, pages)) {
        return field.plot.zeroed(from, pages);
    }
    // Another thread has mapped something in the hole, and keeps it.
    count("places_given_away");
    std::mem::forget(std::mem::replace(&mut field.plot, Plot::whole(pages, 2)));
    Ok(())
}

fn leave_read_only(field: &mut Field) {
    count("left_read_only");
    ok("mprotect", field.plot.area().protect(0, field.plot.len(), libc::PROT_READ));
    field.read_only = true;
}

fn discard(plot: &mut Plot, from: usize, pages: usize) -> Result<(), Mismatch> {
    count("discards");
    ok("MADV_DONTNEED", plot.area().advise(from, pages, libc::MADV_DONTNEED));
    plot.zeroed(from, pages)
}

fn unmerge(plot: &Plot, from: usize, pages: usize) -> Result<(), Mismatch> {
    count("unmergeable");
    ok("MADV_UNMERGEABLE", plot.area().advise(from, pages, libc::MADV_UNMERGEABLE));
    (from..from + pages).try_for_each(|i| plot.check(i))?;
    ok("MADV_MERGEABLE", plot.area().advise(from, pages, libc::MADV_MERGEABLE));
    Ok(())
}

fn resize(plot: &mut Plot, random: &mut Random) -> Result<(), Mismatch> {
    count("resized");
    let pages = 16 + random.below(300);
    ok("mremap", plot.area_mut().resize(pages));
    plot.resized();
    plot.check_all()?;
    plot.fill_all(random)
}

/// Moves an area in each of the two ways by turns: a short run makes few moves, and would by chance make none of one
/// kind.
fn relocate(plot: &mut Plot) -> Result<(), Mismatch> {
    if counted("moved") <= counted("moved_out") {
        count("moved");
        ok("mremap to a place", plot.area_mut().relocate());
        return plot.check_all();
    }
    count("moved_out");
    let pages = plot.len();
    let left = ok("MREMAP_DONTUNMAP", plot.area_mut().move_out());
    let mut empty = Plot::new(std::sync::Arc::new(left), (0..pages).collect(), 2);
    empty.zeroed(0, pages)?;
    plot.check_all()
}

fn advise(plot: &mut Plot, from: usize, pages: usize, random: &mut Random) -> Result<(), Mismatch> {
    // Advice that lasts is taken back afterwards: otherwise the mapping would stay split.
    let all = [
        ("MADV_COLD", libc::MADV_COLD, None),
        ("MADV_PAGEOUT", libc::MADV_PAGEOUT, None),
        ("MADV_POPULATE_READ", libc::MADV_POPULATE_READ, None),
        ("MADV_POPULATE_WRITE", libc::MADV_POPULATE_WRITE, None),
        ("MADV_DONTDUMP", libc::MADV_DONTDUMP, Some(libc::MADV_DODUMP)),
        ("MADV_RANDOM", libc::MADV_RANDOM, Some(libc::MADV_NORMAL)),
        ("MADV_DONTFORK", libc::MADV_DONTFORK, Some(libc::MADV_DOFORK)),
    ];
    // If children inherit no areas, MADV_DONTFORK (the last one) is set already, and must not be taken back.
    let choices = if KEPT_FROM_CHILDREN.load(Relaxed) { all.len() - 1 } else { all.len() };
    let (name, advice, undo) = all[random.below(choices)];
    count("advised");
    ok(name, plot.area().advise(from, pages, advice));
    plot.check_all()?;
    undo.map_or(Ok(()), |advice| {
        ok(name, plot.area().advise(from, pages, advice));
        plot.check_all()
    })
}

fn lock(plot: &mut Plot, from: usize, pages: usize, random: &mut Random) -> Result<(), Mismatch> {
    if let Err(e) = plot.area().lock(from, pages) {
        assert!(matches!(e.raw_os_error(), Some(libc::ENOMEM | libc::EPERM)), "mlock: {e}");
        return Ok(());
    }
    count("locked");
    // Locked pages cannot be discarded, so they are only written.
    (from..from + pages).try_for_each(|i| plot.write(i))?;
    (from..from + pages).try_for_each(|i| plot.fill(i, random))?;
    ok("munlock", plot.area().unlock(from, pages));
    Ok(())
}
