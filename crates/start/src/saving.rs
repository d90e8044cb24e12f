//! Waits until a machine is idle, and writes its device state.

use crate::vmm;
use anyhow::bail;
use guest::qmp::Qmp;
use host::ProcessId;
use serde_json::json;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Interval over which the use of processors is measured: 500 ms.
const INTERVAL: Duration = Duration::from_millis(500);
/// Largest share of one processor that a machine may use and count as idle: 8%. A guest's timer takes 1 to 3% under
/// emulation.
const IDLE_SHARE: f64 = 0.08;
/// Intervals in a row in which a machine must be idle: 3.
const INTERVALS: u32 = 3;
/// Longest wait for a machine to be idle: 60 s.
const PATIENCE: Duration = Duration::from_secs(60);

/// Limit that QEMU is given for the speed at which it writes the state, in bytes a second. Its own default is lower
/// than a disk's speed.
const BANDWIDTH: u64 = 1 << 40;

/// Waits until a machine is idle, for 60 s at most. A machine that is still busy then is saved in the middle of its
/// work.
pub(crate) fn wait_idle(process: &ProcessId) {
    let ticks = || process.stat().map_or(0, |stat| stat.cpu_ticks);
    let (begin, mut quiet) = (Instant::now(), 0);
    while quiet < INTERVALS && begin.elapsed() < PATIENCE && process.is_alive() {
        let (at, before) = (Instant::now(), ticks());
        sleep(INTERVAL);
        let used = ticks().saturating_sub(before) as f64 / rustix::param::clock_ticks_per_second() as f64;
        quiet = if used / at.elapsed().as_secs_f64() <= IDLE_SHARE { quiet + 1 } else { 0 };
    }
}

/// Stops a machine whose memory is shared with its file, and writes all other state to the file `to`. The machine stays
/// stopped, so memory and disk do not change any more.
pub(crate) fn write_state(qmp: &mut Qmp, to: &Path, deadline: Instant) -> anyhow::Result<()> {
    qmp.execute("stop", json!({}))?;
    vmm::leave_out_memory(qmp, true)?;
    append_state(qmp, to, deadline)
}

/// Appends the state of a machine that is stopped to a file: with its memory, unless that is left out.
pub(crate) fn append_state(qmp: &mut Qmp, to: &Path, deadline: Instant) -> anyhow::Result<()> {
    let quoted = quoted(to);
    qmp.execute("migrate-set-parameters", json!({"max-bandwidth": BANDWIDTH}))?;
    qmp.execute("migrate", json!({"uri": format!("exec:cat >> {quoted}")}))?;
    vmm::wait_for(qmp, "query-migrate", deadline, |status| match status {
        "completed" => Ok(true),
        "failed" | "cancelled" => bail!("QEMU cannot write its state to {}: is there room?", to.display()),
        _ => Ok(false),
    })
}

/// A path as one word of the shell.
pub(crate) fn quoted(path: &Path) -> String {
    format!("'{}'", path.to_string_lossy().replace('\'', r"'\''"))
}
