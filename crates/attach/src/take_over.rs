//! Takes the place of a `pagefold-attach` that was killed beside an attached process.
//!
//! ```text
//!   this program                              the agent's first thread, found by its name and its table of files
//!      | ---- stop; socketpair, dup3 -------->  | its channel is another one from here on
//!      | ---- Tell ------------------------->   | goes on
//!      | <--- Threads, Gate, Here ----------    |
//!      v
//!   serves, as the one before did
//! ```
//!
//! The agent notices only that its requests to stop the program's threads were refused for a while.

use crate::halt::Halts;
use crate::inject::{self, Injected};
use crate::program::Program;
use crate::remote::Remote;
use crate::threads::{self, Doing};
use crate::waited::Clocks;
use act::trace::{Tracee, share_files};
use anyhow::{Context, bail, ensure};
use host::{Received, Seqpacket, Signals};
use page::{HostVirt, PageRange, pages_to_bytes};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::Pid;
use std::fs;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};
use wire::attach::{ATTACH_BYTES, FromAttached, ToAttached};

/// Longest wait for the agent to tell where its object and gate lie: 30 s. It may be folding, or waiting for the
/// service.
const PATIENCE: Duration = Duration::from_secs(30);
/// Distance below the agent's stack pointer at which memory is free for our use while the agent's thread is stopped, in
/// bytes.
const UNUSED: u64 = 1024;
/// Name of the agent's first thread.
const NAME: &str = "pagefold";

/// Whether there is an agent in a process.
pub fn is_there(pid: u32) -> bool {
    first_thread(pid).is_some()
}

/// Takes over the agent in a process. Returns it, and whether it folds all private anonymous memory. `tell`: see
/// [`inject::inject`].
///
/// # Errors
/// There is no agent, it does not answer, or the process cannot be traced.
pub fn take_over(pid: u32, signals: &Signals, tell: impl FnOnce(&anyhow::Error)) -> anyhow::Result<(Injected, bool)> {
    let program = Program::open(pid).context("cannot open its memory")?;
    let mut halts = Halts::new(program, Clocks::default());
    let taken = reconnect(&mut halts).and_then(|(channel, thread, stopped)| {
        let told = hear(&channel, &mut halts)?;
        Ok((channel, thread, stopped, told))
    });
    match taken {
        Ok((channel, thread, stopped, Told { object, all_anonymous, gate })) => {
            let range = object.start.0..object.start.0 + pages_to_bytes(object.pages);
            Ok((Injected { channel, thread, range, stopped, halts, gate }, all_anonymous))
        }
        Err(why) => Err(inject::give_up(halts, why, signals, tell)),
    }
}

/// Gives the agent another channel. Returns this program's end, the agent's first thread, and how long that was
/// stopped.
fn reconnect(halts: &mut Halts) -> anyhow::Result<(OwnedFd, Pid, Duration)> {
    let pid = halts.pid();
    let thread = first_thread(pid).context("there is no agent in it")?;
    let remote = Remote::open(pid).context("cannot open its memory")?;
    let sleeps = |halts: &Halts| {
        let is_restarted = matches!(threads::doing(pid, thread), Doing::Call(call) if call.may_be_stopped());
        ensure!(threads::runs_program(pid, thread), "its agent has ended");
        // A thread that has yet to stop, or to be let go, is traced by this process already.
        let is_free = halts.others(&[])?.iter().any(|(_, other)| *other == thread);
        Ok((is_restarted && is_free).then_some(thread).into_iter().collect())
    };
    let (channel, stopped) = inject::borrow_one_of(halts, sleeps, |tracee| exchange(&remote, tracee))?;
    Ok((channel, thread, stopped))
}

/// Makes the stopped thread create a channel as its descriptor 0, in place of the former one. Returns the channel's
/// other end.
fn exchange(remote: &Remote, tracee: &Tracee) -> anyhow::Result<OwnedFd> {
    let place = tracee.registers()?.rsp - UNUSED;
    let call = |number: i64, arguments: [u64; 6]| {
        let answer = remote.call(tracee, number, arguments)?;
        ensure!(answer >= 0, "system call {number} in its agent: {}", inject::error(answer));
        Ok(())
    };
    let kind = (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as u64;
    call(libc::SYS_socketpair, [libc::AF_UNIX as u64, kind, 0, place, 0, 0])?;
    let mut numbers = [0_u8; 8];
    remote.memory().read_exact_at(&mut numbers, place)?;
    let number = |at: usize| i32::from_ne_bytes(*numbers[at..].first_chunk().unwrap_or(&[0; 4]));
    let (its, ours) = (number(0), number(4));
    let channel = act::file_of_thread(tracee.thread(), ours).context("cannot take the agent's channel");
    if channel.is_ok() {
        call(libc::SYS_dup3, [its.cast_unsigned().into(), 0, libc::O_CLOEXEC as u64, 0, 0, 0])?;
    }
    for number in [its, ours] {
        call(libc::SYS_close, [number.cast_unsigned().into(), 0, 0, 0, 0, 0])?;
    }
    channel
}

/// What the agent has told about itself.
struct Told {
    object: PageRange,
    all_anonymous: bool,
    gate: Option<HostVirt>,
}

/// Asks the agent where its object and gate lie.
fn hear(channel: &OwnedFd, halts: &mut Halts) -> anyhow::Result<Told> {
    let channel = Seqpacket::from_stranger(channel.try_clone()?);
    let until = Instant::now() + PATIENCE;
    ensure!(channel.send(&ToAttached::Tell.encode(), &[])?, "the agent reads nothing");
    let (mut frame, mut files, mut gate) = ([0; ATTACH_BYTES], Vec::new(), None);
    loop {
        // The agent's thread may have been stopped in a call that has to be ended from outside.
        halts.tend();
        match channel.receive(&mut frame, &mut files)? {
            Received::Closed => bail!("the agent has ended"),
            Received::Nothing => {}
            Received::Frame(bytes) => {
                // Other messages are dropped: the agent repeats what it asks for. Closing a file that another process
                // has sent may wait.
                files.drain(..).for_each(|file| drop(host::ForeignFile::from(file)));
                match FromAttached::decode(&frame[..bytes]) {
                    Some(FromAttached::Gate(place)) => gate = Some(place),
                    Some(FromAttached::Here { object, all_anonymous }) => {
                        return Ok(Told { object, all_anonymous, gate });
                    }
                    _ => {}
                }
            }
        }
        ensure!(Instant::now() < until, "the agent does not say where it is");
        let time = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        let _ = poll(&mut [PollFd::new(&channel, PollFlags::IN)], Some(&time));
    }
}

/// The agent's first thread: it has a table of files of its own, in which the first is a socket.
fn first_thread(pid: u32) -> Option<Pid> {
    let leader = Pid::from_raw(host::thread_with_memory(pid).cast_signed())?;
    let is_it = |thread: &Pid| {
        let name = fs::read_to_string(threads::of(pid, *thread, "comm")).unwrap_or_default();
        let first = fs::read_link(threads::of(pid, *thread, "fd/0")).unwrap_or_default();
        name.trim_end() == NAME
            && first.to_str().is_some_and(|file| file.starts_with("socket:"))
            && !share_files(leader, *thread)
    };
    threads::list(pid).ok()?.into_iter().find(is_it)
}
