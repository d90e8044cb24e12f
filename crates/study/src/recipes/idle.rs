//! `agarwal-s6.6.3`: idle pages of a guest that could be given back, and what giving back costs.
//!
//! ```text
//!   a load runs once -> idle pages by the guest's own page descriptors -> all of /usr is read once -> idle pages again
//!     -> page cache is dropped, or kept -> frames of the guest -> the load, timed
//! ```
//! A balloon that reports free pages has QEMU discard them; without it, a dropped page stays backed by the host.

use super::{D512, alike, as_guests, rep_of};
use crate::plan::Planned;
use crate::record::{Measured, OPERATIONS};
use crate::rig::{Rig, System, Vms, VmsWanted, frames_of, mb, pause};
use anyhow::{Context, ensure};
use bench::workload::{TABLE_SCRIPT, Timed};
use std::time::{Duration, Instant};
use survey::{Inside, Request, take};

/// Guests with a balloon that reports free pages.
const REPORTING: System =
    System { devices: &["-device", "virtio-balloon-pci,free-page-reporting=on"], ..System::DEBIAN };
/// The load: point selects of a database.
const LOAD: Timed = Timed::PointSelect;
/// Seconds of the load, and of its first run.
const SECONDS: [u32; 2] = [10, 2];
/// Reads each file of /usr once.
const READ: &str = "find /usr -xdev -type f -exec cat {} + > /dev/null; sync";
/// Drops the page cache.
const DROP: &str = "echo 3 > /proc/sys/vm/drop_caches";
/// Time limit for free pages to be returned to the host. The kernel reports them every 2 s.
const GIVEN_BACK: Duration = Duration::from_secs(30);
/// Pause between two readings of the guest's page frames.
const LOOK: Duration = Duration::from_secs(4);
/// When two readings differ by less than one in this many frames, all free pages count as returned.
const STILL: usize = 200;

/// Idle memory of a guest.
struct Idle {
    /// Pages on an inactive list of the guest's kernel, not referenced lately, whose content no other memory holds.
    idle_pages: u64,
    /// Pages of its RAM that the host backs.
    backed_pages: u64,
}

impl Idle {
    fn of(vms: &Vms) -> anyhow::Result<Self> {
        let guests = as_guests(vms)?;
        let inside = guests.iter().map(|guest| Inside::of(guest, None, false)).collect::<host::Result<Vec<_>>>()?;
        let findings = take(&Request { inside: &inside, ..Request::of(&guests) })?.0;
        let found = findings.guests.first().context("a census without the guest")?;
        let backed_pages = found.kinds.iter().map(|kind| kind.backed_pages).sum();
        ensure!(backed_pages > 0, "the kinds of the guest's pages are not known");
        Ok(Self { idle_pages: found.idle_pages.inactive_unique, backed_pages })
    }

    fn share(&self) -> f64 {
        self.idle_pages as f64 / self.backed_pages as f64
    }
}

/// The recipe of `agarwal-s6.6.3`.
pub fn given_back(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let drops = planned.arm == "dropped";
    let system = if drops { REPORTING } else { System::BALLOONED };
    let mut nobody = rig.merger("off", &[])?;
    let vms = rig.vms(&VmsWanted { system, ..alike(1, rep_of(planned), D512) }, &mut nobody)?;
    vms.tell(&vms.guests, TABLE_SCRIPT)?;
    vms.run_first(LOAD, SECONDS[1])?;
    vms.settle()?;
    let idle = Idle::of(&vms)?;
    vms.tell(&vms.guests, READ)?;
    let read = Idle::of(&vms)?;
    let pid = vms.pids()[0];
    let frames = || anyhow::Ok(frames_of(pid)?.len());
    let before = frames()?;
    if drops {
        vms.tell(&vms.guests, DROP)?;
    }
    let after = until_still(&frames)?;
    let speeds = vms.run(LOAD, SECONDS[0])?;
    let mut measured = Measured::default();
    for (when, look) in [("idle", &idle), ("files were read", &read)] {
        measured.put_at("idle_mb", when, mb(look.idle_pages as f64));
        measured.put_at("backed_mb", when, mb(look.backed_pages as f64));
    }
    measured.put("idle_share", idle.share());
    measured.put("read_over_idle", read.idle_pages as f64 / (idle.idle_pages as f64).max(1.0));
    measured.put("given_back_mb", mb(before as f64 - after as f64));
    measured.put("rate", speeds.iter().map(|speed| speed.rate).sum());
    measured.put(OPERATIONS, speeds.iter().map(|speed| speed.operations).sum());
    Ok(measured)
}

/// Waits until the number of a guest's page frames no longer changes, and returns it.
fn until_still(frames: &dyn Fn() -> anyhow::Result<usize>) -> anyhow::Result<usize> {
    let (begin, mut last) = (Instant::now(), frames()?);
    loop {
        pause(LOOK)?;
        let now = frames()?;
        if now.abs_diff(last) <= last / STILL || begin.elapsed() > GIVEN_BACK {
            return Ok(now);
        }
        last = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_share_is_of_backed_pages() {
        assert!((Idle { idle_pages: 3, backed_pages: 12 }.share() - 0.25).abs() < 1e-9);
        assert!(REPORTING.devices.iter().any(|word| word.contains("free-page-reporting=on")));
    }
}
