//! Makes system calls in another process: a stopped thread of that process is given the registers of a call, and goes
//! on for the call's length.
//!
//! The thread executes a `syscall` instruction of the kernel's code in the process (`vdso`). The program may have
//! changed its `vdso`. So number, arguments and address are compared when the call begins, and any other call is
//! cancelled (`Remote::is_ours`). Each call has a time limit, but for those by which the agent's last thread leaves.
//! Filters of system calls (seccomp) apply to these calls as to those of the program.

use crate::memory::Present;
use act::trace::{Registers, Resume, Stop, Tracee};
use anyhow::{Context, bail, ensure};
use host::Mapping;
use rustix::process::Pid;
use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Longest time that a system call in the other process may take: 5 s.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest time between two looks whether the process is frozen: 200 ms.
const LOOK: Duration = Duration::from_millis(200);
/// The instruction `syscall`.
pub(crate) const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// The memory of a process, and the address of a `syscall` instruction in it.
#[derive(Debug)]
pub struct Remote {
    pid: u32,
    memory: File,
    instruction: u64,
    clock: u64,
}

impl Remote {
    /// Opens a process.
    ///
    /// # Errors
    /// This process may not open its memory, or it has no `vdso`.
    pub fn open(pid: u32) -> anyhow::Result<Self> {
        let memory = File::options().read(true).write(true).open(host::proc_file(pid, "mem"))?;
        let mappings = Mapping::list(pid)?;
        let found = mappings.iter().find(|mapping| mapping.name == "[vdso]");
        let vdso = found.context("the process has no vdso, through whose code system calls could be made in it")?;
        let mut code = vec![0_u8; (vdso.end.0 - vdso.start.0) as usize];
        memory.read_exact_at(&mut code, vdso.start.0).context("cannot read the vdso")?;
        let at = code.windows(2).position(|two| two == SYSCALL).context("the vdso makes no system calls")?;
        Ok(Self { pid, memory, instruction: vdso.start.0 + at as u64, clock: vdso.start.0 })
    }

    /// The process's memory.
    pub const fn memory(&self) -> &File {
        &self.memory
    }

    /// Address of the `syscall` instruction by which calls are made.
    pub const fn instruction(&self) -> u64 {
        self.instruction
    }

    /// Address of the `vdso`, in which the kernel's clock functions are.
    pub const fn clock(&self) -> u64 {
        self.clock
    }

    /// Registers with which a stopped thread makes a system call.
    ///
    /// # Errors
    /// It has ended.
    pub fn prepared(&self, tracee: &Tracee, number: i64, arguments: [u64; 6]) -> anyhow::Result<Registers> {
        Ok(prepared(tracee.registers()?, self.instruction, number, arguments))
    }

    /// Makes a system call by a stopped thread, which has other registers afterwards. Returns its answer.
    ///
    /// # Errors
    /// The thread has ended, or the call does not end in time. The thread may make it later then.
    pub fn call(&self, tracee: &Tracee, number: i64, arguments: [u64; 6]) -> anyhow::Result<i64> {
        self.call_within(tracee, number, arguments, Some(PATIENCE), &Cell::default())
    }

    /// As [`Remote::call`], and waits for as long as the process lives, frozen or not.
    ///
    /// # Errors
    /// The process has ended, or it was about to make another call than this.
    pub fn call_patiently(&self, tracee: &Tracee, number: i64, arguments: [u64; 6]) -> anyhow::Result<i64> {
        self.call_within(tracee, number, arguments, None, &Cell::default())
    }

    /// As [`Remote::call`]. Stores the thread that the call has made, if it has made one, even if this function fails
    /// afterwards.
    ///
    /// # Errors
    /// As [`Remote::call`].
    pub fn call_watched(
        &self,
        tracee: &Tracee,
        number: i64,
        arguments: [u64; 6],
        made: &Cell<Option<Pid>>,
    ) -> anyhow::Result<i64> {
        self.call_within(tracee, number, arguments, Some(PATIENCE), made)
    }

    /// As [`Remote::call`], with this time for the call to end.
    ///
    /// # Errors
    /// As [`Remote::call`].
    pub fn call_for(&self, tracee: &Tracee, number: i64, arguments: [u64; 6], time: Duration) -> anyhow::Result<i64> {
        self.call_within(tracee, number, arguments, Some(time), &Cell::default())
    }

    fn call_within(
        &self,
        tracee: &Tracee,
        number: i64,
        arguments: [u64; 6],
        time: Option<Duration>,
        made: &Cell<Option<Pid>>,
    ) -> anyhow::Result<i64> {
        tracee.set_registers(&self.prepared(tracee, number, arguments)?)?;
        let (mut ends, mut signal, mut is_ours) = (0, 0, true);
        let until = time.map(|time| Instant::now() + time);
        while ends < 2 {
            tracee.resume(Resume::ToSystemCall, std::mem::take(&mut signal))?;
            match self.wait(tracee, until)? {
                Stop::SystemCall => {
                    if ends == 0 {
                        is_ours = self.is_ours(tracee, number, arguments)?;
                    }
                    ends += 1;
                }
                Stop::Cloned(thread) => made.set(Some(thread)),
                // All signals are blocked but `SIGSTOP`. It suspends the program, and this thread when it is let go.
                Stop::Signal(came) => signal = came,
                Stop::Asked | Stop::Suspended | Stop::Other => {}
                Stop::Ended => bail!("the process has ended"),
            }
        }
        ensure!(is_ours, "another system call than ours was about to be made: its vdso is not the kernel's");
        Ok(tracee.registers()?.rax.cast_signed())
    }

    /// Waits for the next stop.
    fn wait(&self, tracee: &Tracee, until: Option<Instant>) -> anyhow::Result<Stop> {
        loop {
            let next = Instant::now() + LOOK;
            if let Some(stop) = tracee.wait(until.map_or(next, |until| until.min(next)))? {
                return Ok(stop);
            }
            let Some(until) = until else { continue };
            if let Some(group) = host::frozen_group(self.pid, self.pid) {
                bail!("control group {group} was frozen meanwhile: thaw it, and try again");
            }
            ensure!(Instant::now() < until, "the process does not answer");
        }
    }

    /// Whether the call that a thread begins is this one. Any other call is cancelled.
    fn is_ours(&self, tracee: &Tracee, number: i64, arguments: [u64; 6]) -> anyhow::Result<bool> {
        let before = tracee.registers()?;
        let Registers { rdi, rsi, rdx, r10, r8, r9, rip, orig_rax, .. } = before;
        let expected = (self.instruction + SYSCALL.len() as u64, number.cast_unsigned(), arguments);
        let is_ours = tracee.begins_call() && (rip, orig_rax, [rdi, rsi, rdx, r10, r8, r9]) == expected;
        if !is_ours {
            tracee.set_registers(&Registers { orig_rax: u64::MAX, ..before })?;
        }
        Ok(is_ours)
    }

    /// Whether a stopped thread may be borrowed: in 64-bit mode, and not in a restartable sequence. The kernel ends
    /// such a sequence when the thread goes on, unless it goes on elsewhere.
    pub(crate) fn may_be_borrowed(memory: &File, present: &Present, tracee: &Tracee) -> bool {
        // The program chooses these addresses, and may have a file there that keeps its readers waiting.
        let number = |at: u64| present.number(memory, at);
        let is_outside = |area: u64, at: u64| {
            // `rseq_cs` of `struct rseq`; `start_ip` and `post_commit_offset` of `struct rseq_cs`.
            let Some(section) = number(area.wrapping_add(8)) else { return false };
            let bounds = number(section.wrapping_add(8)).zip(number(section.wrapping_add(16)));
            section == 0 || bounds.is_some_and(|(start, bytes)| at.wrapping_sub(start) >= bytes)
        };
        let (Ok(area), Ok(registers)) = (tracee.restartable_sequences(), tracee.registers()) else { return false };
        tracee.is_64_bit() && (area == 0 || is_outside(area, registers.rip))
    }
}

/// Registers with which a thread makes a system call by the `syscall` instruction at address `instruction`.
pub(crate) const fn prepared(now: Registers, instruction: u64, number: i64, arguments: [u64; 6]) -> Registers {
    let [rdi, rsi, rdx, r10, r8, r9] = arguments;
    Registers { rip: instruction, rax: number.cast_unsigned(), orig_rax: u64::MAX, rdi, rsi, rdx, r10, r8, r9, ..now }
}

#[cfg(test)]
#[path = "borrow_tests.rs"]
mod tests;
