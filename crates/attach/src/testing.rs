//! Programs for tests to stop: Python that makes bare system calls, and says how they ended.

use crate::halt::Halts;
use crate::program::Program;
use crate::threads::{self, Doing};
use crate::waited::Clocks;
use act::trace::Tracee;
use rustix::process::Pid;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Longest time that a test waits for anything: 120 s.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Beginning of each program, which prints `begun` when it runs. `call` makes a system call, and prints its name, what
/// it returned or its error, and the milliseconds that it took.
const PRELUDE: &str = "
import ctypes, errno, fcntl, mmap, os, select, signal, socket, struct, sys, tempfile, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def raw(number, *arguments):
    wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return libc.syscall(ctypes.c_long(number), *wide)
def say(*words):
    os.write(1, (' '.join(map(str, words)) + '\\n').encode())
def call(name, number, *arguments):
    began = time.monotonic()
    answer = raw(number, *arguments)
    why = errno.errorcode.get(ctypes.get_errno(), '?') if answer < 0 else answer
    say(name, why, int((time.monotonic() - began) * 1000))
def apart(*call_of):
    threading.Thread(target=call, args=call_of, daemon=True).start()
def wait_for_end():
    sys.stdin.read()
    time.sleep(0.1)
    say('end')
    os._exit(0)
say('begun')
";

/// A running program, which is killed when this is dropped.
pub struct Subject {
    child: Child,
    lines: Receiver<String>,
}

impl Subject {
    /// Starts Python with this script, behind [`PRELUDE`].
    pub fn start(script: &str) -> Self {
        let mut command = Command::new("python3");
        command.args(["-c", &format!("{PRELUDE}\n{script}")]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("run python3");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let (sender, lines) = channel();
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let subject = Self { child, lines };
        // It may have become Python by a script, whose memory is another's.
        assert_eq!(subject.line(), "begun");
        subject
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its first thread.
    pub fn leader(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Its process and memory, as [`Halts`] needs them.
    pub fn program(&self) -> Program {
        Program::open(self.pid()).expect("its memory")
    }

    /// A new [`Halts`], which can stop its threads.
    pub fn halts(&self) -> Halts {
        Halts::new(self.program(), Clocks::default())
    }

    /// Writes a line to its standard input.
    pub fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().expect("a pipe"), "{line}").expect("it reads");
    }

    /// Closes its standard input, at which it ends.
    pub fn tell_to_end(&mut self) {
        drop(self.child.stdin.take());
    }

    /// The next line that it prints; `None` if there is none within `time`.
    pub fn line_within(&self, time: Duration) -> Option<String> {
        match self.lines.recv_timeout(time) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => panic!("it has ended"),
        }
    }

    /// The line that it says next.
    pub fn line(&self) -> String {
        self.line_within(PATIENCE).expect("it says nothing")
    }

    /// The next line that it prints. Its threads are looked after meanwhile ([`Halts::tend`]).
    pub fn line_with(&self, halts: &mut Halts) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            halts.tend();
            if let Some(line) = self.line_within(Duration::from_millis(1)) {
                return line;
            }
            assert!(Instant::now() < until, "it says nothing");
        }
    }

    /// The calls in which its threads sleep.
    pub fn calls(&self) -> BTreeSet<i64> {
        let doing = |thread| match threads::doing(self.pid(), thread) {
            Doing::Call(call) => Some(call.number),
            _ => None,
        };
        threads::list(self.pid()).expect("it runs").into_iter().filter_map(doing).collect()
    }

    /// Waits until threads sleep in each of these calls.
    pub fn wait_for_calls(&self, numbers: &[i64]) {
        wait_for("threads sleep in all calls", || {
            let calls = self.calls();
            numbers.iter().all(|number| calls.contains(number))
        });
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let until = Instant::now() + PATIENCE;
        // A test that fails may leave threads traced. The kernel keeps the process until their tracer has heard of
        // their end.
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            let leader = self.leader();
            for thread in threads::list(self.pid()).unwrap_or_default().into_iter().filter(|thread| *thread != leader) {
                let _ = Tracee::of_clone(thread).look();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Waits until `holds` returns true. `what` is the message of the failure.
pub fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Stops all threads, which may take several tries on a busy machine.
pub fn halt(halts: &mut Halts, own: &[u64]) {
    wait_for("all threads are stopped", || halts.halt(own));
}
