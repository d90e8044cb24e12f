//! Processes of a warmed-up program: a zygote with its containers, and containers that LXC starts.

use crate::guardian::Guardian;
use anyhow::{Context, ensure};
use cli::exit::Stop;
use host::ProcessId;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Source of the program, in Python.
const PROGRAM: &str = include_str!("zygote.py");
/// Memory that the program fills when it starts: 64 MiB, in pages.
const DATA_PAGES: usize = 1 << 14;
/// Interval between two checks while something is waited for: 2 ms.
const LOOK: Duration = Duration::from_millis(2);
/// Longest time for a container to be ready, or to end: 120 s.
const PATIENCE: Duration = Duration::from_secs(120);

/// Path of the Python interpreter itself. On some hosts, `python3` is a wrapper that does not work in a container.
///
/// # Errors
/// There is no interpreter.
pub fn interpreter() -> anyhow::Result<PathBuf> {
    let said = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).stderr(Stdio::null()).output();
    let path = said.ok().filter(|said| said.status.success()).and_then(|said| String::from_utf8(said.stdout).ok());
    let lacks = || Stop::HostLacks("containers of a warmed-up program take python3: apt install python3".to_owned());
    Ok(PathBuf::from(path.ok_or_else(lacks)?.trim()))
}

/// A zygote, and the containers that it has forked. Dropping this ends them.
pub struct Zygote {
    program: Child,
    /// The zygote, and the first process of each container.
    pub pids: Vec<u32>,
    /// Time from the first fork until all containers were ready.
    pub all_answered_s: f64,
}

impl Zygote {
    /// Starts the program, and has it fork `count` containers once it is warmed up.
    ///
    /// # Errors
    /// The program fails, or may not make namespaces.
    pub fn start(python: &Path, count: u32) -> anyhow::Result<Self> {
        let mut program = Command::new(python)
            .args(["-c", PROGRAM, &count.to_string(), &DATA_PAGES.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start python3")?;
        let said = program.stdout.take().context("python3 has no output")?;
        let mut zygote = Self { pids: vec![program.id()], program, all_answered_s: 0.0 };
        let mut lines = BufReader::new(said).lines();
        let mut line = || lines.next().transpose().map(Option::unwrap_or_default);
        ensure!(line()? == "warm", "the zygote has ended before it was warm");
        let begin = Instant::now();
        zygote.program.stdin.as_mut().context("python3 has no input")?.write_all(b"\n")?;
        for _ in 0..count {
            let said = line()?;
            let pid = said.strip_prefix("ready ").and_then(|pid| pid.parse::<u32>().ok());
            zygote.pids.push(pid.with_context(|| format!("the zygote makes no container: {said:?}"))?);
        }
        zygote.all_answered_s = begin.elapsed().as_secs_f64();
        Ok(zygote)
    }
}

impl Drop for Zygote {
    fn drop(&mut self) {
        let processes: Vec<ProcessId> = self.pids.iter().filter_map(|pid| ProcessId::of(*pid).ok()).collect();
        // The zygote and its containers end when the zygote's input closes.
        drop(self.program.stdin.take());
        let begin = Instant::now();
        let _ = self.program.wait();
        while processes.iter().any(ProcessId::is_alive) && begin.elapsed() < PATIENCE {
            sleep(LOOK);
        }
    }
}

/// Containers that LXC has started on the host's root, with the same program. Dropping this ends them.
pub struct Lxc {
    dir: PathBuf,
    containers: Vec<(String, Child)>,
    /// The first process of each container.
    pub pids: Vec<u32>,
    /// Time from the first start until the program was warm in all containers.
    pub all_answered_s: f64,
}

impl Lxc {
    /// Starts `count` containers at the same time.
    ///
    /// # Errors
    /// LXC is not installed, or a container does not come up.
    pub fn start(python: &Path, count: u32, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Self> {
        let mut lxc = Self { dir: dir.join("lxc"), containers: Vec::new(), pids: Vec::new(), all_answered_s: 0.0 };
        let begin = Instant::now();
        for number in 1..=count {
            lxc.add(python, &format!("pagefold-{}-{number}", std::process::id()), guardian)?;
        }
        for (name, monitor) in &mut lxc.containers {
            let ready = lxc.dir.join(&*name).join("ready");
            while !ready.exists() {
                let has_ended = monitor.try_wait()?.is_some();
                ensure!(!has_ended && begin.elapsed() < PATIENCE, "container {name} does not come up");
                sleep(LOOK);
            }
            lxc.pids.extend(host::children(monitor.id()).first());
        }
        lxc.all_answered_s = begin.elapsed().as_secs_f64();
        ensure!(lxc.pids.len() == count as usize, "containers have ended");
        Ok(lxc)
    }

    fn add(&mut self, python: &Path, name: &str, guardian: &mut Guardian) -> anyhow::Result<()> {
        let dir = self.dir.join(name);
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let (config, ready) = (dir.join("config"), dir.join("ready"));
        let text = format!(
            "lxc.uts.name = {name}\nlxc.net.0.type = empty\nlxc.console.path = none\nlxc.mount.auto = proc:rw\n"
        );
        fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
        let mut command = Command::new("lxc-start");
        command.args(["-F", "-n", name, "-P"]).arg(&self.dir).arg("-f").arg(config);
        command.arg("-o").arg(dir.join("log")).args(["-l", "WARN", "--"]);
        command.arg(python).args(["-c", PROGRAM, "0", &DATA_PAGES.to_string()]).arg(ready);
        let monitor = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(|e| Stop::HostLacks(format!("cannot run lxc-start: {e}: apt install lxc")))?;
        guardian.keep_process(ProcessId::of(monitor.id())?)?;
        self.containers.push((name.to_owned(), monitor));
        Ok(())
    }
}

impl Drop for Lxc {
    fn drop(&mut self) {
        for (name, monitor) in &mut self.containers {
            let _ = Command::new("lxc-stop").args(["--kill", "-n", name, "-P"]).arg(&self.dir).status();
            // If a container does not end here, the guardian ends it.
            let begin = Instant::now();
            while monitor.try_wait().is_ok_and(|status| status.is_none()) && begin.elapsed() < PATIENCE {
                sleep(LOOK);
            }
        }
    }
}
