//! Starting a guest of each kind, and waiting until it reports that it is ready.

use crate::accel::trial;
use crate::error::{Error, Result, tail_of};
use crate::image::{self, Boot, Workshop};
use crate::life::Mark;
use crate::lxc::Container;
use crate::qemu::Accelerator;
use crate::qemu::{self, Disk, Machine, Sockets};
use crate::saved::{self, Saved};
use crate::spec::{Fold, Spec};
use crate::state::{Entry, Image};
use crate::{agent, program};
use host::{KvmTrial, ProcessId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Prepared files and settings from which guests of one kind are started.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Vm {
        boot: Boot,
        accelerator: Accelerator,
        /// The saved guest of each guest of the request; empty if none is restored.
        saved: Vec<Saved>,
    },
    Container {
        root: PathBuf,
    },
    Process,
}

impl Source {
    /// Builds the image if it is missing. For VMs, chooses the accelerator, with a trial boot in `dir`; `emulated` is
    /// called with the reason if KVM cannot be used. The lab has `first` guests of this image already.
    pub(crate) fn prepare(
        (spec, first): (&Spec, usize),
        workshop: &Workshop,
        dir: &Path,
        emulated: &dyn Fn(&str),
    ) -> Result<Self> {
        let kernel = spec.kernel.as_deref();
        if spec.image.is_container() {
            program::need_root("an LXC container")?;
            program::find("lxc-start")?;
            let has_server = spec.image.server().is_some();
            let root = if has_server { image::servers(workshop) } else { image::root(workshop) };
            return Ok(Self::Container { root: root? });
        }
        if spec.image == Image::Process {
            return Ok(Self::Process);
        }
        program::find("qemu-system-x86_64")?;
        let debian = spec.image == Image::Debian;
        image::check_helper(&spec.append)?;
        let boot = if debian { image::debian(workshop, kernel) } else { image::tiny(workshop, kernel) }?;
        let accelerator = match trial(workshop.cache, &boot, dir, workshop.mark)? {
            KvmTrial::Boots => Accelerator::Kvm,
            KvmTrial::Fails(why) => {
                emulated(&why);
                Accelerator::Tcg
            }
        };
        let saved = if spec.saved { saved::prepare((spec, first), &boot, accelerator, workshop)? } else { Vec::new() };
        Ok(Self::Vm { boot, accelerator, saved })
    }

    /// The command that runs guest number `number` of the request, in its directory.
    fn command(&self, (spec, number): (&Spec, usize), entry: &Entry, dir: &Path) -> Result<Command> {
        match self {
            Self::Vm { boot, accelerator, saved } => {
                let saved = saved.get(number);
                qemu::command(&Machine {
                    name: &entry.name,
                    dir,
                    boot,
                    accelerator: *accelerator,
                    memory_bytes: spec.memory_bytes(),
                    append: &spec.append,
                    qemu_args: &spec.qemu_args,
                    disk: saved.and_then(|saved| saved.disk.as_deref()).map(Disk::Read),
                    state: saved.map(|saved| &*saved.state),
                })
            }
            Self::Container { root } => {
                let root = entry.copied_root.as_ref().unwrap_or(root);
                let container = Container { name: &entry.name, dir: dir.to_owned() };
                container.start(root, !entry.image.is_copied(), entry.image.server())
            }
            Self::Process => {
                let mut command = Command::new(&spec.process_program[0]);
                command.args(&spec.process_program[1..]).arg0(&entry.name);
                command.args(["--name", &entry.name, "--group", &entry.group]);
                command.args(["--memory-bytes", &spec.memory_bytes().to_string()]);
                Ok(command)
            }
        }
    }

    pub(crate) fn accelerator(&self) -> Option<Accelerator> {
        if let Self::Vm { accelerator, .. } = self { Some(*accelerator) } else { None }
    }
}

/// A guest whose process was started.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) name: String,
    group: String,
    pub(crate) process: ProcessId,
    pub(crate) at: Instant,
    image: Image,
    dir: PathBuf,
    /// Standard output of a guest that is a plain process, on which it reports that it is ready.
    says: Option<ChildStdout>,
    /// Whether the guest is restored from a saved state.
    is_saved: bool,
}

/// Starts the process of guest number `number` of the request, in its directory.
pub(crate) fn start(
    (spec, number): (&Spec, usize),
    source: &Source,
    entry: &Entry,
    dir: &Path,
    mark: &Mark,
) -> Result<Started> {
    let mut command = source.command((spec, number), entry, dir)?;
    if let Some(fold) = spec.fold.as_ref().filter(|_| !entry.image.is_container()) {
        command = as_member(fold, entry, &command);
    }
    let log = log_of(dir);
    let file = File::create(&log).map_err(|e| Error::file("create", &log, e))?;
    let both = file.try_clone().map_err(|e| Error::file("duplicate", &log, e))?;
    command.stdin(Stdio::null()).stdout(both).stderr(file);
    if entry.image == Image::Process {
        command.stdout(Stdio::piped());
    }
    // The guest gets a process group of its own, so that a Ctrl-C meant for `lab up` does not reach it.
    mark.put_on(&mut command).process_group(0);
    let at = Instant::now();
    let mut child = command.spawn().map_err(|e| Error::file("run", command.get_program(), e))?;
    let says = child.stdout.take();
    let process = ProcessId::of(child.id())?;
    Ok(Started {
        name: entry.name.clone(),
        group: entry.group.clone(),
        process,
        at,
        image: entry.image,
        dir: dir.to_owned(),
        says,
        is_saved: spec.saved,
    })
}

/// The same command by way of `pagefold run`, which executes the program in its own process: the started process is
/// still the guest's.
fn as_member(fold: &Fold, entry: &Entry, command: &Command) -> Command {
    let mut run = Command::new(&fold.pagefold);
    run.args(["run", "--group", &entry.group, "--name", &entry.name]);
    if let Some(service) = &fold.service {
        run.arg("--service").arg(service);
    }
    // QEMU advises its RAM as mergeable. Other programs do not, so all of their anonymous memory is enrolled.
    if !entry.image.is_vm() {
        run.arg("--all-anonymous");
    }
    run.arg("--").arg(command.get_program()).args(command.get_args());
    run
}

impl Started {
    /// Waits until the guest reports that it is ready. Returns the time since its start.
    pub(crate) fn wait_ready(&mut self, patience: Duration) -> Result<Duration> {
        let deadline = self.at + patience;
        let process = self.process;
        let alive = || process.is_alive();
        let said = if self.is_saved {
            agent::wait_answer(&Sockets::in_dir(&self.dir).agent, deadline, alive).map_err(|e| e.to_string())
        } else if self.image.is_vm() {
            agent::wait_ready(&Sockets::in_dir(&self.dir).agent, deadline, alive).map_err(|e| e.to_string())
        } else if self.image.is_container() {
            Container { name: &self.name, dir: self.dir.clone() }.wait_ready(deadline, alive)
        } else {
            self.says.take().map_or(Err("nobody listened".into()), |pipe| line_from(pipe, deadline))
        };
        said.map(|()| self.at.elapsed()).map_err(|problem| Error::guest(&self.name, self.explained(&problem)))
    }

    /// Makes all processes of a container members.
    pub(crate) fn attach(&self, fold: &Fold) -> Result<()> {
        Container { name: &self.name, dir: self.dir.clone() }.attach(fold, &self.group)
    }

    /// The error for a problem of this guest, with the last output of the guest and of its VMM or monitor.
    fn explained(&self, problem: &str) -> String {
        format!("not ready: {problem}{}", last_words(&self.dir))
    }
}

/// The last output of a guest and of its VMM or monitor, to put behind an error; empty if there is none.
pub(crate) fn last_words(dir: &Path) -> String {
    let mut text = String::new();
    for log in [log_of(dir), qemu::console_log(dir), dir.join("lxc.log")] {
        let tail = tail_of(&log);
        if !tail.is_empty() {
            text.push_str(&format!("\n  {}:\n  {tail}", log.display()));
        }
    }
    text
}

/// File with the errors of QEMU, LXC or a process guest.
fn log_of(dir: &Path) -> PathBuf {
    dir.join("log")
}

/// Waits for the first line from the pipe. Bytes behind that line are not read.
fn line_from(mut pipe: ChildStdout, deadline: Instant) -> std::result::Result<(), String> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let time = Timespec::try_from(left).map_err(|e| e.to_string())?;
        let mut wanted = [PollFd::new(&pipe, PollFlags::IN)];
        match poll(&mut wanted, Some(&time)) {
            Ok(0) => return Err("no sign of being ready in time".into()),
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.to_string()),
            Ok(_) => {}
        }
        let mut chunk = [0; 64];
        match pipe.read(&mut chunk) {
            Ok(0) => return Err("it ended".into()),
            Ok(count) if chunk[..count].contains(&b'\n') => return Ok(()),
            Ok(_) => {}
            Err(e) => return Err(e.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn member_is_started_by_pagefold_run_with_the_same_command() {
        let entry = Entry {
            name: "acme-1".into(),
            group: "acme".into(),
            image: Image::Tiny,
            memory_bytes: None,
            accelerator: None,
            copied_root: None,
            process: None,
            ready_ms: None,
            starter: None,
        };
        let mut command = Command::new("/usr/bin/qemu");
        command.args(["-m", "128"]);
        let fold = Fold { pagefold: "/opt/pagefold".into(), service: Some("/run/x".into()) };
        let words = |command: &Command| {
            let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
            words.join(" ")
        };
        let run = as_member(&fold, &entry, &command);
        assert_eq!(run.get_program(), "/opt/pagefold");
        assert_eq!(words(&run), "run --group acme --name acme-1 --service /run/x -- /usr/bin/qemu -m 128");
        let entry = Entry { image: Image::Process, ..entry };
        let fold = Fold { service: None, ..fold };
        let run = words(&as_member(&fold, &entry, &command));
        assert_eq!(run, "run --group acme --name acme-1 --all-anonymous -- /usr/bin/qemu -m 128");
    }
}
