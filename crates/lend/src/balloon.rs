//! A guest's balloon, through QEMU's machine protocol.
//!
//! QEMU tells the size (`query-balloon`) and the statistics (`guest-stats` of the device) that the guest's driver told
//! it last. Statistics come only while an interval for them is set, which [`Balloon::open`] does.

use anyhow::{Context, bail};
use balance::Claims;
use guest::{Guest, Qmp};
use serde_json::{Value, json};
use std::time::SystemTime;

/// Interval of a guest's statistics, in seconds.
const STATISTICS_EVERY_S: u64 = 2;
/// Age up to which a guest's statistics are used, in seconds: 20 s. A guest that has sent none for longer may need all
/// its memory.
const FRESH_S: u64 = 20;
/// Paths below which QEMU lists devices (QOM): those with an id, and those without.
const DEVICES: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];
/// QEMU's value for a statistic that the guest has not sent.
const UNKNOWN: u64 = u64::MAX;

/// A connection to the balloon of one guest. QEMU serves one client at a time: keep it no longer than needed.
pub struct Balloon {
    qmp: Qmp,
    device: Device,
}

/// The path of a balloon device in its QEMU (QOM); `None` if the device was not found, so that there are no statistics.
/// It stays the same as long as that QEMU runs.
pub(crate) type Device = Option<String>;

/// Statistics of a guest, as QEMU has them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Statistics {
    pub claims: Claims,
    /// Major faults and pages swapped in, since the guest started.
    pub faults: u64,
    /// Time at which the guest told the statistics, by the host's clock, in seconds since 1970.
    pub told_at_s: u64,
}

impl Statistics {
    /// Whether the guest told the statistics within the last 20 s.
    pub fn is_fresh(&self) -> bool {
        let now = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        // The clock may have been set back since.
        now.abs_diff(self.told_at_s) <= FRESH_S
    }
}

impl Balloon {
    /// Connects to a guest; `None` if it has no balloon, or no QMP socket.
    ///
    /// # Errors
    /// QEMU does not answer in time.
    pub fn open(guest: &Guest) -> anyhow::Result<Option<Self>> {
        Self::open_known(guest, None)
    }

    /// Connects to a guest. If its balloon device is `known`, statistics were switched on before: that halves the
    /// number of questions to QEMU.
    pub(crate) fn open_known(guest: &Guest, known: Option<Device>) -> anyhow::Result<Option<Self>> {
        if !guest.facts.qemu.as_ref().is_some_and(|facts| facts.balloon) {
            return Ok(None);
        }
        let Some(qmp) = guest::open_qmp(guest) else { return Ok(None) };
        let qmp = qmp.with_context(|| format!("cannot reach the balloon of {}", guest.id))?;
        let mut balloon = Self { qmp, device: None };
        if let Some(device) = known {
            balloon.device = device;
            return Ok(Some(balloon));
        }
        balloon.device = balloon.find_device()?;
        balloon.ask_for_statistics()?;
        Ok(Some(balloon))
    }

    /// The balloon's device, for [`Self::open_known`].
    pub(crate) fn device(&self) -> Device {
        self.device.clone()
    }

    fn find_device(&mut self) -> anyhow::Result<Device> {
        for place in DEVICES {
            let devices = self.qmp.execute("qom-list", json!({"path": place}))?;
            let is_balloon =
                |device: &&Value| device["type"].as_str().is_some_and(|kind| kind.starts_with("child<virtio-balloon"));
            let found = devices.as_array().into_iter().flatten().find(is_balloon);
            if let Some(name) = found.and_then(|device| device["name"].as_str()) {
                return Ok(Some(format!("{place}/{name}")));
            }
        }
        Ok(None)
    }

    fn ask_for_statistics(&mut self) -> anyhow::Result<()> {
        let Some(path) = self.device.clone() else { return Ok(()) };
        let property = "guest-stats-polling-interval";
        let set = self.qmp.execute("qom-get", json!({"path": path, "property": property}))?;
        if set.as_u64() == Some(0) {
            let value = json!({"path": path, "property": property, "value": STATISTICS_EVERY_S});
            self.qmp.execute("qom-set", value)?;
        }
        Ok(())
    }

    /// The guest's size, by its driver.
    ///
    /// # Errors
    /// QEMU does not answer, or has no balloon.
    pub fn size_bytes(&mut self) -> anyhow::Result<u64> {
        let answer = self.qmp.execute("query-balloon", json!({}))?;
        answer["actual"].as_u64().context("QEMU told no size of the balloon")
    }

    /// Size of plugged-in DIMMs, from which QEMU's balloon takes pages, too. 0 if QEMU does not tell.
    pub(crate) fn plugged_bytes(&mut self) -> u64 {
        let devices = self.qmp.execute("query-memory-devices", json!({})).unwrap_or_default();
        let of_dimm = |device: &Value| (device["type"] == "dimm").then(|| device["data"]["size"].as_u64()).flatten();
        devices.as_array().into_iter().flatten().filter_map(of_dimm).fold(0, u64::saturating_add)
    }

    /// Tells the guest to have this size.
    ///
    /// # Errors
    /// QEMU does not answer, or refuses.
    pub fn set(&mut self, size_bytes: u64) -> anyhow::Result<()> {
        if size_bytes == 0 {
            bail!("a guest without memory is not meant");
        }
        self.qmp.execute("balloon", json!({"value": size_bytes})).map(drop).context("cannot set a balloon")
    }

    /// The guest's statistics; `None` if it told none, or none lately.
    pub(crate) fn statistics(&mut self) -> Option<Statistics> {
        let path = self.device.clone()?;
        let answer = self.qmp.execute("qom-get", json!({"path": path, "property": "guest-stats"})).ok()?;
        parse(&answer)
    }
}

pub(crate) fn parse(answer: &Value) -> Option<Statistics> {
    let told_at_s = answer["last-update"].as_u64().filter(|at| *at > 0)?;
    let stat = |name: &str| answer["stats"][name].as_u64().filter(|value| *value != UNKNOWN);
    let total_bytes = stat("stat-total-memory")?;
    let free_bytes = stat("stat-free-memory")?;
    let available_bytes = stat("stat-available-memory");
    // Linux counts shared memory and tmpfs as caches, which a guest without swap can not free. They are not available.
    let most_freed = available_bytes.map_or(u64::MAX, |available| available.saturating_sub(free_bytes));
    let claims = Claims {
        total_bytes,
        free_bytes,
        available_bytes: available_bytes.unwrap_or(free_bytes),
        cache_bytes: stat("stat-disk-caches").unwrap_or(0).min(most_freed),
        faults_per_s: 0.0,
        stalls: stat("stat-alloc-stalls"),
        oom_kills: stat("stat-oom-kills"),
    };
    let faults = stat("stat-major-faults").unwrap_or(0).saturating_add(stat("stat-swap-in").unwrap_or(0) >> 12);
    Some(Statistics { claims, faults, told_at_s })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_qemu::FakeQemu;

    #[test]
    fn statistics_are_read_and_those_never_told_are_none() {
        let told = json!({"last-update": 7, "stats": {
            "stat-total-memory": 500, "stat-free-memory": 100, "stat-available-memory": u64::MAX,
            "stat-disk-caches": 30, "stat-major-faults": 5, "stat-swap-in": 8192, "stat-minor-faults": 99,
        }});
        let is = parse(&told).unwrap();
        assert_eq!((is.claims.total_bytes, is.claims.available_bytes, is.claims.cache_bytes), (500, 100, 30));
        assert_eq!((is.faults, is.told_at_s, is.claims.oom_kills), (7, 7, None));
        let with_tmpfs = json!({"last-update": 7, "stats": {
            "stat-total-memory": 500, "stat-free-memory": 100, "stat-available-memory": 120, "stat-disk-caches": 90,
        }});
        assert_eq!(parse(&with_tmpfs).unwrap().claims.cache_bytes, 20, "the rest of it cannot be freed");
        assert_eq!(parse(&json!({"last-update": 0, "stats": {"stat-total-memory": 1, "stat-free-memory": 1}})), None);
        assert_eq!(parse(&json!({"last-update": 7, "stats": {"stat-total-memory": u64::MAX}})), None);
    }

    #[test]
    fn guest_is_never_told_to_have_no_memory() {
        let qemu = FakeQemu::start("a", 256, std::path::Path::new("/nonexistent"));
        let mut balloon = Balloon::open(&qemu.guest).unwrap().unwrap();
        assert!(balloon.set(0).is_err());
        balloon.set(7).unwrap();
        assert_eq!(qemu.state().told.iter().map(|told| told.size_bytes).collect::<Vec<_>>(), [7]);
    }

    #[test]
    fn statistics_are_fresh_for_20_s() {
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
        let is_fresh = |told_at_s| Statistics { told_at_s, ..Statistics::default() }.is_fresh();
        assert_eq!([now - 18, now - 22, now + 22].map(is_fresh), [true, false, false]);
    }
}
