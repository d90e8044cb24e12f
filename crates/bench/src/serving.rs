//! A Pagefold service that a bench starts for itself.

use crate::guardian::Guardian;
use anyhow::{Context, ensure};
use api::ask::GroupState;
use api::change::Change;
use api::client::Service;
use api::place::Place;
use cli::exit::Stop;
use host::{ProcessId, ThreadCpu};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Time limit for a service to start, and for members to connect.
const PATIENCE: Duration = Duration::from_secs(20);

/// Beginning of the names of the agent's threads in members' processes.
const AGENT: &str = "pagefold";

/// A running service. [`Serving::end`] ends it. If the bench is cut off, the guardian does.
pub struct Serving {
    server: Child,
    service: RefCell<Service>,
    dir: PathBuf,
}

impl Serving {
    /// Starts a service with this configuration in a directory below `dir`.
    ///
    /// # Errors
    /// The service does not start.
    pub fn start(dir: &Path, config: &str, guardian: &mut Guardian) -> anyhow::Result<Self> {
        let (file, log) = (dir.join("service.toml"), dir.join("service.log"));
        fs::write(&file, config).with_context(|| format!("cannot write {}", file.display()))?;
        let log = fs::File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let dir = dir.join("service");
        // The process waits for a line on its input before it executes the service, so that the guardian knows of it
        // first.
        let mut server = Command::new("sh")
            .args(["-c", "read -r _ && exec \"$@\" < /dev/null", "sh"])
            .arg(cli::pagefold())
            .args(["serve", "--stop-workers", "--config"])
            .arg(&file)
            .arg("--dir")
            .arg(&dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("cannot start a service")?;
        guardian.keep_process(ProcessId::of(server.id())?)?;
        let begin = server.stdin.take().map_or(Ok(()), |mut pipe| pipe.write_all(b"\n"));
        begin.context("cannot start a service")?;
        let service = wait_for(|| Service::connect(Place::at(&dir)), "the bench's service does not start")?;
        Ok(Self { server, service: RefCell::new(service), dir })
    }

    /// Directory of the service.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The supervisor's process id.
    pub fn pid(&self) -> u32 {
        self.server.id()
    }

    /// State of a group, as the service reports it. Tries again for 20 s: the service closes the connections of clients
    /// that are silent for a while, and on a saturated host a worker was seen to wait for a processor for 9 s.
    ///
    /// # Errors
    /// The service does not answer.
    pub fn show(&self, group: &str) -> anyhow::Result<GroupState> {
        let end = Instant::now() + PATIENCE;
        loop {
            let answer = self.service.borrow().show(group);
            if answer.is_ok() || Instant::now() > end {
                return answer;
            }
            sleep(Duration::from_millis(100));
            *self.service.borrow_mut() = Service::connect(Place::at(&self.dir))?;
        }
    }

    /// Changes a group's settings.
    ///
    /// # Errors
    /// The service does not answer.
    pub fn set(&self, group: &str, change: Change) -> anyhow::Result<()> {
        Service::connect(Place::at(&self.dir))?.set(group, change).map(drop)
    }

    /// Processor time of each part of the service, in seconds. The agents are threads of the group's members.
    ///
    /// # Errors
    /// The service does not answer, or the worker has ended.
    pub fn cpu_by_part(&self, group: &str, members: &[u32]) -> anyhow::Result<BTreeMap<&'static str, f64>> {
        let of_process = |pid: u32| -> anyhow::Result<f64> { Ok(seconds(&ThreadCpu::of_process(pid)?)) };
        let worker = self.show(group)?.worker_pid.map_or(Ok(0.0), of_process)?;
        let agents = members.iter().map(|pid| seconds(&agents_of(*pid))).sum();
        let prover = prover_of(self.pid()).map_or(Ok(0.0), of_process)?;
        let supervisor = of_process(self.pid())?;
        Ok([("worker", worker), ("agents", agents), ("supervisor", supervisor), ("prover", prover)].into())
    }

    /// Why pages of a member are not folded; see [`Service::why`].
    ///
    /// # Errors
    /// The service does not answer.
    pub fn why(&self, group: &str, pid: u32, pages: Vec<(u64, u16)>) -> anyhow::Result<Vec<wire::Why>> {
        self.service.borrow().why(group, pid, pages)
    }

    /// Savings of a group, counted from page frames, with those that the service reports beside them.
    ///
    /// # Errors
    /// The service does not answer, or the kernel hides frames.
    pub fn audit(&self, group: &str) -> anyhow::Result<audit::GroupFindings> {
        let state = self.show(group)?;
        // A member that has just ended maps no pages, and is left out.
        let member = |m: &api::control::MemberReport| {
            Some(audit::Member { group: group.to_owned(), process: ProcessId::of(m.pid).ok()? })
        };
        let engine = audit::Engine {
            service: self.dir.display().to_string(),
            members: state.report.members.iter().filter_map(member).collect(),
            savings: BTreeMap::from([(group.to_owned(), state.report.savings)]),
            groups: BTreeSet::from([group.to_owned()]),
            pids: state.worker_pid.into_iter().chain([self.pid()]).collect(),
        };
        let findings = audit::take(&[engine]).context("cannot audit page frames")?;
        findings
            .by_group
            .into_iter()
            .find(|g| g.name == group && g.service.is_some())
            .context("page frames show nothing of the group")
    }

    /// Ends the service, whose members have ended before, and removes its directory.
    ///
    /// # Errors
    /// The directory cannot be removed.
    pub fn end(&mut self) -> anyhow::Result<()> {
        if let Ok(server) = ProcessId::of(self.server.id()) {
            server.terminate();
        }
        self.server.wait().context("cannot wait for the service to end")?;
        match fs::remove_dir_all(&self.dir) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(e).with_context(|| format!("cannot remove {}", self.dir.display()))
            }
            _ => Ok(()),
        }
    }
}

/// Sum of the threads' processor time, in seconds.
fn seconds(threads: &[ThreadCpu]) -> f64 {
    threads.iter().map(|thread| thread.used.as_secs_f64()).sum()
}

/// A member's threads that are the agent's. A process that has ended has none.
pub fn agents_of(pid: u32) -> Vec<ThreadCpu> {
    let mut threads = ThreadCpu::of_process(pid).unwrap_or_default();
    threads.retain(|thread| is_agents(pid, thread));
    threads
}

/// A process's threads that are not the agent's. A process that has ended has none.
pub fn own_threads_of(pid: u32) -> Vec<ThreadCpu> {
    let mut threads = ThreadCpu::of_process(pid).unwrap_or_default();
    threads.retain(|thread| !is_agents(pid, thread));
    threads
}

fn is_agents(pid: u32, thread: &ThreadCpu) -> bool {
    thread.name.starts_with(AGENT) && thread.tid != pid
}

/// Path of this program, to start it again.
///
/// # Errors
/// The kernel does not tell the path.
pub fn program() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("cannot find this program to start it again")
}

/// Path of another program of Pagefold: beside this program, as a build leaves them, or in `../lib/pagefold`, as
/// packages install them.
///
/// # Errors
/// The program is in neither place; the error names the remedy.
pub fn beside(name: &str, remedy: &str) -> anyhow::Result<PathBuf> {
    let own = program()?;
    let places = [own.with_file_name(name), own.with_file_name("../lib/pagefold").join(name)];
    let found = places.iter().find(|path| path.is_file()).cloned();
    let missing = || Stop::HostLacks(format!("{} is missing: {remedy}", places[0].display()));
    Ok(found.ok_or_else(missing)?)
}

/// Runs a `pagefold` command for a service. Returns what the command prints.
///
/// # Errors
/// The command fails. That a process has ended meanwhile is no failure.
pub fn pagefold(words: &[&str], service: &Path) -> anyhow::Result<Vec<u8>> {
    let run = Command::new(cli::pagefold()).args(words).arg("--service").arg(service).output();
    let output = run.context("cannot run pagefold")?;
    // Exit status 1 means that a process has ended meanwhile.
    let is_done = output.status.code().is_some_and(|code| code <= 1);
    ensure!(is_done, "pagefold {}: {}", words[0], String::from_utf8_lossy(&output.stderr).trim());
    Ok(output.stdout)
}

/// Calls `attempt` until it succeeds, or for 20 s.
///
/// # Errors
/// The error of the last attempt.
pub fn wait_for<T>(mut attempt: impl FnMut() -> anyhow::Result<T>, what: &str) -> anyhow::Result<T> {
    let begin = Instant::now();
    loop {
        match attempt() {
            Err(e) if begin.elapsed() > PATIENCE => return Err(e.context(what.to_owned())),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
            done => return done,
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // After `end`, this finds nothing to do. An error was reported then, or the bench fails for another reason.
        let _ = self.end();
    }
}

/// Process id of the prover among the supervisor's children; `None` if it does not run.
pub fn prover_of(supervisor: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).ok()?;
    let is_prover = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).next().is_some_and(|program| program.ends_with(b"/pagefold-prove"))
    };
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(is_prover)
}
