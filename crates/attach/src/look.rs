//! Answers questions of the agent about its process (open files, sockets, file systems), by system calls that the
//! process's own seccomp filter may forbid. The answers are about that process alone, and nobody else gets them.

use crate::threads;
use act::file_of_thread;
use act::trace::share_files;
use host::{ForeignFile, SocketKind, filesystem_of_mount_of};
use rustix::io::Errno;
use rustix::process::Pid;
use wire::attach::{ASKED_MOST, Question, Socket};

/// The answer to a question from the agent in process `pid`. `agent` is one of the agent's threads.
pub fn answer(pid: u32, agent: Pid, question: &Question) -> Vec<u64> {
    match question {
        Question::Tables => tables(pid, agent),
        Question::Sockets { thread, files } => {
            let found = thread_of(pid, *thread);
            let look = |number: &u64| found.map_or(Socket::Unknown, |thread| socket(thread, *number));
            files.iter().map(|number| look(number).encode()).collect()
        }
        Question::FileSystem(mount) => filesystem_of_mount_of(pid, *mount).into_iter().map(u64::from).collect(),
    }
}

/// One thread of each table of open files, by thread ids in the process's PID namespace. Empty if there are more than
/// an answer may have.
fn tables(pid: u32, agent: Pid) -> Vec<u64> {
    // The first thread stays in the list when it has ended. Others leave it.
    let is_first = |thread: Pid| u32::try_from(thread.as_raw_nonzero().get()) == Ok(pid);
    let counts = |thread: &Pid| !is_first(*thread) || threads::runs_program(pid, *thread);
    let threads = threads::list(pid).unwrap_or_default().into_iter().filter(counts);
    let found = host::one_of_each_table(threads, Some(agent), share_files);
    if found.len() > ASKED_MOST {
        return Vec::new();
    }
    // A thread that has ended has no number any more, and gets 0. The agent finds no thread by the number 0, and asks
    // again.
    found.into_iter().map(|thread| threads::inner(pid, thread).unwrap_or(0)).collect()
}

/// The thread that has this id in the process's own PID namespace.
fn thread_of(pid: u32, number: u64) -> Option<Pid> {
    threads::list(pid).ok()?.into_iter().find(|thread| threads::inner(pid, *thread) == Some(number))
}

fn socket(thread: Pid, number: u64) -> Socket {
    let Ok(number) = i32::try_from(number) else { return Socket::Unknown };
    match file_of_thread(thread, number) {
        // The program may have closed it meanwhile, and closing the last descriptor of a file may wait.
        Ok(file) => match SocketKind::of(ForeignFile::from(file)) {
            Ok(SocketKind { family, transformed }) => Socket::Open { family: family.into(), transformed },
            // The descriptor stands for another file by now.
            Err(Errno::NOTSOCK) => Socket::Closed,
            Err(_) => Socket::Unknown,
        },
        Err(e) if matches!(e.raw_os_error(), Some(libc::EBADF | libc::ESRCH)) => Socket::Closed,
        Err(_) => Socket::Unknown,
    }
}
