//! `pagefold guests` on real processes, a real control group and real QEMUs, compared with the kernel's own figures.

mod common;

use common::formats::assert_documented;
use common::qemu::{FILLED_BYTES, Qemu, RAM_BYTES};
use common::{Known, Stage, json_of, number, pagefold, stop, unprivileged};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

fn guests(args: &[&str]) -> Output {
    pagefold(&[&["guests", "--json"], args].concat())
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Sum of some fields of `smaps_rollup`, in bytes.
fn rollup(pid: u32, keys: &[&str]) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let kib = |key: &&str| -> u64 {
        let line = text.lines().find(|l| l.split(':').next() == Some(key)).unwrap();
        line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
    };
    keys.iter().map(kib).sum::<u64>() << 10
}

fn assert_as_the_kernel_says(guest: &Value, pid: u32) {
    for (field, keys) in [
        ("rss_bytes", &["Rss"][..]),
        ("uss_bytes", &["Private_Clean", "Private_Dirty"]),
        ("swap_bytes", &["Swap"]),
        ("ksm_bytes", &["KSM"]),
        ("thp_bytes", &["AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"]),
    ] {
        assert_eq!(number(&guest[field]), rollup(pid, keys), "{field} of {guest}");
    }
    // All processes share the vDSO. As processes start and end, each one's part of it changes, by less than 1 KiB.
    let (ours, kernels) = (number(&guest["pss_bytes"]), rollup(pid, &["Pss"]));
    assert!(ours.abs_diff(kernels) <= 1 << 10, "pss_bytes is {kernels} to the kernel, {guest}");
}

fn region(guest: &Value, name: &str) -> u64 {
    let regions = guest["regions"].as_array().unwrap();
    regions.iter().find(|r| r["region"] == name).map_or(0, |r| number(&r["rss_bytes"]))
}

#[test]
fn totals_of_stopped_processes_equal_smaps_rollup() {
    let stage = Stage::new();
    let file = format!("file f {}", stage.path("data"));
    let mut known =
        stage.start(&["alloc a 3000", "fill a 0 2000 1", "shared s 300", "fill s 0 300 9", &file, "read f 0 50"]);
    let child: u32 = known.tell("fork").parse().unwrap();
    known.tell("fill a 0 500 77");
    let pids = [known.pid(), child];
    pids.into_iter().for_each(stop);
    let found = json_of(&guests(&["--pid", &pids[0].to_string(), "--pid", &pids[1].to_string()]));
    assert_eq!(found["partial"], Value::Array(vec![]));
    for pid in pids {
        let guest = common::guest(&found, pid);
        assert_as_the_kernel_says(guest, pid);
        let regions = guest["regions"].as_array().unwrap();
        for field in ["rss_bytes", "uss_bytes", "swap_bytes"] {
            let sum: u64 = regions.iter().map(|r| number(&r[field])).sum();
            assert_eq!(sum, number(&guest[field]), "{field}");
        }
        assert!(region(guest, "heap") >= 2000 << 12 && region(guest, "stack") > 0, "{guest}");
        assert_eq!((&guest["kind"], &guest["ram_bytes"]), (&"process".into(), &Value::Null));
    }
    // A forked child maps no shared and no file pages until it touches them.
    let parent = common::guest(&found, pids[0]);
    assert!(region(parent, "shared") == 300 << 12 && region(parent, "files") >= 50 << 12, "{parent}");
    // Pages that the parent wrote after the fork are its own; both share the rest.
    let own = number(&parent["uss_bytes"]);
    assert!((500 << 12..1500 << 12).contains(&own), "{own}");
}

#[test]
fn json_has_the_documented_fields_and_nothing_else() {
    let stage = Stage::new();
    let known = stage.start(&["alloc a 1"]);
    let found = json_of(&guests(&["--pid", &known.pid().to_string()]));
    let keys = |v: &Value| v.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&found), ["guests", "partial"]);
    let mut expected = vec![
        "id",
        "name",
        "kind",
        "pids",
        "group",
        "ram_bytes",
        "rss_bytes",
        "pss_bytes",
        "uss_bytes",
        "swap_bytes",
        "ksm_bytes",
        "thp_bytes",
        "hugetlb_bytes",
        "folded_bytes",
        "regions",
    ];
    expected.sort_unstable();
    assert_eq!(keys(&found["guests"][0]), expected);
    let mut expected = vec!["region", "rss_bytes", "pss_bytes", "uss_bytes", "swap_bytes"];
    expected.sort_unstable();
    assert_eq!(keys(&found["guests"][0]["regions"][0]), expected);
    assert_documented(&["guests --json"], &found);
}

/// Process 2 is a thread of the kernel's, which no PID namespace shows.
#[test]
fn wrong_selection_is_an_error_with_its_reason_on_the_host() {
    for (args, code, words) in [
        (&["--pid", "4194304"][..], 2, "there is no process 4194304"),
        (&["--pid", "2"], 2, "thread of the kernel"),
        (&["--guest", "no-such-guest-*"], 2, "no guest matches no-such-guest-*"),
        (&["--groups", "/nonexistent.toml"], 2, "cannot read /nonexistent.toml"),
        (&["--pid", "0"], 2, "--pid"),
        (&["--pid", "x"], 2, "--pid"),
        (&["--group-by", "colour"], 2, "use each, all, user, name, service"),
        (&["--guest", ""], 2, "must not be empty"),
    ] {
        let output = guests(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", errors(&output));
        assert!(errors(&output).contains(words), "{args:?}: {}", errors(&output));
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn ended_process_is_an_error() {
    let mut zombie = Command::new("true").spawn().unwrap();
    let pid = zombie.id();
    while !fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z ") {}
    let output = guests(&["--pid", &pid.to_string()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(errors(&output).contains("has ended"), "{}", errors(&output));
    zombie.wait().unwrap();
}

#[test]
fn unprivileged_user_gets_own_processes_and_names_of_others() {
    let stage = Stage::new();
    let (own, other) = (stage.start_unprivileged(&["alloc a 100", "fill a 0 100 1"]), stage.start(&["alloc a 1"]));
    let run = |pids: &[&Known]| {
        let mut command = unprivileged(&stage.path("pagefold"));
        command.args(["guests", "--json"]);
        pids.iter().for_each(|known| _ = command.args(["--pid", &known.pid().to_string()]));
        command.output().unwrap()
    };
    stop(own.pid());
    let output = run(&[&own]);
    assert_as_the_kernel_says(common::guest(&json_of(&output), own.pid()), own.pid());
    // Of both processes, the readable one is measured; the other is named in the list and on stderr.
    let output = run(&[&own, &other]);
    assert_eq!(output.status.code(), Some(1));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["guests"].as_array().unwrap().len(), 1);
    assert_eq!(found["partial"][0]["pid"], other.pid());
    assert!(
        errors(&output).contains(&format!("process:{}, process {0}: no right", other.pid())),
        "{}",
        errors(&output)
    );
    // Without a selection, a message says that others' processes are hidden, and that is no error.
    let output = run(&[]);
    assert!(output.status.success(), "{}", errors(&output));
    assert!(errors(&output).contains("hidden, because they belong to others"), "{}", errors(&output));
}

#[test]
fn guests_are_put_into_groups_by_rule_and_by_file() {
    let stage = Stage::new();
    let known = stage.start(&["alloc a 1"]);
    let id = format!("process:{}", known.pid());
    let pid = known.pid().to_string();
    let group = |args: &[&str]| {
        json_of(&guests(&[&["--pid", &pid], args].concat()))["guests"][0]["group"].as_str().unwrap().to_owned()
    };
    assert_eq!(group(&[]), id);
    assert_eq!(group(&["--group-by", "all"]), "all");
    assert_eq!(group(&["--group-by", "user"]), format!("uid-{}", fs_uid(known.pid())));
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    fs::write(path, format!("[groups]\nacme = ['{id}']\n")).unwrap();
    assert_eq!(group(&["--group-by", "all", "--groups", path]), "acme");
    fs::write(path, format!("[groups]\nacme = ['{id}']\nbeta = ['process:*']\n")).unwrap();
    let output = guests(&["--pid", &pid, "--groups", path]);
    assert_eq!(output.status.code(), Some(2));
    assert!(errors(&output).contains("\"acme\"") && errors(&output).contains("\"beta\""), "{}", errors(&output));
}

fn fs_uid(pid: u32) -> u32 {
    std::os::unix::fs::MetadataExt::uid(&fs::metadata(format!("/proc/{pid}")).unwrap())
}

#[test]
fn qemu_is_found_with_its_name_and_its_ram() {
    let memfd = "memory-backend-memfd,id=m,size=128M,share=on";
    let split = "tcg,tb-size=32,split-wx=on";
    for (name, more) in [
        ("plain", &[][..]),
        ("shared", &["-object", memfd, "-machine", "pc,memory-backend=m"]),
        ("unmerged", &["-machine", "pc,mem-merge=off"]),
        ("split-wx", &["-accel", split]),
    ] {
        let Some(qemu) = Qemu::start(&format!("{name}-vm"), more) else { return };
        stop(qemu.pid());
        let found = json_of(&guests(&["--guest", &qemu.name, "--group-by", "name"]));
        let guest = &found["guests"][0];
        assert_eq!((&guest["id"], &guest["kind"]), (&qemu.id().into(), &"qemu".into()));
        assert_eq!(guest["pids"], serde_json::json!([qemu.pid()]));
        assert_eq!((number(&guest["ram_bytes"]), &guest["group"]), (RAM_BYTES, &format!("{name}-vm").into()));
        // Its part of shared libraries changes as other processes start and end; its resident set does not.
        assert_eq!(number(&guest["rss_bytes"]), rollup(qemu.pid(), &["Rss"]));
        let ram = region(guest, "guest_ram");
        assert!((FILLED_BYTES..FILLED_BYTES + (8 << 20)).contains(&ram), "{name}: {ram} of {guest}");
        assert!(region(guest, "translation_cache") > 0, "{name}: {guest}");
        assert_eq!(region(guest, "shared"), 0, "{name}: {guest}");
        // Its pid selects the same guest.
        let by_pid = json_of(&guests(&["--pid", &qemu.pid().to_string()]));
        assert_eq!(by_pid["guests"][0]["id"], guest["id"]);
    }
}

#[test]
fn vms_of_the_same_name_get_different_ids() {
    let (Some(one), Some(two)) = (Qemu::start("duplicate", &[]), Qemu::start("duplicate", &[])) else { return };
    let found = json_of(&guests(&["--guest", &one.name]));
    let mut ids: Vec<&str> = found["guests"].as_array().unwrap().iter().map(|g| g["id"].as_str().unwrap()).collect();
    // The one that has started later has its pid in its id.
    let mut expected = [one.id(), format!("{}@{}", two.id(), two.pid())];
    ids.sort_unstable();
    expected.sort_unstable();
    assert_eq!(ids, expected);
}

/// A control group like LXC's, below this test's own. Dropping it removes the control group, if it is empty.
struct Container(PathBuf);

impl Container {
    fn new(name: &str) -> Option<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap();
        let path_of = |tree: &str| {
            let line = own.lines().find(|l| l.split(':').nth(1) == Some(tree))?;
            line.splitn(3, ':').nth(2).map(|path| path.trim_start_matches('/').to_owned())
        };
        let trees = [("/sys/fs/cgroup/memory", path_of("memory")), ("/sys/fs/cgroup", path_of(""))];
        let (root, own) = trees.into_iter().find_map(|(root, own)| own.map(|own| (root, own)))?;
        let directory = PathBuf::from(root).join(own).join(format!("lxc.payload.{name}"));
        match fs::create_dir(&directory) {
            Ok(()) => Some(Self(directory)),
            Err(e) => {
                eprintln!("skipped: cannot make {}: {e}", directory.display());
                None
            }
        }
    }

    fn take(&self, pid: u32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn processes_of_a_control_group_are_one_guest() {
    let name = format!("test-{}", std::process::id());
    let Some(container) = Container::new(&name) else { return };
    let stage = Stage::new();
    let (one, two) = (stage.start(&["alloc a 500", "fill a 0 500 1"]), stage.start(&["alloc a 1"]));
    container.take(one.pid());
    container.take(two.pid());
    [one.pid(), two.pid()].into_iter().for_each(stop);
    let found = json_of(&guests(&["--guest", &format!("lxc:{name}")]));
    let guest = &found["guests"][0];
    assert_eq!(guest["kind"], "lxc");
    let mut pids = [one.pid(), two.pid()];
    pids.sort_unstable();
    assert_eq!(guest["pids"], serde_json::json!(pids));
    assert_eq!(number(&guest["rss_bytes"]), pids.iter().map(|p| rollup(*p, &["Rss"])).sum::<u64>());
    // Other processes, the measuring one among them, share libraries with these two. As they start and end, the two
    // processes' part changes.
    let parts = pids.iter().map(|p| rollup(*p, &["Pss"])).sum::<u64>();
    let pss = number(&guest["pss_bytes"]);
    assert!(pss.abs_diff(parts) <= parts / 100, "{pss} of {parts}");
    drop((one, two));
    drop(container);
}

#[test]
fn text_has_a_table_and_a_hint() {
    let known = Stage::new().start(&["alloc a 500", "fill a 0 500 1"]);
    let output = pagefold(&["guests", "--pid", &known.pid().to_string()]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains(&format!("process:{}", known.pid())) && text.contains("PSS") && text.contains("hhhh"),
        "{text}"
    );
    assert!(text.lines().all(|l| l.chars().count() <= 100), "{text}");
}
