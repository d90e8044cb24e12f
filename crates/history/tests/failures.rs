//! Kills, full disks, damaged files and clocks that are wrong: what can be kept is kept, and what is lost is told.

mod common;

use common::{BEGIN, MOST_BYTES, open, points, random, read, same};
use history::record::Recorder;
use std::fs;
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// Names the file to a process that this test starts.
const FILE: &str = "PAGEFOLD_TEST_FILE";

/// This program, with one of its tests, for the file at `path`.
fn again(test: &str, path: &Path, before: &[&str]) -> Command {
    let own = std::env::current_exe().expect("this program");
    let words: Vec<&str> = before.iter().copied().chain([own.to_str().expect("a plain path")]).collect();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).args([test, "--exact", "--nocapture", "--ignored"]).env(FILE, path);
    command
}

#[test]
#[ignore = "a part of killed_process_loses_nothing_that_it_has_written"]
fn records_until_it_is_killed() {
    let Some(path) = std::env::var_os(FILE) else { return };
    let mut recorder = open(Path::new(&path), BEGIN);
    let members: Vec<String> = (0..20).map(|n| format!("m{n}")).collect();
    let members: Vec<&str> = members.iter().map(String::as_str).collect();
    for n in 0.. {
        recorder.take(BEGIN + n * 10, &same("acme", &members, n));
        println!("{n}");
    }
}

#[test]
fn killed_process_loses_nothing_that_it_has_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut state = 3;
    for round in 0..3 {
        let path = dir.path().join(format!("{round}.db"));
        let mut child =
            again("records_until_it_is_killed", &path, &[]).stdout(Stdio::piped()).spawn().expect("start a recorder");
        // The window changes at 96.
        let until = 80 + random(&mut state, 60);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let told = |lines: &mut dyn Iterator<Item = String>| {
            lines.filter_map(|line| line.parse::<i64>().ok()).find(|n| *n >= until)
        };
        told(&mut lines).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let told = lines.filter_map(|line| line.parse().ok()).last().unwrap_or(until);
        let found = points(&read(&path, "m19", "mappings", 10));
        assert!(found.len() as i64 > told, "{} of {told}", found.len());
        assert!(found.iter().zip(0..).all(|(point, n)| *point == [BEGIN + n * 10, n]), "{found:?}");
        // The next process makes a block of what was left.
        let mut recorder = open(&path, BEGIN + told * 10);
        for window in [3, 4] {
            recorder.take(BEGIN + window * 960, &same("acme", &["m19"], 7));
        }
        drop(recorder);
        let after = points(&read(&path, "m19", "mappings", 10));
        assert_eq!((&after[..found.len()], after.last()), (&found[..], Some(&[BEGIN + 4 * 960, 7])));
    }
}

#[test]
#[ignore = "a part of full_disk_loses_only_old_windows_and_says_so"]
fn records_on_a_small_disk() {
    let Some(path) = std::env::var_os(FILE) else { return };
    let path = Path::new(&path);
    let ballast = path.with_file_name("ballast");
    let fill = || {
        let mut file = fs::File::create(&ballast).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
    };
    let mut recorder = open(path, BEGIN);
    let take = |recorder: &mut Recorder, n: i64| {
        recorder.take(BEGIN + n * 10, &same("acme", &["m"], n));
        recorder.is_written()
    };
    assert!((0..50).all(|n| take(&mut recorder, n)));
    fill();
    // The log may have room for some more: it is reused from its beginning now and then.
    let failed = (50..5000).find(|n| !take(&mut recorder, *n)).expect("the disk is full");
    let before = points(&read(path, "m", "mappings", 10));
    assert_eq!(before.len() as i64, failed, "what was written is read while the disk is full");
    // Ten minutes: the window stays in memory. Some of it may be written, where the log is used again.
    (failed + 1..failed + 60).for_each(|n| _ = take(&mut recorder, n));
    fs::remove_file(&ballast).unwrap();
    assert!(take(&mut recorder, failed + 60), "the file is written again");
    let end = (failed + 60) / 96 * 96 + 96;
    assert!((failed + 61..=end).all(|n| take(&mut recorder, n)));
    let found = read(path, "m", "mappings", 10);
    let all: Vec<[i64; 2]> = (0..=end).map(|n| [BEGIN + n * 10, n]).collect();
    assert_eq!(points(&found), all);
    assert!(found.notes.iter().any(|note| note.text.contains("could not be written for a time")), "{found:?}");
    // Hours: what does not fit into memory is lost.
    fill();
    let again = (end + 1..end + 5000).find(|n| !take(&mut recorder, *n)).expect("the disk is full");
    (again + 1..again + 960).for_each(|n| _ = take(&mut recorder, n));
    fs::remove_file(&ballast).unwrap();
    assert!((again + 960..again + 1100).all(|n| take(&mut recorder, n)));
    let found = read(path, "m", "mappings", 10);
    let lost = found.notes.iter().filter(|note| note.text.contains("were lost")).count() as i64;
    let missing = again + 1100 - points(&found).len() as i64;
    assert!(missing > 0 && missing <= lost * 96, "{missing} samples are missing, {lost} windows are told: {found:?}");
}

#[test]
fn full_disk_loses_only_old_windows_and_says_so() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can mount a small disk");
    }
    let dir = tempfile::tempdir().unwrap();
    let mount = format!("mount -t tmpfs -o size=3m none {} && exec \"$@\"", dir.path().display());
    let before = ["unshare", "-m", "sh", "-c", &mount, "sh"];
    let output = again("records_on_a_small_disk", &dir.path().join("h.db"), &before).output().expect("run unshare");
    assert!(
        output.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
}

/// Three hours of figures of 20 members, and the file that they make.
fn three_hours(path: &Path) -> i64 {
    let members: Vec<String> = (0..20).map(|n| format!("m{n}")).collect();
    let members: Vec<&str> = members.iter().map(String::as_str).collect();
    let mut recorder = open(path, BEGIN);
    (0..1080).for_each(|n| recorder.take(BEGIN + n * 10, &same("acme", &members, n * n)));
    1080
}

#[test]
fn damaged_file_is_set_aside_and_all_that_can_be_read_is_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("h.db");
    let written = three_hours(&path);
    // The middle of the file is overwritten, as by a disk that fails.
    let length = fs::metadata(&path).unwrap().len();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[0xa5; 8192], length / 2 / 4096 * 4096).unwrap();
    let mut recorder = open(&path, BEGIN + written * 10);
    // The damage is found by reading or by writing, and recording goes on.
    (0..200).for_each(|n| recorder.take(BEGIN + (written + n) * 10, &same("acme", &["m3"], 5)));
    assert!(recorder.is_written());
    let found = read(&path, "m3", "mappings", 10);
    let kept = points(&found).len() as i64;
    let is_told = found.damaged_blocks > 0 || found.notes.iter().any(|note| note.text.contains("damaged"));
    assert!(is_told || kept == written + 200, "{kept} of {written} are left, and nothing is told: {:?}", found.notes);
    assert!(kept > 200 + written / 2, "{kept} are left");
    assert!(points(&found).iter().all(|[at, value]| {
        let n = (at - BEGIN) / 10;
        *value == if n < written { n * n } else { 5 }
    }));
}

#[test]
fn file_that_is_no_database_is_set_aside_and_a_new_one_is_begun() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("h.db");
    three_hours(&path);
    let mut file = fs::File::options().write(true).open(&path).unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.write_all(&[0x5a; 100]).unwrap();
    let mut recorder = open(&path, BEGIN + 20_000);
    recorder.take(BEGIN + 20_000, &same("acme", &["m3"], 5));
    assert!(recorder.is_written());
    let found = read(&path, "m3", "mappings", 10);
    assert_eq!(points(&found), [[BEGIN + 20_000, 5]]);
    assert!(found.notes[0].text.contains("h.db.damaged") && found.notes[0].text.contains("lost"), "{found:?}");
    assert!(dir.path().join("h.db.damaged").exists());
    // A file of a later version is no damaged one: it is left as it is.
    drop(recorder);
    let db = rusqlite::Connection::open(&path).unwrap();
    db.pragma_update(None, "user_version", 99).unwrap();
    drop(db);
    assert!(Recorder::open(&path, MOST_BYTES, BEGIN).is_err_and(|e| format!("{e:#}").contains("later version")));
}

#[test]
fn clock_that_is_set_back_loses_nothing_and_one_that_jumps_ahead_drops_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("h.db");
    let mut recorder = open(&path, BEGIN);
    let mut take = |at: i64, value| recorder.take(at, &same("acme", &["m"], value));
    (0..300).for_each(|n| take(BEGIN + n * 10, 1));
    // Back by 40 minutes: the later recording is shown.
    (60..100).for_each(|n| take(BEGIN + n * 10, 2));
    let found = read(&path, "m", "mappings", 10);
    let wanted: Vec<[i64; 2]> =
        (0..300).map(|n| [BEGIN + n * 10, if (60..100).contains(&n) { 2 } else { 1 }]).collect();
    assert_eq!(points(&found), wanted);
    assert!(found.notes.iter().any(|note| note.text.contains("set back by 2390 s")), "{:?}", found.notes);
    // Ahead by twenty years for a quarter of an hour, and back.
    let far = BEGIN + (1 << 29);
    (0..90).for_each(|n| take(far + n * 10, 3));
    (300..500).for_each(|n| take(BEGIN + n * 10, 4));
    let found = points(&read(&path, "m", "mappings", 10));
    assert_eq!(found.iter().filter(|[_, value]| *value < 3).count(), 300, "{found:?}");
    assert_eq!(found.iter().filter(|[_, value]| *value == 4).count(), 200);
    // Also while nothing was recorded, as over a start of the host.
    drop(recorder);
    open(&path, BEGIN).take(BEGIN + 100, &same("acme", &["m"], 5));
    let found = read(&path, "m", "mappings", 10);
    assert!(found.notes.iter().any(|note| note.text.contains("set back by 4890 s")), "{:?}", found.notes);
    assert_eq!(points(&found)[10], [BEGIN + 100, 5]);
}
