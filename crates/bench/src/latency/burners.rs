//! The host's load: for each processor a burner, a process that computes for a part of the time.

use anyhow::Context;
use cli::exit::Outcome;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Period of a burner, in which it computes for its part of the time and then sleeps: 10 ms.
const PERIOD: Duration = Duration::from_millis(10);

/// A load of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Host {
    /// No burners.
    Idle,
    /// Burners take 70% of each processor.
    Busy,
    /// Burners take all that they get of each processor.
    Saturated,
}

impl Host {
    /// Name of the load of the host, as in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Busy => "busy",
            Self::Saturated => "saturated",
        }
    }

    /// Part of each processor that burners want, in percent.
    const fn percent(self) -> u32 {
        match self {
            Self::Idle => 0,
            Self::Busy => 70,
            Self::Saturated => 100,
        }
    }
}

/// Arguments of a burner.
#[derive(clap::Args)]
pub struct BurnArgs {
    /// The processor
    #[arg(long)]
    processor: usize,
    /// Part of its time, in percent
    #[arg(long)]
    percent: u32,
}

/// Running burners. Dropping them ends them.
pub struct Burners(Vec<Child>);

impl Burners {
    /// Starts the burners of a load of the host, one on each processor that this process may use.
    ///
    /// # Errors
    /// A burner does not start.
    pub fn start(host: Host) -> anyhow::Result<Self> {
        let mut burners = Self(Vec::new());
        if host.percent() == 0 {
            return Ok(burners);
        }
        let allowed = sched_getaffinity(None).context("cannot ask for this process's processors")?;
        for processor in (0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor)) {
            let child = Command::new(cli::OWN_PROGRAM)
                .args(["bench-guest", "burn", "--processor", &processor.to_string()])
                .args(["--percent", &host.percent().to_string()])
                .stdin(Stdio::piped())
                .spawn()
                .context("cannot start a burner")?;
            burners.0.push(child);
        }
        Ok(burners)
    }
}

impl Drop for Burners {
    fn drop(&mut self) {
        for burner in &mut self.0 {
            // The burner may have ended already.
            let _ = burner.kill();
            let _ = burner.wait();
        }
    }
}

/// Computes until standard input closes, which happens when the bench ends, however it ends.
pub fn burn(args: &BurnArgs) -> anyhow::Result<Outcome> {
    static IS_OVER: AtomicBool = AtomicBool::new(false);
    let mut one = CpuSet::new();
    one.set(args.processor);
    sched_setaffinity(None, &one).context("cannot stay on a processor")?;
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        IS_OVER.store(true, Ordering::Relaxed);
    });
    let part = PERIOD * args.percent / 100;
    while !IS_OVER.load(Ordering::Relaxed) {
        let begin = Instant::now();
        while begin.elapsed() < part {
            std::hint::spin_loop();
        }
        std::thread::sleep(PERIOD.saturating_sub(part.max(begin.elapsed())));
    }
    Ok(Outcome::Done)
}
