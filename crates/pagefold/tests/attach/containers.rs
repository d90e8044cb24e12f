//! Programs in containers: plain namespaces, and those of Podman, Docker and LXC.

use crate::common;
use crate::common::Afterwards;
use crate::common::supervised::{Installed, wait_for_within};
use crate::rig::{CONFIG, Waits, assert_same, attach_eagerly, compile, cycle, member, path, wait_for_folds, words};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

#[test]
fn programs_in_containers_are_folded_and_left_as_they_were_before() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let glibc = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"];
    cycle(&installed, &mut Waits::contained(&installed, "cc", &glibc), 2);
    if Command::new("musl-gcc").arg("--version").output().is_err() {
        return eprintln!("skipped: no musl-gcc here: install musl-tools");
    }
    fs::remove_dir_all(installed.path("root")).unwrap();
    cycle(&installed, &mut Waits::contained(&installed, "musl-gcc", &["/lib/ld-musl-x86_64.so.1"]), 2);
}

/// Podman on this host, and a root directory for containers in which nothing is but `waits.c`.
struct Podman {
    root: String,
    containers: Vec<String>,
    /// The directory of a user without any rights, if that runs it.
    home: Option<String>,
    _afterwards: Option<Afterwards>,
}

impl Podman {
    /// Says why if it does not run containers here.
    fn find(installed: &Installed, is_rootless: bool) -> Option<Self> {
        if Command::new("podman").arg("--version").output().is_err() {
            eprintln!("skipped: no podman here: install podman and runc");
            return None;
        }
        let root = installed.path("podman");
        for dir in ["", "proc", "sys", "dev", "etc", "run", "tmp"] {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        compile("cc", &["-static"], &root.join("waits"));
        let home = is_rootless.then(|| path(installed, "home"));
        // A process that keeps the user's namespaces stays behind.
        let stop = |home: &String| Afterwards::run(&format!("kill -9 $(cat {home}/libpod/tmp/pause.pid) 2>/dev/null"));
        let _afterwards = home.as_ref().map(stop);
        let root = root.to_str().expect("a plain path").to_owned();
        if let Some(home) = &home {
            fs::create_dir(home).expect("make a directory");
            let given = Command::new("chown").args(["-R", "65534:65534", &root, home]).status().expect("run chown");
            assert!(given.success(), "{given}");
        }
        let podman = Self { root, containers: Vec::new(), home, _afterwards };
        let tried = podman.run(&["--rm"]).stdin(Stdio::null()).output().expect("run podman");
        if !tried.status.success() {
            eprintln!("skipped: podman runs no container here: {}", words(&tried));
            return None;
        }
        Some(podman)
    }

    fn command(&self) -> Command {
        let Some(home) = &self.home else { return Command::new("podman") };
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--", "podman"]);
        command.env("HOME", home).env("XDG_RUNTIME_DIR", home).current_dir(&self.root);
        command
    }

    /// A command that runs a container.
    fn run(&self, arguments: &[&str]) -> Command {
        let mut command = self.command();
        // Where both versions of control groups are there, crun refuses to run. The limits take no right to raise them.
        if Command::new("runc").arg("--version").output().is_ok() {
            command.args(["--runtime", "runc"]);
        }
        command.args(["--cgroup-manager", "cgroupfs", "run", "--network", "none"]);
        command.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000"]).args(arguments);
        command.args(["--rootfs", &self.root, "/waits"]);
        command
    }

    /// Starts a container. Returns its program, and its name.
    fn start(&mut self, arguments: &[&str]) -> (Waits, String) {
        let name = format!("pagefold-test-{}-{}", common::world(), self.containers.len());
        self.containers.push(name.clone());
        let mut waits = Waits::run(&mut self.run(&[&["-i", "--rm", "--name", &name], arguments].concat()));
        waits.tell("stop");
        waits.tell("go");
        let asked = self.command().args(["container", "inspect", "-f", "{{.State.Pid}}", &name]).output();
        let said = String::from_utf8(asked.expect("run podman").stdout).expect("text");
        waits.pid = said.trim().parse().expect("its process");
        (waits, name)
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        for name in &self.containers {
            let _ = self.command().args(["rm", "-f", "-t", "0", name]).output();
        }
    }
}

/// A container of LXC's with LXC's default filter of system calls, in which `waits.c` runs. It ends with this.
struct Lxc<'a>(&'a Installed, Waits);

impl<'a> Lxc<'a> {
    fn start(installed: &'a Installed) -> Option<Self> {
        let filter = Path::new("/usr/share/lxc/config/common.seccomp");
        if !filter.exists() {
            eprintln!("skipped: no LXC here: install lxc");
            return None;
        }
        let root = installed.path("lxc/root");
        for dir in ["proc", "sys", "dev"] {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        compile("cc", &["-static"], &root.join("waits"));
        let lines = [
            format!("lxc.rootfs.path = dir:{}", root.display()),
            format!("lxc.seccomp.profile = {}", filter.display()),
            "lxc.net.0.type = empty\nlxc.init.cmd = /waits\nlxc.console.path = none".to_owned(),
            "lxc.mount.auto = proc:mixed sys:ro\n".to_owned(),
        ];
        fs::write(installed.path("lxc.conf"), lines.join("\n")).expect("write a configuration");
        let mut command = Self::command(installed, "lxc-start");
        let waits = Waits::run(command.args(["-F", "-f", &path(installed, "lxc.conf")]));
        let mut this = Self(installed, waits);
        this.1.tell("stop");
        this.1.tell("go");
        let asked = Self::command(installed, "lxc-info").arg("-pH").output().expect("run lxc-info");
        this.1.pid = String::from_utf8_lossy(&asked.stdout).trim().parse().expect("its process");
        Some(this)
    }

    fn command(installed: &Installed, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(["-P", &path(installed, "lxc"), "-n", "waits"]);
        command
    }
}

impl Drop for Lxc<'_> {
    fn drop(&mut self) {
        let _ = Self::command(self.0, "lxc-stop").arg("-k").output();
    }
}

#[test]
fn container_with_default_filter_of_lxc_is_folded_and_left_as_it_was_before() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let Some(mut lxc) = Lxc::start(&installed) else { return };
    let status = fs::read_to_string(format!("/proc/{}/status", lxc.1.pid)).expect("its status");
    assert!(status.contains("Seccomp:\t2"), "it has no filter: {status}");
    cycle(&installed, &mut lxc.1, 1);
}

/// The default filter of Docker 20.10: that of Podman, less calls that it allows only with rights which containers do not
/// have. Newer ones allow `process_vm_readv`.
fn filter_of_docker(installed: &Installed) -> String {
    let podmans = fs::read("/usr/share/containers/seccomp.json").expect("read Podman's default filter");
    let mut filter: Value = serde_json::from_slice(&podmans).expect("JSON");
    filter["defaultErrnoRet"] = 1.into();
    let forbidden = ["get_mempolicy", "kcmp", "pidfd_getfd", "process_vm_readv", "statmount", "userfaultfd"];
    let rules = filter["syscalls"].as_array_mut().expect("rules");
    for rule in &mut *rules {
        let names = rule["names"].as_array_mut().expect("names");
        names.retain(|name| !forbidden.contains(&name.as_str().expect("a name")));
    }
    rules.retain(|rule| rule["names"] != serde_json::json!([]));
    fs::write(installed.path("docker.json"), filter.to_string()).expect("write a filter");
    format!("seccomp={}", path(installed, "docker.json"))
}

#[test]
fn containers_with_default_filters_of_podman_and_docker_are_folded_and_left_as_they_were_before() {
    let Some(installed) = Installed::attaching() else { return };
    let Some(mut podman) = Podman::find(&installed, false) else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let (podmans, name) = podman.start(&[]);
    let (dockers, _) = podman.start(&["--security-opt", &filter_of_docker(&installed)]);
    let groups = fs::read_to_string(format!("/proc/{}/cgroup", dockers.pid)).expect("its control groups");
    let group = groups.lines().last().and_then(|line| line.rsplit(':').next()).expect("a control group").to_owned();
    let mut both = [(podmans, ["--container", &name]), (dockers, ["--cgroup", &group])];
    let before = both.each_mut().map(|(waits, place)| {
        let status = fs::read_to_string(format!("/proc/{}/status", waits.pid)).expect("its status");
        assert!(status.contains("Seccomp:\t2"), "it has no filter: {status}");
        waits.tell("stop");
        let before = waits.look();
        waits.tell("go");
        let attached = attach_eagerly(&installed, place);
        let is_member = || member(&installed, &waits.pid());
        wait_for_within(Duration::from_secs(60), &format!("it is a member: {attached:?}"), is_member);
        before
    });
    for ((waits, place), before) in both.iter_mut().zip(before) {
        wait_for_folds(&installed, &waits.pid(), 1000);
        waits.break_enough();
        installed.pagefold(&[&["detach", "--wait", "120"], &place[..]].concat());
        assert!(member(&installed, &waits.pid()).is_none());
        waits.tell("stop");
        assert_same(&waits.look(), &before, 0);
        waits.tell("go");
        assert!(waits.child.try_wait().unwrap().is_none(), "it has ended");
    }
}

/// The container's users are not the host's, and its control group may be that of the user's session.
#[test]
fn container_of_user_without_rights_is_folded_and_left_as_it_was_before() {
    let Some(installed) = Installed::attaching() else { return };
    let Some(mut podman) = Podman::find(&installed, true) else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let (mut waits, _) = podman.start(&[]);
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/user")).expect("its namespace");
    assert_ne!(namespace(&waits.pid()), namespace("self"));
    cycle(&installed, &mut waits, 2);
}
