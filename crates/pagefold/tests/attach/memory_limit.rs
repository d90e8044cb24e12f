//! A memory control group at its limit: the program is refused beforehand. If the limit is reached later, no page is lost.

use crate::common::Afterwards;
use crate::common::service::small_memory;
use crate::common::supervised::{Installed, wait_for};
use crate::rig::{
    CONFIG, Running, Waits, assert_same, attach, attach_eagerly, compile_source, detach, wait_for_folds, words,
};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// Takes all memory of its control group again and again, until the kernel ends it for that, and rests between.
const HOG: &str = "echo $$ > $1/cgroup.procs
while :; do sh -c 'echo 1000 > /proc/self/oom_score_adj; exec nice -n 19 tail /dev/zero' 2> /dev/null; sleep 0.2; done";

/// A control group, and a program in it that the kernel ends last.
struct Limited {
    dir: PathBuf,
    waits: Waits,
    _afterwards: Afterwards,
}

impl Limited {
    /// `None`, with the reason printed, if no such group can be made, or what is in it could be swapped out.
    fn start(installed: &Installed, bytes: u64) -> Option<Self> {
        if host::free_swap_bytes() > 0 {
            eprintln!("skipped: this host swaps");
            return None;
        }
        let (dir, afterwards) = small_memory(&format!("attach-{}", std::process::id()), bytes)?;
        let program = installed.path("waits");
        compile_source("cc", &[], &program, concat!(env!("CARGO_MANIFEST_DIR"), "/../bench/src/attach/waits.c"));
        let begin = "echo $$ > $1/cgroup.procs; { echo -1000 > /proc/self/oom_score_adj; } 2> /dev/null; exec $2";
        let mut command = Command::new("sh");
        let mut waits = Waits::run(command.args(["-c", begin, "sh", &dir]).arg(&program));
        waits.tell("stop");
        waits.tell("go");
        Some(Self { dir: dir.into(), waits, _afterwards: afterwards })
    }

    fn number(&self, names: [&str; 2]) -> u64 {
        let text = names.iter().find_map(|name| fs::read_to_string(self.dir.join(name)).ok()).expect("one of both");
        let last = text.split_whitespace().last().expect("a number");
        last.parse().expect("a number")
    }

    fn used(&self) -> u64 {
        self.number(["memory.usage_in_bytes", "memory.current"])
    }

    fn limit(&self, bytes: u64) {
        let mut files = ["memory.limit_in_bytes", "memory.max"].iter().map(|name| self.dir.join(name));
        let file = files.find(|file| file.exists()).expect("a limit");
        fs::write(file, bytes.to_string()).expect("set the limit");
    }

    /// How often its limit was reached.
    fn reached(&self) -> u64 {
        if self.dir.join("memory.failcnt").exists() {
            return self.number(["memory.failcnt"; 2]);
        }
        let events = fs::read_to_string(self.dir.join("memory.events")).expect("its events");
        let max = events.lines().find_map(|line| line.strip_prefix("max ")).expect("a line");
        max.parse().expect("a number")
    }
}

/// The agent's memory counts in the program's control group, where the kernel would have ended the program for it.
#[test]
fn program_without_memory_for_an_agent_is_refused_until_the_limit_is_raised() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let Some(mut limited) = Limited::start(&installed, 512 << 20) else { return };
    let pid = limited.waits.pid();
    limited.waits.tell("stop");
    let before = limited.waits.look();
    limited.limit(limited.used() + (1 << 20));
    let output = attach_eagerly(&installed, &[&pid]);
    assert!(!output.status.success() && words(&output).contains("left of its memory limit"), "{output:?}");
    assert_same(&limited.waits.look(), &before, 0);
    limited.limit(512 << 20);
    limited.waits.tell("go");
    attach(&installed, &pid);
    detach(&installed, &pid);
    limited.waits.tell("stop");
    assert_same(&limited.waits.look(), &before, 1);
    limited.waits.tell("go");
}

/// Where many others want the processors, the agent may find no memory for minutes: `./x soak` runs it.
#[test]
fn no_page_is_lost_while_the_limit_is_reached_again_and_again() {
    if std::env::var_os("PAGEFOLD_SOAK_SECONDS").is_none() {
        return eprintln!("skipped: ./x soak runs it");
    }
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let Some(mut limited) = Limited::start(&installed, 512 << 20) else { return };
    let pid = limited.waits.pid();
    limited.waits.tell("stop");
    let before = limited.waits.look();
    limited.limit(limited.used() + (48 << 20));
    limited.waits.tell("go");
    let mut hog = Command::new("sh");
    let _hog = Running(hog.args(["-c", HOG, "sh"]).arg(&limited.dir).spawn().expect("run a shell"));
    for cycle in 0..2 {
        let reached = limited.reached();
        wait_for("the limit is reached", || (limited.reached() > reached + 1).then_some(()));
        // It is refused where there is no memory at just that moment.
        wait_for("it is attached", || {
            let output = attach_eagerly(&installed, &[&pid]);
            assert!(output.status.success() || words(&output).contains("memory limit"), "{output:?}");
            output.status.success().then_some(())
        });
        wait_for_folds(&installed, &pid, 1000);
        limited.waits.break_enough();
        let folds = installed.pagefold(&["group", "set", "acme", "--scan-rate", "400000"]);
        assert!(folds.status.success(), "{folds:?}");
        wait_for("the limit is reached while pages are folded", || (limited.reached() > reached + 3).then_some(()));
        // Where the limit leaves no room for what is folded, detaching is refused with this remedy.
        limited.limit(512 << 20);
        detach(&installed, &pid);
        limited.waits.tell("stop");
        assert_same(&limited.waits.look(), &before, cycle);
        limited.limit(limited.used() + (48 << 20));
        limited.waits.tell("go");
    }
    eprintln!("the limit was reached {} times", limited.reached());
}
