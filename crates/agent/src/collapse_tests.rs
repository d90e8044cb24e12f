//! Pieces are collapsed while threads and devices write them.

use super::*;
use crate::scarce::with_short_memory;
use crate::section::Section;
use crate::testing::{LateDevice, Member, alone, fold, pool, section, traits, witness};
use page::PAGE_BYTES;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use wire::Outcome;

/// Collapses a piece as `Folder` does it. Says whether that was done.
fn collapse(section: &Section, witness: &mut Witness, piece: PageRange) -> bool {
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    let mut attempt = || {
        let mut table = table::lock();
        let copy = MemberMemory::huge_page(Some(true)).unwrap();
        make_own(&mut table, piece).map_err(|e| ("make it its own", e))?;
        witness.end();
        witness.call_for(&table, &[piece]).map_err(|e| ("call a witness", e))?;
        let with = (&pagemap, section.notes(), &**section.following(), &mut *witness);
        super::collapse_piece(&mut table, with, (piece, traits()), copy, references::generation())
            .map_err(|e| ("collapse it", e))
    };
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        match attempt() {
            // Another test has just begun to watch all memory that may be folded, and does so until it ends.
            Err((_, Errno::BUSY)) if Instant::now() < end => std::thread::sleep(Duration::from_millis(10)),
            result => return result.unwrap(),
        }
    }
}

/// Mappings that lie within a range.
fn mappings(range: PageRange) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let bounds = |line: &str| {
        let (from, to) = line.split_once(' ')?.0.split_once('-')?;
        Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?))
    };
    maps.lines().filter_map(bounds).filter(|(from, to)| *from < range.end().0 && *to > range.start.0).count()
}

#[test]
fn collapsed_piece_is_one_mapping_and_a_huge_page() {
    let Some(mut section) = section() else { return };
    let mut witness = witness();
    let (pool, member) = (pool(), Member::of(MemberMemory::huge_page(Some(true)).unwrap()).not_inherited());
    let (all, pagemap) = (member.0.range(), Pagemap::open(std::process::id()).unwrap());
    let is_huge = || pagemap.huge_ranges(all.start, all.end()).unwrap() == [all];
    let was_huge = is_huge();
    // Pages that were given to fork probes of other tests cannot be moved before these probes end.
    let fold_all = |section: &mut Section, first: u64| {
        let end = Instant::now() + Duration::from_secs(10);
        for page in first..first + 8 {
            act::split_huge_page(all.start);
            while fold(section, member.run(page, 1), Some((&pool, page as u32))) != [Outcome::Folded] {
                assert!(Instant::now() < end, "page {page} cannot be folded");
                member.word(page, 3).store(0, Ordering::Relaxed);
            }
        }
    };
    (0..512).step_by(32).for_each(|first| fold_all(&mut section, first));
    // Some are written, some still map slots.
    (0..256).for_each(|page| member.word(page, 9).store(page, Ordering::Relaxed));
    assert!(mappings(all) > 16 && !is_huge());
    assert!(collapse(&section, &mut witness, all));
    assert_eq!((mappings(all), is_huge(), member.in_pool()), (1, was_huge, 0));
    for page in 0..512 {
        let words = [0, 9, PAGE_BYTES / 8 - 1].map(|word| member.word(page, word).load(Ordering::Relaxed));
        assert_eq!(words, [page + 1, if page < 256 { page } else { 0 }, page * 7 + 1]);
    }
    // All pages of the piece can be folded as before.
    let is_foldable = table::lock().is_foldable(all);
    assert!(is_foldable);
    fold_all(&mut section, 256);
}

/// While a device has yet to write a page, its piece stays as it is. With the witness not asked, the device's write was
/// lost in the first of the tries.
#[test]
fn piece_that_device_has_yet_to_write_is_not_collapsed() {
    let (Some(section), Some(mut device)) = (section(), LateDevice::new()) else { return };
    let mut witness = witness();
    let member = Member::of(MemberMemory::huge_page(Some(true)).unwrap()).not_inherited();
    for round in 1..=200 {
        let page = round * 89 % 512;
        device.begin(&member, &[page], 7);
        let is_collapsed = collapse(&section, &mut witness, member.0.range());
        device.finish(round);
        assert_eq!(member.word(page, 7).swap(0, Ordering::Relaxed), round, "the device's write is lost");
        assert!(!is_collapsed, "round {round}");
    }
    assert!(collapse(&section, &mut witness, member.0.range()));
}

/// Threads that write all the time find every write of theirs, while their piece is collapsed again and again. With
/// writers not kept out, one write was lost in the first second.
#[test]
fn no_write_is_lost_to_collapse() {
    let Some(section) = section() else { return };
    let mut witness = witness();
    let (member, stop) =
        (Member::of(MemberMemory::huge_page(Some(true)).unwrap()).not_inherited(), AtomicBool::new(false));
    let collapsed = std::thread::scope(|scope| {
        for writer in 0..2 {
            let (member, stop) = (&member, &stop);
            scope.spawn(move || {
                let mut counts = [0; 512];
                for turn in 0.. {
                    // Often enough, nobody writes between the fork probe and the moment when writers are kept out.
                    std::thread::sleep(Duration::from_micros(turn * 37 % 4000));
                    let page = turn * 89 % 512;
                    let word = member.word(page, 20 + writer);
                    assert_eq!(word.load(Ordering::Relaxed), counts[page as usize], "a write to page {page} is lost");
                    counts[page as usize] += 1;
                    word.store(counts[page as usize], Ordering::Relaxed);
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
        let (began, time) = (Instant::now(), Duration::from_secs(2));
        let mut collapsed = 0;
        // On a busy machine it takes longer until enough has happened.
        while began.elapsed() < time || collapsed <= 20 && began.elapsed() < 20 * time {
            collapsed += u32::from(collapse(&section, &mut witness, member.0.range()));
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, Ordering::Relaxed);
        collapsed
    });
    assert!(collapsed > 20, "collapsed {collapsed} times");
}

/// Once, the copy was lost when its move had failed after the kernel had unmapped the destination.
#[test]
fn memory_that_is_short_while_a_piece_is_collapsed_loses_none() {
    if !alone("collapse::tests::memory_that_is_short_while_a_piece_is_collapsed_loses_none") {
        return;
    }
    let Some(section) = section() else { return };
    let (member, following) =
        (Member::of(MemberMemory::huge_page(Some(true)).unwrap()).not_inherited(), Arc::clone(section.following()));
    let (piece, copy) = (member.0.range(), MemberMemory::huge_page(Some(true)).unwrap());
    let replaced = with_short_memory(0b11, || replace(&following, copy, piece, traits()));
    assert_eq!(act::make_present(piece), Ok(()), "the program's memory is unmapped");
    assert_eq!(replaced, Ok(()));
    (0..512).for_each(|page| assert_eq!(member.word(page, 0).load(Ordering::Relaxed), page + 1));
}
