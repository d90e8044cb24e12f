//! Figures of days and years: longer steps, the file's bound, memory, and the time that an answer takes.

mod common;

use api::history::Wanted;
use common::{BEGIN, open, points, random, read, same};
use history::fields::{OF_GROUP, OF_MEMBER};
use history::read::{OVER_HTTP, answer};
use history::record::Recorder;
use history::sample::Sampled;
use history::store::Store;
use std::fs;
use std::path::Path;
use std::time::Instant;

/// Seconds of a day.
const DAY_S: i64 = 86_400;

/// Puts all together that is old enough.
fn roll_up(path: &Path, now: i64) {
    let mut store = Store::open(path, 1 << 30).expect("open the file");
    while !store.roll_up(now).expect("roll up") {}
}

#[test]
fn old_figures_have_longer_steps_and_the_oldest_are_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("h.db");
    let mut recorder = open(&path, BEGIN);
    // A value for each ten seconds of an hour of the first day, with a gap, and a few on the next.
    for n in (0..360).filter(|n| !(120..180).contains(n)) {
        recorder.take(BEGIN + n * 10, &same("acme", &["m"], n));
    }
    (0..200).for_each(|n| recorder.take(BEGIN + DAY_S + n * 10, &same("acme", &["m"], 7)));
    recorder.take(BEGIN + 2 * DAY_S, &same("acme", &["m"], 8));
    drop(recorder);
    let all = points(&read(&path, "m", "mappings", 10));
    roll_up(&path, BEGIN + 2 * DAY_S - 1);
    assert_eq!(points(&read(&path, "m", "mappings", 10)), all, "a day is not over");
    roll_up(&path, BEGIN + 2 * DAY_S);
    let found = points(&read(&path, "m", "mappings", 10));
    let minutes: Vec<[i64; 2]> =
        (0..60).filter(|n| !(20..30).contains(n)).map(|n| [BEGIN + n * 60, n * 6 + 2]).collect();
    assert_eq!(found[..50], minutes);
    assert_eq!(found[50..], all[300..]);
    // Of a counter, the last value stays.
    let counter = points(&read(&path, "m", "refolded_pages_total", 10));
    assert_eq!((counter[0], counter[49]), ([BEGIN, 5], [BEGIN + 59 * 60, 359]));
    roll_up(&path, BEGIN + 33 * DAY_S);
    let quarters = points(&read(&path, "m", "mappings", 10));
    assert_eq!(quarters[..2], [[BEGIN, 44], [BEGIN + 900, (15..20).map(|n| n * 6 + 2).sum::<i64>() / 5]]);
    assert_eq!(points(&read(&path, "m", "refolded_pages_total", 10))[3], [BEGIN + 2700, 359]);
    roll_up(&path, BEGIN + 732 * DAY_S);
    assert!(points(&read(&path, "m", "mappings", 10))[0][0] >= BEGIN + DAY_S, "the first day is dropped");
    roll_up(&path, BEGIN + 800 * DAY_S);
    let rest = read(&path, "m", "mappings", 10);
    assert_eq!(points(&rest).len(), 1, "of the window that was under way: {rest:?}");
}

#[test]
fn full_file_loses_the_oldest_blocks_of_the_group_that_has_most() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("h.db");
    let most = 3 << 20;
    let mut recorder = Recorder::open(&path, most, BEGIN).unwrap();
    let mut state = 5;
    let mut sampled = |n: i64| -> Sampled {
        let mut moment = same("small", &["m"], n);
        // A tenant whose members have other names each quarter of an hour.
        for member in 0..20 {
            let values = (0..OF_MEMBER.len()).map(|_| Some(random(&mut state, 1 << 40))).collect();
            moment.push(("large".into(), format!("{}-{member}", n / 96), values));
        }
        moment
    };
    for n in 0..96 * 40 {
        recorder.take(BEGIN + n * 10, &sampled(n));
    }
    assert!(recorder.is_written());
    assert!(fs::metadata(&path).unwrap().len() <= most);
    let found = read(&path, "m", "mappings", 10);
    assert_eq!(points(&found).len(), 96 * 40, "the small group has all of its own");
    let told: Vec<_> =
        found.notes.iter().filter(|note| note.text.contains("blocks of group large were dropped")).collect();
    assert_eq!(told.len(), 1, "{:?}", found.notes);
    let store = Store::read(&path).unwrap();
    assert!(store.owners().unwrap().len() < 20 * 40, "members without blocks are forgotten");
}

/// Figures that change as those of guests do.
struct World {
    state: u64,
    members: Vec<Vec<i64>>,
    names: Vec<String>,
}

impl World {
    fn new(members: usize, series: usize) -> Self {
        let mut state = 9;
        let members: Vec<Vec<i64>> =
            (0..members).map(|_| (0..series).map(|_| random(&mut state, 1 << 18) << 12).collect()).collect();
        let names = (0..members.len()).map(|n| format!("guest-{n}")).collect();
        Self { state, members, names }
    }

    fn next(&mut self) -> Sampled {
        for values in &mut self.members {
            for (field, value) in values.iter_mut().enumerate() {
                *value += match field % 6 {
                    0 => (random(&mut self.state, 401) - 200) << 12,
                    1 | 2 if random(&mut self.state, 8) == 0 => (random(&mut self.state, 17) - 8) << 12,
                    3 => 30_000 + random(&mut self.state, 6000),
                    4 if random(&mut self.state, 6) == 0 => random(&mut self.state, 5000),
                    _ => 0,
                };
            }
        }
        let member = |(name, values): (&String, &Vec<i64>)| {
            ("acme".to_owned(), name.clone(), values.iter().map(|value| Some(*value)).collect())
        };
        self.names.iter().zip(&self.members).map(member).collect()
    }
}

/// Memory of this process in page frames, in KiB.
fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn thousand_series_take_two_kibibytes_each_and_two_bytes_a_sample() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("h.db");
    let (members, series) = if std::env::var_os("PAGEFOLD_LONG_TESTS").is_some() { (500, 30) } else { (100, 30) };
    let mut world = World::new(members, series);
    let before = resident_kib();
    let mut recorder = Recorder::open(&path, 1 << 30, BEGIN).unwrap();
    let mut most = 0;
    for n in 0..96 * 3 {
        recorder.take(BEGIN + n * 10, &world.next());
        most = most.max(resident_kib());
    }
    drop(recorder);
    let store = rusqlite::Connection::open(&path).unwrap();
    store.execute_batch("DELETE FROM tick; VACUUM").unwrap();
    drop(store);
    let samples = (members * series * 96 * 2) as f64;
    let bytes = fs::metadata(&path).unwrap().len() as f64 / samples;
    let each = (most - before) as f64 / (members * series) as f64;
    println!("{members} members of {series} series: {bytes:.2} B a sample, {each:.2} KiB a series, {most} KiB in all");
    assert!(bytes < 2.0, "{bytes}");
    // SQLite's own memory is some 4 MiB. 500 members of 30 series took 1.8 KiB a series with it; 1 KiB was wanted.
    assert!(most - before < 2 * (members * series) as u64 + (4 << 10), "{} KiB", most - before);
    assert!(members < 500 || most < 32 << 10, "{most} KiB");
}

/// `cargo nextest run --run-ignored only -E 'test(year_of_figures_is_read)' --no-capture`
#[test]
#[ignore = "writes a year of figures"]
fn year_of_figures_is_read_within_200_ms() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("h.db");
    let mut world = World::new(20, OF_MEMBER.len());
    // A sample each 15 minutes, in windows of their own: as a year that was put together.
    let mut recorder = Recorder::open(&path, 1 << 30, BEGIN).unwrap();
    let mut state = 1;
    for n in 0..366 * 96 {
        let mut moment = world.next();
        moment.push((
            "acme".into(),
            String::new(),
            (0..OF_GROUP.len()).map(|_| Some(random(&mut state, 1 << 30))).collect(),
        ));
        recorder.take(BEGIN + n * 900 / 10 * 10, &moment);
    }
    drop(recorder);
    let now = BEGIN + 366 * DAY_S;
    roll_up(&path, now);
    println!("{} bytes", fs::metadata(&path).unwrap().len());
    let store = Store::read(&path).unwrap();
    let year = Wanted { since: Some(now - 365 * DAY_S), until: Some(now), ..Wanted::default() };
    let one = Some("guest-7".to_owned());
    for (words, wanted) in [
        ("a figure, 15 min", Wanted { member: one.clone(), figure: Some("saved_bytes".into()), ..year.clone() }),
        ("a member, 1 day", Wanted { member: one, step: Some(DAY_S), ..year.clone() }),
        (
            "a figure of 20 members, 1 day",
            Wanted { figure: Some("mappings".into()), step: Some(DAY_S), ..year.clone() },
        ),
        ("all, 1 day", Wanted { step: Some(7 * DAY_S), ..year }),
    ] {
        let start = Instant::now();
        let history = answer(&store, &wanted, now, words.starts_with("a ").then_some(OVER_HTTP)).unwrap();
        let took = start.elapsed();
        let points: usize = history.series.iter().map(|series| series.points.len()).sum();
        println!("{words}: {} series, {points} points, {took:?}", history.series.len());
        assert!(points > 300 && (took.as_millis() < 200 || words.starts_with("all")), "{words}: {took:?}");
    }
}
