//! Language runtimes: their heaps are filled, rested, checked, partly freed and collected by a program of ours in their
//! language; CPython runs its own tests.

use crate::common::number;
use crate::rig::{Peer, Side};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

pub const GO: Peer = Peer {
    name: "go",
    about: "a Go program with cgo: slices filled, checked, freed, given back to the kernel by raw system calls",
    floor: 1000,
    needs: &[("go", "golang-go"), ("cc", "gcc")],
    is_short: true,
    at_once: true,
    recipe: go,
};

pub const JAVA: Peer = Peer {
    name: "java",
    about: "OpenJDK with G1: arrays filled, checked, freed, collected, the heap given back",
    floor: 1000,
    needs: &[("java", "default-jdk-headless")],
    is_short: false,
    at_once: true,
    recipe: java,
};

pub const ZGC: Peer = Peer {
    name: "java-zgc",
    about: "OpenJDK with ZGC: its heap is a memory file mapped several times, not private memory, so none of it is folded",
    floor: 0,
    needs: &[("java", "default-jdk-headless")],
    is_short: false,
    at_once: true,
    recipe: zgc,
};

pub const NODE: Peer = Peer {
    name: "node",
    about: "Node.js: buffers and strings filled, checked, freed, collected",
    floor: 1000,
    needs: &[("node", "nodejs")],
    is_short: false,
    at_once: true,
    recipe: node,
};

pub const PYTHON: Peer = Peer {
    name: "cpython",
    about: "CPython's own tests of mmap, fork, threads, multiprocessing and its collector",
    floor: 0,
    needs: &[("/usr/lib/python3.11/test/test_mmap.py", "libpython3.11-testsuite")],
    is_short: false,
    at_once: true,
    recipe: python,
};

/// Path of a program's source.
fn source(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name);
    path.to_str().expect("a plain path").to_owned()
}

/// Two members that run the same words; each must count something of everything. How often depends on the time.
fn pair(side: &Side, words: &[&str], seconds: u64) -> Value {
    let time = seconds.to_string();
    let mut members = ["one", "other"].map(|name| side.start(name, &[words, &[&time]].concat()));
    for member in &mut members {
        let counted = member.finish(seconds * 4 + 60);
        for (what, count) in counted.as_object().expect("counts") {
            assert!(number(count) > 0, "no {what} in {counted}");
        }
    }
    json!("all contents right")
}

fn go(side: &Side) -> Value {
    let program = side.path("slices");
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("go-cache").display().to_string();
    let go = crate::rig::find("go").expect("go").display().to_string();
    let words =
        ["env", "CGO_ENABLED=1", "GOFLAGS=", "GOTOOLCHAIN=local", &format!("GOCACHE={cache}"), &go, "build", "-o"];
    side.aside(&[&words[..], &[&program, &source("slices.go")]].concat(), "");
    pair(side, &[&program], if side.is_short { 8 } else { 20 })
}

fn java(side: &Side) -> Value {
    let heap = "-Xms16m -Xmx256m -XX:+UseG1GC -XX:MinHeapFreeRatio=5 -XX:MaxHeapFreeRatio=10";
    let words: Vec<&str> = ["java"].into_iter().chain(heap.split(' ')).collect();
    side.aside(&["javac", "-d", &side.path(""), &source("Heap.java")], "");
    pair(side, &[&words[..], &["-cp", &side.path(""), "Heap"]].concat(), 20)
}

fn zgc(side: &Side) -> Value {
    side.aside(&["javac", "-d", &side.path(""), &source("Heap.java")], "");
    let words = ["java", "-XX:+UseZGC", "-XX:ZUncommitDelay=1", "-Xms16m", "-Xmx256m", "-cp", &side.path(""), "Heap"];
    pair(side, &words, 20)
}

fn node(side: &Side) -> Value {
    pair(side, &["node", "--expose-gc", &source("heap.js")], 20)
}

/// Tests of CPython that have to do with memory and processes.
const PYTHON_TESTS: [&str; 6] =
    ["test_mmap", "test_fork1", "test_threading", "test_multiprocessing_fork", "test_gc", "test_threadedtempfile"];

fn python(side: &Side) -> Value {
    // Some of these tests measure time; what fails is run once more.
    let words = ["/usr/bin/python3.11", "-m", "test", "-v", "-w"];
    let ended = side.run_to_end("tests", &[&words, &PYTHON_TESTS[..]].concat(), 600);
    let text = format!("{}\n{}", ended.output, ended.errors);
    let results: BTreeSet<(String, &str)> = text.lines().filter_map(result_of).collect();
    let names: BTreeSet<&String> = results.iter().map(|(name, _)| name).collect();
    let is_ok =
        |name: &String| results.iter().any(|(found, result)| found == name && ["ok", "skipped"].contains(result));
    let not_ok: Vec<&&String> = names.iter().filter(|name| !is_ok(name)).collect();
    assert!(names.len() > 300, "only {} tests ran: {}: {text}", names.len(), ended.status);
    json!({"tests": names.len(), "not_ok": not_ok, "status": ended.status.to_string()})
}

/// Name and result of a test, from a line of unittest's: `test_x (test.test_mmap.MmapTests.test_x) ... ok`.
fn result_of(line: &str) -> Option<(String, &str)> {
    let (name, result) = line.split_once(" ... ")?;
    let name = name.split('(').nth(1)?.split(')').next()?;
    let result = result.split_whitespace().next().filter(|word| ["ok", "FAIL", "ERROR", "skipped"].contains(word))?;
    Some((name.to_owned(), result))
}
