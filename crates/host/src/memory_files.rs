//! Files of `/proc` about what the threads of a process have in common: its memory, arguments, program and open files.
//!
//! `/proc/PID` shows what the first thread has. A program may end its first thread before the others, as with
//! `pthread_exit` in `main`, and live on. The ended thread has no memory and no open files any more: its files in
//! `/proc` are empty or cannot be opened. The same files of the other threads still show everything.

use crate::ProcessStat;
use std::fs;
use std::path::PathBuf;

/// The path of `file` in `/proc`, by a thread of process `pid` that has not ended.
pub fn proc_file(pid: u32, file: &str) -> PathBuf {
    file_of(pid, thread_with_memory(pid), file)
}

/// The path of `file` in `/proc`, by this thread of process `pid`.
pub fn file_of(pid: u32, thread: u32, file: &str) -> PathBuf {
    if thread == pid {
        return format!("/proc/{pid}/{file}").into();
    }
    format!("/proc/{pid}/task/{thread}/{file}").into()
}

/// A thread of process `pid` that has not ended. This is the first thread for nearly every process; it is also returned
/// if no thread is left.
pub fn thread_with_memory(pid: u32) -> u32 {
    let has_others = |stat: ProcessStat| stat.has_no_first_thread() && !stat.has_ended();
    if !ProcessStat::of_thread(format!("/proc/{pid}/stat")).is_ok_and(has_others) {
        return pid;
    }
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let threads = threads.filter_map(|thread| thread.file_name().to_str()?.parse::<u32>().ok());
    let lives = |thread: &u32| {
        let stat = ProcessStat::of_thread(format!("/proc/{pid}/task/{thread}/stat"));
        stat.is_ok_and(|stat| !stat.has_no_first_thread())
    };
    threads.into_iter().find(lives).unwrap_or(pid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mapping, MemoryCounters, Pagemap, Process, ProcessId, ProcessMemory, Usage, open_files, runs_program};
    use page::PAGE_BYTES;
    use std::fs::File;
    use std::io::Read;
    use std::process::{Command, Stdio};

    /// Ends its first thread (system call 60), once it has said that another one goes on.
    const SCRIPT: &str = "
import ctypes, threading, time
threading.Thread(target=lambda: time.sleep(600)).start()
print('ready', flush=True)
ctypes.CDLL(None).syscall(60, 0)";

    #[test]
    fn process_lives_and_is_looked_at_without_its_first_thread() {
        let mut child = Command::new("/usr/bin/python3").args(["-c", SCRIPT]).stdout(Stdio::piped()).spawn().unwrap();
        let (pid, id) = (child.id(), ProcessId::of(child.id()).unwrap());
        let mut said = [0; 5];
        child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
        while !ProcessStat::read(pid).unwrap().has_no_first_thread() {}
        assert_eq!(fs::read(format!("/proc/{pid}/maps")).map_or(0, |maps| maps.len()), 0, "the kernel shows nothing");

        let stat = id.stat().expect("it lives");
        assert!(id.is_alive() && id.ending().is_none() && !stat.loading && stat.layout.is_some(), "{stat:?}");
        assert_ne!(thread_with_memory(pid), pid);
        let process = Process::read(pid).unwrap();
        assert!(process.exe.is_some() && process.cmdline.len() == 3, "{process:?}");
        assert_eq!(runs_program(pid, process.program()), Some(true));
        assert!(Usage::of(pid).unwrap().rss_bytes > 1 << 20);
        assert!(MemoryCounters::of(pid).unwrap().resident_pages > 256);
        assert!(crate::anonymous_bytes(pid).unwrap() > 0 && crate::page_table_bytes(pid).unwrap() > 0);
        assert!(open_files(pid).unwrap().len() >= 3);
        let all = Mapping::list(pid).unwrap();
        let code = all.iter().find(|mapping| mapping.inode != 0).unwrap();
        assert!(File::open(code.file_path(pid)).is_ok());
        let pagemap = Pagemap::open(pid).unwrap();
        assert!(pagemap.is_alive() && !pagemap.present_ranges(code.start, code.end).unwrap().is_empty());
        let (memory, mut bytes) = (ProcessMemory::open(pid).unwrap(), [0; 4]);
        memory.read_bytes(code.start, &mut bytes).unwrap();
        assert_eq!(&bytes, b"\x7fELF");
        let range = crate::PageRange { start: code.start, pages: 1 };
        let mut page = [0; PAGE_BYTES];
        assert_eq!((memory.read_unshared(&[range], &mut page).unwrap(), &page[..4]), (1, &bytes[..]));

        assert!(id.kill());
        while id.is_alive() {}
        id.collect();
        assert!(child.wait().is_err(), "it was collected already");
        assert_eq!(thread_with_memory(pid), pid);
    }
}
