//! Starts `pagefold-attach` to attach one process, and reads what it says.

use anyhow::Context;
use api::enrol::{Via, reason};
use cli::exit::Code;
use host::ProcessId;
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The program that puts agents into processes.
pub const PROGRAM: &str = "pagefold-attach";

/// Longest wait for `pagefold-attach` to say whether the process is attached: 2 minutes. With ksmd as the merger, it is
/// 2 hours: un-merging all pages that ksmd has merged may take one hour.
const TIME: Duration = Duration::from_secs(120);
const KSM_TIME: Duration = Duration::from_secs(2 * 3600);
/// Longest wait for `pagefold-attach` to end once it has closed its output, and the pause between two calls of
/// `waitpid` meanwhile: 1 s, 5 ms.
const END_TIME: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(5);

/// An order to `pagefold-attach`: attach this process (or un-merge it, or only look at it).
#[derive(Clone, Debug)]
pub struct Order {
    /// The process.
    pub process: ProcessId,
    /// The group whose member the process becomes.
    pub group: String,
    /// The member's name; `None`: the name is made from the file name of its program.
    pub name: Option<String>,
    /// Whether all private anonymous memory is folded, not only ranges that the process advises.
    pub all_anonymous: bool,
    /// Whether an enrol rule gives the order, not a user.
    pub by_rule: bool,
    /// Whether the process is only examined, and not changed.
    pub dry_run: bool,
    /// The merger.
    pub via: Via,
    /// Whether ksmd is to stop merging the process's pages.
    pub undo: bool,
    /// Whether the process has an agent already, and only needs a new `pagefold-attach`, because the one that served it
    /// was killed.
    pub again: bool,
}

/// A process that was attached, as `pagefold-attach` and `--json` say it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Attached {
    /// Pid of the process.
    pub pid: u32,
    /// The group that the process is a member of.
    pub group: String,
    /// Number of threads of the process.
    pub threads: usize,
    /// Longest time that a thread was stopped, in microseconds.
    pub stopped_us: u64,
    /// Memory of the process that may be folded or merged, in bytes.
    pub enrolled_bytes: u64,
    /// The merger.
    pub via: Via,
    /// Whether the merger shares the process's pages with members of its group alone.
    pub groups_hold: bool,
    /// Pages of the process that ksmd has merged. `None` if ksmd is not the merger, or the kernel does not tell.
    pub ksm_pages: Option<u64>,
}

/// A process that was not attached.
#[derive(Debug)]
pub struct Refused {
    /// The reason, for the user.
    pub why: String,
    /// Whether this host lacks something that every process would need.
    pub host_lacks: bool,
    /// Whether the order is a usage error, for instance names a group that does not exist.
    pub is_usage: bool,
    /// The thread that still reads the output of `pagefold-attach`, if the program has said nothing in time.
    pub listener: Option<JoinHandle<()>>,
}

impl Order {
    /// Starts `program` (`pagefold-attach`) to carry out the order, for the service in `dir`. The program stays beside
    /// the attached process, so the caller reaps it later by `rustix::process::wait`. A process may keep the program
    /// waiting, so this call gives up after 2 minutes (ksmd: 2 hours).
    ///
    /// # Errors
    /// The program cannot be started, or its output is no [`Attached`] in JSON.
    pub fn carry_out(&self, program: &Path, dir: &Path) -> anyhow::Result<Result<Attached, Refused>> {
        self.carry_out_within(program, dir, if self.via == Via::Ksm { KSM_TIME } else { TIME })
    }

    fn carry_out_within(
        &self,
        program: &Path,
        dir: &Path,
        time: Duration,
    ) -> anyhow::Result<Result<Attached, Refused>> {
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
        // `pagefold-attach` outlives this program. Ctrl-C at the terminal must not reach it.
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let (mut output, mut errors) = child.stdout.take().zip(child.stderr.take()).context("no output")?;
        let (sender, said) = mpsc::channel();
        let listener = std::thread::spawn(move || {
            let mut both = [String::new(), String::new()];
            let read = output.read_to_string(&mut both[0]).and_then(|_| errors.read_to_string(&mut both[1]));
            // Sending fails if the receiver gave up after the timeout.
            let _ = sender.send(read.map(|_| both));
        });
        let Ok(said) = said.recv_timeout(time) else {
            let why = format!("{PROGRAM} has said nothing for {} s, and goes on by itself", time.as_secs());
            return Ok(Err(Refused { why, host_lacks: false, is_usage: false, listener: Some(listener) }));
        };
        let [text, errors] = said?;
        if !text.is_empty() {
            return serde_json::from_str(&text).map(Ok).with_context(|| format!("{PROGRAM} says: {text}"));
        }
        // After a failure, `pagefold-attach` may stay to look after threads of a frozen process.
        let until = Instant::now() + END_TIME;
        let ended = loop {
            match child.try_wait()? {
                None if Instant::now() < until => std::thread::sleep(LOOK),
                ended => break ended,
            }
        };
        let code = ended.and_then(|ended| ended.code());
        let [host_lacks, is_usage] = [Code::HostLacks, Code::Usage].map(|of| code == Some(i32::from(of as u8)));
        Ok(Err(Refused { why: reason(&errors, pid), host_lacks, is_usage, listener: None }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{make_script, order};

    fn carried_out(script: &str, time: Duration) -> Refused {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("program");
        make_script(&program, script);
        order(7).carry_out_within(&program, dir.path(), time).unwrap().unwrap_err()
    }

    /// A regression test: two processes that kept `pagefold-attach` waiting kept all others from being attached.
    #[test]
    fn program_that_says_nothing_is_not_waited_for() {
        let refused = carried_out("exec sleep 3", Duration::from_millis(100));
        assert!(refused.why.ends_with("has said nothing for 0 s, and goes on by itself"), "{refused:?}");
        refused.listener.expect("it is listened to").join().unwrap();
    }

    /// After a failure, `pagefold-attach` may keep running, to look after threads of a process that was frozen.
    #[test]
    fn reason_of_program_that_stays_is_heard() {
        let refused = carried_out("echo 'it was frozen' >&2; exec sleep 3 > /dev/null 2>&1", Duration::from_secs(120));
        assert_eq!(refused.why, "it was frozen");
    }
}
