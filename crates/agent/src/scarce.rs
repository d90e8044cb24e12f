//! For tests: memory that is short in the middle of a move, at a memory control group's limit. The kernel unmaps what
//! lies at the place, and then finds that it has no memory for the mapping.

use crate::raw;
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::mpsc;

/// `ioctl` numbers of a listener to a filter: receive a call, answer it.
const RECEIVE: libc::c_ulong = 0xC050_2100;
const ANSWER: libc::c_ulong = 0xC018_2101;

/// A call that puts a mapping to a given place: its number, the flag that says so, and which argument is the place.
pub type Call = (i64, i32, usize);

/// The call by which memory is moved.
pub const MOVE: Call = (libc::SYS_mremap, libc::MREMAP_FIXED, 4);
/// The call that fails half way in kernels before Linux 6.12.
pub const MAP: Call = (libc::SYS_mmap, libc::MAP_FIXED, 0);

/// Runs `body` in a thread of its own. There, moves to a given address fail as they do when memory is short, if their
/// bits are set in `short`: the lowest bit stands for the first move.
pub fn with_short_memory<T: Send>(short: u32, body: impl FnOnce() -> T + Send) -> T {
    with_short_memory_for(MOVE, short, body)
}

/// The same for other calls than moves.
pub fn with_short_memory_for<T: Send>(call: Call, short: u32, body: impl FnOnce() -> T + Send) -> T {
    let (given, listener) = mpsc::channel();
    std::thread::scope(|scope| {
        let filtered = move || {
            given.send(listen_to(call)).unwrap();
            body()
        };
        let runs = scope.spawn(filtered);
        let listener: OwnedFd = listener.recv().unwrap();
        (0..32).map_while(|n| next_call(&listener, call, short >> n & 1 == 1)).for_each(drop);
        runs.join().unwrap()
    })
}

/// Has these calls of the calling thread wait for an answer of the listener, which is returned.
fn listen_to((call, fixed, _): Call) -> OwnedFd {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let (load, test, end) = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP, libc::BPF_RET);
    let (number, flags) = (0, 16 + 3 * 8);
    let mut steps = [
        step(load, 0, 0, number),
        step(test | libc::BPF_JEQ, 0, 3, call as u32),
        step(load, 0, 0, flags),
        step(test | libc::BPF_JSET, 0, 1, fixed.cast_unsigned()),
        step(end, 0, 0, libc::SECCOMP_RET_USER_NOTIF),
        step(end, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    let (mode, flags) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER);
    // SAFETY: plain numbers.
    unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // Past the hooks: the agent would end before such a filter.
    // SAFETY: a program that outlives the call.
    let listener =
        unsafe { raw::call(libc::SYS_seccomp, [mode as usize, flags as usize, &raw const program as usize, 0, 0, 0]) };
    assert!(listener >= 0);
    // SAFETY: just made, and nobody else's.
    unsafe { OwnedFd::from_raw_fd(listener as i32) }
}

/// Lets the next call be made, or has it fail. `None`: the thread has ended.
fn next_call(listener: &OwnedFd, (_, _, place): Call, is_short: bool) -> Option<()> {
    let mut waits = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, and its storage.
    while unsafe { libc::poll(&raw mut waits, 1, 10_000) } < 0 {}
    if waits.revents & libc::POLLIN == 0 {
        return None;
    }
    // SAFETY: all bits zero are a value of this type.
    let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: storage for the call, and zeroed.
    if unsafe { libc::ioctl(listener.as_raw_fd(), RECEIVE, &raw mut call) } != 0 {
        return None;
    }
    let arguments = call.data.args.map(|argument| argument as usize);
    // The size is the second argument of `mmap`, and of `mremap`, too: nothing grows here.
    let (to, bytes) = (arguments[place], arguments[1]);
    let goes_on = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
    let mut answer = libc::seccomp_notif_resp { id: call.id, val: 0, error: 0, flags: goes_on };
    if is_short {
        // SAFETY: the caller has asked for what the kernel does first.
        unsafe { raw::call(libc::SYS_munmap, [to, bytes, 0, 0, 0, 0]) };
        (answer.error, answer.flags) = (-libc::ENOMEM, 0);
    }
    // SAFETY: an answer to the call that was received.
    assert_eq!(unsafe { libc::ioctl(listener.as_raw_fd(), ANSWER, &raw mut answer) }, 0);
    Some(())
}
