//! Facts about a program that are needed to restart its threads' system calls: time limits, kinds of files, signal
//! handlers.

use crate::mend::{self, Call, Limit};
use crate::threads;
use host::ForeignFile;
use rustix::net::AddressFamily;
use rustix::net::sockopt::{self, Timeout};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// `PIDFD_THREAD`: the descriptor is one thread's, which need not be the first.
const PIDFD_THREAD: u32 = libc::O_EXCL as u32;

/// A process whose threads are stopped, and its memory.
#[derive(Debug)]
pub struct Program {
    /// The process.
    pub pid: u32,
    memory: File,
}

impl Program {
    /// Opens a process.
    ///
    /// # Errors
    /// This process may not open its memory.
    pub fn open(pid: u32) -> io::Result<Self> {
        let memory = File::options().read(true).write(true).open(host::proc_file(pid, "mem"))?;
        Ok(Self { pid, memory })
    }

    /// Its memory.
    pub const fn memory(&self) -> &File {
        &self.memory
    }

    /// The time limit of a call that was interrupted; `None` if it has none.
    pub fn limit(&self, call: &Call) -> Option<Duration> {
        match call.limit() {
            // Calls that wait for a ring with a time limit are never interrupted ([`Call::may_be_stopped`]).
            Limit::None | Limit::Ring => None,
            Limit::Milliseconds => u64::try_from(call.arguments[3] as i32).ok().map(Duration::from_millis),
            Limit::Time(at) => {
                let mut bytes = [0_u8; 16];
                self.memory.read_exact_at(&mut bytes, call.arguments[at]).ok()?;
                mend::time_of(bytes)
            }
            Limit::Socket => {
                let which = if call.is_limited_as_sending() { Timeout::Send } else { Timeout::Recv };
                sockopt::socket_timeout(self.socket(call.arguments[0])?, which).ok()?
            }
        }
    }

    /// What a call returns when its time limit is over.
    pub fn late_answer(&self, call: &Call) -> i64 {
        let is_local = || {
            let domain = self.socket(call.arguments[0]).map(sockopt::socket_domain);
            domain == Some(Ok(AddressFamily::UNIX))
        };
        if call.number == libc::SYS_connect && is_local() { -i64::from(libc::EAGAIN) } else { call.late_answer() }
    }

    /// A duplicate of the program's descriptor `number`, if that is a socket. Other files are not duplicated: closing
    /// one of a FUSE file system waits for its server, which may be a stopped thread of this program.
    fn socket(&self, number: u64) -> Option<ForeignFile> {
        if !self.name_of(number).starts_with("socket:") {
            return None;
        }
        let thread = host::thread_with_memory(self.pid);
        // If the first thread has ended, the files are taken from another thread, which takes Linux 6.9
        // (`PIDFD_THREAD`).
        let flags = if thread == self.pid { PidfdFlags::empty() } else { PidfdFlags::from_bits_retain(PIDFD_THREAD) };
        let thread = pidfd_open(Pid::from_raw(i32::try_from(thread).ok()?)?, flags).ok()?;
        pidfd_getfd(thread, number as i32, PidfdGetfdFlags::empty()).ok().map(ForeignFile::from)
    }

    /// Whether a file is a pipe or a socket, which take what is written in any number of parts.
    pub fn is_stream(&self, file: u64) -> bool {
        let name = self.name_of(file);
        name.starts_with("pipe:") || name.starts_with("socket:")
    }

    /// The kernel's name of an open file; empty if there is none.
    fn name_of(&self, number: u64) -> String {
        let name = fs::read_link(host::proc_file(self.pid, &format!("fd/{}", number as i32)));
        name.unwrap_or_default().into_os_string().into_string().unwrap_or_default()
    }

    /// Whether the program has a handler for a signal; true if the kernel does not tell.
    pub fn catches(&self, signal: i32) -> bool {
        let leader = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let caught = leader.and_then(|leader| threads::status(self.pid, leader, "SigCgt"));
        let caught = caught.and_then(|text| u64::from_str_radix(&text, 16).ok()).unwrap_or(u64::MAX);
        caught & 1 << (signal - 1).clamp(0, 63) != 0
    }
}
