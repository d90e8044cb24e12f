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
//!
//! | the thread is given | |
//! |---|---|
//! | the process's page table | opened without the right to see frame numbers, as the kernel may hide it from the process's user |
//! | `/dev/userfaultfd`, where this program may open it | code of the program could take it (`pidfd_getfd`) |
//! | a working directory and root of its own | where the filters of system calls let a thread with these be made; else it has the program's, and changes none |

use crate::ending::{Ending, unmapping};
use crate::halt::Halts;
use crate::memory::Present;
use crate::mend;
use crate::object::{Object, Segment};
use crate::program::Program;
use crate::refuse;
use crate::remote::Remote;
use crate::rescue::{Ours, Rescue};
use crate::stop::{Asked, Stopped};
use crate::threads::{self, Doing};
use crate::waited::Clocks;
use act::seccomp;
use act::trace::{Registers, Tracee};
use anyhow::{Context, bail};
use api::enrol::HIDES;
use host::{Pagemap, Seqpacket, Signals};
use page::HostVirt;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::process::Pid;
use std::cell::Cell;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::{Duration, Instant};
use wire::attach::FILES;

/// Longest wait for one thread of the program to stop: 20 ms. Then the next thread is tried.
const STOP_TIME: Duration = Duration::from_millis(20);
/// Longest time in which a thread is sought that can be stopped: 5 s.
const PATIENCE: Duration = Duration::from_secs(5);
/// Stack of the agent's first thread, in bytes.
const STACK_BYTES: u64 = 1 << 20;
/// Size of the `msghdr` and its buffers, with which the agent's thread receives a file, in bytes.
const MESSAGE_BYTES: u64 = 128;
/// Environment variable that tells the agent that its first thread shares root and working directory with the program.
const SHARED: &str = "PAGEFOLD_SHARED_DIRECTORIES";

/// An agent in a process, and the means to serve it.
#[derive(Debug)]
pub struct Injected {
    /// This program's end of the agent's channel.
    pub channel: OwnedFd,
    /// Its first thread.
    pub thread: Pid,
    /// Addresses of the agent's object and of its first thread's stack, which follows it.
    pub range: Range<u64>,
    /// How long a thread of the program was stopped to make the agent's first thread.
    pub stopped: Duration,
    /// Stops the program's threads.
    pub halts: Halts,
    /// The agent's gate, if it has one already.
    pub gate: Option<HostVirt>,
}

/// Stops a thread of the program, calls `work`, which has that thread make system calls, and lets the thread go on.
/// Returns what `work` returns, and how long the thread was stopped.
///
/// # Errors
/// No thread can be stopped, or the work fails.
pub(crate) fn borrow_thread<T>(
    halts: &mut Halts,
    work: impl Fn(&Tracee) -> anyhow::Result<T>,
) -> anyhow::Result<(T, Duration)> {
    borrow_one_of(halts, candidates, work)
}

/// As [`borrow_thread`], with the first of these threads that can be stopped.
pub(crate) fn borrow_one_of<T>(
    halts: &mut Halts,
    candidates: impl Fn(&Halts) -> anyhow::Result<Vec<Pid>>,
    work: impl Fn(&Tracee) -> anyhow::Result<T>,
) -> anyhow::Result<(T, Duration)> {
    let until = Instant::now() + PATIENCE;
    let rescue = way_back(halts)?;
    let memory = File::open(host::proc_file(halts.pid(), "mem")).context("cannot open its memory")?;
    let present = Present::of(halts.pid());
    loop {
        for thread in candidates(halts)? {
            let began = Instant::now();
            refuse::check_runs(halts.pid(), thread).map_err(anyhow::Error::msg)?;
            let asked = halts.ask_one(thread).context("cannot trace the process")?;
            let Asked::Stops(mut stopped) = asked else { continue };
            let is_plain = stopped.wait(began + STOP_TIME) && stopped.is_plain();
            let is_plain = is_plain && Remote::may_be_borrowed(&memory, &present, stopped.tracee());
            let is_filtered = threads::is_filtered(halts.pid(), thread);
            let made = is_plain.then(|| borrowed(&mut stopped, is_filtered, Rc::clone(&rescue), &work));
            // A thread that takes a signal, or does not stop in time, is let go when it stops.
            halts.let_go(stopped);
            if let Some(made) = made {
                return Ok((made?, began.elapsed()));
            }
        }
        halts.tend();
        if Instant::now() > until {
            threads::list(halts.pid())?
                .into_iter()
                .try_for_each(|thread| refuse::check_runs(halts.pid(), thread))
                .map_err(anyhow::Error::msg)?;
            bail!(
                "none of its threads can be borrowed: all are in system calls that must not be interrupted, in 32-bit mode, \
                 or in restartable sequences"
            );
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The process that restores borrowed threads should this process be killed ([`Rescue`]). It is started before any
/// thread is borrowed.
fn way_back(halts: &mut Halts) -> anyhow::Result<Rc<Rescue>> {
    halts.rescue().context("cannot have a second process, which gives its threads back if this one is killed")
}

fn borrowed<T>(
    stopped: &mut Stopped,
    is_filtered: bool,
    rescue: Rc<Rescue>,
    work: &impl Fn(&Tracee) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let mut before = stopped.tracee().registers()?;
    if before.rax.cast_signed() == mend::BY_ANOTHER && is_filtered {
        // The call has just begun, or waits without a limit ([`candidates`]): it is made again as it was.
        before.rax = mend::AGAIN.cast_unsigned();
    }
    let made = stopped.lend(before, rescue).map_err(anyhow::Error::from).and_then(work);
    stopped.take_back();
    // If giving the thread back takes longer, `halts` looks after the thread for as long as that takes.
    let _ = stopped.wait(Instant::now() + PATIENCE);
    made
}

/// The threads that may be borrowed, the best first. Those in a system call that the kernel begins again by
/// itself come first. Then come those that run, and those whose call we can have begun again.
fn candidates(halts: &Halts) -> anyhow::Result<Vec<Pid>> {
    let pid = halts.pid();
    let rank = |thread: &Pid| match threads::doing(pid, *thread) {
        // The kernel goes on with this call by `restart_syscall`. The thread's filter is not known yet, and may end the
        // program for that.
        Doing::Call(call) if call.goes_on_by_another() && threads::is_filtered(pid, *thread) => None,
        Doing::Call(call) if call.is_restarted() => Some(0),
        Doing::Running => Some(1),
        Doing::Call(call) if call.may_be_stopped() => Some(2),
        Doing::Call(_) | Doing::Other => None,
    };
    // While the first thread is traced, signals that the program ignores interrupt its other threads. So the first
    // thread is the last choice.
    let is_first = |thread: &Pid| thread.as_raw_nonzero().get().cast_unsigned() == pid;
    let all = halts.others(&[]).context("the process has ended")?;
    let mut ranked: Vec<(u8, bool, Pid)> =
        all.into_iter().filter_map(|(_, thread)| Some((rank(&thread)?, is_first(&thread), thread))).collect();
    ranked.sort_by_key(|(rank, is_first, _)| (*rank, *is_first));
    Ok(ranked.into_iter().map(|(.., thread)| thread).collect())
}

/// Puts the object into a process, with these variables in its environment. If that fails, `tell` is told before
/// threads are looked after, which may take as long as the process is frozen.
///
/// # Errors
/// The process cannot be traced, or lacks memory, threads or descriptors. Nothing of the agent is then left in it.
pub fn inject(
    pid: u32,
    object: &Object,
    environment: &[String],
    signals: &Signals,
    tell: impl FnOnce(&anyhow::Error),
) -> anyhow::Result<Injected> {
    let program = Program::open(pid).context("cannot open its memory")?;
    let mut halts = Halts::new(program, Clocks::default());
    match put(&mut halts, object, environment) {
        Ok(Put { channel, thread, range, stopped }) => {
            Ok(Injected { channel, thread, range, stopped, halts, gate: None })
        }
        Err(why) => Err(give_up(halts, why, signals, tell)),
    }
}

/// Tells `why`, then waits until all threads of the process go on as they were.
pub(crate) fn give_up(
    mut halts: Halts,
    why: anyhow::Error,
    signals: &Signals,
    tell: impl FnOnce(&anyhow::Error),
) -> anyhow::Error {
    tell(&why);
    halts.finish(signals);
    why
}

/// Looks whether a process's filters of system calls let an agent work. One of its threads is stopped for that. `tell`:
/// see [`inject`].
///
/// # Errors
/// The filters do not let an agent work, or cannot be read.
pub fn look_at_filters(pid: u32, signals: &Signals, tell: impl FnOnce(&anyhow::Error)) -> anyhow::Result<()> {
    let program = Program::open(pid).context("cannot open its memory")?;
    let mut halts = Halts::new(program, Clocks::default());
    match borrow_thread(&mut halts, |tracee| judge_filters(pid, tracee)) {
        Ok(_) => {
            halts.finish(signals);
            Ok(())
        }
        Err(why) => Err(give_up(halts, why, signals, tell)),
    }
}

/// The `clone` flags for the agent's first thread. An error if a seccomp filter does not let an agent work.
fn judge_filters(pid: u32, tracee: &Tracee) -> anyhow::Result<u64> {
    if !threads::is_filtered(pid, tracee.thread()) {
        return Ok(seccomp::first_thread(&[]));
    }
    host::open_userfaultfd_device()
        .context("it filters its system calls (seccomp), and /dev/userfaultfd is missing")?;
    let filters = tracee.filters().context("its filters of system calls (seccomp) cannot be read")?;
    match seccomp::forbidden(&filters) {
        None => Ok(seccomp::first_thread(&filters)),
        Some(call) => bail!("it filters its system calls (seccomp), and does not let the agent call {call}"),
    }
}

/// What [`put`] has made in a process: see [`Injected`].
struct Put {
    channel: OwnedFd,
    thread: Pid,
    range: Range<u64>,
    stopped: Duration,
}

fn put(halts: &mut Halts, object: &Object, environment: &[String]) -> anyhow::Result<Put> {
    let remote = Remote::open(halts.pid()).context("cannot open its memory")?;
    let (pid, new, rescue) = (halts.pid(), Cell::default(), way_back(halts)?);
    let ours = Cell::default();
    // The new thread is noted before the lent thread is given back, so that at each moment one of the two is noted.
    let note =
        |thread| Ours::new(thread, remote.instruction(), &[], Rc::clone(&rescue)).map(|noted| ours.set(Some(noted)));
    let make = |tracee: &Tracee| {
        let made = make_thread(pid, &remote, tracee, &new);
        new.get().map_or(Ok(()), note)?;
        made
    };
    let made = borrow_thread(halts, make);
    let (ours, tracee) = (ours.take(), new.take().map(Tracee::of_clone));
    let (shares_directories, stopped) = match made {
        Ok(made) => made,
        Err(why) => {
            if let Some(tracee) = tracee {
                halts.end(Ending::new(tracee, Some(remote.instruction()), Vec::new(), ours));
            }
            return Err(why);
        }
    };
    let (tracee, ours) = tracee.zip(ours).context("no thread was made in it")?;
    let shared = shares_directories.then(|| format!("{SHARED}=1"));
    let environment: Vec<String> = environment.iter().cloned().chain(shared).collect();
    let thread = Thread { pid, tracee: &tracee, remote: &remote, ours: Some(&ours), left: Cell::default() };
    match thread.furnish(object, &environment) {
        Ok((channel, range)) => {
            let thread = tracee.thread();
            // From here on, the thread runs the agent's code.
            drop(ours);
            tracee.detach(0);
            Ok(Put { channel: channel.into(), thread, range, stopped })
        }
        Err(why) => {
            let left = thread.left.take().map(|[start, bytes]| unmapping(start, bytes));
            halts.end(Ending::new(tracee, Some(remote.instruction()), left.into_iter().collect(), Some(ours)));
            Err(why)
        }
    }
}

/// Makes a stopped thread create the agent's first thread, which is stored in `made`. Returns whether the new thread
/// shares root and working directory with the program.
fn make_thread(pid: u32, remote: &Remote, tracee: &Tracee, made: &Cell<Option<Pid>>) -> anyhow::Result<bool> {
    let flags = judge_filters(pid, tracee)?;
    let stack = tracee.registers()?.rsp;
    // If the filters allow it, the thread does not share root, working directory and semaphore undo list with the
    // program. The addresses to which `clone` writes the new thread's id are null, so nothing is written.
    let answer = remote.call_watched(tracee, libc::SYS_clone, [flags, stack, 0, 0, 0, 0], made)?;
    if made.get().is_none() {
        bail!("no thread can be made in it: {}", error(answer));
    }
    Ok(flags & libc::CLONE_FS as u64 != 0)
}

/// The agent's first thread, while it is traced and makes the system calls that prepare it.
struct Thread<'a> {
    pid: u32,
    tracee: &'a Tracee,
    remote: &'a Remote,
    ours: Option<&'a Ours>,
    /// Memory that was mapped for the agent and could not be unmapped: its address, and its size in bytes.
    left: Cell<Option<[u64; 2]>>,
}

impl Thread<'_> {
    fn call(&self, number: i64, arguments: [u64; 6]) -> anyhow::Result<u64> {
        // Another thread may give all of them a filter at any moment (`SECCOMP_FILTER_FLAG_TSYNC`).
        judge_filters(self.pid, self.tracee)?;
        let answer = self.remote.call(self.tracee, number, arguments)?;
        anyhow::ensure!(!(-4095..0).contains(&answer), "system call {number} in it: {}", error(answer));
        Ok(answer.cast_unsigned())
    }

    /// Checks that a program of root's has not asked to be hidden (`PR_SET_DUMPABLE`). Programs of other users that ask
    /// so are hidden from their own users, which the service sees by itself.
    fn check_shown(&self) -> anyhow::Result<()> {
        if host::effective_uid(self.pid)? != 0 {
            return Ok(());
        }
        let is_shown = self.call(libc::SYS_prctl, [libc::PR_GET_DUMPABLE as u64, 0, 0, 0, 0, 0])? == 1;
        anyhow::ensure!(is_shown, "{HIDES}");
        Ok(())
    }

    /// Gives the new thread all that it needs, by system calls that this thread makes.
    fn furnish(&self, object: &Object, environment: &[String]) -> anyhow::Result<(Seqpacket, Range<u64>)> {
        let until = Instant::now() + PATIENCE;
        while self.tracee.wait(until)?.context("its new thread does not come")? != act::trace::Stop::Asked {
            self.tracee.resume(act::trace::Resume::Freely, 0)?;
        }
        self.tracee.block_signals(u64::MAX)?;
        self.check_shown()?;
        // The call first gives the thread a table of files of its own, so the program's descriptors stay open.
        self.call(libc::SYS_close_range, [0, u32::MAX.into(), libc::CLOSE_RANGE_UNSHARE.into(), 0, 0, 0])?;
        let bytes = object.bytes + STACK_BYTES;
        let access = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let kind = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as u64;
        let base = self.call(libc::SYS_mmap, [0, bytes, access, kind, u64::MAX, 0]);
        let base = base.context("it has no room for the agent")?;
        let range = base..base + bytes;
        self.ours.map_or(Ok(()), |ours| ours.is_to_make(&[unmapping(base, bytes)]))?;
        let furnish = || {
            let channel = self.open_channel(range.end)?;
            self.fill(object, &range, &channel)?;
            self.give_files(&channel)?;
            judge_filters(self.pid, self.tracee)?;
            self.begin(object, &range, environment).map(|()| channel)
        };
        match furnish() {
            Ok(channel) => Ok((channel, range)),
            Err(e) => {
                let unmapped = self.remote.call(self.tracee, libc::SYS_munmap, [base, bytes, 0, 0, 0, 0]);
                self.left.set(unmapped.is_err().then_some([base, bytes]));
                Err(e)
            }
        }
    }

    /// Maps the segments of the object's file at their addresses. Pages that the agent does not write stay pages of
    /// that file.
    fn fill(&self, object: &Object, range: &Range<u64>, channel: &Seqpacket) -> anyhow::Result<()> {
        let base = range.start;
        let file = self.give(channel, object.file.as_fd(), range.end).context("it does not take the agent's file")?;
        let kind = (libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE) as u64;
        for Segment { offset, bytes, access } in &object.segments {
            self.call(libc::SYS_mmap, [base + offset, *bytes, *access as u64, kind, file, *offset])?;
        }
        self.call(libc::SYS_close, [file, 0, 0, 0, 0, 0])?;
        for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
            self.call(libc::SYS_madvise, [base, range.end - base, advice as u64, 0, 0, 0])?;
        }
        Ok(())
    }

    /// Has the thread open a channel as its descriptor 0, and returns this program's end. The eight bytes below `top`
    /// are free.
    fn open_channel(&self, top: u64) -> anyhow::Result<Seqpacket> {
        let (kind, place) = ((libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as u64, top - 8);
        self.call(libc::SYS_socketpair, [libc::AF_UNIX as u64, kind, 0, place, 0, 0])?;
        let mut numbers = [0_u8; 8];
        self.remote.memory().read_exact_at(&mut numbers, place)?;
        let number = i32::from_ne_bytes(numbers[4..].try_into().unwrap_or_default());
        let channel = act::file_of_thread(self.tracee.thread(), number);
        let channel = channel.context("cannot take the agent's channel, for which Linux 6.9 or newer is needed")?;
        self.call(libc::SYS_close, [number.cast_unsigned().into(), 0, 0, 0, 0, 0])?;
        Ok(channel.into())
    }

    /// Sends the agent the page table of its process, and the device that makes userfaultfds, if there is one. The page
    /// table is that of the program whose thread is traced: the thread ends before another program is executed.
    fn give_files(&self, channel: &Seqpacket) -> anyhow::Result<()> {
        let pagemap = act::without_frame_numbers(|| Pagemap::open(self.pid)).context("cannot give up a right")?;
        let pagemap = pagemap.context("its page table is not shown to us")?;
        let device = host::open_userfaultfd_device().ok();
        let files: Vec<_> = [pagemap.file()].into_iter().chain(device.iter().map(AsFd::as_fd)).collect();
        let sent = channel.send(&FILES, &files).context("cannot write to the agent's channel")?;
        anyhow::ensure!(sent, "the agent's channel takes nothing");
        Ok(())
    }

    /// Passes the thread a file over its channel, and returns the file's descriptor in the thread. [`MESSAGE_BYTES`]
    /// below `top` are free.
    fn give(&self, channel: &Seqpacket, file: BorrowedFd<'_>, top: u64) -> anyhow::Result<u64> {
        anyhow::ensure!(channel.send(&FILES, &[file])?, "its channel takes nothing");
        let place = top - MESSAGE_BYTES;
        // One piece of one byte, and room for one descriptor: `struct iovec`, `struct cmsghdr` and the number.
        let (piece, byte, control) = (place + 56, place + 72, place + 80);
        let message: [u64; 9] = [0, 0, piece, 1, control, 24, 0, byte, 1];
        let memory = self.remote.memory();
        memory.write_all_at(&message.map(u64::to_le_bytes).concat(), place)?;
        let received = self.call(libc::SYS_recvmsg, [0, place, libc::MSG_CMSG_CLOEXEC as u64, 0, 0, 0])?;
        let mut words = [0_u8; 20];
        memory.read_exact_at(&mut words, control)?;
        let word = |at: usize| i32::from_le_bytes(*words[at..].first_chunk().unwrap_or(&[0; 4]));
        let is_file = (received, word(0), word(8), word(12)) == (1, 20, libc::SOL_SOCKET, libc::SCM_RIGHTS);
        anyhow::ensure!(is_file, "something else came");
        Ok(word(16).cast_unsigned().into())
    }

    /// Starts the thread at the object's first instruction.
    fn begin(&self, object: &Object, range: &Range<u64>, environment: &[String]) -> anyhow::Result<()> {
        let mut variables = environment.to_vec();
        variables.push(format!("PAGEFOLD_OBJECT={:x}-{:x}", range.start, range.end));
        let stack = object.stack(range.start, range.end, &variables, self.remote.clock(), random()?);
        let pointer = range.end - stack.len() as u64;
        self.remote.memory().write_all_at(&stack, pointer)?;
        Ok(self.tracee.set_registers(&begin(self.tracee.registers()?, range.start + object.entry, pointer))?)
    }
}

/// The registers with which the kernel starts a program: those of `before`, with instruction and stack pointer set and
/// all others cleared.
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

fn random() -> anyhow::Result<[u8; 16]> {
    let mut bytes = [0_u8; 16];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes)
}

pub(crate) fn error(answer: i64) -> std::io::Error {
    std::io::Error::from_raw_os_error(i32::try_from(-answer).unwrap_or(0))
}

#[cfg(test)]
#[path = "inject_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "frozen_tests.rs"]
mod frozen;
