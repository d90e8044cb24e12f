//! Has one process attached, by `pagefold-attach`.

use anyhow::Context;
use api::enrol::{Via, reason};
use cli::exit::Code;
use host::ProcessId;
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// The program that puts agents into processes.
pub const PROGRAM: &str = "pagefold-attach";

/// A process that is to be attached.
#[derive(Clone, Debug)]
pub struct Order {
    /// The process.
    pub process: ProcessId,
    /// The group whose member it becomes.
    pub group: String,
    /// Its name there; `None`: one made from the program's.
    pub name: Option<String>,
    /// Whether all private anonymous memory is folded.
    pub all_anonymous: bool,
    /// Whether a rule wants it.
    pub by_rule: bool,
    /// Whether it is only looked at.
    pub dry_run: bool,
    /// The merger.
    pub via: Via,
    /// Whether ksmd is to merge it no longer.
    pub undo: bool,
    /// Whether an agent is there, beside which the program was killed.
    pub again: bool,
}

/// A process that was attached, as `pagefold-attach` and `--json` say it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Attached {
    /// Its pid.
    pub pid: u32,
    /// Its group.
    pub group: String,
    /// Number of its threads.
    pub threads: usize,
    /// How long one of them was stopped.
    pub stopped_us: u64,
    /// Bytes of memory that may be folded or merged.
    pub enrolled_bytes: u64,
    /// The merger.
    pub via: Via,
    /// Whether its pages are shared with its group alone.
    pub groups_hold: bool,
    /// Its pages that ksmd has merged, if it is the merger and the kernel tells.
    pub ksm_pages: Option<u64>,
}

/// A process that was not attached.
#[derive(Debug)]
pub struct Refused {
    /// Why, in words.
    pub why: String,
    /// Whether this host lacks something that every process would need.
    pub host_lacks: bool,
}

impl Order {
    /// Has `program` carry it out, for the service in `dir`. It stays beside the process, and is collected by
    /// `rustix::process::wait`.
    ///
    /// # Errors
    /// The program cannot be started, or says something else than was asked.
    pub fn carry_out(&self, program: &Path, dir: &Path) -> anyhow::Result<Result<Attached, Refused>> {
        let ProcessId { pid, start_ticks } = self.process;
        let mut command = Command::new(program);
        command.args(["--pid", &pid.to_string(), "--started", &start_ticks.to_string(), "--group", &self.group]);
        command.arg("--dir").arg(dir).args(self.name.iter().flat_map(|name| ["--name", name]));
        command.args(["--via", self.via.word()]);
        let flags = [
            ("--all-anonymous", self.all_anonymous),
            ("--by-rule", self.by_rule),
            ("--dry-run", self.dry_run),
            ("--undo", self.undo),
            ("--again", self.again),
        ];
        command.args(flags.iter().filter(|(_, given)| *given).map(|(flag, _)| flag));
        // It goes on when this program has ended, and an interrupt at the terminal is not meant for it.
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let (mut text, mut errors) = (String::new(), String::new());
        child.stdout.take().context("no output")?.read_to_string(&mut text)?;
        child.stderr.take().context("no output")?.read_to_string(&mut errors)?;
        if !text.is_empty() {
            return serde_json::from_str(&text).map(Ok).with_context(|| format!("{PROGRAM} says: {text}"));
        }
        let code = child.wait()?.code();
        let host_lacks = code == Some(i32::from(Code::HostLacks as u8));
        Ok(Err(Refused { why: reason(&errors, pid), host_lacks }))
    }
}
