//! Sketches of real processes, and what is made of them: `pagefold sketch`, `fleet`, `place`, `group suggest`.

mod common;

use common::formats::assert_documented;
use common::service::{Member, Service, cannot_fold, folded_pages, until};
use common::{Known, Stage, json_of, number, pagefold};
use parquet::file::reader::SerializedFileReader;
use parquet::record::Field;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

/// Most pages of the program's own anonymous memory: heap, stack, data of libraries.
const OWN_PAGES: u64 = 400;

/// Tables and keys of a test.
struct Tables {
    dir: tempfile::TempDir,
}

impl Tables {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("a directory") }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().expect("a plain path").to_owned()
    }

    /// Sketches processes into a file, and returns what is printed.
    fn sketch(&self, pids: &[u32], file: &str, more: &[&str]) -> Value {
        let (keys, file) = (self.path("keys"), self.path(file));
        let pids: Vec<String> = pids.iter().flat_map(|pid| ["--pid".to_owned(), pid.to_string()]).collect();
        let words = ["sketch", "--json", "--keys", &keys, "--parquet", &file];
        let words = words.into_iter().chain(more.iter().copied()).chain(pids.iter().map(String::as_str));
        json_of(&pagefold(&words.collect::<Vec<_>>()))
    }

    fn fleet(&self, file: &str) -> Value {
        json_of(&pagefold(&["fleet", "--json", &self.path(file)]))
    }
}

fn row(found: &Value, pid: u32) -> &Value {
    let id = format!("process:{pid}");
    let rows = found["rows"].as_array().expect("rows");
    rows.iter().find(|row| row["guest"] == *id).unwrap_or_else(|| panic!("no {id} in {found}"))
}

/// Asserts that a count is this, and at most the program's own pages more.
fn assert_about(value: &Value, pages: u64) {
    assert!((pages..=pages + OWN_PAGES).contains(&number(value)), "{value}, not {pages}");
}

/// Two processes with 1,500 contents in common, and 299 repeats within the first.
fn alike(stage: &Stage) -> [Known; 2] {
    [
        stage.start(&["alloc a 3000", "fill a 0 2000 1", "same a 2000 300 90000", "zero a 2300 200"]),
        stage.start(&["alloc a 3000", "fill a 0 1500 1", "fill a 1500 500 77777"]),
    ]
}

#[test]
fn sketches_count_what_processes_hold_and_have_in_common() {
    let (stage, tables) = (Stage::new(), Tables::new());
    let known = alike(&stage);
    let pids = [known[0].pid(), known[1].pid()];
    // A fine sketch of so few pages holds all of them, so that unions are exact.
    let found = tables.sketch(&pids, "together.parquet", &["--fine", "--group-by", "all"]);
    assert_documented(&["pagefold sketch"], &found);
    let (one, two) = (row(&found, pids[0]), row(&found, pids[1]));
    assert_about(&one["resident_pages"], 2500);
    assert_about(&one["zero_pages"], 200);
    assert_about(&one["distinct_pages"], 2001);
    assert_about(&two["resident_pages"], 2000);
    assert_eq!((&one["folded_pages"], &one["key"], &one["group"]), (&0.into(), &two["key"], &"all".into()));
    let host = found["rows"].as_array().unwrap().iter().find(|row| row["guest"].is_null()).expect("the host's row");
    assert_eq!(number(&host["memory_bytes"]) >> 10, ram_kib());

    let fleet = tables.fleet("together.parquet");
    assert_documented(&["pagefold fleet"], &fleet);
    assert_eq!((&fleet["hosts"], &fleet["guests"]), (&1.into(), &2.into()));
    assert_about(&(number(&fleet["saved_without_zero_bytes"]) >> 12).into(), 1500 + 299);
    assert_about(&(number(&fleet["inside_bytes"]) >> 12).into(), 299);

    // By themselves, guests have keys of their own: nobody sees that they hold the same.
    let apart = tables.sketch(&pids, "apart.parquet", &["--fine"]);
    assert_ne!(row(&apart, pids[0])["key"], row(&apart, pids[1])["key"]);
    let apart = tables.fleet("apart.parquet");
    assert_eq!(apart["saved_without_zero_bytes"], apart["inside_bytes"]);
}

/// Hashes of the sketches of a table, by guest. Three words of 8 bytes stand before them at most.
fn hashes(path: &str) -> BTreeMap<String, BTreeSet<u64>> {
    let file = std::fs::File::open(path).expect("a table");
    let rows = SerializedFileReader::new(file).expect("a Parquet file").into_iter();
    let mut found = BTreeMap::new();
    for row in rows.map(|row| row.expect("a row")) {
        let column =
            |name: &str| row.get_column_iter().find(|(column, _)| *column == name).map(|(_, field)| field.clone());
        let (Some(Field::Str(guest)), Some(Field::Bytes(sketch))) = (column("guest"), column("sketch")) else {
            continue;
        };
        let (words, _) = sketch.data().as_chunks::<8>();
        let first = usize::from(sketch.data()[0]);
        found.insert(guest, words[first..].iter().map(|word| u64::from_le_bytes(*word)).collect());
    }
    found
}

#[test]
fn sketches_of_two_keys_have_nothing_in_common() {
    let (stage, tables) = (Stage::new(), Tables::new());
    let known = alike(&stage);
    let pids = [known[0].pid(), known[1].pid()];
    let common = |file: &str, more: &[&str]| {
        tables.sketch(&pids, file, &[more, &["--fine"]].concat());
        let found = hashes(&tables.path(file));
        let [one, two] = pids.map(|pid| &found[&format!("process:{pid}")]);
        assert!(one.len() > 2000 && two.len() > 2000, "{} {}", one.len(), two.len());
        one.intersection(two).count()
    };
    assert!(common("together", &["--group-by", "all"]) >= 1500);
    assert_eq!(common("apart", &[]), 0);
    // Another host with the same group, but without its key.
    let here = hashes(&tables.path("together"));
    std::fs::remove_dir_all(tables.path("keys")).unwrap();
    common("there", &["--group-by", "all"]);
    let there = hashes(&tables.path("there"));
    assert!(here.iter().all(|(guest, hashes)| hashes.is_disjoint(&there[guest])));
}

fn ram_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    text.lines().next().unwrap().split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn plan_and_suggestions_are_made_of_sketches() {
    let (stage, tables) = (Stage::new(), Tables::new());
    let known = alike(&stage);
    let pids = [known[0].pid(), known[1].pid()];
    tables.sketch(&pids, "a.parquet", &["--group-by", "all"]);
    let plan = json_of(&pagefold(&["place", "--json", &tables.path("a.parquet")]));
    assert_documented(&["pagefold place"], &plan);
    assert_eq!((&plan["hosts"], &plan["guests"], &plan["moves"]), (&1.into(), &2.into(), &Value::Array(Vec::new())));
    assert_eq!(plan["policies"].as_array().unwrap().len(), 3);
    let table = pagefold(&["place", &tables.path("a.parquet")]);
    assert!(String::from_utf8_lossy(&table.stdout).contains("No move leads to likeness."), "{table:?}");

    let [one, two] = pids.map(|pid| pid.to_string());
    let found = json_of(&pagefold(&["group", "suggest", "--json", "--pid", &one, "--pid", &two]));
    assert_documented(&["pagefold group suggest"], &found);
    let suggestions = found["suggestions"].as_array().expect("a list");
    assert_eq!((suggestions.len(), &suggestions[0]["guests"]), (1, &2.into()), "{found}");
    assert_about(&(number(&suggestions[0]["saves_bytes"]) >> 12).into(), 1500);
    assert_eq!(suggestions[0]["reveals"].as_array().map(Vec::len), Some(2));
}

#[test]
fn simulated_day_has_each_policy() {
    let words =
        ["bench", "place", "--json", "--hosts", "10", "--guests", "200", "--tenants", "4", "--storm", "25", "--day"];
    let found = json_of(&pagefold(&words));
    assert_documented(&["pagefold bench place"], &found);
    let days = found["days"].as_array().expect("a list");
    assert_eq!(days.iter().map(|day| &day["name"]).collect::<Vec<_>>(), ["pack", "stripe", "likeness"]);
    assert!(days.iter().all(|day| day["refused"] == 0 && day["most_guests"] == 250), "{found}");
}

#[test]
fn old_sketches_and_a_missing_program_are_refused() {
    let (stage, tables) = (Stage::new(), Tables::new());
    let known = stage.start(&["alloc a 10", "fill a 0 10 1"]);
    let file = tables.path("a.parquet");
    tables.sketch(&[known.pid()], "a.parquet", &[]);
    until(60, "sketches are older than a second", || {
        let old = pagefold(&["place", "--max-age", "1s", &file]);
        old.status.code() == Some(2) && String::from_utf8_lossy(&old.stderr).contains("take new ones")
    });
    // The copy has nothing beside it.
    let missing = Command::new(stage.path("pagefold")).args(["sketch", "--json"]).output().expect("run pagefold");
    let said = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(missing.status.code() == Some(3) && said.contains("cargo build --release -p place"), "{missing:?}");
    let other = pagefold(&["fleet", &stage.path("data")]);
    let said = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(other.status.code() == Some(2) && said.contains("it is no Parquet file"), "{other:?}");
}

#[test]
fn directory_has_newest_sketches_of_host() {
    let (stage, tables) = (Stage::new(), Tables::new());
    let known = stage.start(&["alloc a 10", "fill a 0 10 1"]);
    std::fs::create_dir(tables.path("tables")).unwrap();
    let mut files: Vec<PathBuf> = Vec::new();
    // Files are named by the second.
    until(60, "two files were written", || {
        let found = tables.sketch(&[known.pid()], "tables", &["--keep", "1"]);
        files.push(found["file"].as_str().expect("a path").into());
        files.dedup();
        files.len() == 2
    });
    assert_eq!(files.iter().map(|file| file.exists()).collect::<Vec<_>>(), [false, true]);
    assert_eq!(tables.fleet("tables")["guests"], 1);
}

/// A member, and the same program that is none.
#[test]
fn folded_pages_are_counted_though_no_page_table_has_them() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let program = PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    let program = program.to_str().expect("a plain path");
    let lines = ["alloc x 1500", "fill x 0 1000 1", "same x 1000 500 90000"];
    let mut members: [Member; 2] = ["a", "b"].map(|name| service.run("acme", name, &[], &[program]));
    let of_member = lines.iter().chain(&["mergeable x"]);
    members.iter_mut().for_each(|member| of_member.clone().for_each(|line| _ = member.tell(line)));
    until(60, "all is folded", || ["a", "b"].map(|name| folded_pages(&service.show("acme"), name)) == [1500, 1500]);
    let (stage, tables) = (Stage::new(), Tables::new());
    let free = stage.start(&lines);
    let pids = [members[0].pid(), members[1].pid(), free.pid()];
    let found = tables.sketch(&pids, "a.parquet", &["--fine", "--group-by", "all"]);
    for pid in pids {
        assert_about(&row(&found, pid)["resident_pages"], 1500);
        assert_about(&row(&found, pid)["distinct_pages"], 1001);
        assert_eq!(number(&row(&found, pid)["folded_pages"]), if pid == free.pid() { 0 } else { 1500 });
    }
    let fleet = tables.fleet("a.parquet");
    // 499 repeats within each, and 1,001 contents of all three, of which one stays.
    let saved = number(&fleet["saved_without_zero_bytes"]) >> 12;
    assert!((3 * 499 + 2 * 1001..3 * (499 + 1001) + OWN_PAGES).contains(&saved), "{saved}");
}

/// Processes that write sketches into this directory.
fn sketchers(dir: &str) -> usize {
    let writes = |pid: &u32| {
        let process = host::Process::read(*pid);
        process
            .is_ok_and(|process| process.program() == "pagefold-place" && process.cmdline.contains(&format!("{dir}/")))
    };
    host::pids().expect("processes").iter().filter(|pid| writes(pid)).count()
}

/// A program beside the service writes them.
#[test]
fn service_has_sketches_written_within_their_bound_for_as_long_as_it_lives() {
    if cannot_fold() {
        return;
    }
    let tables = Tables::new();
    let (dir, keys) = (tables.path("made/tables"), tables.path("keys"));
    let sketch = format!("[sketch]\nevery = 1\ndir = '{dir}'\nkeys = '{keys}'\nkeep = 2\n");
    let mut service = Service::start_with(Some(&format!("{sketch}[[group]]\nname = 'acme-TOKEN'\n")));
    let program = PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    let mut member = service.run("acme", "a", &[], &[program.to_str().expect("a plain path")]);
    ["alloc x 100", "fill x 0 100 1", "mergeable x"].iter().for_each(|line| _ = member.tell(line));
    let files = || -> BTreeSet<PathBuf> {
        let entries = std::fs::read_dir(&dir).into_iter().flatten().flatten().map(|entry| entry.path());
        entries.filter(|path| path.extension().is_some_and(|end| end == "parquet")).collect()
    };
    let mut seen = BTreeSet::new();
    until(60, "five tables were written", || {
        let now = files();
        // One that was just written is there before the oldest goes.
        assert!(now.len() <= 3, "{now:?}");
        seen.extend(now);
        seen.len() >= 5
    });
    until(30, "the member is in a table", || {
        let fleet = pagefold(&["fleet", "--json", &dir]);
        fleet.status.success() && number(&json_of(&fleet)["guests"]) >= 1
    });
    assert_eq!(sketchers(&dir), 1, "{}", service.log());
    // The supervisor is killed, and the next one wants none.
    service.configure("[[group]]\nname = 'acme-TOKEN'\n");
    until(30, "nobody writes sketches", || sketchers(&dir) == 0);
    service.configure(&format!("{sketch}[[group]]\nname = 'acme-TOKEN'\n"));
    until(30, "sketches are written again", || sketchers(&dir) == 1);
    service.end();
    until(30, "nobody writes sketches", || sketchers(&dir) == 0);
}
