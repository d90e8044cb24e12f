//! Runs that set ksmd to work say so before. They are refused while it would merge memory of other programs.

mod common;

use common::{Ends, json_of, not_root, pagefold};
use serde_json::Value;
use std::fs;
use std::io::Read;
use std::process::{Command, Output, Stdio};

/// A program with 1 MiB that ksmd may merge.
const MERGEABLE: &str = "
import mmap, sys
memory = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_MERGEABLE)
memory[:] = b'x' * (1 << 20)
print('there', flush=True)
sys.stdin.read()
";

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn run_that_would_have_other_programs_merged_is_refused_and_changes_nothing() {
    let run = "/sys/kernel/mm/ksm/run";
    if not_root() || !fs::exists(run).unwrap_or(false) {
        return;
    }
    let mut other = Command::new("python3");
    other.args(["-c", MERGEABLE]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut other = Ends(other.spawn().expect("start python3"));
    other.0.stdout.as_mut().expect("a pipe").read_exact(&mut [0; 5]).expect("it is there");
    let before = fs::read_to_string(run).expect("a kernel with KSM");
    let state = tempfile::tempdir().expect("a directory");
    let studies = ["study", "kim-bill", "--state", state.path().to_str().expect("a plain path")];
    let benches = [
        &["bench", "ksm", "--image", "synthetic", "--guests", "2", "--memory", "16M", "--rounds", "1"][..],
        &["bench", "huge", "--memory", "16M"],
        &["bench", "containers"],
        &studies,
    ];
    for words in benches {
        let output = pagefold(words);
        assert_eq!(output.status.code(), Some(3), "{words:?}: {}", said(&output));
        let named = format!("python3 {}", other.0.id());
        assert!(said(&output).contains(&named) && said(&output).contains("--yes"), "{words:?}: {}", said(&output));
    }
    assert_eq!(fs::read_to_string(run).expect("it is there"), before);
}

#[test]
fn list_has_the_time_of_each_study_that_can_be_run() {
    let listed = json_of(&pagefold(&["study", "--list", "--json"]));
    for study in listed.as_array().expect("a list") {
        let times = [&study["short_seconds"], &study["full_seconds"]].map(Value::as_f64);
        let is_timed = times.iter().all(|time| time.is_some_and(|time| time > 0.0));
        assert_eq!(is_timed, study["available"] == true, "{study}");
        assert!(times[0].is_none_or(|short| short <= 600.0), "{study}");
    }
    let text = pagefold(&["study", "--list"]).stdout;
    assert!(String::from_utf8_lossy(&text).contains(" min "), "{text:?}");
}
