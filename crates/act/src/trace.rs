//! Stopping and steering threads of another process (`ptrace`). A thread has one tracer at most, which is a thread of
//! this process. All calls about a [`Tracee`] are made by the thread that seized it.
//!
//! ```text
//!   running --seize--> running, traced --interrupt--> stopped --detach--> running
//!                                                       |   ^
//!                                             resume    v   |  next stop
//!                                                     running
//! ```
//!
//! When the tracer ends, the kernel lets all of its tracees go on.

mod exit_hold;

pub use exit_hold::{Dying, ExitHold};

use crate::FilterInstruction;
use rustix::io::Errno;
use rustix::process::Pid;
use std::ffi::{c_int, c_void};
use std::time::{Duration, Instant};

/// Registers of a thread, as the kernel keeps them while it is stopped.
pub type Registers = libc::user_regs_struct;

/// Number of words of [`Registers`].
pub const REGISTERS: usize = size_of::<Registers>() / 8;

/// `PTRACE_SECCOMP_GET_FILTER`, which libc has no name for.
const GET_FILTER: libc::c_uint = 0x420c;
/// `PTRACE_GET_RSEQ_CONFIGURATION`, whose answer begins with the address.
const GET_RSEQ: libc::c_uint = 0x420f;
/// Selector of the kernel's segment for 64-bit code (`__USER_CS`).
const CODE_64: u64 = 0x33;
/// `AUDIT_ARCH_X86_64`.
const ARCHITECTURE: u32 = 0xc000_003e;
/// Most instructions of a filter: the kernel's `BPF_MAXINSNS`.
const FILTER_LONGEST: usize = 4096;
/// Most filters of a thread that are read. The kernel allows fewer, because it limits the instructions of all filters.
const MOST_FILTERS: usize = 32768;

/// Pause between two checks whether a thread has stopped: 10 us.
const PAUSE: Duration = Duration::from_micros(10);

/// Why a traced thread is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The thread was asked to stop ([`Tracee::interrupt`]), or is new.
    Asked,
    /// The whole process is stopped (`SIGSTOP`), and the thread waits for `SIGCONT`.
    Suspended,
    /// The thread has begun or ended a system call ([`Resume::ToSystemCall`]).
    SystemCall,
    /// The thread has made this thread, which is stopped, too.
    Cloned(Pid),
    /// The thread is about to get this signal. It gets the signal only if it is resumed with it.
    Signal(i32),
    /// Something else happened to the thread.
    Other,
    /// The thread has ended.
    Ended,
}

/// How far a stopped thread goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// Until it is asked to stop.
    Freely,
    /// Until it begins or ends a system call.
    ToSystemCall,
    /// Not at all until `SIGCONT` comes; for use after [`Stop::Suspended`].
    Listening,
}

/// A thread that is traced. When this is dropped, the thread goes on, untraced, if it was stopped.
#[derive(Debug)]
pub struct Tracee {
    thread: Pid,
}

impl Tracee {
    /// Begins to trace a thread, which goes on running. With `follow`, threads that it makes are traced, too.
    ///
    /// # Errors
    /// `EPERM`: this process may not, or another one traces the thread already. `ESRCH`: there is no such thread.
    pub fn seize(thread: Pid, follow: bool) -> Result<Self, Errno> {
        // SAFETY: seizing takes no memory of this process.
        unsafe { request(libc::PTRACE_SEIZE, thread, 0, options(follow) as usize) }?;
        Ok(Self { thread })
    }

    /// A thread that a traced thread has made. It is traced in the same way, from its first instruction on.
    pub const fn of_clone(thread: Pid) -> Self {
        Self { thread }
    }

    /// The thread.
    pub const fn thread(&self) -> Pid {
        self.thread
    }

    /// Asks the thread to stop. The stop comes when it next leaves the kernel.
    ///
    /// # Errors
    /// `ESRCH`: it has ended.
    pub fn interrupt(&self) -> Result<(), Errno> {
        // SAFETY: takes no memory of this process.
        unsafe { request(libc::PTRACE_INTERRUPT, self.thread, 0, 0) }
    }

    /// The stop that the thread has reached; `None` if it runs.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn look(&self) -> Result<Option<Stop>, Errno> {
        let mut status: c_int = 0;
        let thread = self.thread.as_raw_nonzero().get();
        // SAFETY: `status` is exclusively borrowed for the call.
        let waited = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL | libc::WNOHANG) };
        match waited {
            0 => Ok(None),
            -1 => match last_error() {
                Errno::CHILD => Ok(Some(Stop::Ended)),
                e => Err(e),
            },
            _ => Ok(Some(self.meaning(status))),
        }
    }

    /// Waits for the next stop; `None` if none comes until `until`.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn wait(&self, until: Instant) -> Result<Option<Stop>, Errno> {
        loop {
            if let Some(stop) = self.look()? {
                return Ok(Some(stop));
            }
            if Instant::now() > until {
                return Ok(None);
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn meaning(&self, status: c_int) -> Stop {
        if !libc::WIFSTOPPED(status) {
            return Stop::Ended;
        }
        match (libc::WSTOPSIG(status), status >> 16) {
            (libc::SIGTRAP, libc::PTRACE_EVENT_STOP) => Stop::Asked,
            (_, libc::PTRACE_EVENT_STOP) => Stop::Suspended,
            (_, libc::PTRACE_EVENT_CLONE) => self.message().map_or(Stop::Other, Stop::Cloned),
            (signal, 0) if signal == libc::SIGTRAP | 0x80 => Stop::SystemCall,
            (signal, 0) => Stop::Signal(signal),
            _ => Stop::Other,
        }
    }

    fn message(&self) -> Option<Pid> {
        let mut message: libc::c_ulong = 0;
        // SAFETY: the kernel writes a number to `message`, which is exclusively borrowed.
        unsafe { request(libc::PTRACE_GETEVENTMSG, self.thread, 0, &raw mut message as usize) }.ok()?;
        Pid::from_raw(i32::try_from(message).ok()?)
    }

    /// Seizes a thread that another process traces at the moment, as soon as that process lets it go.
    ///
    /// # Errors
    /// The thread has ended, or it is not let go in time.
    pub fn seize_after(thread: Pid, until: Instant) -> Result<Self, Errno> {
        loop {
            match Self::seize(thread, false) {
                Err(Errno::PERM) if Instant::now() < until => std::thread::sleep(PAUSE),
                seized => return seized,
            }
        }
    }

    /// Sends the thread alone a signal. `SIGSTOP` stops its whole process, and the thread before it runs any code
    /// again.
    ///
    /// # Errors
    /// It has ended.
    pub fn send(process: u32, thread: Pid, signal: i32) -> Result<(), Errno> {
        // SAFETY: the call takes numbers.
        let sent = unsafe { libc::syscall(libc::SYS_tgkill, process, thread.as_raw_nonzero().get(), signal) };
        if sent == 0 { Ok(()) } else { Err(last_error()) }
    }

    /// The registers of the stopped thread.
    ///
    /// # Errors
    /// `ESRCH`: it is not stopped, or has ended.
    pub fn registers(&self) -> Result<Registers, Errno> {
        // SAFETY: all bits zero are registers.
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel fills the structure, which is exclusively borrowed and of its layout on x86-64.
        unsafe { request(libc::PTRACE_GETREGS, self.thread, 0, &raw mut registers as usize) }?;
        Ok(registers)
    }

    /// Sets the registers of the stopped thread.
    ///
    /// # Errors
    /// `ESRCH`: it is not stopped, or has ended.
    pub fn set_registers(&self, registers: &Registers) -> Result<(), Errno> {
        // SAFETY: the kernel reads the structure, which is borrowed for the call.
        unsafe { request(libc::PTRACE_SETREGS, self.thread, 0, std::ptr::from_ref(registers) as usize) }
    }

    /// Whether the thread is stopped at the beginning of a system call. `false`: it is stopped at the end of one, or
    /// for another reason.
    pub fn begins_call(&self) -> bool {
        self.call_info().is_ok_and(|info| info.op == libc::PTRACE_SYSCALL_INFO_ENTRY)
    }

    /// Whether the stopped thread is in 64-bit mode, and not in a 32-bit system call.
    pub fn is_64_bit(&self) -> bool {
        let is_code = self.registers().is_ok_and(|registers| registers.cs == CODE_64);
        is_code && self.call_info().is_ok_and(|info| info.arch == ARCHITECTURE)
    }

    fn call_info(&self) -> Result<libc::ptrace_syscall_info, Errno> {
        // SAFETY: all bits zero are such a structure.
        let mut info: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
        let (bytes, place) = (size_of::<libc::ptrace_syscall_info>(), &raw mut info as usize);
        // SAFETY: the kernel writes at most so many bytes to the structure, which is exclusively borrowed.
        unsafe { request(libc::PTRACE_GET_SYSCALL_INFO, self.thread, bytes, place) }?;
        Ok(info)
    }

    /// Address of the `struct rseq` that the stopped thread has registered for restartable sequences; 0 if it has none.
    ///
    /// # Errors
    /// `ESRCH`: it is not stopped, or has ended.
    pub fn restartable_sequences(&self) -> Result<u64, Errno> {
        let mut told = [0_u64; 3];
        // SAFETY: the kernel writes at most so many bytes to `told`, which is exclusively borrowed.
        match unsafe { request(GET_RSEQ, self.thread, size_of_val(&told), &raw mut told as usize) } {
            Ok(()) => Ok(told[0]),
            // The kernel has no restartable sequences, or is older than 5.13.
            Err(Errno::IO | Errno::INVAL) => Ok(0),
            Err(e) => Err(e),
        }
    }

    /// The signals that the stopped thread blocks.
    ///
    /// # Errors
    /// `ESRCH`: it is not stopped, or has ended.
    pub fn blocked_signals(&self) -> Result<u64, Errno> {
        let mut mask = 0_u64;
        // SAFETY: the kernel writes eight bytes to `mask`, which is exclusively borrowed.
        unsafe { request(libc::PTRACE_GETSIGMASK, self.thread, size_of::<u64>(), &raw mut mask as usize) }?;
        Ok(mask)
    }

    /// Sets the signals that the stopped thread blocks.
    ///
    /// # Errors
    /// `ESRCH`: it is not stopped, or has ended.
    pub fn block_signals(&self, mask: u64) -> Result<(), Errno> {
        // SAFETY: the kernel reads eight bytes, borrowed for the call.
        unsafe { request(libc::PTRACE_SETSIGMASK, self.thread, size_of::<u64>(), &raw const mask as usize) }
    }

    /// The seccomp filters of the stopped thread. For each system call, the strictest answer of all filters counts.
    ///
    /// # Errors
    /// `EACCES`: this process lacks `CAP_SYS_ADMIN`, or is filtered itself. `ESRCH`: the thread is not stopped.
    pub fn filters(&self) -> Result<Vec<Vec<FilterInstruction>>, Errno> {
        let nothing = FilterInstruction { code: 0, jt: 0, jf: 0, k: 0 };
        let mut all = Vec::new();
        while all.len() < MOST_FILTERS {
            let mut filter = vec![nothing; FILTER_LONGEST];
            // SAFETY: the kernel writes one filter, and none is longer than this one, which is exclusively borrowed.
            let count = unsafe { ask(GET_FILTER, self.thread, all.len(), filter.as_mut_ptr() as usize) };
            match count {
                Ok(count) => filter.truncate(usize::try_from(count).unwrap_or_default()),
                Err(Errno::NOENT) => return Ok(all),
                Err(e) => return Err(e),
            }
            filter.shrink_to_fit();
            all.push(filter);
        }
        Err(Errno::TOOBIG)
    }

    /// Lets the stopped thread go on, with `signal` if it is not 0.
    ///
    /// # Errors
    /// `ESRCH`: it is not stopped, or has ended.
    pub fn resume(&self, how: Resume, signal: i32) -> Result<(), Errno> {
        let how = match how {
            Resume::Freely => libc::PTRACE_CONT,
            Resume::ToSystemCall => libc::PTRACE_SYSCALL,
            Resume::Listening => libc::PTRACE_LISTEN,
        };
        // SAFETY: takes no memory of this process.
        unsafe { request(how, self.thread, 0, signal as usize) }
    }

    /// Ends the tracing of a stopped thread, which goes on with `signal` if that is not 0.
    pub fn detach(self, signal: i32) {
        self.let_go(signal);
        std::mem::forget(self);
    }

    fn let_go(&self, signal: i32) {
        // SAFETY: takes no memory of this process. A thread that has ended needs no detaching.
        let _ = unsafe { request(libc::PTRACE_DETACH, self.thread, 0, signal as usize) };
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        self.let_go(0);
    }
}

/// Options with which a thread is traced.
const fn options(follow: bool) -> c_int {
    libc::PTRACE_O_TRACESYSGOOD | if follow { libc::PTRACE_O_TRACECLONE } else { 0 }
}

/// # Safety
/// `data` and `address` must be what this request takes.
unsafe fn request(request: libc::c_uint, thread: Pid, address: usize, data: usize) -> Result<(), Errno> {
    // SAFETY: by the caller.
    unsafe { ask(request, thread, address, data) }.map(|_| ())
}

/// As [`request`], for a request that is answered by a number.
///
/// # Safety
/// As for [`request`].
unsafe fn ask(request: libc::c_uint, thread: Pid, address: usize, data: usize) -> Result<i64, Errno> {
    let thread = thread.as_raw_nonzero().get();
    // SAFETY: by the caller.
    let answer = unsafe { libc::ptrace(request, thread, address as *mut c_void, data as *mut c_void) };
    if answer == -1 { Err(last_error()) } else { Ok(answer) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Registers as words, in the order of the kernel's structure.
pub const fn words_of(registers: Registers) -> [u64; REGISTERS] {
    // SAFETY: the structure is so many words, and any bits are words.
    unsafe { std::mem::transmute(registers) }
}

/// Registers from such words.
pub const fn registers_of(words: [u64; REGISTERS]) -> Registers {
    // SAFETY: the structure is so many words, and any words are registers.
    unsafe { std::mem::transmute(words) }
}

/// Another process that shares the memory of process `pid` (`CLONE_VM`); `None` if there is none, or the kernel does
/// not tell.
pub fn sharer_of_memory(pid: u32) -> Option<u32> {
    let others = host::pids().unwrap_or_default();
    let own = host::thread_with_memory(pid);
    others.into_iter().find(|other| *other != pid && share_memory(own, host::thread_with_memory(*other)))
}

/// Whether two processes share their memory. `false` if the kernel does not tell.
fn share_memory(one: u32, other: u32) -> bool {
    /// `KCMP_VM`.
    const MEMORY: libc::c_int = 1;
    share(one, other, MEMORY)
}

/// Whether two threads share a table of open files. `false` if the kernel does not tell.
pub fn share_files(one: Pid, other: Pid) -> bool {
    /// `KCMP_FILES`.
    const FILES: libc::c_int = 2;
    let number = |thread: Pid| thread.as_raw_nonzero().get().cast_unsigned();
    share(number(one), number(other), FILES)
}

fn share(one: u32, other: u32, what: libc::c_int) -> bool {
    // SAFETY: compares two numbers of the kernel's.
    0 == unsafe { libc::syscall(libc::SYS_kcmp, one, other, what, 0, 0) }
}
