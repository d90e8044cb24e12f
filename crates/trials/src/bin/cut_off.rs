//! Runs a program, and kills one of its processes right before the kernel makes one of its system calls.
//!
//! ```text
//! cut_off N FIRST TIMES PROGRAM [ARGUMENT...]
//! ```
//!
//! System calls of the program and of all its descendants are counted. Counting begins with a call of number FIRST (56
//! is `clone`): the first such call if TIMES is 1, the second if it is 2. The process that is about to make the Nth
//! counted call is killed.
//!
//! When all processes have ended, this program writes a line to standard error. It says how many calls were counted,
//! before which call a process was killed (`null` if none was), and whether that process was PROGRAM itself.
//!
//! A seccomp filter (`SECCOMP_RET_USER_NOTIF`) makes each call wait for this program. No process has to trace PROGRAM,
//! so that its own processes may trace each other.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open};
use serde_json::json;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Number of the seccomp notification descriptor in the program.
const LISTENER: i32 = 3;
/// `SECCOMP_IOCTL_NOTIF_RECV` and `SECCOMP_IOCTL_NOTIF_SEND`.
const RECEIVE: libc::Ioctl = 0xc050_2100;
const SEND: libc::Ioctl = 0xc018_2101;
/// `SECCOMP_USER_NOTIF_FLAG_CONTINUE`.
const CONTINUE: u32 = 1;

/// Installs a filter that makes all system calls of this process wait for the reader of the notification descriptor.
fn have_calls_heard_of() -> io::Result<()> {
    // SAFETY: these descriptors are closed when the program is executed, in a moment, and `Command` needs none until
    // then.
    unsafe { libc::syscall(libc::SYS_close_range, LISTENER, u32::MAX, 0) };
    let mut code = [libc::sock_filter { code: 6, jt: 0, jf: 0, k: libc::SECCOMP_RET_USER_NOTIF }];
    let filter = libc::sock_fprog { len: 1, filter: code.as_mut_ptr() };
    let (set, listen) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER);
    // SAFETY: the filter lives until the call returns. Without instructions of its own, no call of this process ends before it is heard of.
    let made = unsafe { libc::syscall(libc::SYS_seccomp, set, listen, &raw const filter) };
    if made == i64::from(LISTENER) { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn listener_of(process: Pid) -> io::Result<OwnedFd> {
    let process = pidfd_open(process, PidfdFlags::empty())?;
    loop {
        match pidfd_getfd(&process, LISTENER, PidfdGetfdFlags::empty()) {
            Ok(listener) => return Ok(listener),
            Err(rustix::io::Errno::BADF) => std::thread::yield_now(),
            Err(e) => return Err(e.into()),
        }
    }
}

/// The next system call that waits: id of the notification, thread, and number of the call. `None` if its thread has
/// ended meanwhile.
fn receive(listener: &OwnedFd) -> Option<(u64, i32, i32)> {
    // SAFETY: all bits zero are such a structure, which the kernel asks for.
    let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is exclusively borrowed for the call.
    let got = unsafe { libc::ioctl(listener.as_raw_fd(), RECEIVE, &raw mut call) };
    (got == 0).then_some((call.id, call.pid.cast_signed(), call.data.nr))
}

fn have_made(listener: &OwnedFd, id: u64) {
    let mut answer = libc::seccomp_notif_resp { id, val: 0, error: 0, flags: CONTINUE };
    // SAFETY: the structure is exclusively borrowed for the call. One that was given up is an error.
    unsafe { libc::ioctl(listener.as_raw_fd(), SEND, &raw mut answer) };
}

fn main() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().collect();
    let [_, number, first, times, program, arguments @ ..] = words.as_slice() else {
        anyhow::bail!("cut_off N FIRST TIMES PROGRAM [ARGUMENT...]");
    };
    let (number, first, mut times): (u64, i32, u32) = (number.parse()?, first.parse()?, times.parse()?);
    let mut command = Command::new(program);
    command.args(arguments);
    // SAFETY: the function makes two system calls.
    unsafe { command.pre_exec(have_calls_heard_of) };
    let mut child = command.spawn()?;
    let own = Pid::from_child(&child);
    let listener = listener_of(own)?;
    let (mut count, mut killed) = (0, None);
    loop {
        let mut files = [PollFd::new(&listener, PollFlags::IN)];
        poll(&mut files, None)?;
        if files[0].revents().contains(PollFlags::HUP) {
            break;
        }
        let Some((id, thread, call)) = receive(&listener) else { continue };
        times = times.saturating_sub(u32::from(call == first));
        count += u64::from(times == 0);
        match Pid::from_raw(thread).filter(|_| count == number && killed.is_none()) {
            Some(process) => {
                killed = Some((call, process == own));
                kill_process(process, Signal::KILL)?;
            }
            None => have_made(&listener, id),
        }
    }
    child.wait()?;
    let (at, is_itself) = killed.unzip();
    eprintln!("{}", json!({"calls": count, "killed_at": at, "itself": is_itself}));
    Ok(())
}
