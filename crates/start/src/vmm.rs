//! Starts QEMU's processes, connects to them, and ends them.

use crate::machine::{Places, QMP};
use anyhow::{Context, bail};
use cli::exit::Stop;
use guest::qmp::{Qmp, QmpError};
use host::ProcessId;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Longest path of a unix socket, in bytes, without the final zero byte.
const SOCKET_PATH_MAX: usize = 107;
/// Longest time for an answer of QEMU's: 30 s.
const QMP_TIME: Duration = Duration::from_secs(30);
/// Interval between two checks of something that takes milliseconds: 1 ms.
const SOON: Duration = Duration::from_millis(1);
/// Longest time until a killed process is gone: 10 s.
const END_TIME: Duration = Duration::from_secs(10);
/// Lines of a log that an error quotes.
const LAST_LINES: usize = 10;

/// Starts a machine, which lives on when this process ends. Its standard input is the file `memory`, if that is given.
pub(crate) fn start(words: &[String], places: &Places, memory: Option<&File>) -> anyhow::Result<ProcessId> {
    let socket = places.dir.join("identity");
    if socket.as_os_str().len() > SOCKET_PATH_MAX {
        let text = format!("{} is too long for a socket's path ({SOCKET_PATH_MAX} bytes)", socket.display());
        return Err(Stop::Usage(format!("{text}: take a shorter name, or a shorter directory")).into());
    }
    let words = places.fill(words);
    let log = places.dir.join("log");
    let run = || {
        let errors = File::create(&log)?;
        let input = memory.map_or(Ok(Stdio::null()), |memory| memory.try_clone().map(Stdio::from))?;
        // A process group of its own: a Ctrl-C meant for this command must not reach a guest that is handed out.
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).stdin(input).stdout(Stdio::null()).stderr(errors).process_group(0).spawn()
    };
    let child = run().with_context(|| format!("cannot run {}", words[0]))?;
    Ok(ProcessId::of(child.id())?)
}

/// Connects to a machine's QMP socket as soon as it listens.
pub(crate) fn connect(dir: &Path, process: &ProcessId, deadline: Instant) -> anyhow::Result<Qmp> {
    let socket = dir.join(QMP);
    loop {
        match Qmp::connect(&socket, QMP_TIME) {
            Ok(qmp) => return Ok(qmp),
            Err(e) if !e.is_wrong_socket() => return Err(e.into()),
            Err(_) if !process.is_alive() => bail!("QEMU has ended{}", last_words(dir)),
            Err(e) if Instant::now() > deadline => return Err(e.into()),
            Err(_) => sleep(SOON),
        }
    }
}

/// Asks QEMU `question` again and again, until `is_done` returns true for the `status` in its answer.
pub(crate) fn wait_for(
    qmp: &mut Qmp,
    question: &str,
    deadline: Instant,
    mut is_done: impl FnMut(&str) -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    loop {
        let answer = qmp.execute(question, serde_json::json!({}))?;
        if is_done(answer["status"].as_str().unwrap_or_default())? {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("QEMU does not come to an end: {question} says {answer}");
        }
        sleep(SOON);
    }
}

/// Whether a machine runs.
pub(crate) fn is_running(qmp: &mut Qmp) -> Result<bool, QmpError> {
    Ok(qmp.execute("query-status", serde_json::json!({}))?["running"] == true)
}

/// Sets whether QEMU leaves out memory that it shares with a file when it writes or reads its state. Writer and reader
/// must agree.
pub(crate) fn leave_out_memory(qmp: &mut Qmp, leave_out: bool) -> Result<(), QmpError> {
    let capabilities = serde_json::json!({"capabilities": [{"capability": "x-ignore-shared", "state": leave_out}]});
    qmp.execute("migrate-set-capabilities", capabilities).map(drop)
}

/// Ends a process at once, and waits until it is gone.
pub(crate) fn end(process: &ProcessId) -> anyhow::Result<()> {
    process.kill();
    wait_end(process, Instant::now() + END_TIME)
}

/// Waits until a process is gone.
pub(crate) fn wait_end(process: &ProcessId, deadline: Instant) -> anyhow::Result<()> {
    while process.is_alive() {
        if Instant::now() > deadline {
            bail!("process {} does not end", process.pid);
        }
        sleep(SOON);
    }
    process.collect();
    Ok(())
}

/// Ends every machine of this directory: those whose command line names a socket in it.
pub(crate) fn end_those_of(dir: &Path) {
    end_those_with(dir, QMP);
}

/// Ends every machine with a socket in this directory, or below it.
pub(crate) fn end_those_below(dir: &Path) {
    end_those_with(dir, "");
}

/// Ends every process whose command line names a socket in directory `dir` with a path that begins with `beginning`.
fn end_those_with(dir: &Path, beginning: &str) {
    let Ok(dir) = fs::canonicalize(dir) else { return };
    let socket = format!("path={}/{beginning}", dir.display()).replace(',', ",,");
    for pid in host::pids().unwrap_or_default() {
        let Ok(process) = ProcessId::of(pid) else { continue };
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let is_it = words.split(|byte| *byte == 0).any(|word| String::from_utf8_lossy(word).contains(&socket));
        if is_it && let Err(why) = end(&process) {
            cli::say!("pagefold: {why:#}");
        }
    }
}

/// The last output of a machine, to put behind an error; empty if there is none.
pub(crate) fn last_words(dir: &Path) -> String {
    let mut text = String::new();
    for name in ["log", "console.log"] {
        let log = fs::read(dir.join(name)).map(|log| String::from_utf8_lossy(&log).into_owned()).unwrap_or_default();
        let lines: Vec<&str> = log.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
        for line in &lines[lines.len().saturating_sub(LAST_LINES)..] {
            text.push_str(&format!("\n  {line}"));
        }
    }
    text
}
