//! Processor time of a service that balances memory between many guests, while nothing happens.

use super::rig::{self, Rig};
use crate::guardian::Guardian;
use crate::serving::Serving;
use anyhow::{Context, bail};
use cli::say;
use host::ProcessStat;
use serde::Serialize;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time for guests to become idle after their boot, and for the balancer to look at all of them: 60 s.
const SETTLE: Duration = Duration::from_secs(60);
/// Time over which the service's processor time is measured: 60 s.
const MEASURED: Duration = Duration::from_secs(60);
/// Most processor time of supervisor, prover and balancer together, in percent of a processor: 0.5%.
const MOST_PERCENT: f64 = 0.5;
/// Most guests that are started at once: 10.
const AT_ONCE: usize = 10;

/// The figures.
#[derive(Debug, Serialize)]
pub struct Figures {
    /// Number of guests.
    guests: usize,
    /// Processor time of the balancer, in percent of a processor.
    balancer_cpu_percent: f64,
    /// The same of supervisor, prover and balancer together.
    service_cpu_percent: f64,
}

impl Figures {
    /// Whether supervisor, prover and balancer used less processor time than `MOST_PERCENT`.
    pub fn is_good(&self) -> bool {
        self.service_cpu_percent < MOST_PERCENT
    }

    /// The result as text.
    pub fn text(&self) -> String {
        format!(
            "idle: {} guests: {:.2}% of a processor by the service, of which {:.2}% by its balancer\n",
            self.guests, self.service_cpu_percent, self.balancer_cpu_percent
        )
    }
}

/// Measures a service with this number of idle guests.
///
/// # Errors
/// Guests or the service do not start.
pub fn run(dir: &Path, guests: usize, guardian: &mut Guardian) -> anyhow::Result<Figures> {
    let group = rig::group();
    let config = format!("[balance]\n[[guest]]\nname = '{group}-*'\nguaranteed = '{}'\n", rig::KEPT);
    let serving = Serving::start(dir, &config, guardian)?;
    let rig = Rig::new(dir, guardian)?;
    for started in (0..guests).step_by(AT_ONCE) {
        say!("pagefold: idle: {started} of {guests} guests run");
        rig.up(AT_ONCE.min(guests - started), &[])?;
    }
    std::thread::sleep(SETTLE);
    let pids = children_of(serving.pid())?;
    let is_balancer = |pid: &&u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|word| word == b"balance")
    };
    let balancer = *pids.iter().find(is_balancer).context("the service runs no balancer")?;
    let ticks = |pid: u32| ProcessStat::read(pid).map(|stat| stat.cpu_ticks);
    let all = |pids: &[u32]| -> anyhow::Result<u64> { pids.iter().map(|pid| Ok(ticks(*pid)?)).sum() };
    let everyone: Vec<u32> = pids.iter().copied().chain([serving.pid()]).collect();
    let (began, of_balancer, of_all) = (Instant::now(), ticks(balancer)?, all(&everyone)?);
    std::thread::sleep(MEASURED);
    let seconds = began.elapsed().as_secs_f64();
    if children_of(serving.pid())? != pids {
        bail!("processes of the service ended, or were started, while they were measured");
    }
    let percent = |ticks: u64| 100.0 * ticks as f64 / rustix::param::clock_ticks_per_second() as f64 / seconds;
    let figures = Figures {
        guests,
        balancer_cpu_percent: percent(ticks(balancer)? - of_balancer),
        service_cpu_percent: percent(all(&everyone)? - of_all),
    };
    rig.down()?;
    Ok(figures)
}

/// Process ids of a process's children.
fn children_of(pid: u32) -> anyhow::Result<Vec<u32>> {
    let mut all = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("children"))?;
        all.extend(text.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
    }
    all.sort_unstable();
    Ok(all)
}
