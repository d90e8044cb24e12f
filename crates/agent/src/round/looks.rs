//! Reads the page table and pages, with the table's lock held for a moment at a time.

use super::ranges::{between, common, joined, overlapping};
use super::{Kind, Rested};
use crate::table;
use act::{SoftReader, Userfault, Watch};
use host::{Pagemap, Survey};
use page::{Fingerprint, HostVirt, PageRange};

/// Most pages that are read while the table's lock is held once, because a thread of the program may wait for the lock.
/// Each member has a buffer of this size.
pub const AT_ONCE_PAGES: u64 = 16;
/// Most pages whose notes of writes are taken while the table's lock is held once: 16 MiB, which takes some 0.2 ms.
const LOOK_PAGES: u64 = 4096;
/// Two ranges with no more than 128 pages between them are scanned by one system call: the pages cost less than a
/// second call.
const NEAR_PAGES: u64 = 128;

/// The pages that a scan finds in these ordered ranges. Programs have hundreds of ranges, and one call scans several
/// that lie close together.
pub fn scan(
    pagemap: &Pagemap,
    ranges: &[PageRange],
    by: impl Fn(&Pagemap, HostVirt, HostVirt) -> host::Result<Vec<PageRange>>,
) -> host::Result<Vec<PageRange>> {
    let mut found = Vec::new();
    for near in joined(ranges, NEAR_PAGES) {
        found.append(&mut by(pagemap, near.start, near.end())?);
    }
    Ok(common(&found, ranges))
}

/// The pages of these ordered ranges that are unwatched, written or huge.
pub fn survey(pagemap: &Pagemap, ranges: &[PageRange]) -> host::Result<Survey> {
    let mut all = Survey::default();
    for near in joined(ranges, NEAR_PAGES) {
        let mut found = pagemap.survey(near.start, near.end())?;
        all.unwatched.append(&mut found.unwatched);
        all.written.append(&mut found.written);
        all.huge.append(&mut found.huge);
    }
    let of_ranges = |found: &[PageRange]| common(found, ranges);
    Ok(Survey { unwatched: of_ranges(&all.unwatched), written: of_ranges(&all.written), huge: of_ranges(&all.huge) })
}

/// Reads and resets the kernel's notes of written pages. In memory that is registered with the program's userfaultfd,
/// these notes are the program's, and must not be reset. So the table's lock is held, without which the program cannot
/// register memory. Only addresses with `written` pages are visited, because a program may reserve terabytes.
pub fn take_written(pagemap: &Pagemap, written: &[PageRange]) -> host::Result<Vec<PageRange>> {
    let mut taken = Vec::new();
    for piece in visits(written) {
        let table = table::lock();
        let known = table.known(piece).into_iter().filter(|(_, traits)| traits.asked && !traits.is_yielded());
        let known: Vec<PageRange> = known.map(|(part, _)| part).collect();
        for part in overlapping(&known, written) {
            taken.append(&mut pagemap.take_written(part.start, part.end())?);
        }
    }
    Ok(taken)
}

/// Pieces of at most [`LOOK_PAGES`] pages that contain all pages of these ordered ranges, and little else.
fn visits(ranges: &[PageRange]) -> Vec<PageRange> {
    let mut pieces: Vec<PageRange> = Vec::new();
    for range in ranges {
        let mut at = range.start;
        while at < range.end() {
            let place = pieces.last_mut().filter(|last| at.page() - last.start.page() < LOOK_PAGES);
            let start = place.as_ref().map_or(at, |last| last.start);
            let end = range.end().min(start.add_pages(LOOK_PAGES));
            match place {
                Some(last) => *last = between(start, end),
                None => pieces.push(between(start, end)),
            }
            at = end;
        }
    }
    pieces
}

/// The pages of these ranges that only this process maps, and the others.
pub fn by_sharing(pagemap: &Pagemap, ranges: &[PageRange]) -> host::Result<(Vec<PageRange>, Vec<PageRange>)> {
    let (mut own, mut shared, mut entries) = (Vec::new(), Vec::new(), Vec::new());
    for range in ranges {
        let mut at = 0;
        while at < range.pages {
            let piece = PageRange { start: range.start.add_pages(at), pages: LOOK_PAGES.min(range.pages - at) };
            pagemap.read(piece.start, piece.pages, &mut entries)?;
            let mut start = piece.start;
            for run in entries.chunk_by(|one, next| one.exclusive() == next.exclusive()) {
                let run_range = PageRange { start, pages: run.len() as u64 };
                if run[0].exclusive() { &mut own } else { &mut shared }.push(run_range);
                start = run_range.end();
            }
            at += piece.pages;
        }
    }
    Ok((own, shared))
}

/// The parts of these ranges that may be folded.
pub fn foldable(ranges: &[PageRange]) -> Vec<PageRange> {
    let mut open = Vec::new();
    table::lock().foldable(&mut open);
    common(&open, ranges)
}

/// Reads pages up to the first one that may not be folded any more or is not mapped, and appends their fingerprints.
pub fn read_pages(
    rested: Rested,
    notes: Option<&Userfault>,
    reader: &mut SoftReader,
    fingerprints: &mut Vec<Fingerprint>,
) {
    let range = rested.range;
    let may = |table: &table::Guard, range| match rested.kind {
        Kind::Broken => table.is_refoldable(range),
        Kind::Small | Kind::Huge => table.is_foldable(range),
    };
    let mut done = 0;
    while done < range.pages {
        let piece = PageRange { start: range.start.add_pages(done), pages: (range.pages - done).min(AT_ONCE_PAGES) };
        // The lock is held so that the pages still are what the table says when they are read.
        let table = table::lock();
        let page = |n| PageRange { start: piece.start.add_pages(n), pages: 1 };
        let open = if may(&table, piece) {
            piece.pages
        } else {
            (0..piece.pages).take_while(|n| may(&table, page(*n))).count() as u64
        };
        let open = PageRange { pages: open, ..piece };
        // The mapping may be a new one, registered with a userfaultfd of the program's, whose handler would fill in a
        // page for this read.
        let is_ours =
            rested.kind == Kind::Broken || notes.is_none_or(|notes| notes.register(open, Watch::Writes).is_ok());
        let read = if open.pages > 0 && is_ours { reader.read(open) } else { 0 };
        drop(table);
        fingerprints.extend((0..read).map(|n| Fingerprint::of(reader.page(n))));
        if (read as u64) < piece.pages {
            return;
        }
        done += piece.pages;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use page::PAGE_SHIFT;

    #[test]
    fn no_visit_is_to_a_place_without_written_pages() {
        let ranges = |list: &[(u64, u64)]| -> Vec<PageRange> {
            list.iter().map(|&(page, pages)| PageRange { start: HostVirt(page << PAGE_SHIFT), pages }).collect()
        };
        let (far, most) = (1 << 31, LOOK_PAGES);
        let written = ranges(&[(5, 1), (7, 2), (4 + most, 3), (far, 2 * most + 1)]);
        let expected = [(5, most), (5 + most, 2), (far, most), (far + most, most), (far + 2 * most, 1)];
        assert_eq!(visits(&written), ranges(&expected));
        assert!(visits(&[]).is_empty());
    }
}
