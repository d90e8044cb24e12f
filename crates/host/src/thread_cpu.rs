//! Processor time of single threads, to the nanosecond: `/proc/PID/task/TID/schedstat`.

use crate::{Error, Result, text};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// A thread, and the processor time that it has used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadCpu {
    /// The thread's id; the first thread's is the pid.
    pub tid: u32,
    /// Its name, which it can set itself.
    pub name: String,
    /// Processor time since it started, in user mode and in the kernel.
    pub used: Duration,
    /// Time since it started in which it could have run, and waited for a processor.
    pub waited: Duration,
}

impl ThreadCpu {
    /// All threads of a process. Threads that have ended are missing, and the processor time that they used is, too.
    ///
    /// # Errors
    /// [`Error::is_gone`] when the process has ended.
    pub fn of_process(pid: u32) -> Result<Vec<Self>> {
        let path = PathBuf::from(format!("/proc/{pid}/task"));
        let listing = fs::read_dir(&path).map_err(|e| Error::file("list", &path, e))?;
        let tids = listing.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        // A thread that ends during the listing is left out.
        Ok(tids.filter_map(|tid| Self::read(pid, tid).ok()).collect())
    }

    fn read(pid: u32, tid: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/task/{tid}/schedstat");
        let (used, waited) = parse(&text::read(&path)?).ok_or_else(|| Error::Malformed {
            path: path.into(),
            line: 1,
            problem: "not the three numbers that the kernel documents".into(),
        })?;
        let name = text::read(format!("/proc/{pid}/task/{tid}/comm"))?.trim_end_matches('\n').to_owned();
        Ok(Self { tid, name, used, waited })
    }
}

/// Parses `used waited slices`, where times are in nanoseconds, and returns the first two.
fn parse(schedstat: &str) -> Option<(Duration, Duration)> {
    let mut times = schedstat.split_ascii_whitespace().map(|time| Some(Duration::from_nanos(time.parse().ok()?)));
    Some((times.next()??, times.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::time::{ClockId, clock_gettime};

    #[test]
    fn busy_thread_is_told_from_sleeping_one() {
        assert_eq!(
            parse("394488344 203654297 843\n"),
            Some((Duration::from_nanos(394_488_344), Duration::from_nanos(203_654_297)))
        );
        let (send, receive) = std::sync::mpsc::channel::<()>();
        let (is_there, there) = std::sync::mpsc::channel();
        let sleeper = std::thread::Builder::new().name("sleeper".into()).spawn(move || {
            is_there.send(()).unwrap();
            receive.recv()
        });
        there.recv().unwrap();
        let worker = std::thread::Builder::new().name("worker".into()).spawn(|| {
            let is_over = |used: rustix::time::Timespec| used.tv_sec > 0 || used.tv_nsec >= 60_000_000;
            while !is_over(clock_gettime(ClockId::ThreadCPUTime)) {}
            ThreadCpu::of_process(std::process::id()).unwrap()
        });
        let threads = worker.unwrap().join().unwrap();
        let used = |name: &str| threads.iter().find(|t| t.name == name).map(|t| t.used).unwrap();
        assert!(used("worker") >= Duration::from_millis(20), "{threads:?}");
        assert!(used("sleeper") < Duration::from_millis(10), "{threads:?}");
        drop(send);
        let _ = sleeper.unwrap().join();
        assert!(ThreadCpu::of_process(0).unwrap_err().is_gone());
    }
}
