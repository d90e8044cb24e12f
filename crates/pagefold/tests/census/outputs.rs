//! Output of `pagefold census` over time and in files: rounds of `--watch`, samples and reports.

use crate::common;
use crate::common::formats::assert_documented;
use crate::common::{Stage, census, number};
use crate::rig::pair;
use serde_json::Value;

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
