//! Asks a shell inside a guest, over the guest's console.

use anyhow::Context;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest time for a woken guest to answer: 1 min.
const ANSWERED_WITHIN: Duration = Duration::from_secs(60);

/// A shell that runs at a guest's console. It answers without starting a process.
pub struct Shell {
    console: UnixStream,
    answers: u32,
}

impl Shell {
    /// The shell at the console with this socket.
    ///
    /// # Errors
    /// No shell answers.
    pub fn at(console: &Path) -> anyhow::Result<Self> {
        let stream =
            UnixStream::connect(console).with_context(|| format!("cannot connect to {}", console.display()))?;
        stream.set_read_timeout(Some(ANSWERED_WITHIN))?;
        let mut shell = Self { console: stream, answers: 0 };
        // The console starts its shell when it gets a line.
        shell.console.write_all(b"\n")?;
        shell.answer().context("no shell answers at the console")?;
        Ok(shell)
    }

    /// Has the shell compute a sum, and waits for the result. The console echoes the question, in which the result does
    /// not occur.
    ///
    /// # Errors
    /// The guest does not answer in time.
    pub fn answer(&mut self) -> anyhow::Result<()> {
        self.answers += 1;
        self.console.write_all(format!("echo s$((1000000+{}))s\n", self.answers).as_bytes())?;
        let wanted = format!("s{}s", 1_000_000 + self.answers);
        let (mut heard, mut chunk) = (Vec::new(), [0_u8; 4096]);
        while !String::from_utf8_lossy(&heard).contains(&wanted) {
            let n = self.console.read(&mut chunk).context("no answer from inside")?;
            anyhow::ensure!(n > 0, "the guest has ended");
            heard.extend_from_slice(&chunk[..n]);
        }
        Ok(())
    }
}

/// Milliseconds that have passed since this moment.
pub fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}
