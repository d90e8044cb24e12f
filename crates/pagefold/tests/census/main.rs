//! `pagefold census` on programs with known pages, compared with a count page by page and byte by byte.

#[path = "../common/mod.rs"]
mod common;

mod outputs;
mod rig;

use common::brute_force::Frames;
use common::{Known, Stage, census, census_unprivileged, guest, json_of, number};
use rig::{compare, pair};
use serde_json::Value;

#[test]
fn two_programs_are_counted_as_by_hand() {
    if common::not_root() {
        return;
    }
    let stage = Stage::new();
    let (one, two) = pair(&stage);
    let pids = [one.pid(), two.pid()];
    let found = census(&pids, &[]);
    compare(&found, &pids);
    // Both programs hold the 1000 pages of the first `fill`, the content of the 200 `same` pages, and zeros.
    assert!(number(&guest(&found, pids[0])["duplicates"]["other_groups"]) >= 1000 + 1 + 54);
    assert!(number(&found["runs"]["matched_pages"]) >= 2000);
    assert!(number(&found["runs"]["median"]) >= 1);
}

#[test]
fn threads_passes_and_ways_of_reading_find_the_same() {
    if common::not_root() {
        return;
    }
    let stage = Stage::new();
    let (one, two) = pair(&stage);
    let pids = [one.pid(), two.pid()];
    let plain = census(&pids, &[]);
    let ways = [
        &["--threads", "2"][..],
        &["--index-memory", "16K"],
        &["--index-memory", "40K", "--threads", "2"],
        &["--no-trace"],
        &["--no-trace", "--threads", "2"],
    ];
    for more in ways {
        let mut other = census(&pids, more);
        assert_eq!(other["host"]["read"], if more.contains(&"--no-trace") { "frames" } else { "processes" });
        let passes = number(&other["host"]["passes"]);
        assert_eq!(passes > 1, more.contains(&"--index-memory"), "{passes} passes with {more:?}");
        compare(&other, &pids);
        other["host"] = plain["host"].clone();
        assert_eq!(other, plain, "{more:?}");
    }
}

/// `process_vm_readv` would end the sharing and give every process a copy of its own.
#[test]
fn forked_pages_stay_one_frame_after_a_census() {
    if common::not_root() {
        return;
    }
    let mut known = Stage::new().start(&["alloc a 1000", "fill a 0 1000 1"]);
    let child: u32 = known.tell("fork").parse().unwrap();
    let pids = [known.pid(), child];
    for how in [&[][..], &["--threads", "2"], &["--no-trace"]] {
        let before = census(&pids, how);
        compare(&before, &pids);
        assert!(number(&before["already_shared"]["saved_pages"]) >= 1000, "{how:?}");
    }
    let before = census(&pids, &[]);
    // The parent writes the same bytes again: two frames of each content.
    known.tell("fill a 0 600 1");
    let after = census(&pids, &[]);
    compare(&after, &pids);
    // The program's own stack and heap change by some pages with each command.
    let more = number(&after["all_saved_pages"]) - number(&before["all_saved_pages"]);
    assert!((590..610).contains(&more), "{more}");
}

#[test]
fn census_makes_nothing_resident_and_zero_page_is_not_counted() {
    if common::not_root() {
        return;
    }
    let known = Stage::new().start(&["alloc a 50000", "read a 0 20000", "huge h 1024", "read h 0 1024"]);
    let rss = || {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", known.pid())).unwrap();
        statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap()
    };
    let before = rss();
    let found = census(&[known.pid()], &[]);
    let again = census(&[known.pid()], &["--no-trace"]);
    assert_eq!(rss(), before);
    compare(&found, &[known.pid()]);
    compare(&again, &[known.pid()]);
    assert!(number(&guest(&found, known.pid())["resident_pages"]) < 5000);
}

/// Asserts that frames do not look recently used after `--no-trace`. Counting by hand would itself use them.
#[test]
fn no_trace_leaves_pages_without_signs_of_use() {
    if common::not_root() {
        return;
    }
    let stage = Stage::new();
    let watched = stage.start(&["alloc a 3000", "fill a 0 3000 1"]);
    let pid = watched.pid();
    let frames = Frames::without_content(pid);
    let before = frames.used();
    census(&[pid], &["--no-trace"]);
    let after_no_trace = frames.used();
    census(&[pid], &[]);
    let after_plain = frames.used();
    // The kernel itself may age or promote a page or two meanwhile.
    assert!(after_no_trace.abs_diff(before) < 100, "{before} {after_no_trace}");
    assert!(after_plain > after_no_trace + 2000, "{before} {after_no_trace} {after_plain}");
}

#[test]
fn huge_pages_and_forbidden_pages_are_counted_page_by_page() {
    if common::not_root() {
        return;
    }
    let known = Stage::new().start(&["huge h 1024", "same h 0 1024 3", "alloc p 500", "fill p 0 500 9000", "none p"]);
    for how in [&[][..], &["--no-trace"]] {
        let found = census(&[known.pid()], how);
        compare(&found, &[known.pid()]);
        assert!(number(&guest(&found, known.pid())["duplicates"]["within"]) >= 1023);
    }
}

#[test]
fn the_host_side_counts_as_one_more_owner() {
    if common::not_root() {
        return;
    }
    // Not in /tmp, which may be a tmpfs, whose pages are no page cache of a file.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = dir.path().join("disk.img");
    let mut known = Stage::new().start(&["alloc a 600", "fill a 0 600 1"]);
    let contents: Vec<u8> = Frames::of(&[known.pid()]).content.into_values().flatten().collect();
    std::fs::write(&image, contents).unwrap();
    let with_image = |known: &Known| census(&[known.pid()], &["--host-file", image.to_str().unwrap()]);
    let pid = known.pid();
    let host = |found: &Value| number(&guest(found, pid)["duplicates"]["host"]);
    let alone = census(&[known.pid()], &[]);
    assert!(guest(&alone, pid)["duplicates"]["host"].is_null());
    let before = with_image(&known);
    assert!(host(&before) > 600);
    assert_eq!(number(&before["opportunity"]["host"]["total"]), host(&before));
    assert!(number(&before["opportunity"]["host"]["anon_file"]) >= 600);
    assert_eq!(number(&before["host"]["host_resident_pages"]) * 4096, image.metadata().unwrap().len());
    assert_eq!(alone["all_saved_pages"], before["all_saved_pages"], "the host's own copies are not the guests'");
    known.tell("fill a 300 300 40000");
    // The program's own stack and heap change by some pages with each command.
    assert!((300..310).contains(&(host(&before) - host(&with_image(&known)))));
}

#[test]
fn other_processes_of_the_host_are_one_owner_too() {
    if common::not_root() {
        return;
    }
    let stage = Stage::new();
    let (one, two) = pair(&stage);
    let args = common::census_args(&[one.pid()], &["--include-host"]);
    let output = common::pagefold(&args.iter().map(String::as_str).collect::<Vec<_>>());
    // A process of the host may end meanwhile, or not be open to root. The census is partial then.
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let partial = found["partial"].as_array().unwrap();
    assert!(partial.iter().all(|p| p["guest"] == "host"), "{partial:?}");
    assert_eq!(output.status.code(), Some(i32::from(!partial.is_empty())), "{partial:?}");
    // The pages of `two` count as the host's.
    assert!(number(&guest(&found, one.pid())["duplicates"]["host"]) >= 1000);
    assert!(number(&found["host"]["host_resident_pages"]) > 2000);
    drop(two);
}

#[test]
fn own_processes_are_counted_the_same_without_root() {
    if common::not_root() {
        return;
    }
    let stage = Stage::new();
    let file = format!("file f {}", stage.path("data"));
    let mut known = stage.start_unprivileged(&[
        "alloc a 4000",
        "fill a 0 1000 1",
        "same a 1000 200 7000000",
        "zero a 1200 300",
        "read a 1500 100",
        "huge h 512",
        "read h 0 512",
        &file,
        "read f 0 100",
    ]);
    let child: u32 = known.tell("fork").parse().unwrap();
    let pids = [known.pid(), child];
    let found = json_of(&census_unprivileged(&stage, &pids));
    let frames = Frames::of(&pids);
    for pid in pids {
        let guest = guest(&found, pid);
        assert_eq!(number(&guest["mapped_pages"]), frames.mapped(pid));
        assert_eq!(number(&guest["distinct_pages"]), frames.distinct(pid));
        assert_eq!(number(&guest["zero_pages"]), frames.zero(pid));
    }
    assert_eq!(number(&found["all_saved_pages"]), frames.superfluous());
    assert_eq!(found["host"]["frames"], "inferred");
}

#[test]
fn process_without_access_is_reported_and_others_are_complete() {
    if common::not_root() {
        return;
    }
    let stage = Stage::new();
    let known = stage.start_unprivileged(&["alloc a 100", "fill a 0 100 1"]);
    let own = std::process::id();
    let output = census_unprivileged(&stage, &[own, known.pid()]);
    assert_eq!(output.status.code(), Some(1));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["partial"][0]["pid"], own);
    assert!(
        found["partial"][0]["reason"].as_str().unwrap().contains("no right to read it: run as root"),
        "{}",
        found["partial"]
    );
    assert!(number(&guest(&found, known.pid())["resident_pages"]) > 100);
}

#[test]
fn host_that_is_not_counted_has_no_figures() {
    let known = Stage::new().start(&["alloc a 10", "fill a 0 10 1"]);
    let found = census(&[known.pid()], &[]);
    let guest = guest(&found, known.pid());
    for figure in [&guest["duplicates"]["host"], &found["opportunity"]["host"], &found["host"]["host_resident_pages"]] {
        assert!(figure.is_null(), "{figure}");
    }
    let text = common::pagefold(&["census", "--pid", &known.pid().to_string()]);
    let text = String::from_utf8(text.stdout).unwrap();
    let row = text.lines().find(|line| line.starts_with("guest and host")).unwrap();
    assert_eq!(row.split_whitespace().skip(3).collect::<Vec<_>>(), ["-"; 4]);
    assert!(text.contains("memory was not counted; --include-host"), "{text}");
    // A file whose page nobody else holds is counted all the same.
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "x").unwrap();
    let counted = census(&[known.pid()], &["--host-file", file.path().to_str().unwrap()]);
    assert!(counted["opportunity"]["host"]["total"].is_u64(), "{}", counted["opportunity"]);
}
