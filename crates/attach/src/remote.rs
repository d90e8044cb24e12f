//! Makes system calls in another process, by one of its threads that is stopped.

use act::{Registers, Resume, Stop, Tracee};
use anyhow::{Context, bail, ensure};
use host::Mapping;
use rustix::process::Pid;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Time for a system call of the stopped thread: 5 s.
const PATIENCE: Duration = Duration::from_secs(5);
/// The instruction `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// The memory of a process, and the instruction there that makes system calls.
#[derive(Debug)]
pub struct Remote {
    memory: File,
    instruction: u64,
    clock: u64,
}

impl Remote {
    /// Opens a process.
    ///
    /// # Errors
    /// It must not be looked at, or has no page of the kernel's code (`vdso`).
    pub fn open(pid: u32) -> anyhow::Result<Self> {
        let memory = File::options().read(true).write(true).open(host::proc_file(pid, "mem"))?;
        let mappings = Mapping::list(pid)?;
        let found = mappings.iter().find(|mapping| mapping.name == "[vdso]");
        let vdso = found.context("the process has no vdso, through whose code system calls could be made in it")?;
        let mut code = vec![0_u8; (vdso.end.0 - vdso.start.0) as usize];
        memory.read_exact_at(&mut code, vdso.start.0).context("cannot read the vdso")?;
        let at = code.windows(2).position(|two| two == SYSCALL).context("the vdso makes no system calls")?;
        Ok(Self { memory, instruction: vdso.start.0 + at as u64, clock: vdso.start.0 })
    }

    /// The process's memory.
    pub const fn memory(&self) -> &File {
        &self.memory
    }

    /// Where the kernel's page of code begins, with its clock.
    pub const fn clock(&self) -> u64 {
        self.clock
    }

    /// Registers with which a stopped thread makes a system call.
    ///
    /// # Errors
    /// It has ended.
    pub fn prepared(&self, tracee: &Tracee, number: i64, arguments: [u64; 6]) -> anyhow::Result<Registers> {
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let (rip, rax) = (self.instruction, number.cast_unsigned());
        Ok(Registers { rip, rax, orig_rax: u64::MAX, rdi, rsi, rdx, r10, r8, r9, ..tracee.registers()? })
    }

    /// Makes a system call by a stopped thread, which has other registers afterwards. Returns its answer.
    ///
    /// # Errors
    /// The thread has ended, or the call does not end.
    pub fn call(&self, tracee: &Tracee, number: i64, arguments: [u64; 6]) -> anyhow::Result<i64> {
        self.call_within(tracee, number, arguments, PATIENCE).map(|(answer, _)| answer)
    }

    /// As [`Remote::call`]. Also returns the thread that the call has made, if it did.
    ///
    /// # Errors
    /// As [`Remote::call`].
    pub fn call_watched(
        &self,
        tracee: &Tracee,
        number: i64,
        arguments: [u64; 6],
    ) -> anyhow::Result<(i64, Option<Pid>)> {
        self.call_within(tracee, number, arguments, PATIENCE)
    }

    /// As [`Remote::call_watched`], with this time for the call to end. A thread whose call ends later goes on with wrong
    /// registers.
    ///
    /// # Errors
    /// As [`Remote::call`].
    pub fn call_within(
        &self,
        tracee: &Tracee,
        number: i64,
        arguments: [u64; 6],
        time: Duration,
    ) -> anyhow::Result<(i64, Option<Pid>)> {
        tracee.set_registers(&self.prepared(tracee, number, arguments)?)?;
        let (mut ends, mut made, until, mut signal) = (0, None, Instant::now() + time, 0);
        let mut is_ours = true;
        while ends < 2 {
            tracee.resume(Resume::ToSystemCall, std::mem::take(&mut signal))?;
            match tracee.wait(until)? {
                Some(Stop::SystemCall) => {
                    if ends == 0 {
                        is_ours = self.is_ours(tracee, number, arguments)?;
                    }
                    ends += 1;
                }
                Some(Stop::Cloned(thread)) => made = Some(thread),
                // All signals are blocked but `SIGSTOP`. It suspends the program, and this thread when it is let go.
                Some(Stop::Signal(came)) => signal = came,
                Some(Stop::Asked | Stop::Suspended | Stop::Other) => {}
                Some(Stop::Ended) => bail!("the process has ended"),
                None => bail!("the process does not answer"),
            }
        }
        ensure!(is_ours, "another system call than ours was about to be made: its vdso is not the kernel's");
        Ok((tracee.registers()?.rax.cast_signed(), made))
    }

    /// Whether the call that a thread begins is this one. Any other becomes none.
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

    /// Whether a stopped thread may be borrowed: in 64-bit mode, and not in a restartable sequence. The kernel ends such a
    /// sequence when the thread goes on, unless it goes on elsewhere.
    pub(crate) fn may_be_borrowed(memory: &File, tracee: &Tracee) -> bool {
        let number = |at: u64| {
            let mut bytes = [0; 8];
            memory.read_exact_at(&mut bytes, at).ok().map(|()| u64::from_ne_bytes(bytes))
        };
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

#[cfg(test)]
#[path = "borrow_tests.rs"]
mod tests;
