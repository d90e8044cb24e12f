//! Forked children of an attached process become members of its group, as those of a process that was started as one
//! do. Servers that fork their workers hold most of their memory there.
//!
//! ```text
//!   look, soon after a fork --> forked, of its parent's program, old enough, with memory of its own?
//!     ^                             | yes: a further `pagefold-attach`, with the rights and settings of this one
//!     |                             v
//!     |   it ends with an error   it stays beside the child, and looks after that one's children
//!     `---after a wait that doubles---'
//! ```
//!
//! A child with little memory of its own is looked at again, and its children are looked at, too. A child that only
//! waits for other processes may have children with much memory.
//!
//! The supervisor decides whether a child is a member (`crates/service/src/decide.rs`). A child that executes a program
//! ends its own membership by that. Children stay members when their parent is detached, or when this program is
//! killed. Why one could not be attached is told to the supervisor, for `group show`.

use crate::refuse;
use api::enrol::{NotAttached, reason};
use host::{Process, ProcessId, ProcessStat, Usage};
use std::collections::BTreeMap;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Age at which a child is attached: 10 s. Most children that only save or compute something have ended by then.
const AFTER: Duration = Duration::from_secs(10);
/// Least memory of its own for which a child is attached: 4 MiB, as for processes that a rule fits.
const LEAST_BYTES: u64 = 4 << 20;
/// Shortest and longest wait before a child is looked at again: 2 s, 10 minutes.
const WAITS: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(600));
/// Most bytes that are read of the error message of a child's `pagefold-attach`.
const ERROR_BYTES: u64 = 4096;
/// Most children that are checked and attached in one look: 4, so that hundreds of programs do not start at once.
const MOST_AT_ONCE: usize = 4;
/// Environment variable with the age in seconds at which children are attached, in place of [`AFTER`]. With `never`,
/// none is.
const VARIABLE: &str = "PAGEFOLD_CHILDREN_AFTER";

/// The forked children of one process.
#[derive(Debug)]
pub struct Children {
    parent: ProcessId,
    after: Option<Duration>,
    arguments: Vec<String>,
    known: BTreeMap<u32, Known>,
    /// When children are to be looked at next; `None` if that is left to the next look at the parent.
    due: Option<Instant>,
    /// The children that the supervisor was told could not be attached: for each pid, the reason and the time of the
    /// next attempt.
    told: BTreeMap<u32, (String, Instant)>,
}

/// A forked child that was seen. `helper` is its own `pagefold-attach`, `again` the time of the next look at it.
#[derive(Debug)]
struct Known {
    process: ProcessId,
    again: Instant,
    wait: Duration,
    helper: Option<Child>,
    /// Reason why the last attempt to attach the child failed.
    why: Option<String>,
}

impl Children {
    /// The children of process `parent`. `arguments` are this program's arguments without the process and its name.
    pub fn new(parent: ProcessId, arguments: Vec<String>) -> Self {
        let after = std::env::var(VARIABLE).ok();
        let after = after.map_or(Some(AFTER), |text| Duration::try_from_secs_f64(text.parse().ok()?).ok());
        Self { parent, after, arguments, known: BTreeMap::new(), due: None, told: BTreeMap::new() }
    }

    /// When [`Children::look`] is to be called at the latest.
    pub const fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Calls `tell` with the children that could not be attached, if these have changed. `tell` informs the supervisor,
    /// and returns whether it could.
    pub fn tell(&mut self, now: Instant, tell: impl FnOnce(Vec<NotAttached>) -> bool) {
        let failed = |(pid, known): (&u32, &Known)| Some((*pid, (known.why.clone()?, known.again)));
        let all: BTreeMap<_, _> =
            self.known.iter().filter(|(_, known)| known.has_failed()).filter_map(failed).collect();
        if all == self.told {
            return;
        }
        let program = |pid| Process::read_without_arguments(pid).map(|process| process.program().to_owned());
        let not_attached = all.iter().map(|(pid, (why, again))| NotAttached {
            pid: *pid,
            program: program(*pid).unwrap_or_default(),
            group: String::new(),
            family: None,
            why: why.clone(),
            again_s: Some(again.saturating_duration_since(now).as_secs()),
        });
        if tell(not_attached.collect()) {
            self.told = all;
        }
    }

    /// Makes the next look at the children due as soon as possible.
    pub fn look_now(&mut self) {
        self.due = self.after.map(|_| Instant::now());
    }

    /// Makes a look at the children due, because a child was forked.
    pub fn born(&mut self, now: Instant) {
        let soon = now + WAITS.0;
        self.due = self.after.map(|_| self.due.map_or(soon, |due| due.min(soon)));
    }

    /// Adds children that were not seen before.
    fn note(&mut self, children: &[u32], after: Duration, now: Instant) {
        for pid in children {
            if let Ok(process) = ProcessId::of(*pid)
                && self.known.get(pid).is_none_or(|known| known.process != process)
            {
                self.known.insert(*pid, Known::new(process, after, now));
            }
        }
    }

    /// Looks at all children, and attaches those that are due and fit.
    pub fn look(&mut self, now: Instant) {
        let Some(after) = self.after else { return };
        self.known.retain(|_, known| known.look(now));
        self.note(&host::children(self.parent.pid), after, now);
        let parent = self.parent.stat();
        let may = |known: &&mut Known| known.helper.is_none() && known.again <= now;
        let mut below = Vec::new();
        for known in self.known.values_mut().filter(may).take(MOST_AT_ONCE) {
            if !parent.as_ref().is_some_and(|parent| is_fork(&known.process, parent)) {
                // The child has executed a program, or the parent has: the two share no program any more.
                (known.again, known.why) = (now + WAITS.1, None);
            } else if refuse::has_agent(known.process.pid) {
                // The child has an agent already: by a rule, or by its parent, which was attached before.
                known.why = None;
                known.wait(now);
            } else if has_own_memory(&known.process) {
                known.attach(&self.arguments);
            } else {
                known.wait(now);
                below.extend(host::children(known.process.pid));
            }
        }
        self.note(&below, after, now);
        // A child that could not be attached is looked at as well: once it is attached, the supervisor is told so.
        let is_waiting = |known: &&Known| known.helper.is_none() || known.has_failed();
        let waiting = self.known.values().filter(is_waiting).map(|known| known.again);
        self.due = waiting.min().map(|again| again.max(now + WAITS.0));
    }
}

/// Whether a process runs the program that this parent runs, since it was forked.
fn is_fork(child: &ProcessId, parent: &ProcessStat) -> bool {
    child.stat().is_some_and(|stat| stat.forked && !stat.has_ended() && stat.layout == parent.layout)
}

fn has_own_memory(child: &ProcessId) -> bool {
    Usage::of(child.pid).is_ok_and(|usage| usage.uss_bytes >= LEAST_BYTES)
}

impl Known {
    fn new(process: ProcessId, after: Duration, now: Instant) -> Self {
        let again = now + after.saturating_sub(Duration::from_secs(process.age_seconds()));
        Self { process, again, wait: WAITS.0, helper: None, why: None }
    }

    /// Notes the outcome of the child's `pagefold-attach` if that has ended. Returns whether the child still lives.
    fn look(&mut self, now: Instant) -> bool {
        if let Some(mut helper) = self.helper.take() {
            match helper.try_wait() {
                Ok(None) => self.helper = Some(helper),
                ended => {
                    if ended.is_ok_and(|ended| ended.is_some_and(|status| status.success())) {
                        // The agent has left the child: the child was detached, or has given up rights.
                        (self.wait, self.why) = (WAITS.1, None);
                    } else {
                        let mut words = String::new();
                        let _ = helper.stderr.take().map(|text| text.take(ERROR_BYTES).read_to_string(&mut words));
                        self.why = Some(reason(&words, self.process.pid));
                    }
                    self.wait(now);
                }
            }
        }
        self.helper.is_some() || self.process.is_alive()
    }

    /// Whether the last attempt to attach the child failed, and the child has no agent now.
    fn has_failed(&self) -> bool {
        self.why.is_some() && (self.helper.is_none() || !refuse::has_agent(self.process.pid))
    }

    fn wait(&mut self, now: Instant) {
        self.again = now + self.wait;
        self.wait = (self.wait * 2).min(WAITS.1);
    }

    fn attach(&mut self, arguments: &[String]) {
        let (pid, started) = (self.process.pid.to_string(), self.process.start_ticks.to_string());
        let mut command = Command::new("/proc/self/exe");
        command.args(["--pid", &pid, "--started", &started]).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        match command.spawn() {
            Ok(helper) => self.helper = Some(helper),
            Err(_) => self.wait(Instant::now()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{getpid, set_child_subreaper};
    use std::io::{BufRead, BufReader, Write};

    #[test]
    fn child_is_due_at_its_age_and_then_after_waits_that_double() {
        let (own, now) = (ProcessId::of(std::process::id()).unwrap(), Instant::now());
        let mut known = Known::new(own, Duration::from_secs(own.age_seconds() + 60), now);
        assert!((58..=60).contains(&(known.again - now).as_secs()));
        let waits: Vec<u64> = (0..11)
            .map(|_| {
                let before = known.again;
                known.wait(before);
                (known.again - before).as_secs()
            })
            .collect();
        assert_eq!(waits[..8], [2, 4, 8, 16, 32, 64, 128, 256]);
        assert_eq!(waits[9..], [600, 600]);
    }

    /// A shell and its forked children: one without memory of its own, one with 16 MB. Each says its pid, and waits for
    /// the shell's input to end.
    const FAMILY: &str = "exec 9<&0; echo $$
        ( echo $BASHPID; read -u 9 ) &
        ( x=$(head -c 16000000 /dev/zero | tr '\\0' x); echo $BASHPID; read -u 9 ) &
        wait";

    fn bash(script: &str, lines: usize) -> (Child, Vec<u32>) {
        let mut shell = Command::new("bash");
        let mut shell =
            shell.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("run bash");
        let said = BufReader::new(shell.stdout.take().expect("a pipe")).lines().take(lines);
        let pids = said.map(|line| line.expect("a line").parse().expect("a pid")).collect();
        (shell, pids)
    }

    fn looked_at(parent: ProcessId, now: Instant) -> Children {
        let mut children = Children { after: Some(Duration::ZERO), ..Children::new(parent, vec!["--help".to_owned()]) };
        children.look(now);
        children
    }

    /// Other tests have children of this process, too, and one look attends to a few.
    fn look_at_all(children: &mut Children, now: Instant) {
        (0..50).for_each(|_| children.look(now));
    }

    #[test]
    fn forked_child_is_attached_if_it_has_memory_of_its_own() {
        let (mut shell, mut pids) = bash(FAMILY, 3);
        let parent = pids.remove(0);
        pids.sort_by_key(|pid| Usage::of(*pid).expect("it runs").uss_bytes);
        let now = Instant::now();
        let mut children = looked_at(ProcessId::of(parent).unwrap(), now);
        let [small, large] = [0, 1].map(|n| children.known.remove(&pids[n]).expect("it is a child"));
        drop(shell.stdin.take());
        shell.wait().unwrap();
        assert!(small.helper.is_none() && small.again == now + WAITS.0, "{small:?}");
        assert!(large.helper.is_some(), "{large:?}");
    }

    #[test]
    fn child_below_one_without_memory_of_its_own_is_attached() {
        let script = "exec 9<&0; echo $$
            ( ( x=$(head -c 16000000 /dev/zero | tr '\\0' x); echo $BASHPID; read -u 9 ) & read -u 9 ) &
            wait";
        let (mut shell, pids) = bash(script, 2);
        let now = Instant::now();
        let mut children = looked_at(ProcessId::of(pids[0]).unwrap(), now);
        children.look(now + WAITS.0);
        let below = children.known.remove(&pids[1]);
        drop(shell.stdin.take());
        shell.wait().unwrap();
        assert!(below.expect("it is known").helper.is_some());
    }

    #[test]
    fn one_look_attaches_a_few_children() {
        let script = "exec 9<&0; echo $$; x=$(head -c 6000000 /dev/zero | tr '\\0' x)
            for n in 1 2 3 4 5 6; do ( x=${x}y; echo $BASHPID; read -u 9 ) & done
            wait";
        let (mut shell, pids) = bash(script, 7);
        let now = Instant::now();
        let mut children = looked_at(ProcessId::of(pids[0]).unwrap(), now);
        let attached = |children: &Children| children.known.values().filter(|known| known.helper.is_some()).count();
        let first = attached(&children);
        children.look(now);
        let all = children.known.len();
        drop(shell.stdin.take());
        shell.wait().unwrap();
        assert_eq!((first, all), (MOST_AT_ONCE, 6), "{children:?}");
    }

    /// A rule may have been faster. Its thread has the name of an agent's here.
    #[test]
    fn child_with_an_agent_is_left_alone() {
        let script = "exec 9<&0; echo $$
            ( x=$(head -c 16000000 /dev/zero | tr '\\0' x); echo -n pagefold > /proc/$BASHPID/comm; echo $BASHPID; read -u 9 ) &
            wait";
        let (mut shell, pids) = bash(script, 2);
        let now = Instant::now();
        let known = looked_at(ProcessId::of(pids[0]).unwrap(), now).known.remove(&pids[1]);
        drop(shell.stdin.take());
        shell.wait().unwrap();
        let known = known.expect("it is known");
        assert!(known.helper.is_none() && known.again == now + WAITS.0, "{known:?}");
    }

    /// The reason was once missing while a child was tried again.
    #[test]
    fn child_has_failed_until_an_agent_is_there() {
        let script = "echo $$; read; echo -n pagefold > /proc/$$/comm; echo; read";
        let (mut shell, pids) = bash(script, 1);
        let mut known = Known::new(ProcessId::of(pids[0]).unwrap(), Duration::ZERO, Instant::now());
        assert!(!known.has_failed(), "nobody has tried");
        known.why = Some("a reason".to_owned());
        assert!(known.has_failed());
        known.helper = Some(Command::new("sleep").arg("1000").spawn().unwrap());
        assert!(known.has_failed(), "it is tried again");
        let mut input = shell.stdin.take().unwrap();
        input.write_all(b"\n").unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while !refuse::has_agent(pids[0]) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let has_failed = known.has_failed();
        let mut helper = known.helper.take().unwrap();
        helper.kill().unwrap();
        helper.wait().unwrap();
        drop(input);
        shell.wait().unwrap();
        assert!(!has_failed, "there is an agent");
    }

    /// It is this process's child by the kernel's word once its parent has ended, and was forked by a program that was
    /// executed.
    #[test]
    fn orphan_of_executed_program_is_not_attached() {
        set_child_subreaper(Some(getpid())).unwrap();
        let (mut shell, pids) = bash(FAMILY, 3);
        let input = shell.stdin.take();
        shell.kill().unwrap();
        shell.wait().unwrap();
        let (own, now) = (ProcessId::of(std::process::id()).unwrap(), Instant::now());
        let mut children = looked_at(own, now);
        look_at_all(&mut children, now);
        let forked = pids.iter().filter(|pid| ProcessStat::read(**pid).is_ok_and(|stat| stat.forked)).count();
        let orphans: Vec<Known> = pids.iter().filter_map(|pid| children.known.remove(pid)).collect();
        drop(input);
        assert_eq!((forked, orphans.len()), (2, 2), "{orphans:?}");
        assert!(orphans.iter().all(|orphan| orphan.helper.is_none() && orphan.again == now + WAITS.1), "{orphans:?}");
    }

    #[test]
    fn executed_child_is_not_attached() {
        let (own, now) = (ProcessId::of(std::process::id()).unwrap(), Instant::now());
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let mut children = Children { after: Some(Duration::ZERO), ..Children::new(own, vec!["--help".to_owned()]) };
        look_at_all(&mut children, now);
        let known = children.known.remove(&child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        let known = known.expect("it is a child");
        assert!(known.helper.is_none() && known.again > now + WAITS.0, "{known:?}");
    }
}
