//! Debuggers that let one thread of the program run alone, as for a call of a function while all other threads are
//! stopped.
//!
//! If the agent's thread is stopped, too, and holds the table's lock, a hook would wait for ever. So a hook that has
//! waited for a while checks the agent's thread. If a debugger has stopped it, the hook only passes the call on. To the
//! agent, this is a system call that bypasses the hooks: it finds the change before it replaces anything there.

use agent::raw;
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Time after which a waiting hook checks the agent's thread, each time: 1 s.
pub const LOOK_AFTER: Duration = Duration::from_secs(1);

/// Number of the agent's thread; 0 before there is one.
static AGENT: AtomicUsize = AtomicUsize::new(0);

/// Notes that the calling thread is the agent's.
pub fn note_agent() {
    // SAFETY: only returns a number.
    AGENT.store(unsafe { raw::call(libc::SYS_gettid, [0; 6]) } as usize, Ordering::Relaxed);
}

/// Whether a debugger has stopped the agent's thread. Allocates nothing.
pub fn is_agent_stopped() -> bool {
    let (mut path, mut text) = ([0_u8; 64], [0_u8; 256]);
    // The rest of the path is zeros, which end it.
    if write!(&mut path[..63], "/proc/self/task/{}/stat", AGENT.load(Ordering::Relaxed)).is_err() {
        return false;
    }
    // SAFETY: a path with its end.
    let file = unsafe { raw::call(libc::SYS_open, [path.as_ptr() as usize, libc::O_CLOEXEC as usize, 0, 0, 0, 0]) };
    if raw::error(file).is_some() {
        return false;
    }
    let file = file as usize;
    // SAFETY: reads into memory of this frame, and no more than it has.
    let read = unsafe { raw::call(libc::SYS_read, [file, text.as_mut_ptr() as usize, text.len(), 0, 0, 0]) };
    // SAFETY: the descriptor was opened here.
    unsafe { raw::call(libc::SYS_close, [file, 0, 0, 0, 0, 0]) };
    let text = text.get(..usize::try_from(read).unwrap_or(0)).unwrap_or_default();
    // The thread's name comes before the state, in brackets.
    text.iter().rposition(|byte| *byte == b')').is_some_and(|end| text[end..].starts_with(b") t"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hooks;
    use crate::testing::alone;
    use agent::table;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;

    static IS_OVER: AtomicBool = AtomicBool::new(false);

    /// Has a child stop a thread of this process, as a debugger does, until what is returned is dropped.
    fn stop(thread: i32) -> std::io::PipeWriter {
        let ((mut stopped, tell), (until, keep)) = (std::io::pipe().unwrap(), std::io::pipe().unwrap());
        // SAFETY: plain numbers. This process lets its child trace it.
        unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY) };
        // SAFETY: the child makes system calls only, and ends.
        if unsafe { libc::fork() } == 0 {
            drop((stopped, keep));
            let (nothing, mut byte) = (std::ptr::null_mut::<libc::c_void>(), [0_u8]);
            // SAFETY: traces the thread; its memory is left alone.
            unsafe { libc::ptrace(libc::PTRACE_SEIZE, thread, nothing, nothing) };
            // SAFETY: as above.
            unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, thread, nothing, nothing) };
            // SAFETY: waits for the thread alone.
            unsafe { libc::waitpid(thread, std::ptr::null_mut(), libc::__WALL) };
            let _ = std::io::Write::write(&mut { tell }, &byte);
            let _ = std::io::Read::read(&mut { until }, &mut byte);
            // SAFETY: ends the child, and with it the tracing.
            unsafe { libc::_exit(0) };
        }
        drop((tell, until));
        std::io::Read::read_exact(&mut stopped, &mut [0]).unwrap();
        keep
    }

    #[test]
    fn thread_that_a_debugger_runs_alone_does_not_wait_for_the_agent() {
        if !alone("debugged::tests::thread_that_a_debugger_runs_alone_does_not_wait_for_the_agent") {
            return;
        }
        hooks::init(false);
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            note_agent();
            let _held = table::lock();
            // SAFETY: only returns a number.
            tell.send(unsafe { libc::gettid() }).unwrap();
            while !IS_OVER.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let agent = told.recv().unwrap();
        let keep = stop(agent);
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping where nothing is mapped.
            let at = unsafe { hooks::tests::map(2 << 20, flags) };
            tell.send(at as usize).unwrap();
        });
        let returned = told.recv_timeout(Duration::from_secs(20));
        if !returned.is_ok_and(|at| at != usize::MAX) {
            // All that a test does at its end would wait, too.
            // SAFETY: ends the process of this test.
            unsafe { libc::_exit(77) };
        }
        IS_OVER.store(true, Ordering::Relaxed);
        drop(keep);
    }
}
