//! Stays beside an attached process: stops its threads when the agent asks for that, and takes the agent out again.
//!
//! ```text
//!   the agent asks: Halt --> threads stopped --> Go, or after a second at the latest --> they go on
//!   SIGTERM, SIGINT ------> Leave to the agent --> Left --> its threads have ended --> its mappings are unmapped --> end
//!   the process ends, or executes another program --> end
//! ```
//!
//! If this program is killed, the kernel lets all threads go on. The agent then replaces nothing any more.

use crate::halt::Halts;
use crate::inject::{Injected, borrow_thread};
use crate::remote::Remote;
use crate::threads;
use anyhow::Context;
use host::{Caught, ProcessId, Received, Seqpacket, Signals};
use page::{PAGE_BYTES, PageRange, pages_to_bytes};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Pid;
use std::fs;
use std::time::{Duration, Instant};
use wire::attach::{ATTACH_BYTES, FromAttached, ToAttached};

/// Longest time for which the threads are stopped, whatever the agent says: 1 s.
const LONGEST: Duration = Duration::from_secs(1);
/// Time between two looks whether the process is still there: 1 s.
const TICK: Duration = Duration::from_secs(1);
/// Time between two looks at threads that have yet to stop: 200 us.
const SOON: Duration = Duration::from_micros(200);
/// Time for the agent's threads to end: 10 s.
const END_TIME: Duration = Duration::from_secs(10);

/// The end of the service to one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The process is gone.
    Gone,
    /// The process is as it was before.
    Left,
}

/// One attached process.
pub struct Serving {
    process: ProcessId,
    injected: Range,
    channel: Seqpacket,
    halts: Halts,
    /// When the threads were stopped.
    halted: Option<Instant>,
    /// The agent's threads, as far as they are known.
    own: Vec<u64>,
}

/// Memory of the object.
type Range = std::ops::Range<u64>;

impl Serving {
    /// Begins to serve.
    ///
    /// # Errors
    /// The process has ended.
    pub fn new(process: ProcessId, injected: Injected) -> anyhow::Result<Self> {
        let memory = fs::File::options().read(true).write(true).open(format!("/proc/{}/mem", process.pid))?;
        let halts = Halts::new(process.pid, memory, injected.places);
        let channel = Seqpacket::from_stranger(injected.channel);
        let own = vec![injected.thread.as_raw_nonzero().get().cast_unsigned().into()];
        Ok(Self { process, injected: injected.range, channel, halts, halted: None, own })
    }

    /// Serves until the process ends, or a signal says that the agent is to leave it.
    ///
    /// # Errors
    /// The agent has left, and its mappings could not be unmapped.
    pub fn run(mut self, signals: &Signals) -> anyhow::Result<End> {
        loop {
            self.wait(signals);
            while let Some(caught) = signals.next() {
                if caught == Caught::End {
                    let _ = self.channel.send(&ToAttached::Leave.encode(), &[]);
                }
            }
            let mut buffer = [0; ATTACH_BYTES];
            loop {
                match self.channel.receive_bare(&mut buffer) {
                    Ok(Received::Nothing) => break,
                    Ok(Received::Frame(bytes)) => {
                        if let Some(FromAttached::Left(ranges)) = self.hear(FromAttached::decode(&buffer[..bytes])) {
                            self.halts.go();
                            return self.clear(&ranges).map(|()| End::Left);
                        }
                    }
                    Ok(Received::Closed) | Err(_) => {
                        self.halts.go();
                        return self.end_of_agent();
                    }
                }
            }
            self.halts.let_late_go();
            if self.halted.is_some_and(|since| since.elapsed() > LONGEST) {
                self.go();
            }
            if !self.process.is_alive() {
                return Ok(End::Gone);
            }
        }
    }

    /// Handles a message; returns it if it is the last one.
    fn hear(&mut self, message: Option<FromAttached>) -> Option<FromAttached> {
        match message? {
            FromAttached::Halt { number, threads } => {
                self.own = threads;
                self.go();
                let answer = if self.halts.halt(&self.own) {
                    self.halted = Some(Instant::now());
                    ToAttached::Halted(number)
                } else {
                    ToAttached::NotNow(number)
                };
                if !self.channel.send(&answer.encode(), &[]).is_ok_and(|sent| sent) {
                    self.go();
                }
                None
            }
            FromAttached::Go => {
                self.go();
                None
            }
            left @ FromAttached::Left(_) => Some(left),
        }
    }

    fn go(&mut self) {
        if self.halted.take().is_some() {
            self.halts.go();
        }
    }

    fn wait(&self, signals: &Signals) {
        let time = if self.halts.is_pending() { SOON } else { TICK };
        let mut files = [PollFd::new(&self.channel, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        let _ = poll(&mut files, Timespec::try_from(time).ok().as_ref());
    }

    /// The agent is gone without a word: its process has ended or executes another program, or the agent has a bug.
    fn end_of_agent(&self) -> anyhow::Result<End> {
        let until = Instant::now() + TICK;
        while self.process.is_alive() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(End::Gone)
    }

    /// Unmaps what the agent stood on, once its threads have ended.
    fn clear(&self, ranges: &[PageRange]) -> anyhow::Result<()> {
        let pid = self.process.pid;
        let until = Instant::now() + END_TIME;
        let is_own = |thread: &Pid| self.own.contains(&thread.as_raw_nonzero().get().cast_unsigned().into());
        while threads::list(pid).is_ok_and(|all| all.iter().any(is_own)) {
            anyhow::ensure!(Instant::now() < until, "the agent's threads do not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        let own = PageRange {
            start: page::HostVirt(self.injected.start),
            pages: (self.injected.end - self.injected.start) / PAGE_BYTES as u64,
        };
        let remote = Remote::open(pid)?;
        let unmap = |tracee: &act::Tracee| {
            for range in ranges.iter().chain([&own]) {
                let arguments = [range.start.0, pages_to_bytes(range.pages), 0, 0, 0, 0];
                remote.call(tracee, libc::SYS_munmap, arguments)?;
            }
            Ok(())
        };
        borrow_thread(pid, &remote, &[], unmap).context("cannot unmap the agent")?;
        Ok(())
    }
}
