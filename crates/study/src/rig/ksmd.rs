//! ksmd as a merger, at the rate that an arm names. Its `smart_scan` and advisor stay as the host has them, unless a
//! study changes them; the result tells their values.

use super::fold::of_process;
use act::set_ksm;
use anyhow::Context;
use host::Ksm;

/// ksmd's knobs for a rate: pages between two sleeps, and the milliseconds of a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate(pub u64, pub u64);

impl Rate {
    /// The rate of an arm, by its name: pages a second, the kernel's default, or as fast as can be.
    pub fn of(arm: &str) -> Option<Self> {
        match arm.strip_prefix("ksm")? {
            "" => Some(Self(1_000_000, 0)),
            "-default" => Some(Self(100, 20)),
            "-1k" => Some(Self(20, 20)),
            "-5k" => Some(Self(100, 20)),
            "-10k" => Some(Self(200, 20)),
            "-50k" => Some(Self(1000, 20)),
            "-100k" => Some(Self(2000, 20)),
            _ => None,
        }
    }
}

/// ksmd, and the rate at which it merges.
pub struct Ksmd {
    pid: u32,
    rate: Rate,
    use_zero_pages: bool,
}

impl Ksmd {
    /// Finds ksmd's thread.
    ///
    /// # Errors
    /// There is no such thread in this PID namespace.
    pub fn find(rate: Rate, use_zero_pages: bool) -> anyhow::Result<Self> {
        let is_ksmd = |pid: &u32| {
            let process = host::Process::read(*pid);
            process.is_ok_and(|p| p.stat.kernel_thread && p.comm == "ksmd")
        };
        let pid = host::pids()?.into_iter().find(is_ksmd).context("there is no thread ksmd in this PID namespace")?;
        Ok(Self { pid, rate, use_zero_pages })
    }

    /// Has ksmd merge at its rate.
    pub fn on(&self) -> anyhow::Result<()> {
        self.set_rate(self.rate)?;
        set_where_known("use_zero_pages", if self.use_zero_pages { "1" } else { "0" })?;
        Ok(set_ksm("run", "1")?)
    }

    /// Stops ksmd. Merged pages stay merged.
    pub fn hold() -> anyhow::Result<()> {
        Ok(set_ksm("run", "0")?)
    }

    /// Has the kernel make all merged pages private, and stops ksmd.
    pub fn undo() -> anyhow::Result<()> {
        set_ksm("run", "2")?;
        Ok(set_ksm("run", "0")?)
    }

    /// Changes ksmd's rate while it runs.
    pub fn set_rate(&self, Rate(pages, sleep): Rate) -> anyhow::Result<()> {
        set_ksm("pages_to_scan", &pages.to_string())?;
        Ok(set_ksm("sleep_millisecs", &sleep.to_string())?)
    }

    /// From here on, ksmd scans each page in each round, on kernels where it may leave some out (`smart_scan`).
    pub fn scan_every_page(&self) -> anyhow::Result<()> {
        set_where_known("smart_scan", "0")
    }

    /// Process id of ksmd.
    pub const fn pid(&self) -> u32 {
        self.pid
    }

    /// Processor time of ksmd so far, in seconds.
    pub fn cpu_s(&self) -> anyhow::Result<f64> {
        of_process(self.pid, None)
    }
}

/// Sets a knob. A kernel without the knob lacks the feature, and nothing is done.
fn set_where_known(knob: &str, value: &str) -> anyhow::Result<()> {
    match set_ksm(knob, value) {
        Err(e) if e.is_gone() => Ok(()),
        done => Ok(done?),
    }
}

/// Number of writes to merged pages so far, over all processes. Fails on a kernel that does not count them (`cow_ksm`).
pub fn broken_pages() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/vmstat").context("cannot read /proc/vmstat")?;
    let count = text.lines().find_map(|line| line.strip_prefix("cow_ksm ")?.parse().ok());
    count.context("this kernel does not count writes to merged pages: cow_ksm in /proc/vmstat")
}

/// KSM's counters in sysfs.
pub fn account() -> anyhow::Result<Ksm> {
    Ksm::read().context("KSM cannot be read any more")
}
