//! Clients: threads that send requests at a fixed rate, or listen to a program, until their load ends.

use super::samples::{Samples, now_ns};
use anyhow::Context;
use std::io::{self, BufReader, Write};
use std::net::Shutdown;
use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Niceness of a client's threads: if they were scheduled late, answers would seem to be late.
const NICENESS: i32 = -20;

/// Running threads of a client. Dropping it ends them.
#[derive(Default)]
pub struct Client {
    /// The times of operations that the client has measured.
    pub samples: Arc<Samples>,
    threads: Vec<JoinHandle<()>>,
    streams: Vec<UnixStream>,
}

impl Client {
    /// A client that has no threads yet.
    pub fn of(samples: Samples) -> Self {
        Self { samples: Arc::new(samples), threads: Vec::new(), streams: Vec::new() }
    }

    /// Starts a thread of the client. It is to end when `samples` are over, or a stream of `Self::keep` is shut down.
    /// An error of the thread counts as a failure of the load.
    ///
    /// # Errors
    /// The system allows no further thread.
    pub fn go(&mut self, work: impl FnOnce(&Samples) -> anyhow::Result<()> + Send + 'static) -> anyhow::Result<()> {
        let samples = Arc::clone(&self.samples);
        let thread = move || {
            // Without the right to raise the priority, times are longer in all arms alike.
            let _ = rustix::process::setpriority_process(None, NICENESS);
            let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
            if let Err(e) = work(&samples) {
                samples.fail(format!("{e:#}"));
            }
        };
        let started = std::thread::Builder::new().name("client".to_owned()).spawn(thread);
        self.threads.push(started.context("cannot start a client")?);
        Ok(())
    }

    /// Has this stream shut down when the client is dropped, which ends threads that read from it.
    ///
    /// # Errors
    /// Too many files are open.
    pub fn keep(&mut self, stream: &UnixStream) -> anyhow::Result<()> {
        self.streams.push(stream.try_clone().context("cannot open a connection twice")?);
        Ok(())
    }

    /// A client that sends this many requests a second to a server. `request` makes the next request, and `answer`
    /// reads the next answer.
    ///
    /// # Errors
    /// The server does not accept connections.
    pub fn asking(
        socket: &str,
        rate: u32,
        mut request: impl FnMut() -> String + Send + 'static,
        mut answer: impl FnMut(&mut BufReader<UnixStream>) -> io::Result<()> + Send + 'static,
    ) -> anyhow::Result<Self> {
        let mut stream = UnixStream::connect(socket).with_context(|| format!("cannot connect to {socket}"))?;
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut client = Self::default();
        client.keep(&stream)?;
        let begin_ns = now_ns();
        let due_ns = move |n: u64| begin_ns + n * 1_000_000_000 / u64::from(rate);
        client.go(move |samples| {
            for n in (0..).take_while(|_| !samples.is_over()) {
                std::thread::sleep(Duration::from_nanos(due_ns(n).saturating_sub(now_ns())));
                stream.write_all(request().as_bytes()).context("cannot ask")?;
            }
            Ok(())
        })?;
        client.go(move |samples| {
            for n in (0..).take_while(|_| !samples.is_over()) {
                answer(&mut reader).context("no answer")?;
                samples.add(due_ns(n), now_ns().saturating_sub(due_ns(n)));
            }
            Ok(())
        })?;
        Ok(client)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.samples.end();
        for stream in &self.streams {
            // The server may have closed the connection.
            let _ = stream.shutdown(Shutdown::Both);
        }
        for thread in self.threads.drain(..) {
            // A thread that has panicked has printed why.
            let _ = thread.join();
        }
    }
}

/// Pseudo-random numbers, the same in each run.
pub struct Numbers(u64);

impl Numbers {
    /// Begins the sequence of numbers.
    pub const fn new() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }

    /// The next number below `end`.
    pub const fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, Read};
    use std::os::unix::net::UnixListener;

    #[test]
    fn requests_are_due_while_server_stands_still() {
        let socket = std::env::temp_dir().join(format!("pagefold-latency-{}", std::process::id()));
        let listener = UnixListener::bind(&socket).unwrap();
        let (go_on, may_go_on) = std::sync::mpsc::channel::<()>();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            may_go_on.recv().unwrap();
            let mut byte = [0];
            while stream.read_exact(&mut byte).is_ok() && stream.write_all(b"\n").is_ok() {}
        });
        let answer = |reader: &mut BufReader<UnixStream>| match reader.read_line(&mut String::new())? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        };
        let client = Client::asking(socket.to_str().unwrap(), 1000, || "x".to_owned(), answer).unwrap();
        let begin_ns = now_ns();
        std::thread::sleep(Duration::from_millis(200));
        go_on.send(()).unwrap();
        let window = client.samples.take(begin_ns, begin_ns + 100_000_000).unwrap();
        drop(client);
        server.join().unwrap();
        std::fs::remove_file(socket).unwrap();
        // All were due in the stall, a millisecond apart, and waited for the rest of it.
        assert!((99..=101).contains(&window.took_ns.len()), "{window:?}");
        assert!(window.took_ns[0] > 99_000_000 && window.ended == 0, "{window:?}");
    }
}
