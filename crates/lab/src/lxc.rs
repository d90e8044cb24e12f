//! A guest in LXC: a few processes on a directory tree, with no network.
//!
//! `lxc-start` stays in the foreground as the container's monitor, so it is the lab's child like any other guest's
//! process. When it ends, the kernel ends the container's first process, and with that the container.

use crate::agent::Output;
use crate::error::{Error, Result};
use crate::program;
use crate::spec::Fold;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit of `lxc-stop`: 10 s. After that, the lab ends the container's processes one by one.
const STOP_PATIENCE: Duration = Duration::from_secs(10);
/// Time limit of `pagefold attach`, for all processes of a container: 60 s.
const ATTACH_PATIENCE: Duration = Duration::from_secs(60);

/// A container: its name, and its private directory on the host.
#[derive(Clone, Debug)]
pub(crate) struct Container<'a> {
    pub(crate) name: &'a str,
    pub(crate) dir: PathBuf,
}

impl Container<'_> {
    /// The command that runs the container. Its first program starts `server`, if given. `read_only` is for a root
    /// directory that other containers use, too.
    pub(crate) fn start(&self, root: &Path, read_only: bool, server: Option<&str>) -> Result<Command> {
        let inside = self.inside();
        fs::create_dir_all(&inside).map_err(|e| Error::file("make", &inside, e))?;
        let config = self.dir.join("config");
        let mut text = configuration(self.name, root, &inside, read_only);
        text.push_str(&format!("lxc.init.cmd = /usr/local/sbin/pagefold-init {}\n", server.unwrap_or_default()));
        fs::write(&config, text).map_err(|e| Error::file("write", &config, e))?;
        let mut command = self.command("lxc-start")?;
        command.arg("-F").arg("-f").arg(config);
        command.arg("-o").arg(self.dir.join("lxc.log")).args(["-l", "WARN"]);
        Ok(command)
    }

    /// Waits until the container's first program reports that the container's other programs run.
    pub(crate) fn wait_ready(&self, deadline: Instant, alive: impl Fn() -> bool) -> std::result::Result<(), String> {
        let said_so = || fs::read(self.inside().join("ready")).is_ok_and(|text| text.ends_with(b"\n"));
        while !said_so() {
            if !alive() {
                return Err("it ended".into());
            }
            if Instant::now() > deadline {
                return Err("no sign of being ready in time".into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Makes all processes of the container members. `pagefold attach` finds them by the container's control group, as
    /// the host sees it.
    pub(crate) fn attach(&self, fold: &Fold, group: &str) -> Result<()> {
        let mut attach = Command::new(&fold.pagefold);
        attach.args(["attach", "--cgroup", &format!("/lxc.payload.{}", self.name), "--group", group]);
        // `--at-least`: the programs in the lab's containers are small.
        attach.args(["--at-least", "64K", "--all-anonymous", "--json"]);
        if let Some(service) = &fold.service {
            attach.arg("--service").arg(service);
        }
        let done = program::bounded_output(attach.stdin(Stdio::null()), ATTACH_PATIENCE)?;
        // Exit status 1 means that some processes have ended meanwhile or cannot be members. Those in the output are
        // members.
        let members = serde_json::from_slice::<Vec<serde_json::Value>>(&done.stdout).map_or(0, |members| members.len());
        if done.status == 0 || done.status == 1 && members > 0 {
            return Ok(());
        }
        let why = String::from_utf8_lossy(&done.stderr).trim().to_owned();
        Err(Error::guest(self.name, format!("it runs, and cannot be folded: {why}")))
    }

    /// Ends all processes of the container at once, by `lxc-stop`. Whether that works shows in its processes.
    pub(crate) fn stop(&self) {
        if let Ok(mut command) = self.command("lxc-stop") {
            let _ = program::bounded_output(command.arg("--kill"), STOP_PATIENCE);
        }
    }

    /// Runs a command in the container.
    pub(crate) fn exec(&self, argv: &[&str], timeout: Duration) -> Result<Output> {
        let mut command = self.command("lxc-attach")?;
        command.args(["--clear-env", "--set-var", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "--"]).args(argv);
        program::bounded_output(&mut command, timeout)
    }

    /// Removes the control groups that LXC made for the container, and the one into which LXC puts monitors. Those that
    /// are gone or not empty are skipped.
    pub(crate) fn remove_control_groups(&self) {
        let name = self.name;
        for parent in controllers() {
            for group in [format!("lxc.payload.{name}"), format!("lxc.monitor.{name}"), "lxc.pivot".into()] {
                // A control group that is missing or not empty needs no removal.
                let _ = fs::remove_dir(parent.join(group));
            }
        }
    }

    fn inside(&self) -> PathBuf {
        self.dir.join("inside")
    }

    fn command(&self, program: &str) -> Result<Command> {
        let mut command = program::command(program)?;
        command.args([OsStr::new("-n"), self.name.as_ref(), "-P".as_ref(), self.dir.as_os_str()]);
        Ok(command)
    }
}

/// The directories below which LXC may have made control groups: the root of version 2, and the root of each controller
/// of version 1.
fn controllers() -> Vec<PathBuf> {
    let root = PathBuf::from("/sys/fs/cgroup");
    let each = fs::read_dir(&root).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let mut all: Vec<PathBuf> = each.filter(|path| path.is_dir()).collect();
    all.push(root);
    all
}

fn configuration(name: &str, root: &Path, inside: &Path, read_only: bool) -> String {
    let root = root.display();
    let inside = inside.display();
    let mut text = format!(
        "\
lxc.uts.name = {name}
lxc.rootfs.path = dir:{root}
lxc.net.0.type = empty
lxc.autodev = 1
lxc.mount.auto = proc:mixed sys:ro
lxc.mount.entry = tmpfs run tmpfs nosuid,nodev,mode=0755 0 0
lxc.mount.entry = tmpfs tmp tmpfs nosuid,nodev 0 0
lxc.mount.entry = {inside} run/pagefold none bind,create=dir 0 0
"
    );
    if read_only {
        text.push_str("lxc.rootfs.options = ro\n");
    }
    text
}
