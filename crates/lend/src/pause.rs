//! The balancer's side of pauses: it starts the process that pauses guests (`hold.rs`, the holder) for one round, and
//! resumes guests that a killed process has left paused.

use crate::hold::{self, Command, Replies, Reply, Target};
use crate::ledger::{Entry, Ledger, Turn};
use crate::many;
use anyhow::Context;
use balance::Pause;
use guest::Guest;
use serde::Serialize;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

/// Longest wait for the holder's reply: 15 s. For each 16 guests whose QEMU does not answer, the holder needs two
/// seconds.
const REPLY_WITHIN: Duration = Duration::from_secs(15);

/// A pause that was made, or tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Paused {
    /// The guest, and the reason.
    #[serde(flatten)]
    pub pause: Pause,
    /// Time for which it stood still, in milliseconds; 0 if it was not paused.
    pub paused_ms: u64,
    /// The reason why it was not paused, or not resumed.
    pub problem: Option<String>,
}

/// Guests that are paused in one round. Dropping it resumes them, as does the end of this process.
#[derive(Default)]
pub struct Hold {
    holder: Option<Holder>,
    all: Vec<Held>,
}

/// A guest that was paused, or that could not be.
struct Held {
    paused: Paused,
    since: Instant,
    is_paused: bool,
}

/// The process that pauses and resumes guests, and two threads at its pipes, so that a holder that hangs makes nobody
/// wait.
struct Holder {
    child: Option<Child>,
    /// Commands to the holder, which ends when this closes.
    commands: Option<Sender<String>>,
    replies: Receiver<String>,
    /// Longest wait for a reply.
    patience: Duration,
}

impl Hold {
    /// Whether no guest is paused.
    pub fn is_empty(&self) -> bool {
        !self.all.iter().any(|held| held.is_paused)
    }

    /// Whether a guest is paused.
    pub(crate) fn has(&self, guest: &str) -> bool {
        self.all.iter().any(|held| held.is_paused && held.paused.pause.guest == guest)
    }

    /// Pauses guests. Each is in the ledger and the journal before that.
    ///
    /// # Errors
    /// The ledger cannot be written, or the holder cannot be started. Dropping this resumes all that were paused.
    pub fn pause(
        &mut self,
        pauses: &[Pause],
        guests: &[Guest],
        ledger: &mut Ledger,
        turn: &Turn,
    ) -> anyhow::Result<()> {
        let known = |pause: &&Pause| !self.all.iter().any(|held| held.paused.pause.guest == pause.guest);
        let target =
            |pause: &Pause| Some((pause.clone(), Target::of(guests.iter().find(|guest| guest.id == pause.guest)?)?));
        let wanted: Vec<(Pause, Target)> = pauses.iter().filter(known).filter_map(target).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let (at_s, since) = (host::boot_clock_s(), Instant::now());
        let wanted = self.that_run(wanted, since);
        if wanted.is_empty() {
            return Ok(());
        }
        ledger.write_all_down(turn, wanted.iter().map(|(pause, _)| Entry::Pause { at_s, pause }))?;
        ledger.note_pauses(turn, wanted.iter().map(|(_, target)| target))?;
        if self.holder.is_none() {
            self.holder = Some(Holder::start()?);
        }
        let since = Instant::now();
        let targets = wanted.iter().map(|(_, target)| target.clone()).collect();
        let replies = self.ask(&Command::Stop(targets));
        let mut running = Vec::new();
        for (pause, _) in wanted {
            let reply = replies.iter().find(|reply| reply.guest == pause.guest);
            let problem = reply.map_or_else(
                || Some("the process that pauses guests has ended, or does not answer".into()),
                |reply| reply.problem.clone(),
            );
            // Without a reply, the guest may be paused.
            let is_paused = reply.is_none_or(|reply| reply.is_paused);
            if !is_paused {
                // The guest runs, or somebody else has paused it, so it must not be resumed later.
                running.push(pause.guest.clone());
            }
            self.all.push(Held { paused: Paused { pause, paused_ms: 0, problem }, since, is_paused });
        }
        if running.is_empty() { Ok(()) } else { ledger.note_resumed(turn, &running) }
    }

    /// Those of the guests that run. A guest that does not run must not be noted as paused by us, because a later
    /// reader of the note would resume it.
    fn that_run(&mut self, wanted: Vec<(Pause, Target)>, since: Instant) -> Vec<(Pause, Target)> {
        let looked = many::each(wanted.into_iter(), |(pause, target)| {
            let problem = hold::running(&target).err();
            (pause, target, problem)
        });
        let mut running = Vec::new();
        for (pause, target, problem) in looked {
            if problem.is_none() {
                running.push((pause, target));
            } else {
                self.all.push(Held { paused: Paused { pause, paused_ms: 0, problem }, since, is_paused: false });
            }
        }
        running
    }

    /// Resumes all guests but those for which `keeps` returns true. A guest whose QEMU does not answer is still paused,
    /// and tried again at the next call.
    ///
    /// # Errors
    /// The ledger cannot be written.
    pub fn resume(&mut self, keeps: impl Fn(&str) -> bool, ledger: &mut Ledger, turn: &Turn) -> anyhow::Result<()> {
        let is_due = |held: &&mut Held| held.is_paused && !keeps(&held.paused.pause.guest);
        let guests: Vec<String> =
            self.all.iter_mut().filter(is_due).map(|held| held.paused.pause.guest.clone()).collect();
        if guests.is_empty() {
            return Ok(());
        }
        let replies = self.ask(&Command::Cont(guests));
        let (mut resumed, mut running) = (Vec::new(), Vec::new());
        for held in self.all.iter_mut().filter(is_due) {
            let guest = held.paused.pause.guest.clone();
            let own_ms = u64::try_from(held.since.elapsed().as_millis()).unwrap_or(u64::MAX);
            let reply = replies.iter().find(|reply| reply.guest == guest).cloned();
            let reply = reply.unwrap_or_else(|| Reply { paused_ms: own_ms, ..resume_alone(&guest, ledger) });
            let is_known = reply.is_paused && held.paused.problem == reply.problem;
            held.is_paused = reply.is_paused;
            (held.paused.paused_ms, held.paused.problem) = (reply.paused_ms, reply.problem);
            if !reply.is_paused {
                running.push(guest);
            }
            if !is_known {
                resumed.push(held.paused.clone());
            }
        }
        note_resumed(&running, &resumed, ledger, turn)
    }

    /// Resumes all guests. Returns all pauses of the round, with how long each took.
    ///
    /// # Errors
    /// The ledger cannot be written.
    pub fn end(mut self, ledger: &mut Ledger, turn: &Turn) -> anyhow::Result<Vec<Paused>> {
        self.resume(|_| false, ledger, turn)?;
        Ok(std::mem::take(&mut self.all).into_iter().map(|held| held.paused).collect())
    }

    /// Sends a command to the holder and returns its replies; none if it has ended, or does not answer in time. It is
    /// given up then: a late reply would be taken for the reply to another command. Its input closes, so that it
    /// resumes all guests once it can.
    fn ask(&mut self, command: &Command) -> Replies {
        let replies = self.holder.as_ref().and_then(|holder| holder.ask(command).ok());
        if replies.is_none() {
            self.holder = None;
        }
        replies.unwrap_or_default()
    }
}

impl Holder {
    fn start() -> anyhow::Result<Self> {
        Self::run(pagefold().args(["balance", "hold"]))
    }

    fn run(program: &mut std::process::Command) -> anyhow::Result<Self> {
        let mut child = program
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Signals of a terminal are meant for the balancer.
            .process_group(0)
            .spawn()
            .context("cannot start the process that resumes guests")?;
        let mut input = child.stdin.take().context("a process without input")?;
        let output = BufReader::new(child.stdout.take().context("a process without output")?);
        let ((commands, lines), (sender, replies)) = (mpsc::channel::<String>(), mpsc::channel());
        std::thread::spawn(move || lines.iter().map_while(|line| writeln!(input, "{line}").ok()).for_each(drop));
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).map_while(|line| sender.send(line).ok()).for_each(drop);
        });
        Ok(Self { commands: Some(commands), child: Some(child), replies, patience: REPLY_WITHIN })
    }

    fn ask(&self, command: &Command) -> anyhow::Result<Replies> {
        let commands = self.commands.as_ref().context("its input is closed")?;
        commands.send(serde_json::to_string(command)?)?;
        Ok(serde_json::from_str(&self.replies.recv_timeout(self.patience)?)?)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.commands = None;
        // The holder lives on while a guest's QEMU does not answer.
        if let Some(mut child) = self.child.take() {
            std::thread::spawn(move || child.wait());
        }
    }
}

/// The program `pagefold`, to be given a command.
fn pagefold() -> std::process::Command {
    std::process::Command::new(cli::pagefold())
}

/// Resumes guests that a killed process has left paused. The caller holds the lock [`Turn`], so that process is gone.
///
/// # Errors
/// The ledger cannot be written.
pub fn resume_left(ledger: &mut Ledger, turn: &Turn) -> anyhow::Result<()> {
    let left = ledger.left_paused();
    if left.is_empty() {
        return Ok(());
    }
    let resume = |guest: String| {
        let problem = resume_alone(&guest, ledger).problem;
        let pause = Pause { guest, reason: "the process that had paused it is gone".into() };
        Paused { pause, paused_ms: 0, problem }
    };
    // All guests are resumed first, because writing the ledger may fail.
    let resumed = many::each(left.into_iter(), resume);
    let running = resumed.iter().filter(|paused| paused.problem.is_none());
    let running: Vec<String> = running.map(|paused| paused.pause.guest.clone()).collect();
    note_resumed(&running, &resumed, ledger, turn)
}

/// Notes in the ledger which guests run again, and writes all attempts to resume guests to the journal.
fn note_resumed(running: &[String], resumed: &[Paused], ledger: &mut Ledger, turn: &Turn) -> anyhow::Result<()> {
    let at_s = host::boot_clock_s();
    let noted = if running.is_empty() { Ok(()) } else { ledger.note_resumed(turn, running) };
    noted.and(ledger.write_all_down(turn, resumed.iter().map(|paused| Entry::Resume { at_s, paused })))
}

/// Resumes a guest from this process, without the holder.
fn resume_alone(guest: &str, ledger: &Ledger) -> Reply {
    let resumed = ledger.paused(guest).map_or(Ok(()), |target| hold::resume(target.process, &target.qmp));
    Reply { guest: guest.to_owned(), is_paused: resumed.is_err(), paused_ms: 0, problem: resumed.err() }
}

#[cfg(test)]
impl Hold {
    /// A guest that was paused by a holder that has ended. The ledger has it.
    pub(crate) fn of_paused(guest: &Guest, ledger: &mut Ledger, turn: &Turn) -> Self {
        ledger.note_pauses(turn, std::iter::once(&Target::of(guest).expect("a guest with QMP"))).expect("a ledger");
        let pause = Pause { guest: guest.id.clone(), reason: "a test".into() };
        let paused = Paused { pause, paused_ms: 0, problem: None };
        Self { holder: None, all: vec![Held { paused, since: Instant::now(), is_paused: true }] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_qemu::FakeQemu;

    /// A guest, and its ledger.
    fn scene() -> (FakeQemu, Ledger, Turn, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(dir.path()).unwrap();
        let turn = ledger.take_turn().unwrap();
        (FakeQemu::start("a", 1 << 20, dir.path()), ledger, turn, dir)
    }

    /// Has a guest paused by a holder that answers this, in words of a shell.
    fn pause_by(holder: &str, qemu: &FakeQemu, ledger: &mut Ledger, turn: &Turn) -> Hold {
        let mut shell = std::process::Command::new("sh");
        let mut hold = Hold { holder: Some(Holder::run(shell.args(["-c", holder])).unwrap()), all: Vec::new() };
        let pause = Pause { guest: qemu.guest.id.clone(), reason: "a test".into() };
        hold.pause(&[pause], std::slice::from_ref(&qemu.guest), ledger, turn).unwrap();
        hold
    }

    #[test]
    fn guest_that_was_left_paused_is_resumed_once_its_qemu_answers() {
        let (qemu, mut ledger, turn, _dir) = scene();
        ledger.note_pauses(&turn, std::iter::once(&Target::of(&qemu.guest).unwrap())).unwrap();
        (qemu.state().status, qemu.state().fails) = ("paused", "cont");
        resume_left(&mut ledger, &turn).unwrap();
        assert_eq!(ledger.left_paused(), [qemu.guest.id.as_str()], "it was not resumed");
        qemu.state().fails = "";
        resume_left(&mut ledger, &turn).unwrap();
        assert_eq!((qemu.state().status, ledger.left_paused()), ("running", Vec::new()));
    }

    #[test]
    fn guest_is_in_ledger_and_journal_before_it_is_paused() {
        let (qemu, mut ledger, turn, dir) = scene();
        let files = format!("{0}/balance.json {0}/journal/journal", dir.path().display());
        let copy = format!("read line; cat {files} > {}/copy; echo '[]'", dir.path().display());
        let hold = pause_by(&copy, &qemu, &mut ledger, &turn);
        let written = std::fs::read_to_string(dir.path().join("copy")).unwrap();
        assert!(written.contains("\"is_resumed\":false") && written.contains("\"pause\""), "{written}");
        drop(hold);
    }

    #[test]
    fn guest_is_resumed_although_its_holder_was_killed_before_it_answered() {
        let (qemu, mut ledger, turn, _dir) = scene();
        let mut hold = pause_by("read line", &qemu, &mut ledger, &turn);
        assert!(hold.has(&qemu.guest.id), "it may be paused");
        qemu.state().status = "paused";
        hold.resume(|_| false, &mut ledger, &turn).unwrap();
        assert_eq!((qemu.state().status, ledger.left_paused()), ("running", Vec::new()));
    }

    #[test]
    fn guest_whose_qemu_did_not_answer_is_resumed_by_the_next_call() {
        let (qemu, mut ledger, turn, dir) = scene();
        let mut hold = Hold::of_paused(&qemu.guest, &mut ledger, &turn);
        (qemu.state().status, qemu.state().fails) = ("paused", "cont");
        for _ in 0..3 {
            hold.resume(|_| false, &mut ledger, &turn).unwrap();
            assert!(hold.has(&qemu.guest.id) && ledger.left_paused().len() == 1, "it is still paused");
        }
        qemu.state().fails = "";
        hold.resume(|_| false, &mut ledger, &turn).unwrap();
        assert_eq!((qemu.state().status, hold.is_empty(), ledger.left_paused()), ("running", true, Vec::new()));
        let journal = std::fs::read_to_string(dir.path().join("journal/journal")).unwrap();
        assert_eq!(journal.matches("\"resume\"").count(), 2, "one failure, and one success: {journal}");
    }

    #[test]
    fn holder_that_stands_still_keeps_nobody_waiting_and_its_guest_is_resumed() {
        let (qemu, mut ledger, turn, _dir) = scene();
        let mut hold = Hold::of_paused(&qemu.guest, &mut ledger, &turn);
        qemu.state().status = "paused";
        // More bytes than a pipe takes, to a holder that does not read.
        let mut holder = Holder::run(std::process::Command::new("sleep").arg("60")).unwrap();
        let pid = holder.child.as_ref().unwrap().id().to_string();
        holder.commands.as_ref().unwrap().send("x".repeat(1 << 20)).unwrap();
        holder.patience = Duration::from_millis(50);
        let began = Instant::now();
        hold.holder = Some(holder);
        hold.resume(|_| false, &mut ledger, &turn).unwrap();
        assert!(began.elapsed() < Duration::from_secs(30), "it waited until the holder ended");
        assert!(std::process::Command::new("kill").arg(pid).status().unwrap().success());
        assert!(hold.holder.is_none(), "a late reply would be taken for another command's");
        assert_eq!((qemu.state().status, ledger.left_paused()), ("running", Vec::new()));
    }

    /// An upgrade may replace the program's file while it runs.
    #[test]
    fn program_whose_file_was_replaced_is_started_again() {
        const COPY: &str = "PAGEFOLD_TEST_COPY";
        let own = std::env::current_exe().unwrap();
        if std::env::var_os(COPY).is_some() {
            std::fs::remove_file(own).unwrap();
            std::fs::write(std::env::var_os(COPY).unwrap(), "another program").unwrap();
            let status = pagefold().arg("--list").stdout(Stdio::null()).status();
            return assert!(status.is_ok_and(|status| status.success()), "it cannot be started");
        }
        let dir = tempfile::tempdir().unwrap();
        let copy = dir.path().join("copy");
        assert!(std::process::Command::new("cp").arg(own).arg(&copy).status().unwrap().success());
        let name = "pause::tests::program_whose_file_was_replaced_is_started_again";
        let again = std::process::Command::new(&copy).args(["--exact", name]).env(COPY, &copy).output().unwrap();
        assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stdout));
    }

    #[test]
    fn guest_that_could_not_be_resumed_is_left_to_the_next_process() {
        let (qemu, mut ledger, turn, _dir) = scene();
        let mut hold = Hold::of_paused(&qemu.guest, &mut ledger, &turn);
        (qemu.state().status, qemu.state().fails) = ("paused", "cont");
        hold.resume(|_| false, &mut ledger, &turn).unwrap();
        assert_eq!(ledger.left_paused(), [qemu.guest.id.as_str()]);
    }

    #[test]
    fn guest_that_an_operator_has_paused_is_never_resumed() {
        let (qemu, mut ledger, turn, _dir) = scene();
        qemu.state().status = "paused";
        let answer =
            r#"[{"guest":"qemu:a","is_paused":false,"paused_ms":0,"problem":"it does not run: it is paused"}]"#;
        let hold = pause_by(&format!("read line; echo '{answer}'; cat"), &qemu, &mut ledger, &turn);
        let paused = hold.end(&mut ledger, &turn).unwrap();
        assert_eq!(paused[0].problem.as_deref(), Some("it does not run: it is paused"));
        resume_left(&mut ledger, &turn).unwrap();
        assert_eq!(qemu.state().status, "paused", "the next round leaves it alone, too");
        // Nor where the holder does not answer, or this process is killed.
        let mut hold = pause_by("read line", &qemu, &mut ledger, &turn);
        assert_eq!((hold.is_empty(), ledger.left_paused().len()), (true, 0));
        hold.resume(|_| false, &mut ledger, &turn).unwrap();
        assert_eq!(qemu.state().status, "paused");
    }
}
