//! Processes that have files mapped whose server answers no read.

use crate::common::supervised::{Installed, wait_for};
use crate::rig::{CONFIG, Waits, attach, attach_command, compile_source, detach};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Processes of a user with a silent file that is named as a C library.
struct Silent {
    child: Child,
    pids: Vec<u32>,
}

impl Silent {
    fn start(installed: &Installed, number: usize) -> Self {
        let (program, mountpoint) = (installed.path("silent_library"), installed.path("silent"));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/silent_library.c");
        compile_source("cc", &[], &program, source);
        std::fs::create_dir(&mountpoint).unwrap();
        let mut command = Command::new("unshare");
        command.arg("-m").arg(&program).arg(mountpoint).args(["65534", &number.to_string()]).stdout(Stdio::piped());
        let mut child = command.spawn().expect("start it");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let pids = lines.take(number).map(|line| line.unwrap().parse().expect("a pid")).collect();
        Self { child, pids }
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        for pid in &self.pids {
            let _ = Pid::from_raw(pid.cast_signed()).map(|pid| kill_process(pid, Signal::KILL));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Attaching did not end, and could not be ended. With rules, four such processes kept all others from being attached.
#[test]
fn process_whose_library_keeps_its_readers_waiting_is_refused() {
    if !Path::new("/dev/fuse").exists() {
        return eprintln!("skipped: no FUSE here");
    }
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let silent = Silent::start(&installed, 2);
    for pid in &silent.pids {
        let mut attaching = attach_command(&installed, &[&pid.to_string()]).stderr(Stdio::piped()).spawn().unwrap();
        let ended = wait_for("attaching ends", || attaching.try_wait().unwrap());
        let mut why = String::new();
        attaching.stderr.take().unwrap().read_to_string(&mut why).unwrap();
        assert!(!ended.success());
        assert!(why.contains("/libc.so.6 lies on a file system that may keep its readers waiting"), "{why}");
    }
    let mut other = Waits::start(&installed, &[]);
    attach(&installed, &other.pid());
    detach(&installed, &other.pid());
    other.tell("stop");
}
