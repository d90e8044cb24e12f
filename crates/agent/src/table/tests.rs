//! The map together with its history. Pages with short-lived folds are left alone for a while (`policy::History`).

use super::*;
use page::{CHUNK_PAGES, PAGE_SHIFT, PoolSlot};
use policy::{MOMENTS, moment};
use std::collections::BTreeSet;

/// Number of the page that is the tests' page 0: within a chunk, not at its beginning.
const BASE: u64 = 0x7f00_0000_0000 / 4096 + 300;

fn real(first: u64, count: u64) -> PageRange {
    PageRange { start: HostVirt((BASE + first) << PAGE_SHIFT), pages: count }
}

/// The tests' pages of ranges of the table.
fn listed(ranges: &[PageRange]) -> BTreeSet<u64> {
    let pages = |range: &PageRange| {
        let first = range.start.page() - BASE;
        first..first + range.pages
    };
    ranges.iter().flat_map(pages).collect()
}

/// The empty table of a member whose children are followed.
fn table() -> Table {
    let mut table = Table::new();
    table.follow_forks(true);
    table
}

/// Pages that may be folded when no page is left alone: broken ones, rested ones, and all.
const ALL: (usize, usize, usize) = (5, 4, 700);
/// The same when all pages with short-lived folds are left alone.
const WITHOUT: (usize, usize, usize) = (0, 0, 691);

/// Folds 18 pages, 8 of them as zeros.
fn fold(table: &mut Table, now: u32) {
    table.set_time(now, None);
    table.set_private(real(0, 10));
    table.set_folded(SlotRun { start: real(0, 10).start, slot: PoolSlot::new(0, 7).unwrap(), pages: 10 });
    table.set_zeroed(real(600, 8));
}

/// Writes half of those pages, folded or not.
fn write(table: &mut Table, now: u32) {
    table.set_time(now, None);
    table.set_broken(real(0, 5));
    table.seen_written(real(0, 5));
    table.rest((&[real(600, 4)], &[]), 0, Worth::All);
}

/// Pages that may be folded at this second by each way of asking: broken ones, rested ones, and all.
fn open(table: &mut Table, now: u32) -> (usize, usize, usize) {
    table.set_time(now, None);
    let again = listed(&table.refoldable());
    let all = listed(&table.worth_folding(real(0, 700), Worth::All));
    assert!(again.is_subset(&all));
    let rested = listed(&table.rest((&[], &[]), u64::MAX, Worth::All));
    assert!(rested.is_subset(&all));
    table.set_pending(real(600, 4));
    (again.len(), rested.len(), all.len())
}

/// A table whose pages were folded this often in a row and written 28 s later each time; and the second of the last
/// write.
fn short_lived(times: u32) -> (Table, u32) {
    let mut table = table();
    table.ask(real(0, 700));
    for now in (1..=times).map(|time| time * 40) {
        fold(&mut table, now - 28);
        write(&mut table, now);
    }
    assert_eq!(table.folds(), (18 * u64::from(times), 9 * u64::from(times)));
    (table, times * 40)
}

/// A program that discards its memory time and again is not to pay for mappings of the pool each time.
#[test]
fn fold_is_short_lived_if_discarded_within_a_minute() {
    let mut table = table();
    table.ask(real(0, 700));
    let folded_then_discarded = |table: &mut Table, (fold_at, discard_at): (u32, u32)| {
        fold(table, fold_at);
        table.set_time(discard_at, None);
        let before = table.folds().1;
        table.discard(real(0, 3));
        // Zeros that were given back cost no mapping.
        table.discard(real(600, 8));
        table.folds().1 - before
    };
    assert_eq!(folded_then_discarded(&mut table, (12, 40)), 3);
    table.rest((&[real(0, 3)], &[]), 0, Worth::All);
    let open = |table: &mut Table, now| {
        table.set_time(now, None);
        listed(&table.worth_folding(real(0, 10), Worth::All)).len()
    };
    assert_eq!([96, 100].map(|now| open(&mut table, now)), [7, 10]);
    assert_eq!(folded_then_discarded(&mut table, (100, 180)), 0);
}

#[test]
fn backoff_doubles_with_each_short_lived_fold_and_is_capped() {
    for (times, wait) in [(1, 60), (2, 120), (3, 240), (4, 240)] {
        let (mut table, now) = short_lived(times);
        assert_eq!([wait - 4, wait].map(|wait| open(&mut table, now + wait)), [WITHOUT, ALL], "{times}");
        // A fold that lasts makes them pages like any other.
        fold(&mut table, now + wait);
        write(&mut table, now + wait + 80);
        assert_eq!(open(&mut table, now + wait + 80), ALL);
    }
}

#[test]
fn write_during_backoff_restarts_it() {
    let (mut table, now) = short_lived(1);
    table.set_time(now + 60, None);
    table.rest((&[real(600, 2)], &[]), 0, Worth::All);
    assert_eq!(open(&mut table, now + 60 + 56), (5, 2, 698));
}

#[test]
fn rest_in_which_a_fold_would_have_lasted_takes_back_one_short_lived_fold() {
    let (mut table, now) = short_lived(2);
    // If the page has not rested for long enough, a write takes no short-lived fold back.
    write(&mut table, now + 64);
    let now = now + 64;
    assert_eq!([now + 116, now + 120].map(|now| open(&mut table, now)), [WITHOUT, ALL]);
    table.set_time(now + 40, Some(QuietInterval { seconds: 20, goes_on: true }));
    write(&mut table, now + 80);
    let now = now + 80;
    assert_eq!(
        [now + 116, now + 120].map(|now| open(&mut table, now)),
        [WITHOUT, ALL],
        "it has not been quiet for long"
    );
    write(&mut table, now + 68);
    let now = now + 68;
    assert_eq!([now + 56, now + 60].map(|now| open(&mut table, now)), [WITHOUT, ALL]);
    write(&mut table, now + 68);
    let now = now + 68;
    assert_eq!(open(&mut table, now), ALL);
    fold(&mut table, now + 60);
    write(&mut table, now + 84);
    assert_eq!(open(&mut table, now + 84), ALL);
}

#[test]
fn eager_table_leaves_no_page_alone() {
    let (mut table, now) = short_lived(1);
    table.be_eager();
    assert_eq!(open(&mut table, now), ALL);
}

#[test]
fn reason_against_a_fold_is_told_for_each_page() {
    let (mut table, now) = short_lived(1);
    let why = |table: &mut Table, page| {
        table.set_time(now + 20, None);
        table.why(real(page, 1), Worth::Rested(4))[0]
    };
    // Pages 0 to 4 were folded and written, 5 to 9 are folded, and page 700 was never asked in.
    assert_eq!(
        [0, 7, 100, 700].map(|page| why(&mut table, page)),
        [Why::BackedOff, Why::Other, Why::Other, Why::NotEnrolled]
    );
    table.set_time(now + 18, None);
    table.rest((&[real(100, 1)], &[]), 0, Worth::All);
    assert_eq!(why(&mut table, 100), Why::Young);
    table.set_time(now + 24, None);
    table.rest((&[], &[]), u64::MAX, Worth::All);
    assert_eq!(table.why(real(100, 1), Worth::Rested(4)), [Why::Other]);
}

#[test]
fn pages_rest_when_their_age_is_worth_folding() {
    // As in a burst: pages that were written 64 s ago, or longer, are worth folding. None of these pages is a probe
    // page before.
    let probes = TODAY.judged.probes;
    let old = Worth::Ages((64..=1024).map(|age| 1 << moment(false, Some(age))).fold(0, |all, one| all | one), probes);
    let closed = Worth::Ages(0, probes);
    assert!([8, 16, 32].iter().all(|age| (0..20).all(|page| !closed.allows(BASE + page, *age))));
    let mut table = table();
    table.ask(real(0, 20));
    table.set_time(100, None);
    let look = |table: &mut Table, written: &[PageRange], new: &[PageRange], ages| {
        listed(&table.rest((written, new), u64::MAX, ages)).len()
    };
    look(&mut table, &[real(0, 10)], &[real(10, 10)], old);
    assert_eq!(table.take_written(), 10);
    assert_eq!(look(&mut table, &[], &[], old), 10, "pages that are only new do not count as written");
    // A page that is written over and over counts as rested once.
    look(&mut table, &[real(0, 10)], &[], old);
    assert_eq!(table.take_written(), 0);
    table.set_time(160, None);
    assert_eq!(look(&mut table, &[], &[], old), 0);
    table.set_time(164, None);
    assert_eq!(look(&mut table, &[], &[], old), 10);
    assert_eq!((table.is_at_rest(real(15, 1), 64), table.is_at_rest(real(15, 1), 65)), (true, false));
    look(&mut table, &[real(0, 1)], &[], old);
    assert_eq!(table.take_written(), 1);
    assert_eq!((look(&mut table, &[], &[], old), look(&mut table, &[], &[], Worth::All)), (0, 1));
    // Pages that were written long ago are forgotten, and take no memory.
    assert_eq!(table.history.known_chunks(), 1);
    table.set_time(2000, None);
    assert_eq!(look(&mut table, &[], &[], Worth::All), 0);
    assert_eq!((table.known_chunks(), table.history.known_chunks()), (0, 0));
}

#[test]
fn folds_are_counted_by_moment() {
    let mut table = table();
    table.ask(real(0, 20));
    table.set_time(100, None);
    table.rest((&[real(0, 10)], &[]), u64::MAX, Worth::All);
    table.set_time(112, None);
    table.set_folded(SlotRun { start: real(0, 5).start, slot: PoolSlot::new(0, 7).unwrap(), pages: 5 });
    // These pages were never seen written.
    table.set_zeroed(real(10, 2));
    // Folds count by age where the quiet interval is expected to be over soon.
    table.set_time(140, Some(QuietInterval { seconds: 20, goes_on: false }));
    table.set_zeroed(real(5, 1));
    table.set_time(140, Some(QuietInterval { seconds: 20, goes_on: true }));
    table.set_zeroed(real(6, 4));
    let count = |list: &[(bool, Option<u32>, u64)]| {
        let mut sum = [0; MOMENTS];
        list.iter().for_each(|(is_quiet, age, pages)| sum[moment(*is_quiet, *age)] += pages);
        sum
    };
    let made = table.take_folds();
    assert_eq!(made.made, count(&[(false, Some(12), 5), (true, None, 2), (false, Some(40), 1), (true, Some(40), 4)]));
    assert_eq!(made.short, [0; MOMENTS]);
    // Some pages are written within a minute, others later.
    table.set_broken(real(0, 2));
    table.set_pending(real(5, 1));
    table.set_time(240, None);
    table.set_broken(real(2, 1));
    table.set_pending(real(6, 4));
    let ended = table.take_folds();
    assert_eq!((ended.made, ended.short), ([0; MOMENTS], count(&[(false, Some(12), 2), (false, Some(40), 1)])));
    assert_eq!(table.folds(), (12, 3));
}

#[test]
fn a_page_costs_at_most_eight_bytes() {
    assert!(crate::map::CHUNK_BYTES + policy::NOTES_BYTES + 32 <= 8 * CHUNK_PAGES as usize);
}

#[test]
fn scan_of_512_mib_without_writes_is_quick() {
    let mut table = table();
    table.ask(real(0, 131_072));
    for at in 0..8192 {
        table.set_folded(SlotRun { start: real(at * 16, 1).start, slot: PoolSlot::from_bits(at as u32), pages: 8 });
    }
    let mut foldable = Vec::new();
    let quickest = (0..20).map(|_| {
        let start = std::time::Instant::now();
        assert!(table.rest((&[], &[]), u64::MAX, Worth::All).is_empty());
        let rest = start.elapsed();
        table.foldable(&mut foldable);
        (start.elapsed(), rest)
    });
    let (both, rest) = quickest.min().unwrap();
    eprintln!("rest {rest:?}, with 8192 gaps to list {both:?}");
    assert!(rest.as_micros() < 1000 && both.as_micros() < 2000);
}
