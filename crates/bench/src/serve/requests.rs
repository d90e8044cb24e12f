//! Sends requests to the web side one after the other, and takes the time of each.

use anyhow::{Context, bail};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Shortest pause between two requests: 20 ms.
const PAUSE: Duration = Duration::from_millis(20);
/// Pause after a request, as a multiple of the time that the answer took. The web side spends at most a tenth of its
/// time on one caller.
const PAUSE_TIMES: u32 = 12;
/// Longest pause between two requests: 500 ms.
const MOST_PAUSE: Duration = Duration::from_millis(500);
/// Fewest requests that are timed.
const FEWEST: usize = 10;
/// Interval between two checks how many requests were timed: 100 ms.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Time limit for an answer: 30 s.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time limit for the web side to start: 20 s.
const START_PATIENCE: Duration = Duration::from_secs(20);

/// Durations of requests, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// Number of requests.
    pub requests: usize,
    /// Their median.
    pub p50_ms: f64,
    /// Their 99th percentile.
    pub p99_ms: f64,
}

/// A thread that sends requests and takes their times. Dropping it ends the thread.
pub struct Prober {
    over: Arc<AtomicBool>,
    timed: Arc<AtomicUsize>,
    thread: Option<JoinHandle<anyhow::Result<Vec<f64>>>>,
}

impl Prober {
    /// Begins to send requests to this socket: for all groups, for this group, and for the metrics, in turns.
    pub fn start(socket: PathBuf, group: String) -> Self {
        let (over, timed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let thread = {
            let (over, timed) = (Arc::clone(&over), Arc::clone(&timed));
            std::thread::spawn(move || ask(&socket, &group, &over, &timed))
        };
        Self { over, timed, thread: Some(thread) }
    }

    /// Waits until this many requests were timed, or for the longest time.
    pub fn wait_for(&self, requests: usize, longest: Duration) {
        let begin = Instant::now();
        while self.timed.load(Ordering::Relaxed) < requests && begin.elapsed() < longest {
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Ends the thread, and returns the times of all requests.
    ///
    /// # Errors
    /// A request failed.
    pub fn finish(&mut self) -> anyhow::Result<Times> {
        self.over.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("the requests are over already")?;
        let mut times = thread.join().map_err(|_| anyhow::anyhow!("the requests ended early"))??;
        times.sort_by(f64::total_cmp);
        let at = |part: usize| times.get(times.len() * part / 100).copied().unwrap_or(f64::NAN);
        Ok(Times { requests: times.len(), p50_ms: at(50), p99_ms: at(99) })
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        // An error here says nothing new: either `finish` was called before, or the bench is failing for another
        // reason.
        let _ = self.finish();
    }
}

fn ask(socket: &Path, group: &str, over: &AtomicBool, timed: &AtomicUsize) -> anyhow::Result<Vec<f64>> {
    let begin = Instant::now();
    while let Err(e) = answer(socket, "/v1/groups") {
        if begin.elapsed() > START_PATIENCE {
            return Err(e.context("the web side does not answer"));
        }
        std::thread::sleep(PAUSE);
    }
    let paths = ["/v1/groups".to_owned(), format!("/v1/groups/{group}"), "/metrics".to_owned()];
    let mut times = Vec::new();
    let mut last = Duration::ZERO;
    for path in paths.iter().cycle() {
        std::thread::sleep((last * PAUSE_TIMES).clamp(PAUSE, MOST_PAUSE));
        if over.load(Ordering::Relaxed) && times.len() >= FEWEST {
            break;
        }
        let began = Instant::now();
        answer(socket, path)?;
        last = began.elapsed();
        times.push(last.as_secs_f64() * 1e3);
        timed.store(times.len(), Ordering::Relaxed);
    }
    Ok(times)
}

/// Sends a request over a new connection, and reads the whole answer.
fn answer(socket: &Path, path: &str) -> anyhow::Result<()> {
    let mut stream = UnixStream::connect(socket).context("cannot connect to the web side")?;
    stream.set_read_timeout(Some(PATIENCE)).context("cannot set a time limit")?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: pagefold\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).with_context(|| format!("cannot ask for {path}"))?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).with_context(|| format!("no answer for {path}"))?;
    if !answer.starts_with(b"HTTP/1.1 200 ") {
        let answer = String::from_utf8_lossy(&answer);
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        bail!("{path} was answered with {}: {body}", head.lines().next().unwrap_or_default());
    }
    Ok(())
}
