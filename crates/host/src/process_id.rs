//! The identity of a process.
//!
//! The kernel may use a pid again once its process is gone. A process is therefore named by its pid together with its
//! start time. Signals are sent through a pidfd, after pid and start time were compared.

use crate::{Error, Result, memory_files, text};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, test_kill_process, waitpid,
};
use serde::{Deserialize, Serialize};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;

/// `PF_KTHREAD` of the kernel's `task_struct::flags`.
const PF_KTHREAD: u64 = 0x0020_0000;
/// `PF_FORKNOEXEC`: the kernel takes it away when the process executes a program.
const PF_FORKNOEXEC: u64 = 0x40;

/// Fields of `/proc/PID/stat`. Times are in clock ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessStat {
    /// State of the first thread, one letter: `R` running, `S` sleeping, `Z` ended, and so on. The first thread is
    /// listed until the others have ended and the parent has collected the process.
    pub state: u8,
    /// The parent's pid; 0 for none.
    pub parent: u32,
    /// Whether it is a kernel thread, which has no memory of its own.
    pub kernel_thread: bool,
    /// Page faults that needed no disk, of all its threads.
    pub minor_faults: u64,
    /// CPU time used, in user and in kernel mode, by all its threads.
    pub cpu_ticks: u64,
    /// Number of its threads, the first one among them even if it has ended.
    pub threads: u64,
    /// Start time, counted from boot.
    pub start_ticks: u64,
    /// Size of its address space, in bytes; 0 for a first thread that has ended.
    pub address_bytes: u64,
    /// Whether the kernel is still loading a program into it. Until then it has no arguments and no environment.
    /// Always false if the caller may not trace the process.
    pub loading: bool,
    /// Whether it was forked and has executed no program since.
    pub forked: bool,
    /// Addresses of its code and of its first stack, which the kernel chooses at random for each program that is
    /// executed. A forked child has the same ones as its parent. `None` if the caller may not trace the process.
    pub layout: Option<(u64, u64)>,
    /// How it ended, as `waitpid` has it; 0 before, and if the caller may not trace the process.
    pub wait_status: i32,
}

/// One process: no other process ever has the same pid and start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    /// Its pid. Once it is gone, the kernel may give this pid to another process.
    pub pid: u32,
    /// Its start time, in clock ticks after boot.
    pub start_ticks: u64,
}

impl ProcessStat {
    /// Parses the line of `/proc/PID/stat`; `None` if it is malformed.
    pub fn parse(line: &str) -> Option<Self> {
        // The name, in parentheses, may hold blanks and parentheses itself.
        let (_, rest) = line.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        // Numbered as in proc_pid_stat(5), where the state is field 3.
        let number = |n: usize| fields.get(n - 3)?.parse::<u64>().ok();
        Some(Self {
            state: *fields.first()?.as_bytes().first()?,
            parent: number(4)?.try_into().ok()?,
            kernel_thread: number(9)? & PF_KTHREAD != 0,
            minor_faults: number(10)?,
            cpu_ticks: number(14)?.saturating_add(number(15)?),
            threads: number(20)?,
            start_ticks: number(22)?,
            address_bytes: number(23).unwrap_or(0),
            // Field 26 is the address of the program's code. The kernel sets it after it has laid out arguments and
            // environment.
            loading: number(26) == Some(0),
            forked: number(9)? & PF_FORKNOEXEC != 0,
            layout: number(26).zip(number(28)).filter(|(_, stack)| *stack != 0),
            wait_status: number(52).and_then(|status| status.try_into().ok()).unwrap_or(0),
        })
    }

    /// Reads `/proc/PID/stat` of a process that lives, or has ended and was not collected by its parent.
    ///
    /// # Errors
    /// [`Error::is_gone`] if there is no such process.
    pub fn read(pid: u32) -> Result<Self> {
        let stat = Self::of_thread(format!("/proc/{pid}/stat"))?;
        if !stat.has_no_first_thread() || stat.has_ended() {
            return Ok(stat);
        }
        // Without its memory, the first thread looks as if a program were being loaded.
        let other = Self::of_thread(memory_files::proc_file(pid, "stat"));
        Ok(other.map_or(stat, |other| Self {
            loading: other.loading,
            layout: other.layout,
            address_bytes: other.address_bytes,
            ..stat
        }))
    }

    /// Reads the `stat` file of one thread. Start time and CPU time are the thread's; CPU time is the whole process's
    /// if the path is `/proc/PID/stat`.
    pub(crate) fn of_thread(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        Self::parse(&text::read(&path)?).ok_or_else(|| Error::Malformed {
            path,
            line: 1,
            problem: "not the fields that the kernel documents".into(),
        })
    }

    /// Whether the process has ended and only waits for its parent to collect it. A program may end its first thread
    /// before the others: it lives on with them.
    pub fn has_ended(&self) -> bool {
        self.has_no_first_thread() && self.threads <= 1
    }

    /// Whether the first thread has ended, perhaps before the others.
    pub fn has_no_first_thread(&self) -> bool {
        matches!(self.state, b'Z' | b'X')
    }
}

impl ProcessId {
    /// The process that has this pid at the moment of the call.
    ///
    /// # Errors
    /// [`Error::is_gone`] if there is none.
    pub fn of(pid: u32) -> Result<Self> {
        Ok(Self { pid, start_ticks: ProcessStat::read(pid)?.start_ticks })
    }

    /// Its `/proc/PID/stat`; `None` once it has ended, even if its parent has not collected it.
    pub fn stat(&self) -> Option<ProcessStat> {
        ProcessStat::read(self.pid).ok().filter(|s| s.start_ticks == self.start_ticks && !s.has_ended())
    }

    /// How it ended; `None` while it lives, and once its parent has collected it.
    pub fn ending(&self) -> Option<ExitStatus> {
        let stat = ProcessStat::read(self.pid).ok()?;
        (stat.start_ticks == self.start_ticks && stat.has_ended()).then(|| ExitStatus::from_raw(stat.wait_status))
    }

    /// Time since it started, in whole seconds.
    pub fn age_seconds(&self) -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime).tv_sec.cast_unsigned();
        now.saturating_sub(self.start_ticks / rustix::param::clock_ticks_per_second())
    }

    /// Whether it has not ended.
    pub fn is_alive(&self) -> bool {
        self.stat().is_some()
    }

    /// Whether any process has this pid: this process, even if it has ended and was not waited for, or another one. The
    /// call costs a small part of [`Self::is_alive`].
    pub fn has_pid(&self) -> bool {
        self.raw().is_some_and(|pid| test_kill_process(pid) != Err(Errno::SRCH))
    }

    /// Asks it to end (`SIGTERM`). True if the signal was sent; false if it has ended or the caller may not signal it.
    pub fn terminate(&self) -> bool {
        self.signal(Signal::TERM)
    }

    /// Ends it (`SIGKILL`). True if the signal was sent; false if it has ended or the caller may not signal it.
    pub fn kill(&self) -> bool {
        self.signal(Signal::KILL)
    }

    /// Stops all of its threads (`SIGSTOP`), until [`Self::go_on`]. True if the signal was sent.
    pub fn stand_still(&self) -> bool {
        self.signal(Signal::STOP)
    }

    /// Has its threads go on (`SIGCONT`). True if the signal was sent.
    pub fn go_on(&self) -> bool {
        self.signal(Signal::CONT)
    }

    /// Collects it if it has ended and is a child of this process; otherwise does nothing.
    pub fn collect(&self) {
        // An ended process keeps its pid until its parent collects it.
        let waits = ProcessStat::read(self.pid).is_ok_and(|s| s.start_ticks == self.start_ticks && s.has_ended());
        if let Some(pid) = self.raw().filter(|_| waits) {
            // An error means that it is not a child of ours, or was collected already: there is nothing to do.
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }

    /// Sends a signal. The start time is compared after the pidfd was opened. A pidfd stays with its process, so the
    /// comparison is about the process that gets the signal.
    fn signal(&self, signal: Signal) -> bool {
        let Some(pidfd) = self.raw().and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) else {
            return false;
        };
        self.is_alive() && pidfd_send_signal(&pidfd, signal).is_ok()
    }

    fn raw(&self) -> Option<Pid> {
        Pid::from_raw(self.pid.try_into().ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn name_may_hold_parentheses_and_blanks() {
        let line = "4711 (a) S (b) c) T 12 1 1 0 -1 4194304 104 0 0 0 30 4 0 0 20 0 1 0 987654 1 1 0\n";
        let stat = ProcessStat::parse(line).unwrap();
        let expected = ProcessStat {
            state: b'T',
            parent: 12,
            minor_faults: 104,
            cpu_ticks: 34,
            threads: 1,
            start_ticks: 987_654,
            address_bytes: 1,
            ..Default::default()
        };
        assert_eq!(stat, expected);
        assert_eq!(ProcessStat::parse("4711 (short) S 1"), None);
        assert_eq!(ProcessStat::parse(""), None);
    }

    #[test]
    fn kernel_thread_is_told_by_flag() {
        let line = "2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 0 0 0 20 0 1 0 4 0 0 0\n";
        assert!(ProcessStat::parse(line).unwrap().kernel_thread);
    }

    #[test]
    fn forked_child_is_told_from_executed_program() {
        let own = ProcessStat::read(std::process::id()).unwrap();
        assert!(!own.forked && own.layout.is_some());
        let mut executed = Command::new("sleep").arg("60").spawn().unwrap();
        let stat = ProcessStat::read(executed.id()).unwrap();
        executed.kill().unwrap();
        executed.wait().unwrap();
        assert!(!stat.forked && stat.layout != own.layout, "{stat:?} beside {own:?}");
        // A shell forks for what is in parentheses.
        let script = "(cat /proc/$BASHPID/stat; true); cat /proc/$BASHPID/stat; true";
        let script = script.replace("cat ", "read -r line < ").replace("/stat", "/stat && echo \"$line\"");
        let output = Command::new("bash").args(["-c", &script]).output().unwrap();
        let stats: Vec<_> = String::from_utf8(output.stdout).unwrap().lines().filter_map(ProcessStat::parse).collect();
        let [child, parent] = stats[..] else { panic!("{stats:?}") };
        assert!(child.forked && !parent.forked && child.layout == parent.layout, "{stats:?}");
        assert!(child.layout.is_some());
    }

    #[test]
    fn process_is_alive_until_killed() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let id = ProcessId::of(child.id()).unwrap();
        assert!(id.is_alive() && id.ending().is_none());
        assert!(id.kill());
        while id.is_alive() {}
        assert_eq!(id.ending().and_then(|ending| ending.signal()), Some(9));
        assert!(!id.terminate(), "a signal went to a process that has ended");
        assert!(ProcessStat::read(id.pid).unwrap().has_ended());
        id.collect();
        assert!(ProcessId::of(id.pid).unwrap_err().is_gone());
        assert!(child.wait().is_err(), "it was collected already");
    }

    #[test]
    fn other_process_with_same_pid_gets_no_signal() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let id = ProcessId::of(child.id()).unwrap();
        let earlier = ProcessId { start_ticks: id.start_ticks - 1, ..id };
        assert!(!earlier.is_alive());
        assert!(!earlier.kill());
        assert!(id.is_alive());
        child.kill().unwrap();
        while id.is_alive() {}
        earlier.collect();
        child.wait().expect("it was left for us to collect");
    }
}
