//! Puts the agent into a running process.
//!
//! ```text
//!   a thread of the program              the tracer                        the agent's thread
//!      | runs, or sleeps in a call           |
//!      | <---------- stop ------------------ |
//!      | clone ------------------------------|-----------------------------> stopped from the first moment
//!      | <---------- goes on as it was ----- |                                  |  close_range: a table of files of its own
//!      v                                     | ----- system calls ------------> |  mmap, mprotect: room for the object
//!                                            | ----- the object, a stack -----> |  socketpair: the channel
//!                                            | ----- goes on -----------------> |  runs the object's first instruction
//! ```
//!
//! So the program's thread makes one system call that it did not ask for, and the other threads are not stopped at all.
//! The agent's thread has all signals blocked, and no file of the program's open.

use crate::object::Object;
use crate::remote::Remote;
use crate::stop::{self, Stopped};
use crate::threads::{self, Doing};
use crate::{mend, waited};
use act::{Registers, Tracee};
use anyhow::{Context, bail};
use page::PAGE_BYTES;
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Time for one thread to stop: 20 ms.
const STOP_TIME: Duration = Duration::from_millis(20);
/// Time for a thread to be found that can be stopped: 5 s.
const PATIENCE: Duration = Duration::from_secs(5);
/// Stack of the agent's first thread, in bytes.
const STACK_BYTES: u64 = 1 << 20;
/// Room for time limits of interrupted calls (`stop`), in bytes: below the stack.
const PLACES_BYTES: u64 = PAGE_BYTES as u64;

/// An agent in a process.
#[derive(Debug)]
pub struct Injected {
    /// The other end of its channel.
    pub channel: OwnedFd,
    /// Its first thread.
    pub thread: Pid,
    /// Memory of the object, its stack, and the places for time limits.
    pub range: Range<u64>,
    /// First of the places for time limits.
    pub places: u64,
    /// How long a thread of the program's was stopped.
    pub stopped: Duration,
}

/// Stops a thread of the program's, has `work` done by it, and lets it go on. Returns what the work came to, and how
/// long the thread was stopped.
///
/// # Errors
/// No thread can be stopped, or the work fails.
pub fn borrow_thread<T>(
    pid: u32,
    remote: &Remote,
    own: &[Pid],
    mut work: impl FnMut(&Tracee) -> anyhow::Result<T>,
) -> anyhow::Result<(T, Duration)> {
    let until = Instant::now() + PATIENCE;
    loop {
        let now = waited::now();
        for thread in candidates(pid, own)? {
            let began = Instant::now();
            let Some(mut stopped) = stop::ask(pid, thread, now, true).context("cannot trace the process")? else {
                continue;
            };
            // A thread that takes a signal or does not stop is let go when it does.
            if !stopped.wait(began + STOP_TIME) || stopped.takes_signal() {
                let _ = stopped.wait(until);
                stopped.go(remote.memory(), None);
                continue;
            }
            let done = borrowed(&stopped, remote, &mut work);
            stopped.go(remote.memory(), None);
            return done.map(|done| (done, began.elapsed()));
        }
        if Instant::now() > until {
            bail!(
                "none of its threads can be stopped without a trace at the moment: all wait with a time limit, or do not stop"
            );
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn borrowed<T>(
    stopped: &Stopped,
    remote: &Remote,
    work: &mut impl FnMut(&Tracee) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let tracee = stopped.tracee();
    let (before, blocked) = (tracee.registers()?, tracee.blocked_signals()?);
    let mut mended = before;
    stopped.mend(&mut mended, remote.memory(), None);
    // A child thread starts with this mask.
    tracee.block_signals(u64::MAX)?;
    let done = work(tracee);
    tracee.block_signals(blocked)?;
    tracee.set_registers(&mended)?;
    // The kernel begins an interrupted call again only on the way out of such a stop.
    tracee.interrupt()?;
    tracee.resume(act::Resume::Freely, 0)?;
    let until = Instant::now() + PATIENCE;
    loop {
        match tracee.wait(until)? {
            Some(act::Stop::Asked) => return done,
            Some(act::Stop::Ended) => bail!("the process has ended"),
            Some(act::Stop::Signal(signal)) => {
                tracee.resume(act::Resume::Freely, signal)?;
                tracee.interrupt()?;
            }
            Some(_) => tracee.resume(act::Resume::Freely, 0)?,
            None => bail!("a thread does not stop again"),
        }
    }
}

/// The threads that may be borrowed, the best first: those whose system call the kernel begins again by itself, those
/// that run, and those whose call we can have begun again.
fn candidates(pid: u32, own: &[Pid]) -> anyhow::Result<Vec<Pid>> {
    let rank = |thread: &Pid| match threads::doing(pid, *thread) {
        Doing::Call(call) if mend::is_restarted(call) => Some(0),
        Doing::Running => Some(1),
        Doing::Call(_) => Some(2),
        Doing::Other => None,
    };
    let all = threads::list(pid).context("the process has ended")?;
    let program = all.into_iter().filter(|thread| !own.contains(thread) && threads::runs_program(pid, *thread));
    let mut ranked: Vec<(u8, Pid)> = program.filter_map(|thread| Some((rank(&thread)?, thread))).collect();
    ranked.sort_by_key(|(rank, _)| *rank);
    Ok(ranked.into_iter().map(|(_, thread)| thread).collect())
}

/// Puts the object into a process, with these variables in its environment.
///
/// # Errors
/// The process cannot be traced, or lacks memory, threads or descriptors. Nothing of the agent is then left in it.
pub fn inject(pid: u32, object: &Object, environment: &[String]) -> anyhow::Result<Injected> {
    let remote = Remote::open(pid).context("cannot open its memory")?;
    let flags = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_SIGHAND | libc::CLONE_THREAD | libc::CLONE_SYSVSEM;
    let make = |tracee: &Tracee| {
        let stack = tracee.registers()?.rsp;
        let arguments = [flags as u64, stack, 0, 0, 0, 0];
        match remote.call_watched(tracee, libc::SYS_clone, arguments)? {
            (_, Some(thread)) => Ok(Tracee::of_clone(thread)),
            (answer, None) => bail!("no thread can be made in it: {}", error(answer)),
        }
    };
    let (tracee, stopped) = borrow_thread(pid, &remote, &[], make)?;
    match furnish(&tracee, &remote, object, environment) {
        Ok((channel, range)) => {
            let (thread, places) = (tracee.thread(), range.end - STACK_BYTES - PLACES_BYTES);
            tracee.detach(0);
            Ok(Injected { channel, thread, range, places, stopped })
        }
        Err(e) => {
            // The thread ends, and nothing is left.
            let _ = end_thread(&tracee, &remote);
            Err(e)
        }
    }
}

fn end_thread(tracee: &Tracee, remote: &Remote) -> anyhow::Result<()> {
    let _ = remote.call(tracee, libc::SYS_exit, [0; 6]);
    Ok(())
}

/// Gives the new thread all that it needs, by system calls of its own.
fn furnish(
    tracee: &Tracee,
    remote: &Remote,
    object: &Object,
    environment: &[String],
) -> anyhow::Result<(OwnedFd, Range<u64>)> {
    let until = Instant::now() + PATIENCE;
    while tracee.wait(until)?.context("its new thread does not come")? != act::Stop::Asked {
        tracee.resume(act::Resume::Freely, 0)?;
    }
    tracee.block_signals(u64::MAX)?;
    let call = |number, arguments| {
        let answer = remote.call(tracee, number, arguments)?;
        anyhow::ensure!(!(-4095..0).contains(&answer), "system call {number} in it: {}", error(answer));
        Ok(answer.cast_unsigned())
    };
    call(libc::SYS_close_range, [0, u32::MAX.into(), 0, 0, 0, 0])?;
    let bytes = object.image.len() as u64 + PLACES_BYTES + STACK_BYTES;
    let access = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let kind = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as u64;
    let base = call(libc::SYS_mmap, [0, bytes, access, kind, u64::MAX, 0]).context("it has no room for the agent")?;
    let range = base..base + bytes;
    let furnished = || {
        remote.memory().write_all_at(&object.image, base).context("cannot write the agent into it")?;
        for segment in &object.segments {
            let access = segment.access as u64;
            call(libc::SYS_mprotect, [base + segment.offset, segment.bytes, access, 0, 0, 0])?;
        }
        for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
            call(libc::SYS_madvise, [base, bytes, advice as u64, 0, 0, 0])?;
        }
        let kind = (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as u64;
        let places = range.end - STACK_BYTES - PLACES_BYTES;
        call(libc::SYS_socketpair, [libc::AF_UNIX as u64, kind, 0, places, 0, 0])?;
        let mut numbers = [0_u8; 8];
        remote.memory().read_exact_at(&mut numbers, places)?;
        let number = i32::from_ne_bytes(numbers[4..].try_into().unwrap_or_default());
        let channel = borrow_file(tracee.thread(), number).context("cannot take the agent's channel")?;
        call(libc::SYS_close, [number.cast_unsigned().into(), 0, 0, 0, 0, 0])?;
        let mut variables = environment.to_vec();
        variables.push(format!("PAGEFOLD_OBJECT={base:x}-{:x}", range.end));
        let stack = object.stack(base, range.end, &variables, remote.clock(), random()?);
        let pointer = range.end - stack.len() as u64;
        remote.memory().write_all_at(&stack, pointer)?;
        tracee.set_registers(&begin(tracee.registers()?, base + object.entry, pointer))?;
        Ok(channel)
    };
    match furnished() {
        Ok(channel) => Ok((channel, range)),
        Err(e) => {
            let _ = call(libc::SYS_munmap, [base, bytes, 0, 0, 0, 0]);
            Err(e)
        }
    }
}

/// Registers with which a program begins.
const fn begin(before: Registers, entry: u64, stack: u64) -> Registers {
    Registers {
        rip: entry,
        rsp: stack,
        rax: 0,
        rbx: 0,
        rcx: 0,
        rdx: 0,
        rsi: 0,
        rdi: 0,
        rbp: 0,
        r8: 0,
        r9: 0,
        r10: 0,
        r11: 0,
        r12: 0,
        r13: 0,
        r14: 0,
        r15: 0,
        orig_rax: u64::MAX,
        fs_base: 0,
        gs_base: 0,
        ..before
    }
}

/// Another descriptor of a file that a thread has open.
fn borrow_file(thread: Pid, number: i32) -> anyhow::Result<OwnedFd> {
    // `PIDFD_THREAD`, which rustix has no name for.
    let flags = PidfdFlags::from_bits_retain(libc::O_EXCL.cast_unsigned());
    let thread = pidfd_open(thread, flags).context("Linux 6.9 or newer is needed")?;
    Ok(pidfd_getfd(thread, number, PidfdGetfdFlags::empty())?)
}

fn random() -> anyhow::Result<[u8; 16]> {
    let mut bytes = [0_u8; 16];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes)
}

fn error(answer: i64) -> std::io::Error {
    std::io::Error::from_raw_os_error(i32::try_from(-answer).unwrap_or(0))
}
