//! `pagefold census` on programs with known pages, compared with a count page by page and byte by byte.

mod common;

use common::brute_force::Frames;
use common::formats::assert_documented;
use common::{Known, Stage, census, census_unprivileged, guest, json_of, number};
use serde_json::{Value, json};

/// Two programs with every kind of page that small programs have, and with some pages in common.
fn pair(stage: &Stage) -> (Known, Known) {
    let file = format!("file f {}", stage.path("data"));
    let common = [
        "alloc a 4000",
        "fill a 0 1000 1",
        "same a 1000 200 7000000",
        "zero a 1200 300",
        "read a 1500 100",
        "shared s 64",
        "fill s 0 64 5000",
        &file,
        "read f 0 100",
        "same f 20 10 7000000",
    ];
    let (mut one, mut two) = (stage.start(&common), stage.start(&common));
    one.tell("fill a 2000 500 1000000");
    two.tell("fill a 2000 400 2000000");
    two.tell("fill s 0 10 900000");
    (one, two)
}

/// Compares every figure that can be counted by hand.
fn compare(found: &Value, pids: &[u32]) {
    assert_documented(&["census --json"], found);
    let frames = Frames::of(pids);
    for &pid in pids {
        let guest = guest(found, pid);
        assert_eq!(number(&guest["mapped_pages"]), frames.mapped(pid), "mapped");
        assert_eq!(number(&guest["resident_pages"]), frames.resident(pid), "resident");
        assert_eq!(number(&guest["zero_pages"]), frames.zero(pid), "zero");
        assert_eq!(number(&guest["distinct_pages"]), frames.distinct(pid), "distinct");
        assert_eq!(number(&guest["duplicates"]["within"]), frames.resident(pid) - frames.distinct(pid), "within");
        assert_eq!(number(&guest["incremental_pages"]), frames.alone(pid), "alone: {pid} of {pids:?}");
        assert_eq!(number(&guest["already_shared_pages"]), frames.resident(pid) - frames.alone(pid), "shared");
        assert_eq!(guest["unreadable_pages"], 0);
    }
    assert_eq!(number(&found["all_saved_pages"]), frames.superfluous());
    assert_eq!(number(&found["isolation_price_pages"]), frames.superfluous() - frames.superfluous_isolated());
    let table = &found["opportunity"];
    let anonymous = number(&table["within"]["anon_anon"]) + number(&table["between"]["anon_anon"]);
    assert!(anonymous <= frames.superfluous_anonymous(), "{anonymous}");
    let (shared, saved) = frames.shared();
    assert_eq!(
        (number(&found["already_shared"]["frames"]), number(&found["already_shared"]["saved_pages"])),
        (shared, saved)
    );
    assert_eq!(found["host"]["frames"], "exact");
    assert_eq!(found["host"]["drifted_pages"], 0);
    assert_eq!(found["partial"], json!([]));
}

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
fn watch_reports_changed_gone_and_new_pages() {
    if common::not_root() {
        return;
    }
    let mut known = Stage::new().start(&["alloc a 2000", "fill a 0 1000 1", "fill a 1000 500 1"]);
    let args = common::census_args(&[known.pid()], &["--watch", "2", "--rounds", "2"]);
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_pagefold"))
        .args(&args)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut round = || -> Value {
        let mut line = String::new();
        std::io::BufRead::read_line(&mut output, &mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    };
    assert_eq!(round().get("change"), None);
    // 100 pages rewritten, 50 discarded, 30 new.
    known.tell("fill a 0 100 800000");
    known.tell("drop a 100 50");
    known.tell("fill a 1500 30 850000");
    let change = round()["change"].clone();
    assert_eq!(change["round"], 2);
    assert_eq!(number(&change["gone_pages"]), 50);
    let near = |what: &str, want: u64| {
        // The program's own stack and heap change by some pages with each command.
        assert!((want..want + 20).contains(&number(&change[what])), "{what}: {}", change[what]);
    };
    near("changed_pages", 100);
    near("new_pages", 30);
    // 150 of the 500 pairs have lost their first page.
    near("duplicate_pages", 700);
    near("still_duplicate_pages", 700);
    assert!(change["mean_duplicate_seconds"].as_f64().unwrap() >= 1.0);
    assert!(child.wait().unwrap().success());
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

#[test]
fn guest_that_ends_during_watch_ends_it_with_1() {
    let mut known = Stage::new().start(&["alloc a 10"]);
    let args = common::census_args(&[known.pid()], &["--watch", "1", "--rounds", "9"]);
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.args(args).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut watch = command.spawn().unwrap();
    let mut first = String::new();
    let output = std::io::BufReader::new(watch.stdout.as_mut().unwrap());
    std::io::BufRead::lines(output).next().unwrap().unwrap().clone_into(&mut first);
    assert!(first.contains(&format!("process:{}", known.pid())), "{first}");
    known.kill();
    drop(known);
    let output = watch.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("there is no process"), "{:?} {said}", output.status);
}

/// Files of a directory by name, with their content.
fn files(dir: &std::path::Path) -> std::collections::BTreeMap<String, String> {
    let file = |entry: std::fs::DirEntry| {
        let content = std::fs::read(entry.path()).unwrap();
        (entry.file_name().into_string().unwrap(), String::from_utf8_lossy(&content).into_owned())
    };
    std::fs::read_dir(dir).unwrap().map(Result::unwrap).map(file).collect()
}

#[test]
fn census_that_does_not_end_leaves_files_as_they_were() {
    let stage = Stage::new();
    let known = stage.start(&["alloc a 100000", "fill a 0 100000 1"]);
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (html, parquet) = (path("good.html"), path("good.parquet"));
    std::fs::write(&html, "a good report").unwrap();
    std::fs::write(&parquet, "good samples").unwrap();
    let before = files(dir.path());
    // The second output cannot be made: the first is not touched, and nothing is read.
    let args = common::census_args(&[known.pid()], &["--html", &html, "--parquet", "/nonexistent/x"]);
    let refused = common::pagefold(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!((refused.status.code(), refused.stdout.is_empty()), (Some(1), true));
    assert_eq!(files(dir.path()), before);
    let args = common::census_args(&[known.pid()], &["--html", &html, "--parquet", &parquet]);
    for signal in ["INT", "TERM", "KILL"] {
        let is_ended_by = || {
            std::fs::write(&html, "a good report").unwrap();
            std::fs::write(&parquet, "good samples").unwrap();
            signalled_census(&args, dir.path(), signal)
        };
        // On a busy machine the signal may come when the census is complete.
        assert!((0..20).any(|_| is_ended_by()), "{signal} came too late 20 times");
        assert_eq!(files(dir.path()), before, "{signal}");
    }
}

/// Whether a census that gets this signal ends by it, and not because it is complete. The signal is sent when its files in
/// `dir` are open, and so it is about to read pages, or does already.
fn signalled_census(args: &[String], dir: &std::path::Path, signal: &str) -> bool {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_pagefold"));
    let mut command = common::interruptible(command.args(args));
    let mut running = command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap();
    let pid = running.id().to_string();
    let has_files = || {
        let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten();
        let links = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
        links.filter(|link| link.starts_with(dir)).count() >= 2
    };
    while running.try_wait().unwrap().is_none() && !has_files() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // A process that has ended keeps its number until it is waited for.
    std::process::Command::new("kill").args(["-s", signal, &pid]).status().unwrap();
    std::os::unix::process::ExitStatusExt::signal(&running.wait().unwrap()).is_some()
}

#[test]
fn samples_and_report_are_written() {
    if common::not_root() {
        return;
    }
    let stage = Stage::new();
    let (one, two) = pair(&stage);
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (samples, report) = (path("samples.parquet"), path("report.html"));
    let found = census(&[one.pid(), two.pid()], &["--threads", "2", "--parquet", &samples, "--html", &report]);
    let file = std::fs::File::open(samples).unwrap();
    let reader = parquet::file::serialized_reader::SerializedFileReader::new(file).unwrap();
    let metadata = parquet::file::reader::FileReader::metadata(&reader).file_metadata();
    let rows = metadata.num_rows();
    let columns = metadata.schema_descr().columns().iter().map(|column| (column.name().to_owned(), Value::Null));
    assert_documented(&["census --parquet"], &columns.collect::<serde_json::Map<_, _>>().into());
    let resident: u64 = found["guests"].as_array().unwrap().iter().map(|g| number(&g["resident_pages"])).sum();
    assert_eq!(rows as u64, resident);
    let html = std::fs::read_to_string(report).unwrap();
    assert!(html.contains("<svg") && html.contains(&format!("process:{}", one.pid())) && html.ends_with("</html>\n"));

    let nowhere = common::census_args(&[one.pid()], &["--html", "/nowhere/report.html"]);
    let refused = common::pagefold(&nowhere.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!((refused.status.code(), refused.stdout.is_empty()), (Some(1), true));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("cannot create /nowhere/report.html: No such file"));
}
